// The collectives that only move data, over the mesh. Every rank sends its data directly to the ranks that need it, so the call
// takes only one network latency.
#include <vector>

#include "algo/mesh_steps.h"
#include "algo/moves.h"

namespace mscomm {

void moves_direct(const Call& call, const Ranks& ranks, const Wait& wait) {
  Mesh& mesh = *ranks.mesh;
  const int n = mesh.size(), me = mesh.rank();
  const Moves moves(call, n, me, Moves::Of::this_rank);
  const char* const x = moves.source_array(call, ranks);

  const Move own = moves.between(me, me);
  copy(call.result() + own.to, x + own.from, own.bytes);
  // An in-place all_to_all moves its data window by window. A received window stays in scratch memory until the window that it
  // will overwrite has been sent.
  const bool swaps = call.signature.what == Collective::all_to_all && call.x_bytes > 0 && x == call.out;
  const size_t each = swaps ? window_bytes : SIZE_MAX, steps = swaps ? windows(moves.blocks_of(me).largest(), each) : 1;
  char* const scratch = swaps ? ranks.scratch_of(n * window_bytes) : nullptr;
  std::vector<Piece> out, in;
  for (size_t k = 0; k < steps; k++) {
    out.clear(), in.clear();
    for (int i = 1; i < n; i++) {
      const int to = (me + i) % n, from = (me - i + n) % n;
      const Move sent = moves.between(me, to), got = moves.between(from, me);
      const Range going = piece(sent.bytes, each, k), coming = piece(got.bytes, each, k);
      // The first piece is sent even if it is empty, because its header says which call this rank is in.
      if (going.bytes() || (k == 0 && moves.pairs(me, to)))
        out.push_back({to, const_cast<char*>(x) + sent.from + going.begin, going.bytes()});
      if (coming.bytes() || (k == 0 && moves.pairs(from, me)))
        in.push_back({from, swaps ? scratch + from * window_bytes : call.result() + got.to, coming.bytes()});
    }
    mesh.exchange(out, in, wait);
    for (const Piece& piece : in)
      if (swaps) copy(call.result() + moves.between(piece.peer, me).to + k * each, piece.data, piece.bytes);
  }
}

}  // namespace mscomm
