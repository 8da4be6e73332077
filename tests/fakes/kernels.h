// Kernels on the pretended machine: those of csrc/cuda, compiled for the host (device_code.cc), under the name that
// FAKE_CUDA_KERNELS gives of that library. Without it this machine can run none, whatever it was compiled for.
#pragma once

#include <memory>

#include "engine.h"

namespace fake {

// Whether it is an image that nvcc makes, and this machine can run such.
bool can_run(const void* image);
// 0: there is no kernel of that name.
Handle kernel_named(const char* name);
// Enqueues it. What it is given is copied now; what its addresses mean is found now and opened when the stream gets there. False:
// no such kernel, or a shape that it does not have.
bool launch_kernel(Handle kernel, unsigned blocks, unsigned threads, const void* parameters,
                   const std::shared_ptr<Stream>& stream);

}  // namespace fake
