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

Blocks::Blocks(size_t each_bytes, int n) {
  for (int rank = 1; rank <= n; rank++) ends_.push_back(rank * each_bytes);
}

Blocks::Blocks(const uint64_t* counts, int n, size_t stride, size_t element_bytes) {
  size_t end = 0;
  for (int rank = 0; rank < n; rank++) ends_.push_back(end += counts[rank * stride] * element_bytes);
}

Blocks Blocks::parts(size_t bytes, int n) {
  Blocks blocks;
  for (int rank = 0; rank < n; rank++) blocks.ends_.push_back(part(bytes, n, rank).end);
  return blocks;
}

Blocks Blocks::window(size_t piece_bytes, size_t k, int first) const {
  Blocks blocks;
  size_t end = 0;
  for (int i = 0; i < size(); i++) blocks.ends_.push_back(end += piece(bytes((first + i) % size()), piece_bytes, k).bytes());
  return blocks;
}

size_t Blocks::largest() const {
  size_t most = 0;
  for (size_t rank = 0; rank < ends_.size(); rank++) most = std::max(most, bytes(static_cast<int>(rank)));
  return most;
}

Blocks Blocks::gathered(const Call& call, int n) {
  return call.counts.empty() ? Blocks(call.bytes(), n) : Blocks(call.counts.data(), n, 1, call.element_bytes());
}

Blocks Blocks::divided(const Call& call, int n) {
  return call.counts.empty() ? Blocks(call.bytes() / n, n) : Blocks(call.counts.data(), n, 1, call.element_bytes());
}

Blocks Blocks::sent_by(const Call& call, int n, int rank) {
  if (call.counts.empty()) return divided(call, n);
  return Blocks(call.counts.data() + static_cast<size_t>(rank) * n, n, 1, call.element_bytes());
}

Blocks Blocks::got_by(const Call& call, int n, int rank) {
  if (call.counts.empty()) return divided(call, n);
  return Blocks(call.counts.data() + rank, n, n, call.element_bytes());
}

const char* kept_apart(const Call& call, const Ranks& ranks, const Blocks& sent, const Blocks& got) {
  if (call.x != call.out || call.x_bytes == 0 || sent == got) return call.in();
  char* apart = ranks.scratch_of(call.x_bytes);
  copy(apart, call.x, call.x_bytes);
  return apart;
}

}  // namespace mscomm
