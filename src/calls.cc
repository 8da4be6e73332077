#include "src/calls.h"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

#include "base/reduce.h"
#include "src/dlpack.h"
#include "src/group.h"
#include "src/python.h"
#include "src/works.h"

namespace mscomm {

namespace {

using Numpy = py::detail::npy_api;

// Our types in the order of NumPy's type numbers, from NPY_BOOL, which is 0, to NPY_HALF, which is 23. The numbers are part of
// NumPy's ABI. bfloat16 has no fixed number.
constexpr auto dtype_of_number = [] {
  using enum Dtype;
  constexpr auto none = std::nullopt;
  return std::array<std::optional<Dtype>, 24>{boolean, int8,  uint8,  int16,   uint16,  int32, uint32,    int64,
                                              uint64,  int64, uint64, float32, float64, none,  complex64, complex128,
                                              none,    none,  none,   none,    none,    none,  none,      float16};
}();
static_assert(dtype_of_number[Numpy::NPY_ULONGLONG_] == Dtype::uint64 &&
              dtype_of_number[Numpy::NPY_CDOUBLE_] == Dtype::complex128 && dtype_of_number.back() == Dtype::float16);
static_assert(std::endian::native == std::endian::little && sizeof(long) == 8 && sizeof(int) == 4 && sizeof(short) == 2);

std::string text(std::string_view function, std::string_view what) { return std::string(function).append(": ").append(what); }

[[noreturn]] void type_error(Function function, std::string_view what) { throw py::type_error(text(name(function), what)); }
[[noreturn]] void value_error(Function function, std::string_view what) { throw py::value_error(text(name(function), what)); }

std::string shown(py::handle object) {
  return taken(stopping_at_exit([&] { return PyObject_Repr(object.ptr()); })).cast<std::string>();
}

// -- describing the user's arrays

// Returns whether the object is exactly a numpy.ndarray. Instances of subclasses, such as masked arrays, do not count.
bool is_numpy(py::handle object) { return Py_TYPE(object.ptr()) == Numpy::get().PyArray_Type_; }

const auto* fields(py::handle array) { return py::detail::array_proxy(array.ptr()); }

std::optional<Dtype> native_dtype(py::handle array) {
  const auto* descriptor = py::detail::array_descriptor_proxy(fields(array)->descr);
  const int number = descriptor->type_num;
  if (number < 0 || number >= static_cast<int>(dtype_of_number.size()) || descriptor->byteorder == '>') return std::nullopt;
  return dtype_of_number[number];
}

// Fills in `array` from the fields of `memory`, a numpy.ndarray that describes CPU or device memory.
void read_fields(Array& array, py::handle memory) {
  const auto* told = fields(memory);
  constexpr int in_order = Numpy::NPY_ARRAY_C_CONTIGUOUS_ | Numpy::NPY_ARRAY_ALIGNED_;
  array.begin = told->data;
  array.in_order = (told->flags & in_order) == in_order;
  array.writable = (told->flags & Numpy::NPY_ARRAY_WRITEABLE_) != 0;
  array.shape.dims = told->nd;
  std::copy_n(told->dimensions, std::min<size_t>(told->nd, array.shape.extents.size()), array.shape.extents.begin());
  array.bytes = array.dtype && told->nd <= max_dims ? array.shape.count() * size_of(*array.dtype) : 0;
}

// Fills in `array` from the tuple (address, shape, dtype, device, stream) that `function` (Library::plain) returns. Returns
// false if `function` returns something else, such as None, or if the core cannot use the dtype or the number of dimensions.
bool read_told(Array& array, PyObject* function) {
  const py::object told = call_python(function, array.given.ptr());
  const auto item = [&](Py_ssize_t i) { return PyTuple_GET_ITEM(told.ptr(), i); };
  if (!PyTuple_Check(told.ptr()) || PyTuple_GET_SIZE(told.ptr()) != 5 || !PyTuple_Check(item(1))) return false;
  const Py_ssize_t dims = PyTuple_GET_SIZE(item(1));
  if (dims > max_dims) return false;
  array.begin = static_cast<char*>(PyLong_AsVoidPtr(item(0)));
  const long dtype = PyLong_AsLong(item(2));
  if (PyErr_Occurred()) throw py::error_already_set();
  if (dtype < 0 || dtype >= static_cast<long>(dtypes.size())) return false;
  array.dtype = static_cast<Dtype>(dtype);
  array.device = static_cast<int>(PyLong_AsLong(item(3)));
  if (array.device >= 0) array.stream = PyLong_AsVoidPtr(item(4));
  array.shape.dims = static_cast<int>(dims);
  for (Py_ssize_t i = 0; i < dims; i++) array.shape.extents[i] = PyLong_AsSsize_t(PyTuple_GET_ITEM(item(1), i));
  if (PyErr_Occurred()) throw py::error_already_set();
  return true;
}

// Fills in `array` using the fast path that its library offers for arrays in C order. Returns false if this array must be read in
// another way.
bool read_plain(Array& array, const Library& library) {
  const bool by_exchange = PyCapsule_CheckExact(library.plain);
  if (!(by_exchange ? read_by_exchange(array, library.plain) : read_told(array, library.plain))) return false;
  const py::int_ dtype(static_cast<int>(*array.dtype));
  if (PyObject* const pending = PyDict_GetItemWithError(library.pending, dtype.ptr()))
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(pending); i++)
      if (call_python(PyTuple_GET_ITEM(pending, i), array.given.ptr()).is(py::handle(Py_True))) return false;
  array.bytes = array.shape.count() * size_of(*array.dtype);
  if (array.bytes && !array.begin) return false;
  array.backend = array.stream ? library.backend : nullptr;
  array.library = library;
  return std::bit_cast<uintptr_t>(array.begin) % std::min<size_t>(size_of(*array.dtype), 8) == 0;
}

std::optional<Library> library_of(const Calls& calls, py::handle array) {
  PyObject* const row = PyDict_GetItemWithError(calls.libraries.ptr(), reinterpret_cast<PyObject*>(Py_TYPE(array.ptr())));
  if (!row) {
    if (PyErr_Occurred()) throw py::error_already_set();
    return std::nullopt;
  }
  const auto item = [&](Py_ssize_t i) { return PyTuple_GET_ITEM(row, i); };
  return Library{item(0), item(1), item(2), item(3), item(4), item(5), item(6)};
}

void read_memory(Array& array, py::object memory) {
  array.memory = std::move(memory);
  array.dtype = native_dtype(array.memory);
  if (!array.dtype) {
    const py::object code = call_python(attribute_of("mscomm.arrays.numpy", "known_code"), array.memory.attr("dtype"));
    if (!code.is_none()) array.dtype = static_cast<Dtype>(code.cast<int>());
  }
  read_fields(array, array.memory);
  if (!py::isinstance(array.memory, attribute_of("mscomm.arrays.device", "OnDevice"))) return;
  array.backend = array.memory.attr("backend").ptr();  // array.memory keeps this object alive
  array.device = array.memory.attr("index").cast<int>();
  array.stream = reinterpret_cast<StreamHandle>(array.memory.attr("stream").cast<uintptr_t>());
}

// Describes an array that the user passed. Does not check whether the call can use the array.
Array read(const Calls& calls, std::string_view function, std::string_view argument, py::object given) {
  Array array{.given = std::move(given)};
  if (is_numpy(array.given) && (array.dtype = native_dtype(array.given))) {
    read_fields(array, array.given);
    return array;
  }
  if (const auto library = library_of(calls, array.given))
    if (read_plain(array, *library)) return array;
  array = Array{.given = std::move(array.given)};
  read_memory(array, call_python(attribute_of("mscomm.arrays", "memory_anywhere"), array.given, argument, function));
  return array;
}

// Returns a new numpy.ndarray with the dtype of `ndarray`.
Array new_like(py::handle ndarray, const Shape& shape, Dtype dtype) {
  const auto& api = Numpy::get();
  PyObject* const descriptor = py::handle(fields(ndarray)->descr).inc_ref().ptr();
  const auto* const extents = reinterpret_cast<const Py_intptr_t*>(shape.extents.data());
  PyObject* const made =
      api.PyArray_NewFromDescr_(api.PyArray_Type_, descriptor, shape.dims, extents, nullptr, nullptr, 0, nullptr);
  Array array{.given = taken(made), .dtype = dtype};
  read_fields(array, array.given);
  return array;
}

std::string shape_text(const Array& array) {
  return shown(array.shape.dims > max_dims ? memory_of(array).attr("shape").cast<py::tuple>() : as_tuple(array.shape));
}

std::string dtype_text(const Array& array) {
  return array.dtype ? std::string(name(*array.dtype)) : py::str(memory_of(array).attr("dtype")).cast<std::string>();
}

std::string where(const Array& array) {
  if (!array.backend) return "on the CPU";
  return "on device " + std::to_string(array.device) + " of " + py::str(py::handle(array.backend)).cast<std::string>();
}

// Returns the address of the first byte of a strided array, and the address just past its last byte.
std::pair<const char*, const char*> bounds(const Array& array) {
  const char *begin = array.begin, *end = array.begin;
  if (array.in_order) return {begin, begin + array.bytes};
  const py::object memory = memory_of(array);
  const auto* told = fields(memory);
  for (int i = 0; i < told->nd; i++) {
    if (told->dimensions[i] == 0) return {begin, begin};
    const Py_ssize_t span = (told->dimensions[i] - 1) * told->strides[i];
    (span < 0 ? begin : end) += span;
  }
  return {begin, end + py::array::ensure(memory).itemsize()};
}

bool may_overlap(const Array& x, const Array& y) {
  const auto [x_begin, x_end] = bounds(x);
  const auto [y_begin, y_end] = bounds(y);
  return x_begin < x_end && y_begin < y_end && x_begin < y_end && y_begin < x_end;
}

bool overlap(const Array& x, const Array& y) {
  if (!may_overlap(x, y)) return false;
  if (x.in_order && y.in_order) return true;
  return call_python(attribute_of("numpy", "shares_memory"), memory_of(x), memory_of(y)).cast<bool>();
}

bool same_strides(const Array& x, const Array& y) {
  if (x.in_order && y.in_order) return true;
  const py::object one = memory_of(x), other = memory_of(y);
  return std::equal(fields(one)->strides, fields(one)->strides + x.shape.dims, fields(other)->strides);
}

// Returns whether the smaller of the two arrays is the part of the larger one that begins at element `place`. If both have the
// same shape, this means that they are the same memory with the same strides.
bool lies_in_place(const Array& x, const Array& out, uint64_t place) {
  if (x.shape == out.shape && place == 0) return x.begin == out.begin && same_strides(x, out);
  const auto& [shorter, longer] = x.bytes <= out.bytes ? std::tie(x, out) : std::tie(out, x);
  return x.in_order && out.in_order && shorter.begin == longer.begin + place * size_of(*x.dtype);
}

StreamHandle stream_of(Function function, std::string_view argument, const Array& array, py::handle given) {
  if (!array.backend) type_error(function, "stream is for arrays on a device, but " + std::string(argument) + " is on the CPU");
  if (!array.in_order) value_error(function, "with stream= " + std::string(argument) + " must be in C order");
  const py::object handle = py::reinterpret_steal<py::object>(stopping_at_exit([&] { return PyNumber_Index(given.ptr()); }));
  if (!handle) {
    PyErr_Clear();
    type_error(function, "stream " + shown(given) + " is not an integer, the handle of a stream");
  }
  const StreamHandle stream = PyLong_AsVoidPtr(handle.ptr());
  if (PyErr_Occurred()) throw py::error_already_set();  // the integer is too large for a handle
  return stream;
}

bool equal(py::handle one, py::handle other) { return one.is(other) || one.equal(other); }

void check_device(const Calls& calls, Function function, std::string_view argument, Array& array) {
  if (!array.backend) return;
  if (array.device == calls.device && array.device >= 0 && equal(array.backend, calls.backend)) return;
  const py::object memory = memory_of(array);
  call_python(calls.python().attr("check_device"), name(function), argument, memory);
  array.device = memory.attr("index").cast<int>();  // the library did not report the device's number
}

void check_defined(const Calls& calls, Function function, Dtype dtype, Op op, bool on_device) {
  if (!supports(dtype, op))
    type_error(function, std::string(name(op)) + " is not defined on " + std::string(name(dtype)) + " arrays");
  const std::string why = on_device ? calls.group->communicator->refuses(dtype, op) : "";
  if (!why.empty()) type_error(function, why + ". Every operation can reduce arrays on the CPU");
}

// Returns the root as a number. If it is not an int, or not a rank of the group, Python's checked_rank converts it or raises
// the error.
int checked_root(const Calls& calls, Function function, py::handle root) {
  if (root && PyLong_CheckExact(root.ptr())) {
    int overflow = 0;
    const long rank = PyLong_AsLongAndOverflow(root.ptr(), &overflow);  // -1 if the integer is too large
    if (rank >= 0 && rank < calls.group->communicator->size()) return static_cast<int>(rank);
  }
  const py::object given = root ? py::reinterpret_borrow<py::object>(root) : py::none();
  return call_python(attribute_of("mscomm.arguments", "checked_rank"), name(function), "root", given, calls.python()).cast<int>();
}

// -- choosing the memory of the result

// The shape of a rank's result. If x and the result may share memory, `place` says where the smaller of these two arrays begins
// in the larger one.
struct Share {
  Shape shape;
  std::optional<uint64_t> place;  // the index of an element of the larger array; nullopt if the arrays must not share memory
};

uint64_t sum(const std::vector<uint64_t>& rows, size_t first, size_t number, size_t stride = 1) {
  uint64_t total = 0;
  for (size_t i = 0; i < number; i++) total += rows[first + i * stride];
  return total;
}

Share share_of(const Wanted& wanted, const Shape& whole, size_t me, size_t n) {
  const Collective what = wanted.what;
  if (!divides(what) && !gathers(what)) return {whole, 0};
  Shape shape = whole;
  auto& extent = shape.extents[0];
  uint64_t before = 0;  // the total number of rows of all lower ranks
  if (wanted.rows) {
    const auto& rows = *wanted.rows;
    if (what == Collective::all_to_all) {
      extent = wanted.recv_rows ? sum(*wanted.recv_rows, 0, n) : sum(rows, me, n, n);
    } else {
      before = sum(rows, 0, me);
      extent = gathers(what) ? sum(rows, 0, n) : rows[me];
    }
  } else if (gathers(what)) {
    if (shape.dims == 0) return {Shape{1, {static_cast<Py_ssize_t>(n)}}, me};
    before = me * extent;
    if (__builtin_mul_overflow(extent, n, &extent))
      value_error(wanted.function, "the result would have more rows than this machine can count");
  } else {
    if (shape.dims == 0 || extent % n != 0) {
      const std::string rows = shape.dims ? "axis 0 of " + shown(as_tuple(shape)) : "a scalar";
      value_error(wanted.function, rows + " cannot be divided into " + std::to_string(n) +
                                       " equal parts, one for each rank; see " + std::string(name(wanted.function)) + "_v");
    }
    if (what == Collective::all_to_all) return {shape, 0};
    extent /= n;
    before = me * extent;
  }
  return {shape, before * shape.row()};
}

// Refuses a call that needs new memory, but has a stream that the user chose. The library would allocate the memory for the
// library's current stream. Earlier work on the current stream may still be using this memory, and the chosen stream does not
// wait for that work.
[[noreturn]] void refuse_new_memory(Function function) {
  type_error(function, "with stream=, also pass out=, in C order and not overlapping x");
}

// Creates an array of this shape for the result, with the library and dtype of `like`.
void make_target(PreparedCall& ready, const Calls& calls, Function function, const Array& like, const Shape& shape) {
  if (like.chosen) refuse_new_memory(function);
  Array& target = ready.target.emplace();
  if (is_numpy(like.given)) {
    target = new_like(like.given, shape, *like.dtype);
  } else if (like.library) {
    const py::tuple extents = as_tuple(shape);
    target = read(calls, name(function), "out", taken(stopping_at_exit([&] {
                    return PyObject_CallFunctionObjArgs(like.library->empty, like.given.ptr(), extents.ptr(), nullptr);
                  })));
  } else {
    const py::tuple made = call_python(attribute_of("mscomm.arrays", "new"), name(function), like.given, as_tuple(shape));
    target.given = made[0];
    read_memory(target, target.given);
    ready.finish = made[1];
  }
}

// Returns the function to call when the array has been written, or null.
py::object written_of(const Array& out) {
  if (is_numpy(out.given)) return {};
  const auto is_tracked = [&](PyObject* attribute) {
    return attribute != Py_None &&
           taken(stopping_at_exit([&] { return PyObject_GetAttr(out.given.ptr(), attribute); })).is(py::handle(Py_True));
  };
  if (!out.library || is_tracked(out.library->tracked)) return attribute_of("mscomm.arrays", "written_all");
  return out.library->written == Py_None ? py::object() : py::reinterpret_borrow<py::object>(out.library->written);
}

// Checks that the result can be written to ready.out, and makes ready.out the target of the call. If ready.out is not in C order,
// the target is new memory, and PreparedCall::result() copies its contents to ready.out. reads_x: whether this rank's x is read;
// if not, out may overlap x.
void take_out(PreparedCall& ready, const Calls& calls, const Wanted& wanted, const Share& share, Dtype dtype, bool reads_x) {
  const Function function = wanted.function;
  const auto argument = [&] { return std::string(wanted.out_argument); };
  const bool is_x = ready.x && !ready.x->packed && ready.out.is(ready.x->given);
  Array& out = ready.target.emplace(is_x ? *ready.x : read(calls, name(function), wanted.out_argument, ready.out));
  if (out.shape != share.shape)
    value_error(function, argument() + " has shape " + shape_text(out) + ", the result has " + shown(as_tuple(share.shape)));
  if (out.dtype != dtype)
    type_error(function, argument() + " has dtype " + dtype_text(out) + ", x has " + std::string(name(dtype)));
  if (!out.writable) type_error(function, argument() + " is read-only");
  if (!out.in_order) call_python(attribute_of("mscomm.arrays.numpy", "check_out"), name(function), argument(), memory_of(out));
  if (ready.x) {
    const Array& x = *ready.x;
    if (out.backend && out.device < 0) check_device(calls, function, wanted.out_argument, out);
    const bool same_place =
        x.device == out.device && (x.backend == out.backend || (x.backend && out.backend && equal(x.backend, out.backend)));
    if (!same_place)
      type_error(function, argument() + " is " + where(out) + ", x is " + where(x) + "; both must be on the same device");
    const bool same = share.place == uint64_t{0} && ready.out.is(x.given) && x.shape == out.shape;
    if (reads_x && !same && overlap(x, out) && !(share.place && lies_in_place(x, out, *share.place)))
      value_error(function, "x and " + argument() + " overlap, but not as a call in place allows; pass " + argument() +
                                " with its own memory");
    out.stream = x.stream;
    out.chosen = x.chosen;
  } else {
    check_device(calls, function, wanted.out_argument, out);
    if (wanted.stream) out.stream = stream_of(function, wanted.out_argument, out, wanted.stream), out.chosen = true;
  }
  ready.written = written_of(out);
  if (out.in_order) return;
  if (out.backend) {
    const Array strided = std::move(out);
    make_target(ready, calls, function, ready.x ? *ready.x : strided, share.shape);
    ready.target->stream = strided.stream;
    ready.assigned = true;
  } else {
    ready.out_memory = memory_of(out);
    ready.target = new_like(ready.out_memory, share.shape, dtype);
  }
}

}  // namespace

