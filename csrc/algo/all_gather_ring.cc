// All-gather around a ring in n-1 steps: each rank passes on what it got last. Only neighbours talk.
#include <cstring>

#include "algo/algorithm.h"

namespace mscomm {

void all_gather_ring(const Call& call, const Ranks& ranks, const Wait& wait) {
  Mesh& mesh = *ranks.mesh;
  const int n = mesh.size(), me = mesh.rank();
  const size_t bytes = call.bytes();
  const auto block = [&](int index) { return call.result() + static_cast<size_t>(((index % n) + n) % n) * bytes; };
  if (bytes) std::memcpy(block(me), call.x, bytes);
  for (int step = 0; step < n - 1; step++) {
    const Piece out{(me + 1) % n, block(me - step), bytes};
    const Piece in{(me - 1 + n) % n, block(me - step - 1), bytes};
    mesh.exchange({&out, 1}, {&in, 1}, wait);
  }
}

}  // namespace mscomm
