#include "algo/arena_steps.h"

#include <algorithm>

namespace mscomm {

void meet(Arena& arena, const Wait& wait) {
  arena.round(wait);
  if (arena.agreed()) return;
  Differs differs;
  for (int rank = 0; rank < arena.size(); rank++) differs.calls.emplace_back(rank, arena.posted(rank).signature);
  throw differs;
}

void meet_with(const void* x, size_t x_bytes, size_t largest_bytes, const Call& call, Arena& arena, const Wait& wait) {
  arena.post(call, wait);
  if (x) copy(arena.tiny(arena.rank(), largest_bytes), x, x_bytes);
  meet(arena, wait);
}

// Every mismatch is noticed. Let the calls of two ranks in the same round differ.
// - A rank that waits for all ranks compares all calls with its own.
// - Otherwise, if neither of the two waits, the one that arrives later sees the call of the other.
// - So if nobody notices anything, all ranks that do not wait make the same call. A rank that waits for its root compares the
//   root's call with its own. If the root waits, too, it is not the root of its own call, and the two calls differ. Otherwise,
//   the root is one of the ranks that do not wait, and makes their call.
std::optional<Differs> meet_one_way(const void* x, size_t x_bytes, size_t largest_bytes, const Call& call, int root, Arena& arena,
                                    const Wait& wait) {
  const int me = arena.rank();
  const bool from_root = call.signature.what == Collective::broadcast || call.signature.what == Collective::scatter;
  if (x) copy(arena.tiny(me, largest_bytes), x, x_bytes);
  arena.arrive(from_root && me == root);
  int first = 0, end = arena.size();  // the ranks to compare with
  if (from_root && me != root) {
    arena.wait_for(root, wait);
    first = root, end = root + 1;
  } else if (!from_root && me == root) {
    arena.wait_for_all_alone(wait);
  }
  bool differs = false;
  for (int rank = first; rank < end; rank++) differs |= arena.has_arrived_with_another(rank);
  if (!differs) return std::nullopt;
  Differs differs_from;
  for (int rank = 0; rank < arena.size(); rank++)
    if (arena.has_arrived(rank)) differs_from.calls.emplace_back(rank, arena.posted(rank).signature);
  return differs_from;
}

Staging::Staging(Arena& arena, const void* x, Blocks blocks)
    : arena_(arena),
      x_(static_cast<const char*>(x)),
      blocks_(std::move(blocks)),
      left_out_(blocks_.size()),
      piece_bytes_(std::max<size_t>(64, chunk_bytes / blocks_.size() / 64 * 64)),
      first_(arena.steps()) {
  if (blocks_.size() > 1) leave_out(arena.rank());  // a rank reads its own block directly from x
}

void Staging::enter(const Call& call, Pulled pulled, const Wait& wait) {
  arena_.post(call, wait, pulled);
  if (!(arena_.pulls() && arena_.posted(arena_.rank()).x_address != 0)) put(0);
  meet(arena_, wait);
}

void Staging::put(size_t k) const {
  const int me = arena_.rank();
  if (!x_ || arena_.x_in_heap(me)) return;
  char* chunk = arena_.chunk(me, first_ + k);
  for (int block = 0; block < blocks_.size(); block++) {
    if (left_out_[block]) continue;
    const Range now = piece(blocks_.bytes(block), piece_bytes_, k);
    copy(chunk + block * piece_bytes_, x_ + blocks_.begin(block) + now.begin, now.bytes());
  }
}

const char* Staging::at(int rank, size_t k) const {
  return arena_.chunk(rank, first_ + k) + (blocks_.size() > 1 ? arena_.rank() * piece_bytes_ : 0);
}

}  // namespace mscomm
