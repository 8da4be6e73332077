// Reduce over the mesh in two latencies. Every rank reduces its part of the message, as in all_reduce_direct, and sends the
// result to the root. So the root receives only 2 (n-1)/n times the size of the message, instead of n-1 times.
//
// A small message takes only one latency, because every rank sends its whole message to the root.
#include <vector>

#include "algo/mesh_steps.h"

namespace mscomm {

void reduce_direct(const Call& call, const Ranks& ranks, const Wait& wait) {
  Mesh& mesh = *ranks.mesh;
  const int n = mesh.size(), me = mesh.rank();
  if (in_one_latency(n, call.bytes())) return reduce_in_one_latency(call, ranks, wait);

  const int root = call.signature.root;
  const Blocks parts = Blocks::parts(call.bytes(), n);
  std::vector<Piece> out, in;
  for (size_t k = 0; k < windows(parts.largest(), window_bytes); k++) {
    const auto of = [&](int rank) { return piece(parts.bytes(rank), window_bytes, k); };
    const auto at_root = [&](int rank) { return call.result() + parts.begin(rank) + of(rank).begin; };
    // A rank other than the root writes its result to its own place in the scratch memory. reduce_window() does not use this
    // place.
    char* reduced = ranks.scratch_of(n * window_bytes) + me * window_bytes;
    if (me == root) reduced = at_root(me);
    send_blocks(call, mesh, parts, window_bytes, k);
    reduce_window(call, ranks, parts, k, reduced, wait);
    out.clear(), in.clear();
    if (me != root) out.push_back({root, reduced, of(me).bytes()});
    for (int rank = 0; rank < n && me == root; rank++)
      if (rank != me) in.push_back({rank, at_root(rank), of(rank).bytes()});
    mesh.exchange(out, in, wait);
  }
}

}  // namespace mscomm
