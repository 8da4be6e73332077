#include "algo/blocks.h"

#include <algorithm>

#include "algo/algorithm.h"

namespace mscomm {

Range part(size_t bytes, int parts, int index) {
  constexpr size_t line = 64;
  const size_t lines = (bytes + line - 1) / line, count = parts, i = index;
  const size_t each = lines / count, more = lines % count;  // each of the first `more` parts is one line longer
  const size_t first = i * each + std::min(i, more);
  return {std::min(bytes, first * line), std::min(bytes, (first + each + (i < more ? 1 : 0)) * line)};
}

Range piece(size_t bytes, size_t piece_bytes, size_t index) {
  const size_t begin = std::min(bytes, index * piece_bytes);
  return {begin, std::min(bytes, begin + piece_bytes)};
}

size_t pieces(size_t bytes, size_t piece_bytes) { return (bytes + piece_bytes - 1) / piece_bytes; }

Blocks::Blocks(const uint64_t* counts, int n, size_t stride, size_t element_bytes) : n_(n) {
  ends_.reserve(n);
  size_t end = 0;
  for (int rank = 0; rank < n; rank++) ends_.push_back(end += counts[rank * stride] * element_bytes);
}

Blocks Blocks::parts(size_t bytes, int n) {
  Blocks blocks(0, n);
  for (int rank = 0; rank < n; rank++) blocks.ends_.push_back(part(bytes, n, rank).end);
  return blocks;
}

size_t Blocks::largest() const {
  if (ends_.empty()) return each_bytes_;
  size_t most = 0;
  for (int rank = 0; rank < n_; rank++) most = std::max(most, bytes(rank));
  return most;
}

Blocks Blocks::of(const Call& call, int n) {
  if (!call.counts.empty()) return Blocks(call.counts.data(), n, 1, call.element_bytes());
  return Blocks(divides(call.signature.what) ? call.bytes() / n : call.bytes(), n);
}

}  // namespace mscomm
