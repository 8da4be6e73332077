// Runs the kernels of csrc/cuda on the simulated machine. The kernels are compiled for the host (device_code.cc).
// FAKE_CUDA_KERNELS holds the path of the compiled library. Without this library, the machine can run no kernels.
#pragma once

#include <memory>

#include "engine.h"

namespace fake {

// Returns true if this is an image from nvcc and this machine can run kernels at all.
bool can_run(const void* image);
// Returns the handle of the kernel with this name, or 0 if there is none.
Handle kernel_named(const char* name);
// Enqueues a launch. Copies the parameters and finds the allocations at their addresses immediately, but opens the memory only
// when the stream runs the launch. Returns false if there is no such kernel, or if the numbers of blocks and threads are invalid.
bool launch_kernel(Handle kernel, unsigned blocks, unsigned threads, const void* parameters,
                   const std::shared_ptr<Stream>& stream);

}  // namespace fake
