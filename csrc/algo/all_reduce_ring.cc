// All-reduce around a ring: reduce-scatter in n-1 steps, then all-gather in n-1 steps (Patarasuk, Yuan 2009). Each rank sends
// only to its right neighbour.
//
// The position of an element in the message determines the rank at which its sum starts. So the order of additions differs from
// that of the other algorithms, and the results can differ from theirs in the last bits. Partial results are sent in the
// accumulator type, and are rounded only once.
#include "algo/mesh_steps.h"

namespace mscomm {

void all_reduce_ring(const Call& call, const Ranks& ranks, const Wait& wait) {
  const Blocks parts = Blocks::parts(call.bytes(), ranks.mesh->size());
  reduce_ring(call, ranks, parts, call.result() + parts.begin(ranks.mesh->rank()), wait);
  gather_ring(call, *ranks.mesh, parts, wait);
}

}  // namespace mscomm
