// All-reduce over the mesh in two latencies: every rank gets its part of the message from all others, reduces it in the canonical
// order, and sends the result to all. 2 (n-1)/n of the message leave each rank, as in a ring (Thakur, Rabenseifner, Gropp 2005,
// "pairwise").
#include <algorithm>
#include <cstring>

#include "algo/algorithm.h"

namespace mscomm {

namespace {
constexpr size_t window_bytes = 256 << 10;  // received from each peer before it is reduced, while it is in the cache
}

void all_reduce_direct(const Call& call, const Ranks& ranks, const Wait& wait) {
  Mesh& mesh = *ranks.mesh;
  const int n = mesh.size(), me = mesh.rank();
  const size_t bytes = call.bytes();
  const Range mine = part(bytes, n, me);
  const size_t rounds = std::max<size_t>(1, pieces(part(bytes, n, 0).bytes(), window_bytes));
  char* scratch = ranks.scratch_of(static_cast<size_t>(n) * window_bytes);
  std::vector<Piece> out, in;
  std::vector<const void*> inputs(static_cast<size_t>(n));

  for (size_t k = 0; k < rounds; k++) {
    const Range here = piece(mine.bytes(), window_bytes, k);
    out.clear(), in.clear();
    for (int i = 1; i < n; i++) {
      const int to = (me + i) % n, from = (me - i + n) % n;
      const Range theirs = part(bytes, n, to), now = piece(theirs.bytes(), window_bytes, k);
      // The pieces of the first window go even when they are empty: their header says which call this is.
      if (k == 0 || now.bytes()) out.push_back({to, const_cast<char*>(call.in()) + theirs.begin + now.begin, now.bytes()});
      if (k == 0 || here.bytes()) in.push_back({from, scratch + static_cast<size_t>(from) * window_bytes, here.bytes()});
    }
    mesh.exchange(out, in, wait);
    for (int rank = 0; rank < n; rank++) inputs[static_cast<size_t>(rank)] = scratch + static_cast<size_t>(rank) * window_bytes;
    inputs[static_cast<size_t>(me)] = call.in() + mine.begin + here.begin;
    reduce_in_order(call.signature, ranks.layout, inputs.data(), call.result() + mine.begin + here.begin, here.bytes());
  }
  out.clear(), in.clear();
  for (int i = 1; i < n; i++) {
    const int to = (me + i) % n, from = (me - i + n) % n;
    const Range theirs = part(bytes, n, from);
    out.push_back({to, call.result() + mine.begin, mine.bytes()});
    in.push_back({from, call.result() + theirs.begin, theirs.bytes()});
  }
  mesh.exchange(out, in, wait);
}

}  // namespace mscomm
