// The collectives that only move data, over several hosts, some of which have several ranks. Between hosts, every rank sends its
// data directly to the ranks that need it. While this data is on the wire, the ranks of each host move the rest in the arena.
#include <algorithm>
#include <iterator>

#include "algo/moves.h"
#include "algo/two_levels.h"

namespace mscomm {

namespace {

// Returns the part of the call that stays on this host, as a call of the ranks of this host. The ranks have the numbers that
// they have in the arena. x: the array that this rank sends from.
Call part_at_home(const Call& call, const Layout& layout, const Moves& moves, const char* x) {
  const std::vector<int>& home = layout.at_home();
  const Collective what = call.signature.what;
  const size_t n = layout.size, first = home.front(), size = home.size();
  Call part{.signature = call.signature};
  for (const int rank : home) {
    part.x_bytes += moves.between(layout.rank, rank).bytes;
    part.out_bytes += moves.between(rank, layout.rank).bytes;
  }
  if (part.x_bytes > 0) part.x = x + moves.between(layout.rank, home.front()).from;
  if (part.out_bytes > 0) part.out = call.result() + moves.between(home.front(), layout.rank).to;
  if (rooted(what)) part.signature.root -= home.front();

  const auto at_home = [&](const std::vector<uint64_t>& counts, size_t begin) {
    return std::ranges::subrange(counts.begin() + begin + first, counts.begin() + begin + first + size);
  };
  if (!call.recv_counts.empty()) {
    std::ranges::copy(at_home(call.counts, 0), std::back_inserter(part.counts));
    std::ranges::copy(at_home(call.recv_counts, 0), std::back_inserter(part.recv_counts));
    return part;
  }
  const size_t rows = what == Collective::all_to_all ? size : 1;
  if (call.counts.empty()) part.counts.assign(rows * size, call.signature.count / (divides(what) ? n : 1));
  for (size_t row = 0; row < rows && !call.counts.empty(); row++)
    std::ranges::copy(at_home(call.counts, rows > 1 ? (first + row) * n : 0), std::back_inserter(part.counts));
  return part;
}

void move_at_home(const Call& part, const Ranks& ranks, const Wait& wait) {
  const std::vector<int>& home = ranks.layout.at_home();
  AtHome watch(wait, ranks.layout, *ranks.mesh);
  wait.deadline.start();  // because the deadline is copied here, and all copies must have the same start
  try {
    moves_arena(part, ranks, {watch, wait.deadline, ranks.mesh->all_sent() ? longest_sleep_ms : 1});
  } catch (Differs& differs) {
    for (auto& [rank, signature] : differs.calls) {
      rank = home[rank];
      if (signature.what == Collective::gather || signature.what == Collective::scatter) signature.root += home.front();
    }
    throw;
  }
}

}  // namespace

void moves_hierarchical(const Call& call, const Ranks& ranks, const Wait& wait) {
  const Layout& layout = ranks.layout;
  const std::vector<int>& home = layout.at_home();
  const int me = layout.rank;
  const Moves moves(call, layout.size, me, Moves::Of::this_rank);
  const char* const x = moves.source_array(call, ranks);
  // If the ranks of this host are not numbered consecutively, their blocks do not lie side by side, as moves_arena needs them.
  // They then use their links. If the root is on another host, nothing moves on this host.
  const bool side_by_side = home.back() - home.front() + 1 == std::ssize(home);
  const bool has_root = moves.root() < 0 || std::ranges::count(home, moves.root()) > 0;
  const bool by_arena = ranks.arena && side_by_side && has_root;
  std::vector<int> peers;
  for (const size_t host : layout.others) {
    const std::vector<int>& there = layout.hosts[host];
    for (size_t i = 0; i < there.size(); i++) peers.push_back(there[(layout.place + i) % there.size()]);
  }
  for (const int rank : home)
    if (!by_arena && rank != me) peers.push_back(rank);
  move_over_mesh(call, moves, x, peers, true, ranks, wait, [&] {
    if (by_arena) return move_at_home(part_at_home(call, layout, moves, x), ranks, wait);
    const Move own = moves.between(me, me);
    copy(call.result() + own.to, x + own.from, own.bytes);
  });
}

}  // namespace mscomm
