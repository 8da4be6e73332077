// Compiles the kernels of csrc/cuda for the host. The stand-in for the driver runs them (see kernels.h). The stand-in itself
// must not contain the code under test, so kernels.py builds a separate library from this file.
#include <iterator>
#include <string_view>

#include "cuda_on_cpu.h"
//
#include "cuda/pack.cu"
#include "device/kernels.h"

using mscomm::cuda::Batch;

namespace {

struct Code {
  std::string_view name;
  void (*kernel)(const Batch);
};
#define CODE(name) {#name, mscomm::cuda::name}
constexpr Code codes[] = {CODE(copy1),          CODE(copy2),           CODE(copy4),       CODE(copy8),        CODE(scale_f16),
                          CODE(scale_bf16),     CODE(scale_f32),       CODE(scale_f64),   CODE(pack_f32_f16), CODE(pack_f32_bf16),
                          CODE(unpack_f16_f32), CODE(unpack_bf16_f32), CODE(owe_f32_f16), CODE(owe_f32_bf16)};
#undef CODE

const mscomm::Kernel& row_of(int number) {
  for (const mscomm::Kernel& row : mscomm::kernels)
    if (row.name == codes[number].name) return row;
  __builtin_trap();  // kernels.h has no row for this kernel
}

}  // namespace

extern "C" {

__global__ int fake_kernel(const char* name) {
  for (size_t i = 0; i < std::size(codes); i++)
    if (codes[i].name == name) return static_cast<int>(i);
  return -1;
}

__global__ size_t fake_parameter_bytes() { return sizeof(Batch); }

__global__ void fake_addresses(int kernel, void* parameters, void (*visit)(void* context, uint64_t* address, size_t bytes),
                               void* context) {
  auto& batch = *static_cast<Batch*>(parameters);
  const mscomm::Kernel& row = row_of(kernel);
  // The bucket and the residual must extend to the end of the last part.
  visit(context, &batch.bucket, batch.end_of(batch.count - 1) * row.bucket_bytes);
  if (batch.residual) visit(context, &batch.residual, batch.end_of(batch.count - 1) * sizeof(float));
  for (uint32_t i = 0; i < batch.count; i++)
    visit(context, &batch.entries[i].part, (batch.end_of(i) - batch.entries[i].begin) * row.part_bytes);
}

__global__ int fake_run(int kernel, const void* parameters, unsigned blocks, unsigned threads) {
  const auto& batch = *static_cast<const Batch*>(parameters);
  if (threads != mscomm::cuda::threads || blocks != batch.first_piece(batch.count)) return 0;
  mscomm::test::launch<Batch>(codes[kernel].kernel, blocks, threads, batch);
  return 1;
}
}
