// A message and its parts: where each rank's block lies, and how a message is cut.
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

// Part `index` of a message that is cut into `parts` parts. It is cut at multiples of 64 bytes, so that no element and no cache
// line belongs to two parts.
Range part(size_t bytes, int parts, int index);
// Piece `index` of a message that is cut into pieces of piece_bytes.
Range piece(size_t bytes, size_t piece_bytes, size_t index);
size_t pieces(size_t bytes, size_t piece_bytes);

// Copies bytes. Does nothing if there are none, or if `to` and `from` are the same.
inline void copy(void* to, const void* from, size_t bytes) {
  if (bytes && to != from) std::memcpy(to, from, bytes);
}

// Where each rank's part of a longer message lies, in bytes.
class Blocks {
 public:
  // n parts of the same size.
  Blocks(size_t each_bytes, int n);
  // counts: the number of elements of each part. stride: the distance in `counts` between the numbers of two consecutive parts.
  Blocks(const uint64_t* counts, int n, size_t stride, size_t element_bytes);
  // A message cut by part() for n ranks; the first part is the largest.
  static Blocks parts(size_t bytes, int n);

  // The parts of the result of all_gather and gather, by source.
  static Blocks gathered(const Call& call, int n);
  // The parts of the x that reduce_scatter and scatter divide, by destination.
  static Blocks divided(const Call& call, int n);
  // For all_to_all: the parts that `rank` sends, by destination, and the parts that it gets, by source.
  static Blocks sent_by(const Call& call, int n, int rank);
  static Blocks got_by(const Call& call, int n, int rank);

  // The layout of piece k of each part, side by side. They lie in the order of the ranks, starting at rank `first` and going on
  // at rank 0 after the last rank.
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

// The buffer that all_to_all sends from. It is x, except in some in-place calls: if the block for a peer does not lie at the same
// place as the block from that peer, the buffer is a copy of x.
const char* kept_apart(const Call& call, const Ranks& ranks, const Blocks& sent, const Blocks& got);

}  // namespace mscomm
