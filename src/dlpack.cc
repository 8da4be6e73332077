#include "src/dlpack.h"

#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/call.h"

namespace mscomm {

namespace py = pybind11;

namespace {

struct Tensor {
  void* data;
  int32_t device_type, device;
  int32_t dims;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;  // in elements; nullptr: in C order
  uint64_t byte_offset;
};
static_assert(sizeof(Tensor) == 48);

struct Versioned {
  uint32_t major, minor;
  void* context;
  void* deleter;
  uint64_t flags;  // bit 0: read-only
  Tensor tensor;
};
static_assert(offsetof(Versioned, tensor) == 32);

std::optional<std::string> dtype_of(const Tensor& tensor) {
  if (tensor.lanes != 1) return std::nullopt;
  static constexpr std::string_view kinds[] = {"int", "uint", "float", "", "bfloat", "complex", "bool"};
  if (tensor.code >= std::size(kinds)) return std::nullopt;
  const std::string name = std::string(kinds[tensor.code]) + (tensor.code == 6 ? "" : std::to_string(tensor.bits));
  for (const DtypeRow& row : dtypes)
    if (row.name == name && row.bytes * 8 == tensor.bits) return name;
  return std::nullopt;
}

}  // namespace

py::tuple describe_dlpack(const py::capsule& capsule) {
  const std::string_view name = capsule.name() ? capsule.name() : "";
  const bool versioned = name == "dltensor_versioned";
  if (!versioned && name != "dltensor") throw py::value_error("mscomm: a DLPack capsule that was used already");
  const auto* const whole = versioned ? static_cast<const Versioned*>(capsule.get_pointer()) : nullptr;
  if (whole && whole->major != 1) throw py::value_error("mscomm: DLPack of version " + std::to_string(whole->major));
  const Tensor& tensor = whole ? whole->tensor : *static_cast<const Tensor*>(capsule.get_pointer());
  const auto dtype = dtype_of(tensor);
  if (!dtype)
    throw py::value_error("mscomm: DLPack's type " + std::to_string(tensor.code) + " of " + std::to_string(tensor.bits) +
                          " bits, which mscomm does not move");
  if (tensor.dims < 0 || tensor.dims > max_dims) throw py::value_error("mscomm: arrays have at most 12 dimensions");
  const int64_t bytes = tensor.bits / 8;
  py::tuple shape(tensor.dims);
  py::object strides = py::none();
  for (int i = 0; i < tensor.dims; i++) shape[static_cast<size_t>(i)] = py::int_(tensor.shape[i]);
  if (tensor.strides) {
    py::tuple steps(tensor.dims);
    for (int i = 0; i < tensor.dims; i++) steps[static_cast<size_t>(i)] = py::int_(tensor.strides[i] * bytes);
    strides = steps;
  }
  const uintptr_t address = reinterpret_cast<uintptr_t>(tensor.data) + tensor.byte_offset;
  return py::make_tuple(address, shape, strides, *dtype, tensor.device_type, tensor.device, whole && (whole->flags & 1));
}

}  // namespace mscomm
