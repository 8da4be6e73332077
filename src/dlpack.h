// Arrays of other libraries by DLPack: github.com/dmlc/dlpack, include/dlpack/dlpack.h, versions 0 and 1.
#pragma once

#include <pybind11/pybind11.h>

namespace mscomm {

// What the capsule of __dlpack__ describes: (address, shape, strides in bytes or None, dtype, device type, device number, whether
// it is read-only). The capsule stays as it is, and owns the memory. ValueError for what no array of ours is.
pybind11::tuple describe_dlpack(const pybind11::capsule& capsule);

}  // namespace mscomm
