#include "src/plain_calls.h"

#include <algorithm>
#include <array>
#include <bit>
#include <climits>
#include <memory>
#include <new>
#include <optional>
#include <string_view>

#include "base/reduce.h"
#include "src/group.h"

namespace mscomm {

namespace {

using Numpy = py::detail::npy_api;

// Our types by NumPy's type numbers, which are part of its ABI. bfloat16 has no fixed number.
constexpr int type_numbers = 24;
constexpr auto dtype_of_number = [] {
  std::array<std::optional<Dtype>, type_numbers> table{};
  table[Numpy::NPY_BOOL_] = Dtype::boolean;
  table[Numpy::NPY_BYTE_] = Dtype::int8;
  table[Numpy::NPY_UBYTE_] = Dtype::uint8;
  table[Numpy::NPY_SHORT_] = Dtype::int16;
  table[Numpy::NPY_USHORT_] = Dtype::uint16;
  table[Numpy::NPY_INT_] = Dtype::int32;
  table[Numpy::NPY_UINT_] = Dtype::uint32;
  table[Numpy::NPY_LONG_] = Dtype::int64;
  table[Numpy::NPY_ULONG_] = Dtype::uint64;
  table[Numpy::NPY_LONGLONG_] = Dtype::int64;
  table[Numpy::NPY_ULONGLONG_] = Dtype::uint64;
  table[Numpy::NPY_FLOAT_] = Dtype::float32;
  table[Numpy::NPY_DOUBLE_] = Dtype::float64;
  table[Numpy::NPY_CFLOAT_] = Dtype::complex64;
  table[Numpy::NPY_CDOUBLE_] = Dtype::complex128;
  table[23] = Dtype::float16;  // NPY_HALF
  return table;
}();
static_assert(std::endian::native == std::endian::little && sizeof(long) == 8 && sizeof(int) == 4 && sizeof(short) == 2);

struct Shape {
  int dims = 0;
  std::array<Py_intptr_t, max_dims + 1> extents{};

  bool operator==(const Shape& other) const {
    return dims == other.dims && std::equal(extents.begin(), extents.begin() + dims, other.extents.begin());
  }
};

// An array whose elements lie one after the other in memory, as the core reads them.
struct Plain {
  char* begin;
  Dtype dtype;
  Shape shape;
  size_t bytes;
  std::optional<StreamHandle> stream{};  // of an array on the device: its library's current stream

  bool apart_from(const Plain& other) const { return begin + bytes <= other.begin || other.begin + other.bytes <= begin; }
};

// An array library's functions for the short way. `libraries` owns them.
struct Library {
  PyObject *plain, *empty, *written;
};

// What the function is bound to.
struct Bound {
  py::object owner;
  Group* group;
  double timeout_s;
  py::list beside;
  py::function failed;
  py::dict libraries;
  int device;

