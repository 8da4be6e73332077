// Creates two TCP sockets that are connected to each other over the loopback interface.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>

#include "base/error.h"

namespace mscomm {

inline std::array<int, 2> tcp_pair() {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  const int door = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), from = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  auto* raw = reinterpret_cast<sockaddr*>(&address);
  if (bind(door, raw, length) < 0 || listen(door, 1) < 0 || getsockname(door, raw, &length) < 0 || connect(from, raw, length) < 0)
    throw system_error("loopback", errno);
  const int to = accept4(door, nullptr, nullptr, SOCK_CLOEXEC);
  close(door);
  return {from, to};
}

}  // namespace mscomm
