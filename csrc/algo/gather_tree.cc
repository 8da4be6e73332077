// Gather up a binomial tree in log2(n) latencies, window by window.
#include "algo/mesh_steps.h"

namespace mscomm {

void gather_tree(const Call& call, const Ranks& ranks, const Wait& wait) {
  const Tree tree(ranks.mesh->rank(), ranks.mesh->size(), call.signature.root);
  const Blocks blocks = Blocks::gathered(call, tree.size);
  for (size_t k = 0; k < windows(blocks.largest(), tree_window_bytes); k++) {
    const Blocks window = blocks.window(tree_window_bytes, k, tree.root);
    const size_t at = piece(call.x_bytes, tree_window_bytes, k).begin;
    const char* gathered = gather_window(ranks, tree, window, call.in() + at, wait);
    for (int i = 0; i < tree.size && tree.parent < 0; i++) {
      const int rank = tree.rank_of(i);
      copy(call.result() + blocks.begin(rank) + piece(blocks.bytes(rank), tree_window_bytes, k).begin, gathered + window.begin(i),
           window.bytes(i));
    }
  }
}

}  // namespace mscomm
