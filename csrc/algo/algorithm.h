// An algorithm is one file here and one row in registry.cc. select() picks the row for a call.
#pragma once

#include <array>
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
};

// What an algorithm may use. The arena is there when all ranks share a host, the mesh when some do not or when it was asked for.
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

enum class Carrier { arena, mesh };

struct Algorithm {
  std::string_view name;
  Collective what;
  Carrier carrier;
  void (*run)(const Call& call, const Ranks& ranks, const Wait& wait);
};

std::span<const Algorithm> algorithms();

// The algorithm named by MSCOMM_ALGO for each collective; empty: choose.
using Forced = std::array<std::string, collectives.size()>;

// Pure: the same on all ranks for the same layout and forced names. Throws Error("ValueError") for a name that is none, or that
// the layout does not allow.
const Algorithm& select(Collective what, const Layout& layout, const Forced& forced);

// --- shared by the algorithms ---

struct Range {
  size_t begin, end;
  size_t bytes() const { return end - begin; }
};

// Part `index` of `parts` of a message, cut at 64 bytes, so that no element and no cache line has two owners.
Range part(size_t bytes, int parts, int index);
// Piece `index` of that size.
Range piece(size_t bytes, size_t piece_bytes, size_t index);
size_t pieces(size_t bytes, size_t piece_bytes);

// Where each rank's part of a longer message lies, in bytes.
class Blocks {
 public:
  // n parts of the same size.
  Blocks(size_t each_bytes, int n);
  // counts: elements of each part; stride: between two that count.
  Blocks(const uint64_t* counts, int n, size_t stride, size_t element_bytes);

  // The result of all_gather and gather, by source.
  static Blocks gathered(const Call& call, int n);
  // What reduce_scatter and scatter divide, by destination.
  static Blocks divided(const Call& call, int n);
  // all_to_all: what `rank` sends, by destination, and what it gets, by source.
  static Blocks sent_by(const Call& call, int n, int rank);
  static Blocks got_by(const Call& call, int n, int rank);

  size_t begin(int rank) const { return rank == 0 ? 0 : ends_[static_cast<size_t>(rank) - 1]; }
  size_t bytes(int rank) const { return ends_[static_cast<size_t>(rank)] - begin(rank); }
  size_t total() const { return ends_.back(); }
  size_t largest() const;

 private:
  std::vector<size_t> ends_;
};

// Reduces in[rank] over all ranks in the canonical order: within a host in rank order, then over hosts by lowest rank, partial
// results in the accumulator type. out may be one of the in.
void reduce_in_order(const Signature& signature, const Layout& layout, const void* const* in, void* out, size_t bytes);

// After the first round of an arena call: throws Differs unless all ranks posted the same signature.
void compare_posts(const Arena& arena);

// The binomial tree over ranks counted from the root: rank r holds the subtree [r, r + span).
struct Tree {
  Tree(int rank, int size, int root);
  int parent = -1;            // -1: the root
  std::vector<int> children;  // nearest first
  int relative;               // this rank, counted from the root
  int span;                   // ranks in this subtree
  int size, root;
  int relative_of(int rank) const { return (rank - root + size) % size; }
};

// Broadcast of the root's message along any tree: from parent (-1: this is the root) to children, window by window, so that a
// rank passes one on while the next is on its way.
void relay(const Call& call, Mesh& mesh, int parent, const std::vector<int>& children, const Wait& wait);

}  // namespace mscomm
