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

// One system call copies the bytes and, after them, the token. A second call would take as long as copying some KiB.
size_t read_plain(const Introduction& owner, uint64_t address, void* to, size_t bytes) {
  for (size_t done = 0;;) {
    const size_t left = bytes - done;
    uint64_t token = 0;
    const iovec here[2] = {{static_cast<char*>(to) + done, left}, {&token, sizeof token}};
    const iovec there[2] = {{reinterpret_cast<void*>(address + done), left},
                            {reinterpret_cast<void*>(owner.token_address), sizeof token}};
    const ssize_t now = process_vm_readv(owner.process, here, 2, there, 2, 0);
    if (now == 0) errno = EFAULT;
    // If the token cannot be read, the bytes are those of another process.
    if (now <= 0) return left == 0 ? (errno = ESRCH, size_t{0}) : done;
    done += std::min(left, static_cast<size_t>(now));
    if (static_cast<size_t>(now) != left + sizeof token) continue;
    if (token == owner.token) return bytes;
    return errno = ESRCH, 0;
  }
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
  const iovec here{&token, sizeof token}, there{reinterpret_cast<void*>(other.token_address), sizeof token};
  return other.process > 0 && process_vm_readv(other.process, &here, 1, &there, 1, 0) == sizeof token && token == other.token;
}

size_t read_process(const Introduction& owner, uint64_t address, void* to, size_t bytes) {
  if (!copies_slowly(reinterpret_cast<uintptr_t>(to), address)) return read_plain(owner, address, to, bytes);
  // The kernel's copy is slow for these addresses. Reading into a buffer at a better address, and copying from the buffer to
  // `to`, takes a third of the time.
  constexpr size_t piece = 64 << 10, page = 4096, distance = 64;
  static thread_local std::vector<char> buffer;
  buffer.resize(piece + page);
  char* const between = buffer.data() + (address + distance - reinterpret_cast<uintptr_t>(buffer.data())) % page;
  for (size_t done = 0; done < bytes; done += piece) {
    const size_t now = std::min(piece, bytes - done), got = read_plain(owner, address + done, between, now);
    copy(static_cast<char*>(to) + done, between, got);
    if (got < now) return done + got;
  }
  return bytes;
}

}  // namespace mscomm
