// All-reduce around a ring: reduce-scatter in n-1 steps, then all-gather in n-1 steps (Patarasuk, Yuan 2009). Each rank sends
// only to its right neighbour.
//
// The position of an element in the message decides at which rank its sum starts. So the order of additions differs from that of
// the other algorithms, and the results can differ from theirs in the last bits. Partial results are sent in the accumulator
// type, and are rounded only once.
#include "algo/mesh_steps.h"

namespace mscomm {

void all_reduce_ring(const Call& call, const Ranks& ranks, const Wait& wait) {
  Mesh& mesh = *ranks.mesh;
  const int n = mesh.size(), me = mesh.rank();

  const Blocks parts = Blocks::parts(call.bytes(), n);
  reduce_ring(call, ranks, parts, call.result() + parts.begin(me), wait);
  for (int step = 0; step < n - 1; step++) {
    const int sent = (me - step + n) % n, got = (me - step - 1 + n) % n;
    const Piece out{(me + 1) % n, call.result() + parts.begin(sent), parts.bytes(sent)};
    const Piece in{(me - 1 + n) % n, call.result() + parts.begin(got), parts.bytes(got)};
    mesh.exchange({&out, 1}, {&in, 1}, wait);
  }
}

}  // namespace mscomm
