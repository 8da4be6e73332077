// All-reduce over the mesh in log2(n) latencies, for short messages from many ranks. Every rank gathers the messages of all
// ranks, as in all_gather_bruck, and reduces them in the canonical order.
#include <algorithm>
#include <vector>

#include "algo/mesh_steps.h"
#include "algo/order.h"

namespace mscomm {

// The size of a window for n ranks, so that the windows of all ranks fit into the cache. A message that is worth this algorithm
// usually fits into one window.
static size_t window_of(int n) { return std::max<size_t>(64, (256u << 10) / n / 64 * 64); }

Cost all_reduce_bruck_cost(const Layout& layout, double bytes) {
  Cost cost = gather_bruck_cost(layout.size, bytes);
  const auto times = static_cast<double>(windows(static_cast<size_t>(bytes), window_of(layout.size)));
  cost.latencies *= times;
  cost.messages *= times;
  return cost;
}

void all_reduce_bruck(const Call& call, const Ranks& ranks, const Wait& wait) {
  const int n = ranks.mesh->size(), me = ranks.mesh->rank();
  const size_t window = window_of(n);
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
