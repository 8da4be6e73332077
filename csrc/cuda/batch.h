// The parameters of one kernel launch, which moves data between a bucket and its parts. Kernel parameters are passed by value.
// All drivers accept up to 4 KiB of them, so a Batch has at most 4 KiB.
//
// The bucket is an array of elements. Each part has its place in this array. The bucket is cut into cells of equal size, and also
// wherever a part begins. Each block of the launch moves one of the resulting pieces:
//
//     parts    |     0     | 1 |2 |                  3                |
//     cells    |           |           |           |           |           |
//     pieces   |     0     1 2 | 3|  4 |     5     |     6     |  7   |
//
// So a large part is moved by many blocks, and a small part by one. A block needs only its number to find its piece. If a part
// ends where a cell ends, an empty piece follows (piece 1 above). An empty piece costs a block, but keeps the numbering simple.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mscomm::cuda {

constexpr unsigned threads = 256;  // per block

struct Entry {
  uint64_t part;        // the address of the part
  uint64_t begin : 56;  // where the part begins in the bucket, in elements
  uint64_t gap : 8;     // how many bucket elements lie between the end of this part and the next part
};

struct Batch {
  static constexpr size_t most = 251;

  uint64_t bucket;    // the address of the bucket
  uint64_t residual;  // error feedback: the address of an array with one float for each bucket element; 0 if none
  double scale;
  float largest;            // error feedback: the largest value that may go into the bucket
  uint32_t count;           // the number of parts
  uint32_t packs;           // 1 if the data moves into the bucket, 0 if out of it
  uint32_t cell_log2;       // a cell has 2^cell_log2 elements
  Entry entries[most + 1];  // one for each part, and one where the last part ends

  constexpr uint64_t cell_of(uint32_t entry) const { return entries[entry].begin >> cell_log2; }
  constexpr uint64_t end_of(uint32_t entry) const { return entries[entry + 1].begin - entries[entry].gap; }
  // Returns the index of the first piece of this entry's part. For the entry where the last part ends, returns the total number
  // of pieces.
  constexpr uint64_t first_piece(uint32_t entry) const { return cell_of(entry) - cell_of(0) + entry; }
};
static_assert(sizeof(Batch) <= 4096);

struct Piece {
  uint32_t entry;       // the index of the entry whose part contains the piece
  uint64_t begin, end;  // the range of the piece in the bucket, in elements
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
