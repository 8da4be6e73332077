// All-gather over the mesh in log2(n) latencies, for short messages from many ranks (Bruck et al. 1997). A rank sends log2(n)
// messages, compared with n-1 messages when it sends its data directly to every other rank.
#include "algo/mesh_steps.h"

namespace mscomm {

Cost all_gather_bruck_cost(const Layout& layout, double bytes) { return gather_bruck_cost(layout.size, bytes); }

void all_gather_bruck(const Call& call, const Ranks& ranks, const Wait& wait) {
  const int n = ranks.mesh->size(), me = ranks.mesh->rank();
  const Blocks blocks = Blocks::of(call, n);
  char* const rotated = ranks.scratch_of(blocks.total());
  copy(rotated, call.x, call.x_bytes);
  gather_bruck(*ranks.mesh, blocks, rotated, wait);
  const size_t after = blocks.total() - blocks.begin(me);  // the total size of the blocks of this rank and of the ranks after it
  copy(call.result() + blocks.begin(me), rotated, after);
  copy(call.result(), rotated + after, blocks.begin(me));
}

}  // namespace mscomm
