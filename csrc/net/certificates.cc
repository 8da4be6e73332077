#include "net/certificates.h"

#include <cstring>
#include <ctime>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "base/dynlib.h"
#include "net/tls.h"

namespace mscomm {

namespace {

// Constants of openssl/x509v3.h, openssl/x509_vfy.h, openssl/bio.h and openssl/obj_mac.h
constexpr uint32_t EXFLAG_CA = 0x10, EXFLAG_INVALID = 0x80;
constexpr uint32_t XKU_SSL_SERVER = 1, XKU_SSL_CLIENT = 2;
constexpr int X509_PURPOSE_SSL_CLIENT = 1, X509_PURPOSE_SSL_SERVER = 2;
constexpr unsigned long X509_V_FLAG_CRL_CHECK = 0x4, X509_V_FLAG_PARTIAL_CHAIN = 0x80000;
constexpr int BIO_CTRL_INFO = 3, NID_subject_alt_name = 85, GEN_URI = 6;

struct Bio;
struct BioMethod;
struct Certificate;
struct Chain;  // a STACK_OF(X509)
struct Cipher;
struct Crl;
struct GeneralName;
struct GeneralNames;  // a STACK_OF(GENERAL_NAME)
struct Key;
struct Name;
struct Pkcs12;
struct Store;
struct StoreContext;
struct Text;  // an ASN1_STRING
struct Time;

// Functions of OpenSSL.
struct Functions {
  const Dynlib& library = openssl_library();
  using AskPassword = int(char*, int, int, void*);

  void (*clear_errors)() = library.need("ERR_clear_error");
  Bio* (*bio_reads)(const void*, int) = library.need("BIO_new_mem_buf");
  Bio* (*bio_new)(const BioMethod*) = library.need("BIO_new");
  const BioMethod* (*bio_in_memory)() = library.need("BIO_s_mem");
  long (*bio_ctrl)(Bio*, int what, long, void*) = library.need("BIO_ctrl");
  int (*bio_free)(Bio*) = library.need("BIO_free");
  int (*count)(const void* stack) = library.need("OPENSSL_sk_num");
  void* (*at)(const void* stack, int) = library.need("OPENSSL_sk_value");
  void (*chain_free)(Chain*, void (*)(Certificate*)) = library.need("OPENSSL_sk_pop_free");

  Certificate* (*read)(Bio*, Certificate**, AskPassword*, void*) = library.need("PEM_read_bio_X509");
  int (*write)(Bio*, const Certificate*) = library.need("PEM_write_bio_X509");
  void (*certificate_free)(Certificate*) = library.need("X509_free");
  Key* (*public_key)(const Certificate*) = library.need("X509_get0_pubkey");
  int (*fits)(const Certificate*, const Key*) = library.need("X509_check_private_key");
  Name* (*subject)(const Certificate*) = library.need("X509_get_subject_name");
  uint32_t (*flags)(Certificate*) = library.need("X509_get_extension_flags");
  uint32_t (*usage)(Certificate*) = library.need("X509_get_extended_key_usage");
  const Time* (*not_before)(const Certificate*) = library.need("X509_get0_notBefore");
  const Time* (*not_after)(const Certificate*) = library.need("X509_get0_notAfter");
  int (*compare_with_now)(const Time*) = library.need("X509_cmp_current_time");
  int (*to_tm)(const Time*, std::tm*) = library.need("ASN1_TIME_to_tm");
  GeneralNames* (*extension)(const Certificate*, int nid, int* critical, int*) = library.need("X509_get_ext_d2i");
  void (*names_free)(GeneralNames*) = library.need("GENERAL_NAMES_free");
  void* (*value)(const GeneralName*, int* kind) = library.need("GENERAL_NAME_get0_value");
  const unsigned char* (*data)(const Text*) = library.need("ASN1_STRING_get0_data");
  int (*length)(const Text*) = library.need("ASN1_STRING_length");

  Crl* (*crl_read)(Bio*, Crl**, AskPassword*, void*) = library.need("PEM_read_bio_X509_CRL");
  int (*crl_write)(Bio*, const Crl*) = library.need("PEM_write_bio_X509_CRL");
  void (*crl_free)(Crl*) = library.need("X509_CRL_free");
  Name* (*crl_issuer)(const Crl*) = library.need("X509_CRL_get_issuer");
  int (*crl_verify)(Crl*, Key*) = library.need("X509_CRL_verify");
  int (*compare)(const Name*, const Name*) = library.need("X509_NAME_cmp");

