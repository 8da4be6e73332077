// All-reduce over a binomial tree in 2 log2(n) latencies, for small messages. Inputs travel up uncombined and rank 0 reduces
// them, so that the order of the sum, and with it the bits, are those of the other algorithms.
#include <algorithm>
#include <cstring>

#include "algo/algorithm.h"

namespace mscomm {

namespace {
constexpr size_t window_bytes = 64 << 10;  // bounds the memory of the root to n windows
}

void all_reduce_tree(const Call& call, const Ranks& ranks, const Wait& wait) {
  Mesh& mesh = *ranks.mesh;
  const int n = mesh.size();
  const Tree tree(mesh.rank(), n, 0);
  const size_t bytes = call.bytes();
  char* gathered = ranks.scratch_of(static_cast<size_t>(tree.span) * window_bytes);
  std::vector<Piece> in, down;
  std::vector<const void*> inputs(static_cast<size_t>(n));

  for (size_t k = 0; k < std::max<size_t>(1, pieces(bytes, window_bytes)); k++) {
    const Range window = piece(bytes, window_bytes, k);
    const size_t now = window.bytes();
    if (now) std::memcpy(gathered, call.in() + window.begin, now);
    in.clear(), down.clear();
    for (int child : tree.children) {
      const Tree below(child, n, 0);
      in.push_back({child, gathered + static_cast<size_t>(child - tree.relative) * now, static_cast<size_t>(below.span) * now});
      down.push_back({child, call.result() + window.begin, now});
    }
    mesh.exchange({}, in, wait);
    if (tree.parent >= 0) {
      const Piece up{tree.parent, gathered, static_cast<size_t>(tree.span) * now};
      mesh.exchange({&up, 1}, {}, wait);
      const Piece result{tree.parent, call.result() + window.begin, now};
      mesh.exchange({}, {&result, 1}, wait);
    } else {
      for (int rank = 0; rank < n; rank++) inputs[static_cast<size_t>(rank)] = gathered + static_cast<size_t>(rank) * now;
      reduce_in_order(call.signature, ranks.layout, inputs.data(), call.result() + window.begin, now);
    }
    mesh.exchange(down, {}, wait);
  }
}

}  // namespace mscomm
