#include "src/plain_all_reduce.h"

#include <algorithm>
#include <array>
#include <bit>
#include <memory>
#include <new>
#include <optional>
#include <string_view>

#include "base/reduce.h"
#include "src/group.h"

namespace mscomm {

namespace {

using Numpy = py::detail::npy_api;

// By NumPy's type numbers, which are part of its ABI. bfloat16 has none of its own.
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

// An array whose memory is the elements one after the other, as the core reads them.
struct Plain {
  const py::detail::PyArray_Proxy* array;
  Dtype dtype;
  size_t bytes;

  char* begin() const { return array->data; }
  bool has_shape_of(const Plain& other) const {
    return dtype == other.dtype && array->nd == other.array->nd &&
           std::equal(array->dimensions, array->dimensions + array->nd, other.array->dimensions);
  }
  bool apart_from(const Plain& other) const { return begin() + bytes <= other.begin() || other.begin() + other.bytes <= begin(); }
};

std::optional<Plain> plain(PyObject* object, int flags) {
  if (Py_TYPE(object) != Numpy::get().PyArray_Type_) return std::nullopt;  // no subclass: a masked array is one
  const auto* array = py::detail::array_proxy(object);
  const auto* descriptor = py::detail::array_descriptor_proxy(array->descr);
  const int number = descriptor->type_num;
  if ((array->flags & flags) != flags || number < 0 || number >= type_numbers || descriptor->byteorder == '>')
    return std::nullopt;
  const auto dtype = dtype_of_number[static_cast<size_t>(number)];
  if (!dtype || array->nd > max_dims) return std::nullopt;
  size_t bytes = size_of(*dtype);
  for (int i = 0; i < array->nd; i++) bytes *= static_cast<size_t>(array->dimensions[i]);
  return Plain{array, *dtype, bytes};
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

py::object all_reduce(Group& group, PyObject* x_object, PyObject* op_object, PyObject* out_object, double timeout_s) {
  constexpr int readable = Numpy::NPY_ARRAY_C_CONTIGUOUS_ | Numpy::NPY_ARRAY_ALIGNED_;
  constexpr int writable = readable | Numpy::NPY_ARRAY_WRITEABLE_;
  const py::object not_for_us = py::reinterpret_borrow<py::object>(Py_NotImplemented);
  const auto x = plain(x_object, readable);
  const auto op = op_of(op_object);
  if (!x || !op || !supports(x->dtype, *op)) return not_for_us;
  const auto& api = Numpy::get();
  py::object result = out_object == Py_None
                          ? py::reinterpret_steal<py::object>(api.PyArray_NewFromDescr_(
                                api.PyArray_Type_, py::handle(x->array->descr).inc_ref().ptr(), x->array->nd,
                                reinterpret_cast<const Py_intptr_t*>(x->array->dimensions), nullptr, nullptr, 0, nullptr))
                          : py::reinterpret_borrow<py::object>(out_object);
  if (!result) throw py::error_already_set();
  const auto out = plain(result.ptr(), writable);
  if (!out || !out->has_shape_of(*x) || (out_object != x_object && !out->apart_from(*x))) return not_for_us;

  Call call;
  call.signature.what = Collective::all_reduce;
  call.signature.function = Function::all_reduce;
  call.signature.dtype = x->dtype;
  call.signature.op = *op;
  call.signature.dims = static_cast<uint8_t>(x->array->nd);
  call.signature.count = x->bytes / size_of(x->dtype);
  for (int i = 0; i < x->array->nd; i++) call.signature.shape[i] = static_cast<uint64_t>(x->array->dimensions[i]);
  call.x = x->begin();
  call.x_bytes = x->bytes;
  call.out = out->begin();
  call.out_bytes = out->bytes;
  group.called([&] { group.communicator->run(std::move(call), timeout_s); });
  return result;
}

// What the function is bound to.
struct Bound {
  py::object owner;
  Group* group;
  double timeout_s;
};

PyObject* called_by_python(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  try {
    try {
      if (count != 3) throw py::type_error("plain_all_reduce takes x, op and out");
      const auto& bound = *static_cast<const Bound*>(PyCapsule_GetPointer(self, nullptr));
      return all_reduce(*bound.group, arguments[0], arguments[1], arguments[2], bound.timeout_s).release().ptr();
    } catch (const Error& error) {
      raise(error);  // by Python, where a signal's handler may raise something else
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

}  // namespace

py::object plain_all_reduce(py::object group, double timeout_s) {
  static PyMethodDef definition{"plain_all_reduce", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(called_by_python)),
                                METH_FASTCALL, nullptr};
  auto bound = std::make_unique<Bound>(Bound{group, group.cast<Group*>(), timeout_s});
  const py::capsule self(bound.get(), nullptr,
                         [](PyObject* capsule) { delete static_cast<Bound*>(PyCapsule_GetPointer(capsule, nullptr)); });
  (void)bound.release();
  return py::reinterpret_steal<py::object>(PyCFunction_New(&definition, self.ptr()));
}

}  // namespace mscomm
