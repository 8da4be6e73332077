// A Stream moves bytes over one connected, authenticated, non-blocking socket. TLS can be added as a second kind of Stream,
// because the mesh moves bytes only through send and receive.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include "base/deadline.h"

namespace mscomm {

class Stream {
 public:
  // Takes ownership of the descriptor. peer: the name of the other end in error messages, such as "rank 3 (10.0.0.7:41022)".
  Stream(int fd, std::string peer);
  ~Stream();
  Stream(Stream&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)), peer_(std::move(other.peer_)), asked_(other.asked_), heard_(other.heard_) {}
  Stream& operator=(Stream&&) = delete;

  int fd() const { return fd_; }
  const std::string& peer() const { return peer_; }

  // send() and receive() move as many bytes as possible without waiting. They return the number of bytes moved, which may be 0.
  // They throw Broken if the link has ended.
  size_t send(const void* data, size_t bytes);
  size_t receive(void* data, size_t bytes);
  // Whether the kernel holds unsent bytes only because the peer does not read, so that no bytes are on the wire. Always true on a
  // unix socket, which has no wire.
  bool waits_for_reader() const;
  // Throws Broken if the peer's host has acknowledged nothing for as long as the socket's keepalive allows, although sent data
  // waits for that. The kernel applies keepalive only while no data waits, and otherwise tries for 15 minutes and more. It has a
  // time limit for data, TCP_USER_TIMEOUT, which would also end the link to a healthy peer that does not read. A rank that waits
  // for the peer calls this often; the kernel is asked once a second.
  void check_silence();
  // Waits until the peer's kernel has received all bytes that were sent, so that closing the socket loses none of them. Stops
  // earlier if the link ends or the deadline passes. Drops all bytes that come from the peer meanwhile. Before this call, the
  // sending side of the socket must be shut down.
  void deliver(const Deadline& deadline);
  // Ends the link in both directions, so that both sides notice. Wakes a thread that polls the socket.
  void shut_down() const;

  struct Broken {
    std::string why;
  };

 private:
  int fd_;
  std::string peer_;
  Clock::time_point asked_{}, heard_{};  // for check_silence(): when it last asked the kernel, and last heard of the peer's host
};

}  // namespace mscomm
