// Broadcast over several hosts, some of which have several ranks. On each host, every rank owns a slice of the message; the rank
// at the root's place owns the first one. The owners of a slice on different hosts form a tree or, for a long message, a chain,
// in which the slice moves over the mesh. On each host, the ranks share the slices in the arena. The message moves in chunks.
//
// A short message moves down a tree of one rank on each host, which then gives it to the others there. No rank waits for those
// that get the message from it.
#include <algorithm>

#include "algo/mesh_steps.h"
#include "algo/two_levels.h"

namespace mscomm {

namespace {

struct Position {
  int host, place;
};

Position position_of(const Layout& layout, int rank) {
  Position found{};
  const auto place = [&] { return std::ranges::find(layout.hosts[found.host], rank); };
  while (place() == layout.hosts[found.host].end()) found.host++;
  found.place = static_cast<int>(place() - layout.hosts[found.host].begin());
  return found;
}

// Returns the rank of a host that owns a slice of a message from this root.
int owner(const Layout& layout, const Position& root, size_t host, int slice) {
  const std::vector<int>& there = layout.hosts[host];
  return there[static_cast<size_t>(root.place + slice) % there.size()];
}

void broadcast_one_way(const Call& call, const Ranks& ranks, const Wait& wait) {
  const Layout& layout = ranks.layout;
  Mesh& mesh = *ranks.mesh;
  Home home(call, ranks, wait, true);
  const Position root = position_of(layout, call.signature.root);
  const auto leader = [&](size_t host) { return owner(layout, root, host, 0); };
  char* const result = call.result();
  if (mesh.rank() == leader(layout.here)) {
    const Tree tree(static_cast<int>(layout.here), static_cast<int>(layout.hosts.size()), root.host);
    if (mesh.rank() == call.signature.root) copy(result, call.x, call.bytes());
    if (tree.parent >= 0) {
      const Piece in{leader(tree.parent), result, call.bytes()};
      mesh.receive({&in, 1}, home.away());
    }
    std::vector<Piece> out;
    for (const int host : tree.children) out.push_back({leader(host), result, call.bytes()});
    mesh.send(out);
    mesh.progress();
  }
  home.pass_on(root.place % home.size(), result, call.bytes());
  mesh.exchange({}, {}, wait);
}

}  // namespace

void broadcast_hierarchical(const Call& call, const Ranks& ranks, const Wait& wait) {
  if (call.bytes() <= one_way_bytes) return broadcast_one_way(call, ranks, wait);
  const Layout& layout = ranks.layout;
  Mesh& mesh = *ranks.mesh;
  Home home(call, ranks, wait);
  const int hosts = static_cast<int>(layout.hosts.size());
  const Position root = position_of(layout, call.signature.root);
  const bool from_here = static_cast<size_t>(root.host) == layout.here, is_root = mesh.rank() == call.signature.root;
  const int slices = static_cast<int>(std::clamp<size_t>(pieces(call.bytes(), least_slice_bytes), 1, layout.fewest));
  // Returns the slice of the rank at this place of this host. The root has slice 0, so a message with one slice goes to the other
  // hosts at once.
  const auto slice_of = [&](int place) { return (place + home.size() - root.place % home.size()) % home.size(); };
  const int mine = slice_of(layout.place);
  const bool owns = mine < slices;

  Tree tree(static_cast<int>(layout.here), hosts, root.host);
  // The costs are those of whole messages without an arena, so this choice is an approximation.
  const auto bytes = static_cast<double>(call.bytes());
  if (layout.prices.us(chain_cost(hosts, bytes)) < layout.prices.us(tree_cost(hosts, bytes))) {
    tree.parent = from_here ? -1 : static_cast<int>(layout.here + hosts - 1) % hosts;
    tree.children = {static_cast<int>(layout.here + 1) % hosts};
    if (tree.children[0] == root.host) tree.children.clear();
  }
  const size_t steps = std::max<size_t>(1, pieces(call.bytes(), chunk_bytes));
  const auto slice = [&](size_t k, int index) {
    const Range whole = piece(call.bytes(), chunk_bytes, k), one = part(whole.bytes(), slices, index);
    return Range{whole.begin + one.begin, whole.begin + one.end};
  };
  char* const result = call.result();
  const auto send = [&](size_t k) {
    std::vector<Piece> out;
    const Range now = slice(k, mine);
    for (const int host : tree.children)
      if (k == 0 || now.bytes() > 0) out.push_back({owner(layout, root, host, mine), result + now.begin, now.bytes()});
    mesh.send(out);
  };
  const auto receive = [&](size_t k) {
    const Range now = slice(k, mine);
    if (k > 0 && now.bytes() == 0) return;
    const Piece in{owner(layout, root, tree.parent, mine), result + now.begin, now.bytes()};
    mesh.receive({&in, 1}, home.away());
  };
  // The data that the rank at `place` shares with the others on its host.
  const auto shared = [&](size_t k, int place) {
    if (!from_here) return slice_of(place) < slices ? slice(k, slice_of(place)) : Range{0, 0};
    return place == root.place ? piece(call.bytes(), chunk_bytes, k) : Range{0, 0};
  };

  if (is_root) copy(result, call.x, call.bytes());
  if (is_root) send(0);  // before the root waits for others
  std::vector<char*> outs;
  for (size_t k = 0; k < steps; k++) {
    if (!from_here && owns) {
      receive(k);
      send(k);
    }
    const Range own = shared(k, layout.place);
    if (home.stages_out()) copy(home.staged(layout.place, k), result + own.begin, own.bytes());
    home.round();
    if (k == 0) outs = home.outs(call.bytes());
    for (int other = 1; other < home.size(); other++) {
      const int place = (layout.place + other) % home.size();
      const Range theirs = shared(k, place);
      copy(result + theirs.begin, outs[place] ? outs[place] + theirs.begin : home.staged(place, k), theirs.bytes());
    }
    if (from_here && owns && !(is_root && k == 0)) {
      home.confirm_reads();  // before other hosts get the data
      send(k);
    }
    mesh.progress();
  }
  home.end(steps, outs);
  mesh.exchange({}, {}, wait);
}

}  // namespace mscomm
