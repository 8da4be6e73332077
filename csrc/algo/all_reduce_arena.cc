// All-reduce in shared memory. Each rank reduces its part of everybody's message.
//
// Heap memory: rank r reads part r of every x and writes the result into part r of every out: two rounds, nothing is copied.
// Foreign memory: the same in chunks through staging, one round a chunk: while the slowest peer still copies chunk k-1 out, chunk
// k is reduced and chunk k+1 copied in. Tiny messages: everybody reads everybody's slot, one round.
#include <algorithm>
#include <cstring>

#include "algo/algorithm.h"

namespace mscomm {

namespace {

// Bytes of each input that are read, reduced and written to all outputs while they are in the cache.
constexpr size_t hot_bytes = 16 << 10;

void in_heaps(const Call& call, const Ranks& ranks, const Wait& wait) {
  Arena& arena = *ranks.arena;
  const auto n = static_cast<size_t>(arena.size()), me = static_cast<size_t>(arena.rank());
  const size_t bytes = call.bytes();
  std::vector<const void*> in(n);
  std::vector<char*> x(n), out(n);
  for (size_t rank = 0; rank < n; rank++) {
    const Post& post = arena.posted(static_cast<int>(rank));
    x[rank] = arena.at(static_cast<int>(rank), post.x_offset, bytes);
    out[rank] = arena.at(static_cast<int>(rank), post.out_offset, bytes);
  }
  const Range mine = part(bytes, arena.size(), arena.rank());
  for (size_t at = mine.begin; at < mine.end; at += hot_bytes) {
    const size_t now = std::min(hot_bytes, mine.end - at);
    for (size_t rank = 0; rank < n; rank++) in[rank] = x[rank] + at;
    reduce_in_order(call.signature, ranks.layout, in.data(), out[me] + at, now);
    for (size_t rank = 0; rank < n; rank++)
      if (rank != me) std::memcpy(out[rank] + at, out[me] + at, now);
  }
  arena.round(wait);
}

void in_chunks(const Call& call, const Ranks& ranks, const Wait& wait) {
  Arena& arena = *ranks.arena;
  const int n = arena.size(), me = arena.rank();
  const size_t bytes = call.bytes(), count = pieces(bytes, arena.chunk_bytes());
  const uint64_t first = arena.steps();
  std::vector<const char*> x(static_cast<size_t>(n));  // where it can be read without staging
  std::vector<const void*> in(static_cast<size_t>(n));
  for (int rank = 0; rank < n; rank++) x[static_cast<size_t>(rank)] = arena.at(rank, arena.posted(rank).x_offset, bytes);

  for (size_t k = 0; k < count; k++) {
    const Range chunk = piece(bytes, arena.chunk_bytes(), k);
    const Range mine = part(chunk.bytes(), n, me);
    for (int rank = 0; rank < n; rank++) {
      const char* direct = x[static_cast<size_t>(rank)];
      in[static_cast<size_t>(rank)] = (direct ? direct + chunk.begin : arena.chunk(rank, first + k)) + mine.begin;
    }
    reduce_in_order(call.signature, ranks.layout, in.data(), arena.chunk(me, first + k) + mine.begin, mine.bytes());
    if (k + 1 < count && !arena.x_in_heap(me)) {
      const Range next = piece(bytes, arena.chunk_bytes(), k + 1);
      std::memcpy(arena.chunk(me, first + k + 1), call.in() + next.begin, next.bytes());
    }
    arena.round(wait);
    for (int rank = 0; rank < n; rank++) {
      const Range theirs = part(chunk.bytes(), n, rank);
      std::memcpy(call.result() + chunk.begin + theirs.begin, arena.chunk(rank, first + k) + theirs.begin, theirs.bytes());
    }
  }
  arena.steps() += count;
}

}  // namespace

void all_reduce_arena(const Call& call, const Ranks& ranks, const Wait& wait) {
  Arena& arena = *ranks.arena;
  const int n = arena.size();
  const size_t bytes = call.bytes();
  arena.post(call);
  if (bytes <= tiny_bytes) {
    if (bytes) std::memcpy(arena.tiny(arena.rank()), call.x, bytes);
    arena.round(wait);
    compare_posts(arena);
    std::vector<const void*> in(static_cast<size_t>(n));
    for (int rank = 0; rank < n; rank++) in[static_cast<size_t>(rank)] = arena.tiny(rank);
    reduce_in_order(call.signature, ranks.layout, in.data(), call.out, bytes);
    return;
  }
  if (!arena.x_in_heap(arena.rank()))
    std::memcpy(arena.chunk(arena.rank(), arena.steps()), call.x, std::min(bytes, arena.chunk_bytes()));
  arena.round(wait);
  compare_posts(arena);
  bool all_in_heap = true;
  for (int rank = 0; rank < n; rank++) all_in_heap &= arena.in_heap(rank);
  (all_in_heap ? in_heaps : in_chunks)(call, ranks, wait);
}

}  // namespace mscomm
