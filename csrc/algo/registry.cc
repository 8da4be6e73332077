// The table of algorithms, and the choice among them.
#include <algorithm>
#include <bit>

#include "algo/algorithm.h"
#include "algo/mesh_steps.h"
#include "base/error.h"

namespace mscomm {

using Run = void(const Call&, const Ranks&, const Wait&);
Run all_reduce_arena, all_reduce_hierarchical, all_reduce_direct, all_reduce_ring, all_reduce_tree;
Run all_gather_arena, all_gather_direct, all_gather_ring;
Run reduce_scatter_arena, reduce_scatter_direct, reduce_scatter_ring;
Run broadcast_arena, broadcast_tree, broadcast_ring;
Run reduce_direct, reduce_tree;
Run gather_arena, gather_direct, gather_tree;
Run scatter_arena, scatter_direct, scatter_tree;
Run all_to_all_arena, all_to_all_direct, all_to_all_pairwise;
Run barrier_arena, barrier_tree;
Run scan_arena, scan_chain;

namespace {

// Whether a broadcast along a chain takes less time than one down a tree. In a tree of n ranks the root sends the message log2(n)
// times. In a chain the root sends it only once, but the last rank gets the message later than the second rank, by the time that
// n-2 windows take.
bool in_a_long_chain(const Layout& layout, size_t bytes) {
  const size_t n = layout.size, times = std::bit_width(n - 1);
  return n > 2 && bytes * (times - 1) >= (n - 2) * window_bytes;
}

// The rows of each collective are in order of preference. The first row whose carrier the group has, and whose `fits` accepts the
// size, is chosen. A group has the carrier `both` only if it is on several hosts, and at least one of these hosts has several
// ranks of the group.
constexpr Algorithm table[] = {
    {"arena", Collective::all_reduce, Carrier::arena, all_reduce_arena},
    {"hierarchical", Collective::all_reduce, Carrier::both, all_reduce_hierarchical},
    {"direct", Collective::all_reduce, Carrier::mesh, all_reduce_direct},
    {"ring", Collective::all_reduce, Carrier::mesh, all_reduce_ring},
    {"tree", Collective::all_reduce, Carrier::mesh, all_reduce_tree},
    {"arena", Collective::all_gather, Carrier::arena, all_gather_arena},
    {"direct", Collective::all_gather, Carrier::mesh, all_gather_direct},
    {"ring", Collective::all_gather, Carrier::mesh, all_gather_ring},
    {"arena", Collective::reduce_scatter, Carrier::arena, reduce_scatter_arena},
    {"direct", Collective::reduce_scatter, Carrier::mesh, reduce_scatter_direct},
    {"ring", Collective::reduce_scatter, Carrier::mesh, reduce_scatter_ring},
    {"arena", Collective::broadcast, Carrier::arena, broadcast_arena},
    {"ring", Collective::broadcast, Carrier::mesh, broadcast_ring, in_a_long_chain},
    {"tree", Collective::broadcast, Carrier::mesh, broadcast_tree},
    {"arena", Collective::reduce, Carrier::arena, all_reduce_arena},  // all_reduce_arena also implements reduce
    {"direct", Collective::reduce, Carrier::mesh, reduce_direct},
    {"tree", Collective::reduce, Carrier::mesh, reduce_tree},
    {"arena", Collective::gather, Carrier::arena, gather_arena},
    {"direct", Collective::gather, Carrier::mesh, gather_direct},
    {"tree", Collective::gather, Carrier::mesh, gather_tree},
    {"arena", Collective::scatter, Carrier::arena, scatter_arena},
    {"direct", Collective::scatter, Carrier::mesh, scatter_direct},
    {"tree", Collective::scatter, Carrier::mesh, scatter_tree},
    {"arena", Collective::all_to_all, Carrier::arena, all_to_all_arena},
    {"direct", Collective::all_to_all, Carrier::mesh, all_to_all_direct},
    {"pairwise", Collective::all_to_all, Carrier::mesh, all_to_all_pairwise},
    {"arena", Collective::barrier, Carrier::arena, barrier_arena},
    {"tree", Collective::barrier, Carrier::mesh, barrier_tree},
    {"arena", Collective::scan, Carrier::arena, scan_arena},
    {"chain", Collective::scan, Carrier::mesh, scan_chain},
    {"arena", Collective::exscan, Carrier::arena, scan_arena},
    {"chain", Collective::exscan, Carrier::mesh, scan_chain},
};

}  // namespace

std::span<const Algorithm> algorithms() { return table; }

namespace {

const Algorithm* find(Collective what, std::string_view name) {
  for (const Algorithm& row : table)
    if (row.what == what && row.name == name) return &row;
  return nullptr;
}

std::string names_of(Collective what) {
  std::string names;
  for (const Algorithm& row : table)
    if (row.what == what) names += (names.empty() ? "" : ", ") + std::string(row.name);
  return names;
}

// Returns the carrier that all collectives of a group use. There is only one, so that ranks that make different calls by mistake
// meet and notice the difference. For the same reason, a rank that waits in the arena during a call with carrier `both` also
// reads the headers that come over the mesh.
Carrier carrier_of(const Layout& layout, const Forced& forced) {
  bool arena = false, mesh = layout.hosts() > 1;
  for (size_t i = 0; i < forced.size(); i++) {
    if (forced[i].empty()) continue;
    const auto what = static_cast<Collective>(i);
    const Algorithm* row = find(what, forced[i]);
    if (!row)
      throw Error("ValueError", "MSCOMM_ALGO: " + std::string(name(what)) + " has no algorithm \"" + forced[i] + "\"; it has " +
                                    names_of(what));
    (row->carrier == Carrier::arena ? arena : mesh) = true;
  }
  if (arena && mesh)
    throw Error("ValueError", "MSCOMM_ALGO: arena needs all ranks on one host, and no collective forced to another carrier");
  return mesh ? Carrier::mesh : Carrier::arena;
}

}  // namespace

Choice select(Collective what, const Layout& layout, const Forced& forced) {
  const Carrier carrier = carrier_of(layout, forced);
  const std::string& wanted = forced[static_cast<size_t>(what)];
  if (!wanted.empty()) return {find(what, wanted)};
  Choice rows;
  for (const Algorithm& row : table) {
    const bool is_there = row.carrier == carrier || (row.carrier == Carrier::both && carrier == Carrier::mesh && layout.mixed());
    if (row.what != what || !is_there) continue;
    rows.push_back(&row);
    if (!row.fits) return rows;
  }
  throw Error("Error", "no algorithm for " + std::string(name(what)));
}

int Layout::hosts() const { return host.empty() ? 1 : *std::max_element(host.begin(), host.end()) + 1; }

}  // namespace mscomm
