// The control memory of a group on one host: what it holds, and where.
//
// It is in the heap of the lowest rank. docs/design/0001-call.md describes which rank may touch what in which state.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/call.h"

namespace mscomm {

inline constexpr uint64_t not_in_heap = ~uint64_t{0};
// A message of at most so many bytes from foreign memory, which is not in a heap, is copied as a whole; see Arena::tiny().
inline constexpr size_t tiny_bytes = 16 << 10;
// Larger ones go through staging in chunks. Each chunk costs a round, and the chunks that all ranks use must fit into the cache.
inline constexpr size_t chunk_bytes = 512 << 10;
inline constexpr int chunks = 3;
// Bytes of data that fit into the cache line by which a rank says that it has arrived at a round.
inline constexpr size_t inline_bytes = 48;

// What a rank says about its call before the first round.
struct Post {
  Signature signature;
  uint64_t x_offset = not_in_heap;  // in its heap
  uint64_t out_offset = not_in_heap;
  uint64_t x_address = 0, out_address = 0;  // in its process; 0: peers must not read it there
};

class Control {
 public:
  struct Common {
    // Written only if somebody sleeps. Otherwise all ranks keep its cache line.
    struct alignas(64) Gate {
      std::atomic<uint32_t> bell;  // the futex word: changed when all have arrived in a round and some sleep, and by ring()
      std::atomic<uint32_t> sleepers;
    } gate;
    alignas(64) std::atomic<uint32_t> closed;  // ranks whose Arena is gone
  };
  // One cache line: all that the others need to read of a rank whose message is a few bytes.
  struct alignas(64) Line {
    std::atomic<uint64_t> arrived;  // the last round of this parity that the rank reached
    uint64_t fingerprint;           // of the call's signature; in the first round of a call
    char data[inline_bytes];
  };
  struct alignas(64) Slot {
    Line lines[2];  // for odd and even rounds: a rank may be one ahead of a peer that still reads
    Post post[2];
    // For pulls: the process id, and a random number in the process's memory, by which a peer checks that it reads this process.
    alignas(64) pid_t process;
    uint64_t token_address, token;
    std::atomic<bool> reads_all;  // whether this rank can read the memory of every other one
    std::atomic<uint64_t> place;  // of this rank's last wait awake: the round, and the CPU in the low 16 bits; 0: it sleeps
  };
  static_assert(sizeof(Line) == 64 && std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

  // size: of the group on this host.
  Control(char* memory, int size) : memory_(memory), size_(size) {}
  static size_t bytes(int size) { return before_staging(size) + size * staging_bytes; }

  int size() const { return size_; }
  Common& common() const { return *reinterpret_cast<Common*>(memory_); }
  Slot& slot(int rank) const { return reinterpret_cast<Slot*>(memory_ + sizeof(Common))[rank]; }
  // That rank's tiny messages, one for each parity of a call, and its chunks.
  char* staging(int rank) const { return memory_ + before_staging(size_) + rank * staging_bytes; }

 private:
  static constexpr size_t staging_bytes = 2 * tiny_bytes + chunks * chunk_bytes;
  static size_t before_staging(int size) { return (sizeof(Common) + size * sizeof(Slot) + 4095) / 4096 * 4096; }

  char* memory_;
  int size_;
};

}  // namespace mscomm
