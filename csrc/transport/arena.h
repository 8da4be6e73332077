// An arena is the memory shared by a group's ranks on one host. At the start of a call, each rank posts the call that it is
// making. The rounds of the gate then keep the ranks in step.
//
// docs/design/0001-call.md describes the protocol, and which rank may touch which memory in which state.
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
  // ranks: the job rank of each rank of the group on this host. rank: this rank's index in `ranks`. control: the offset of the
  // control memory in the lowest rank's heap. spin: whether the host has a CPU for each rank; all ranks must pass the same value.
  Arena(std::vector<int> ranks, int rank, std::shared_ptr<Heaps> heaps, uint64_t control, bool spin);
  // Tells the other ranks that this rank no longer accesses the control memory.
  ~Arena();

  // Only the lowest rank calls reserve(), release() and abandon(). It must call reserve() before any rank creates an Arena.
  // reserve() reserves zero-filled control memory for a group of `size` ranks, and returns its offset.
  static uint64_t reserve(Heap& heap, int size) { return heap.reserve(Control::bytes(size)); }
  // Lets the heap reuse the control memory after all ranks have destroyed their Arenas. If a rank never destroys its Arena, the
  // memory is never reused, because that rank may wake up late and access the memory.
  static void release(Heap& heap, uint64_t control, int size);
  // The lowest rank calls abandon() instead of release() if it has not created an Arena of its own, although other ranks may have
  // created theirs. abandon() counts the lowest rank as one that has destroyed its Arena, and then works like release().
  static void abandon(Heap& heap, uint64_t control, int size);

  int rank() const { return rank_; }
  int size() const { return control_.size(); }
  int in_job(int rank) const { return ranks_[rank]; }

  // Enters the state ENTERED of docs/design/0001-call.md: tells the other ranks about this call, and offers them x and out if
  // these arrays are in the heap and larger than unoffered_bytes(). The first round of the call must follow. pulled: the arrays
  // that peers may read directly from this process. Waits if this rank is too far ahead of the slowest rank.
  void post(const Call& call, const Wait& wait, Pulled pulled = Pulled::nothing);
  // Does the same for a call whose only round is one-way, and offers nothing.
  void post_one_way(const Call& call, const Wait& wait);
  // Returns whether all ranks posted the same signature. Call this after the first round.
  bool agreed() const;
  // Returns whether the given rank has arrived at the first round of the current call.
  bool has_arrived(int rank) const { return first_line(rank).arrived.load() >= first_round_; }
  // Returns whether the given rank has arrived at the first round of the current call, with another signature.
  bool has_arrived_with_another(int rank) const {
    return has_arrived(rank) && first_line(rank).fingerprint != first_line(rank_).fingerprint;
  }
  // Makes the call's arrays inaccessible to the other ranks. Call this when the group is broken. If withdraw() fails for an
  // array, it throws, and later calls of this rank offer no arrays.
  void withdraw(const Call& call);
  // Returns what the given rank posted for the current call. The result is valid from the end of the first round until this
  // rank's next call.
  const Post& posted(int rank) const { return control_.slot(rank).posts[calls_ % window_rounds]; }

  // Arrives at the next round, and returns when all ranks have arrived.
  void round(const Wait& wait) { gate_.round(wait); }
  // The round of a one-way call, see meet_one_way() in arena_steps.h and the functions of Gate.
  void arrive(bool awaited_alone) { gate_.arrive(awaited_alone); }
  void wait_for_all_alone(const Wait& wait) { gate_.wait_for_all_alone(wait); }
  void wait_for(int rank, const Wait& wait) { gate_.wait_for(rank, wait); }
  // Tells the peers that this rank gives up its calls, and wakes all ranks that are sleeping in this arena, so that they call
  // Wait::look(). Call this before the program can change the arrays of a call that has not completed.
  void give_up() const;
  // Call this after this rank has read arrays of its peers, and before anybody relies on what it has read. Throws if a peer had
  // given up the call: its program may have changed the array before this rank read it.
  void confirm_reads() const;
  // The round after a step in which this rank may have read arrays of its peers.
  void round_after_reads(const Wait& wait) {
    confirm_reads();
    round(wait);
  }

  // Arrays of at most this many bytes are not offered to other ranks. Sharing an array needs one more round, and a round takes
  // longer than copying such a small array. The limit is higher if there are more ranks than CPUs: a round then takes longer,
  // because ranks must wait for the kernel to give them a CPU.
  size_t unoffered_bytes() const { return spin_ ? unshared_bytes : 2 * unshared_bytes; }
  // Returns the given rank's buffer for its tiny message in the current call. Each rank writes its own message before one of
  // the call's rounds, usually the first. All ranks may read the message between this round and the next. bytes: the size of
  // the largest message of any rank, at most tiny_bytes.
  char* tiny(int rank, size_t bytes) const {
    if (bytes <= inline_bytes) return first_line(rank).data;
    char* const buffers = control_.staging(rank);
    if (bytes <= one_way_bytes) return buffers + calls_ % window_rounds * one_way_bytes;
    return buffers + window_rounds * one_way_bytes + meetings_ % 2 * tiny_bytes;
  }
  // Returns the given rank's staging chunk for a step. Steps are counted from the creation of the group. Steps s and s + chunks
  // use the same memory.
  char* chunk(int rank, uint64_t step) const {
    return control_.staging(rank) + Control::tiny_buffers_bytes + (step % chunks) * chunk_bytes;
  }
  // Returns the number of steps so far. After a call that used n chunks of each rank, every rank must add n to this number.
  uint64_t& steps() { return steps_; }

  // Returns whether each rank can read the memory of every other rank with process_vm_readv. The first call to can_pull() tries
  // this, which takes a round. So all ranks must call can_pull() at the same point of a collective call, after the first round of
  // that collective call.
  bool can_pull(const Wait& wait) { return pulls_.possible(gate_, wait); }
  // Returns the result of can_pull(), or false if can_pull() has not been called yet.
  bool pulls() const { return pulls_.known_possible(); }
  // Copies `bytes` bytes from `address` in the given rank's process to `to`.
  void pull(int rank, uint64_t address, void* to, size_t bytes, const Wait& wait) { pulls_.pull(rank, address, to, bytes, wait); }

  // Returns the address in this process of an array that the given rank posted, or nullptr if `offset` is not_in_heap. Throws if
  // the array does not lie completely inside the heap. offset: where the array begins in that rank's heap.
  char* at(int rank, uint64_t offset, size_t bytes) const {
    return offset == not_in_heap ? nullptr : heaps_->at(ranks_[rank], offset, bytes);
  }
  bool x_in_heap(int rank) const { return posted(rank).x_offset != not_in_heap; }

  // Returns how many times this rank has left a CPU that it shared with a lower rank.
  uint64_t partings() const { return gate_.partings(); }

 private:
  Control::Line& first_line(int rank) const { return control_.slot(rank).line(first_round_); }
  // Begins a call, and returns this rank's post for it.
  Post& begin(const Wait& wait);
  // Writes the fingerprint. Call this as late as possible: peers may already poll the line, and then a write moves it to this CPU
  // and back once more.
  void sign(const Call& call) { first_line(rank_).fingerprint = call.signature.fingerprint(); }
  uint64_t offered(const void* memory, size_t bytes) const;

  const std::vector<int> ranks_;
  const int rank_;
  const std::shared_ptr<Heaps> heaps_;
  const Control control_;
  const bool spin_;
  Gate gate_;
  Pulls pulls_;
  uint64_t first_round_ = 0;  // the first round of the current call
  uint64_t steps_ = 0;
  uint64_t calls_ = 0, meetings_ = 0;  // the numbers of all calls so far, and of those in which all ranks have met
  // The process id of this rank. A forked child inherits the Arena, but is not a rank, so ~Arena() does nothing in the child.
  const int owner_ = getpid();
};

}  // namespace mscomm
