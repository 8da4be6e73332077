// Bytes over one connected, authenticated, non-blocking socket. TLS will be a second kind of Stream: the mesh moves bytes only
// through send and receive.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include "base/deadline.h"

namespace mscomm {

class Stream {
 public:
  // Takes ownership of the descriptor. peer names the other end in error texts: "rank 3 (10.0.0.7:41022)".
  Stream(int fd, std::string peer);
  ~Stream();
  Stream(Stream&& other) noexcept : fd_(std::exchange(other.fd_, -1)), peer_(std::move(other.peer_)) {}
  Stream& operator=(Stream&&) = delete;

  int fd() const { return fd_; }
  const std::string& peer() const { return peer_; }

  // Move as many bytes as possible without waiting, and return how many, possibly 0. Throw Broken when the link has ended.
  size_t send(const void* data, size_t bytes);
  size_t receive(void* data, size_t bytes);
  // Whether the kernel holds bytes for a reader that takes none, so that nothing is on the way to the other host. Always true on
  // a unix socket, which has no wire.
  bool waits_for_reader() const;
  // To be called after the sending side was shut down. Waits until the other side's kernel has all that was sent, so that closing
  // loses none of it, or until the link or the time ends. Drops what it receives.
  void deliver(const Deadline& deadline);
  // Ends the link in both directions, for both sides, and wakes a thread that polls it.
  void shut_down() const;

  struct Broken {
    std::string why;
  };

 private:
  int fd_;
  std::string peer_;
};

}  // namespace mscomm
