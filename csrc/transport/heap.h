// The shared heaps of a host's ranks, one each, mapped by all: where mscomm.empty allocates, and where a group's lowest rank puts
// the group's control memory.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "transport/memory.h"

namespace mscomm {

// An array of at most so many bytes is copied sooner than shared.
inline constexpr size_t unshared_bytes = 2 << 10;
// The pages of an array of at least so many bytes go back to the kernel when it is released. Smaller ones keep theirs for the
// next array.
inline constexpr size_t give_back_from = 1 << 20;

class Heap {
 public:
  // Takes the mapping, not the descriptor.
  explicit Heap(Mapping mapping);

  // At least bytes of memory, its pages present: aligned to 64 bytes; if not tiny, in pages of its own; from 2 MiB on aligned to
  // that. nullptr when the heap is full or no longer shared.
  void* allocate(size_t bytes);
  // In a forked child it does nothing: the memory is the parent's, who may still use it.
  void release(void* memory);
  // The offset of memory for a group's control, sparse and zero.
  uint64_t reserve(size_t bytes);
  // Gives reserved memory back once `unused` says that no rank looks at it any more; until then it stays.
  void release_when(uint64_t offset, std::function<bool()> unused);

  // The offset of [memory, memory + bytes) in the heap, if peers may have it: it lies in one allocation, and no byte beside it
  // in its pages is anybody's. Others may write there, and withdraw() exchanges whole pages.
  std::optional<uint64_t> find(const void* memory, size_t bytes) const;

  // A call failed: if it had [memory, memory + bytes) from find(), from now on peers do not see what this process writes there,
  // nor it what they write, and no later call takes it for shared memory. keep: the contents stay; otherwise they are lost.
  // See "late writers" in docs/design/0001-call.md.
  void withdraw(const void* memory, size_t bytes, bool keep);

  // No array that is made from now on is shared; those that are there live on.
  void retire();

  // Bytes that arrays refer to.
  size_t in_use() const;
  const Mapping& mapping() const { return mapping_; }

 private:
  struct Leaving {
    uint64_t offset;
    std::function<bool()> unused;
  };

  struct Room {
    uint64_t bytes;
    uint64_t asked;  // of these, from the start
  };

  using Range = std::pair<uint64_t, uint64_t>;  // [begin, end)

  void give_pages_back(uint64_t begin, uint64_t end) const;
  // With mutex_:
  std::optional<uint64_t> exclusive(const void* memory, size_t bytes) const;
  std::optional<uint64_t> take(uint64_t need, uint64_t alignment);
  void split(uint64_t begin, uint64_t end, std::vector<Range>& shared, std::vector<Range>& withdrawn) const;
  void give(uint64_t begin, uint64_t end);
  bool withdrawn(uint64_t begin, uint64_t end) const;

  const int owner_;           // process id
  mutable std::mutex mutex_;  // protects everything below
  Mapping mapping_;
  bool shared_ = true;
  std::map<uint64_t, uint64_t> free_;  // offset -> bytes, never two that touch
  std::map<uint64_t, Room> used_;
  std::map<uint64_t, uint64_t> reserved_;
  std::vector<Range> withdrawn_;  // pages that are private now
  std::vector<Leaving> leaving_;
};

// What a process sees of its host's heaps in one epoch: its own, and mappings of the others'.
class Heaps {
 public:
  // others: by rank of the job; for this rank and for ranks of other hosts empty.
  Heaps(int rank, std::shared_ptr<Heap> mine, std::vector<Mapping> others)
      : rank_(rank), mine_(std::move(mine)), others_(std::move(others)) {}

  Heap& mine() const { return *mine_; }
  const std::shared_ptr<Heap>& shared() const { return mine_; }
  // [offset, offset + bytes) of rank's heap, after checking that it lies there: offsets come from others.
  char* at(int rank, uint64_t offset, size_t bytes) const;

 private:
  int rank_;
  std::shared_ptr<Heap> mine_;
  std::vector<Mapping> others_;
};

}  // namespace mscomm
