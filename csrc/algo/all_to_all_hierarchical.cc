// All-to-all over several hosts, some of which have several ranks. If the blocks are short, a rank sends only one message to each
// other host. In the arena, it collects what all ranks of its host have for the rank at its own place there, and sends all this
// to that rank. So the receiver has its blocks at once, and its host needs no round. If the blocks are long, or if each rank
// knows only its own counts, every rank sends its own blocks (moves_hierarchical).
#include <algorithm>
#include <numeric>

#include "algo/moves.h"
#include "algo/two_levels.h"

namespace mscomm {

namespace {

// Ranks collect the blocks of their host if no x is larger than this. Otherwise, it takes less time to send more messages than to
// copy the blocks twice more (docs/design/0005-hosts.md).
constexpr size_t most_collected_bytes = 128 << 10;
static_assert(most_collected_bytes <= chunk_bytes);

size_t largest_x(const Call& call, size_t n) {
  if (call.counts.empty()) return call.x_bytes;
  uint64_t most = 0;
  for (auto row = call.counts.begin(); row != call.counts.end(); row += n)
    most = std::max(most, std::accumulate(row, row + n, uint64_t{0}));
  return most * call.element_bytes();
}

}  // namespace

void all_to_all_hierarchical(const Call& call, const Ranks& ranks, const Wait& wait) {
  const Layout& layout = ranks.layout;
  const int n = layout.size, me = layout.rank;
  if (!call.recv_counts.empty() || largest_x(call, n) > most_collected_bytes) return moves_hierarchical(call, ranks, wait);
  Mesh& mesh = *ranks.mesh;
  const Moves moves(call, n, me, Moves::Of::all_ranks);
  Home home(call, ranks, wait);
  // out: for each rank elsewhere whose blocks this rank collects, what this host sends to it. in: what each other host sends to
  // this rank.
  const auto bytes_of = [&](const std::vector<int>& sources, int destination) {
    size_t bytes = 0;
    for (const int source : sources) bytes += moves.between(source, destination).bytes;
    return bytes;
  };
  std::vector<Piece> out, in;
  for (const size_t host : layout.others) {
    const std::vector<int>& there = layout.hosts[host];
    for (size_t i = layout.place; i < there.size(); i += home.size())
      out.push_back({there[i], nullptr, bytes_of(home.ranks(), there[i])});
    in.push_back({there[layout.place % there.size()], nullptr, bytes_of(there, me)});
  }
  size_t room = home.here() ? 0 : call.x_bytes;
  for (const auto* pieces : {&out, &in})
    for (const Piece& piece : *pieces) room += piece.bytes;
  char* const scratch = ranks.scratch_of(room);
  char* free = scratch + (home.here() ? 0 : call.x_bytes);
  for (auto* pieces : {&out, &in})
    for (Piece& piece : *pieces) piece.data = free, free += piece.bytes;

  // All blocks are read from copies of x, because out may be the same array.
  const auto x_of = [&](int place) { return home.here() ? home.staged(place, 0) : scratch; };
  copy(x_of(layout.place), call.x, call.x_bytes);
  home.round();
  for (const Piece& piece : out) {
    char* at = piece.data;
    for (int place = 0; place < home.size(); place++) {
      const Move move = moves.between(home.ranks()[place], piece.peer);
      copy(at, x_of(place) + move.from, move.bytes);
      at += move.bytes;
    }
  }
  mesh.send(out);
  mesh.progress();
  for (int place = 0; place < home.size(); place++) {
    const Move move = moves.between(home.ranks()[place], me);
    copy(call.result() + move.to, x_of(place) + move.from, move.bytes);
  }
  mesh.receive(in, wait);
  for (size_t i = 0; i < in.size(); i++) {
    const char* at = in[i].data;
    for (const int source : layout.hosts[layout.others[i]]) {
      const Move move = moves.between(source, me);
      copy(call.result() + move.to, at, move.bytes);
      at += move.bytes;
    }
  }
  home.end(1);
  mesh.exchange({}, {}, wait);
}

}  // namespace mscomm
