// Barrier over the mesh. Empty messages go up a binomial tree to the root, and then down again.
#include "algo/mesh_steps.h"

namespace mscomm {

void barrier_tree(const Call&, const Ranks& ranks, const Wait& wait) {
  meet_in_tree(*ranks.mesh, Tree(ranks.mesh->rank(), ranks.mesh->size(), 0), wait);
}

}  // namespace mscomm
