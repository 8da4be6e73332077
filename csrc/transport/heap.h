// The shared heaps of a host. Each rank has one heap, which all ranks on the host map. mscomm.empty allocates an array in the
// calling rank's heap. A group's control memory is in the heap of the group's lowest rank on the host.
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

// Copying an array of up to this many bytes takes less time than sharing it.
inline constexpr size_t unshared_bytes = 2 << 10;
// A released array of at least this many bytes is kept for a while, and then its pages are returned to the kernel. The memory of
// a smaller array becomes free with its pages. When free memory has more than most_paged_bytes of such pages, all of them are
// returned.
inline constexpr size_t give_back_from = 1 << 20;
inline constexpr size_t most_paged_bytes = 64 << 20;
// The limits of what a heap keeps: a share of its size, a number of bytes, and how many later releases of arrays of at least
// give_back_from bytes a kept array survives if it is not reused.
inline constexpr size_t kept_share = 64;
inline constexpr size_t most_kept_bytes = 256 << 20;
inline constexpr uint64_t kept_releases = 64;

class Heap {
 public:
  // Takes ownership of the mapping. The caller keeps the descriptor of the mapped file.
  explicit Heap(Mapping mapping);

  // Allocates at least `bytes` bytes, all of whose pages exist. The contents are undefined. Returns nullptr if the heap is full
  // or no longer shared, and in a forked child, because the parent would allocate the same memory. The memory is aligned to 64
  // bytes. Memory of more than unshared_bytes has pages of its own. Memory of 2 MiB and more is aligned to 2 MiB.
  void* allocate(size_t bytes);
  // Frees memory from allocate(). Does nothing in a forked child, because the parent may still use the memory.
  void release(void* memory);
  // Reserves sparse, zero-filled memory for a group's control memory, and returns its offset.
  uint64_t reserve(size_t bytes);
  // Allows later calls of reserve() to free the reserved memory at `offset`, but only when unused() returns true. unused() must
  // not return true while any rank may still access the memory.
  void release_when(uint64_t offset, std::function<bool()> unused);

  // Returns the offset of [memory, memory + bytes) in the heap, or nullopt if this range cannot be shared. A range can be shared
  // only if it lies within one allocation and nothing else on its pages is in use. The reason is that withdraw() replaces whole
  // pages, so any other data on these pages would be lost.
  std::optional<uint64_t> find(const void* memory, size_t bytes) const;

  // Call this after a failed collective call. If find() returned an offset for [memory, memory + bytes), withdraw() replaces the
  // pages of this range with private pages. From then on, this process does not see what peers write to the range, peers do not
  // see what this process writes, and find() returns nullopt for the range. keep: whether to keep the contents. See "late
  // writers" in docs/design/0001-call.md.
  void withdraw(const void* memory, size_t bytes, bool keep);

  // After retire(), no array is allocated or shared in this heap. Existing arrays stay valid.
  void retire();

  // Returns the total size in bytes of the arrays in the heap, excluding control memory.
  size_t in_use() const;
  // Returns the total size in bytes of the released arrays that the heap keeps for reuse.
  size_t kept() const;
  const Mapping& mapping() const { return mapping_; }

 private:
  struct Reserved {
    uint64_t bytes;
    std::function<bool()> unused{};  // from release_when(); empty before that
  };
  struct Room {
    uint64_t bytes;
    uint64_t asked;  // how many bytes the caller asked for
  };

  using Range = std::pair<uint64_t, uint64_t>;  // [begin, end)
  class Ranges {
   public:
    void add(uint64_t begin, uint64_t end);
    void cut(uint64_t begin, uint64_t end);  // removes those parts of [begin, end) that are there
    const std::map<uint64_t, uint64_t>& all() const { return bytes_; }
    // Returns the total size of the whole pages in these ranges.
    uint64_t page_bytes() const { return page_bytes_; }

   private:
    using Places = std::map<uint64_t, uint64_t>;
    Places::iterator erase(Places::iterator one);
    void insert(uint64_t begin, uint64_t end);

    Places bytes_;  // begin -> bytes; adjacent ranges are merged
    uint64_t page_bytes_ = 0;
  };
  // The memory of a released array, with its pages. It is in neither free_ nor used_.
  struct Kept {
    Range range;
    uint64_t release;  // the value of releases_ when the array was released
    uint64_t bytes() const { return range.second - range.first; }
  };

  void* allocate_once(size_t bytes);
  std::optional<uint64_t> reserve_once(size_t bytes);
  // Returns the pages of these ranges, which are in none of the tables below, to the kernel, and makes the ranges free. The
  // caller must not hold mutex_, because this takes a long time.
  void hand_back(const std::vector<Range>& ranges);
  // Hands back everything that is kept, and the pages of free memory. Returns whether there was anything.
  bool hand_back_kept();
  void give_pages_back(uint64_t begin, uint64_t end) const;
  // Callers of the functions below must hold mutex_.
  std::optional<uint64_t> reuse(uint64_t need, size_t asked);
  std::vector<Range> drop_kept(bool all);
  std::optional<uint64_t> exclusive(const void* memory, size_t bytes) const;
  std::optional<uint64_t> take(uint64_t need, uint64_t alignment);
  void split(uint64_t begin, uint64_t end, std::vector<Range>& shared, std::vector<Range>& withdrawn) const;
  // Takes the whole pages of paged_ out of the free memory, if there are too many or all are wanted, and returns them.
  std::vector<Range> drop_paged(bool all);

  const int owner_;           // the id of the process that created the heap
  mutable std::mutex mutex_;  // protects everything below except mapping_ and most_kept_, which never change
  Mapping mapping_;
  const uint64_t most_kept_;  // in bytes
  bool shared_ = true;
  Ranges free_;
  Ranges paged_;  // the parts of free_ that small arrays have left with their pages
  std::map<uint64_t, Room> used_;
  std::map<uint64_t, Reserved> reserved_;
  std::vector<Range> withdrawn_;  // pages that are private now
  std::vector<Kept> kept_;        // the oldest first
  uint64_t releases_ = 0;         // the number of released arrays of at least give_back_from bytes
};

// The heaps of a host as one process sees them in one epoch: its own heap, and its mappings of the other ranks' heaps.
class Heaps {
 public:
  // others: the mappings of the other ranks' heaps, indexed by job rank. The entries for this rank and for ranks on other hosts
  // are empty.
  Heaps(int rank, std::shared_ptr<Heap> mine, std::vector<Mapping> others)
      : rank_(rank), mine_(std::move(mine)), others_(std::move(others)) {}

  Heap& mine() const { return *mine_; }
  // Returns the address of [offset, offset + bytes) in the given rank's heap. The offset comes from a peer, so at() checks that
  // the range is inside the heap, and throws if it is not.
  char* at(int rank, uint64_t offset, size_t bytes) const;

 private:
  int rank_;
  std::shared_ptr<Heap> mine_;
  std::vector<Mapping> others_;
};

}  // namespace mscomm
