// What csrc/cuda/pack.cu needs of CUDA, for the host's compiler: its kernels become functions that can be looked up by name, and
// run thread by thread. The threads have no shared memory and never wait for each other, so their order does not matter.
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
