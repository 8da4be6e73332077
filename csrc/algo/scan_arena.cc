// Scan and exscan in shared memory. Each rank computes one part of the results of all ranks. For this part, it goes through the
// ranks in order, combines their x, and writes each rank's result on the way. So every x is read once, every result is written
// once, and the ranks share the work evenly. Arrays in foreign memory go through staging in chunks, with one round for each
// chunk. In staging, a rank's result overwrites its x. If messages are tiny, each rank reads the messages of the ranks before it
// from their buffers for tiny messages. This takes one round.
#include <utility>

#include "algo/arena_steps.h"
#include "algo/order.h"
#include "base/reduce.h"

namespace mscomm {

namespace {

// Computes the results of all ranks for `count` elements of each x. A rank's result may overwrite its x.
void combine(const Reduction& row, bool inclusive, const std::vector<const char*>& x, const std::vector<char*>& out,
             size_t count) {
  constexpr size_t block = 1024;
  alignas(64) char first[block * 16], second[block * 16];
  char *before = first, *with_mine = second;
  for (size_t done = 0; done < count; done += block) {
    const size_t now = std::min(block, count - done), at = done * row.element_bytes;
    for (size_t rank = 0; rank < x.size(); rank++) {
      if (rank == 0) {
        row.widen(x[0] + at, with_mine, now);
      } else {
        copy(with_mine, before, now * row.accumulator_bytes);
        row.fold(with_mine, x[rank] + at, now);
      }
      if (inclusive) row.finish(with_mine, 1, out[rank] + at, now);
      else if (rank > 0) row.finish(before, 1, out[rank] + at, now);
      else row.identity(out[0] + at, now);
      std::swap(before, with_mine);
    }
  }
}

void from_slots(const Call& call, Arena& arena, const Wait& wait) {
  meet_with(call.x, call.bytes(), call.bytes(), call, arena, wait);
  const int number = arena.rank() + (call.signature.what == Collective::scan ? 1 : 0);
  if (number == 0) return write_identity(call);
  std::vector<const void*> in;
  for (int rank = 0; rank < number; rank++) in.push_back(arena.tiny(rank, call.bytes()));
  reduction(call.signature.dtype, call.signature.op).reduce(in.data(), number, 1, call.out, call.signature.count);
}

}  // namespace

void scan_arena(const Call& call, const Ranks& ranks, const Wait& wait) {
  Arena& arena = *ranks.arena;
  const size_t bytes = call.bytes();
  if (bytes <= tiny_bytes) return from_slots(call, arena, wait);

  const int n = arena.size(), me = arena.rank();
  const Reduction& row = reduction(call.signature.dtype, call.signature.op);
  const uint64_t first = arena.steps();
  const auto staged = [&](int rank, size_t k) { return arena.chunk(rank, first + k); };
  // This rank combines one part of each chunk. For that part, it reads its own x and writes to its own out directly, so put() and
  // take() skip the part.
  const auto put = [&](size_t k) {
    if (arena.x_in_heap(me)) return;
    const Range whole = piece(bytes, chunk_bytes, k);
    copy_but(staged(me, k), call.in() + whole.begin, whole.bytes(), part(whole.bytes(), n, me));
  };
  const auto take = [&](size_t k) {
    if (arena.posted(me).out_offset != not_in_heap) return;
    const Range whole = piece(bytes, chunk_bytes, k);
    copy_but(call.result() + whole.begin, staged(me, k), whole.bytes(), part(whole.bytes(), n, me));
  };

  arena.post(call, wait);
  put(0);
  meet(arena, wait);
  bool any_staged = false;  // the same on all ranks, because it depends only on the posts
  std::vector<const char*> whole_x;
  std::vector<char*> whole_out;
  for (int rank = 0; rank < n; rank++) {
    whole_x.push_back(rank == me ? call.in() : arena.at(rank, arena.posted(rank).x_offset, bytes));
    whole_out.push_back(rank == me ? call.result() : arena.at(rank, arena.posted(rank).out_offset, bytes));
    any_staged |= !arena.x_in_heap(rank) || arena.posted(rank).out_offset == not_in_heap;
  }
  const size_t step_bytes = any_staged ? chunk_bytes : bytes, steps = pieces(bytes, step_bytes);
  std::vector<const char*> x(whole_x.size());
  std::vector<char*> out(whole_out.size());
  for (size_t k = 0; k < steps; k++) {
    const Range step = piece(bytes, step_bytes, k), mine = part(step.bytes(), n, me);
    for (int rank = 0; rank < n; rank++) {
      x[rank] = (whole_x[rank] ? whole_x[rank] + step.begin : staged(rank, k)) + mine.begin;
      out[rank] = (whole_out[rank] ? whole_out[rank] + step.begin : staged(rank, k)) + mine.begin;
    }
    combine(row, call.signature.what == Collective::scan, x, out, mine.bytes() / row.element_bytes);
    if (k + 1 < steps) put(k + 1);
    arena.round_after_reads(wait);
    if (any_staged) take(k);
  }
  if (any_staged) arena.steps() += steps;
}

}  // namespace mscomm
