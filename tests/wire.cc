// Tests preload this library into a rank. It counts what the process does with its TCP sockets, and the bytes that it sends over
// unix sockets.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE  // for RTLD_NEXT; g++ defines it
#endif

#include <dlfcn.h>
#include <sys/socket.h>

#include <atomic>

namespace {

std::atomic<long> sent_bytes{0}, sent_bytes_on_a_host{0}, sends{0}, receives{0};

template <typename Function>
Function* next(Function*, const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

int domain_of(int fd) {
  int domain = 0;
  socklen_t length = sizeof domain;
  return getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &length) == 0 ? domain : AF_UNSPEC;
}

bool is_tcp(int fd) { return domain_of(fd) != AF_UNIX && domain_of(fd) != AF_UNSPEC; }

ssize_t counted(int fd, ssize_t moved) {
  if (moved > 0 && is_tcp(fd)) sent_bytes += moved, sends++;
  if (moved > 0 && domain_of(fd) == AF_UNIX) sent_bytes_on_a_host += moved;
  return moved;
}

}  // namespace

// The numbers since the process began: the bytes that were sent over TCP and over unix sockets, the calls that sent some over
// TCP, and the calls that tried to receive.
extern "C" long wire_sent_bytes() { return sent_bytes; }
extern "C" long wire_sent_bytes_on_a_host() { return sent_bytes_on_a_host; }
extern "C" long wire_sends() { return sends; }
extern "C" long wire_receives() { return receives; }

extern "C" ssize_t send(int fd, const void* data, size_t bytes, int flags) {
  static const auto real = next(&send, "send");
  return counted(fd, real(fd, data, bytes, flags));
}

extern "C" ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  static const auto real = next(&sendmsg, "sendmsg");
  return counted(fd, real(fd, message, flags));
}

extern "C" ssize_t recv(int fd, void* data, size_t bytes, int flags) {
  static const auto real = next(&recv, "recv");
  if (is_tcp(fd)) receives++;
  return real(fd, data, bytes, flags);
}
