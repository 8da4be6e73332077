// The canonical order in which a reduction combines the values of all ranks. Among the algorithms for all_reduce, reduce and
// reduce_scatter, only the rings use a different order.
//
// The ranks of each host are combined from left to right, in rank order. The results of the hosts, in the order of their lowest
// ranks, are combined in a binary tree: neighbours first. So algorithms with few messages have this order, too, and the error of
// a sum grows with the logarithm of the number of hosts. The tree has p leaves, where p is the largest power of two that is not
// above the number of hosts. With h hosts, each of the first h - p leaves has two hosts, and each of the others has one.
#pragma once

#include <bit>
#include <cstddef>

#include "algo/blocks.h"
#include "base/call.h"
#include "base/reduce.h"

namespace mscomm {

struct Layout;

inline int leaves_of(size_t hosts) { return static_cast<int>(std::bit_floor(hosts)); }
// Returns the hosts of a leaf.
inline Range hosts_of(size_t hosts, int leaf) {
  const size_t i = static_cast<size_t>(leaf), pairs = hosts - std::bit_floor(hosts);
  return i < pairs ? Range{2 * i, 2 * i + 2} : Range{i + pairs, i + pairs + 1};
}
// Returns the leaf of a host.
inline int leaf_of(size_t hosts, size_t host) {
  const size_t pairs = hosts - std::bit_floor(hosts);
  return static_cast<int>(host < 2 * pairs ? host / 2 : host - pairs);
}

// Reduces in[rank] over all ranks in the canonical order. out may be one of the inputs.
void reduce_in_order(const Signature& signature, const Layout& layout, const void* const* in, void* out, size_t bytes);

// Reduces in[rank] over the ranks of the hosts of one leaf, into accumulators.
void add_up_hosts(const Reduction& row, const Layout& layout, Range hosts, const void* const* in, char* to, size_t count);

// Merges the partial results of all hosts: of(host) returns the accumulators of a host. The result is in of(0). The other
// accumulators are overwritten.
template <class Of>
void merge_in_order(const Reduction& row, size_t hosts, const Of& of, size_t count) {
  const int leaves = leaves_of(hosts);
  for (int leaf = 0; leaf < leaves; leaf++)
    if (const Range pair = hosts_of(hosts, leaf); pair.bytes() == 2) row.merge(of(pair.begin), of(pair.begin + 1), count);
  for (int distance = 1; distance < leaves; distance *= 2)
    for (int leaf = 0; leaf < leaves; leaf += 2 * distance)
      row.merge(of(hosts_of(hosts, leaf).begin), of(hosts_of(hosts, leaf + distance).begin), count);
}

// Fills out with the operation's identity. This is the result of exscan on rank 0, which has no rank before it.
void write_identity(const Call& call);

}  // namespace mscomm
