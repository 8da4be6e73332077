// All-gather over the mesh in one latency: every rank sends its x to every other.
#include "algo/algorithm.h"

namespace mscomm {

void all_gather_direct(const Call& call, const Ranks& ranks, const Wait& wait) {
  Mesh& mesh = *ranks.mesh;
  const int n = mesh.size(), me = mesh.rank();
  const Blocks blocks = Blocks::gathered(call, n);
  copy(call.result() + blocks.begin(me), call.x, call.x_bytes);
  std::vector<Piece> out, in;
  for (int i = 1; i < n; i++) {
    const int to = (me + i) % n, from = (me - i + n) % n;
    out.push_back({to, const_cast<char*>(call.in()), call.x_bytes});
    in.push_back({from, call.result() + blocks.begin(from), blocks.bytes(from)});
  }
  mesh.exchange(out, in, wait);
}

}  // namespace mscomm
