// Passes a collective call from Python to the core: describes the user's arrays, checks the arguments once, and runs the call.
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
class CallNumbers;

struct Shape {
  int dims = 0;
  std::array<Py_ssize_t, max_dims + 1> extents{};  // valid only if dims <= max_dims

  bool operator==(const Shape& other) const;
  uint64_t count() const { return dims ? extents[0] * row() : 1; }
  uint64_t row() const;  // the number of elements in one row; the length of axis 0 is the number of rows
};

// What an array library offers for arrays of one type. The fields are the same as in a row of `plain_types` in
// python/mscomm/arrays/__init__.py.
struct Library {
  PyObject *plain, *empty, *written, *tracked, *backend, *pending, *held;
};

// An array that the user passed, as its library describes it.
struct Array {
  py::object given;     // what the user passed
  py::object memory{};  // a numpy.ndarray over the memory of `given`; empty if not created yet
  py::object packed{};  // a copy in C order, from which the call reads; empty if the call needs no copy
  py::object held{};    // what Library::held has returned for `given`; empty if not called
  char* begin = nullptr;
  std::optional<Dtype> dtype{};  // nullopt if the core does not support this element type
  Shape shape{};
  size_t bytes = 0;
  bool in_order = true;  // whether the elements are aligned, and lie in C order without gaps
  bool writable = true;
  int device = -1;                       // -1 for the CPU, or for a device whose number the library does not report
  PyObject* backend = nullptr;           // the backend of the device, as a Python str; nullptr for the CPU
  std::optional<StreamHandle> stream{};  // for a device array: the stream with which the call is synchronized
  bool chosen = false;                   // whether the user chose the stream; if not, it is the library's current stream
  std::optional<Library> library{};
};

// A checked call, and the objects that must live until it has completed.
struct PreparedCall {
  Call call;
  std::optional<Array> x, target;
  py::object out = py::none();  // what the user gets; if `finish` is set and `assigned` is false, result() creates it
  py::object out_memory;        // the memory of a strided `out`, to which result() copies the target
  py::object finish;            // a Python function that creates an array of the user's library over the target
  bool assigned = false;        // whether result() copies the target (if `finish` is set, the array that it creates) to `out`
  py::object written;           // a Python function to call when `out` has been written

  // Keeps the memory of x and of the target alive until the call has completed, even if the user assigns different memory to one
  // of these arrays in the meantime.
  void hold_memory();
  // Returns what the user gets. Call this once, after the call has completed without an error.
  py::object result();
  // Returns whether only result() fills `out`, because the core writes the result to different memory.
  bool result_fills_out() const { return out_memory || assigned; }
  // Returns whether result() calls into Python. If it does, other threads may run in the meantime.
  bool python_makes_result() const { return finish || assigned || out_memory || written; }
  // Visits every object that this call holds, for the garbage collector.
  int traverse(visitproc visit, void* arg) const;
};

// What all calls of a group have in common.
struct Calls {
  Group* group;
  py::handle core;  // the Python object that holds *group
  double timeout_s;
  py::object python;   // a weak reference to the Group in python/mscomm/group.py, whose methods the core calls; python() is the
                       // Group, or None if it no longer exists
  py::dict libraries;  // maps the type of an array to the fields of Library
  py::str backend;     // the backend of this rank's device; "" if this rank has joined without a device
  int device;
  // Whether Python records or logs the group's calls. If so, the core tells Python the number of each call, before it runs the
  // call or after it has started it, and tells Python when a call has completed.
  bool noted;
  // The started calls and messages (see works.h), in no particular order. Some may have completed.
  std::vector<std::shared_ptr<Started>> running{};
  size_t looked_at = 0;                            // the index in `running` at which forget_ended() goes on
  std::vector<std::shared_ptr<Started>> failed{};  // failed calls; the device may still use their arrays
};

// Converts the `timeout` argument of a call to seconds.
double seconds_of(py::handle timeout, std::string_view function, bool may_be_zero = false);

// The parameters of a call, except its arrays x and out.
struct Wanted {
  Function function;
  Collective what;
  py::handle op{}, root{}, stream{};  // as the user passed them; null if not passed
  std::string_view out_argument = "out";
  // The number of rows of each rank, if the ranks may have different numbers. For all_to_all, n numbers for each sender, in rank
  // order: how many rows the sender sends to each of the n ranks.
  std::optional<std::vector<uint64_t>> rows{};
  // Only in an all_to_all in which each rank knows only its own numbers: how many rows this rank receives from each rank. `rows`
  // then holds how many rows it sends to each rank.
  std::optional<std::vector<uint64_t>> recv_rows{};
  uint64_t digest = 0;
  bool head = false;
};

// If an argument is wrong, the functions below throw a TypeError or ValueError that names the function and the argument.

// Describes the array `given`, and checks it as the x of a call.
Array described(const Calls& calls, Function function, std::string_view argument, py::object given, py::handle stream);
// Describes an array on the host whose elements lie in C order, if this takes no Python code of mscomm's. If not, returns
// nullopt.
std::optional<Array> plain_on_host(const Calls& calls, py::object given);
Op checked_op(Function function, py::handle op);
// Returns the shape of one part if an array of the given shape is divided into equal parts, one for each rank.
Shape part_of(const Calls& calls, Function function, const Shape& shape);

// Checks x and out, and prepares the call. x is nullopt in a barrier. In a scatter, x may also be nullopt on ranks other than the
// root. In that case, `told` holds the shape and dtype of the root's x. If out is None, the call creates a new array like x.
PreparedCall prepared(const Calls& calls, const Wanted& wanted, std::optional<Array>&& x, py::object out,
                      const std::optional<std::pair<Shape, Dtype>>& told = {});

// Returns a numpy.ndarray over the memory of the array.
py::object memory_of(const Array& array);
Shape shape_of(py::handle tuple);
py::tuple as_tuple(const Shape& shape);

// Reserves `count` call numbers and, if Python records the calls, tells Python these numbers.
std::unique_ptr<CallNumbers> reserved(const Calls& calls, int count);
// Runs the call. numbers: as in Communicator::run().
void run(const Calls& calls, Call&& call, double timeout_s, CallNumbers* numbers = nullptr);

// Checks the arguments that the user passed, and runs the call. Returns the result or, with async_op, a Work. If `timeout` is
// null, the group's timeout applies.
py::object call(Calls& calls, const Wanted& wanted, py::object x, py::object out, py::handle timeout, bool async_op);

// Sums the elements of the array over the ranks, in place, without telling its library that the array was written. The array is
// one that plain_on_host() has returned. Returns the array or, with async_op, a Work.
py::object sum_in_place(Calls& calls, Array array, double timeout_s, bool async_op);

// Sends the array, or receives into it. The arguments have been checked, except `timeout`. Returns None for a send, the array for
// a recv or, with async_op, a Work.
py::object message(Calls& calls, bool sends, int peer, int64_t tag, Array array, py::handle timeout, bool async_op);

}  // namespace mscomm
