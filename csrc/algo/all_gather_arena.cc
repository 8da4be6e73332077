// All-gather in shared memory. Where every out lies in a heap, each rank writes its x into all of them; otherwise x passes
// through staging in chunks, and each rank copies all ranks' chunks out.
#include <algorithm>
#include <cstring>

#include "algo/algorithm.h"

namespace mscomm {

namespace {

void into_heaps(const Call& call, const Blocks& blocks, const Ranks& ranks, const Wait& wait) {
  Arena& arena = *ranks.arena;
  const int n = arena.size(), me = arena.rank();
  // Each rank starts with another peer, so that they do not all write to one heap at a time.
  for (int i = 0; i < n && call.x_bytes; i++) {
    const int rank = (me + i) % n;
    std::memcpy(arena.at(rank, arena.posted(rank).out_offset, blocks.total()) + blocks.begin(me), call.x, call.x_bytes);
  }
  arena.round(wait);
}

void in_chunks(const Call& call, const Blocks& blocks, const Ranks& ranks, const Wait& wait) {
  Arena& arena = *ranks.arena;
  const int n = arena.size(), me = arena.rank();
  const size_t count = pieces(blocks.largest(), arena.chunk_bytes());
  const uint64_t first = arena.steps();
  bool any_direct = false;
  for (int rank = 0; rank < n; rank++) any_direct |= arena.x_in_heap(rank);

  for (size_t k = 0; k < count; k++) {
    const Range next = piece(call.x_bytes, arena.chunk_bytes(), k + 1);
    if (next.bytes() && !arena.x_in_heap(me)) std::memcpy(arena.chunk(me, first + k + 1), call.in() + next.begin, next.bytes());
    for (int i = 0; i < n; i++) {
      const int rank = (me + i) % n;
      const Range now = piece(blocks.bytes(rank), arena.chunk_bytes(), k);
      if (now.bytes() == 0) continue;
      const char* direct = arena.at(rank, arena.posted(rank).x_offset, blocks.bytes(rank));
      const char* from = rank == me ? call.in() + now.begin : direct ? direct + now.begin : arena.chunk(rank, first + k);
      std::memcpy(call.result() + blocks.begin(rank) + now.begin, from, now.bytes());
    }
    // The last round is for those whose x was read where it lies: they may change it after they return.
    if (k + 1 < count || any_direct) arena.round(wait);
  }
  arena.steps() += count;
}

}  // namespace

void all_gather_arena(const Call& call, const Ranks& ranks, const Wait& wait) {
  Arena& arena = *ranks.arena;
  const int n = arena.size(), me = arena.rank();
  const Blocks blocks = Blocks::gathered(call, n);
  arena.post(call);
  if (blocks.largest() <= tiny_bytes) {
    if (call.x_bytes) std::memcpy(arena.tiny(me), call.x, call.x_bytes);
    arena.round(wait);
    compare_posts(arena);
    for (int rank = 0; rank < n; rank++)
      if (blocks.bytes(rank)) std::memcpy(call.result() + blocks.begin(rank), arena.tiny(rank), blocks.bytes(rank));
    return;
  }
  if (call.x_bytes && !arena.x_in_heap(me))
    std::memcpy(arena.chunk(me, arena.steps()), call.x, std::min(call.x_bytes, arena.chunk_bytes()));
  arena.round(wait);
  compare_posts(arena);
  bool outs_in_heap = true;
  for (int rank = 0; rank < n; rank++) outs_in_heap &= arena.posted(rank).out_offset != not_in_heap;
  (outs_in_heap ? into_heaps : in_chunks)(call, blocks, ranks, wait);
}

}  // namespace mscomm
