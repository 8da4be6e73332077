// A file descriptor that closes itself.
#pragma once

#include <unistd.h>

#include <utility>

namespace mscomm {

class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}  // takes ownership; -1 means no descriptor
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor() { close(); }

  int get() const { return fd_; }
  // Passes the ownership to the caller.
  int release() { return std::exchange(fd_, -1); }
  void close() {
    if (fd_ >= 0) ::close(release());
  }
  // Closes the descriptor, and takes ownership of another one.
  void reset(int fd) {
    close();
    fd_ = fd;
  }

 private:
  int fd_;
};

}  // namespace mscomm
