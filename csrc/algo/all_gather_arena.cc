// All-gather in shared memory: every rank's x goes to all ranks.
#include "algo/arena_steps.h"

namespace mscomm {

void all_gather_arena(const Call& call, const Ranks& ranks, const Wait& wait) {
  const Blocks blocks = Blocks::gathered(call, ranks.arena->size());
  const auto between = [&blocks](int source, int) { return Move{0, blocks.begin(source), blocks.bytes(source)}; };
  const auto largest_from = [&blocks](int source) { return blocks.bytes(source); };
  move_in_arena(call, ranks, {between, call.in(), Blocks(call.x_bytes, 1), blocks.largest(), largest_from}, wait);
}

}  // namespace mscomm
