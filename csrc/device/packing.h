// A packing gathers many device arrays into a bucket, or scatters the bucket to these arrays.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "base/types.h"

namespace mscomm {

struct Packing {
  struct Part {
    void* data;             // read but not written if `packs` is true
    uint64_t begin, count;  // where the part begins in the bucket and how long it is, in elements
  };

  bool packs;                 // true if data moves from the parts into the bucket, false for the reverse
  Dtype dtype, bucket_dtype;  // the dtype of the parts, and the dtype of the bucket
  void* bucket;
  std::vector<Part> parts;  // in bucket order; a part begins where the previous part ends, or later
  double scale = 1;         // each element is multiplied by this factor
  // For error feedback, and only if `packs` is true: a float32 array with one number for each bucket element. The number is added
  // to the value that goes into the bucket, and the sum is clamped to the range from -largest to largest. Afterwards, the array
  // holds what the clamping and the rounding have removed.
  void* residual = nullptr;
  double largest = std::numeric_limits<double>::infinity();

  // Returns whether plain copies are sufficient for the packing.
  bool plain() const { return dtype == bucket_dtype && scale == 1 && !residual; }
};

}  // namespace mscomm
