// What the algorithms in the arena share: the first round, moving x through staging, and the collectives that combine nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "algo/algorithm.h"
#include "algo/blocks.h"
#include "transport/arena.h"

namespace mscomm {

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
  void leave_out(int block) { left_out_[block] = true; }
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

}  // namespace mscomm
