// Reduce-scatter over the mesh. Every rank receives its block directly from all other ranks, and reduces the block in the
// canonical order. The call takes only one network latency.
#include "algo/mesh_steps.h"

namespace mscomm {

Cost reduce_scatter_direct_cost(const Layout& layout, double bytes) {
  const double others = layout.size - 1, sent = others * bytes / layout.size;
  return {.latencies = 1, .messages = others, .bytes = sent, .crowded = crowded(layout.size, sent), .copied = bytes};
}

void reduce_scatter_direct(const Call& call, const Ranks& ranks, const Wait& wait) {
  Mesh& mesh = *ranks.mesh;
  const int me = mesh.rank();
  const Blocks blocks = Blocks::of(call, mesh.size());
  send_blocks(call, mesh, blocks);
  for (size_t k = 0; k < windows(blocks.bytes(me), window_bytes); k++)
    reduce_window(call, ranks, blocks, k, call.result() + piece(blocks.bytes(me), window_bytes, k).begin, wait);
  mesh.exchange({}, {}, wait);
}

}  // namespace mscomm
