// Reduce-scatter around a ring in n-1 steps. The sum of block r starts at rank r+1. So the order of additions is not the
// canonical one, and the results can differ from those of the other algorithms in the last bits.
#include "algo/mesh_steps.h"

namespace mscomm {

void reduce_scatter_ring(const Call& call, const Ranks& ranks, const Wait& wait) {
  reduce_ring(call, ranks, Blocks::of(call, ranks.mesh->size()), call.result(), wait);
}

}  // namespace mscomm
