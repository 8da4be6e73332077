#include "net/tls.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "base/error.h"

namespace mscomm {

namespace {

constexpr size_t record_bytes = 16 << 10;  // the largest plaintext of a TLS record
// A batch is the largest number of bytes that are encrypted before they are sent. A batch of several records takes fewer system
// calls; a batch of 128 KiB is as long as a peer's turn (see mesh.cc).
constexpr size_t batch_bytes = 8 * record_bytes;
// A record is at most 22 bytes longer than its plaintext. The outbox also has room for a handshake or a goodbye.
constexpr size_t outbox_bytes = batch_bytes + (8 << 10), inbox_bytes = 64 << 10;
// After this many records, the sender changes its key. RFC 8446, section 5.5, allows 2^24.5 records with one key.
constexpr size_t records_per_key = 1 << 16;

// The name of the key in the handshake. There is only one key, so the name only has to be the same on both ends.
constexpr char identity[] = "mscomm";

// Constants of openssl/ssl.h, openssl/bio.h and openssl/crypto.h
constexpr int TLS1_3_VERSION = 0x0304;
constexpr int SSL_CTRL_SET_MIN_PROTO_VERSION = 123, SSL_CTRL_SET_MAX_PROTO_VERSION = 124;
constexpr int SSL_VERIFY_PEER = 1;
constexpr int SSL_ERROR_WANT_READ = 2, SSL_ERROR_ZERO_RETURN = 6;
constexpr int SSL_KEY_UPDATE_NOT_REQUESTED = 0;
constexpr int BIO_TYPE_SOURCE_SINK = 0x0400, BIO_CTRL_FLUSH = 11;
constexpr int BIO_FLAGS_READ = 1, BIO_FLAGS_WRITE = 2, BIO_FLAGS_SHOULD_RETRY = 8;
constexpr int OPENSSL_VERSION = 0;
constexpr uint64_t OPENSSL_INIT_NO_ATEXIT = 0x00080000;

}  // namespace

// OpenSSL's functions, which have their names in OpenSSL without the prefix SSL_, and the two contexts that all links of the
// process share.
struct OpenSsl {
  using Ssl = ssl_st;
  using Session = ssl_session_st;
  using Bio = bio_st;
  struct Context;
  struct Method;
  struct BioMethod;
  struct Cipher;
  using UseKey = int(Ssl*, const void* hash, const unsigned char** identity, size_t* length, Session**);
  using FindKey = int(Ssl*, const unsigned char* identity, size_t length, Session**);

  Dynlib library;
  int (*init)(uint64_t options, const void* settings) = library.need("OPENSSL_init_ssl");
  const char* (*version)(int what) = library.need("OpenSSL_version");
  void (*clear_errors)() = library.need("ERR_clear_error");
  unsigned long (*get_error)() = library.need("ERR_get_error");
  const char* (*reason)(unsigned long error) = library.need("ERR_reason_error_string");

  int (*bio_index)() = library.need("BIO_get_new_index");
  BioMethod* (*bio_method)(int type, const char* name) = library.need("BIO_meth_new");
  int (*bio_set_write)(BioMethod*, int (*)(Bio*, const char*, int)) = library.need("BIO_meth_set_write");
  int (*bio_set_read)(BioMethod*, int (*)(Bio*, char*, int)) = library.need("BIO_meth_set_read");
  int (*bio_set_ctrl)(BioMethod*, long (*)(Bio*, int, long, void*)) = library.need("BIO_meth_set_ctrl");
  Bio* (*bio_new)(const BioMethod*) = library.need("BIO_new");
  void (*bio_set_init)(Bio*, int) = library.need("BIO_set_init");
  void (*bio_set_data)(Bio*, void*) = library.need("BIO_set_data");
  void* (*bio_get_data)(Bio*) = library.need("BIO_get_data");
  void (*bio_set_flags)(Bio*, int) = library.need("BIO_set_flags");
  void (*bio_clear_flags)(Bio*, int) = library.need("BIO_clear_flags");

