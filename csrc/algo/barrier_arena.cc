// Barrier in shared memory: one round.
#include "algo/algorithm.h"

namespace mscomm {

void barrier_arena(const Call& call, const Ranks& ranks, const Wait& wait) {
  ranks.arena->post(call);
  meet(*ranks.arena, wait);
}

}  // namespace mscomm
