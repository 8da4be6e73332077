// Barrier in shared memory: one round.
#include "algo/arena_steps.h"

namespace mscomm {

void barrier_arena(const Call& call, const Ranks& ranks, const Wait& wait) {
  ranks.arena->post(call, wait);
  meet(*ranks.arena, wait);
}

}  // namespace mscomm
