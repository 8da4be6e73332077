// Runs the kernels of csrc/cuda on the simulated machine. They are compiled for the host (device_code.cc) into a library, whose
// path is in FAKE_CUDA_KERNELS. Without this library, the machine can run no kernels.
#pragma once

#include <memory>

#include "engine.h"

namespace fake {

// Returns true if this is an image from nvcc and this machine can run kernels at all.
bool can_run(const void* image);
// Returns the handle of the kernel with this name, or 0 if there is none.
Handle kernel_named(const char* name);
// Enqueues a launch. The parameters are copied and their addresses are resolved to allocations right away, but the memory is
// opened only when the stream runs the launch. Returns false if there is no such kernel, or if the launch cannot have this shape.
bool launch_kernel(Handle kernel, unsigned blocks, unsigned threads, const void* parameters,
                   const std::shared_ptr<Stream>& stream);

}  // namespace fake
