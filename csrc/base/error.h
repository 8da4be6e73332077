// Error is the exception that the core throws. In Python, it becomes an exception of the class named by `kind` (see
// python/mscomm/errors.py).
#pragma once

#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace mscomm {

struct Error : std::runtime_error {
  Error(std::string kind, const std::string& text, std::vector<int> ranks = {}, std::vector<int> waiting_for = {})
      : std::runtime_error(text), kind(std::move(kind)), ranks(std::move(ranks)), waiting_for(std::move(waiting_for)) {}

  std::string kind;
  std::vector<int> ranks;
  std::vector<int> waiting_for;
};

// What replaces an error for which there is no memory. It exists from the start, and a copy of it needs no memory. It is never
// destroyed, because a thread may still use it while the process exits.
inline const Error& no_memory = *new Error("MemoryError", "out of memory");

// Returns make(). If there is no memory for that error, returns no_memory. Code that ends a call, a message or a group must not
// stop halfway, so it creates and copies errors with this function.
template <typename Make>
Error or_no_memory(const Make& make) {
  try {
    return make();
  } catch (const std::bad_alloc&) {
    return no_memory;
  }
}

inline Error peer_lost(int rank, const std::string& text) { return {"PeerLost", text, {rank}}; }

// Returns the error for a failed system call, with a text such as "mmap of 4096 bytes: Cannot allocate memory".
inline Error system_error(const std::string& what, int errno_value) {
  const char* const hint = errno_value == EMFILE ? "; raise the limit of this process with `ulimit -n`" : "";
  return {"Error", what + ": " + std::strerror(errno_value) + hint};
}

}  // namespace mscomm
