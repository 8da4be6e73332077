// Barrier over several hosts, some of which have several ranks. The ranks of each host meet in the arena. Then one rank of each
// host meets the others over the mesh, and a second round of the arena tells its host.
#include "algo/mesh_steps.h"
#include "algo/two_levels.h"

namespace mscomm {

void barrier_hierarchical(const Call& call, const Ranks& ranks, const Wait& wait) {
  const Layout& layout = ranks.layout;
  Home home(call, ranks, wait);
  home.round();
  if (layout.place == 0) {
    Tree tree(static_cast<int>(layout.here), static_cast<int>(layout.hosts.size()), 0);
    const auto leader = [&](int& host) { host = layout.hosts[host][0]; };
    if (tree.parent >= 0) leader(tree.parent);
    std::ranges::for_each(tree.children, leader);
    meet_in_tree(*ranks.mesh, tree, wait);
  }
  home.round();
}

}  // namespace mscomm