bool Shape::operator==(const Shape& other) const {
  return dims == other.dims && dims <= max_dims && std::equal(extents.begin(), extents.begin() + dims, other.extents.begin());
}

uint64_t Shape::row() const {
  uint64_t elements = 1;
  for (size_t i = 1; i < static_cast<size_t>(dims); i++) elements *= static_cast<uint64_t>(extents[i]);
  return elements;
}

py::tuple as_tuple(const Shape& shape) {
  py::tuple extents(shape.dims);
  for (int i = 0; i < shape.dims; i++)
    PyTuple_SET_ITEM(extents.ptr(), i, taken(PyLong_FromSsize_t(shape.extents[i])).release().ptr());
  return extents;
}

double seconds_of(py::handle timeout, std::string_view function, bool may_be_zero) {
  if (PyLong_CheckExact(timeout.ptr()) || PyFloat_CheckExact(timeout.ptr())) {
    const double seconds = PyFloat_AsDouble(timeout.ptr());
    if (seconds > 0) return seconds;
    PyErr_Clear();
  }
  return call_python(attribute_of("mscomm.cluster.deadline", "seconds_of"), timeout, function, "timeout", may_be_zero)
      .cast<double>();
}

py::object memory_of(const Array& array) {
  if (array.memory) return array.memory;
  if (is_numpy(array.given)) return array.given;
  return call_python(attribute_of("mscomm.arrays", "memory_anywhere"), array.given, "x", "mscomm");
}

