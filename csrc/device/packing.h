// Many arrays of a device, gathered into a bucket or spread from it.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "base/types.h"

namespace mscomm {

struct Packing {
  struct Part {
    void* data;             // only read if `packs`
    uint64_t begin, count;  // its place in the bucket and its length, in elements
  };

  bool packs;                 // true: from the parts into the bucket; false: out of it
  Dtype dtype, bucket_dtype;  // the dtype of the parts, and that of the bucket
  void* bucket;
  std::vector<Part> parts;  // in the order of their places; a part begins where the one before ends, or later
  double scale = 1;         // each element is multiplied by it
  // Error feedback, only if `packs`: an array of float32 with one number for each place in the bucket. The number is added to the
  // value that goes into the bucket, and the sum is limited to `largest`. Afterwards the array holds what this limit and the
  // rounding have taken away.
  void* residual = nullptr;
  double largest = std::numeric_limits<double>::infinity();

  // Whether plain copies can do the packing.
  bool plain() const { return dtype == bucket_dtype && scale == 1 && !residual; }
};

}  // namespace mscomm
