// Scatter down a binomial tree in log2(n) latencies, window by window.
#include "algo/mesh_steps.h"

namespace mscomm {

void scatter_tree(const Call& call, const Ranks& ranks, const Wait& wait) {
  Mesh& mesh = *ranks.mesh;
  const Tree tree(mesh.rank(), mesh.size(), call.signature.root);
  const Blocks blocks = Blocks::divided(call, tree.size);
  std::vector<Piece> down;
  for (size_t k = 0; k < windows(blocks.largest(), tree_window_bytes); k++) {
    const Blocks window = blocks.window(tree_window_bytes, k, tree.root);
    const auto piece_of = [&](int rank) { return piece(blocks.bytes(rank), tree_window_bytes, k); };
    const size_t base = window.begin(tree.relative), bytes = window.begin(tree.relative + tree.span) - base;
    char* held = ranks.scratch_of(bytes);
    if (tree.parent >= 0) {
      const Piece in{tree.parent, held, bytes};
      mesh.exchange({}, {&in, 1}, wait);
    } else {
      for (int i = 0; i < tree.size; i++) {
        const int rank = tree.rank_of(i);
        copy(held + window.begin(i), call.in() + blocks.begin(rank) + piece_of(rank).begin, window.bytes(i));
      }
    }
    down.clear();
    for (int child : tree.children) {
      const Tree below(child, tree.size, tree.root);
      const size_t begin = window.begin(below.relative);
      down.push_back({child, held + (begin - base), window.begin(below.relative + below.span) - begin});
    }
    mesh.exchange(down, {}, wait);
    copy(call.result() + piece_of(mesh.rank()).begin, held, window.bytes(tree.relative));
  }
}

}  // namespace mscomm
