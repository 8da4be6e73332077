// All-reduce over the mesh in log2(n) latencies, for short messages from many ranks. Every rank gathers the messages of all
// ranks, as in all_gather_bruck, and reduces them in the canonical order.
#include <algorithm>
#include <vector>

#include "algo/mesh_steps.h"
#include "algo/order.h"

namespace mscomm {

void all_reduce_bruck(const Call& call, const Ranks& ranks, const Wait& wait) {
  const int n = ranks.mesh->size(), me = ranks.mesh->rank();
  // A message usually fits into one window. MSCOMM_ALGO can force this algorithm for longer messages.
  const size_t window = std::max<size_t>(64, bruck_bytes / n / 64 * 64);
  char* const rotated = ranks.scratch_of(n * std::min(window, call.bytes()));
  std::vector<const void*> inputs(n);
  for (size_t k = 0; k < windows(call.bytes(), window); k++) {
    const Range now = piece(call.bytes(), window, k);
    copy(rotated, call.in() + now.begin, now.bytes());
    gather_bruck(*ranks.mesh, Blocks(now.bytes(), n), rotated, wait);
    for (int i = 0; i < n; i++) inputs[(me + i) % n] = rotated + i * now.bytes();
    reduce_in_order(call.signature, ranks.layout, inputs.data(), call.result() + now.begin, now.bytes());
  }
}

}  // namespace mscomm
