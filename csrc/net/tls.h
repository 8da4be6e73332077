// TLS 1.3 (RFC 8446) for a Stream, by OpenSSL 3. Both ends have the same key, so there are no certificates. OpenSSL is opened
// when the first link with a key is made. See "Encryption" in docs/design/0001-call.md.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "base/dynlib.h"
#include "net/stream.h"

struct bio_st;
struct ssl_st;
struct ssl_session_st;

namespace mscomm {

// One end of an encrypted link. OpenSSL only encrypts and decrypts: it reads from inbox_ and writes to outbox_, and this class
// moves their bytes with recv() and send(). All functions that move bytes do so without waiting, and throw Stream::Broken if the
// link has ended or the peer's bytes are wrong.
class Tls {
 public:
  // fd: the socket, which the caller owns. Throws BackendUnavailable if OpenSSL 3 cannot be opened.
  Tls(int fd, const Secret& secret);
  ~Tls();
  Tls(const Tls&) = delete;
  Tls& operator=(const Tls&) = delete;

  // Moves the handshake on. Returns whether it is complete.
  bool shake_hands();
  bool established() const { return established_; }
  // Returns the number of bytes that the kernel has accepted in encrypted form. The first bytes that it has not accepted may
  // already be encrypted, and partly sent. So the next call must begin with the same bytes.
  size_t send(const void* data, size_t bytes);
  size_t receive(void* data, size_t bytes);
  // Returns whether receive() may have something to return that the socket does not announce: decrypted bytes, bytes that were
  // read from the socket together with earlier ones, or an error.
  bool pending() const;
  // Returns whether the kernel has accepted all encrypted bytes.
  bool flushed() const { return outbox_begin_ == outbox_end_; }
  // Tells the peer that nothing more will come. Returns whether the kernel has accepted this; if not, call close() again.
  bool close();

 private:
  friend struct OpenSsl;
  // The functions that OpenSSL calls.
  static int write(bio_st* bio, const char* data, int bytes);
  static int read(bio_st* bio, char* data, int bytes);
  static int find_key(ssl_st* ssl, const unsigned char* identity, size_t length, ssl_session_st** session);

  void encrypt(const char* data, size_t bytes);
  bool flush();
  bool fill();
  Stream::Broken fail(const std::string& why);

  int fd_;
  ssl_st* ssl_ = nullptr;
  ssl_session_st* session_ = nullptr;  // holds the key until the handshake is complete
  bool established_ = false;
  bool closing_ = false;
  std::string failure_;  // why this link has failed, or ""
  size_t records_ = 0;   // the number of records that were encrypted with the current key
  // The number of plain bytes of the current batch: bytes that are encrypted, but not yet reported to the caller of send().
  size_t encrypted_ = 0;
  // Encrypted bytes: those that are not yet sent, and those that are received but not yet decrypted.
  std::unique_ptr<char[]> outbox_, inbox_;
  size_t outbox_begin_ = 0, outbox_end_ = 0, inbox_begin_ = 0, inbox_end_ = 0;
};

// Opens OpenSSL, and returns its version as text: "OpenSSL 3.0.19 27 Jan 2026". Throws BackendUnavailable if it cannot be opened.
std::string tls_version();

// The same library, for other functions of it. libssl needs libcrypto, so both of their functions are found.
const Dynlib& openssl_library();

}  // namespace mscomm
