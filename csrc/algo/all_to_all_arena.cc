// All-to-all in shared memory: block d of rank s's x becomes block s of rank d's out.
#include "algo/arena_steps.h"

namespace mscomm {

void all_to_all_arena(const Call& call, const Ranks& ranks, const Wait& wait) {
  const int n = ranks.arena->size(), me = ranks.arena->rank();

  // The parts of the message that each rank sends and gets, indexed by rank. If the call has no counts, these parts are the same
  // for all ranks, so the vectors have only one entry.
  std::vector<Blocks> sent, got;
  const int kinds = call.counts.empty() ? 1 : n;
  size_t largest_x = 0;
  for (int rank = 0; rank < kinds; rank++) {
    sent.push_back(Blocks::sent_by(call, n, rank));
    got.push_back(Blocks::got_by(call, n, rank));
    largest_x = std::max(largest_x, sent.back().total());
  }
  const auto of = [kinds](const std::vector<Blocks>& by_rank, int rank) -> const Blocks& {
    return by_rank[kinds == 1 ? 0 : rank];
  };
  const auto between = [&](int source, int destination) {
    const Blocks& from = of(sent, source);
    return Move{from.begin(destination), of(got, destination).begin(source), from.bytes(destination)};
  };
  const auto largest_from = [&](int source) { return of(sent, source).largest(); };
  const char* x = kept_apart(call, ranks, of(sent, me), of(got, me));
  move_in_arena(call, ranks, {between, x, of(sent, me), largest_x, largest_from}, wait);
}

}  // namespace mscomm
