// Calls Python code below frames of C++.
#pragma once

#include <cxxabi.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

namespace mscomm {

namespace py = pybind11;

inline bool python_is_ending() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// Calls a function that may ask for the GIL, such as one that runs Python code, and returns its result.
//
// If a daemon thread asks for the GIL while the process is exiting, Python before 3.14 ends the thread by unwinding its stack.
// Frames of C++ must not be unwound then: some are noexcept, and some have destructors that release Python objects without the
// GIL. So the thread stops here, and waits until the process has ended. From Python 3.14 on, Python itself lets such a thread
// wait. The function must not have objects with destructors, because they would be destroyed before the thread stops.
template <typename Function>
auto stopping_at_exit(const Function& function) {
#if PY_VERSION_HEX < 0x030E0000 && defined(__GLIBCXX__)
  try {
    return function();
  } catch (abi::__forced_unwind&) {
    while (true) pause();
  }
#else
  return function();
#endif
}

// Takes ownership of a reference that a Python C API function has returned. Throws the Python exception if the reference is null.
inline py::object taken(PyObject* result) {
  if (!result) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

// Runs the handlers of signals that have arrived, and from Python 3.12 on also the garbage collector. Throws what they raise.
inline void check_signals() {
  if (stopping_at_exit([] { return PyErr_CheckSignals(); }) != 0) throw py::error_already_set();
}

// Calls a Python function, and returns its result. Code of the core calls all Python functions in this way, or with
// stopping_at_exit().
template <typename... Arguments>
py::object call_python(const py::object& function, Arguments&&... arguments) {
  const py::tuple given = py::make_tuple(std::forward<Arguments>(arguments)...);
  return taken(stopping_at_exit([&] { return PyObject_CallObject(function.ptr(), given.ptr()); }));
}

// Calls a Python function with one argument. Needs no tuple.
inline py::object call_python(PyObject* function, PyObject* argument) {
  return taken(stopping_at_exit([&] { return PyObject_CallOneArg(function, argument); }));
}

// Returns an attribute, such as a function, of a Python module. Our own modules have already been loaded, except in some tests.
inline py::object attribute_of(const char* module, const char* attribute) {
  const auto name = taken(PyUnicode_InternFromString(module));
  auto loaded = py::reinterpret_steal<py::object>(PyImport_GetModule(name.ptr()));
  if (!loaded) loaded = taken(stopping_at_exit([&] { return PyImport_Import(name.ptr()); }));
  return loaded.attr(attribute);
}

}  // namespace mscomm
