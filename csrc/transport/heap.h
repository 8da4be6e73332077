// The shared heaps of a host. Each rank has one, and all ranks of the host map it. mscomm.empty allocates there, and the lowest
// rank of a group puts the group's control memory there.
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

// Copying an array of at most so many bytes takes less time than sharing it.
inline constexpr size_t unshared_bytes = 2 << 10;
// The pages of an array of at least so many bytes go back to the kernel when it is released. Those of a smaller one stay for the
// next array.
inline constexpr size_t give_back_from = 1 << 20;

class Heap {
 public:
  // Owns the mapping from now on, but not the descriptor.
  explicit Heap(Mapping mapping);

  // Returns at least so many bytes of memory whose pages exist. It is aligned to 64 bytes; above unshared_bytes it has pages of
  // its own, and from 2 MiB on it is aligned to 2 MiB. nullptr: the heap is full or no longer shared.
  void* allocate(size_t bytes);
  // Frees it. Does nothing in a forked child, because the parent may still use the memory.
  void release(void* memory);
  // Reserves a group's control memory, sparse and zero, and returns its offset.
  uint64_t reserve(size_t bytes);
  // Frees reserved memory once `unused` says that no rank looks at it any more.
  void release_when(uint64_t offset, std::function<bool()> unused);

  // The offset of [memory, memory + bytes) in the heap, if it can be shared: it must lie in one allocation, and its pages must
  // hold nothing else that is in use, because peers may write there and withdraw() replaces whole pages. nullopt: it cannot.
  std::optional<uint64_t> find(const void* memory, size_t bytes) const;

  // To be called after a failed call: if find() gave an offset for [memory, memory + bytes), replaces its pages with private
  // ones. From now on this process and its peers do not see what the other writes there, and find() does not offer it again.
  // keep: the contents stay; otherwise they are lost. See "late writers" in docs/design/0001-call.md.
  void withdraw(const void* memory, size_t bytes, bool keep);

  // From now on no array is allocated or shared here. Those that exist stay valid.
  void retire();

  // Bytes that arrays refer to, without control memory.
  size_t in_use() const;
  const Mapping& mapping() const { return mapping_; }

 private:
  struct Leaving {
    uint64_t offset;
    std::function<bool()> unused;
  };

  struct Room {
    uint64_t bytes;
    uint64_t asked;  // how many of these, from the start, the caller asked for
  };

  using Range = std::pair<uint64_t, uint64_t>;  // [begin, end)

  void give_pages_back(uint64_t begin, uint64_t end) const;
  // To be called with mutex_:
  std::optional<uint64_t> exclusive(const void* memory, size_t bytes) const;
  std::optional<uint64_t> take(uint64_t need, uint64_t alignment);
  void split(uint64_t begin, uint64_t end, std::vector<Range>& shared, std::vector<Range>& withdrawn) const;
  void give(uint64_t begin, uint64_t end);
  bool withdrawn(uint64_t begin, uint64_t end) const;

  const int owner_;           // process id
  mutable std::mutex mutex_;  // protects everything below
  Mapping mapping_;
  bool shared_ = true;
  std::map<uint64_t, uint64_t> free_;  // offset -> bytes; ranges that touch are merged
  std::map<uint64_t, Room> used_;
  std::map<uint64_t, uint64_t> reserved_;
  std::vector<Range> withdrawn_;  // pages that are private now
  std::vector<Leaving> leaving_;
};

// The heaps of a host as one process sees them in one epoch: its own, and its mappings of the others.
class Heaps {
 public:
  // others: by rank of the job; empty for this rank and for ranks of other hosts.
  Heaps(int rank, std::shared_ptr<Heap> mine, std::vector<Mapping> others)
      : rank_(rank), mine_(std::move(mine)), others_(std::move(others)) {}

  Heap& mine() const { return *mine_; }
  const std::shared_ptr<Heap>& shared() const { return mine_; }
  // The address of [offset, offset + bytes) in that rank's heap. Checks that it lies there, because the offset comes from a peer.
  char* at(int rank, uint64_t offset, size_t bytes) const;

 private:
  int rank_;
  std::shared_ptr<Heap> mine_;
  std::vector<Mapping> others_;
};

}  // namespace mscomm
