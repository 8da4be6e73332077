// Gather over the mesh in one latency: every rank sends its x to the root.
#include "algo/mesh_steps.h"

namespace mscomm {

void gather_direct(const Call& call, const Ranks& ranks, const Wait& wait) {
  Mesh& mesh = *ranks.mesh;
  const int n = mesh.size(), me = mesh.rank();

  const int root = call.signature.root;
  if (me != root) {
    const Piece out{root, const_cast<char*>(call.in()), call.x_bytes};
    mesh.exchange({&out, 1}, {}, wait);
    return;
  }
  const Blocks blocks = Blocks::gathered(call, n);
  copy(call.result() + blocks.begin(me), call.x, call.x_bytes);
  std::vector<Piece> in;
  for (int rank = 0; rank < n; rank++)
    if (rank != me) in.push_back({rank, call.result() + blocks.begin(rank), blocks.bytes(rank)});
  mesh.exchange({}, in, wait);
}

}  // namespace mscomm
