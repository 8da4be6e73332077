// Gather over the mesh. Every rank sends its x directly to the root, so the call takes only one network latency.
#include "algo/mesh_steps.h"

namespace mscomm {

void gather_direct(const Call& call, const Ranks& ranks, const Wait& wait) {
  Mesh& mesh = *ranks.mesh;
  const int me = mesh.rank(), root = call.signature.root;
  if (me != root) {
    const Piece out{root, const_cast<char*>(call.in()), call.x_bytes};
    mesh.exchange({&out, 1}, {}, wait);
    return;
  }
  const Blocks blocks = Blocks::gathered(call, mesh.size());
  copy(call.result() + blocks.begin(me), call.x, call.x_bytes);
  receive_blocks(call, mesh, blocks, wait);
}

}  // namespace mscomm
