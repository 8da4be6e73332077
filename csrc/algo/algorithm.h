// An algorithm is one file here and one row in registry.cc. select() picks the row for a call.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/call.h"
#include "base/reduce.h"
#include "net/wait.h"
#include "transport/arena.h"
#include "transport/mesh.h"

namespace mscomm {

// Which rank runs on which host. Equal on all ranks except for `rank`.
struct Layout {
  int rank = 0;
  int size = 1;
  std::vector<int> host;  // by rank; hosts are numbered in the order of their lowest ranks

  int hosts() const;
  // This rank's host.
  int here() const { return host.empty() ? 0 : host[static_cast<size_t>(rank)]; }
  // Whether there are several hosts, and one with several ranks.
  bool mixed() const { return hosts() > 1 && hosts() < size; }
};

// What an algorithm may use, depending on its carrier. The arena joins the ranks of this host: the whole group, or some of it if
// there is a mesh as well; nullptr if this rank is alone on its host.
struct Ranks {
  const Layout& layout;
  Arena* arena;
  Mesh* mesh;
  std::vector<char>& scratch;  // reused from call to call

  char* scratch_of(size_t bytes) const {
    if (scratch.size() < bytes) scratch.resize(bytes);
    return scratch.data();
  }
};

enum class Carrier { arena, mesh, both };
inline constexpr std::array<std::string_view, 3> carriers{"arena", "mesh", "both"};
inline std::string_view name(Carrier carrier) { return carriers[static_cast<size_t>(carrier)]; }

struct Algorithm {
  std::string_view name;
  Collective what;
  Carrier carrier;
  void (*run)(const Call& call, const Ranks& ranks, const Wait& wait);
  // Whether it is the best algorithm of its carrier for a message of that many bytes; nullptr: it is used if none before it fits.
  bool (*fits)(const Layout& layout, size_t bytes) = nullptr;
};

std::span<const Algorithm> algorithms();

// The algorithm that MSCOMM_ALGO names for each collective; empty: select() chooses.
using Forced = std::array<std::string, collectives.size()>;

// Rows in the order in which their `fits` is asked; the last row needs no `fits`. select() is pure: all ranks with the same
// layout and forced names get the same rows. Throws Error("ValueError") for an unknown name, or one that the layout does not
// allow.
using Choice = std::vector<const Algorithm*>;
Choice select(Collective what, const Layout& layout, const Forced& forced);
inline const Algorithm& pick(const Choice& rows, const Layout& layout, size_t bytes) {
  return **std::find_if(rows.begin(), rows.end() - 1, [&](const Algorithm* row) { return row->fits(layout, bytes); });
}

// --- shared by the algorithms: messages and their parts (blocks.cc) ---

struct Range {
  size_t begin, end;
  size_t bytes() const { return end - begin; }
};

// Part `index` of a message cut into `parts`, at multiples of 64 bytes, so that no element and no cache line has two owners.
Range part(size_t bytes, int parts, int index);
// Piece `index` of a message cut into pieces of piece_bytes.
Range piece(size_t bytes, size_t piece_bytes, size_t index);
size_t pieces(size_t bytes, size_t piece_bytes);

// Copies unless there is nothing to copy, or to and from are the same.
inline void copy(void* to, const void* from, size_t bytes) {
  if (bytes && to != from) std::memcpy(to, from, bytes);
}

// Where each rank's part of a longer message lies, in bytes.
class Blocks {
 public:
  // n parts of the same size.
  Blocks(size_t each_bytes, int n);
  // counts: elements of each part; stride: the distance in counts from one part to the next.
  Blocks(const uint64_t* counts, int n, size_t stride, size_t element_bytes);
  // A message cut by part() for n ranks; the first part is the largest.
  static Blocks parts(size_t bytes, int n);

  // The parts of the result of all_gather and gather, by source.
  static Blocks gathered(const Call& call, int n);
  // The parts of the x that reduce_scatter and scatter divide, by destination.
  static Blocks divided(const Call& call, int n);
  // all_to_all: what `rank` sends, by destination, and what it gets, by source.
  static Blocks sent_by(const Call& call, int n, int rank);
  static Blocks got_by(const Call& call, int n, int rank);

  // Piece k of each part, side by side, in the order of the ranks from `first` on, and then from 0.
  Blocks window(size_t piece_bytes, size_t k, int first) const;