Shape shape_of(py::handle tuple) {
  Shape shape;
  for (const auto& extent : tuple) {
    if (shape.dims == max_dims) throw py::value_error("mscomm: arrays have at most 12 dimensions");
    shape.extents[shape.dims++] = extent.cast<Py_ssize_t>();
  }
  return shape;
}

static_assert(max_dims == 12);  // error messages in this file and in dlpack.cc say 12

std::optional<Array> plain_on_host(const Calls& calls, py::object given) {
  Array array{.given = std::move(given)};
  if (is_numpy(array.given) && (array.dtype = native_dtype(array.given))) {
    read_fields(array, array.given);
    return array.in_order && array.shape.dims <= max_dims ? std::optional(std::move(array)) : std::nullopt;
  }
  const auto library = library_of(calls, array.given);
  return library && read_plain(array, *library) && !array.backend ? std::optional(std::move(array)) : std::nullopt;
}

Array described(const Calls& calls, Function function, std::string_view argument, py::object given, py::handle stream) {
  Array array = read(calls, name(function), argument, std::move(given));
  if (array.shape.dims > max_dims)
    value_error(function, std::string(argument) + " has " + std::to_string(array.shape.dims) +
                              " dimensions, arrays have at most 12 dimensions; reshape this one");
  if (array.backend && (function == Function::scan || function == Function::exscan))
    type_error(function,
               "x is on a device, and neither NCCL nor HCCL has a " + std::string(name(function)) + "; copy it to the CPU");
  check_device(calls, function, argument, array);
  if (stream) array.stream = stream_of(function, argument, array, stream), array.chosen = true;
  if (!array.dtype)
    call_python(attribute_of("mscomm.arrays.numpy", "checked_code"), name(function), argument,
                memory_of(array).attr("dtype"));  // raises
  if (!array.in_order) {
    if (!array.backend) array.packed = taken(Numpy::get().PyArray_NewCopy_(memory_of(array).ptr(), 0 /* NPY_CORDER */));
    else array.packed = call_python(attribute_of("mscomm.arrays", "packed"), name(function), argument, array.given);
  }
  return array;
}

