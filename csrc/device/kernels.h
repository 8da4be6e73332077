// Divides a packing into launches of the kernels in csrc/cuda, and gives access to the compiled image of these kernels. This
// file is not in csrc/cuda, because it uses Dtype and std::vector. The code in csrc/cuda is compiled for devices as well as for
// the CPU, and uses neither.
#pragma once

#include <array>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "cuda/batch.h"
#include "device/packing.h"

namespace mscomm {

struct Kernel {
  enum class Way { copy, scale, pack, unpack, owe };
  const char* name;
  Way way;
  size_t part_bytes, bucket_bytes;  // the element size in a part, and in the bucket
  Dtype part, bucket;               // not used by copies
};

inline constexpr std::array<Kernel, 14> kernels{{
    {"copy1", Kernel::Way::copy, 1, 1, {}, {}},
    {"copy2", Kernel::Way::copy, 2, 2, {}, {}},
    {"copy4", Kernel::Way::copy, 4, 4, {}, {}},
    {"copy8", Kernel::Way::copy, 8, 8, {}, {}},
    {"scale_f16", Kernel::Way::scale, 2, 2, Dtype::float16, Dtype::float16},
    {"scale_bf16", Kernel::Way::scale, 2, 2, Dtype::bfloat16, Dtype::bfloat16},
    {"scale_f32", Kernel::Way::scale, 4, 4, Dtype::float32, Dtype::float32},
    {"scale_f64", Kernel::Way::scale, 8, 8, Dtype::float64, Dtype::float64},
    {"pack_f32_f16", Kernel::Way::pack, 4, 2, Dtype::float32, Dtype::float16},
    {"pack_f32_bf16", Kernel::Way::pack, 4, 2, Dtype::float32, Dtype::bfloat16},
    {"unpack_f16_f32", Kernel::Way::unpack, 4, 2, Dtype::float32, Dtype::float16},
    {"unpack_bf16_f32", Kernel::Way::unpack, 4, 2, Dtype::float32, Dtype::bfloat16},
    {"owe_f32_f16", Kernel::Way::owe, 4, 2, Dtype::float32, Dtype::float16},
    {"owe_f32_bf16", Kernel::Way::owe, 4, 2, Dtype::float32, Dtype::bfloat16},
}};

// Returns whether there is a kernel that scales elements and, if the dtypes of the part and the bucket differ, also casts them.
bool kernels_convert(Dtype part, Dtype bucket);

struct Launch {
  size_t kernel;  // the kernel's index in `kernels`
  unsigned blocks;
  cuda::Batch batch;
};

// Returns the launches that perform the packing on a device with this number of multiprocessors, or nullopt if no kernel can
// perform it. The vector is empty if there is nothing to do.
std::optional<std::vector<Launch>> plan(const Packing& packing, int multiprocessors);

// The kernels for all devices, as a fatbin, and the architectures in it ("sm_75 sm_80 ... compute_75"). Both are empty if mscomm
// was built without nvcc.
struct Image {
  std::span<const unsigned char> bytes;
  std::string_view architectures;
};
Image embedded_image();

}  // namespace mscomm
