// All-reduce over the mesh with few messages (Thakur, Rabenseifner, Gropp 2005). The leaves of the tree in order.h exchange
// partial results in pairs: first neighbours, then leaves at twice the distance, and so on. So each partial result is that of a
// subtree, and the result has the bits of the canonical order. For a leaf of several ranks, the first one acts: it reduces the
// messages of all, and sends them the result.
//
// doubling: the leaves exchange whole partial results, so each of them has the result after log2(p) latencies.
// halving: in each step, a leaf keeps half of what it has, and sends the other half. So each of p leaves gets the result of its
// own part. Then the same pairs exchange results, in the reverse order. This takes twice as many latencies, and the least bytes.
#include <algorithm>
#include <bit>
#include <utility>

#include "algo/mesh_steps.h"
#include "algo/order.h"
#include "base/reduce.h"

namespace mscomm {

namespace {

// A longer message moves in windows, one after the other, so that less scratch memory is needed.
constexpr size_t window = 4 << 20;

class Recursive {
 public:
  Recursive(const Call& call, const Ranks& ranks, const Wait& wait)
      : call_(call),
        layout_(ranks.layout),
        mesh_(*ranks.mesh),
        wait_(wait),
        row_(reduction(call.signature.dtype, call.signature.op)),
        leaf_(leaf_of(layout_.hosts.size(), layout_.here)),
        members_(members(leaf_)) {
    if (!acts()) return;
    const size_t most = std::min(window, call.bytes());
    const size_t partial = room(elements({0, most}) * row_.accumulator_bytes), whole = room(most);
    char* at = ranks.scratch_of(2 * partial + members_.size() * whole);
    held_ = at, coming_ = at + partial;
    for (size_t i = 0; i < members_.size(); i++) raw_.push_back(at + 2 * partial + i * whole);
  }

  void run(bool halves) {
    for (size_t k = 0; k < windows(call_.bytes(), window); k++) {
      now_ = piece(call_.bytes(), window, k);
      if (!acts()) {
        // x and out may be the same array, because the result comes only when x has been received.
        const Piece x{members_[0], const_cast<char*>(call_.in()) + now_.begin, now_.bytes()};
        const Piece result{members_[0], call_.result() + now_.begin, now_.bytes()};
        mesh_.exchange({&x, 1}, {&result, 1}, wait_);
        continue;
      }
      gather();
      halves ? halve() : double_up();
      share();
    }
  }

 private:
  static size_t room(size_t bytes) { return (bytes + 63) / 64 * 64; }
  size_t elements(Range range) const { return range.bytes() / row_.element_bytes; }
  int leaves() const { return leaves_of(layout_.hosts.size()); }
  bool acts() const { return members_[0] == mesh_.rank(); }
  std::vector<int> members(int leaf) const {
    std::vector<int> found;
    const Range hosts = hosts_of(layout_.hosts.size(), leaf);
    for (size_t host = hosts.begin; host < hosts.end; host++)
      found.insert(found.end(), layout_.hosts[host].begin(), layout_.hosts[host].end());
    return found;
  }
  // Where the element at this byte of the window is in a buffer of accumulators.
  size_t accumulator(size_t byte) const { return byte / row_.element_bytes * row_.accumulator_bytes; }

  // Reduces the messages of this leaf into held_. A leaf of one rank needs no copy: the first step takes x itself.
  void gather() {
    if (members_.size() == 1) return;
    std::vector<Piece> in;
    std::vector<const void*> inputs(layout_.size);
    inputs[members_[0]] = call_.in() + now_.begin;
    for (size_t i = 1; i < members_.size(); i++) {
      in.push_back({members_[i], raw_[i], now_.bytes()});
      inputs[members_[i]] = raw_[i];
    }
    mesh_.receive(in, wait_);
    const Range hosts = hosts_of(layout_.hosts.size(), leaf_);
    add_up_hosts(row_, layout_, hosts, inputs.data(), held_, elements(now_));
  }
  void share() {
    std::vector<Piece> out;
    for (size_t i = 1; i < members_.size(); i++) out.push_back({members_[i], call_.result() + now_.begin, now_.bytes()});
    mesh_.exchange(out, {}, wait_);
  }