Shape part_of(const Calls& calls, Function function, const Shape& shape) {
  return share_of({.function = function, .what = Collective::scatter}, shape, 0, calls.group->communicator->size()).shape;
}

Op checked_op(Function function, py::handle given) {
  if (!given) given = Py_None;
  static const auto& interned = *new auto([] {
    std::array<PyObject*, ops.size()> names;
    // The names are literals, so they end with a NUL.
    std::ranges::transform(ops, names.begin(), [](std::string_view op) { return PyUnicode_InternFromString(op.data()); });
    return names;
  }());
  // A name in a program's text is interned, too. So it is the same object, and need not be compared letter by letter.
  if (const auto same = std::ranges::find(interned, given.ptr()); same != interned.end())
    return static_cast<Op>(same - interned.begin());
  const auto is_given = [&](std::string_view op) { return PyUnicode_CompareWithASCIIString(given.ptr(), op.data()) == 0; };
  const auto found = PyUnicode_Check(given.ptr()) ? std::ranges::find_if(ops, is_given) : ops.end();
  if (found == ops.end()) {
    std::string known;
    for (const auto& op : ops) known.append(known.empty() ? "" : ", ").append(op);
    value_error(function, "op " + shown(given) + " is not one of " + known);
  }
  return static_cast<Op>(found - ops.begin());
}

