#include "algo/recursive.h"

#include <utility>

namespace mscomm {

namespace {

size_t room(size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

Recursive::Recursive(const Call& call, const Ranks& ranks, const Wait& wait, size_t most, size_t spare)
    : layout_(ranks.layout),
      mesh_(*ranks.mesh),
      wait_(wait),
      row_(reduction(call.signature.dtype, call.signature.op)),
      leaf_(leaf_of(layout_.hosts.size(), layout_.here)),
      members_(members(leaf_)) {
  const size_t partial = room(accumulator(most)), whole = room(most), messages = acts() ? members_.size() : 0;
  spare_ = ranks.scratch_of(room(spare) + (acts() ? 2 * partial : 0) + messages * whole);
  held_ = spare_ + room(spare), coming_ = held_ + partial;
  for (size_t i = 0; i < messages; i++) raw_.push_back(coming_ + partial + i * whole);
}

std::vector<int> Recursive::members(int leaf) const {
  std::vector<int> found;
  const Range hosts = hosts_of(layout_.hosts.size(), leaf);
  for (size_t host = hosts.begin; host < hosts.end; host++)
    found.insert(found.end(), layout_.hosts[host].begin(), layout_.hosts[host].end());
  return found;
}

void Recursive::begin(const char* x, size_t bytes) {
  x_ = x;
  if (!acts()) {
    const Piece out{members_[0], const_cast<char*>(x), bytes};
    return mesh_.exchange({&out, 1}, {}, wait_);
  }
  if (members_.size() == 1) return;  // the first step takes x itself
  std::vector<Piece> in;
  std::vector<const void*> inputs(layout_.size);
  inputs[members_[0]] = x;
  for (size_t i = 1; i < members_.size(); i++) {
    in.push_back({members_[i], raw_[i], bytes});
    inputs[members_[i]] = raw_[i];
  }
  mesh_.receive(in, wait_);
  add_up_hosts(row_, layout_, hosts_of(layout_.hosts.size(), leaf_), inputs.data(), held_, elements(bytes));
}

void Recursive::combine(int distance, Range sent, Range kept) {
  const int other = leaf_ ^ distance;
  const std::vector<int> there = members(other);
  const bool mine_is_raw = distance == 1 && members_.size() == 1, theirs_is_raw = distance == 1 && there.size() == 1;
  char* const x = const_cast<char*>(x_);
  const size_t count = elements(kept.bytes()), at = accumulator(kept.begin);
  const Piece out = mine_is_raw ? Piece{there[0], x + sent.begin, sent.bytes()}
                                : Piece{there[0], held_ + accumulator(sent.begin), accumulator(sent.bytes())};
  const Piece in =
      theirs_is_raw ? Piece{there[0], raw_[0], kept.bytes()} : Piece{there[0], coming_ + at, accumulator(kept.bytes())};
  mesh_.exchange({&out, 1}, {&in, 1}, wait_);
  const void* low = mine_is_raw ? x + kept.begin : held_ + at;
  const void* high = in.data;
  bool low_is_raw = mine_is_raw, high_is_raw = theirs_is_raw;
  if (leaf_ & distance) std::swap(low, high), std::swap(low_is_raw, high_is_raw), std::swap(held_, coming_);
  // The sum is in held_ + at. The lower leaf's partial result is there, too, unless it is raw.
  if (low_is_raw) row_.widen(low, held_ + at, count);
  high_is_raw ? row_.fold(held_ + at, high, count) : row_.merge(held_ + at, high, count);
}

void Recursive::finish(Range range, char* out) const {
  row_.finish(held_ + accumulator(range.begin), layout_.size, out, elements(range.bytes()));
}

}  // namespace mscomm
