// The arena: what the ranks of one host share for one group, and the rounds by which they keep in step.
//
// The group's control memory is in the heap of its lowest rank. It holds the gate, and a slot and staging chunks for each rank.
// docs/design/0001-call.md describes the protocol, and which rank may touch what in which state.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/call.h"
#include "net/wait.h"
#include "transport/heap.h"
#include "transport/memory.h"

namespace mscomm {

inline constexpr uint64_t not_in_heap = ~uint64_t{0};
// A message of at most so many bytes from foreign memory, which is not in a heap, is copied as a whole; see tiny().
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

// Which arrays of a call peers may read in this rank's process, if they are in private memory.
enum class Pulled { nothing, x, x_and_out };

class Arena {
 public:
  // ranks: those of the group on this host, as ranks of the job. rank: this rank's place among them. control: the offset of the
  // control memory in the lowest rank's heap. spin: whether the host has a CPU for each rank; the same on all ranks.
  Arena(std::vector<int> ranks, int rank, std::shared_ptr<Heaps> heaps, uint64_t control, bool spin);
  // Tells the others that this rank no longer looks at the control memory.
  ~Arena();

  // The lowest rank calls these three, the first before any rank makes an Arena there. Reserves control memory for a group of
  // that size, ready for use, and returns its offset.
  static uint64_t reserve(Heap& heap, int size);
  // The memory is used again when all arenas there are gone. It is never used again if one of them stays, because a late rank may
  // still look at it.
  static void release(Heap& heap, uint64_t control, int size);
  // release() by a rank that made no Arena there, although the others may have made theirs.
  static void abandon(Heap& heap, uint64_t control, int size);

  int rank() const { return rank_; }
  int size() const { return size_; }

  // State ENTERED: tells the others about this call, and offers them x and out, if they are in the heap and not small. The first
  // round must follow.
  void post(const Call& call, Pulled pulled = Pulled::nothing);
  // To be called after that round: whether all ranks posted the same signature.
  bool agreed() const;
  // To be called when the group is broken: takes what was offered for the call out of the others' reach. Throws if that fails for
  // some of it; then no later call offers anything.
  void withdraw(const Call& call);
  // What that rank posted for the current call. Valid after the first round, until this rank's next call.
  const Post& posted(int rank) const { return slot(rank).post[parity_]; }

  // Arrives at the next round, and returns when all ranks have arrived.
  void round(const Wait& wait);
  // Ranks that have not arrived in the current round.
  std::vector<int> missing() const;
  // Wakes every rank that sleeps in this arena, so that it looks around.
  void ring() const;

  // Arrays of at most so many bytes are not offered: copying them costs less than another round, the more so if there are more
  // ranks than CPUs, so that each round waits for the scheduler.
  size_t unoffered_bytes() const { return spin_ ? unshared_bytes : 2 * unshared_bytes; }
  // Where that rank's message of the current call lies, if no rank's message is larger than `bytes`, at most tiny_bytes. Each
  // rank writes its own before the first round. All may be read after it, until the next round.
  char* tiny(int rank, size_t bytes) const {
    return bytes <= inline_bytes ? slot(rank).lines[first_round_ & 1].data : staging(rank) + parity_ * tiny_bytes;
  }
  // That rank's staging chunk for a step, counted since the group was made. Step + chunks uses the same memory.
  char* chunk(int rank, uint64_t step) const { return staging(rank) + 2 * tiny_bytes + (step % chunks) * chunk_bytes; }
  // Steps taken so far. A call that used n chunks of each rank adds n, on all ranks.
  uint64_t& steps() { return steps_; }

  // Whether each rank can read the memory of every other one (process_vm_readv). All ranks must call it at the same point of a
  // call, after the first round, because the first time they try it, which takes a round.
  bool can_pull(const Wait& wait);
  // What can_pull has found; false before that.
  bool pulls() const { return pulls_ == Tried::yes; }
  // Copies so many bytes from that address in that rank's process.
  void pull(int rank, uint64_t address, void* to, size_t bytes, const Wait& wait) const;

  // That rank's memory at an offset that it posted. Checks that the bytes from there on lie in its heap. nullptr: not_in_heap.
  char* at(int rank, uint64_t offset, size_t bytes) const;
  bool x_in_heap(int rank) const { return posted(rank).x_offset != not_in_heap; }

  // How often this rank has left a CPU that it shared with a lower rank.
  uint64_t partings() const { return partings_; }

 private:
  // Written only if somebody sleeps. Otherwise all ranks keep its cache line.
  struct alignas(64) Gate {
    std::atomic<uint32_t> bell;  // the futex word: changed when all have arrived in a round and some sleep, and by ring()
    std::atomic<uint32_t> sleepers;
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
    // For pull: the process id, and a random number in the process's memory, by which a peer checks that it reads this process.
    alignas(64) pid_t process;
    uint64_t token_address, token;
    std::atomic<bool> reads_all;  // what can_pull found on this rank
    std::atomic<uint64_t> place;  // of this rank's last wait awake: the round, and the CPU in the low 16 bits; 0: it sleeps
  };
  static_assert(sizeof(Line) == 64 && std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

  static constexpr size_t staging_bytes = 2 * tiny_bytes + chunks * chunk_bytes;

  static size_t control_bytes(int size);
  Gate& gate() const { return *reinterpret_cast<Gate*>(control_); }
  Slot& slot(int rank) const { return reinterpret_cast<Slot*>(control_ + sizeof(Gate))[rank]; }
  char* staging(int rank) const;
  uint64_t offered(const void* memory, size_t bytes) const;
  // Whether all have arrived in the current round.
  bool open();
  void sleep(const Wait& wait);
  void part_from_who_shares_the_cpu();
  bool reads_token_of(int rank) const;
  // The array that readable() tested last: most programs use the same arrays again.
  struct Tested {
    const void* memory = nullptr;
    size_t bytes = 0;
    bool operator==(const Tested&) const = default;
  };
  uint64_t readable(const void* memory, size_t bytes, Tested& last) const;

  enum class Tried { not_yet, no, yes };

  std::vector<int> ranks_;
  int rank_, size_;
  std::shared_ptr<Heaps> heaps_;
  char* control_;
  bool spin_;
  uint64_t round_ = 0;
  uint64_t first_round_ = 0;  // of the current call
  int here_ = 0;              // all ranks below this number are known to have arrived in the current round
  uint64_t steps_ = 0;
  unsigned parity_ = 0;
  uint64_t token_;
  std::atomic<Tried> pulls_ = Tried::not_yet;
  Tested tested_x_, tested_out_;
  uint64_t partings_ = 0;
  Clock::time_point looked_, parted_;  // when it last looked which ranks share its CPU, and when it last left that CPU
  const int owner_ = getpid();         // a forked child has the mapping, but is not a rank
};

}  // namespace mscomm
