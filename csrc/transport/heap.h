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
  explicit Heap(Mapping mapping) : mapping_(std::move(mapping)) { free_[0] = mapping_.bytes(); }

  // At least bytes of memory, aligned to 64 bytes (2 MiB from 2 MiB on), its pages present. nullptr when the heap is full or
  // private.
  void* allocate(size_t bytes);
  void release(void* memory);

  // The offset of [memory, memory + bytes) in the heap, if it lies in one allocation of it.
  std::optional<uint64_t> find(const void* memory, size_t bytes) const;

  // A call failed that had given [memory, memory + bytes) to the peers to write to: from now on they do not see these addresses,
  // nor will any call use the heap as shared memory. The contents of the range are lost (out is undefined after an error), those
  // beside it stay. See "late writers" in docs/design/0001-call.md.
  void withdraw(void* memory, size_t bytes);

  size_t in_use() const;

 private:
  mutable std::mutex mutex_;  // protects everything below
  Mapping mapping_;
  bool shared_ = true;
  std::map<uint64_t, uint64_t> free_;  // offset -> bytes, never two that touch
  std::map<uint64_t, uint64_t> used_;
};

}  // namespace mscomm