PreparedCall prepared(const Calls& calls, const Wanted& wanted, std::optional<Array>&& x, py::object out,
                      const std::optional<std::pair<Shape, Dtype>>& told) {
  const Collective what = wanted.what;
  const Function function = wanted.function;
  const size_t n = calls.group->communicator->size(), me = calls.group->communicator->rank();
  PreparedCall ready;
  Call& call = ready.call;
  Signature& signature = call.signature;
  signature = {.what = what, .dtype = Dtype::boolean, .digest = wanted.digest, .function = function, .head = wanted.head};
  if (what == Collective::barrier) return ready;
  ready.x = std::move(x);
  if (!ready.x && !told) type_error(function, "x is None");
  const Shape& shape = ready.x ? ready.x->shape : told->first;
  const Dtype dtype = ready.x ? *ready.x->dtype : told->second;
  const bool on_device = ready.x && ready.x->backend;
  signature.dtype = dtype;
  if (reduces(what)) {
    signature.op = checked_op(function, wanted.op);
    check_defined(calls, function, dtype, signature.op, on_device);
    if (scans(what) && signature.op == Op::avg)
      value_error(function, "op avg would divide by a different number on each rank; use sum, and divide the result yourself");
  }
  if (rooted(what) || wanted.root) signature.root = checked_root(calls, function, wanted.root);
  const bool at_root = signature.root == static_cast<int>(me);
  const Share share = share_of(wanted, shape, me, n);

  const bool reads_x = what != Collective::scatter || at_root;
  if (at_root || (what != Collective::reduce && what != Collective::gather)) {
    ready.out = std::move(out);
    if (ready.out.is_none() && !ready.x)
      ready.out = call_python(attribute_of("mscomm.arrays.numpy", "empty"), as_tuple(share.shape), static_cast<int>(dtype));
    if (ready.out.is_none()) {
      make_target(ready, calls, function, *ready.x, share.shape);
      ready.out = ready.target->given;
    } else {
      take_out(ready, calls, wanted, share, dtype, reads_x);
    }
    call.out = ready.target->begin;
    call.out_bytes = ready.target->bytes;
    call.stream = ready.target->stream;
  }
  if (ready.x && reads_x) {
    Array& source = *ready.x;
    if (what == Collective::all_to_all && on_device && !source.packed && may_overlap(source, *ready.target)) {
      // On a device, parts of the result can arrive before all parts of x have been sent. So x is copied if it overlaps the
      // result.
      if (source.chosen) refuse_new_memory(function);
      source.packed = call_python(calls.python().attr("apart"), name(function), source.given, memory_of(source));
    }
    call.x = source.packed ? fields(source.packed)->data : source.begin;
    call.x_bytes = source.bytes;
    call.stream = source.stream;
  }
  signature.device = call.stream.has_value();

  signature.dims = static_cast<uint8_t>(shape.dims);
  std::copy_n(shape.extents.begin(), shape.dims, signature.shape);
  if (wanted.rows) {
    // In an uneven all_gather, gather or all_to_all, the number of rows of x differs between the ranks, but the signature must
    // be the same on all ranks. So axis 0 of the signature's shape is the total number of rows, or 0 for all_to_all.
    if (gathers(what)) signature.shape[0] = share.shape.extents[0];
    if (what == Collective::all_to_all) signature.shape[0] = 0;
    const uint64_t row = shape.row();
    call.counts = *wanted.rows;
    if (wanted.recv_rows) call.recv_counts = *wanted.recv_rows;
    for (auto* counts : {&call.counts, &call.recv_counts})
      for (uint64_t& count : *counts) count *= row;
  }
  signature.count = 1;
  for (size_t i = 0; i < signature.dims; i++) signature.count *= signature.shape[i];
  return ready;
}

