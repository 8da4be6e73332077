// All-to-all over the mesh with one peer at a time, so that a rank never receives from many peers at once. In round r, two ranks
// exchange their blocks if the sum of their numbers is r modulo n. A rank skips the round in which it would be its own peer.
#include "algo/mesh_steps.h"

namespace mscomm {

void all_to_all_pairwise(const Call& call, const Ranks& ranks, const Wait& wait) {
  Mesh& mesh = *ranks.mesh;
  const int n = mesh.size(), me = mesh.rank();

  const Blocks sent = Blocks::sent_by(call, n, me), got = Blocks::got_by(call, n, me);
  const char* x = kept_apart(call, ranks, sent, got);
  const bool in_place = x == call.out;

  copy(call.result() + got.begin(me), x + sent.begin(me), sent.bytes(me));
  for (int round = 0; round < n; round++) {
    const int peer = (round - me + n) % n;
    if (peer == me) continue;
    const size_t most = std::max(sent.bytes(peer), got.bytes(peer));
    // An in-place call moves window by window. A received window is kept in scratch memory until the window that it overwrites
    // has been sent.
    const size_t each = in_place ? window_bytes : std::max<size_t>(1, most);
    for (size_t k = 0; k < windows(most, each); k++) {
      const Range going = piece(sent.bytes(peer), each, k), coming = piece(got.bytes(peer), each, k);
      char* place = call.result() + got.begin(peer) + coming.begin;
      const Piece out{peer, const_cast<char*>(x) + sent.begin(peer) + going.begin, going.bytes()};
      const Piece in{peer, in_place ? ranks.scratch_of(window_bytes) : place, coming.bytes()};
      mesh.exchange({&out, 1}, {&in, 1}, wait);
      copy(place, in.data, in.bytes);
    }
  }
}

}  // namespace mscomm
