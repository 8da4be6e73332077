#include "device/kernels.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/numbers.h"

namespace mscomm {

namespace {

// A cell is the most that one block moves (see batch.h). Its size is chosen so that each multiprocessor gets about blocks_each
// blocks, which is about as many as it can run at a time. But a cell has at least least_cell_bytes, so that moving it hides the
// cost of starting the block, and at most most_cell_bytes.
constexpr uint64_t least_cell_bytes = 4096, most_cell_bytes = 32768, blocks_each = 8;

int place_of(Kernel::Way way, Dtype part, Dtype bucket) {
  for (size_t i = 0; i < kernels.size(); i++)
    if (kernels[i].way == way && kernels[i].part == part && kernels[i].bucket == bucket) return static_cast<int>(i);
  return -1;
}

// Returns the largest power of two, up to 8, that divides all addresses and sizes of a copy. The copy moves units of that many
// bytes.
uint64_t common_unit(const Packing& packing) {
  const uint64_t element = size_of(packing.dtype);
  uint64_t all = 8 | reinterpret_cast<uintptr_t>(packing.bucket);
  for (const Packing::Part& part : packing.parts)
    all |= reinterpret_cast<uintptr_t>(part.data) | part.begin * element | part.count * element;
  return all & -all;
}

bool aligned(const void* address, size_t bytes) { return reinterpret_cast<uintptr_t>(address) % bytes == 0; }

// Returns whether every array is aligned to its element size. An array can be unaligned only if it is a view of bytes.
bool aligned(const Packing& packing) {
  return aligned(packing.bucket, size_of(packing.bucket_dtype)) && aligned(packing.residual, sizeof(float)) &&
         std::ranges::all_of(packing.parts, [&](auto& part) { return aligned(part.data, size_of(packing.dtype)); });
}

int kernel_for(const Packing& packing, uint64_t unit) {
  using enum Kernel::Way;
  if (packing.plain()) return std::countr_zero(unit);  // the first rows of `kernels` copy units of 1, 2, 4, ... bytes
  if (!aligned(packing)) return -1;
  const Kernel::Way way = packing.residual ? owe : packing.dtype == packing.bucket_dtype ? scale : packing.packs ? pack : unpack;
  return place_of(way, packing.dtype, packing.bucket_dtype);
}

float at_most(double x) {
  const float rounded = static_cast<float>(x);
  return rounded > x ? std::nextafter(rounded, 0.0f) : rounded;
}

cuda::Entry entry(const void* part, uint64_t begin) {
  constexpr uint64_t bits = (uint64_t{1} << 56) - 1;  // Entry::begin has 56 bits, which is enough for any memory
  return {reinterpret_cast<uintptr_t>(part), begin & bits, 0};
}

// Returns the largest value that the kernel may put into the bucket. It is finite in the bucket's dtype, and not above
// packing.largest.
float bound(const Packing& packing) {
  constexpr double of_float16 = 65504, of_bfloat16 = 0x1.fep127;
  if (packing.bucket_dtype == Dtype::float16) return floor_to<Float16>(at_most(std::min(packing.largest, of_float16)));
  return floor_to<Bfloat16>(at_most(std::min(packing.largest, of_bfloat16)));
}

}  // namespace

bool kernels_convert(Dtype part, Dtype bucket) {
  return place_of(part == bucket ? Kernel::Way::scale : Kernel::Way::pack, part, bucket) >= 0;
}

std::optional<std::vector<Launch>> plan(const Packing& packing, int multiprocessors) {
  const uint64_t unit = common_unit(packing);
  const int kernel = kernel_for(packing, unit);
  if (kernel < 0) return std::nullopt;
  const Kernel& row = kernels[kernel];
  // Positions in the bucket are in units for a copy, and in elements for the other kernels.
  const uint64_t times = packing.plain() ? size_of(packing.dtype) : 1, by = packing.plain() ? unit : 1;
  const auto units = [&](uint64_t elements) { return elements * times / by; };

  const uint64_t element_bytes = std::max(row.part_bytes, row.bucket_bytes);
  uint64_t bytes = 0;
  for (const Packing::Part& part : packing.parts) bytes += units(part.count) * element_bytes;
  const uint64_t share = bytes / (static_cast<uint64_t>(std::max(multiprocessors, 1)) * blocks_each);
  const uint64_t cell = std::clamp(std::bit_floor(share), least_cell_bytes, most_cell_bytes) / element_bytes;

  std::vector<Launch> launches;
  cuda::Batch* batch = nullptr;
  uint64_t end = 0;  // where the last part of the batch ends
  const auto close = [&] {
    if (!batch) return;
    batch->entries[batch->count] = entry(nullptr, end);
    launches.back().blocks = static_cast<unsigned>(batch->first_piece(batch->count));
    batch = nullptr;
  };
  for (const Packing::Part& part : packing.parts) {
    if (!part.count) continue;
    const uint64_t begin = units(part.begin), gap = batch ? begin - end : 0;
    if (batch && (batch->count == cuda::Batch::most || gap > 255)) close();
    if (!batch) {
      Launch& launch = launches.emplace_back();
      launch.kernel = kernel;
      batch = &launch.batch;
      batch->bucket = reinterpret_cast<uintptr_t>(packing.bucket);
      batch->residual = reinterpret_cast<uintptr_t>(packing.residual);
      batch->scale = packing.scale;
      batch->largest = packing.residual ? bound(packing) : 0;
      batch->packs = packing.packs;
      batch->cell_log2 = static_cast<uint32_t>(std::countr_zero(cell));
    } else {
      batch->entries[batch->count - 1].gap = gap & 0xff;
    }
    batch->entries[batch->count++] = entry(part.data, begin);
    end = begin + units(part.count);
  }
  close();
  return launches;
}

}  // namespace mscomm
