// What the algorithms over the mesh share: trees, moving windows up and down them, and the two ways to reduce block r on rank r.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "algo/algorithm.h"
#include "algo/blocks.h"
#include "transport/mesh.h"

namespace mscomm {

// How much is received from each peer before it is used, so that it is still in the cache. Also bounds the scratch memory.
inline constexpr size_t window_bytes = 128 << 10;
// The size of a message times the number of ranks, or of hosts, that exchange it: up to this many bytes take less time on a wire
// than a second latency.
inline constexpr size_t one_latency_bytes = 8 << 10;
inline constexpr size_t tree_window_bytes = 64 << 10;  // an inner node holds a window for each rank below it
// The number of windows: at least one, because the first piece carries the header even when it is empty.
inline size_t windows(size_t bytes, size_t each_bytes) { return std::max<size_t>(1, pieces(bytes, each_bytes)); }

// The binomial tree over ranks counted from the root: rank r holds the subtree [r, r + span).
struct Tree {
  Tree(int rank, int size, int root);
  int parent = -1;            // -1: the root
  std::vector<int> children;  // nearest first
  int relative;               // this rank, counted from the root
  int span;                   // ranks in this subtree
  int size, root;
  int relative_of(int rank) const { return (rank - root + size) % size; }
  int rank_of(int relative) const { return (relative + root) % size; }
};

// Broadcasts the root's message along any tree: from parent (-1: this is the root) to children, window by window, so that a rank
// passes one window on while the next is on its way.
void relay(const Call& call, Mesh& mesh, int parent, const std::vector<int>& children, const Wait& wait);

// Gathers one window of every rank's message up the tree, uncombined. `window`: its bytes for each rank, counted from the root.
// Returns a buffer in which the windows of this rank's subtree lie side by side.
const char* gather_window(const Ranks& ranks, const Tree& tree, const Blocks& window, const void* mine, const Wait& wait);
// Does the same for one window of every rank's x; the root reduces them into `to`.
void reduce_up(const Call& call, const Ranks& ranks, const Tree& tree, Range window, char* to, const Wait& wait);

// Queues every other rank's block of x to be sent to it, or only piece k of each block.
void send_blocks(const Call& call, Mesh& mesh, const Blocks& blocks, size_t piece_bytes = SIZE_MAX, size_t k = 0);
// Receives every other rank's block of out from it, and sends the rest of what is queued.
void receive_blocks(const Call& call, Mesh& mesh, const Blocks& blocks, const Wait& wait);
// Queues the same bytes to be sent to all other ranks.
void send_to_all(Mesh& mesh, const char* data, size_t bytes);
// Receives window k of this rank's block from all others and reduces it into `to`. This rank's own window of scratch, at its rank
// times window_bytes, stays unused.
void reduce_window(const Call& call, const Ranks& ranks, const Blocks& blocks, size_t k, char* to, const Wait& wait);
// Reduces block r of every rank's x around a ring; the result ends in `to` on rank r.
void reduce_ring(const Call& call, const Ranks& ranks, const Blocks& blocks, char* to, const Wait& wait);

}  // namespace mscomm