  const Method* (*method)() = library.need("TLS_method");
  Context* (*ctx_new)(const Method*) = library.need("SSL_CTX_new");
  long (*ctx_ctrl)(Context*, int what, long, void*) = library.need("SSL_CTX_ctrl");
  int (*ctx_set_ciphersuites)(Context*, const char*) = library.need("SSL_CTX_set_ciphersuites");
  int (*ctx_set_num_tickets)(Context*, size_t) = library.need("SSL_CTX_set_num_tickets");
  void (*ctx_set_verify)(Context*, int mode, int (*)(int, void*)) = library.need("SSL_CTX_set_verify");
  void (*ctx_set_use_key)(Context*, UseKey*) = library.need("SSL_CTX_set_psk_use_session_callback");
  void (*ctx_set_find_key)(Context*, FindKey*) = library.need("SSL_CTX_set_psk_find_session_callback");

  Ssl* (*create)(Context*) = library.need("SSL_new");
  void (*free)(Ssl*) = library.need("SSL_free");
  void (*set_bio)(Ssl*, Bio* reads, Bio* writes) = library.need("SSL_set_bio");
  int (*set_ex_data)(Ssl*, int index, void*) = library.need("SSL_set_ex_data");
  void* (*get_ex_data)(const Ssl*, int index) = library.need("SSL_get_ex_data");
  void (*set_connect_state)(Ssl*) = library.need("SSL_set_connect_state");
  void (*set_accept_state)(Ssl*) = library.need("SSL_set_accept_state");
  int (*do_handshake)(Ssl*) = library.need("SSL_do_handshake");
  int (*session_reused)(const Ssl*) = library.need("SSL_session_reused");
  int (*error)(const Ssl*, int result) = library.need("SSL_get_error");
  int (*read)(Ssl*, void*, size_t, size_t* done) = library.need("SSL_read_ex");
  int (*write)(Ssl*, const void*, size_t, size_t* done) = library.need("SSL_write_ex");
  int (*pending)(const Ssl*) = library.need("SSL_pending");
  int (*key_update)(Ssl*, int) = library.need("SSL_key_update");
  int (*shutdown)(Ssl*) = library.need("SSL_shutdown");

  const Cipher* (*cipher_find)(Ssl*, const unsigned char* id) = library.need("SSL_CIPHER_find");
  Session* (*session_new)() = library.need("SSL_SESSION_new");
  void (*session_free)(Session*) = library.need("SSL_SESSION_free");
  int (*session_up_ref)(Session*) = library.need("SSL_SESSION_up_ref");
  int (*session_set_key)(Session*, const unsigned char*, size_t) = library.need("SSL_SESSION_set1_master_key");
  int (*session_set_cipher)(Session*, const Cipher*) = library.need("SSL_SESSION_set_cipher");
  int (*session_set_version)(Session*, int) = library.need("SSL_SESSION_set_protocol_version");

  BioMethod* boxes = nullptr;  // the kind of BIO that reads from the inbox and writes to the outbox of a Tls
  Context *client = nullptr, *server = nullptr;

  explicit OpenSsl(Dynlib opened) : library(std::move(opened)) {
    // Threads may still be in OpenSSL when the process exits, so OpenSSL should free nothing then. This has no effect if Python's
    // ssl module has used OpenSSL before. So release(), which runs at exit, ends all links first.
    init(OPENSSL_INIT_NO_ATEXIT, nullptr);
    boxes = need(bio_method(bio_index() | BIO_TYPE_SOURCE_SINK, "mscomm"));
    bio_set_write(boxes, &Tls::write);
    bio_set_read(boxes, &Tls::read);
    bio_set_ctrl(boxes, [](Bio*, int what, long, void*) -> long { return what == BIO_CTRL_FLUSH; });
    // Without the key, a handshake would need a certificate. The server has none, and the client trusts none.
    client = context();
    ctx_set_verify(client, SSL_VERIFY_PEER, nullptr);
    ctx_set_use_key(client, [](Ssl* ssl, const void*, const unsigned char** name, size_t* length, Session** session) {
      *name = reinterpret_cast<const unsigned char*>(identity);
      *length = sizeof identity - 1;
      return Tls::find_key(ssl, *name, *length, session);
    });
    server = context();
    ctx_set_find_key(server, &Tls::find_key);
  }