  // Sends the range `sent` of this leaf's partial result to the leaf at this distance. Combines the range `kept` with that
  // leaf's, the lower leaf's first. Ranges are relative to the window. In the first step, a leaf of one rank sends elements of x.
  void combine(int distance, Range sent, Range kept) {
    const int other = leaf_ ^ distance;
    const std::vector<int> there = members(other);
    const bool mine_is_raw = distance == 1 && members_.size() == 1, theirs_is_raw = distance == 1 && there.size() == 1;
    char* const x = const_cast<char*>(call_.in()) + now_.begin;
    const size_t count = elements(kept), at = accumulator(kept.begin);
    const Piece out = mine_is_raw ? Piece{there[0], x + sent.begin, sent.bytes()}
                                  : Piece{there[0], held_ + accumulator(sent.begin), elements(sent) * row_.accumulator_bytes};
    const Piece in =
        theirs_is_raw ? Piece{there[0], raw_[0], kept.bytes()} : Piece{there[0], coming_ + at, count * row_.accumulator_bytes};
    mesh_.exchange({&out, 1}, {&in, 1}, wait_);
    const void* low = mine_is_raw ? x + kept.begin : held_ + at;
    const void* high = in.data;
    bool low_is_raw = mine_is_raw, high_is_raw = theirs_is_raw;
    if (leaf_ & distance) std::swap(low, high), std::swap(low_is_raw, high_is_raw), std::swap(held_, coming_);
    // The sum is in held_ + at. The lower leaf's partial result is there, too, unless it is raw.
    if (low_is_raw) row_.widen(low, held_ + at, count);
    high_is_raw ? row_.fold(held_ + at, high, count) : row_.merge(held_ + at, high, count);
  }
  void finish(Range range) {
    char* const out = call_.result() + now_.begin + range.begin;
    row_.finish(held_ + accumulator(range.begin), layout_.size, out, elements(range));
  }

  void double_up() {
    const Range whole{0, now_.bytes()};
    for (int distance = 1; distance < leaves(); distance *= 2) combine(distance, whole, whole);
    finish(whole);
  }

  void halve() {
    std::vector<Range> wholes{{0, now_.bytes()}};
    const auto half = [&](Range whole, bool upper) {
      const Range found = part(whole.bytes(), 2, upper);
      return Range{whole.begin + found.begin, whole.begin + found.end};
    };
    for (int distance = 1; distance < leaves(); distance *= 2) {
      const bool upper = leaf_ & distance;
      const Range kept = half(wholes.back(), upper);
      combine(distance, half(wholes.back(), !upper), kept);
      wholes.push_back(kept);
    }
    finish(wholes.back());
    for (int distance = leaves() / 2; distance >= 1; distance /= 2) {
      const Range mine = wholes.back();
      wholes.pop_back();
      const Range theirs = half(wholes.back(), !(leaf_ & distance));
      const int peer = members(leaf_ ^ distance)[0];
      char* const result = call_.result() + now_.begin;
      const Piece out{peer, result + mine.begin, mine.bytes()}, in{peer, result + theirs.begin, theirs.bytes()};
      mesh_.exchange({&out, 1}, {&in, 1}, wait_);
    }
  }

  const Call& call_;
  const Layout& layout_;
  Mesh& mesh_;
  const Wait& wait_;
  const Reduction& row_;
  const int leaf_;
  const std::vector<int> members_;            // the ranks of this leaf; the first one acts
  char *held_ = nullptr, *coming_ = nullptr;  // partial results, each with room for a window
  std::vector<char*> raw_;                    // one for each member, with room for the elements of a window
  Range now_{0, 0};                           // the current window of the message
};

Cost cost(const Layout& layout, double bytes, double steps, double share) {
  const double folds = std::has_single_bit(layout.hosts.size()) ? 0 : 2, times = std::max(1.0, bytes / window);
  return {.latencies = (steps + folds) * times,
          .messages = (steps + folds) * times,
          .bytes = (share + folds) * bytes,
          .copied = (share + folds) * bytes};
}

}  // namespace

Cost all_reduce_doubling_cost(const Layout& layout, double bytes) {
  const double steps = std::bit_width(static_cast<unsigned>(leaves_of(layout.hosts.size()))) - 1;
  return cost(layout, bytes, steps, steps);
}

Cost all_reduce_halving_cost(const Layout& layout, double bytes) {
  const double leaves = leaves_of(layout.hosts.size()), steps = std::bit_width(static_cast<unsigned>(leaves)) - 1;
  return cost(layout, bytes, 2 * steps, 2 * (leaves - 1) / leaves);
}

void all_reduce_doubling(const Call& call, const Ranks& ranks, const Wait& wait) { Recursive(call, ranks, wait).run(false); }
void all_reduce_halving(const Call& call, const Ranks& ranks, const Wait& wait) { Recursive(call, ranks, wait).run(true); }

}  // namespace mscomm
