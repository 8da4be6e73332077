// Determines which data each rank sends to every other rank in the collectives that only move data: all_gather,
// all_to_all, broadcast, gather and scatter.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "algo/blocks.h"
#include "base/call.h"
#include "net/wait.h"

namespace mscomm {

struct Ranks;

// Describes the data that one rank sends to another. from: the data's offset in the source's x. to: the data's offset in the
// destination's out.
struct Move {
  size_t from = 0, to = 0, bytes = 0;
};

class Moves {
 public:
  // Says for which moves the caller will call between(). all_ranks: the moves between any two ranks. this_rank: only moves from
  // and to this rank. With this_rank, an uneven all_to_all takes less time to prepare, but Move::from is valid only in moves
  // from this rank, and Move::to only in moves to this rank.
  enum class Of { all_ranks, this_rank };
  // n: the number of ranks in the group. me: this rank. If the call has recv_counts, `of` must be this_rank.
  Moves(const Call& call, int n, int me, Of of);

  // Returns -1 if every rank may send to every other rank. Otherwise, returns the root, which is either the only sender or the
  // only receiver.
  int root() const { return root_; }
  bool sends(int rank) const { return root_ < 0 || to_root_ || rank == root_; }
  // Returns whether `source` sends a block, which may be empty, to `destination`.
  bool pairs(int source, int destination) const { return root_ < 0 || (to_root_ ? destination : source) == root_; }
  Move between(int source, int destination) const;

  // Returns how the x of `source` is divided: into one block for each rank, or into a single block that every destination
  // receives.
  Blocks blocks_of(int source) const;
  // largest_x() returns the size in bytes of the largest x of any rank. largest_from() returns the size of the largest move from
  // `source`. largest_from() must not be called for a collective with a root.
  size_t largest_x() const;
  size_t largest_from(int source) const;

  // Returns the array that this rank sends from, or nullptr if it sends nothing. This array is usually x itself. In an in-place
  // uneven all_to_all, it is a copy of x in scratch memory, so that received blocks do not overwrite blocks that have not been
  // sent yet. No copy is made if the blocks have the same places in x and in out.
  const char* source_array(const Call& call, const Ranks& ranks) const;

 private:
  const Blocks& sent(int source) const { return sent_.empty() ? parts_ : sent_[source]; }
  const Blocks& got(int destination) const { return got_.empty() ? parts_ : got_[destination]; }

  const int me_;
  const int root_;
  const bool to_root_;  // whether the collective is gather
  const bool divides_;  // whether each destination receives a different part of x
  const bool gathers_;  // whether the data from each source goes to a different part of out
  // What is divided into these parts depends on the collective: the root's x in a scatter, each rank's x in an all_to_all, and
  // the x of all ranks together in a gather or an all_gather. In a broadcast, the root's x is a single part.
  Blocks parts_;
  // Used instead of parts_ in an uneven all_to_all: the blocks of each source's x, and the blocks of each destination's out.
  std::vector<Blocks> sent_, got_;
};

// Moves the data between this rank and the given peers over the mesh. x: what source_array() has returned. in_turn: whether to
// send a long message to one peer after the other, in this order. meanwhile: is called once, while the first data is on its way.
void move_over_mesh(const Call& call, const Moves& moves, const char* x, std::span<const int> peers, bool in_turn,
                    const Ranks& ranks, const Wait& wait, const std::function<void()>& meanwhile);

// Algorithms that are parts of others.
void moves_arena(const Call& call, const Ranks& ranks, const Wait& wait);
void moves_hierarchical(const Call& call, const Ranks& ranks, const Wait& wait);

}  // namespace mscomm
