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
// In a call with a root and messages of at most this many bytes, a rank waits only for the ranks whose data it needs.
inline constexpr size_t one_way_bytes = 4 << 10;
// A rank may be fewer than this many rounds ahead of the slowest rank.
inline constexpr uint64_t window_rounds = 16;
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
    struct Bell {
      std::atomic<uint32_t> rung;  // the futex word: ring_bell() in gate.cc adds 1 to it to wake the sleeping ranks
      std::atomic<uint32_t> sleepers;
    };
    // Where ranks sleep that wait for all others in a round, for a single rank, and for room in the window. The bells are written
    // only if a rank sleeps, so their cache line usually stays in the caches of all ranks.
    struct alignas(64) Gate {
      Bell all, single, room;
    } gate;
    // Both fields are written once by each rank at most, so this line, too, usually stays in the caches of all ranks.
    alignas(64) std::atomic<uint32_t> closed;  // the number of ranks that have destroyed their Arena
    std::atomic<uint32_t> gave_up;             // 1 + the rank that was the first to give up its calls; 0 if no rank has
  };
  // A cache line of one rank. If messages have at most inline_bytes, this is the only line of that rank that other ranks need to
  // read.
  struct alignas(64) Line {
    std::atomic<uint64_t> arrived;  // the latest of the rounds that use this line at which the rank has arrived
    uint64_t fingerprint;           // a hash of the call's signature; set for the first round of a call
    char data[inline_bytes];
  };
  struct alignas(64) Slot {
    // Rounds use the lines in rotation, and calls the posts, because a rank may be ahead of a peer that still reads them.
    Line& line(uint64_t round) { return lines[round % window_rounds]; }
    Line lines[window_rounds];
    Post posts[window_rounds];
    alignas(64) Introduction introduction;  // for pulls
    std::atomic<bool> reads_all;            // whether this rank can read the memory of every other rank
    std::atomic<bool> waits_for_room;       // whether this rank is in Gate::make_room()
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
  // Returns the given rank's staging memory. It holds the buffers for tiny messages, followed by the rank's chunks. The calls use
  // a buffer of one_way_bytes for each round of the window in rotation, and two buffers of tiny_bytes alternately.
  char* staging(int rank) const { return memory_ + before_staging(size_) + rank * staging_bytes; }
  static constexpr size_t tiny_buffers_bytes = window_rounds * one_way_bytes + 2 * tiny_bytes;

 private:
  static constexpr size_t staging_bytes = tiny_buffers_bytes + chunks * chunk_bytes;
  static size_t before_staging(int size) { return (sizeof(Common) + size * sizeof(Slot) + 4095) / 4096 * 4096; }

  char* memory_;
  int size_;
};

}  // namespace mscomm