void PreparedCall::hold_memory() {
  for (auto* array : {&x, &target}) {
    if (!*array || (*array)->memory || (*array)->held) continue;
    Array& one = **array;
    const bool quick = one.library && !one.backend && one.library->held != Py_None;
    (quick ? one.held : one.memory) = quick ? call_python(one.library->held, one.given.ptr()) : memory_of(one);
  }
}

int PreparedCall::traverse(visitproc visit, void* arg) const {
  for (const auto* array : {&x, &target}) {
    if (!*array) continue;
    Py_VISIT((*array)->given.ptr());
    Py_VISIT((*array)->memory.ptr());
    Py_VISIT((*array)->packed.ptr());
    Py_VISIT((*array)->held.ptr());
  }
  Py_VISIT(out.ptr());
  Py_VISIT(out_memory.ptr());
  Py_VISIT(finish.ptr());
  Py_VISIT(written.ptr());
  return 0;
}

py::object PreparedCall::result() {
  if (finish || assigned) {
    const py::object made = finish ? call_python(finish) : target->given;
    if (assigned) call_python(attribute_of("mscomm.arrays", "assigned"), out, made);
    else out = made;
  }
  if (out_memory && Numpy::get().PyArray_CopyInto_(out_memory.ptr(), target->given.ptr()) < 0) throw py::error_already_set();
  if (written) {
    const py::tuple one = py::make_tuple(out);
    call_python(written.ptr(), one.ptr());
  }
  return out;
}

