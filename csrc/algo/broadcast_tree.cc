// Broadcast down a binomial tree, in log2(n) latencies.
#include "algo/mesh_steps.h"

namespace mscomm {

void broadcast_tree(const Call& call, const Ranks& ranks, const Wait& wait) {
  const Tree tree(ranks.mesh->rank(), ranks.mesh->size(), call.signature.root);
  relay(call, *ranks.mesh, tree.parent, tree.children, wait);
}

}  // namespace mscomm
