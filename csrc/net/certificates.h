// Reads and checks the certificate of one end of a TLS link, with the OpenSSL that tls.cc opens.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace mscomm {

// The contents of the files, and what the certificate must be for.
struct CertificateFiles {
  std::string bundle;                  // PKCS#12
  std::string password;                // of the bundle; wiped at the end
  std::string authorities;             // PEM
  std::optional<std::string> revoked;  // a revocation list in PEM
  bool server;                         // whether the certificate must be for a server, else for a client
  std::string uri;                     // if the certificate has a URI that begins with mscomm://, this one must be among them

  ~CertificateFiles();
};

struct CheckedCertificates {
  std::string own;      // the private key, encrypted with key_password, its certificate, and those between it and the CA, in PEM
  std::string trusted;  // the authorities and the revocation list, in PEM
  int64_t expires;      // seconds since 1970
};

// Returns nothing if a file is not in this form or anything about it is wrong. The caller then finds out what, with the Python
// package cryptography, which reads more forms, but takes 35 ms of CPU time to import. Throws BackendUnavailable without
// OpenSSL 3.
std::optional<CheckedCertificates> check_certificates(const CertificateFiles& files, const std::string& key_password);

}  // namespace mscomm
