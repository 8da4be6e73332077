#include "algo/moves.h"

#include <algorithm>

#include "algo/algorithm.h"

namespace mscomm {

// The signature of a head may name the root of the call that follows, although the collective that moves the head has no root. So
// signature.root is used only if this collective has a root.
Moves::Moves(const Call& call, int n, int me, Of of)
    : me_(me),
      root_(rooted(call.signature.what) ? call.signature.root : -1),
      to_root_(call.signature.what == Collective::gather),
      divides_(divides(call.signature.what)),
      gathers_(gathers(call.signature.what) || call.signature.what == Collective::all_to_all),
      parts_(divides_ || gathers(call.signature.what) ? Blocks::of(call, n) : Blocks(call.bytes(), 1)) {
  if (call.signature.what != Collective::all_to_all || call.counts.empty()) return;
  const size_t element = call.element_bytes(), ranks = n;
  for (size_t rank = 0; rank < ranks; rank++) {
    if (of == Of::this_rank && rank != static_cast<size_t>(me)) {
      sent_.emplace_back(0, n);
      got_.emplace_back(0, n);
      continue;
    }
    if (call.recv_counts.empty()) {
      sent_.emplace_back(call.counts.data() + rank * ranks, n, 1, element);
      got_.emplace_back(call.counts.data() + rank, n, ranks, element);
    } else {
      sent_.emplace_back(call.counts.data(), n, 1, element);
      got_.emplace_back(call.recv_counts.data(), n, 1, element);
    }
  }
}

Move Moves::between(int source, int destination) const {
  if (!pairs(source, destination)) return {};
  Move move{divides_ ? sent(source).begin(destination) : 0, gathers_ ? got(destination).begin(source) : 0, 0};
  if (!got_.empty() && destination == me_) move.bytes = got_[destination].bytes(source);
  else move.bytes = divides_ ? sent(source).bytes(destination) : parts_.bytes(gathers_ ? source : 0);
  return move;
}

Blocks Moves::blocks_of(int source) const { return divides_ ? sent(source) : Blocks(parts_.bytes(gathers_ ? source : 0), 1); }

size_t Moves::largest_x() const {
  if (!divides_) return parts_.largest();
  if (sent_.empty()) return parts_.total();
  size_t most = 0;
  for (const Blocks& blocks : sent_) most = std::max(most, blocks.total());
  return most;
}

size_t Moves::largest_from(int source) const { return divides_ ? sent(source).largest() : parts_.bytes(gathers_ ? source : 0); }

const char* Moves::source_array(const Call& call, const Ranks& ranks) const {
  if (!sends(me_)) return nullptr;
  if (call.x != call.out || call.x_bytes == 0 || sent(me_) == got(me_)) return call.in();
  char* copied = ranks.scratch_of(call.x_bytes);
  copy(copied, call.x, call.x_bytes);
  return copied;
}

}  // namespace mscomm
