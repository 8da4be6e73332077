// Functions that several algorithms of the arena use: the first round of a call, moving x through staging, and the collectives
// that only move data.
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
// Posts the call together with a tiny message, and runs the first round. x: the message; nullptr if this rank sends nothing.
// largest_bytes: the size of the largest message of any rank.
void meet_with(const void* x, size_t x_bytes, size_t largest_bytes, const Call& call, Arena& arena, const Wait& wait);

// Moves x through staging if x is in foreign memory. In step k, the staging chunk holds piece k of each block of x, side by side.
class Staging {
 public:
  // x: what this rank sends; nullptr if it sends nothing. blocks: how x is divided, either into one block for all ranks together
  // or into one block for each rank.
  Staging(Arena& arena, const void* x, Blocks blocks);

  // Posts the call, copies the first piece of each block of x into staging, and runs the first round. When enter() returns, all
  // ranks are known to make the same call. pulled: see Arena::post(). If it is already known that the peers can pull x, enter()
  // does not copy x into staging.
  void enter(const Call& call, Pulled pulled, const Wait& wait);
  // Makes put() skip this block, because no peer reads the block from staging.
  void leave_out(int block) { left_out_[block] = true; }
  // Copies piece k of each block into staging; does nothing if x is in a heap.
  void put(size_t k) const;
  // Returns the address of piece k of the block that the given rank sends to this rank, in the given rank's staging.
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

// The data that goes from one rank to another. from: its offset in the x of the source. to: its offset in the out of the
// destination.
struct Move {
  size_t from, to, bytes;
};

// A collective that only moves data, described by what each rank sends to each other rank.
struct Moves {
  std::function<Move(int source, int destination)> between;
  const char* x;     // what this rank sends; nullptr if it sends nothing
  Blocks blocks;     // the blocks of x; see Staging
  size_t largest_x;  // the size in bytes of the largest x of any rank
  // Returns the size in bytes of the largest move from the given source. Needed only for a collective without a root.
  std::function<size_t(int source)> largest_from = nullptr;
};
// Moves the data between each pair of ranks in the fastest way. If the array of one rank is in a heap, the other rank reads or
// writes this array directly. If the array is in private memory, the other rank reads it in the process of its owner, provided
// that this is possible and takes less time. Otherwise both ranks copy, through staging.
void move_in_arena(const Call& call, const Ranks& ranks, const Moves& moves, const Wait& wait);

}  // namespace mscomm
