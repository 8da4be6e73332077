#include "net/stream.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace mscomm {

namespace {
bool later(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }
}  // namespace

Stream::Stream(int fd, std::string peer) : fd_(fd), peer_(std::move(peer)) {
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0) throw system_error("fcntl of the link to " + peer_, errno);
}

Stream::~Stream() {
  if (fd_ >= 0) close(fd_);
}

size_t Stream::send(const void* data, size_t bytes) {
  const ssize_t moved = ::send(fd_, data, bytes, MSG_NOSIGNAL);
  if (moved >= 0) return static_cast<size_t>(moved);
  if (later(errno)) return 0;
  throw Broken{std::strerror(errno)};
}

size_t Stream::receive(void* data, size_t bytes) {
  const ssize_t moved = ::recv(fd_, data, bytes, 0);
  if (moved > 0) return static_cast<size_t>(moved);
  if (moved == 0) throw Broken{"closed by the other side"};
  if (later(errno)) return 0;
  throw Broken{std::strerror(errno)};
}

void Stream::shut_down() const { ::shutdown(fd_, SHUT_RDWR); }

}  // namespace mscomm
