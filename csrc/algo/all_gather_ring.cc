// All-gather around a ring in n-1 steps.
#include "algo/mesh_steps.h"

namespace mscomm {

Cost all_gather_ring_cost(const Layout& layout, double bytes) {
  const double steps = layout.size - 1;
  return {.latencies = steps, .messages = steps, .bytes = steps * bytes, .copied = bytes};
}

void all_gather_ring(const Call& call, const Ranks& ranks, const Wait& wait) {
  const Blocks blocks = Blocks::of(call, ranks.mesh->size());
  copy(call.result() + blocks.begin(ranks.mesh->rank()), call.x, call.x_bytes);
  gather_ring(call, *ranks.mesh, blocks, wait);
}

}  // namespace mscomm