  int size() const { return static_cast<int>(ends_.size()); }
  size_t begin(int rank) const { return rank == 0 ? 0 : ends_[static_cast<size_t>(rank) - 1]; }
  size_t bytes(int rank) const { return ends_[static_cast<size_t>(rank)] - begin(rank); }
  size_t total() const { return ends_.back(); }
  size_t largest() const;

  bool operator==(const Blocks&) const = default;

 private:
  Blocks() = default;
  std::vector<size_t> ends_;
};

// Reduces in[rank] over all ranks in the canonical order: within a host in rank order, then over hosts in the order of their
// lowest ranks, with partial results in the accumulator type. out may be one of the inputs.
void reduce_in_order(const Signature& signature, const Layout& layout, const void* const* in, void* out, size_t bytes);

// Writes the result of exscan on rank 0, which has no rank before it.
void write_identity(const Call& call);

// The buffer that all_to_all sends from. It is x, or a copy of x if the call is in place and the block that a peer gets does not
// lie at the same place as the block that comes from it.
const char* kept_apart(const Call& call, const Ranks& ranks, const Blocks& sent, const Blocks& got);

// --- in the arena (arena_steps.cc) ---

// Runs the first round of a call that was posted. Throws Differs unless all ranks posted the same signature.
void meet(Arena& arena, const Wait& wait);
// Posts the call together with a tiny message, and runs the first round. The message is x, of x_bytes; nullptr: this rank gives
// nothing. largest_bytes: the bytes of the largest x of all ranks.
void meet_with(const void* x, size_t x_bytes, size_t largest_bytes, const Call& call, Arena& arena, const Wait& wait);

// Moves x through staging if x is foreign memory: step k holds piece k of each block of x, side by side.
class Staging {
 public:
  // x: what this rank gives; nullptr: nothing. blocks of x: a single one for all ranks, or one for each rank.
  Staging(Arena& arena, const void* x, Blocks blocks);

  // Posts the call, copies x's first pieces into staging, and runs the first round. When it returns, all ranks are known to make
  // the same call. pulled: as for Arena::post; an x that peers are known to pull is not staged.
  void enter(const Call& call, Pulled pulled, const Wait& wait);
  // Says that no peer reads this block from staging.
  void leave_out(int block) { left_out_[static_cast<size_t>(block)] = true; }
  // Copies piece k of each block into staging; does nothing if x is in a heap.
  void put(size_t k) const;
  // Where piece k of rank's block for this rank is staged.
  const char* at(int rank, size_t k) const;

  size_t piece_bytes() const { return piece_bytes_; }
  size_t steps(size_t block_bytes) const { return pieces(block_bytes, piece_bytes_); }

 private:
  Arena& arena_;
  const char* x_;
  Blocks blocks_;
  std::vector<bool> left_out_;
  size_t piece_bytes_;
  uint64_t first_;
};

// The data that goes from a source to a destination: its offset in the source's x, and its offset in the destination's out.
struct Move {
  size_t from, to, bytes;
};

// A collective that combines nothing, described by what each rank sends to each other.
struct Moves {
  std::function<Move(int source, int destination)> between;
  const char* x;     // what this rank gives; nullptr: nothing
  Blocks blocks;     // of x, as for Staging
  size_t largest_x;  // bytes of the largest x of all ranks
  // Without a root: bytes of the largest move from that source to another rank.
  std::function<size_t(int source)> largest_from = nullptr;
};
// Moves the data of each pair of ranks by the shortest way. One rank copies it directly if the other's array is in a heap, or can
// be read from the other's process and that is worth it. Otherwise both copy, through staging.
void move_in_arena(const Call& call, const Ranks& ranks, const Moves& moves, const Wait& wait);

// --- over the mesh (mesh_steps.cc) ---

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
// Queues the same bytes to be sent to all other ranks.
void send_to_all(Mesh& mesh, const char* data, size_t bytes);
// Receives window k of this rank's block from all others and reduces it into `to`. This rank's own window of scratch, at its rank
// times window_bytes, stays unused.
void reduce_window(const Call& call, const Ranks& ranks, const Blocks& blocks, size_t k, char* to, const Wait& wait);
// Reduces block r of every rank's x around a ring; the result ends in `to` on rank r.
void reduce_ring(const Call& call, const Ranks& ranks, const Blocks& blocks, char* to, const Wait& wait);

}  // namespace mscomm
