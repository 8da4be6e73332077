// Barrier over the mesh. Empty messages go up a binomial tree to the root, and then down again.
#include "algo/mesh_steps.h"

namespace mscomm {

void barrier_tree(const Call&, const Ranks& ranks, const Wait& wait) {
  Mesh& mesh = *ranks.mesh;
  const Tree tree(mesh.rank(), mesh.size(), 0);
  std::vector<Piece> children;
  for (int child : tree.children) children.push_back({child, nullptr, 0});
  mesh.exchange({}, children, wait);
  if (tree.parent >= 0) {
    const Piece parent{tree.parent, nullptr, 0};
    mesh.exchange({&parent, 1}, {}, wait);
    mesh.exchange({}, {&parent, 1}, wait);
  }
  mesh.exchange(children, {}, wait);
}

}  // namespace mscomm
