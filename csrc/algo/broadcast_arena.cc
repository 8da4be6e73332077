// Broadcast in shared memory: the root's x is read where it lies, if in a heap, else in chunks from the root's staging.
#include <algorithm>
#include <cstring>

#include "algo/algorithm.h"

namespace mscomm {

namespace {

void copy_own(const Call& call) {
  if (call.out != call.x && call.bytes()) std::memcpy(call.out, call.x, call.bytes());
}

}  // namespace

void broadcast_arena(const Call& call, const Ranks& ranks, const Wait& wait) {
  Arena& arena = *ranks.arena;
  const int root = call.signature.root;
  const bool sender = arena.rank() == root;
  const size_t bytes = call.bytes();
  const uint64_t first = arena.steps();
  arena.post(call);
  if (sender && bytes && bytes <= tiny_bytes) std::memcpy(arena.tiny(root), call.x, bytes);
  if (sender && bytes > tiny_bytes && !arena.x_in_heap(root))
    std::memcpy(arena.chunk(root, first), call.x, std::min(bytes, arena.chunk_bytes()));
  arena.round(wait);
  compare_posts(arena);
  if (bytes <= tiny_bytes) {
    if (sender) copy_own(call);
    else if (bytes) std::memcpy(call.out, arena.tiny(root), bytes);
    return;
  }
  if (arena.x_in_heap(root)) {
    if (sender) copy_own(call);
    else std::memcpy(call.out, arena.at(root, arena.posted(root).x_offset, bytes), bytes);
    arena.round(wait);  // the root may change x after it returns
    return;
  }
  const size_t count = pieces(bytes, arena.chunk_bytes());
  for (size_t k = 0; k < count; k++) {
    const Range now = piece(bytes, arena.chunk_bytes(), k), next = piece(bytes, arena.chunk_bytes(), k + 1);
    if (sender) std::memcpy(arena.chunk(root, first + k + 1), call.in() + next.begin, next.bytes());
    else std::memcpy(call.result() + now.begin, arena.chunk(root, first + k), now.bytes());
    if (k + 1 < count) arena.round(wait);
  }
  if (sender) copy_own(call);
  arena.steps() += count;
}

}  // namespace mscomm