std::unique_ptr<CallNumbers> reserved(const Calls& calls, int count) {
  auto numbers = std::make_unique<CallNumbers>(*calls.group->communicator, count);
  numbers->enter();  // before Python runs, and with it a signal handler
  for (int i = 0; calls.noted && i < count; i++) call_python(calls.python().attr("noted"), numbers->next() + i);
  return numbers;
}

void run(const Calls& calls, Call&& call, double timeout_s, CallNumbers* numbers) {
  std::unique_ptr<CallNumbers> one;
  if (calls.noted && !numbers) {
    calls.group->communicator->check(call);  // a refused call must not use up a number
    one = reserved(calls, 1);
  }
  calls.group->called([&] { calls.group->communicator->run(std::move(call), timeout_s, one ? one.get() : numbers); });
}

namespace {

// Runs the call or, with async_op, starts it. Returns the result, or a Work.
py::object carried_out(Calls& calls, PreparedCall ready, double timeout_s, bool async_op) {
  if (async_op) return py::cast(start(calls, std::make_shared<PreparedCall>(std::move(ready)), timeout_s, nullptr, false));
  if (!calls.running.empty()) forget_ended(calls);
  // If calls.noted is true, hold the Group, because its function ended() is called after the call.
  const py::object python = calls.noted ? calls.python() : py::object();
  failing(calls, [&] { run(calls, std::move(ready.call), timeout_s); });
  if (python) call_python(python.attr("ended"));
  return ready.result();
}

}  // namespace

