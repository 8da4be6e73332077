// How a message is cut into parts, and where each rank's part lies in the message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/call.h"

namespace mscomm {

struct Range {
  size_t begin, end;
  size_t bytes() const { return end - begin; }
};

// Returns part `index` of a message that is cut into `parts` parts. The cuts are at multiples of 64 bytes, so that no element and
// no cache line belongs to two parts.
Range part(size_t bytes, int parts, int index);
// Returns piece `index` of a message that is cut into pieces of piece_bytes bytes. The last piece may be shorter.
Range piece(size_t bytes, size_t piece_bytes, size_t index);
size_t pieces(size_t bytes, size_t piece_bytes);

// Copies all bytes except those in the range `but`.
inline void copy_but(char* to, const char* from, size_t bytes, Range but) {
  copy(to, from, but.begin);
  copy(to + but.end, from + but.end, bytes - but.end);
}

// Where each rank's part lies in a message, in bytes.
class Blocks {
 public:
  // Divides a message into n parts of the same size.
  Blocks(size_t each_bytes, int n) : n_(n), each_bytes_(each_bytes) {}
  // counts[i * stride] is the number of elements of part i.
  Blocks(const uint64_t* counts, int n, size_t stride, size_t element_bytes);
  // Returns the parts into which part() cuts a message for n ranks. The first part is the largest.
  static Blocks parts(size_t bytes, int n);

  // For a reduce_scatter or a scatter, and for an all_to_all with equal parts, returns the parts into which x is divided, indexed
  // by the rank that receives the part. For an all_gather or a gather, returns the parts of the result, indexed by the rank from
  // which the part comes.
  static Blocks of(const Call& call, int n);

  int size() const { return n_; }
  size_t begin(int rank) const { return ends_.empty() ? rank * each_bytes_ : rank == 0 ? 0 : ends_[rank - 1]; }
  size_t bytes(int rank) const { return begin(rank + 1) - begin(rank); }
  size_t total() const { return begin(n_); }
  size_t largest() const;

  bool operator==(const Blocks&) const = default;

 private:
  int n_;
  size_t each_bytes_ = 0;
  std::vector<size_t> ends_;  // empty if each part has each_bytes_ bytes
};

}  // namespace mscomm
