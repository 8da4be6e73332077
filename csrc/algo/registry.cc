// The table of algorithms, and the choice among them.
#include <algorithm>
#include <array>
#include <cmath>

#include "algo/algorithm.h"
#include "algo/mesh_steps.h"
#include "base/error.h"
#include "transport/control.h"

namespace mscomm {

using Run = void(const Call&, const Ranks&, const Wait&);
Run all_reduce_arena, all_reduce_hierarchical, all_reduce_direct, all_reduce_doubling, all_reduce_halving, all_reduce_bruck,
    all_reduce_ring;
Run reduce_scatter_arena, reduce_scatter_hierarchical, reduce_scatter_direct, reduce_scatter_halving, reduce_scatter_ring,
    reduce_direct;
Run moves_arena, moves_hierarchical, moves_direct, all_to_all_hierarchical, all_gather_hierarchical, all_gather_bruck,
    all_gather_ring;
Run broadcast_hierarchical, broadcast_tree, broadcast_ring;
Run scan_arena, scan_chain;
Run barrier_arena, barrier_hierarchical, barrier_tree;

using CostOf = Cost(const Layout&, double bytes);
CostOf all_reduce_direct_cost, all_reduce_doubling_cost, all_reduce_halving_cost, all_reduce_bruck_cost;
CostOf all_gather_direct_cost, all_gather_bruck_cost, all_gather_ring_cost;
CostOf reduce_scatter_direct_cost, reduce_scatter_halving_cost;

namespace {

// With two ranks, these algorithms are direct with more copies. If a host has several ranks, one of them acts for all, which the
// costs of doubling and halving leave out.
bool more_than_two(const Layout& layout, size_t) { return layout.size > 2; }
bool more_than_two_hosts_of_one(const Layout& layout, size_t) {
  return layout.size > 2 && std::ssize(layout.hosts) == layout.size;
}
// A reduce_scatter by halving copies the whole message to scratch memory first. If the message does not stay in the cache, this
// takes longer than the model says.
bool halves_in_scratch(const Layout& layout, size_t bytes) {
  return more_than_two_hosts_of_one(layout, bytes) && bytes <= 1u << 20;
}
// The blocks of an all_gather by bruck are in scratch memory first.
bool fits_in_scratch(const Layout& layout, size_t bytes) { return layout.size > 2 && layout.size * bytes <= 16u << 20; }

// In a broadcast by `hierarchical`, all ranks of a host meet, unless the message is very short. In a tree, the root returns when
// the kernel has the message, and no rank waits for those below it. So a tree is better if ranks would meet, and the message is
// so short that sending it more than once costs little.
bool worth_meeting(const Layout&, size_t bytes) { return bytes <= one_way_bytes || bytes > 8 << 10; }

// In a gather or scatter by `hierarchical`, the ranks of the root's host wait for each other. So only long messages take less
// time.
constexpr size_t long_at_root_bytes = 512 << 10;
bool long_scatter(const Layout&, size_t bytes) { return bytes >= long_at_root_bytes; }
bool long_gather(const Layout& layout, size_t bytes) { return layout.size * bytes >= long_at_root_bytes; }

// If every rank sends its whole message to the root at once, only the root waits.
bool takes_two_latencies(const Layout& layout, size_t bytes) { return !in_one_latency(layout.size, bytes); }

constexpr bool own_order = true;

Cost along_tree(const Layout& layout, double bytes) { return tree_cost(layout.size, bytes); }
Cost along_chain(const Layout& layout, double bytes) { return chain_cost(layout.size, bytes); }

// The rows of each collective are in order of preference; of rows with a cost, only if their times are equal. Layout::allows says
// for which hosts a row may be taken, and Layout::chosen which of these rows runs a call.
constexpr Algorithm table[] = {
    {"arena", Collective::all_reduce, Carrier::arena, all_reduce_arena},
    {"hierarchical", Collective::all_reduce, Carrier::both, all_reduce_hierarchical},
    {"direct", Collective::all_reduce, Carrier::mesh, all_reduce_direct, nullptr, all_reduce_direct_cost},
    {"doubling", Collective::all_reduce, Carrier::mesh, all_reduce_doubling, more_than_two_hosts_of_one,
     all_reduce_doubling_cost},
    {"halving", Collective::all_reduce, Carrier::mesh, all_reduce_halving, more_than_two_hosts_of_one, all_reduce_halving_cost},
    {"bruck", Collective::all_reduce, Carrier::mesh, all_reduce_bruck, more_than_two, all_reduce_bruck_cost},
    {"ring", Collective::all_reduce, Carrier::mesh, all_reduce_ring, nullptr, nullptr, own_order},
    {"arena", Collective::all_gather, Carrier::arena, moves_arena},
    {"hierarchical", Collective::all_gather, Carrier::both, all_gather_hierarchical},
    {"direct", Collective::all_gather, Carrier::mesh, moves_direct, nullptr, all_gather_direct_cost},
    {"bruck", Collective::all_gather, Carrier::mesh, all_gather_bruck, fits_in_scratch, all_gather_bruck_cost},
    {"ring", Collective::all_gather, Carrier::mesh, all_gather_ring, nullptr, all_gather_ring_cost},
    {"arena", Collective::reduce_scatter, Carrier::arena, reduce_scatter_arena},
    {"hierarchical", Collective::reduce_scatter, Carrier::both, reduce_scatter_hierarchical},
    {"direct", Collective::reduce_scatter, Carrier::mesh, reduce_scatter_direct, nullptr, reduce_scatter_direct_cost},
    {"halving", Collective::reduce_scatter, Carrier::mesh, reduce_scatter_halving, halves_in_scratch,
     reduce_scatter_halving_cost},
    {"ring", Collective::reduce_scatter, Carrier::mesh, reduce_scatter_ring, nullptr, nullptr, own_order},
    {"arena", Collective::broadcast, Carrier::arena, moves_arena},
    {"hierarchical", Collective::broadcast, Carrier::both, broadcast_hierarchical, worth_meeting},
    {"tree", Collective::broadcast, Carrier::mesh, broadcast_tree, nullptr, along_tree},
    {"ring", Collective::broadcast, Carrier::mesh, broadcast_ring, nullptr, along_chain},
    {"arena", Collective::reduce, Carrier::arena, all_reduce_arena},  // this function and the next also implement reduce
    {"hierarchical", Collective::reduce, Carrier::both, all_reduce_hierarchical, takes_two_latencies},
    {"direct", Collective::reduce, Carrier::mesh, reduce_direct},
    {"arena", Collective::gather, Carrier::arena, moves_arena},
    {"hierarchical", Collective::gather, Carrier::both, moves_hierarchical, long_gather},
    {"direct", Collective::gather, Carrier::mesh, moves_direct},
    {"arena", Collective::scatter, Carrier::arena, moves_arena},
    {"hierarchical", Collective::scatter, Carrier::both, moves_hierarchical, long_scatter},
    {"direct", Collective::scatter, Carrier::mesh, moves_direct},
    {"arena", Collective::all_to_all, Carrier::arena, moves_arena},
    {"hierarchical", Collective::all_to_all, Carrier::both, all_to_all_hierarchical},
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
    if (row.what != what || row.own_order || (row.carrier != Carrier::arena) != by_mesh || !layout.allows(row.carrier)) continue;
    rows.push_back(&row);
    if (!row.fits && !row.cost) break;
  }
  if (std::ranges::all_of(rows, [](const Algorithm* row) { return row->fits != nullptr; }))
    throw Error("Error", "no algorithm for every size of " + std::string(name(what)));
  return rows;
}

}  // namespace

