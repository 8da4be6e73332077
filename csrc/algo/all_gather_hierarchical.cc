// All-gather over several hosts, some of which have several ranks. Each rank sends its block to one rank on every other host,
// over the mesh. On the receiving host, this rank shares the block with all others, in the arena. So each block moves to each
// host only once. The blocks move in pieces: while the ranks of a host share one piece, the next one is on the wire.
#include <algorithm>

#include "algo/two_levels.h"

namespace mscomm {

void all_gather_hierarchical(const Call& call, const Ranks& ranks, const Wait& wait) {
  const Layout& layout = ranks.layout;
  Mesh& mesh = *ranks.mesh;
  Home home(call, ranks, wait);
  const Blocks blocks = Blocks::of(call, layout.size);
  // For each place on this host, the ranks whose blocks the rank at this place has or receives.
  std::vector<std::vector<int>> bring(home.size());
  for (int place = 0; place < home.size(); place++) bring[place].push_back(home.ranks()[place]);
  std::vector<Piece> out, in;
  for (const size_t host : layout.others) {
    const std::vector<int>& there = layout.hosts[host];
    for (size_t i = 0; i < there.size(); i++) bring[i % bring.size()].push_back(there[i]);
    out.push_back({there[layout.place % there.size()], const_cast<char*>(call.in()), call.x_bytes});
  }
  const std::vector<int>& mine = bring[layout.place];
  mesh.send(out);

  // A staging chunk holds one piece of each block that a rank brings.
  const size_t most = std::ranges::max(bring, {}, &std::vector<int>::size).size();
  const size_t piece_bytes = std::max<size_t>(64, home.here() ? chunk_bytes / most / 64 * 64 : blocks.largest());
  const size_t steps = std::max<size_t>(1, pieces(blocks.largest(), piece_bytes));
  char* const result = call.result();
  const auto range = [&](int rank, size_t k) {
    const Range now = piece(blocks.bytes(rank), piece_bytes, k);
    return Range{blocks.begin(rank) + now.begin, blocks.begin(rank) + now.end};
  };
  copy(result + blocks.begin(mesh.rank()), call.x, call.x_bytes);
  std::vector<char*> outs;
  for (size_t k = 0; k < steps; k++) {
    in.clear();
    for (const int rank : mine)
      if (const Range now = range(rank, k); rank != mesh.rank() && (k == 0 || now.bytes() > 0))
        in.push_back({rank, result + now.begin, now.bytes()});
    mesh.receive(in, home.away());
    for (size_t i = 0; i < mine.size() && home.stages_out(); i++) {
      const Range now = range(mine[i], k);
      copy(home.staged(layout.place, k) + i * piece_bytes, result + now.begin, now.bytes());
    }
    home.round();
    if (k == 0) outs = home.outs(call.out_bytes);
    for (int other = 1; other < home.size(); other++) {
      const int place = (layout.place + other) % home.size();
      for (size_t i = 0; i < bring[place].size(); i++) {
        const Range now = range(bring[place][i], k);
        copy(result + now.begin, outs[place] ? outs[place] + now.begin : home.staged(place, k) + i * piece_bytes, now.bytes());
      }
    }
    mesh.progress();
  }
  home.end(steps, outs);
  mesh.exchange({}, {}, wait);
}

}  // namespace mscomm
