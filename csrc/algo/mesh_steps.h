// Functions that several mesh algorithms share: to send a message down a tree, to reduce block r of every x on rank r, and to
// gather the blocks of all ranks.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <vector>

#include "algo/algorithm.h"
#include "algo/blocks.h"
#include "transport/mesh.h"

namespace mscomm {

// Algorithms that move a message in windows use windows of this many bytes, except reduce_ring() and all_reduce_bruck. In a
// reduction, a rank first receives one window from each peer, and then reduces these windows together. Windows are small, so that
// all of them are still in the cache when they are reduced. A larger window would also need more scratch memory.
inline constexpr size_t window_bytes = 128 << 10;
// Returns whether n ranks (or hosts) that reduce a message should exchange all of it at once, instead of first its parts and then
// the results. If so, the call takes one network latency less, but each rank sends (n-1) (n-2) / n times the size of the message
// more. Sending one_latency_bytes takes about as long as a latency.
inline constexpr size_t one_latency_bytes = 16 << 10, most_in_one_latency = 32 << 10;
inline bool in_one_latency(size_t n, size_t bytes) {
  return bytes <= most_in_one_latency && (n - 1) * (n - 2) * bytes <= n * one_latency_bytes;
}
// Returns the number of steps in which the messages of n ranks double until a rank has all of them.
inline int doublings(int n) { return std::bit_width(static_cast<unsigned>(n - 1)); }
// Returns the number of windows in a message. It is at least 1, because the first window carries the header even if the message
// is empty.
inline size_t windows(size_t bytes, size_t each_bytes) { return std::max<size_t>(1, pieces(bytes, each_bytes)); }

// The place of a rank in a binomial tree over the ranks of a group.
struct Tree {
  Tree(int rank, int size, int root);
  int parent = -1;            // -1 if this rank is the root
  std::vector<int> children;  // the one with the most ranks below it first, because its data has the longest way
};

// What a broadcast to n ranks (or hosts) costs. In a tree, the root sends the message log2(n) times. In a chain, the root sends
// it only once, but each window passes n-2 ranks before it reaches the last rank.
Cost tree_cost(int n, double bytes);
Cost chain_cost(int n, double bytes);

// Sends empty messages up the tree to its root, and then down again.
void meet_in_tree(Mesh& mesh, const Tree& tree, const Wait& wait);

// Broadcasts the root's message, window by window, down the tree that `parent` and `children` describe. While a rank forwards one
// window, the next one is already being sent to it. parent: -1 if this rank is the root.
void relay(const Call& call, Mesh& mesh, int parent, const std::vector<int>& children, const Wait& wait);

// Queues the blocks of x for all other ranks. If piece_bytes is given, queues only piece k of each block.
void send_blocks(const Call& call, Mesh& mesh, const Blocks& blocks, size_t piece_bytes = SIZE_MAX, size_t k = 0);
// Reduces x on the root, or on all ranks if the call has no root. Every rank sends its whole x to each rank that gets the result.
void reduce_in_one_latency(const Call& call, const Ranks& ranks, const Wait& wait);
// Receives window k of this rank's block from all other ranks, reduces these windows together with this rank's own, and writes
// the result to `to`. The window from rank r is received at r * window_bytes in the scratch memory. The place for this rank's own
// window stays unused.
void reduce_window(const Call& call, const Ranks& ranks, const Blocks& blocks, size_t k, char* to, const Wait& wait);
// For each r, reduces block r of every rank's x around a ring. Rank r writes the result for block r to `to`.
void reduce_ring(const Call& call, const Ranks& ranks, const Blocks& blocks, char* to, const Wait& wait);
// Gathers the blocks of all ranks on all ranks in log2(n) latencies (Bruck et al. 1997). In each step, a rank sends its own block
// together with blocks that it has received. rotated: on entry, holds this rank's own block; on return, holds the blocks of this
// rank, of the following ranks up to n-1, and then of ranks 0, 1 and so on.
void gather_bruck(Mesh& mesh, const Blocks& blocks, char* rotated, const Wait& wait);
Cost gather_bruck_cost(int n, double block_bytes);
// Gathers all blocks of out on all ranks around a ring in n-1 steps. At first, rank r has block r. In the first step, every rank
// sends its own block to its right neighbour. In each later step, it sends the block that it received in the previous step.
void gather_ring(const Call& call, Mesh& mesh, const Blocks& blocks, const Wait& wait);

// Returns how many of these bytes arrive from several ranks at once, if n-1 ranks send them to the same rank.
inline double crowded(int n, double bytes) { return n > 2 ? bytes : 0; }

}  // namespace mscomm
