// Functions that several arena algorithms share: to run the first round of a call, and to move x through staging.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "algo/algorithm.h"
#include "algo/blocks.h"
#include "transport/arena.h"

namespace mscomm {

// Runs the first round of a call that has been posted. Throws Differs unless all ranks posted the same signature.
void meet(Arena& arena, const Wait& wait);
// Posts the call together with a tiny message, and runs the first round. x: the message, or nullptr if this rank sends nothing.
// largest_bytes: the size of the largest message of any rank.
void meet_with(const void* x, size_t x_bytes, size_t largest_bytes, const Call& call, Arena& arena, const Wait& wait);
// Runs the round of a call with a root that has been posted by post_one_way(). This rank waits only for the ranks whose data it
// needs. root: the rank of the arena that has the data, or that needs it. The sizes are those of meet_with(); largest_bytes must
// be at most one_way_bytes. The call must have no other round. If a rank has arrived with another call, returns the calls of all
// that have arrived, by their numbers in the arena.
[[nodiscard]] std::optional<Differs> meet_one_way(const void* x, size_t x_bytes, size_t largest_bytes, const Call& call, int root,
                                                  Arena& arena, const Wait& wait);

// Moves x through staging if x is in foreign memory. Each step uses one staging chunk. The chunk of step k holds piece k of each
// block of x, side by side.
class Staging {
 public:
  // x: what this rank sends, or nullptr if it sends nothing. blocks: how x is divided, either into a single block for all ranks
  // or into one block for each rank.
  Staging(Arena& arena, const void* x, Blocks blocks);

  // Posts the call, copies the first piece of each block of x into staging (unless it is already known that the peers can pull
  // x), and runs the first round. When enter() returns, all ranks are known to be in the same call. pulled: see Arena::post().
  void enter(const Call& call, Pulled pulled, const Wait& wait);
  // Makes put() skip this block. Call this if no peer reads the block from staging.
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

}  // namespace mscomm
