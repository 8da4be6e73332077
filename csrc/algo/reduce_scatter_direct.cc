// Reduce-scatter over the mesh in one latency: every rank gets its block from all others and reduces it in the canonical order.
#include "algo/algorithm.h"

namespace mscomm {

void reduce_scatter_direct(const Call& call, const Ranks& ranks, const Wait& wait) {
  const int me = ranks.mesh->rank();
  const Blocks blocks = Blocks::divided(call, ranks.mesh->size());
  for (size_t k = 0; k < windows(blocks.largest(), window_bytes); k++)
    reduce_window(call, ranks, blocks, k, call.result() + piece(blocks.bytes(me), window_bytes, k).begin, wait);
}

}  // namespace mscomm
