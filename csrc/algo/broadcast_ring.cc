// Broadcast along a chain of ranks that starts at the root, window by window. This algorithm has the best bandwidth for large
// messages, but takes n-1 latencies.
#include "algo/mesh_steps.h"

namespace mscomm {

void broadcast_ring(const Call& call, const Ranks& ranks, const Wait& wait) {
  const int n = ranks.mesh->size(), me = ranks.mesh->rank(), root = call.signature.root;
  const int right = (me + 1) % n;
  relay(call, *ranks.mesh, me == root ? -1 : (me - 1 + n) % n, right == root ? std::vector<int>{} : std::vector<int>{right},
        wait);
}

}  // namespace mscomm
