// Reduce-scatter over the mesh in one latency: every rank gets its block from all other ranks and reduces it in the canonical
// order.
#include "algo/mesh_steps.h"

namespace mscomm {

void reduce_scatter_direct(const Call& call, const Ranks& ranks, const Wait& wait) {
  Mesh& mesh = *ranks.mesh;
  const int me = mesh.rank();
  const Blocks blocks = Blocks::divided(call, mesh.size());
  send_blocks(call, mesh, blocks);
  for (size_t k = 0; k < windows(blocks.bytes(me), window_bytes); k++)
    reduce_window(call, ranks, blocks, k, call.result() + piece(blocks.bytes(me), window_bytes, k).begin, wait);
  mesh.exchange({}, {}, wait);
}

}  // namespace mscomm
