// Scatter in shared memory: block r of the root's x goes to rank r.
#include "algo/arena_steps.h"

namespace mscomm {

void scatter_arena(const Call& call, const Ranks& ranks, const Wait& wait) {
  const Blocks blocks = Blocks::divided(call, ranks.arena->size());
  const int root = call.signature.root;
  const auto between = [&blocks, root](int source, int destination) {
    return Move{blocks.begin(destination), 0, source == root ? blocks.bytes(destination) : 0};
  };
  const char* x = ranks.arena->rank() == root ? call.in() : nullptr;
  move_in_arena(call, ranks, {between, x, blocks, blocks.total()}, wait);
}

}  // namespace mscomm
