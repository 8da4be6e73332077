// All-gather over the mesh. Every rank sends its x directly to every other rank, so the call takes only one network latency.
#include "algo/mesh_steps.h"

namespace mscomm {

void all_gather_direct(const Call& call, const Ranks& ranks, const Wait& wait) {
  Mesh& mesh = *ranks.mesh;
  const Blocks blocks = Blocks::gathered(call, mesh.size());
  copy(call.result() + blocks.begin(mesh.rank()), call.x, call.x_bytes);
  send_to_all(mesh, call.in(), call.x_bytes);
  receive_blocks(call, mesh, blocks, wait);
}

}  // namespace mscomm
