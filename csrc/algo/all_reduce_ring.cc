// All-reduce around a ring: reduce-scatter in n-1 steps, then all-gather in n-1 steps (Patarasuk, Yuan 2009). Only neighbours
// talk.
//
// The sum of an element starts at the rank that its position gives, so the bits differ from the other algorithms'. Partial
// results travel in the accumulator type and are rounded once.
#include <algorithm>
#include <cstring>

#include "algo/algorithm.h"

namespace mscomm {

void all_reduce_ring(const Call& call, const Ranks& ranks, const Wait& wait) {
  Mesh& mesh = *ranks.mesh;
  const int n = mesh.size(), me = mesh.rank();
  const int right = (me + 1) % n, left = (me - 1 + n) % n;
  const Reduction& row = reduction(call.signature.dtype, call.signature.op);
  const size_t bytes = call.bytes(), largest = part(bytes, n, 0).bytes();
  const auto slice = [&](int index) { return part(bytes, n, ((index % n) + n) % n); };
  const auto elements = [&](Range range) { return range.bytes() / row.element_bytes; };

  const size_t room = largest / row.element_bytes * row.accumulator_bytes;
  char* held = ranks.scratch_of(2 * room);
  char* coming = held + room;
  row.widen(call.in() + slice(me).begin, held, elements(slice(me)));
  for (int step = 0; step < n - 1; step++) {
    const Range sent = slice(me - step), got = slice(me - step - 1);
    const Piece out{right, held, elements(sent) * row.accumulator_bytes};
    const Piece in{left, coming, elements(got) * row.accumulator_bytes};
    mesh.exchange({&out, 1}, {&in, 1}, wait);
    row.fold(coming, call.in() + got.begin, elements(got));
    std::swap(held, coming);
  }
  row.finish(held, n, call.result() + slice(me + 1).begin, elements(slice(me + 1)));
  for (int step = 0; step < n - 1; step++) {
    const Range sent = slice(me + 1 - step), got = slice(me - step);
    const Piece out{right, call.result() + sent.begin, sent.bytes()};
    const Piece in{left, call.result() + got.begin, got.bytes()};
    mesh.exchange({&out, 1}, {&in, 1}, wait);
  }
}

}  // namespace mscomm
