// All-reduce over the mesh with few messages (see recursive.h).
//
// doubling: the leaves exchange whole partial results, so each of them has the result after log2(p) latencies.
// halving: in each step, a leaf keeps half of what it has, and sends the other half. So each of p leaves gets the result of its
// own part. Then the same pairs exchange results, in the reverse order. This takes twice as many latencies, and the least bytes.
#include <algorithm>

#include "algo/mesh_steps.h"
#include "algo/recursive.h"

namespace mscomm {

namespace {

// A longer message moves in windows, one after the other, so that less scratch memory is needed.
constexpr size_t window = 4 << 20;

class AllReduce {
 public:
  AllReduce(const Call& call, const Ranks& ranks, const Wait& wait)
      : call_(call), mesh_(*ranks.mesh), wait_(wait), leaves_(call, ranks, wait, std::min(window, call.bytes())) {}

  void run(bool halves) {
    for (size_t k = 0; k < windows(call_.bytes(), window); k++) {
      const Range now = piece(call_.bytes(), window, k);
      char* const out = call_.result() + now.begin;  // may be x, because the result comes only when x has been received
      leaves_.begin(call_.in() + now.begin, now.bytes());
      if (leaves_.acts()) halves ? halve(out, now.bytes()) : double_up(out, now.bytes());
      share(out, now.bytes());
    }
  }

 private:
  void double_up(char* out, size_t bytes) {
    for (int distance = 1; distance < leaves_.leaves(); distance *= 2) leaves_.combine(distance, {0, bytes}, {0, bytes});
    leaves_.finish({0, bytes}, out);
  }

  void halve(char* out, size_t bytes) {
    std::vector<Range> wholes{{0, bytes}};
    const auto half = [&](Range whole, bool upper) {
      const Range found = part(whole.bytes(), 2, upper);
      return Range{whole.begin + found.begin, whole.begin + found.end};
    };
    for (int distance = 1; distance < leaves_.leaves(); distance *= 2) {
      const bool upper = leaves_.leaf() & distance;
      const Range kept = half(wholes.back(), upper);
      leaves_.combine(distance, half(wholes.back(), !upper), kept);
      wholes.push_back(kept);
    }
    leaves_.finish(wholes.back(), out + wholes.back().begin);
    for (int distance = leaves_.leaves() / 2; distance >= 1; distance /= 2) {
      const Range mine = wholes.back();
      wholes.pop_back();
      const Range theirs = half(wholes.back(), !(leaves_.leaf() & distance));
      const int peer = leaves_.members(leaves_.leaf() ^ distance)[0];
      const Piece sent{peer, out + mine.begin, mine.bytes()}, received{peer, out + theirs.begin, theirs.bytes()};
      mesh_.exchange({&sent, 1}, {&received, 1}, wait_);
    }
  }

  // Moves the result from the leaf's first rank to its others.
  void share(char* out, size_t bytes) {
    std::vector<Piece> pieces;
    for (const int rank : leaves_.members())
      if (rank != leaves_.members()[0]) pieces.push_back({rank, out, bytes});
    if (leaves_.acts()) return mesh_.exchange(pieces, {}, wait_);
    const Piece result{leaves_.members()[0], out, bytes};
    mesh_.exchange({}, {&result, 1}, wait_);
  }

  const Call& call_;
  Mesh& mesh_;
  const Wait& wait_;
  Recursive leaves_;
};

Cost cost(const Layout& layout, double bytes, double steps, double share) {
  const double more = folds(layout), times = std::max(1.0, bytes / window);
  return {.latencies = (steps + more) * times,
          .messages = (steps + more) * times,
          .bytes = (share + more) * bytes,
          .copied = (share + more) * bytes};
}

}  // namespace

Cost all_reduce_doubling_cost(const Layout& layout, double bytes) {
  const double steps = doublings_of_leaves(layout);
  return cost(layout, bytes, steps, steps);
}

Cost all_reduce_halving_cost(const Layout& layout, double bytes) {
  const double leaves = leaves_of(layout.hosts.size());
  return cost(layout, bytes, 2 * doublings_of_leaves(layout), 2 * (leaves - 1) / leaves);
}

void all_reduce_doubling(const Call& call, const Ranks& ranks, const Wait& wait) { AllReduce(call, ranks, wait).run(false); }
void all_reduce_halving(const Call& call, const Ranks& ranks, const Wait& wait) { AllReduce(call, ranks, wait).run(true); }

}  // namespace mscomm