  std::optional<Library> library_of(PyObject* array) const {
    PyObject* const row = PyDict_GetItemWithError(libraries.ptr(), reinterpret_cast<PyObject*>(Py_TYPE(array)));
    if (!row && PyErr_Occurred()) throw py::error_already_set();
    if (!row || !PyTuple_Check(row) || PyTuple_GET_SIZE(row) != 3) return std::nullopt;
    return Library{PyTuple_GET_ITEM(row, 0), PyTuple_GET_ITEM(row, 1), PyTuple_GET_ITEM(row, 2)};
  }
};

bool is_numpy(PyObject* object) { return Py_TYPE(object) == Numpy::get().PyArray_Type_; }  // not a subclass, as a masked array

std::optional<Plain> plain(PyObject* object, int flags) {
  if (!is_numpy(object)) return std::nullopt;
  const auto* array = py::detail::array_proxy(object);
  const auto* descriptor = py::detail::array_descriptor_proxy(array->descr);
  const int number = descriptor->type_num;
  if ((array->flags & flags) != flags || number < 0 || number >= type_numbers || descriptor->byteorder == '>')
    return std::nullopt;
  const auto dtype = dtype_of_number[static_cast<size_t>(number)];
  if (!dtype || array->nd > max_dims) return std::nullopt;
  Plain found{array->data, *dtype, {array->nd, {}}, size_of(*dtype)};
  for (int i = 0; i < array->nd; i++) {
    found.shape.extents[static_cast<size_t>(i)] = array->dimensions[i];
    found.bytes *= static_cast<size_t>(array->dimensions[i]);
  }
  return found;
}

// Takes the result of a Python function, or throws what the function raised.
py::object checked(PyObject* result) {
  if (!result) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

// The same for an array on the group's device. Its library describes it as (address, shape, dtype, device, stream), or None.
std::optional<Plain> plain(PyObject* object, const Library& library, int device) {
  const py::object told = checked(PyObject_CallOneArg(library.plain, object));
  if (!PyTuple_Check(told.ptr()) || PyTuple_GET_SIZE(told.ptr()) != 5) return std::nullopt;
  const auto item = [&](Py_ssize_t i) { return PyTuple_GET_ITEM(told.ptr(), i); };
  PyObject* const shape = item(1);
  if (!PyTuple_Check(shape) || PyTuple_GET_SIZE(shape) > max_dims) return std::nullopt;
  for (const Py_ssize_t i : {0, 2, 3, 4})
    if (!PyLong_Check(item(i))) return std::nullopt;
  const long dtype = PyLong_AsLong(item(2));
  if (PyLong_AsLong(item(3)) != device || dtype < 0 || dtype >= static_cast<long>(dtypes.size())) {
    PyErr_Clear();
    return std::nullopt;
  }
  Plain found{static_cast<char*>(PyLong_AsVoidPtr(item(0))),
              static_cast<Dtype>(dtype),
              {static_cast<int>(PyTuple_GET_SIZE(shape)), {}},
              size_of(static_cast<Dtype>(dtype)),
              PyLong_AsVoidPtr(item(4))};
  for (int i = 0; i < found.shape.dims; i++) {
    const Py_ssize_t extent = PyNumber_AsSsize_t(PyTuple_GET_ITEM(shape, i), nullptr);
    found.shape.extents[static_cast<size_t>(i)] = extent;
    found.bytes *= static_cast<size_t>(extent);
  }
  if (!PyErr_Occurred()) return found;
  PyErr_Clear();
  return std::nullopt;
}

// The shape of what a rank gets for an x of that shape in a group of n ranks. nullopt: x cannot be divided, the shape
// would be too large, or the short way does not have the collective.
std::optional<Shape> result_of(Collective what, Shape x, int n) {
  const bool divides = x.dims > 0 && x.extents[0] % n == 0;
  switch (what) {
    case Collective::all_reduce:
    case Collective::broadcast:
      return x;
    case Collective::all_to_all:
      return divides ? std::optional(x) : std::nullopt;
    case Collective::reduce_scatter:
      x.extents[0] /= n;
      return divides ? std::optional(x) : std::nullopt;
    case Collective::all_gather:
      if (x.dims == 0) return Shape{1, {n}};
      return __builtin_mul_overflow(x.extents[0], n, &x.extents[0]) ? std::nullopt : std::optional(x);
    default:
      return std::nullopt;
  }
}

std::optional<Op> op_of(PyObject* object) {
  Py_ssize_t length = 0;
  const char* text = PyUnicode_CheckExact(object) ? PyUnicode_AsUTF8AndSize(object, &length) : nullptr;
  if (!text) {
    PyErr_Clear();
    return std::nullopt;
  }
  const auto found = std::find(ops.begin(), ops.end(), std::string_view(text, static_cast<size_t>(length)));
  if (found == ops.end()) return std::nullopt;
  return static_cast<Op>(found - ops.begin());
}

std::optional<int> int_of(PyObject* object) {
  if (!PyLong_CheckExact(object)) return std::nullopt;
  const long value = PyLong_AsLong(object);
  if (value == -1 && PyErr_Occurred()) {  // too large
    PyErr_Clear();
    return std::nullopt;
  }
  return value >= -1 && value <= INT_MAX ? std::optional(static_cast<int>(value)) : std::nullopt;
}

py::object new_array(PyObject* like, const Shape& shape) {
  const auto& api = Numpy::get();
  PyObject* const descriptor = py::handle(py::detail::array_proxy(like)->descr).inc_ref().ptr();
  return checked(
      api.PyArray_NewFromDescr_(api.PyArray_Type_, descriptor, shape.dims, shape.extents.data(), nullptr, nullptr, 0, nullptr));
}

py::object new_array(PyObject* like, const Shape& shape, const Library& library) {
  py::tuple extents(shape.dims);
  for (int i = 0; i < shape.dims; i++)
    PyTuple_SET_ITEM(extents.ptr(), i, checked(PyLong_FromSsize_t(shape.extents[static_cast<size_t>(i)])).release().ptr());
  return checked(PyObject_CallFunctionObjArgs(library.empty, like, extents.ptr(), nullptr));
}

py::object call_plain(const Bound& bound, PyObject* what_object, PyObject* x_object, PyObject* op_object, PyObject* root_object,
                      PyObject* out_object) {
  Group& group = *bound.group;
  constexpr int readable = Numpy::NPY_ARRAY_C_CONTIGUOUS_ | Numpy::NPY_ARRAY_ALIGNED_;
  constexpr int writable = readable | Numpy::NPY_ARRAY_WRITEABLE_;
  const py::object not_for_us = py::reinterpret_borrow<py::object>(Py_NotImplemented);
  const int n = static_cast<int>(group.ranks.size());

  Call call;
  Signature& signature = call.signature;
  const auto number = int_of(what_object), root = int_of(root_object);
  if (!number || *number < 0 || *number >= static_cast<int>(collectives.size()) || !root) return not_for_us;
  signature.what = static_cast<Collective>(*number);
  signature.function = static_cast<Function>(*number);  // those of the collectives come first, in the same order
  if (*root >= n || (signature.what == Collective::broadcast) != (*root >= 0)) return not_for_us;
  signature.root = *root;
  signature.dtype = Dtype::boolean;  // of a barrier, as in the general way
  py::object result = py::none();
  std::optional<Library> library;  // of out
  if (signature.what != Collective::barrier) {
    const bool on_device = !is_numpy(x_object);
    if (on_device && !(library = bound.library_of(x_object))) return not_for_us;
    const auto x = on_device ? plain(x_object, *library, bound.device) : plain(x_object, readable);
    const auto shape = x ? result_of(signature.what, x->shape, n) : std::nullopt;
    if (!shape) return not_for_us;
    if (reduces(signature.what)) {
      const auto op = op_of(op_object);
      if (!op || !supports(x->dtype, *op)) return not_for_us;
      if (on_device && !group.communicator->reduces_on_device(x->dtype, *op)) return not_for_us;
      signature.op = *op;
    }
    if (out_object != Py_None) result = py::reinterpret_borrow<py::object>(out_object);
    else result = on_device ? new_array(x_object, *shape, *library) : new_array(x_object, *shape);
    std::optional<Plain> out;
    if (!on_device) {
      out = plain(result.ptr(), writable);
    } else if (out_object == x_object) {
      out = x;
    } else if (out_object == Py_None || (library = bound.library_of(out_object))) {
      out = plain(result.ptr(), *library, bound.device);
    }
    if (!out || out->dtype != x->dtype || !(out->shape == *shape)) return not_for_us;
    // x and out may be the same array. Any other overlap is left to the general way, and so is all_to_all in place on a device,
    // which sends parts while others arrive.
    const bool in_place =
        out_object == x_object && *shape == x->shape && !(on_device && signature.what == Collective::all_to_all);
    if (!in_place && !out->apart_from(*x)) return not_for_us;
    signature.dtype = x->dtype;
    signature.dims = static_cast<uint8_t>(x->shape.dims);
    signature.count = x->bytes / size_of(x->dtype);
    for (size_t i = 0; i < signature.dims; i++) signature.shape[i] = static_cast<uint64_t>(x->shape.extents[i]);
    signature.device = on_device;
    call.stream = x->stream;
    call.x = x->begin;
    call.x_bytes = x->bytes;
    call.out = out->begin;
    call.out_bytes = out->bytes;
  }
  group.called([&] { group.communicator->run(std::move(call), bound.timeout_s); });
  if (library && library->written != Py_None && out_object != Py_None) checked(PyObject_CallOneArg(library->written, out_object));
  return result;
}

PyObject* call_bound(const Bound& bound, PyObject* const* arguments) {
  try {
    try {
      PyObject *const what = arguments[0], *const x = arguments[1], *const op = arguments[2], *const root = arguments[3],
                      *const out = arguments[4];
      return call_plain(bound, what, x, op, root, out).release().ptr();
    } catch (const Error& error) {
      raise(error);  // runs Python code, in which a signal handler may raise something else
    }
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyObject* called_by_python(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 5) {
    PyErr_SetString(PyExc_TypeError, "plain_call takes what, x, op, root and out");
    return nullptr;
  }
  const auto& bound = *static_cast<const Bound*>(PyCapsule_GetPointer(self, nullptr));
  if (PyList_GET_SIZE(bound.beside.ptr()) > 0) Py_RETURN_NOTIMPLEMENTED;
  if (PyObject* const result = call_bound(bound, arguments)) return result;
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (trace) PyException_SetTraceback(value, trace);
  // `failed` finds out what the failure means to the group, and raises what the user gets.
  PyObject* const raised = PyObject_CallFunctionObjArgs(bound.failed.ptr(), value, nullptr);
  Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(trace);
  return raised;
}

}  // namespace

py::object plain_calls(py::object group, double timeout_s, py::list beside, py::function failed, py::dict libraries, int device) {
  static PyMethodDef definition{"plain_call", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(called_by_python)),
                                METH_FASTCALL, nullptr};
  auto bound = std::make_unique<Bound>(
      Bound{group, group.cast<Group*>(), timeout_s, std::move(beside), std::move(failed), std::move(libraries), device});
  const py::capsule self(bound.get(), nullptr,
                         [](PyObject* capsule) { delete static_cast<Bound*>(PyCapsule_GetPointer(capsule, nullptr)); });
  (void)bound.release();
  return py::reinterpret_steal<py::object>(PyCFunction_New(&definition, self.ptr()));
}

}  // namespace mscomm
