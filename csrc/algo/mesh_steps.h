// Functions that several algorithms of the mesh use: trees, moving windows up and down a tree, and two ways to reduce block r of
// every x on rank r.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "algo/algorithm.h"
#include "algo/blocks.h"
#include "transport/mesh.h"

namespace mscomm {

// The size of a window. A rank receives one window from each peer, and then uses all these windows, which should still be in the
// cache. A larger window would also need more scratch memory.
inline constexpr size_t window_bytes = 128 << 10;
// If the size of a message, times the number of ranks (or hosts) that exchange it, is at most this many bytes, every rank sends
// its whole message to all others at once. That takes less time than a second latency.
inline constexpr size_t one_latency_bytes = 8 << 10;
// The size of a window in a tree. It is smaller than window_bytes, because an inner node holds a window for each rank below it.
inline constexpr size_t tree_window_bytes = 64 << 10;
// The number of windows of a message. It is at least 1, because the first piece carries the header even if the message is empty.
inline size_t windows(size_t bytes, size_t each_bytes) { return std::max<size_t>(1, pieces(bytes, each_bytes)); }

// A binomial tree over the ranks of a group. In the tree, ranks are counted from the root, which has number 0. The subtree whose
// top is rank r has the ranks [r, r + span).
struct Tree {
  Tree(int rank, int size, int root);
  int parent = -1;            // -1: this rank is the root
  std::vector<int> children;  // nearest first
  int relative;               // this rank, counted from the root
  int span;                   // number of ranks in this rank's subtree
  int size, root;
  int rank_of(int relative) const { return (relative + root) % size; }
};

// Broadcasts the root's message down any tree, window by window. A rank passes one window on while the next window is on its way
// to that rank. parent: -1 if this rank is the root.
void relay(const Call& call, Mesh& mesh, int parent, const std::vector<int>& children, const Wait& wait);

// Gathers one window of every rank's message up the tree, without combining the windows. window: where the window of each rank
// lies if all windows lie side by side, with ranks counted from the root. mine: this rank's window. Returns a buffer in which the
// windows of this rank's subtree lie side by side.
const char* gather_window(const Ranks& ranks, const Tree& tree, const Blocks& window, const void* mine, const Wait& wait);
// Gathers one window of every rank's x up the tree. Then the root reduces all these windows and writes the result to `to`.
void reduce_up(const Call& call, const Ranks& ranks, const Tree& tree, Range window, char* to, const Wait& wait);

// Queues the blocks of x for all other ranks. If piece_bytes is given, queues only piece k of each block.
void send_blocks(const Call& call, Mesh& mesh, const Blocks& blocks, size_t piece_bytes = SIZE_MAX, size_t k = 0);
// Receives one block of out from every other rank, and also sends all data that is still queued.
void receive_blocks(const Call& call, Mesh& mesh, const Blocks& blocks, const Wait& wait);
// Queues the same bytes to be sent to all other ranks.
void send_to_all(Mesh& mesh, const char* data, size_t bytes);
// Receives window k of this rank's block from all other ranks, reduces these windows and its own, and writes the result to `to`.
// The window from rank r is received at r * window_bytes in the scratch memory. The place for this rank's own window stays
// unused.
void reduce_window(const Call& call, const Ranks& ranks, const Blocks& blocks, size_t k, char* to, const Wait& wait);
// For each r, reduces block r of every rank's x around a ring. Rank r writes the result for block r to `to`.
void reduce_ring(const Call& call, const Ranks& ranks, const Blocks& blocks, char* to, const Wait& wait);

}  // namespace mscomm
