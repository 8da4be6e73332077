// All-reduce and reduce in shared memory. Each rank reduces its part of everybody's message, for all ranks or for the root.
//
// Heap memory: rank r reads part r of every x and writes the result into part r of every out that there is: two rounds, nothing
// is copied. Foreign memory: the same in chunks through staging, one round a chunk: while the slowest peer still copies chunk k-1
// out, chunk k is reduced and chunk k+1 copied in. Tiny messages: everybody reads everybody's slot, one round.
#include <algorithm>
#include <cstring>

#include "algo/algorithm.h"

namespace mscomm {

namespace {

// Bytes of each input that are read, reduced and written to all outputs while they are in the cache.
constexpr size_t hot_bytes = 16 << 10;

bool receives(const Call& call, int rank) { return call.signature.root < 0 || rank == call.signature.root; }

void in_heaps(const Call& call, const Ranks& ranks, const Wait& wait) {
  Arena& arena = *ranks.arena;
  const auto n = static_cast<size_t>(arena.size()), me = static_cast<size_t>(arena.rank());
  const size_t bytes = call.bytes();
  std::vector<const void*> in(n);
  std::vector<char*> x(n), out;
  for (size_t i = 0; i < n; i++) {
    const int rank = static_cast<int>((me + i) % n);
    x[static_cast<size_t>(rank)] = arena.at(rank, arena.posted(rank).x_offset, bytes);
    if (receives(call, rank)) out.push_back(arena.at(rank, arena.posted(rank).out_offset, bytes));
  }
  const Range mine = part(bytes, arena.size(), arena.rank());
  for (size_t at = mine.begin; at < mine.end; at += hot_bytes) {
    const size_t now = std::min(hot_bytes, mine.end - at);
    for (size_t rank = 0; rank < n; rank++) in[rank] = x[rank] + at;
    reduce_in_order(call.signature, ranks.layout, in.data(), out[0] + at, now);
    for (size_t i = 1; i < out.size(); i++) std::memcpy(out[i] + at, out[0] + at, now);
  }
  arena.round(wait);
}

void in_chunks(const Call& call, const Ranks& ranks, const Staging& staging, const Wait& wait) {
  Arena& arena = *ranks.arena;
  const int n = arena.size(), me = arena.rank();
  const size_t bytes = call.bytes(), count = staging.steps(bytes);
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
    if (k + 1 < count) staging.put(k + 1);
    arena.round(wait);
    for (int rank = 0; rank < n && receives(call, me); rank++) {
      const Range theirs = part(chunk.bytes(), n, rank);
      std::memcpy(call.result() + chunk.begin + theirs.begin, arena.chunk(rank, first + k) + theirs.begin, theirs.bytes());
    }
  }
  arena.steps() += count;
}

}  // namespace

void all_reduce_arena(const Call& call, const Ranks& ranks, const Wait& wait) {
  Arena& arena = *ranks.arena;
  const int n = arena.size(), me = arena.rank();
  const size_t bytes = call.bytes();
  const bool tiny = bytes <= tiny_bytes;
  Staging staging(arena, call.x, Blocks(bytes, 1));
  staging.enter(call, tiny, wait);
  if (tiny) {
    std::vector<const void*> in(static_cast<size_t>(n));
    for (int rank = 0; rank < n; rank++) in[static_cast<size_t>(rank)] = arena.tiny(rank);
    if (receives(call, me)) reduce_in_order(call.signature, ranks.layout, in.data(), call.out, bytes);
    return;
  }
  bool all_in_heap = true;
  for (int rank = 0; rank < n; rank++)
    all_in_heap &= arena.x_in_heap(rank) && (!receives(call, rank) || arena.posted(rank).out_offset != not_in_heap);
  if (all_in_heap) in_heaps(call, ranks, wait);
  else in_chunks(call, ranks, staging, wait);
}

}  // namespace mscomm
