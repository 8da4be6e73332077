// The collectives that only move data, over the mesh. Every rank sends its data directly to the ranks that need it, so the call
// takes only one network latency.
#include <vector>

#include "algo/mesh_steps.h"
#include "algo/moves.h"

namespace mscomm {

void move_over_mesh(const Call& call, const Moves& moves, const char* x, std::span<const int> peers, bool in_turn,
                    const Ranks& ranks, const Wait& wait, const std::function<void()>& meanwhile) {
  Mesh& mesh = *ranks.mesh;
  const int me = mesh.rank();
  // An in-place all_to_all moves its data window by window. A received window stays in scratch memory until the window that it
  // will overwrite has been sent. So this rank must receive from all peers at once: each of them may wait for its window to be
  // received before it sends the next one.
  const bool swaps = call.signature.what == Collective::all_to_all && call.x_bytes > 0 && x == call.out;
  const size_t each = swaps ? window_bytes : SIZE_MAX, steps = swaps ? windows(moves.blocks_of(me).largest(), each) : 1;
  char* const scratch = swaps ? ranks.scratch_of(mesh.size() * window_bytes) : nullptr;
  std::vector<Piece> out, in;
  for (size_t k = 0; k < steps; k++) {
    out.clear(), in.clear();
    for (const int peer : peers) {
      const Move sent = moves.between(me, peer), got = moves.between(peer, me);
      const Range going = piece(sent.bytes, each, k), coming = piece(got.bytes, each, k);
      // The first piece is sent even if it is empty, because its header says which call this rank is in.
      if (going.bytes() || (k == 0 && moves.pairs(me, peer)))
        out.push_back({peer, const_cast<char*>(x) + sent.from + going.begin, going.bytes()});
      if (coming.bytes() || (k == 0 && moves.pairs(peer, me)))
        in.push_back({peer, swaps ? scratch + peer * window_bytes : call.result() + got.to, coming.bytes()});
    }
    if (in_turn)
      for (const Piece& piece : out) mesh.send({&piece, 1});
    else mesh.send(out);
    if (k == 0) {
      mesh.progress();
      meanwhile();
    }
    mesh.exchange({}, in, wait);
    for (const Piece& piece : in)
      if (swaps) copy(call.result() + moves.between(piece.peer, me).to + k * each, piece.data, piece.bytes);
  }
}

Cost all_gather_direct_cost(const Layout& layout, double bytes) {
  const double others = layout.size - 1;
  return {.latencies = 1,
          .messages = others,
          .bytes = others * bytes,
          .crowded = crowded(layout.size, others * bytes),
          .copied = bytes};
}

void moves_direct(const Call& call, const Ranks& ranks, const Wait& wait) {
  const int n = ranks.layout.size, me = ranks.layout.rank;
  const Moves moves(call, n, me, Moves::Of::this_rank);
  const char* const x = moves.source_array(call, ranks);
  std::vector<int> peers;
  for (int i = 1; i < n; i++) peers.push_back((me + i) % n);
  move_over_mesh(call, moves, x, peers, false, ranks, wait, [&] {
    const Move own = moves.between(me, me);
    copy(call.result() + own.to, x + own.from, own.bytes);
  });
}

}  // namespace mscomm
