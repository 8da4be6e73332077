// What the algorithms over the mesh share: trees, functions that move windows up and down them, and two ways to reduce block r on
// rank r.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "algo/algorithm.h"
#include "algo/blocks.h"
#include "transport/mesh.h"

namespace mscomm {

// How many bytes are received from each peer before they are used. They must still be in the cache then. This also limits the
// scratch memory.
inline constexpr size_t window_bytes = 128 << 10;
// If the size of a message times the number of ranks (or hosts) that exchange it is at most this many bytes, sending everything
// at once takes less time than a second latency.
inline constexpr size_t one_latency_bytes = 8 << 10;
inline constexpr size_t tree_window_bytes = 64 << 10;  // an inner node holds a window for each rank below it
// The number of windows of a message. There is at least one, because the first piece carries the header even if it is empty.
inline size_t windows(size_t bytes, size_t each_bytes) { return std::max<size_t>(1, pieces(bytes, each_bytes)); }

// A binomial tree over the ranks of a group. In it, ranks are counted from the root, and rank r is at the top of the subtree [r,
// r + span).
struct Tree {
  Tree(int rank, int size, int root);
  int parent = -1;            // -1: this rank is the root
  std::vector<int> children;  // nearest first
  int relative;               // this rank, counted from the root
  int span;                   // number of ranks in this rank's subtree
  int size, root;
  int relative_of(int rank) const { return (rank - root + size) % size; }
  int rank_of(int relative) const { return (relative + root) % size; }
};

// Broadcasts the root's message down any tree, window by window, so that a rank passes one window on while the next one is on its
// way. parent: -1 if this rank is the root.
void relay(const Call& call, Mesh& mesh, int parent, const std::vector<int>& children, const Wait& wait);

// Gathers one window of every rank's message up the tree, without combining these windows. window: the bytes of each rank's
// window, with ranks counted from the root. mine: this rank's window. Returns a buffer in which the windows of this rank's
// subtree lie side by side.
const char* gather_window(const Ranks& ranks, const Tree& tree, const Blocks& window, const void* mine, const Wait& wait);
// Gathers one window of every rank's x up the tree. Then the root reduces these windows into `to`.
void reduce_up(const Call& call, const Ranks& ranks, const Tree& tree, Range window, char* to, const Wait& wait);

// Queues the blocks of x for all other ranks, or only piece k of each of these blocks.
void send_blocks(const Call& call, Mesh& mesh, const Blocks& blocks, size_t piece_bytes = SIZE_MAX, size_t k = 0);
// Receives a block of out from every other rank, and sends the rest of what is queued.
void receive_blocks(const Call& call, Mesh& mesh, const Blocks& blocks, const Wait& wait);
// Queues the same bytes to be sent to all other ranks.
void send_to_all(Mesh& mesh, const char* data, size_t bytes);
// Receives window k of this rank's block from all other ranks, and reduces these windows into `to`. In the scratch memory each
// rank has a window at rank * window_bytes; this rank's own window stays unused.
void reduce_window(const Call& call, const Ranks& ranks, const Blocks& blocks, size_t k, char* to, const Wait& wait);
// Reduces block r of every rank's x around a ring; the result ends in `to` on rank r.
void reduce_ring(const Call& call, const Ranks& ranks, const Blocks& blocks, char* to, const Wait& wait);

}  // namespace mscomm
