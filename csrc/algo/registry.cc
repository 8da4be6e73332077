// The table of algorithms, and the choice among them.
#include <algorithm>
#include <bit>

#include "algo/algorithm.h"
#include "algo/mesh_steps.h"
#include "base/error.h"

namespace mscomm {

using Run = void(const Call&, const Ranks&, const Wait&);
Run all_reduce_arena, all_reduce_hierarchical, all_reduce_bruck, all_reduce_ring, all_reduce_direct;
Run reduce_scatter_arena, reduce_scatter_direct, reduce_scatter_ring, reduce_direct;
Run moves_arena, moves_direct, all_gather_bruck, all_gather_ring, broadcast_tree, broadcast_ring;
Run scan_arena, scan_chain;
Run barrier_arena, barrier_tree;

namespace {

// In a direct algorithm, a rank sends a message to each other rank and receives one from each. We assume that this takes 5 us of
// CPU time per peer, and that a network latency is 30 us. Then log2(n) latencies take less time than n-1 messages if there are
// more than about this many ranks. These are assumptions, not measurements: see docs/performance.md.
constexpr int many_ranks = 32;

// Returns whether bruck takes less time than direct. `bytes` is the size of each rank's message. For longer messages, the time on
// the wire dominates, and direct sends fewer bytes.
bool many_short(const Layout& layout, size_t bytes) { return layout.size > many_ranks && layout.size * bytes <= bruck_bytes; }

// Returns whether a ring is better than direct. In direct, n-1 ranks send to the same rank at the same time, so switches may drop
// packets. x_bytes is the number of bytes that a rank sends in each step of the ring. A ring is better only if sending these
// bytes takes longer than the latency of a step. The rings for all_reduce and reduce_scatter are used only if MSCOMM_ALGO names
// them, because their results would not be bitwise equal to those of direct.
bool in_a_long_ring(const Layout& layout, size_t x_bytes) {
  return layout.hosts() == layout.size && layout.size > many_ranks && x_bytes >= 1 << 20;
}

// Returns whether a broadcast along a chain takes less time than a broadcast down a tree. In a tree of n ranks, the root sends
// the message log2(n) times. In a chain, the root sends it only once, but each window passes n-2 ranks before it reaches the last
// rank.
bool in_a_long_chain(const Layout& layout, size_t bytes) {
  const size_t n = layout.size, times = std::bit_width(n - 1);
  return n > 2 && bytes * (times - 1) >= (n - 2) * window_bytes;
}

// The rows of each collective are in order of preference. mscomm takes the first row whose carrier the group has and whose `fits`
// accepts the size. A group has the carrier `both` only if it spans several hosts and has several ranks on at least one of them.
constexpr Algorithm table[] = {
    {"arena", Collective::all_reduce, Carrier::arena, all_reduce_arena},
    {"hierarchical", Collective::all_reduce, Carrier::both, all_reduce_hierarchical},
    {"bruck", Collective::all_reduce, Carrier::mesh, all_reduce_bruck, many_short},
    {"direct", Collective::all_reduce, Carrier::mesh, all_reduce_direct},
    {"ring", Collective::all_reduce, Carrier::mesh, all_reduce_ring},
    {"arena", Collective::all_gather, Carrier::arena, moves_arena},
    {"bruck", Collective::all_gather, Carrier::mesh, all_gather_bruck, many_short},
    {"ring", Collective::all_gather, Carrier::mesh, all_gather_ring, in_a_long_ring},
    {"direct", Collective::all_gather, Carrier::mesh, moves_direct},
    {"arena", Collective::reduce_scatter, Carrier::arena, reduce_scatter_arena},
    {"direct", Collective::reduce_scatter, Carrier::mesh, reduce_scatter_direct},
    {"ring", Collective::reduce_scatter, Carrier::mesh, reduce_scatter_ring},
    {"arena", Collective::broadcast, Carrier::arena, moves_arena},
    {"ring", Collective::broadcast, Carrier::mesh, broadcast_ring, in_a_long_chain},
    {"tree", Collective::broadcast, Carrier::mesh, broadcast_tree},
    {"arena", Collective::reduce, Carrier::arena, all_reduce_arena},  // all_reduce_arena also implements reduce
    {"direct", Collective::reduce, Carrier::mesh, reduce_direct},
    {"arena", Collective::gather, Carrier::arena, moves_arena},
    {"direct", Collective::gather, Carrier::mesh, moves_direct},
    {"arena", Collective::scatter, Carrier::arena, moves_arena},
    {"direct", Collective::scatter, Carrier::mesh, moves_direct},
    {"arena", Collective::all_to_all, Carrier::arena, moves_arena},
    {"direct", Collective::all_to_all, Carrier::mesh, moves_direct},
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

// Returns the carrier that all collectives of a group use. They all use the same one, because ranks that call different
// collectives by mistake must still reach each other to notice the difference. For the same reason, a rank that waits in the
// arena during a call with carrier `both` also reads the headers that arrive over the mesh.
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
