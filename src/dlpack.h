// Reads other libraries' arrays through DLPack (github.com/dmlc/dlpack, include/dlpack/dlpack.h). Supports versions 0 and 1, and
// the exchange API of version 1.3.
#pragma once

#include <pybind11/pybind11.h>

#include "src/calls.h"

namespace mscomm {

// Describes the array in a capsule from __dlpack__. Returns (address, shape, strides in bytes or None, dtype, device type, device
// number, whether the array is read-only). Does not consume the capsule, which still owns the memory. Raises ValueError for an
// array that mscomm cannot use.
pybind11::tuple describe_dlpack(const pybind11::capsule& capsule);

// Describes array.given through the DLPackExchangeAPI of the array's type, without a call into Python. `capsule` holds this
// API. Returns false unless the array is in C order, is on the CPU or a CUDA device, and has a dtype that the core supports.
bool read_by_exchange(Array& array, PyObject* capsule);

}  // namespace mscomm
