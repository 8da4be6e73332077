// A Stream moves bytes over one connected, authenticated, non-blocking socket. All other code moves bytes only with the functions
// of Stream, and waits for them only with Poll. So other code need not know whether a Stream encrypts its bytes (see tls.h), or
// moves them through memory that both ends share (see ring.h).
#pragma once

#include <poll.h>
#include <sys/uio.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/descriptor.h"

namespace mscomm {

class Ring;
class Tls;

// The key of an encrypted link. Each copy is wiped when it is destroyed.
struct Secret {
  std::array<uint8_t, 32> key{};
  bool connects = false;  // whether this end begins the handshake; on the other end, this must be the opposite
  ~Secret() { explicit_bzero(key.data(), key.size()); }
};

class Stream {
 public:
  // Takes ownership of the descriptor. peer: the peer's name for error messages, such as "rank 3 (10.0.0.7:41022)". secret: if
  // given, the link is encrypted, and the peer must have the same key. Throws Error with the kind BackendUnavailable if the link
  // must be encrypted and OpenSSL 3 cannot be opened.
  Stream(int fd, std::string peer, const std::optional<Secret>& secret = {});
  Stream(Stream&&) noexcept;
  ~Stream();

  const std::string& peer() const { return peer_; }

  // Makes both ends move all bytes through a Ring. One end calls share(), before its first send(), and the other end calls
  // opens_shared(), before its first receive(). memory: what this end has made for the Ring, or nullptr if it could make none;
  // the bytes then move over the socket. offset: what the other end must know to find the memory. open: returns the memory for
  // that offset, or throws Broken.
  void share(char* memory, uint64_t offset);
  void opens_shared(std::function<char*(uint64_t offset)> open);

  // Returns whether this end, which has called opens_shared(), can read the memory of the other process. read_from_peer() does
  // so, and returns whether it has read all bytes. It throws Broken if the other end has closed the link.
  bool reads_peer();
  bool read_from_peer(uint64_t address, void* to, size_t bytes);

  // send() and receive() move as many bytes as possible without waiting. They return the number of bytes moved, which may be 0.
  // They throw Broken if the link has ended. On an encrypted link, bytes that send() has not accepted may already be encrypted.
  // So the next send() must begin with the same bytes.
  size_t send(const void* data, size_t bytes);
  size_t receive(void* data, size_t bytes);
  // Sends several parts in a row, as send() does. If they are short, or the link is not encrypted, this is one system call.
  size_t send(std::span<const iovec> parts);
  // send_more() and receive_more() send or receive the rest of a value, as far as possible without waiting. `done` is the number
  // of bytes of the value that have been moved by all calls so far. Both functions return whether this call has moved any bytes.
  template <typename T>
  bool send_more(const T& value, size_t& done) {
    const size_t moved = send(reinterpret_cast<const char*>(&value) + done, sizeof value - done);
    done += moved;
    return moved > 0;
  }
  template <typename T>
  bool receive_more(T& value, size_t& done) {
    const size_t moved = receive(reinterpret_cast<char*>(&value) + done, sizeof value - done);
    done += moved;
    return moved > 0;
  }
  // Returns whether receive() may have bytes to return that the descriptor does not announce. Poll asks this.
  bool pending() const { return tls_ && pending_in_tls(); }
  // Returns whether the kernel holds unsent bytes although no bytes are on the wire. This means that the peer is not reading.
  // Always true on a Unix socket, which has no wire, and while the peer has not completed the handshake of an encrypted link.
  bool waits_for_reader() const;
  // Throws Broken if sent data is waiting to be acknowledged, but the peer's host has acknowledged nothing for as long as the
  // socket's keepalive allows. The kernel does not detect this itself: it applies keepalive only while no sent data is waiting,
  // and otherwise retransmits the data for 15 minutes or more. Links between ranks do not set TCP_USER_TIMEOUT, the kernel's time
  // limit for sent data, because this limit would also end the link to a healthy peer that is not reading. A rank that is waiting
  // for the peer may call check_silence() often, because check_silence() queries the kernel at most once a second.
  void check_silence();
  // Tells the peer that nothing more will come. The peer can still send. Returns false if the kernel does not accept all
  // encrypted bytes yet; call it again then.
  bool close_for_writing();
  // Ends the link in both directions, so that both sides notice. Wakes up any thread that is polling the socket.
  void shut_down() const;
  // Closes the descriptor in a forked child. Takes no lock, and frees nothing that a thread of the parent may have been using.
  void abandon();

