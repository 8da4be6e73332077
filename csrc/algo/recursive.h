// Reductions over the mesh with few messages (Thakur, Rabenseifner, Gropp 2005). The leaves of the tree in order.h exchange
// partial results in pairs: first neighbours, then leaves at twice the distance, and so on. So each partial result is that of a
// subtree, and the result has the bits of the canonical order. For a leaf of several ranks, the first one acts.
#pragma once

#include <bit>
#include <vector>

#include "algo/algorithm.h"
#include "algo/blocks.h"
#include "algo/order.h"
#include "base/reduce.h"
#include "transport/mesh.h"

namespace mscomm {

class Recursive {
 public:
  // most: the largest number of bytes that begin() will get. spare: the size of spare(), which every rank has.
  Recursive(const Call& call, const Ranks& ranks, const Wait& wait, size_t most, size_t spare = 0);

  int leaves() const { return leaves_of(layout_.hosts.size()); }
  int leaf() const { return leaf_; }
  // Returns the ranks of a leaf.
  std::vector<int> members(int leaf) const;
  const std::vector<int>& members() const { return members_; }
  bool acts() const { return members_[0] == mesh_.rank(); }

  // On the rank that acts, reduces the messages of this leaf. The leaf's other ranks send theirs, and take no part in what
  // follows. x must not change before combine() has returned for distance 1.
  void begin(const char* x, size_t bytes);
  // Sends the range `sent` of this leaf's partial result to the leaf at this distance. Combines the range `kept` with that
  // leaf's, the lower leaf's first. The first distance is 1.
  void combine(int distance, Range sent, Range kept);
  // Writes the result of a range to out.
  void finish(Range range, char* out) const;

  char* spare() const { return spare_; }
  // Memory for a message. It is free when combine() has returned for distance 1.
  char* raw() const { return raw_[0]; }

 private:
  size_t elements(size_t bytes) const { return bytes / row_.element_bytes; }
  // Where the element at this byte of the message is in a buffer of accumulators.
  size_t accumulator(size_t byte) const { return elements(byte) * row_.accumulator_bytes; }

  const Layout& layout_;
  Mesh& mesh_;
  const Wait& wait_;
  const Reduction& row_;
  const int leaf_;
  const std::vector<int> members_;            // the ranks of this leaf; the first one acts
  char *held_ = nullptr, *coming_ = nullptr;  // partial results
  char* spare_;
  std::vector<char*> raw_;   // memory for the messages of this leaf's other ranks; the first one is for another leaf's
  const char* x_ = nullptr;  // this rank's own
};

inline int doublings_of_leaves(const Layout& layout) {
  return std::bit_width(static_cast<unsigned>(leaves_of(layout.hosts.size()))) - 1;
}
// Returns how many messages, one after the other, a leaf of two hosts adds to a call.
inline double folds(const Layout& layout) { return std::has_single_bit(layout.hosts.size()) ? 0 : 2; }

}  // namespace mscomm
