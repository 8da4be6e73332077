// All-reduce over a binomial tree in 2 log2(n) latencies, for small messages. The inputs of all ranks go up the tree without
// being combined, and rank 0 reduces them in the canonical order. So the results have the same bits as those of all other
// algorithms except the ring.
#include "algo/mesh_steps.h"

namespace mscomm {

void all_reduce_tree(const Call& call, const Ranks& ranks, const Wait& wait) {
  Mesh& mesh = *ranks.mesh;
  const Tree tree(mesh.rank(), mesh.size(), 0);
  const size_t bytes = call.bytes();
  std::vector<Piece> down;
  for (size_t k = 0; k < windows(bytes, tree_window_bytes); k++) {
    const Range window = piece(bytes, tree_window_bytes, k);
    char* result = call.result() + window.begin;
    reduce_up(call, ranks, tree, window, result, wait);
    if (tree.parent >= 0) {
      const Piece in{tree.parent, result, window.bytes()};
      mesh.exchange({}, {&in, 1}, wait);
    }
    down.clear();
    for (int child : tree.children) down.push_back({child, result, window.bytes()});
    mesh.exchange(down, {}, wait);
  }
}

}  // namespace mscomm
