// Makes memory for a Ring, as a rank does in its heap: shared with forked children, zero-filled and aligned to a page. The pages
// before and after the memory cannot be accessed, so an access out of bounds ends the test.
#pragma once

#include <sys/mman.h>

#include <cerrno>
#include <memory>

#include "base/error.h"
#include "net/ring.h"

namespace mscomm {

inline constexpr size_t guard_bytes = 4096;

struct Unmap {
  void operator()(char* memory) const { munmap(memory - guard_bytes, Ring::memory_bytes + 2 * guard_bytes); }
};
using RingMemory = std::unique_ptr<char, Unmap>;

inline RingMemory ring_memory() {
  void* const all = mmap(nullptr, Ring::memory_bytes + 2 * guard_bytes, PROT_NONE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (all == MAP_FAILED) throw system_error("mmap", errno);
  RingMemory memory(static_cast<char*>(all) + guard_bytes);
  if (mprotect(memory.get(), Ring::memory_bytes, PROT_READ | PROT_WRITE) < 0) throw system_error("mprotect", errno);
  return memory;
}

}  // namespace mscomm
