// Gather in shared memory: every rank's x goes to the root.
#include "algo/arena_steps.h"

namespace mscomm {

void gather_arena(const Call& call, const Ranks& ranks, const Wait& wait) {
  const Blocks blocks = Blocks::gathered(call, ranks.arena->size());
  const int root = call.signature.root;
  const auto between = [&blocks, root](int source, int destination) {
    return Move{0, blocks.begin(source), destination == root ? blocks.bytes(source) : 0};
  };
  move_in_arena(call, ranks, {between, call.in(), Blocks(call.x_bytes, 1), blocks.largest()}, wait);
}

}  // namespace mscomm
