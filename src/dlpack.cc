#include "src/dlpack.h"

#include <pybind11/stl.h>

#include <bit>
#include <optional>
#include <string>
#include <string_view>

#include "base/call.h"
#include "src/python.h"

namespace mscomm {

namespace {

struct Tensor {
  void* data;
  int32_t device_type, device;
  int32_t dims;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;  // in elements; nullptr if the array is in C order
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

// Returns the core's dtype for the elements of this tensor, or nullopt if there is none. `kinds` is in the order of DLPack's type
// codes. The name of a dtype is its kind, which for numbers that may have several sizes is followed by the number of bits.
std::optional<Dtype> dtype_of(const Tensor& tensor) {
  static constexpr std::string_view kinds[] = {"int",
                                               "uint",
                                               "float",
                                               "",
                                               "bfloat",
                                               "complex",
                                               "bool",
                                               "",
                                               "",
                                               "",
                                               "float8_e4m3fn",
                                               "float8_e4m3fnuz",
                                               "float8_e5m2",
                                               "float8_e5m2fnuz",
                                               "float8_e8m0fnu"};
  if (tensor.lanes != 1 || tensor.code >= std::size(kinds) || kinds[tensor.code].empty()) return std::nullopt;
  const std::string_view kind = kinds[tensor.code];
  for (size_t i = 0; i < dtypes.size(); i++) {
    const auto& [name, bytes] = dtypes[i];
    const bool same_kind = name.starts_with(kind) && name.find_first_not_of("0123456789", kind.size()) == name.npos;
    if (same_kind && bytes * 8 == tensor.bits) return static_cast<Dtype>(i);
  }
  return std::nullopt;
}

struct Exchange {
  uint32_t major, minor;
  const Exchange* previous;
  void *allocate, *from_object, *to_object;
  int (*describe)(void* object, Tensor* out);
  int (*current_stream)(int32_t device_type, int32_t device, void** out);
};

// Returns whether elements of this PyTorch tensor lie outside of its storage, because that has been resized. FSDP resizes
// storages to 0 bytes. PyTorch then still adds the tensor's offset to the null pointer. We ask for the offset only if the address
// is lower than usual, or if the tensor is so large that the question takes little time beside the call.
bool lacks_storage(const Array& array) {
  constexpr uint64_t large = 64 << 10;
  const auto address = std::bit_cast<uintptr_t>(array.begin);
  const uint64_t size = size_of(*array.dtype), bytes = array.shape.count() * size;
  const bool is_low = address < uintptr_t{1} << 40;
  if (!is_low && bytes < large) return false;
  const uint64_t offset = call_python(array.given.attr("storage_offset")).cast<uint64_t>() * size;
  if (is_low && address == offset) return true;
  return bytes >= large &&
         offset + bytes > call_python(call_python(array.given.attr("untyped_storage")).attr("nbytes")).cast<uint64_t>();
}

}  // namespace

py::tuple describe_dlpack(const py::capsule& capsule) {
  const std::string_view name = capsule.name() ? capsule.name() : "";
  const bool versioned = name == "dltensor_versioned";
  if (!versioned && name != "dltensor") throw py::value_error("mscomm: this DLPack capsule was used already");
  const auto* const whole = versioned ? static_cast<const Versioned*>(capsule.get_pointer()) : nullptr;
  if (whole && whole->major != 1) throw py::value_error("mscomm: DLPack of version " + std::to_string(whole->major));
  const Tensor& tensor = whole ? whole->tensor : *static_cast<const Tensor*>(capsule.get_pointer());
  const auto dtype = dtype_of(tensor);
  if (!dtype)
    throw py::value_error("mscomm: DLPack's type " + std::to_string(tensor.code) + " of " + std::to_string(tensor.bits) +
                          " bits, which mscomm does not move");
  if (tensor.dims < 0 || tensor.dims > max_dims) throw py::value_error("mscomm: arrays have at most 12 dimensions");
  const auto as_tuple = [&](const int64_t* numbers, int64_t factor) {
    py::tuple made(tensor.dims);
    for (int i = 0; i < tensor.dims; i++) made[i] = py::int_(numbers[i] * factor);
    return made;
  };
  const py::tuple shape = as_tuple(tensor.shape, 1);
  const py::object strides = tensor.strides ? py::object(as_tuple(tensor.strides, tensor.bits / 8)) : py::none();
  const uintptr_t address = reinterpret_cast<uintptr_t>(tensor.data) + tensor.byte_offset;
  return py::make_tuple(address, shape, strides, std::string(mscomm::name(*dtype)), tensor.device_type, tensor.device,
                        whole && (whole->flags & 1));
}

bool read_by_exchange(Array& array, PyObject* capsule) {
  const auto* api = static_cast<const Exchange*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  while (api && api->major != 1) api = api->previous;
  Tensor tensor;
  // If this protocol cannot describe the array, return false. The Python module for the array's library then describes the array,
  // or refuses it.
  if (!api || !api->describe || api->describe(array.given.ptr(), &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  constexpr int cpu = 1, cuda = 2;
  const bool on_device = tensor.device_type == cuda;
  const auto dtype = dtype_of(tensor);
  if (!dtype || tensor.dims > max_dims || (!on_device && tensor.device_type != cpu)) return false;
  array.dtype = *dtype;
  array.shape.dims = tensor.dims;
  int64_t step = 1;
  bool in_order = true;
  for (int i = tensor.dims - 1; i >= 0; i--) {
    const int64_t extent = tensor.shape[i];
    in_order &= !tensor.strides || extent == 1 || tensor.strides[i] == step;
    array.shape.extents[i] = extent;
    step *= extent;
  }
  if (!in_order && step != 0) return false;  // if the array has no elements, any strides will do
  array.begin = static_cast<char*>(tensor.data) + tensor.byte_offset;
  if (lacks_storage(array)) return false;
  if (!on_device) return true;
  void* stream = nullptr;
  if (api->current_stream(tensor.device_type, tensor.device, &stream) != 0) {
    PyErr_Clear();
    return false;
  }
  array.device = tensor.device;
  array.stream = stream;
  return true;
}

}  // namespace mscomm