  template <typename T>
  T* need(T* made) const {
    if (!made) require(false);
    return made;
  }
  void require(bool good) const {
    if (good) return;
    const char* why = reason(get_error());
    throw Error("Error", library.path() + " (" + version(OPENSSL_VERSION) + "): cannot set up TLS: " + (why ? why : "no reason"));
  }

 private:
  Context* context() const {
    Context* const made = need(ctx_new(method()));
    require(ctx_ctrl(made, SSL_CTRL_SET_MIN_PROTO_VERSION, TLS1_3_VERSION, nullptr) == 1);
    require(ctx_ctrl(made, SSL_CTRL_SET_MAX_PROTO_VERSION, TLS1_3_VERSION, nullptr) == 1);
    // A pre-shared key belongs to one hash function (RFC 8446, section 4.2.11). Ours is SHA-256.
    require(ctx_set_ciphersuites(made, "TLS_AES_128_GCM_SHA256") == 1);
    require(ctx_set_num_tickets(made, 0) == 1);
    return made;
  }
};

namespace {

// The places where OpenSSL may be. A process must not load two builds of it. So the first choice is the one that Python's ssl
// module has loaded or will load: an installation such as Conda's has its own in the folder lib beside the interpreter's bin.
std::vector<Candidate> places() {
  const char* const name = "libssl.so.3";
  std::error_code error;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", error);
  const auto beside = program.parent_path().parent_path() / "lib" / name;
  std::vector<Candidate> found{{"already loaded", name, Candidate::Kind::loaded}};
  if (!error && std::filesystem::exists(beside, error)) found.push_back({"the interpreter's installation", beside.string()});
  found.push_back({"the loader's path", name});
  return found;
}

// Opened once, and never freed: see OPENSSL_INIT_NO_ATEXIT.
const OpenSsl& openssl() {
  static const OpenSsl* const opened = [] {
    try {
      return new OpenSsl(Dynlib("OpenSSL 3", places()));
    } catch (const Error& error) {
      if (error.kind != "BackendUnavailable") throw;
      throw Error(error.kind, std::string("TLS: ") + error.what() +
                                  ". Install OpenSSL 3 (package libssl3 on Debian and Ubuntu, openssl-libs on Fedora)");
    }
  }();
  return *opened;
}

}  // namespace

std::string tls_version() { return openssl().version(OPENSSL_VERSION); }

const Dynlib& openssl_library() { return openssl().library; }

Tls::Tls(int fd, const Secret& secret) : fd_(fd), outbox_(new char[outbox_bytes]), inbox_(new char[inbox_bytes]) {
  const OpenSsl& lib = openssl();
  constexpr unsigned char aes_128_gcm_sha256[2] = {0x13, 0x01};
  try {
    lib.clear_errors();
    ssl_ = lib.need(lib.create(secret.connects ? lib.client : lib.server));
    session_ = lib.need(lib.session_new());
    const auto* const cipher = lib.need(lib.cipher_find(ssl_, aes_128_gcm_sha256));
    lib.require(lib.session_set_key(session_, secret.key.data(), secret.key.size()) == 1 &&
                lib.session_set_cipher(session_, cipher) == 1 && lib.session_set_version(session_, TLS1_3_VERSION) == 1 &&
                lib.set_ex_data(ssl_, 0, session_) == 1);
    bio_st* const bio = lib.need(lib.bio_new(lib.boxes));
    lib.bio_set_data(bio, this);
    lib.bio_set_init(bio, 1);
    lib.set_bio(ssl_, bio, bio);
    (secret.connects ? lib.set_connect_state : lib.set_accept_state)(ssl_);
  } catch (...) {
    lib.free(ssl_);
    lib.session_free(session_);
    throw;
  }
}

Tls::~Tls() {
  openssl().free(ssl_);
  openssl().session_free(session_);
}

int Tls::write(bio_st* bio, const char* data, int bytes) {
  const OpenSsl& lib = openssl();
  Tls& tls = *static_cast<Tls*>(lib.bio_get_data(bio));
  lib.bio_clear_flags(bio, BIO_FLAGS_READ | BIO_FLAGS_WRITE | BIO_FLAGS_SHOULD_RETRY);
  if (static_cast<size_t>(bytes) > outbox_bytes - tls.outbox_end_) {
    lib.bio_set_flags(bio, BIO_FLAGS_WRITE | BIO_FLAGS_SHOULD_RETRY);
    return -1;
  }
  std::memcpy(tls.outbox_.get() + tls.outbox_end_, data, static_cast<size_t>(bytes));
  tls.outbox_end_ += static_cast<size_t>(bytes);
  return bytes;
}

int Tls::read(bio_st* bio, char* data, int bytes) {
  const OpenSsl& lib = openssl();
  Tls& tls = *static_cast<Tls*>(lib.bio_get_data(bio));
  lib.bio_clear_flags(bio, BIO_FLAGS_READ | BIO_FLAGS_WRITE | BIO_FLAGS_SHOULD_RETRY);
  const size_t moved = std::min(static_cast<size_t>(bytes), tls.inbox_end_ - tls.inbox_begin_);
  if (moved == 0) {
    lib.bio_set_flags(bio, BIO_FLAGS_READ | BIO_FLAGS_SHOULD_RETRY);
    return -1;
  }
  std::memcpy(data, tls.inbox_.get() + tls.inbox_begin_, moved);
  tls.inbox_begin_ += moved;
  return static_cast<int>(moved);
}

// Gives OpenSSL the key, of which OpenSSL then owns a reference. OpenSSL may ask more than once.
int Tls::find_key(ssl_st* ssl, const unsigned char* name, size_t length, ssl_session_st** session) {
  const OpenSsl& lib = openssl();
  auto* const key = static_cast<ssl_session_st*>(lib.get_ex_data(ssl, 0));
  const bool known = key && length == sizeof identity - 1 && std::memcmp(name, identity, length) == 0;
  *session = known && lib.session_up_ref(key) ? key : nullptr;
  return *session != nullptr;  // 0 ends the handshake
}

bool Tls::shake_hands() {
  if (!failure_.empty()) throw Stream::Broken{failure_};
  if (established_) return true;
  const OpenSsl& lib = openssl();
  while (true) {
    lib.clear_errors();
    const int result = lib.do_handshake(ssl_);
    const int error = result == 1 ? 0 : lib.error(ssl_, result);
    if (result == 1) {
      // OpenSSL says "reused" for a key that both ends had before the handshake. Nothing else may be trusted.
      if (!lib.session_reused(ssl_)) throw fail("the other side did not use the key");
      established_ = flush();
      if (!established_) return false;
      lib.set_ex_data(ssl_, 0, nullptr);
      lib.session_free(std::exchange(session_, nullptr));
      return true;
    }
    if (error != SSL_ERROR_WANT_READ) throw fail("the handshake failed");
    try {
      flush();
    } catch (const Stream::Broken&) {
      // The peer may have closed the link, but what it sent before says why.
    }
    if (!fill()) return false;
  }
}

size_t Tls::send(const void* data, size_t bytes) {
  if (!shake_hands()) return 0;
  size_t moved = 0;
  while (moved < bytes) {
    if (encrypted_ == 0) encrypt(static_cast<const char*>(data) + moved, std::min(bytes - moved, batch_bytes));
    if (encrypted_ > bytes - moved) throw Error("RuntimeError", "TLS: send() must repeat the bytes that were not sent before");
    if (!flush()) break;
    moved += std::exchange(encrypted_, 0);
  }
  return moved;
}

// Encrypts one batch into the empty outbox. The outbox has room for all of its records, so OpenSSL encrypts the whole batch.
void Tls::encrypt(const char* data, size_t bytes) {
  if (!flush()) return;  // the outbox still holds the end of a handshake
  const OpenSsl& lib = openssl();
  lib.clear_errors();
  records_ += (bytes + record_bytes - 1) / record_bytes;
  if (records_ > records_per_key) {
    if (lib.key_update(ssl_, SSL_KEY_UPDATE_NOT_REQUESTED) != 1) throw fail("cannot change the key");
    records_ = 0;
  }
  if (lib.write(ssl_, data, bytes, &encrypted_) != 1) throw fail("cannot encrypt");
}

size_t Tls::receive(void* data, size_t bytes) {
  if (!shake_hands()) return 0;
  const OpenSsl& lib = openssl();
  // Clear errors once, and not for each record, because this takes 0.1 us. A read that succeeds leaves none.
  lib.clear_errors();
  size_t moved = 0;
  while (moved < bytes) {
    size_t got = 0;
    const int result = lib.read(ssl_, static_cast<char*>(data) + moved, bytes - moved, &got);
    moved += got;
    if (result == 1) continue;
    const int error = lib.error(ssl_, result);
    if (error == SSL_ERROR_WANT_READ) {
      if (moved > 0 || !fill()) return moved;
    } else if (error == SSL_ERROR_ZERO_RETURN) {
      if (moved > 0) return moved;  // OpenSSL will say so again
      throw Stream::Broken{"closed by the other side", 0, true};
    } else {
      const Stream::Broken broken = fail("cannot decrypt");
      if (moved > 0) return moved;  // these bytes were good; the next call throws
      throw broken;
    }
  }
  return moved;
}

bool Tls::pending() const {
  return !failure_.empty() || (established_ && (inbox_begin_ < inbox_end_ || openssl().pending(ssl_) > 0));
}

bool Tls::close() {
  const OpenSsl& lib = openssl();
  if (established_ && failure_.empty() && !std::exchange(closing_, true)) {
    lib.clear_errors();
    lib.shutdown(ssl_);
  }
  return flush();
}

// Sends the outbox as far as possible. Returns whether all of it was sent.
bool Tls::flush() {
  while (!flushed()) {
    const ssize_t moved = ::send(fd_, outbox_.get() + outbox_begin_, outbox_end_ - outbox_begin_, MSG_NOSIGNAL);
    if (moved >= 0) outbox_begin_ += static_cast<size_t>(moved);
    else if (errno == EAGAIN || errno == EWOULDBLOCK) return false;
    else if (errno != EINTR) throw Stream::Broken{std::strerror(errno), errno};
  }
  outbox_begin_ = outbox_end_ = 0;
  return true;
}

// Reads into the inbox, of which OpenSSL has taken everything. Returns whether any bytes came.
//
// A link may end without the peer's goodbye (close_notify): the peer was killed, or someone has cut the link. That is no danger,
// because the end of a link is never a success. The callers know from authenticated headers how many bytes are due, and fail if
// the link ends before that.
bool Tls::fill() {
  const ssize_t moved = ::recv(fd_, inbox_.get(), inbox_bytes, 0);
  if (moved == 0)
    throw Stream::Broken{established_ ? "closed by the other side" : "closed by the other side in the TLS handshake", 0, true};
  if (moved < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return false;
    throw Stream::Broken{std::strerror(errno), errno};
  }
  inbox_begin_ = 0;
  inbox_end_ = static_cast<size_t>(moved);
  return true;
}

// Remembers that the link has failed because of OpenSSL's oldest error, and returns what to throw.
Stream::Broken Tls::fail(const std::string& why) {
  const OpenSsl& lib = openssl();
  const char* const reason = lib.reason(lib.get_error());
  failure_ = "TLS: " + why + (reason ? ": " + std::string(reason) : "");
  if (!established_) failure_ += ". Both sides need the same key";
  try {
    flush();  // OpenSSL has written an alert that tells the peer why
  } catch (const Stream::Broken&) {
    // The peer has already closed the link.
  }
  return {failure_};
}

}  // namespace mscomm
