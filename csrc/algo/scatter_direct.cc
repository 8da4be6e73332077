// Scatter over the mesh in one latency: the root sends each rank its block.
#include "algo/mesh_steps.h"

namespace mscomm {

void scatter_direct(const Call& call, const Ranks& ranks, const Wait& wait) {
  Mesh& mesh = *ranks.mesh;
  const int n = mesh.size(), me = mesh.rank();

  const int root = call.signature.root;
  if (me != root) {
    const Piece in{root, call.result(), call.out_bytes};
    mesh.exchange({}, {&in, 1}, wait);
    return;
  }
  const Blocks blocks = Blocks::divided(call, n);
  copy(call.out, call.in() + blocks.begin(me), blocks.bytes(me));
  std::vector<Piece> out;
  for (int rank = 0; rank < n; rank++)
    if (rank != me) out.push_back({rank, const_cast<char*>(call.in()) + blocks.begin(rank), blocks.bytes(rank)});
  mesh.exchange(out, {}, wait);
}

}  // namespace mscomm
