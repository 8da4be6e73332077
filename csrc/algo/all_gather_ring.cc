// All-gather around a ring in n-1 steps. In the first step, every rank sends its own x to its right neighbour. In each later
// step, it sends the x that it received from its left neighbour in the step before.
#include "algo/mesh_steps.h"

namespace mscomm {

void all_gather_ring(const Call& call, const Ranks& ranks, const Wait& wait) {
  Mesh& mesh = *ranks.mesh;
  const int n = mesh.size(), me = mesh.rank();
  const Blocks blocks = Blocks::gathered(call, n);
  copy(call.result() + blocks.begin(me), call.x, call.x_bytes);
  for (int step = 0; step < n - 1; step++) {
    const int sent = (me - step + n) % n, got = (me - step - 1 + n) % n;
    const Piece out{(me + 1) % n, call.result() + blocks.begin(sent), blocks.bytes(sent)};
    const Piece in{(me - 1 + n) % n, call.result() + blocks.begin(got), blocks.bytes(got)};
    mesh.exchange({&out, 1}, {&in, 1}, wait);
  }
}

}  // namespace mscomm
