// The arena: what the ranks of one host share for one group, and the rounds by which they keep in step.
//
// The group's control memory, in the heap of its lowest rank, holds the gate, one slot a rank and each rank's staging. The
// protocol is in docs/design/0001-call.md; who may touch what in which state is there, too.
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
// From foreign memory a message of at most so many bytes lies whole in the slot of its call.
inline constexpr size_t tiny_bytes = 16 << 10;
// Larger ones pass through staging in chunks, of which each costs a round; the chunks in use by all ranks have to fit the cache.
inline constexpr size_t chunk_bytes = 512 << 10;
inline constexpr int chunks = 3;
// What goes along with the arrival at a round, in the same cache line.
inline constexpr size_t inline_bytes = 48;

// What a rank says about its call before the first round.
struct Post {
  Signature signature;
  uint64_t x_offset = not_in_heap;  // in its heap
  uint64_t out_offset = not_in_heap;
  uint64_t x_address = 0, out_address = 0;  // in its process; 0: not to be read there
};

// What of a call is to be read where it is, in private memory, too.
enum class Pulled { nothing, x, x_and_out };

class Arena {
 public:
  // ranks: of the group, all on this host, as ranks of the job; rank: this one's place among them; control: where the lowest
  // rank's heap has the control memory. spin: whether the host has a CPU for each rank; equal on all ranks.
  Arena(std::vector<int> ranks, int rank, std::shared_ptr<Heaps> heaps, uint64_t control, bool spin);
  // Tells the others that this rank looks at the control memory no more.
  ~Arena();

  // The lowest rank's part, before anybody makes an Arena over it: memory for a group of that size, ready for use.
  static uint64_t reserve(Heap& heap, int size);
  // ... and after all arenas over it are gone, or never if one of them stays: memory that a late rank may look at is not reused.
  static void release(Heap& heap, uint64_t control, int size);
  // ... and where this rank makes no Arena, but the others may have been told to make theirs.
  static void abandon(Heap& heap, uint64_t control, int size);

  int rank() const { return rank_; }
  int size() const { return size_; }

  // ENTERED: tells the others about this call, and offers them x and out where the heap lets them have it and they are not small.
  // Followed by the first round.
  void post(const Call& call, Pulled pulled = Pulled::nothing);
  // After that round: whether all ranks posted the same signature.
  bool agreed() const;
  // The group is broken: takes what was offered for the call out of the others' reach. Throws if some of it stays there; then no
  // later call offers anything.
  void withdraw(const Call& call);
  // What rank said about the current call. Valid after the first round, until this rank's next call.
  const Post& posted(int rank) const { return slot(rank).post[parity_]; }

  // Arrives, and returns when all ranks have.
  void round(const Wait& wait);
  // Ranks that have not arrived in the current round.
  std::vector<int> missing() const;
  // Wakes every sleeper of the host, so that it looks around.
  void ring() const;

  // An array of at most so many bytes is not offered: a round that is a turn of the scheduler costs more than the copy.
  size_t unoffered_bytes() const { return spin_ ? unshared_bytes : 2 * unshared_bytes; }
  // Where rank's message of the current call lies when none is larger than `bytes`, which are tiny. Before the first round this
  // rank's is written, and read after it, until the next round.
  char* tiny(int rank, size_t bytes) const {
    return bytes <= inline_bytes ? slot(rank).lines[first_round_ & 1].data : staging(rank) + parity_ * tiny_bytes;
  }
  // The staging chunk of rank that is number `step` since the group was made; in use until step + chunks.
  char* chunk(int rank, uint64_t step) const { return staging(rank) + 2 * tiny_bytes + (step % chunks) * chunk_bytes; }
  // Chunk steps taken so far; a call that used n of them adds n, on all ranks alike.
  uint64_t& steps() { return steps_; }

  // Whether each rank can read the memory of every other one (process_vm_readv). To be asked in the same place of a call on all
  // ranks, after its first round: the first time they try it, which takes a round.
  bool can_pull(const Wait& wait);
  // What can_pull has found; false before.
  bool pulls() const { return pulls_ == Tried::yes; }
  // Copies bytes from that address on in rank's process.
  void pull(int rank, uint64_t address, void* to, size_t bytes, const Wait& wait) const;

  // rank's memory at an offset that it posted, after checking that bytes from there lie in its heap; nullptr: not in its heap.
  char* at(int rank, uint64_t offset, size_t bytes) const;
  bool x_in_heap(int rank) const { return posted(rank).x_offset != not_in_heap; }

  // Lost wakes: sleeps that lasted until their bound although a rank that had found all there as it arrived had woken the
  // sleepers before, or had not, because it saw none. Always 0, and tested to be. That there is such a rank it does not tell.
  uint64_t lost_wakes() const { return lost_wakes_; }
  // How often this rank has left a CPU that a lower one shared.
  uint64_t partings() const { return partings_; }

 private:
  // Written only where somebody sleeps: else a line that all ranks have in their caches.
  struct alignas(64) Gate {
    std::atomic<uint32_t> bell;  // the futex word: rung when all have arrived in a round and some sleep
    std::atomic<uint32_t> sleepers;
    alignas(64) std::atomic<uint32_t> closed;  // ranks whose Arena is gone
  };
  // One cache line: what the others need of a rank that has nothing but a few bytes to say.
  struct alignas(64) Line {
    std::atomic<uint64_t> arrived;  // the last round of this parity that the rank reached
    uint64_t fingerprint;           // in the first round of a call: of its signature
    char data[inline_bytes];
  };
  struct alignas(64) Slot {
    Line lines[2];  // for odd and even rounds: a rank may be one ahead of a peer that still reads
    Post post[2];
    // For lost_wakes alone: the last round in which this rank found all there as it arrived, and when it had woken the sleepers,
    // on CLOCK_MONOTONIC; 0: there were none.
    alignas(64) std::atomic<uint64_t> opened;
    std::atomic<int64_t> opened_ns;
    // For pull: the process, and a number somewhere in its memory, to see that what is read is this process and no other.
    pid_t process;
    uint64_t token_address, token;
    std::atomic<bool> reads_all;  // what can_pull found on this rank
    std::atomic<uint64_t> place;  // where this rank last waited awake: the round, and the CPU in the low 16 bits; 0: it sleeps
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
  void wake();
  void sleep(const Wait& wait);
  void part_from_who_shares_the_cpu();
  bool woken_before(int64_t bound_ns) const;
  bool reads_token_of(int rank) const;
  // What was read by a test last: most programs use the same arrays again.
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
  int here_ = 0;              // the ranks below this one are known to have arrived in the current round
  uint64_t steps_ = 0;
  unsigned parity_ = 0;
  uint64_t token_;
  std::atomic<Tried> pulls_ = Tried::not_yet;
  Tested tested_x_, tested_out_;
  uint64_t lost_wakes_ = 0;
  uint64_t partings_ = 0;
  Clock::time_point looked_, parted_;  // at who shares the CPU
  const int owner_ = getpid();         // a forked child has the mapping, but is no rank
};

}  // namespace mscomm
