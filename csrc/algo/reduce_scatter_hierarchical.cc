// Reduce-scatter over several hosts, some of which have several ranks. For each block, every host sends one partial result to the
// rank that gets the block: on each host, one rank reduces the block of all ranks of the host in the arena, and sends the partial
// result over the mesh. The receiver merges the partial results of all hosts, in the canonical order. So each block moves from
// each host only once. With 16-bit floats, the partial results are float32, and so twice as large.
//
// The blocks move in pieces. While a piece is on the wire, the ranks of a host reduce the next one.
#include <algorithm>
#include <array>

#include "algo/order.h"
#include "algo/two_levels.h"

namespace mscomm {

void reduce_scatter_hierarchical(const Call& call, const Ranks& ranks, const Wait& wait) {
  // The number of buffers for partial results. A buffer is used again when its piece has been sent.
  constexpr size_t buffers = 4;
  const Layout& layout = ranks.layout;
  Mesh& mesh = *ranks.mesh;
  const int n = layout.size, me = mesh.rank();
  Home home(call, ranks, wait);
  const Blocks blocks = Blocks::of(call, n);
  const Reduction &row = reduction(call.signature.dtype, call.signature.op), &sum = row_of_partials(call.signature);
  // A staging chunk holds one piece of each block. All hosts use the same pieces.
  const size_t piece_bytes = std::max<size_t>(64, chunk_bytes / n / 64 * 64);
  const size_t steps = std::max<size_t>(1, pieces(blocks.largest(), piece_bytes));
  // The other ranks for which this rank reduces, and the ranks that reduce for this rank, by host.
  std::vector<int> receivers;
  std::vector<int> senders(layout.hosts.size());
  std::vector<int> staged_for = home.ranks();  // the ranks whose blocks other ranks of this host reduce
  for (const size_t host : layout.others) {
    const std::vector<int>& there = layout.hosts[host];
    for (size_t i = 0; i < there.size(); i++)
      (static_cast<int>(i % home.size()) == layout.place ? receivers : staged_for).push_back(there[i]);
    senders[host] = there[layout.place % there.size()];
  }
  std::erase(staged_for, me);
  const size_t partial_bytes = std::min(piece_bytes, blocks.largest()) / row.element_bytes * row.accumulator_bytes;
  const size_t room = (partial_bytes + 63) / 64 * 64;
  char* const scratch = ranks.scratch_of((buffers * (receivers.size() + 1) + layout.hosts.size()) * room);
  const auto partial = [&](size_t k, size_t i) { return scratch + (k % buffers * (receivers.size() + 1) + i) * room; };
  const auto coming = [&](size_t host) { return scratch + (buffers * (receivers.size() + 1) + host) * room; };
  const auto elements = [&](Range range) { return range.bytes() / row.element_bytes; };
  const auto range = [&](int rank, size_t k) { return piece(blocks.bytes(rank), piece_bytes, k); };

  const auto stage = [&](size_t k) {
    if (!home.stages_x()) return;
    for (const int rank : staged_for) {
      const Range now = range(rank, k);
      copy(home.staged(layout.place, k) + rank * piece_bytes, call.in() + blocks.begin(rank) + now.begin, now.bytes());
    }
  };
  std::vector<char*> xs;
  std::vector<const void*> inputs(home.size());
  const auto reduce_here = [&](int rank, size_t k, char* to) {
    const Range now = range(rank, k);
    for (int place = 0; place < home.size(); place++) {
      if (place == layout.place) inputs[place] = call.in() + blocks.begin(rank) + now.begin;
      else if (xs[place]) inputs[place] = xs[place] + blocks.begin(rank) + now.begin;
      else inputs[place] = home.staged(place, k) + rank * piece_bytes;
    }
    add_up(sum, inputs, to, elements(now));
  };
  std::array<uint64_t, buffers> queued{};  // for each buffer, what the mesh must have sent before the buffer is free
  std::vector<Piece> out, in;
  const auto send = [&](size_t k) {
    mesh.wait_until_sent(queued[k % buffers], wait);
    out.clear();
    for (size_t i = 0; i < receivers.size(); i++) {
      const size_t count = elements(range(receivers[i], k));
      reduce_here(receivers[i], k, partial(k, i));
      if (k == 0 || count > 0) out.push_back({receivers[i], partial(k, i), count * row.accumulator_bytes});
    }
    reduce_here(me, k, partial(k, receivers.size()));
    home.confirm_reads();  // before other hosts get the partial results
    mesh.send(out);
    queued[k % buffers] = mesh.queued();
  };
  const auto merge = [&](size_t k) {
    const Range now = range(me, k);
    if (k > 0 && now.bytes() == 0) return;
    in.clear();
    for (const size_t host : layout.others) in.push_back({senders[host], coming(host), elements(now) * row.accumulator_bytes});
    mesh.receive(in, wait);
    const auto of = [&](size_t host) { return host == layout.here ? partial(k, receivers.size()) : coming(host); };
    merge_in_order(row, layout.hosts.size(), of, elements(now));
    row.finish(of(0), n, call.result() + now.begin, elements(now));
  };

  stage(0);
  home.round();
  xs = home.xs(call.x_bytes);
  const bool staged = std::ranges::count(xs, nullptr) > 0;
  for (size_t k = 0; k <= steps; k++) {
    if (k + 1 < steps) stage(k + 1);
    if (k < steps) send(k);
    if (k > 0) merge(k - 1);
    if (k + 1 < steps && staged) home.round();
    mesh.progress();
  }
  home.end(steps, xs);
  mesh.exchange({}, {}, wait);
}

}  // namespace mscomm
