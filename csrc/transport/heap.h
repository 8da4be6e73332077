// This rank's shared heap: where mscomm.empty allocates, mapped by every rank of the host.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "transport/memory.h"

namespace mscomm {

class Heap {
 public:
  // Takes the mapping, not the descriptor.
  explicit Heap(Mapping mapping);

  // At least bytes of memory, its pages present: aligned to 64 bytes, from a page on in pages of its own, from 2 MiB on aligned
  // to that. nullptr when the heap is full or no longer shared.
  void* allocate(size_t bytes);
  // In a forked child it does nothing: the memory is the parent's, who may still use it.
  void release(void* memory);

  // The offset of [memory, memory + bytes) in the heap, if it lies in one allocation of it.
  std::optional<uint64_t> find(const void* memory, size_t bytes) const;

  // A call failed that had given [memory, memory + bytes) to the peers: from now on they do not see these addresses, whatever
  // this process writes there, nor what they write, and no later call uses the heap as shared memory. keep: the contents stay;
  // otherwise they are lost. See "late writers" in docs/design/0001-call.md.
  void withdraw(const void* memory, size_t bytes, bool keep);

  size_t in_use() const;

 private:
  const int owner_;           // process id
  mutable std::mutex mutex_;  // protects everything below
  Mapping mapping_;
  bool shared_ = true;
  std::map<uint64_t, uint64_t> free_;  // offset -> bytes, never two that touch
  std::map<uint64_t, uint64_t> used_;
};

}  // namespace mscomm
