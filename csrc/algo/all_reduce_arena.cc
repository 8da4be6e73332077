// All-reduce and reduce in shared memory. Data moves in one of four ways. In the first three, each rank reduces one part of the
// message, and the result of that part goes to all ranks, or to the root.
//
// 1. If all arrays are in heaps, rank r reads part r of every x and writes the result into part r of every out. This takes two
//    rounds and no staging.
// 2. Arrays in foreign memory (memory outside the heaps) go through staging in chunks, with one round for each chunk. The steps
//    overlap: while the slowest rank is still copying the result of chunk k-1 from staging, others reduce chunk k and copy chunk
//    k+1 into staging. A rank does not stage the part of its x that it reduces itself, and does not read the result of this part
//    from staging.
// 3. If there are only two ranks, and they have long arrays in foreign memory, each rank reads the other's arrays directly from
//    the other's process. This is possible only if the kernel allows it.
// 4. If the messages are tiny and not all arrays are in heaps, every rank that receives the result reads the messages from all
//    ranks' buffers for tiny messages, and reduces them itself. This takes one round, or two if the x of some rank is in a heap.
#include <algorithm>
#include <array>

#include "algo/arena_steps.h"
#include "algo/order.h"

namespace mscomm {

namespace {

// A rank reduces its part in pieces of hot_bytes bytes, so that the result of a piece is still in the cache when the rank copies
// it to all outputs. A part of at least long_part bytes comes from memory rather than from a cache, and then longer pieces take
// less time.
constexpr size_t hot_bytes = 4 << 10, hot_bytes_of_long_parts = 16 << 10, long_part = 8 << 20;

bool receives(const Call& call, int rank) { return call.signature.root < 0 || rank == call.signature.root; }

// Returns whether every x, and every out that receives a result, is in a heap. All ranks get the same answer. Call this after the
// first round.
bool all_in_heaps(const Call& call, const Arena& arena) {
  for (int rank = 0; rank < arena.size(); rank++)
    if (!arena.x_in_heap(rank) || (receives(call, rank) && arena.posted(rank).out_offset == not_in_heap)) return false;
  return true;
}

void in_heaps(const Call& call, const Ranks& ranks, const Wait& wait) {
  Arena& arena = *ranks.arena;
  const int n = arena.size(), me = arena.rank();
  const size_t bytes = call.bytes();
  std::vector<const void*> in(n);
  std::vector<char*> x(n), out;
  for (int i = 0; i < n; i++) {
    const int rank = (me + i) % n;
    x[rank] = arena.at(rank, arena.posted(rank).x_offset, bytes);
    if (receives(call, rank)) out.push_back(arena.at(rank, arena.posted(rank).out_offset, bytes));
  }
  const Range mine = part(bytes, n, me);
  const size_t hot = mine.bytes() < long_part ? hot_bytes : hot_bytes_of_long_parts;
  for (size_t at = mine.begin; at < mine.end; at += hot) {
    const size_t now = std::min(hot, mine.end - at);
    for (int rank = 0; rank < n; rank++) in[rank] = x[rank] + at;
    reduce_in_order(call.signature, ranks.layout, in.data(), out[0] + at, now);
    for (size_t i = 1; i < out.size(); i++) copy(out[i] + at, out[0] + at, now);
  }
  arena.round_after_reads(wait);
}

// If the total size of all ranks' messages is at most this many bytes, and each message fits into its rank's buffer for tiny
// messages, every rank reduces all messages itself. Dividing the work would need one more round, which takes longer. Messages of
// at most inline_bytes are always reduced in this way, whatever their total size.
constexpr size_t combined_by_all_bytes = 256 << 10;

bool by_slots(size_t bytes, const Arena& arena) {
  return bytes <= tiny_bytes && (bytes <= inline_bytes || bytes * arena.size() <= combined_by_all_bytes);
}

void from_slots(const Call& call, const Ranks& ranks) {
  Arena& arena = *ranks.arena;
  if (!receives(call, arena.rank())) return;
  thread_local std::vector<const void*> in;  // its memory serves all calls of this thread
  in.resize(arena.size());
  for (int rank = 0; rank < arena.size(); rank++) in[rank] = arena.tiny(rank, call.bytes());
  reduce_in_order(call.signature, ranks.layout, in.data(), call.out, call.bytes());
}

// Called after the first round if not all arrays are in heaps. An x that is in a heap has not been copied into its rank's
// buffer for tiny messages yet, because no copy is needed if all arrays are in heaps. So a rank with such an x copies it now,
// and then all ranks run a round. Does nothing if no rank's x is in a heap.
void fill_slots(const Call& call, Arena& arena, const Wait& wait) {
  bool any_in_heap = false;
  for (int rank = 0; rank < arena.size(); rank++) any_in_heap |= arena.x_in_heap(rank);
  if (!any_in_heap) return;
  if (arena.x_in_heap(arena.rank())) copy(arena.tiny(arena.rank(), call.bytes()), call.x, call.bytes());
  arena.round(wait);
}

// Reduces through staging, chunk by chunk. A rank stages only those parts of its x that other ranks reduce, and only those
// results that other ranks need.
class Chunks {
 public:
  Chunks(const Call& call, const Ranks& ranks)
      : call_(call), ranks_(ranks), arena_(*ranks.arena), n_(arena_.size()), me_(arena_.rank()), first_(arena_.steps()) {}

