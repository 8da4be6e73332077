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

// Who sits where; equal on all ranks but for `rank`.
struct Layout {
  int rank = 0;
  int size = 1;
  std::vector<int> host;  // by rank; hosts are numbered by their lowest rank

  int hosts() const;
  // This rank's.
  int here() const { return host.empty() ? 0 : host[static_cast<size_t>(rank)]; }
  // Whether there are several hosts, and one with several ranks.
  bool mixed() const { return hosts() > 1 && hosts() < size; }
};

// What an algorithm may use, by its carrier. The arena joins the ranks of this host: all of the group, or, where there is a mesh
// too, several; nullptr where this rank is alone on its host.
struct Ranks {
  const Layout& layout;
  Arena* arena;
  Mesh* mesh;
  std::vector<char>& scratch;  // kept from call to call

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
  // Whether it is the best of its carrier for a message of so many bytes; nullptr: where none before it in the table is.
  bool (*fits)(const Layout& layout, size_t bytes) = nullptr;
};

std::span<const Algorithm> algorithms();

// The algorithm named by MSCOMM_ALGO for each collective; empty: choose.
using Forced = std::array<std::string, collectives.size()>;

// Rows in the order in which their `fits` is asked; the last one's is not. Pure: the same on all ranks for the same layout and
// forced names. Throws Error("ValueError") for a name that is none, or that the layout does not allow.
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

// Part `index` of `parts` of a message, cut at 64 bytes, so that no element and no cache line has two owners.
Range part(size_t bytes, int parts, int index);
// Piece `index` of that size.
Range piece(size_t bytes, size_t piece_bytes, size_t index);
size_t pieces(size_t bytes, size_t piece_bytes);

// Nothing to copy is allowed, and so is what lies in its place already.
inline void copy(void* to, const void* from, size_t bytes) {
  if (bytes && to != from) std::memcpy(to, from, bytes);
}

// Where each rank's part of a longer message lies, in bytes.
class Blocks {
 public:
  // n parts of the same size.
  Blocks(size_t each_bytes, int n);
  // counts: elements of each part; stride: between two that count.
  Blocks(const uint64_t* counts, int n, size_t stride, size_t element_bytes);
  // part() of a message for each of n ranks; the first is the largest.
  static Blocks parts(size_t bytes, int n);

  // The result of all_gather and gather, by source.
  static Blocks gathered(const Call& call, int n);
  // What reduce_scatter and scatter divide, by destination.
  static Blocks divided(const Call& call, int n);
  // all_to_all: what `rank` sends, by destination, and what it gets, by source.
  static Blocks sent_by(const Call& call, int n, int rank);
  static Blocks got_by(const Call& call, int n, int rank);

  // Piece k of each, side by side, in the order of ranks counted from `first`.
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

// Reduces in[rank] over all ranks in the canonical order: within a host in rank order, then over hosts by lowest rank, partial
// results in the accumulator type. out may be one of the in.
void reduce_in_order(const Signature& signature, const Layout& layout, const void* const* in, void* out, size_t bytes);

// What exscan gives rank 0, which has nobody before it.
void write_identity(const Call& call);

// Where all_to_all sends from: x, or a copy of it where it works in place and what comes from a peer does not lie where what goes
// there did.
const char* kept_apart(const Call& call, const Ranks& ranks, const Blocks& sent, const Blocks& got);

// --- in the arena (arena_steps.cc) ---

// The first round of a call that was posted; throws Differs unless all ranks posted the same signature.
void meet(Arena& arena, const Wait& wait);
// Posts the call and meets the others, with a tiny message along: x, of x_bytes, where that of any rank has at most
// largest_bytes. x nullptr: none.
void meet_with(const void* x, size_t x_bytes, size_t largest_bytes, const Call& call, Arena& arena, const Wait& wait);

// The way of x through staging where x is foreign memory: step k holds piece k of each of its blocks, side by side.
class Staging {
 public:
  // x: what this rank gives, nullptr: nothing. blocks of x: one that is for all ranks, or one for each.
  Staging(Arena& arena, const void* x, Blocks blocks);

  // Posts the call, lays x's first pieces into staging, and meets the others: after that all ranks are known to make the same
  // call. pulled: as for Arena::post; what is known to be pulled is not staged.
  void enter(const Call& call, Pulled pulled, const Wait& wait);
  // Nobody reads this block here.
  void leave_out(int block) { left_out_[static_cast<size_t>(block)] = true; }
  // Lays piece k of each block there; nothing where x is in a heap.
  void put(size_t k) const;
  // Piece k of rank's block for this rank.
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

// What goes from one rank to another: from where in the one's x, to where in the other's out.
struct Move {
  size_t from, to, bytes;
};

// A collective that combines nothing, as what goes from whom to whom.
struct Moves {
  std::function<Move(int source, int destination)> between;
  const char* x;     // what this rank gives; nullptr: nothing
  Blocks blocks;     // of x, as for Staging
  size_t largest_x;  // of all ranks
  size_t largest;    // that goes from one rank to another
};
// Moves them by the shortest way there is for each pair: one of the two copies where the other's array lies in a heap; one, too,
// where it can be read in the other's process and that is worth it; else both by way of staging.
void move_in_arena(const Call& call, const Ranks& ranks, const Moves& moves, const Wait& wait);

// --- over the mesh (mesh_steps.cc) ---

// What is received from each peer before it is used, while it is in the cache; bounds the scratch memory.
inline constexpr size_t window_bytes = 128 << 10;
// Of all that exchange a message: up to so many bytes together take less time on a wire than a second latency.
inline constexpr size_t one_latency_bytes = 8 << 10;
inline constexpr size_t tree_window_bytes = 64 << 10;  // an inner node holds one for each rank below it
// How often: at least once, because the first piece carries the header even when it is empty.
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

// Broadcast of the root's message along any tree: from parent (-1: this is the root) to children, window by window, so that a
// rank passes one on while the next is on its way.
void relay(const Call& call, Mesh& mesh, int parent, const std::vector<int>& children, const Wait& wait);

// Up the tree, uncombined: one window of every rank's message, given by its bytes for each rank counted from the root. Returns
// where those of this rank's subtree lie side by side.
const char* gather_window(const Ranks& ranks, const Tree& tree, const Blocks& window, const void* mine, const Wait& wait);
// The same for one window of everybody's x, which the root reduces to `to`.
void reduce_up(const Call& call, const Ranks& ranks, const Tree& tree, Range window, char* to, const Wait& wait);

// Has every other rank's block of x sent to it, or piece k of each.
void send_blocks(const Call& call, Mesh& mesh, const Blocks& blocks, size_t piece_bytes = SIZE_MAX, size_t k = 0);
// The same bytes to all others.
void send_to_all(Mesh& mesh, const char* data, size_t bytes);
// Reduces window k of this rank's block, which the others send, to `to`. This rank's own window of
// scratch, at its rank times window_bytes, stays free.
void reduce_window(const Call& call, const Ranks& ranks, const Blocks& blocks, size_t k, char* to, const Wait& wait);
// Block r of everybody's x, summed up around a ring, ends in `to` on rank r.
void reduce_ring(const Call& call, const Ranks& ranks, const Blocks& blocks, char* to, const Wait& wait);

}  // namespace mscomm
