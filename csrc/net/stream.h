// Bytes over one connected, authenticated, non-blocking socket. TLS will be a second kind of Stream: send and receive are all
// that the mesh knows of it.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include "base/deadline.h"

namespace mscomm {

class Stream {
 public:
  // Takes the descriptor. peer names the other end in messages: "rank 3 (10.0.0.7:41022)".
  Stream(int fd, std::string peer);
  ~Stream();
  Stream(Stream&& other) noexcept : fd_(std::exchange(other.fd_, -1)), peer_(std::move(other.peer_)) {}
  Stream& operator=(Stream&&) = delete;

  int fd() const { return fd_; }
  const std::string& peer() const { return peer_; }

  // As much as goes now: the bytes moved, 0 if none. Throw Broken when the link has ended.
  size_t send(const void* data, size_t bytes);
  size_t receive(void* data, size_t bytes);
  // Whether the kernel holds bytes for a reader that takes none, so that nothing is on the way to the other host. Always true on
  // a unix socket, which has no wire.
  bool waits_for_reader() const;
  // After shutdown of the sending side: returns when what was sent lies with the other side's kernel, so that closing loses none
  // of it, or the link or the time ends. Drops what comes.
  void deliver(const Deadline& deadline);
  // Ends the link in both directions, for this and the other side; wakes whoever polls it.
  void shut_down() const;

  struct Broken {
    std::string why;
  };

 private:
  int fd_;
  std::string peer_;
};

}  // namespace mscomm
