// All-gather over the mesh in one latency: every rank sends its x to every other.
#include "algo/mesh_steps.h"

namespace mscomm {

void all_gather_direct(const Call& call, const Ranks& ranks, const Wait& wait) {
  Mesh& mesh = *ranks.mesh;
  const int n = mesh.size(), me = mesh.rank();
  const Blocks blocks = Blocks::gathered(call, n);
  copy(call.result() + blocks.begin(me), call.x, call.x_bytes);
  send_to_all(mesh, call.in(), call.x_bytes);
  std::vector<Piece> in;
  for (int i = 1; i < n; i++) {
    const int from = (me - i + n) % n;
    in.push_back({from, call.result() + blocks.begin(from), blocks.bytes(from)});
  }
  mesh.exchange({}, in, wait);
}

}  // namespace mscomm
