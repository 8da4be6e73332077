// Many arrays of a device, gathered into a bucket or spread from it.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "base/types.h"

namespace mscomm {

struct Packing {
  struct Part {
    void* data;             // packing only reads it
    uint64_t begin, count;  // its place in the bucket and its length, in elements
  };

  bool packs;                 // into the bucket, or out of it
  Dtype dtype, bucket_dtype;  // of the parts; of the bucket
  void* bucket;
  std::vector<Part> parts;  // in the order of their places; a part begins where the one before ends, or later
  double scale = 1;         // each element is multiplied by it
  // Error feedback, for packing only: float32, one for each place in the bucket. It is added to what goes into the bucket, where
  // values are limited to `largest`. Afterwards it holds what that limit and the rounding have taken away.
  void* residual = nullptr;
  double largest = std::numeric_limits<double>::infinity();

  // Whether copies can do it.
  bool plain() const { return dtype == bucket_dtype && scale == 1 && !residual; }
};

}  // namespace mscomm
