// Runs the kernels of csrc/cuda on the simulated machine. The kernels are compiled for the host (device_code.cc).
// FAKE_CUDA_KERNELS holds the path of the compiled library. Without this library, the machine can run no kernels.
#pragma once

#include <memory>

#include "engine.h"

namespace fake {

// Returns true if `image` begins like an image from nvcc, and this machine can run kernels at all.
bool can_run(const void* image);
// Returns the handle of the kernel with this name, or 0 if there is none.
Handle kernel_named(const char* name);
// Enqueues a launch. Copies the parameters immediately, and finds the allocation at each address in the parameters. The memory is
// opened only when the stream runs the launch. Returns false if there is no such kernel, or if the number of blocks or threads is
// invalid.
bool launch_kernel(Handle kernel, unsigned blocks, unsigned threads, const void* parameters,
                   const std::shared_ptr<Stream>& stream);

}  // namespace fake
