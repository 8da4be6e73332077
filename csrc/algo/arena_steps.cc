// What the algorithms in the arena share: the first round, x's way through staging, and moving without combining.
#include "algo/algorithm.h"

namespace mscomm {

void meet(Arena& arena, const Wait& wait) {
  arena.round(wait);
  if (arena.agreed()) return;
  Differs differs;
  for (int rank = 0; rank < arena.size(); rank++) differs.calls.emplace_back(rank, arena.posted(rank).signature);
  throw differs;
}

void meet_with(const void* x, size_t x_bytes, size_t largest_bytes, const Call& call, Arena& arena, const Wait& wait) {
  arena.post(call);
  if (x) copy(arena.tiny(arena.rank(), largest_bytes), x, x_bytes);
  meet(arena, wait);
}

Staging::Staging(Arena& arena, const void* x, Blocks blocks)
    : arena_(arena),
      x_(static_cast<const char*>(x)),
      blocks_(std::move(blocks)),
      left_out_(static_cast<size_t>(blocks_.size())),
      piece_bytes_(std::max<size_t>(64, chunk_bytes / static_cast<size_t>(blocks_.size()) / 64 * 64)),
      first_(arena.steps()) {
  if (blocks_.size() > 1) leave_out(arena.rank());  // its own block a rank reads from x
}

void Staging::enter(const Call& call, const Wait& wait) {
  arena_.post(call);
  put(0);
  meet(arena_, wait);
}

void Staging::put(size_t k) const {
  const int me = arena_.rank();
  if (!x_ || arena_.x_in_heap(me)) return;
  char* chunk = arena_.chunk(me, first_ + k);
  for (int block = 0; block < blocks_.size(); block++) {
    if (left_out_[static_cast<size_t>(block)]) continue;
    const Range now = piece(blocks_.bytes(block), piece_bytes_, k);
    copy(chunk + static_cast<size_t>(block) * piece_bytes_, x_ + blocks_.begin(block) + now.begin, now.bytes());
  }
}

const char* Staging::at(int rank, size_t k) const {
  return arena_.chunk(rank, first_ + k) + (blocks_.size() > 1 ? static_cast<size_t>(arena_.rank()) * piece_bytes_ : 0);
}

void move_in_arena(const Call& call, const Ranks& ranks, Moves moves, const Wait& wait) {
  Arena& arena = *ranks.arena;
  const int n = arena.size(), me = arena.rank(), root = call.signature.root;
  const bool for_all = moves.blocks.size() == 1;
  // In place, all_to_all writes over what others still need: then nobody else touches the array.
  const bool hidden = call.signature.what == Collective::all_to_all && call.x == call.out;
  const Call posted = hidden ? Call{.signature = call.signature} : call;
  if (moves.largest_x <= tiny_bytes) {
    meet_with(moves.x, moves.blocks.total(), moves.largest_x, posted, arena, wait);
    for (int source = 0; source < n; source++) {
      const Move move = moves.between(source, me);
      if (move.bytes) copy(call.result() + move.to, arena.tiny(source, moves.largest_x) + move.from, move.bytes);
    }
    return;
  }
  Staging staging(arena, moves.x, std::move(moves.blocks));
  staging.enter(posted, wait);

  // The posts are the same for all, so all see the same ways.
  enum class Way { own, read, written, staged };
  const auto way = [&](int source, int destination) {
    if (source == destination) return Way::own;
    const bool readable = arena.x_in_heap(source);
    // A root that has one message for all would have to write it many times.
    const bool writable = arena.posted(destination).out_offset != not_in_heap && !(for_all && source == root);
    // The root is alone: where both could copy, the others do it.
    if (writable && (!readable || destination == root)) return Way::written;
    return readable ? Way::read : Way::staged;
  };
  size_t largest_staged = 0;
  bool shared = false;  // somebody's array was read or written by somebody else
  for (int source = 0; source < n; source++)
    for (int destination = 0; destination < n; destination++) {
      const size_t bytes = moves.between(source, destination).bytes;
      const Way by = way(source, destination);
      if (bytes == 0 || by == Way::own) continue;
      if (by == Way::staged) largest_staged = std::max(largest_staged, bytes);
      else shared = true;
    }

  // Each rank starts with another peer, so that they do not all use one at a time.
  for (int i = 1; i < n; i++) {
    const int destination = (me + i) % n;
    if (way(me, destination) == Way::staged) continue;
    if (!for_all) staging.leave_out(destination);
    const Move move = moves.between(me, destination);
    if (move.bytes == 0 || way(me, destination) != Way::written) continue;
    copy(arena.at(destination, arena.posted(destination).out_offset + move.to, move.bytes), moves.x + move.from, move.bytes);
  }
  const size_t steps = staging.steps(largest_staged);
  for (size_t k = 0; k < std::max<size_t>(1, steps); k++) {
    const bool last = k + 1 >= steps;
    if (!last) staging.put(k + 1);
    for (int i = 0; i < n; i++) {
      const int source = (me + i) % n;
      const Move move = moves.between(source, me);
      const Way by = way(source, me);
      if (by == Way::written) continue;
      // Also what is read directly goes piece by piece: in place it may only fill what was staged before.
      Range now = piece(move.bytes, staging.piece_bytes(), k);
      if (last && by != Way::staged) now.end = move.bytes;
      if (now.bytes() == 0) continue;
      const char* from = by == Way::staged ? staging.at(source, k)
                         : by == Way::own  ? moves.x + move.from + now.begin
                                           : arena.at(source, arena.posted(source).x_offset + move.from, move.bytes) + now.begin;
      copy(call.result() + move.to + now.begin, from, now.bytes());
    }
    if (!last || shared) arena.round(wait);
  }
  arena.steps() += steps;
}

}  // namespace mscomm
