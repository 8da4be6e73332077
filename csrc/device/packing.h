// Many arrays of a device, gathered into a bucket or spread from it.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "base/types.h"

namespace mscomm {

struct Packing {
  struct Part {
    void* data;             // only read when it is packed
    uint64_t begin, count;  // its place in the bucket, and how many: of elements
  };

  bool packs;                 // into the bucket, or out of it
  Dtype dtype, bucket_dtype;  // of the parts; of the bucket
  void* bucket;
  std::vector<Part> parts;  // by their places; one begins where the one before has ended, or later
  double scale = 1;         // each element is multiplied by it
  // Error feedback, when it is packed: float32 by the bucket's places. It is added to what goes into the bucket, of which nothing
  // is larger than `largest`; what that and the rounding take away it is after that.
  void* residual = nullptr;
  double largest = std::numeric_limits<double>::infinity();

  // Copies can do it.
  bool plain() const { return dtype == bucket_dtype && scale == 1 && !residual; }
};

}  // namespace mscomm
