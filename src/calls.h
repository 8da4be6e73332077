// The way of a collective call from Python into the core: what the user gave is described, checked once, and run.
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
  std::array<Py_ssize_t, max_dims + 1> extents{};  // of more than max_dims dimensions, only `dims` counts

  bool operator==(const Shape& other) const;
  uint64_t count() const;
  uint64_t row() const;  // elements of one row, a step along axis 0
};

// What an array library offers for arrays of one type: a row of `plain_types` in python/mscomm/arrays/__init__.py.
struct Library {
  PyObject *plain, *empty, *written, *backend, *pending;
};

// An array, as its library describes it.
struct Array {
  py::object given;   // what the user gave
  py::object memory;  // a numpy.ndarray over its memory; empty: nobody has asked for one yet
  py::object packed;  // a copy in C order, which is read instead; empty: the array is in C order
  char* begin = nullptr;
  const char* source = nullptr;  // what is read: begin, or the copy
  std::optional<Dtype> dtype{};  // nullopt: the core does not move such elements
  Shape shape{};
  size_t bytes = 0;
  bool in_order = true;  // aligned elements in C order, without gaps
  bool writable = true;
  int device = -1;                       // -1: the CPU, or a device whose number the library does not tell
  PyObject* backend = nullptr;           // the backend that reaches the device; nullptr: the CPU
  std::optional<StreamHandle> stream{};  // of a device: the call runs in its order
  bool chosen = false;                   // the user chose the stream; otherwise it is the library's current one
  std::optional<Library> library{};
};

// A checked call, and the objects that must live until it has ended.
struct PreparedCall {
  Call call;
  std::optional<Array> x, target;
  py::object out;         // what the user gets; with `finish` and no `assigned`, finish makes it
  py::object out_memory;  // a strided out: result() copies the target there
  py::object finish;      // makes an array of the user's library over the target
  bool assigned = false;  // result() copies what finish makes to out
  py::object written;     // is told that out was written

  // Keeps the memory, too, if the user gives an array another one while the call runs.
  void hold_memory();
  // What the user gets. To be called once, when the call has ended without an error.
  py::object result();
  // Whether result() calls Python, so that other threads may run meanwhile.
  bool python_makes_result() const { return finish || assigned || out_memory || written; }
};

// What the calls of a group have in common.
struct Calls {
  Group* group;
  py::handle core;  // the object of *group in Python
  double timeout_s;
  py::object python;   // a weak reference to the Group of python/mscomm/group.py, whose methods are called
  py::dict libraries;  // the type of an array -> Library
  py::str backend;     // of the device that this rank has joined with; "": none
  int device;
  bool noted;                                       // Python is asked for the number of each call, and told when it has ended
  std::vector<std::shared_ptr<Started>> running{};  // works.h; some may have ended
};

// The Group of python/mscomm/group.py; None if it is gone.
py::object python_of(const Calls& calls);
// The argument `timeout` of a call, in seconds.
double seconds_of(py::handle timeout);

// What a call is, beside its arrays.
struct Wanted {
  Function function;
  Collective what;
  py::handle op{}, root{}, stream{};  // as the user gave them; null: none
  std::string_view out_argument = "out";
  // Rows of each rank, if they differ. For all_to_all a table: a line for each sender, a column for each receiver.
  std::optional<std::vector<uint64_t>> rows{};
  uint64_t digest = 0;
  bool head = false;
};

// The functions below throw TypeError and ValueError, which name the function and the argument.

// The array, checked as the x of a call.
Array described(const Calls& calls, Function function, std::string_view argument, py::object given, py::handle stream);
int checked_root(const Calls& calls, Function function, py::handle root);
Op checked_op(Function function, py::handle op);
// The shape of the part that a rank gets of an array that is divided equally.
Shape part_of(const Calls& calls, Function function, const Shape& shape);

// The call on x, which is nullopt in a barrier, and in a scatter on ranks that are not the root. There, `told` is the shape and
// the dtype of the root's x. out: None makes a new array like x.
PreparedCall prepared(const Calls& calls, const Wanted& wanted, std::optional<Array>&& x, py::object out,
                      const std::optional<std::pair<Shape, Dtype>>& told = {});

// A numpy.ndarray over the array's memory.
py::object memory_of(const Array& array);
Shape shape_of(py::handle tuple);
py::tuple as_tuple(const Shape& shape);

// Makes the collective on what the user gave, and returns the result, or with async_op a Work. timeout: null takes the group's.
py::object call(Calls& calls, const Wanted& wanted, py::object x, py::object out, py::handle timeout, bool async_op);

}  // namespace mscomm