  Pkcs12* (*pkcs12_read)(Bio*, Pkcs12**) = library.need("d2i_PKCS12_bio");
  int (*pkcs12_parse)(Pkcs12*, const char*, Key**, Certificate**, Chain**) = library.need("PKCS12_parse");
  void (*pkcs12_free)(Pkcs12*) = library.need("PKCS12_free");
  const Cipher* (*aes)() = library.need("EVP_aes_256_cbc");
  int (*key_write)(Bio*, const Key*, const Cipher*, const char*, int, AskPassword*,
                   void*) = library.need("PEM_write_bio_PKCS8PrivateKey");
  void (*key_free)(Key*) = library.need("EVP_PKEY_free");

  Store* (*store_new)() = library.need("X509_STORE_new");
  void (*store_free)(Store*) = library.need("X509_STORE_free");
  int (*store_add)(Store*, Certificate*) = library.need("X509_STORE_add_cert");
  int (*store_add_crl)(Store*, Crl*) = library.need("X509_STORE_add_crl");
  StoreContext* (*context_new)() = library.need("X509_STORE_CTX_new");
  void (*context_free)(StoreContext*) = library.need("X509_STORE_CTX_free");
  int (*context_init)(StoreContext*, Store*, Certificate*, Chain*) = library.need("X509_STORE_CTX_init");
  int (*context_set_purpose)(StoreContext*, int) = library.need("X509_STORE_CTX_set_purpose");
  void (*context_set_flags)(StoreContext*, unsigned long) = library.need("X509_STORE_CTX_set_flags");
  int (*verify)(StoreContext*) = library.need("X509_verify_cert");
};

const Functions& functions() {
  static const Functions found;
  return found;
}

template <typename T>
auto owned(T* made, void (*free)(T*)) {
  return std::unique_ptr<T, void (*)(T*)>(made, free);
}

auto owned(Bio* made) {
  return owned<Bio>(made, [](Bio* bio) { functions().bio_free(bio); });
}

auto reading(const std::string& content) {
  auto bio = owned(functions().bio_reads(content.data(), static_cast<int>(content.size())));
  if (!bio) throw std::bad_alloc();
  return bio;
}

// Makes PEM with write(bio), which returns whether all went well. Returns "" if not.
template <typename Write>
std::string pem(const Write& write) {
  const Functions& lib = functions();
  const auto bio = owned(lib.bio_new(lib.bio_in_memory()));
  if (!bio || !write(bio.get())) return "";
  char* begin = nullptr;
  const long bytes = lib.bio_ctrl(bio.get(), BIO_CTRL_INFO, 0, &begin);
  return bytes > 0 ? std::string(begin, static_cast<size_t>(bytes)) : "";
}

// Without a password, OpenSSL would ask on the terminal for the password of an encrypted part of a PEM file.
void* no_password() { return const_cast<char*>(""); }

size_t blocks(const std::string& content) {
  size_t found = 0;
  for (size_t at = 0; (at = content.find("-----BEGIN ", at)) != std::string::npos; ++at) ++found;
  return found;
}

using Certificates = std::vector<std::unique_ptr<Certificate, void (*)(Certificate*)>>;

// Returns the authorities, or none if the file has something else, too.
Certificates read_authorities(const std::string& content) {
  const Functions& lib = functions();
  Certificates found;
  const auto bio = reading(content);
  while (true) {
    auto next = owned(lib.read(bio.get(), nullptr, nullptr, no_password()), lib.certificate_free);
    if (!next) break;
    const uint32_t flags = lib.flags(next.get());
    if (!(flags & EXFLAG_CA) || (flags & EXFLAG_INVALID) || lib.compare_with_now(lib.not_before(next.get())) >= 0 ||
        lib.compare_with_now(lib.not_after(next.get())) <= 0)
      return {};
    found.push_back(std::move(next));
  }
  if (found.size() != blocks(content)) found.clear();
  return found;
}

bool is_signed(Crl* crl, const Certificates& authorities) {
  const Functions& lib = functions();
  for (const auto& authority : authorities)
    if (lib.compare(lib.crl_issuer(crl), lib.subject(authority.get())) == 0 &&
        lib.crl_verify(crl, lib.public_key(authority.get())) == 1)
      return true;
  return false;
}

bool is_for(const Certificate* certificate, const std::string& uri) {
  const Functions& lib = functions();
  int critical = 0;
  const auto names = owned(lib.extension(certificate, NID_subject_alt_name, &critical, nullptr), lib.names_free);
  if (!names) return critical == -1;  // there is no such extension
  bool bound = false, fits = false;
  for (int i = 0; i < lib.count(names.get()); ++i) {
    int kind = 0;
    const void* const value = lib.value(static_cast<const GeneralName*>(lib.at(names.get(), i)), &kind);
    if (kind != GEN_URI) continue;
    const auto* const text = static_cast<const Text*>(value);
    const std::string found(reinterpret_cast<const char*>(lib.data(text)), static_cast<size_t>(lib.length(text)));
    bound = bound || found.starts_with("mscomm://");
    fits = fits || found == uri;
  }
  return fits || !bound;
}

}  // namespace

CertificateFiles::~CertificateFiles() { explicit_bzero(password.data(), password.size()); }

std::optional<CheckedCertificates> check_certificates(const CertificateFiles& files, const std::string& key_password) {
  const Functions& lib = functions();
  // Python's ssl must not find our errors in OpenSSL's queue.
  const std::unique_ptr<const Functions, void (*)(const Functions*)> clear(&lib,
                                                                           [](const Functions* all) { all->clear_errors(); });

  const Certificates authorities = read_authorities(files.authorities);
  if (authorities.empty()) return {};
  const auto crl =
      owned(files.revoked ? lib.crl_read(reading(*files.revoked).get(), nullptr, nullptr, no_password()) : nullptr, lib.crl_free);
  if (files.revoked && (!crl || blocks(*files.revoked) != 1 || !is_signed(crl.get(), authorities))) return {};

  const auto pkcs12 = owned(lib.pkcs12_read(reading(files.bundle).get(), nullptr), lib.pkcs12_free);
  Key* key_found = nullptr;
  Certificate* own_found = nullptr;
  Chain* chain_found = nullptr;
  if (!pkcs12 || lib.pkcs12_parse(pkcs12.get(), files.password.c_str(), &key_found, &own_found, &chain_found) != 1) return {};
  const auto key = owned(key_found, lib.key_free);
  const auto own = owned(own_found, lib.certificate_free);
  const auto chain = owned<Chain>(chain_found, [](Chain* all) { functions().chain_free(all, functions().certificate_free); });
  if (!key || !own || lib.fits(own.get(), key.get()) != 1) return {};
  if (!(lib.usage(own.get()) & (files.server ? XKU_SSL_SERVER : XKU_SSL_CLIENT))) return {};
  if ((lib.flags(own.get()) & EXFLAG_INVALID) || !is_for(own.get(), files.uri)) return {};

  // The rest is what the other end will check, too: the signatures and times, and whether the certificate is revoked.
  const auto store = owned(lib.store_new(), lib.store_free);
  const auto context = owned(lib.context_new(), lib.context_free);
  if (!store || !context) return {};
  for (const auto& authority : authorities)
    if (lib.store_add(store.get(), authority.get()) != 1) return {};
  if (crl && lib.store_add_crl(store.get(), crl.get()) != 1) return {};
  if (lib.context_init(context.get(), store.get(), own.get(), chain.get()) != 1) return {};
  lib.context_set_flags(context.get(), X509_V_FLAG_PARTIAL_CHAIN | (crl ? X509_V_FLAG_CRL_CHECK : 0));
  if (lib.context_set_purpose(context.get(), files.server ? X509_PURPOSE_SSL_SERVER : X509_PURPOSE_SSL_CLIENT) != 1) return {};
  if (lib.verify(context.get()) != 1) return {};

  std::tm expires{};
  if (lib.to_tm(lib.not_after(own.get()), &expires) != 1) return {};
  CheckedCertificates made;
  made.expires = timegm(&expires);
  made.own = pem([&](Bio* bio) {
    const int bytes = static_cast<int>(key_password.size());
    bool good = lib.key_write(bio, key.get(), lib.aes(), key_password.data(), bytes, nullptr, nullptr) == 1;
    good = good && lib.write(bio, own.get()) == 1;
    for (int i = 0; i < lib.count(chain.get()); ++i)
      good = good && lib.write(bio, static_cast<const Certificate*>(lib.at(chain.get(), i))) == 1;
    return good;
  });
  made.trusted = pem([&](Bio* bio) {
    bool good = !crl || lib.crl_write(bio, crl.get()) == 1;
    for (const auto& authority : authorities) good = good && lib.write(bio, authority.get()) == 1;
    return good;
  });
  if (made.own.empty() || made.trusted.empty()) return {};
  return made;
}

}  // namespace mscomm
