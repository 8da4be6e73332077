// Barrier in shared memory: one round.
#include "algo/algorithm.h"

namespace mscomm {

void barrier_arena(const Call& call, const Ranks& ranks, const Wait& wait) {
  ranks.arena->post(call);
  ranks.arena->round(wait);
  compare_posts(*ranks.arena);
}

}  // namespace mscomm
