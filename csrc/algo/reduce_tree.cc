// Reduce up a binomial tree in log2(n) latencies, for small messages. The inputs of all ranks go up the tree without being
// combined, and the root reduces them in the canonical order. So the results have the same bits as those of the other algorithms.
#include "algo/mesh_steps.h"

namespace mscomm {

void reduce_tree(const Call& call, const Ranks& ranks, const Wait& wait) {
  const Tree tree(ranks.mesh->rank(), ranks.mesh->size(), call.signature.root);
  const size_t bytes = call.bytes();
  for (size_t k = 0; k < windows(bytes, tree_window_bytes); k++) {
    const Range window = piece(bytes, tree_window_bytes, k);
    reduce_up(call, ranks, tree, window, tree.parent < 0 ? call.result() + window.begin : nullptr, wait);
  }
}

}  // namespace mscomm
