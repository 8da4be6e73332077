// Compresses gradients on the CPU: rounds them to 16 bits with error feedback, as the kernels in cuda/pack.cu do on a device, and
// widens the reduced gradients again.
#pragma once

#include <cstddef>

#include "base/types.h"

namespace mscomm {

// An array. The functions below get its length as `count`. A wide array has the dtype float32 or float64, and a narrow array has
// float16 or bfloat16.
struct Elements {
  void* data;
  Dtype dtype;
};

// Rounds x into `narrow`. `residual` has the dtype of x; see narrow_and_owe() in numbers.h. `largest` must be a finite number of
// the narrow dtype. Throws std::logic_error unless x has a wide dtype and `narrow` has a narrow one.
void compress(const Elements& x, void* residual, const Elements& narrow, double largest, size_t count);

// Converts `narrow` to the dtype of out.
void expand(const Elements& narrow, const Elements& out, size_t count);

}  // namespace mscomm