std::span<const Algorithm> algorithms() { return table; }

bool Prices::valid() const {
  const auto is_price = [](double price) { return std::isfinite(price) && price >= 0; };
  return std::ranges::all_of(std::array{latency_us, message_us, byte_ns, crowded_byte_ns, copied_byte_ns}, is_price);
}

Layout::Layout(const std::vector<int>& host, int rank, const Forced& forced, const Prices& prices)
    : rank(rank), size(static_cast<int>(host.size())), prices(prices), here(host.at(rank)) {
  if (!prices.valid()) throw Error("ValueError", "a price is not a number of 0 or more");
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

std::vector<int> Layout::partners() const {
  std::vector<int> ranks;
  if (!mesh) return ranks;
  const auto as_many = [this](const auto& host) { return host.size() == fewest; };
  const bool by_place = fewest > 1 && std::ranges::all_of(hosts, as_many);
  for (const auto& host : hosts)
    for (size_t at = 0; at < host.size(); at++)
      if (host[at] != rank && (!by_place || static_cast<int>(at) == place)) ranks.push_back(host[at]);
  return ranks;
}

bool Layout::allows(Carrier carrier) const {
  if (carrier == Carrier::arena) return hosts.size() == 1;
  return carrier == Carrier::mesh || (hosts.size() > 1 && std::ssize(hosts) < size && size <= most_on_two_levels);
}

const Algorithm& Layout::cheapest(const std::vector<const Algorithm*>& all, size_t bytes) const {
  const Algorithm* best = nullptr;
  double least = 0;
  for (const Algorithm* row : all) {
    if (row->fits && !row->fits(*this, bytes)) continue;
    if (!row->cost) return *row;
    const double us = prices.us(row->cost(*this, static_cast<double>(bytes)));
    if (!best || us < least) best = row, least = us;
  }
  return *best;
}

}  // namespace mscomm
