// All-to-all over the mesh. Every rank sends to all other ranks at once, so the call takes only one network latency.
#include "algo/mesh_steps.h"

namespace mscomm {

void all_to_all_direct(const Call& call, const Ranks& ranks, const Wait& wait) {
  Mesh& mesh = *ranks.mesh;
  const int n = mesh.size(), me = mesh.rank();

  const Blocks sent = Blocks::sent_by(call, n, me), got = Blocks::got_by(call, n, me);
  const char* x = kept_apart(call, ranks, sent, got);
  const bool in_place = x == call.out;

  copy(call.result() + got.begin(me), x + sent.begin(me), sent.bytes(me));
  // An in-place call moves window by window. A received window is kept in scratch memory until the window that it overwrites has
  // been sent.
  const size_t each = in_place ? window_bytes : std::max<size_t>(1, std::max(sent.largest(), got.largest()));
  char* scratch = in_place ? ranks.scratch_of(n * window_bytes) : nullptr;
  std::vector<Piece> out, in;
  for (size_t k = 0; k < windows(std::max(sent.largest(), got.largest()), each); k++) {
    out.clear(), in.clear();
    for (int i = 1; i < n; i++) {
      const int to = (me + i) % n, from = (me - i + n) % n;
      const Range going = piece(sent.bytes(to), each, k), coming = piece(got.bytes(from), each, k);
      char* at = in_place ? scratch + from * window_bytes : call.result() + got.begin(from);
      if (k == 0 || going.bytes()) out.push_back({to, const_cast<char*>(x) + sent.begin(to) + going.begin, going.bytes()});
      if (k == 0 || coming.bytes()) in.push_back({from, at, coming.bytes()});
    }
    mesh.exchange(out, in, wait);
    for (const Piece& piece : in)
      if (in_place) copy(call.result() + got.begin(piece.peer) + k * each, scratch + piece.peer * window_bytes, piece.bytes);
  }
}

}  // namespace mscomm
