// All-gather over the mesh in one latency: every rank sends its x to every other.
#include <cstring>

#include "algo/algorithm.h"

namespace mscomm {

void all_gather_direct(const Call& call, const Ranks& ranks, const Wait& wait) {
  Mesh& mesh = *ranks.mesh;
  const int n = mesh.size(), me = mesh.rank();
  const size_t bytes = call.bytes();
  if (bytes) std::memcpy(call.result() + static_cast<size_t>(me) * bytes, call.x, bytes);
  std::vector<Piece> out, in;
  for (int i = 1; i < n; i++) {
    const int to = (me + i) % n, from = (me - i + n) % n;
    out.push_back({to, const_cast<char*>(call.in()), bytes});
    in.push_back({from, call.result() + static_cast<size_t>(from) * bytes, bytes});
  }
  mesh.exchange(out, in, wait);
}

}  // namespace mscomm
