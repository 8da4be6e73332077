// Broadcast over several hosts, some of which have several ranks. On each host, every rank owns a slice of the message. The
// owners of a slice on different hosts form a tree or, for a long message, a chain, in which the slice moves over the mesh. On
// each host, the ranks share the slices in the arena. The message moves in chunks.
//
// A short message moves down a tree of one rank on each host, which then gives it to the others there. No rank waits for those
// that get the message from it.
#include <algorithm>

#include "algo/mesh_steps.h"
#include "algo/two_levels.h"

namespace mscomm {

namespace {

void broadcast_one_way(const Call& call, const Ranks& ranks, const Wait& wait) {
  const Layout& layout = ranks.layout;
  Mesh& mesh = *ranks.mesh;
  Home home(call, ranks, wait, true);
  const auto place_of = [](const std::vector<int>& host, int rank) { return std::ranges::find(host, rank) - host.begin(); };
  const int root = call.signature.root, hosts = static_cast<int>(layout.hosts.size());
  int first = 0;  // the root's host
  while (std::ranges::count(layout.hosts[first], root) == 0) first++;
  const auto place = place_of(layout.hosts[first], root);
  // Returns the rank to which other hosts send the message, at the same place as the root.
  const auto leader = [&](size_t host) { return layout.hosts[host][static_cast<size_t>(place) % layout.hosts[host].size()]; };
  const int mine = leader(layout.here);
  char* const result = call.result();
  if (mesh.rank() == mine) {
    const Tree tree(static_cast<int>(layout.here), hosts, first);
    if (mesh.rank() == root) copy(result, call.x, call.bytes());
    if (tree.parent >= 0) {
      const Piece in{leader(tree.parent), result, call.bytes()};
      mesh.receive({&in, 1}, home.away());
    }
    std::vector<Piece> out;
    for (const int host : tree.children) out.push_back({leader(host), result, call.bytes()});
    mesh.send(out);
    mesh.progress();
  }
  home.pass_on(static_cast<int>(place_of(layout.at_home(), mine)), result, call.bytes());
  mesh.exchange({}, {}, wait);
}

}  // namespace

void broadcast_hierarchical(const Call& call, const Ranks& ranks, const Wait& wait) {
  if (call.bytes() <= one_way_bytes) return broadcast_one_way(call, ranks, wait);
  const Layout& layout = ranks.layout;
  Mesh& mesh = *ranks.mesh;
  Home home(call, ranks, wait);
  const int root = call.signature.root, hosts = static_cast<int>(layout.hosts.size());
  const auto lives = [&](const std::vector<int>& host) { return std::ranges::find(host, root) != host.end(); };
  const int first = static_cast<int>(std::ranges::find_if(layout.hosts, lives) - layout.hosts.begin());
  const bool from_here = static_cast<size_t>(first) == layout.here, is_root = mesh.rank() == root;
  const int slices = static_cast<int>(std::clamp<size_t>(pieces(call.bytes(), least_slice_bytes), 1, layout.fewest));
  // On the root's host, the root owns slice 0. So a message with one slice goes to the other hosts at once.
  const std::vector<int>& beside_root = layout.hosts[first];
  const int root_place = static_cast<int>(std::ranges::find(beside_root, root) - beside_root.begin());
  const auto owner = [&](int host, int slice) {
    const std::vector<int>& there = layout.hosts[host];
    return there[host == first ? (root_place + slice) % there.size() : slice];
  };
  const int mine = from_here ? (layout.place - root_place + home.size()) % home.size() : layout.place;  // the slice of this rank
  const bool owns = mine < slices;

  Tree tree(static_cast<int>(layout.here), hosts, first);
  // The costs are those of whole messages without an arena, so this choice is an approximation.
  const auto bytes = static_cast<double>(call.bytes());
  if (layout.prices.us(chain_cost(hosts, bytes)) < layout.prices.us(tree_cost(hosts, bytes))) {
    tree.parent = from_here ? -1 : static_cast<int>(layout.here + hosts - 1) % hosts;
    tree.children = {static_cast<int>(layout.here + 1) % hosts};
    if (tree.children[0] == first) tree.children.clear();
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
      if (k == 0 || now.bytes() > 0) out.push_back({owner(host, mine), result + now.begin, now.bytes()});
    mesh.send(out);
  };
  const auto receive = [&](size_t k) {
    const Range now = slice(k, mine);
    if (k > 0 && now.bytes() == 0) return;
    const Piece in{owner(tree.parent, mine), result + now.begin, now.bytes()};
    mesh.receive({&in, 1}, home.away());
  };
  // The data that the rank at `place` shares with the others on its host.
  const auto shared = [&](size_t k, int place) {
    if (!from_here) return place < slices ? slice(k, place) : Range{0, 0};
    return place == root_place ? piece(call.bytes(), chunk_bytes, k) : Range{0, 0};
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
