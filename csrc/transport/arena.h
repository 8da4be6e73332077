// The arena: what the ranks of one host share for one group. In a call each rank posts what it does, and they keep in step by
// the rounds of the gate.
//
// docs/design/0001-call.md describes the protocol, and which rank may touch what in which state.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "base/call.h"
#include "net/wait.h"
#include "transport/control.h"
#include "transport/gate.h"
#include "transport/heap.h"
#include "transport/memory.h"
#include "transport/pulls.h"

namespace mscomm {

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
  int size() const { return control_.size(); }

  // State ENTERED: tells the others about this call, and offers them x and out, if they are in the heap and not small. The first
  // round must follow.
  void post(const Call& call, Pulled pulled = Pulled::nothing);
  // To be called after that round: whether all ranks posted the same signature.
  bool agreed() const;
  // To be called when the group is broken: takes what was offered for the call out of the others' reach. Throws if that fails for
  // some of it; then no later call offers anything.
  void withdraw(const Call& call);
  // What that rank posted for the current call. Valid after the first round, until this rank's next call.
  const Post& posted(int rank) const { return control_.slot(rank).post[parity_]; }

  // Arrives at the next round, and returns when all ranks have arrived.
  void round(const Wait& wait) { gate_.round(wait); }
  // Ranks that have not arrived in the current round.
  std::vector<int> missing() const { return gate_.missing(); }
  // Wakes every rank that sleeps in this arena, so that it looks around.
  void ring() const { gate_.ring(); }

  // Arrays of at most so many bytes are not offered: copying them costs less than another round, the more so if there are more
  // ranks than CPUs, so that each round waits for the scheduler.
  size_t unoffered_bytes() const { return spin_ ? unshared_bytes : 2 * unshared_bytes; }
  // Where that rank's message of the current call lies, if no rank's message is larger than `bytes`, at most tiny_bytes. Each
  // rank writes its own before the first round. All may be read after it, until the next round.
  char* tiny(int rank, size_t bytes) const {
    return bytes <= inline_bytes ? first_line(rank).data : control_.staging(rank) + parity_ * tiny_bytes;
  }
  // That rank's staging chunk for a step; steps are counted since the group was made. Step + chunks uses the same memory.
  char* chunk(int rank, uint64_t step) const { return control_.staging(rank) + 2 * tiny_bytes + (step % chunks) * chunk_bytes; }
  // Steps taken so far. A call that used n chunks of each rank adds n, on all ranks.
  uint64_t& steps() { return steps_; }

  // Whether each rank can read the memory of every other one (process_vm_readv). All ranks must call it at the same point of a
  // call, after the first round, because the first time they try it, which takes a round.
  bool can_pull(const Wait& wait) { return pulls_.possible(gate_, wait); }
  // What can_pull has found; false before that.
  bool pulls() const { return pulls_.known_possible(); }
  // Copies so many bytes from that address in that rank's process.
  void pull(int rank, uint64_t address, void* to, size_t bytes, const Wait& wait) const {
    pulls_.pull(rank, address, to, bytes, wait);
  }

  // That rank's memory at an offset that it posted. Checks that the bytes from there on lie in its heap. nullptr: not_in_heap.
  char* at(int rank, uint64_t offset, size_t bytes) const {
    return offset == not_in_heap ? nullptr : heaps_->at(ranks_[rank], offset, bytes);
  }
  bool x_in_heap(int rank) const { return posted(rank).x_offset != not_in_heap; }

  // How often this rank has left a CPU that it shared with a lower rank.
  uint64_t partings() const { return gate_.partings(); }

 private:
  Control::Line& first_line(int rank) const { return control_.slot(rank).lines[first_round_ & 1]; }
  uint64_t offered(const void* memory, size_t bytes) const;

  const std::vector<int> ranks_;
  const int rank_;
  const std::shared_ptr<Heaps> heaps_;
  const Control control_;
  const bool spin_;
  Gate gate_;
  Pulls pulls_;
  uint64_t first_round_ = 0;  // of the current call
  uint64_t steps_ = 0;
  unsigned parity_ = 0;
  const int owner_ = getpid();  // a forked child has the mapping, but is not a rank
};

}  // namespace mscomm
