// Reduce-scatter in shared memory. Rank r reduces block r of every x. If an x is in a heap, rank r reads it directly; otherwise,
// it reads the x from staging, piece by piece.
#include "algo/arena_steps.h"
#include "algo/order.h"

namespace mscomm {

void reduce_scatter_arena(const Call& call, const Ranks& ranks, const Wait& wait) {
  Arena& arena = *ranks.arena;
  const int n = arena.size(), me = arena.rank();
  const Blocks blocks = Blocks::of(call, n);
  const size_t begin = blocks.begin(me), bytes = blocks.bytes(me);
  std::vector<const void*> in(n);
  if (const size_t whole = blocks.total(); whole <= tiny_bytes) {
    meet_with(call.x, whole, whole, call, arena, wait);
    for (int rank = 0; rank < n; rank++) in[rank] = arena.tiny(rank, whole) + begin;
    reduce_in_order(call.signature, ranks.layout, in.data(), call.out, bytes);
    return;
  }
  Staging staging(arena, call.x, blocks);
  staging.enter(call, Pulled::nothing, wait);
  bool any_staged = false, any_shared = false;
  for (int rank = 0; rank < n; rank++) (arena.x_in_heap(rank) ? any_shared : any_staged) = true;
  const size_t steps = any_staged ? staging.steps(blocks.largest()) : 0;
  for (size_t k = 0; k < std::max<size_t>(1, steps); k++) {
    const bool last = k + 1 >= steps;
    if (!last) staging.put(k + 1);
    const Range now = any_staged ? piece(bytes, staging.piece_bytes(), k) : Range{0, bytes};
    for (int rank = 0; rank < n; rank++) {
      const void*& from = in[rank];
      if (rank == me) from = call.in() + begin + now.begin;
      else if (arena.x_in_heap(rank)) from = arena.at(rank, arena.posted(rank).x_offset + begin, bytes) + now.begin;
      else from = staging.at(rank, k);
    }
    reduce_in_order(call.signature, ranks.layout, in.data(), call.result() + now.begin, now.bytes());
    // The last round is needed only if some x was read directly. The owner of that x must not change it before all ranks have
    // read it.
    if (!last || any_shared) arena.round_after_reads(wait);
  }
  arena.steps() += steps;
}

}  // namespace mscomm
