#include "base/process_memory.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <random>
#include <vector>

#include "base/call.h"

namespace mscomm {

namespace {

size_t read_plain(pid_t process, uint64_t address, void* to, size_t bytes) {
  size_t done = 0;
  while (done < bytes) {
    const iovec here{static_cast<char*>(to) + done, bytes - done}, there{reinterpret_cast<void*>(address + done), bytes - done};
    const ssize_t now = process_vm_readv(process, &here, 1, &there, 1, 0);
    if (now < 0) return done;
    if (now == 0) return errno = EFAULT, done;
    done += static_cast<size_t>(now);
  }
  return done;
}

}  // namespace

Introduction introduction() {
  static const uint64_t token = [] {
    std::random_device random;
    return uint64_t{random()} << 32 | random();
  }();
  return {getpid(), reinterpret_cast<uint64_t>(&token), token};
}

bool can_read(const Introduction& other) {
  uint64_t token = 0;
  return other.process > 0 && read_plain(other.process, other.token_address, &token, sizeof token) == sizeof token &&
         token == other.token;
}

size_t read_process(pid_t process, uint64_t address, void* to, size_t bytes) {
  if (!copies_slowly(reinterpret_cast<uintptr_t>(to), address)) return read_plain(process, address, to, bytes);
  // The kernel's copy is slow for these addresses. Reading into a buffer at a better address, and copying from the buffer to
  // `to`, takes a third of the time.
  constexpr size_t piece = 64 << 10, page = 4096, distance = 64;
  static thread_local std::vector<char> buffer;
  buffer.resize(piece + page);
  char* const between = buffer.data() + (address + distance - reinterpret_cast<uintptr_t>(buffer.data())) % page;
  for (size_t done = 0; done < bytes; done += piece) {
    const size_t now = std::min(piece, bytes - done), got = read_plain(process, address + done, between, now);
    copy(static_cast<char*>(to) + done, between, got);
    if (got < now) return done + got;
  }
  return bytes;
}

}  // namespace mscomm
