// Defines what csrc/cuda/pack.cu needs from CUDA, so that the host compiler can compile it. The kernels become functions that can
// be looked up by name. launch() runs a kernel's threads one after another. The threads have no shared memory and never wait for
// each other, so their order does not matter.
#pragma once

#define __global__ __attribute__((visibility("default")))
#define __device__
#define __grid_constant__
#define __launch_bounds__(threads)

struct Index {
  unsigned x;
};
inline thread_local Index blockIdx, threadIdx;

namespace mscomm::test {

template <class Parameters>
void launch(void (*kernel)(Parameters), unsigned blocks, unsigned threads, const Parameters& parameters) {
  for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
    for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++) kernel(parameters);
}

}  // namespace mscomm::test
