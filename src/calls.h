// Takes a collective call from Python into the core: describes the user's arrays, checks the arguments once, and runs the call.
#pragma once

#include <pybind11/numpy.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "base/call.h"
#include "device/runtime.h"

namespace mscomm {

namespace py = pybind11;

struct Group;
struct Started;

struct Shape {
  int dims = 0;
  std::array<Py_ssize_t, max_dims + 1> extents{};  // valid only if dims <= max_dims

  bool operator==(const Shape& other) const;
  uint64_t count() const;
  uint64_t row() const;  // the number of elements in one row: in one step along axis 0
};

// What an array library offers for arrays of one type. The fields are those of a row of `plain_types` in
// python/mscomm/arrays/__init__.py.
struct Library {
  PyObject *plain, *empty, *written, *backend, *pending;
};

// An array, as its library describes it.
struct Array {
  py::object given;   // what the user gave
  py::object memory;  // a numpy.ndarray over the memory of `given`; empty: not made yet
  py::object packed;  // a copy in C order, from which the call reads; empty: the call needs no copy
  char* begin = nullptr;
  const char* source = nullptr;  // where the call reads: `begin`, or the memory of `packed`
  std::optional<Dtype> dtype{};  // nullopt: the core does not support this element type
  Shape shape{};
  size_t bytes = 0;
  bool in_order = true;  // whether the elements are aligned, and lie in C order without gaps
  bool writable = true;
  int device = -1;                       // -1: the CPU, or a device whose number the library does not tell
  PyObject* backend = nullptr;           // the backend that reaches the device; nullptr: the CPU
  std::optional<StreamHandle> stream{};  // for an array on a device: the stream in whose order the call runs
  bool chosen = false;                   // true: the user chose the stream; false: it is the library's current stream
  std::optional<Library> library{};
};

// A checked call, and the objects that must live until it has ended.
struct PreparedCall {
  Call call;
  std::optional<Array> x, target;
  py::object out;         // what the user gets; if `finish` is set and `assigned` is false, result() makes it
  py::object out_memory;  // the memory of a strided `out`, to which result() copies the target
  py::object finish;      // a Python function that makes an array of the user's library over the target
  bool assigned = false;  // whether result() copies to `out` what `finish` makes, or without `finish` the target
  py::object written;     // a Python function, to call when `out` has been written

  // Keeps the memory of x and of the target alive until the call has ended, even if the user gives one of these arrays other
  // memory meanwhile.
  void hold_memory();
  // Returns what the user gets. Call it once, after the call has ended without an error.
  py::object result();
  // Whether result() calls Python, so that other threads may run meanwhile.
  bool python_makes_result() const { return finish || assigned || out_memory || written; }
  // Visits every object that this call holds, for the garbage collector.
  int traverse(visitproc visit, void* arg) const;
};

// What the calls of a group have in common.
struct Calls {
  Group* group;
  py::handle core;  // the Python object that holds *group
  double timeout_s;
  py::object python;   // a weak reference to the Group of python/mscomm/group.py; the core calls methods of this Group
  py::dict libraries;  // from the type of an array to the fields of Library
  py::str backend;     // the backend of the device with which this rank has joined; "": no device
  int device;
  // whether the core asks Python for the number of each call, and tells Python when the call has ended
  bool noted;
  std::vector<std::shared_ptr<Started>> running{};  // the started calls and messages (see works.h), of which some may have ended
  std::vector<std::shared_ptr<Started>> failed{};   // calls whose start failed, but which the device may have begun
};

// Returns the Group of python/mscomm/group.py, or None if this Group no longer exists.
py::object python_of(const Calls& calls);
// Converts the argument `timeout` of a call to seconds.
double seconds_of(py::handle timeout);

// A call without its arrays x and out.
struct Wanted {
  Function function;
  Collective what;
  py::handle op{}, root{}, stream{};  // as the user gave them; null: not given
  std::string_view out_argument = "out";
  // The number of rows of each rank, if the numbers differ. For all_to_all: a table with a line for each sender and a column for
  // each receiver.
  std::optional<std::vector<uint64_t>> rows{};
  uint64_t digest = 0;
  bool head = false;
};

// For wrong arguments, the functions below throw a TypeError or ValueError that names the function and the argument.

// Describes the array `given`, and checks it as the x of a call.
Array described(const Calls& calls, Function function, std::string_view argument, py::object given, py::handle stream);
int checked_root(const Calls& calls, Function function, py::handle root);
Op checked_op(Function function, py::handle op);
// Divides an array of the given shape into equal parts, one for each rank. Returns the shape of one part.
Shape part_of(const Calls& calls, Function function, const Shape& shape);

// Checks x and out, and prepares the call. x is nullopt in a barrier. x may also be nullopt in a scatter on a rank that is not
// the root; then `told` is the shape and the dtype of the root's x. If out is None, the call makes a new array like x.
PreparedCall prepared(const Calls& calls, const Wanted& wanted, std::optional<Array>&& x, py::object out,
                      const std::optional<std::pair<Shape, Dtype>>& told = {});

// Returns a numpy.ndarray over the memory of the array.
py::object memory_of(const Array& array);
Shape shape_of(py::handle tuple);
py::tuple as_tuple(const Shape& shape);

// Checks the arguments that the user gave, and runs the call. Returns the result or, with async_op, a Work. A null timeout stands
// for the group's timeout.
py::object call(Calls& calls, const Wanted& wanted, py::object x, py::object out, py::handle timeout, bool async_op);

}  // namespace mscomm
