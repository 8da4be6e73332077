// All-reduce over the mesh in two latencies: every rank gets its part of the message from all others, reduces it in the canonical
// order, and sends the result to all. 2 (n-1)/n of the message leave each rank, as in a ring (Thakur, Rabenseifner, Gropp 2005,
// "pairwise").
#include "algo/algorithm.h"

namespace mscomm {

void all_reduce_direct(const Call& call, const Ranks& ranks, const Wait& wait) {
  Mesh& mesh = *ranks.mesh;
  const int n = mesh.size(), me = mesh.rank();

  const Blocks parts = Blocks::parts(call.bytes(), n);
  char* mine = call.result() + parts.begin(me);
  for (size_t k = 0; k < windows(parts.largest(), window_bytes); k++)
    reduce_window(call, ranks, parts, k, mine + piece(parts.bytes(me), window_bytes, k).begin, wait);
  std::vector<Piece> out, in;
  for (int i = 1; i < n; i++) {
    const int to = (me + i) % n, from = (me - i + n) % n;
    out.push_back({to, mine, parts.bytes(me)});
    in.push_back({from, call.result() + parts.begin(from), parts.bytes(from)});
  }
  mesh.exchange(out, in, wait);
}

}  // namespace mscomm
