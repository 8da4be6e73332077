// A packing gathers many arrays of a device into a bucket, or spreads the bucket over these arrays.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "base/types.h"

namespace mscomm {

struct Packing {
  struct Part {
    void* data;             // if `packs`, the data is only read
    uint64_t begin, count;  // where the part begins in the bucket, and its length, both in elements
  };

  bool packs;                 // true: data moves from the parts into the bucket; false: from the bucket into the parts
  Dtype dtype, bucket_dtype;  // the dtype of the parts, and the dtype of the bucket
  void* bucket;
  std::vector<Part> parts;  // in bucket order; a part begins where the part before it ends, or later
  double scale = 1;         // each element is multiplied by this factor
  // For error feedback, and only if `packs`: an array of float32 with one number for each place in the bucket. The number is
  // added to the value that goes into the bucket, and the sum is limited to `largest`. Afterwards the array holds what the limit
  // and the rounding have taken away.
  void* residual = nullptr;
  double largest = std::numeric_limits<double>::infinity();

  // Whether plain copies can do the packing.
  bool plain() const { return dtype == bucket_dtype && scale == 1 && !residual; }
};

}  // namespace mscomm