  size_t count() const { return pieces(call_.bytes(), chunk_bytes); }
  void put(size_t k) const {
    if (arena_.x_in_heap(me_)) return;
    const Range whole = chunk(k);
    copy_but(staged(me_, k), call_.in() + whole.begin, whole.bytes(), part(whole.bytes(), n_, me_));
  }
  // Looks up the address of each x that can be read without staging.
  void look() {
    for (int rank = 0; rank < n_; rank++)
      x_.push_back(rank == me_ ? call_.in() : arena_.at(rank, arena_.posted(rank).x_offset, call_.bytes()));
    in_.resize(x_.size());
  }
  void reduce(size_t k) {
    const Range whole = chunk(k), mine = part(whole.bytes(), n_, me_);
    for (size_t at = mine.begin; at < mine.end; at += hot_bytes) {
      const size_t now = std::min(hot_bytes, mine.end - at);
      for (int rank = 0; rank < n_; rank++) {
        const char* direct = x_[rank];
        in_[rank] = (direct ? direct + whole.begin : staged(rank, k)) + at;
      }
      char* const staged_at = staged(me_, k) + at;
      char* const result = receives(call_, me_) ? call_.result() + whole.begin + at : staged_at;
      reduce_in_order(call_.signature, ranks_.layout, in_.data(), result, now);
      if (call_.signature.root < 0) copy(staged_at, result, now);  // with a root, the result is already where the root finds it
    }
  }
  void take(size_t k) const {
    const Range whole = chunk(k);
    for (int i = 1; i < n_ && receives(call_, me_); i++) {
      const int rank = (me_ + i) % n_;
      const Range theirs = part(whole.bytes(), n_, rank);
      copy(call_.result() + whole.begin + theirs.begin, staged(rank, k) + theirs.begin, theirs.bytes());
    }
  }

 private:
  Range chunk(size_t k) const { return piece(call_.bytes(), chunk_bytes, k); }
  char* staged(int rank, size_t k) const { return arena_.chunk(rank, first_ + k); }

  const Call& call_;
  const Ranks& ranks_;
  Arena& arena_;
  const int n_, me_;
  const uint64_t first_;
  std::vector<const char*> x_;
  std::vector<const void*> in_;
};

// In a group of two ranks that can read each other's memory, a message of at least this many bytes needs no staging. Each rank
// reduces one half of the message. To do so, it reads this half of the peer's x. Later it reads the other half of the result,
// which the peer has reduced. With more than two ranks, several ranks would read the same result from one process, which takes
// longer than staging.
constexpr size_t pulled_bytes = 2 << 20;

bool all_readable(const Arena& arena) {
  for (int rank = 0; rank < arena.size(); rank++)
    if (arena.posted(rank).x_address == 0 || arena.posted(rank).out_address == 0) return false;
  return true;
}

void pulled(const Call& call, const Ranks& ranks, const Wait& wait) {
  Arena& arena = *ranks.arena;
  const int me = arena.rank(), peer = 1 - me;
  char* const copied = ranks.scratch_of(chunk_bytes);
  const Range mine = part(call.bytes(), 2, me), theirs = part(call.bytes(), 2, peer);
  std::array<const void*, 2> in;
  for (size_t at = mine.begin; at < mine.end; at += chunk_bytes) {
    const size_t now = std::min(chunk_bytes, mine.end - at);
    arena.pull(peer, arena.posted(peer).x_address + at, copied, now, wait);
    in[me] = call.in() + at;
    in[peer] = copied;
    reduce_in_order(call.signature, ranks.layout, in.data(), call.result() + at, now);
  }
  arena.round_after_reads(wait);
  arena.pull(peer, arena.posted(peer).out_address + theirs.begin, call.result() + theirs.begin, theirs.bytes(), wait);
  arena.round_after_reads(wait);
}

}  // namespace

void all_reduce_arena(const Call& call, const Ranks& ranks, const Wait& wait) {
  Arena& arena = *ranks.arena;
  // A small reduce always takes way 4, in a one-way round: which arrays are in heaps is known only when all ranks have arrived.
  if (call.signature.root >= 0 && call.bytes() <= one_way_bytes && by_slots(call.bytes(), arena)) {
    arena.post_one_way(call, wait);
    const auto differs = meet_one_way(call.x, call.bytes(), call.bytes(), call, call.signature.root, arena, wait);
    if (differs) throw *differs;
    return from_slots(call, ranks);
  }
  const bool pull = arena.size() == 2 && call.signature.root < 0 && call.bytes() >= pulled_bytes;
  arena.post(call, wait, pull ? Pulled::x_and_out : Pulled::nothing);
  if (by_slots(call.bytes(), arena)) {
    if (!arena.x_in_heap(arena.rank())) copy(arena.tiny(arena.rank(), call.bytes()), call.x, call.bytes());
    meet(arena, wait);
    // Posts never give the heap locations of arrays of at most unoffered_bytes(). So for such arrays, this rank does not read
    // the posts, which saves it reading one or two cache lines of each rank.
    if (call.bytes() > arena.unoffered_bytes()) {
      if (all_in_heaps(call, arena)) return in_heaps(call, ranks, wait);
      fill_slots(call, arena, wait);
    }
    return from_slots(call, ranks);
  }
  Chunks chunks(call, ranks);
  const bool staged = !(pull && arena.pulls());
  if (staged) chunks.put(0);
  meet(arena, wait);
  if (all_in_heaps(call, arena)) return in_heaps(call, ranks, wait);
  if (pull && arena.can_pull(wait) && all_readable(arena)) return pulled(call, ranks, wait);
  // If chunk 0 has not been staged, the peer was expected to read x directly, but some array of this call cannot be read from
  // its owner's process.
  if (!staged) {
    chunks.put(0);
    arena.round(wait);
  }
  chunks.look();
  const size_t count = chunks.count();
  for (size_t k = 0; k < count; k++) {
    chunks.reduce(k);
    if (k + 1 < count) chunks.put(k + 1);
    arena.round_after_reads(wait);
    chunks.take(k);
  }
  arena.steps() += count;
}

}  // namespace mscomm