  struct Broken {
    std::string why;
    int error = 0;        // errno, if a system call failed
    bool closed = false;  // whether the other side has closed the link
  };

 private:
  friend class Poll;
  friend void deliver_all(std::vector<std::optional<Stream>> streams, double timeout_s);
  friend void shake_hands(std::span<Stream* const> streams, const Deadline& deadline);
  size_t send_together(std::span<const iovec> parts);
  void deliver(const Deadline& deadline);
  int fd() const { return fd_.get(); }
  size_t receive_plain(void* data, size_t bytes);
  bool opened();
  bool pending_in_tls() const;
  bool shaking_hands() const;

  Descriptor fd_;
  std::string peer_;
  std::unique_ptr<Tls> tls_;    // nullptr if the link is not encrypted
  std::unique_ptr<Ring> ring_;  // nullptr if the bytes move over the socket
  // From opens_shared(). Empty after the offset has arrived. told_got: how many of the offset's bytes have arrived.
  std::function<char*(uint64_t)> open_;
  uint64_t told_ = 0;
  size_t told_got_ = 0;
  // For check_silence(): when it last queried the kernel, and the time from which the silence of the peer's host is measured.
  Clock::time_point asked_{}, heard_{};
};

// Waits until bytes can move over one of several streams.
class Poll {
 public:
  // Adds a stream, for which this thread wants to call receive(), send() or both. Returns the number of the entry.
  size_t add(const Stream& stream, bool receives, bool sends);
  // Adds a descriptor of another kind, such as an eventfd, which this thread wants to read. Returns the number of the entry.
  size_t add(int fd);
  // How to wait before the thread sleeps. spin: whether the host has a CPU for each rank. stopped: ends this part of the wait
  // when it returns true. entries: how many entries are looked at, beginning with the first, because a look at many takes long.
  struct Awake {
    bool spin;
    std::function<bool()> stopped;
    size_t entries = SIZE_MAX;
  };
  // Waits for at most about `ms` milliseconds. Returns how many entries are ready: bytes can move, or the link has ended. Returns
  // 0 when the time has passed, and -1 if a signal ended the wait.
  int wait(int ms, const std::optional<Awake>& awake = {});
  // Call this after wait() has returned more than 0. Returns whether there is something to read: bytes, or the end of the link.
  bool readable(size_t entry) const { return polled_[entry].revents & (POLLIN | POLLHUP | POLLERR); }

 private:
  std::vector<pollfd> polled_;
  std::vector<size_t> pending_;  // the entries of the streams that have bytes to return without waiting
  // The entries of the streams whose handshake is not complete. Whatever such a stream waits for, receive() must be called then.
  std::vector<size_t> shaking_;
  struct Ringed {
    Ring* ring;
    size_t entry;
    bool receives, sends;
  };
  std::vector<Ringed> rings_;
  size_t streams_ = 0;  // how many entries are streams
};

// How long a new group, or a link that is set up later, waits for its handshakes: as long as the hello does.
inline constexpr double handshake_s = 5;
// Completes the handshakes of the encrypted streams, waiting until the deadline at most. A handshake that is not complete then
// continues in send() and receive(), which also report its failure. Without shake_hands(), the first send would wait until the
// peer's program waits for this link, and a program that relies on the kernel's buffers would hang.
void shake_hands(std::span<Stream* const> streams, const Deadline& deadline);

// Waits for at most timeout_s until the peers' kernels have received all bytes that were sent, and then closes the streams. Drops
// all bytes that arrive from the peers in the meantime.
void deliver_all(std::vector<std::optional<Stream>> streams, double timeout_s);

}  // namespace mscomm
