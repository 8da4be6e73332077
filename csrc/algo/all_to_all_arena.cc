// All-to-all in shared memory: block d of rank s's x becomes block s of rank d's out.
#include "algo/algorithm.h"

namespace mscomm {

void all_to_all_arena(const Call& call, const Ranks& ranks, const Wait& wait) {
  const int n = ranks.arena->size(), me = ranks.arena->rank();

  std::vector<Blocks> sent, got;
  size_t largest_x = 0;
  for (int rank = 0; rank < n; rank++) {
    sent.push_back(Blocks::sent_by(call, n, rank));
    got.push_back(Blocks::got_by(call, n, rank));
    largest_x = std::max(largest_x, sent.back().total());
  }
  const auto between = [&](int source, int destination) {
    const Blocks& from = sent[static_cast<size_t>(source)];
    return Move{from.begin(destination), got[static_cast<size_t>(destination)].begin(source), from.bytes(destination)};
  };
  const Blocks& mine = sent[static_cast<size_t>(me)];
  const char* x = kept_apart(call, ranks, mine, got[static_cast<size_t>(me)]);
  move_in_arena(call, ranks, {between, x, mine, largest_x}, wait);
}

}  // namespace mscomm