py::object call(Calls& calls, const Wanted& wanted, py::object x, py::object out, py::handle timeout, bool async_op) {
  std::optional<Array> given;
  if (wanted.what != Collective::barrier) given.emplace(described(calls, wanted.function, "x", std::move(x), wanted.stream));
  auto ready = prepared(calls, wanted, std::move(given), std::move(out));
  return carried_out(calls, std::move(ready), timeout ? seconds_of(timeout, name(wanted.function)) : calls.timeout_s, async_op);
}

py::object sum_in_place(Calls& calls, Array array, double timeout_s, bool async_op) {
  array.shape = {1, {static_cast<Py_ssize_t>(array.shape.count())}};
  if (array.library) array.library->written = array.library->tracked = Py_None;
  py::object out = array.given;
  static PyObject* const sum = PyUnicode_InternFromString("sum");
  const Wanted wanted{.function = Function::all_reduce, .what = Collective::all_reduce, .op = sum};
  auto ready = prepared(calls, wanted, std::move(array), std::move(out));
  return carried_out(calls, std::move(ready), timeout_s, async_op);
}

py::object message(Calls& calls, bool sends, int peer, int64_t tag, Array array, py::handle timeout, bool async_op) {
  const double timeout_s = timeout ? seconds_of(timeout, sends ? "send" : "recv") : calls.timeout_s;
  const Message one{sends, peer, tag, *array.dtype, array.begin, array.bytes};
  PreparedCall ready;
  if (!sends) {
    ready.out = array.given;
    ready.written = written_of(array);
  }
  (sends ? ready.x : ready.target) = std::move(array);
  if (async_op) {
    const auto kept = std::make_shared<PreparedCall>(std::move(ready));
    return py::cast(failing(calls, [&] { return start(calls, kept, one, Deadline(timeout_s)); }));
  }
  if (!calls.running.empty()) forget_ended(calls);
  failing(calls, [&] { calls.group->called([&] { calls.group->communicator->run({&one, 1}, Deadline(timeout_s)); }); });
  return ready.result();
}

}  // namespace mscomm
