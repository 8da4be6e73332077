// The table of algorithms, and the choice among them.
#include <algorithm>

#include "algo/algorithm.h"
#include "algo/mesh_steps.h"
#include "base/error.h"

namespace mscomm {

using Run = void(const Call&, const Ranks&, const Wait&);
Run all_reduce_arena, all_reduce_hierarchical, all_reduce_bruck, all_reduce_ring, all_reduce_direct;
Run reduce_scatter_arena, reduce_scatter_hierarchical, reduce_scatter_direct, reduce_scatter_ring, reduce_direct;
Run moves_arena, moves_direct, all_gather_hierarchical, all_gather_bruck, all_gather_ring;
Run broadcast_hierarchical, broadcast_tree, broadcast_ring;
Run scan_arena, scan_chain;
Run barrier_arena, barrier_hierarchical, barrier_tree;

namespace {

// In a direct algorithm, a rank exchanges one message with every other rank. We assume that this takes 5 us of CPU time per peer,
// and that a network latency is 30 us. Then log2(n) latencies take less time than n-1 messages if there are more than about this
// many ranks. These are assumptions, not measurements: see docs/performance.md.
constexpr int many_ranks = 32;

// Returns whether bruck takes less time than direct. `bytes` is the size of each rank's message. For longer messages, the time
// on the wire dominates, and in an all_reduce, direct sends fewer bytes.
bool many_short(const Layout& layout, size_t bytes) { return layout.size > many_ranks && layout.size * bytes <= bruck_bytes; }

// Returns whether a ring is better than direct. In direct, n-1 ranks send to the same rank at the same time, so switches may drop
// packets. x_bytes is the number of bytes that a rank sends in each step of the ring. A ring is better only if sending these
// bytes takes longer than the latency of a step. The rings for all_reduce and reduce_scatter are used only if MSCOMM_ALGO names
// them, because their results would not be bitwise equal to those of direct.
bool in_a_long_ring(const Layout& layout, size_t x_bytes) {
  return std::ssize(layout.hosts) == layout.size && layout.size > many_ranks && x_bytes >= 1 << 20;
}

// In a broadcast by `hierarchical`, all ranks of a host meet. In a tree, the root returns when the kernel has the message, and no
// rank waits for those below it. So a tree is better if the message is so short that sending it more than once costs little.
bool worth_meeting(const Layout&, size_t bytes) { return bytes > 8 << 10; }

// If every rank sends its whole message to the root at once, only the root waits.
bool takes_two_latencies(const Layout& layout, size_t bytes) { return !in_one_latency(layout.size, bytes); }

bool in_a_long_chain(const Layout& layout, size_t bytes) { return chain_is_better(layout.size, bytes); }

// The rows of each collective are in order of preference. mscomm takes the first row whose carrier the group has and whose `fits`
// accepts the size. Layout::allows says for which hosts a row may be taken.
constexpr Algorithm table[] = {
    {"arena", Collective::all_reduce, Carrier::arena, all_reduce_arena},
    {"hierarchical", Collective::all_reduce, Carrier::both, all_reduce_hierarchical},
    {"bruck", Collective::all_reduce, Carrier::mesh, all_reduce_bruck, many_short},
    {"direct", Collective::all_reduce, Carrier::mesh, all_reduce_direct},
    {"ring", Collective::all_reduce, Carrier::mesh, all_reduce_ring},
    {"arena", Collective::all_gather, Carrier::arena, moves_arena},
    {"hierarchical", Collective::all_gather, Carrier::both, all_gather_hierarchical},
    {"bruck", Collective::all_gather, Carrier::mesh, all_gather_bruck, many_short},
    {"ring", Collective::all_gather, Carrier::mesh, all_gather_ring, in_a_long_ring},
    {"direct", Collective::all_gather, Carrier::mesh, moves_direct},
    {"arena", Collective::reduce_scatter, Carrier::arena, reduce_scatter_arena},
    {"hierarchical", Collective::reduce_scatter, Carrier::both, reduce_scatter_hierarchical},
    {"direct", Collective::reduce_scatter, Carrier::mesh, reduce_scatter_direct},
    {"ring", Collective::reduce_scatter, Carrier::mesh, reduce_scatter_ring},
    {"arena", Collective::broadcast, Carrier::arena, moves_arena},
    {"hierarchical", Collective::broadcast, Carrier::both, broadcast_hierarchical, worth_meeting},
    {"ring", Collective::broadcast, Carrier::mesh, broadcast_ring, in_a_long_chain},
    {"tree", Collective::broadcast, Carrier::mesh, broadcast_tree},
    {"arena", Collective::reduce, Carrier::arena, all_reduce_arena},  // this function and the next also implement reduce
    {"hierarchical", Collective::reduce, Carrier::both, all_reduce_hierarchical, takes_two_latencies},
    {"direct", Collective::reduce, Carrier::mesh, reduce_direct},
    {"arena", Collective::gather, Carrier::arena, moves_arena},
    {"direct", Collective::gather, Carrier::mesh, moves_direct},
    {"arena", Collective::scatter, Carrier::arena, moves_arena},
    {"direct", Collective::scatter, Carrier::mesh, moves_direct},
    {"arena", Collective::all_to_all, Carrier::arena, moves_arena},
    {"direct", Collective::all_to_all, Carrier::mesh, moves_direct},
    {"arena", Collective::barrier, Carrier::arena, barrier_arena},
    {"hierarchical", Collective::barrier, Carrier::both, barrier_hierarchical},
    {"tree", Collective::barrier, Carrier::mesh, barrier_tree},
    {"arena", Collective::scan, Carrier::arena, scan_arena},
    {"chain", Collective::scan, Carrier::mesh, scan_chain},
    {"arena", Collective::exscan, Carrier::arena, scan_arena},
    {"chain", Collective::exscan, Carrier::mesh, scan_chain},
};

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

// Returns whether the collectives of a group use the mesh. If not, they use only the arena. The answer holds for all collectives,
// because ranks that call different collectives by mistake must still reach each other to notice the mistake. For the same
// reason, a rank that waits in the arena during a call with carrier `both` also reads the headers that arrive over the mesh.
bool uses_mesh(const Layout& layout, const Forced& forced) {
  bool arena = false, mesh = layout.hosts.size() > 1;
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
  return mesh;
}

std::vector<const Algorithm*> rows_of(Collective what, const Layout& layout, const std::string& forced, bool by_mesh) {
  if (!forced.empty()) return {find(what, forced)};
  std::vector<const Algorithm*> rows;
  for (const Algorithm& row : table) {
    if (row.what != what || (row.carrier != Carrier::arena) != by_mesh || !layout.allows(row.carrier)) continue;
    rows.push_back(&row);
    if (!row.fits) return rows;
  }
  throw Error("Error", "no algorithm for " + std::string(name(what)));
}

}  // namespace

std::span<const Algorithm> algorithms() { return table; }

Layout::Layout(const std::vector<int>& host, int rank, const Forced& forced)
    : rank(rank), size(static_cast<int>(host.size())), here(host.at(rank)) {
  for (int one = 0; one < size; one++) {
    if (static_cast<size_t>(host[one]) == hosts.size()) hosts.emplace_back();
    if (one == rank) place = static_cast<int>(hosts.at(here).size());
    hosts.at(host[one]).push_back(one);
  }
  fewest = std::ranges::min(hosts, {}, &std::vector<int>::size).size();
  for (size_t i = 1; i < hosts.size(); i++) others.push_back((here + i) % hosts.size());
  const bool by_mesh = uses_mesh(*this, forced);
  for (size_t what = 0; what < rows.size(); what++) {
    rows[what] = rows_of(static_cast<Collective>(what), *this, forced[what], by_mesh);
    for (const Algorithm* row : rows[what]) {
      arena |= row->carrier != Carrier::mesh && at_home().size() > 1;
      mesh |= row->carrier != Carrier::arena && size > 1;
    }
  }
}

bool Layout::allows(Carrier carrier) const {
  if (carrier == Carrier::arena) return hosts.size() == 1;
  return carrier == Carrier::mesh || (hosts.size() > 1 && std::ssize(hosts) < size && size <= most_on_two_levels);
}

}  // namespace mscomm
