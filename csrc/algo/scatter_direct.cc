// Scatter over the mesh. The root sends each rank its block directly, so the call takes only one network latency.
#include "algo/mesh_steps.h"

namespace mscomm {

void scatter_direct(const Call& call, const Ranks& ranks, const Wait& wait) {
  Mesh& mesh = *ranks.mesh;
  const int me = mesh.rank(), root = call.signature.root;
  if (me != root) {
    const Piece in{root, call.result(), call.out_bytes};
    mesh.exchange({}, {&in, 1}, wait);
    return;
  }
  const Blocks blocks = Blocks::divided(call, mesh.size());
  copy(call.out, call.in() + blocks.begin(me), blocks.bytes(me));
  send_blocks(call, mesh, blocks);
  mesh.exchange({}, {}, wait);
}

}  // namespace mscomm
