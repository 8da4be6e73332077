// Broadcast in shared memory: the root's x goes to all ranks.
#include "algo/arena_steps.h"

namespace mscomm {

void broadcast_arena(const Call& call, const Ranks& ranks, const Wait& wait) {
  const int root = call.signature.root;
  const size_t bytes = call.bytes();
  const auto between = [bytes, root](int source, int) { return Move{0, 0, source == root ? bytes : 0}; };
  const char* x = ranks.arena->rank() == root ? call.in() : nullptr;
  move_in_arena(call, ranks, {between, x, Blocks(bytes, 1), bytes}, wait);
}

}  // namespace mscomm
