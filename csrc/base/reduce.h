// The arithmetic of reductions. There is one set of functions (a Reduction) for each pair of element type and operation.
//
// Inputs are combined from left to right, in the accumulator type (float32 for float16 and bfloat16, otherwise the element type
// itself). The result is rounded to the element type once, at the end. The caller chooses the order of the inputs. The same order
// gives bitwise identical results, regardless of block size, vector length and machine.
#pragma once

#include <cstddef>

#include "base/types.h"

namespace mscomm {

struct Reduction {
  size_t element_bytes;
  size_t accumulator_bytes;
  // out = round((in[0] op in[1] op ... op in[n-1]) / divisor). Only avg uses divisor. out may be one of the inputs.
  void (*reduce)(const void* const* in, int n, int divisor, void* out, size_t count);
  // The next four functions perform a reduction in steps, for partial results that are sent between ranks. An accumulator must
  // not overlap an input. In merge(), `other` is an accumulator, too.
  void (*widen)(const void* in, void* accumulator, size_t count);     // accumulator = in
  void (*fold)(void* accumulator, const void* in, size_t count);      // accumulator = accumulator op in
  void (*merge)(void* accumulator, const void* other, size_t count);  // accumulator = accumulator op other
  void (*finish)(const void* accumulator, int divisor, void* out, size_t count);
  // Fills out with the identity of op, which is the value that changes no other value when combined with it: 0 for sum, 1 for
  // prod, the largest value or infinity for min, ...
  void (*identity)(void* out, size_t count);
};

// Returns whether op is defined on dtype. No op is defined on the float8 types. avg is not defined on bool and integers, min and
// max are not defined on complex numbers, and the bitwise operations are defined only on bool and integers.
bool supports(Dtype dtype, Op op);

// Returns the functions for dtype and op, compiled for the best instruction set that this CPU has. Precondition: supports(dtype,
// op).
const Reduction& reduction(Dtype dtype, Op op);

// levels() returns the number of levels (instruction sets) that this CPU has. Level 0 is the baseline, and reduction() uses the
// highest level. reduction_at() returns the functions for the given level, for tests and benchmarks.
int levels();
const Reduction& reduction_at(Dtype dtype, Op op, int level);

// As long as this object lives, the thread that created it computes in the default floating-point environment (round to nearest,
// keep subnormals). A framework may have set another mode for the thread, such as flush-to-zero.
class DefaultFloatMode {
 public:
  DefaultFloatMode();
  ~DefaultFloatMode();
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
  unsigned long saved_;
};

}  // namespace mscomm
