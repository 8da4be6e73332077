// A Stream moves bytes over one connected, authenticated, non-blocking socket. All other code moves bytes only with the functions
// of Stream, and waits for them only with Poll. So TLS can be added as a second kind of Stream.
#pragma once

#include <poll.h>

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/descriptor.h"

namespace mscomm {

class Stream {
 public:
  // Takes ownership of the descriptor. peer: the peer's name for error messages, such as "rank 3 (10.0.0.7:41022)".
  Stream(int fd, std::string peer);

  const std::string& peer() const { return peer_; }

  // send() and receive() move as many bytes as possible without waiting. They return the number of bytes moved, which may be 0.
  // They throw Broken if the link has ended.
  size_t send(const void* data, size_t bytes);
  size_t receive(void* data, size_t bytes);
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
  // Returns whether receive() has bytes to return that the descriptor does not announce. Poll asks this.
  bool pending() const { return false; }
  // Returns whether the kernel holds unsent bytes although no bytes are on the wire. This means that the peer is not reading.
  // Always true on a Unix socket, which has no wire.
  bool waits_for_reader() const;
  // Throws Broken if sent data is waiting to be acknowledged, but the peer's host has acknowledged nothing for as long as the
  // socket's keepalive allows. The kernel does not detect this itself: it applies keepalive only while no sent data is waiting,
  // and otherwise retransmits the data for 15 minutes or more. Links between ranks do not set TCP_USER_TIMEOUT, the kernel's time
  // limit for sent data, because this limit would also end the link to a healthy peer that is not reading. A rank that is waiting
  // for the peer may call check_silence() often, because check_silence() queries the kernel at most once a second.
  void check_silence();
  // Tells the peer that nothing more will come. The peer can still send.
  void close_for_writing() const;
  // Ends the link in both directions, so that both sides notice. Wakes up any thread that is polling the socket.
  void shut_down() const;

  struct Broken {
    std::string why;
  };

 private:
  friend class Poll;
  friend void deliver_all(std::vector<std::optional<Stream>> streams, double timeout_s);
  void deliver(const Deadline& deadline);
  int fd() const { return fd_.get(); }

  Descriptor fd_;
  std::string peer_;
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
  // Waits for at most `ms` milliseconds. Returns how many entries are ready: bytes can move, or the link has ended. Returns 0
  // when the time has passed, and -1 if a signal ended the wait.
  int wait(int ms);
  // Call this after wait() has returned more than 0. Returns whether there is something to read: bytes, or the end of the link.
  bool readable(size_t entry) const { return polled_[entry].revents & (POLLIN | POLLHUP | POLLERR); }

 private:
  std::vector<pollfd> polled_;
  std::vector<size_t> pending_;  // the entries of the streams that have bytes to return without waiting
};

// Waits for at most timeout_s until the peers' kernels have received all bytes that were sent, and then closes the streams. Drops
// all bytes that arrive from the peers in the meantime.
void deliver_all(std::vector<std::optional<Stream>> streams, double timeout_s);

}  // namespace mscomm
