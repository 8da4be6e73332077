// How a message is cut, and where the part for each rank lies in the message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/call.h"

namespace mscomm {

struct Ranks;

struct Range {
  size_t begin, end;
  size_t bytes() const { return end - begin; }
};

// Part `index` of a message that is cut into `parts` parts. The cuts are at multiples of 64 bytes, so that no element and no
// cache line belongs to two parts.
Range part(size_t bytes, int parts, int index);
// Piece `index` of a message that is cut into pieces of piece_bytes bytes. The last piece may be shorter.
Range piece(size_t bytes, size_t piece_bytes, size_t index);
size_t pieces(size_t bytes, size_t piece_bytes);

// Copies bytes. Does nothing if there are none, or if `to` and `from` are the same.
inline void copy(void* to, const void* from, size_t bytes) {
  if (bytes && to != from) std::memcpy(to, from, bytes);
}

// Where the part of each rank lies in a message, in bytes.
class Blocks {
 public:
  // n parts of the same size.
  Blocks(size_t each_bytes, int n);
  // counts[i * stride] is the number of elements of part i.
  Blocks(const uint64_t* counts, int n, size_t stride, size_t element_bytes);
  // The parts that part() makes of a message for n ranks. The first part is the largest.
  static Blocks parts(size_t bytes, int n);

  // The parts of the result of an all_gather or gather, indexed by the rank that they come from.
  static Blocks gathered(const Call& call, int n);
  // The parts into which a reduce_scatter or scatter divides x, indexed by the rank that gets them.
  static Blocks divided(const Call& call, int n);
  // For all_to_all. sent_by(): the parts of the x of `rank`, indexed by the rank that gets them. got_by(): the parts of the out
  // of `rank`, indexed by the rank that they come from.
  static Blocks sent_by(const Call& call, int n, int rank);
  static Blocks got_by(const Call& call, int n, int rank);

  // Returns the layout of a buffer that holds piece k of each part, one piece after the other. The pieces of the ranks from
  // `first` on come first, and then the pieces of the ranks from 0 to first - 1.
  Blocks window(size_t piece_bytes, size_t k, int first) const;

  int size() const { return static_cast<int>(ends_.size()); }
  size_t begin(int rank) const { return rank == 0 ? 0 : ends_[rank - 1]; }
  size_t bytes(int rank) const { return ends_[rank] - begin(rank); }
  size_t total() const { return ends_.back(); }
  size_t largest() const;

  bool operator==(const Blocks&) const = default;

 private:
  Blocks() = default;
  std::vector<size_t> ends_;
};

// Returns the buffer that all_to_all sends from. The buffer is x itself, unless the call is in place and `sent` and `got` differ.
// In that case the buffer is a copy of x in scratch memory, so that received blocks do not overwrite blocks that are still to be
// sent.
const char* kept_apart(const Call& call, const Ranks& ranks, const Blocks& sent, const Blocks& got);

}  // namespace mscomm
