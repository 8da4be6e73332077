// What one launch moves between a bucket and its parts, as the kernels get it: by value, in the 4 KiB that all drivers take.
//
// The bucket is a row of elements, in which the parts have their places. It is cut into cells of equal size and, besides, where a
// part begins; each block has one of the pieces:
//
//     parts    |     0     | 1 |2 |                  3                |
//     cells    |           |           |           |           |           |
//     pieces   |     0     1 2 | 3|  4 |     5     |     6     |  7   |
//
// So a large part has many blocks, a small one has one, and which piece a block has follows from its number alone. Where a part
// ends with a cell, a piece without elements comes next (1 above): that keeps counting simple, and costs a block.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mscomm::cuda {

constexpr unsigned threads = 256;  // of a block

struct Entry {
  uint64_t part;        // its address
  uint64_t begin : 56;  // its place in the bucket, in elements
  uint64_t gap : 8;     // from its end to the next part's place
};

struct Batch {
  static constexpr size_t most = 251;

  uint64_t bucket;    // its address
  uint64_t residual;  // error feedback: what the parts are owed, at their places in the bucket; else 0
  double scale;
  float largest;            // error feedback: nothing larger goes into the bucket
  uint32_t count;           // of parts
  uint32_t packs;           // into the bucket, or out of it
  uint32_t cell_log2;       // elements of a cell, as a power of two
  Entry entries[most + 1];  // and where the last one ends

  constexpr uint64_t cell_of(uint32_t entry) const { return entries[entry].begin >> cell_log2; }
  constexpr uint64_t end_of(uint32_t entry) const { return entries[entry + 1].begin - entries[entry].gap; }
  // The first piece of a part; of the entry behind the last: how many there are.
  constexpr uint64_t first_piece(uint32_t entry) const { return cell_of(entry) - cell_of(0) + entry; }
};
static_assert(sizeof(Batch) <= 4096);

struct Piece {
  uint32_t entry;       // of its part
  uint64_t begin, end;  // in the bucket
};

constexpr Piece piece_of(const Batch& batch, uint64_t number) {
  uint32_t low = 0, high = batch.count;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    if (batch.first_piece(middle) <= number) low = middle;
    else high = middle;
  }
  const uint64_t cell = batch.cell_of(low) + (number - batch.first_piece(low));
  const uint64_t cell_begin = cell << batch.cell_log2, cell_end = (cell + 1) << batch.cell_log2;
  const uint64_t part_begin = batch.entries[low].begin, part_end = batch.end_of(low);
  const uint64_t begin = cell_begin > part_begin ? cell_begin : part_begin, end = cell_end < part_end ? cell_end : part_end;
  return {low, begin, end > begin ? end : begin};
}

}  // namespace mscomm::cuda
