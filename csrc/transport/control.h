// The layout of a group's control memory on one host.
//
// The control memory is in the heap of the group's lowest rank on the host. docs/design/0001-call.md describes which rank may
// access which part of the control memory in which state.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/call.h"
#include "base/process_memory.h"

namespace mscomm {

inline constexpr uint64_t not_in_heap = ~uint64_t{0};
// A message of at most this many bytes is tiny. A tiny message in foreign memory (memory outside the heaps) is copied as a whole
// into the buffer that Arena::tiny() returns.
inline constexpr size_t tiny_bytes = 16 << 10;
// A larger message in foreign memory goes through staging in chunks of this size. Each chunk costs a round, so larger chunks
// would save rounds. But the chunks of all ranks together must fit into the cache.
inline constexpr size_t chunk_bytes = 512 << 10;
inline constexpr int chunks = 3;
// How many bytes of data fit into the cache line in which a rank announces that it has arrived at a round.
inline constexpr size_t inline_bytes = 48;

// What a rank tells the other ranks about its call, before the first round.
struct Post {
  Signature signature;
  uint64_t x_offset = not_in_heap;  // the offset of x in the rank's heap
  uint64_t out_offset = not_in_heap;
  uint64_t x_address = 0, out_address = 0;  // addresses in the rank's process, for pulls; 0 if peers must not pull the array
};

class Control {
 public:
  struct Common {
    // Both fields are written only if a rank sleeps, so their cache line usually stays in the caches of all ranks.
    struct alignas(64) Gate {
      std::atomic<uint32_t> bell;  // the futex word: ring() in gate.cc adds 1 to it to wake the sleeping ranks
      std::atomic<uint32_t> sleepers;
    } gate;
    // Both fields are written once by each rank at most, so this line, too, usually stays in the caches of all ranks.
    alignas(64) std::atomic<uint32_t> closed;  // the number of ranks that have destroyed their Arena
    std::atomic<uint32_t> gave_up;             // 1 + the rank that was the first to give up its calls; 0 if no rank has
  };
  // A cache line of one rank. If messages have at most inline_bytes, this is the only line of that rank that other ranks need to
  // read.
  struct alignas(64) Line {
    std::atomic<uint64_t> arrived;  // the latest even (lines[0]) or odd (lines[1]) round at which the rank has arrived
    uint64_t fingerprint;           // a hash of the call's signature; set for the first round of a call
    char data[inline_bytes];
  };
  struct alignas(64) Slot {
    // Even rounds use lines[0] and odd rounds use lines[1], because a rank may begin the next round while a peer is still reading
    // the line of the previous round.
    Line lines[2];
    Post post[2];
    alignas(64) Introduction introduction;  // for pulls
    std::atomic<bool> reads_all;            // whether this rank can read the memory of every other rank
    // The CPU (the low 16 bits) on which the rank last polled, and the round (the other bits) in which it did so. 0 means that
    // the rank is asleep.
    std::atomic<uint64_t> place;
  };
  static_assert(sizeof(Line) == 64 && std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

  // size: the number of the group's ranks on this host.
  Control(char* memory, int size) : memory_(memory), size_(size) {}
  static size_t bytes(int size) { return before_staging(size) + size * staging_bytes; }

  int size() const { return size_; }
  Common& common() const { return *reinterpret_cast<Common*>(memory_); }
  Slot& slot(int rank) const { return reinterpret_cast<Slot*>(memory_ + sizeof(Common))[rank]; }
  // Returns the given rank's staging memory. It holds two buffers for tiny messages, which calls use alternately, followed by the
  // rank's chunks.
  char* staging(int rank) const { return memory_ + before_staging(size_) + rank * staging_bytes; }

 private:
  static constexpr size_t staging_bytes = 2 * tiny_bytes + chunks * chunk_bytes;
  static size_t before_staging(int size) { return (sizeof(Common) + size * sizeof(Slot) + 4095) / 4096 * 4096; }

  char* memory_;
  int size_;
};

}  // namespace mscomm
