// Converts between mscomm::Error and Python exceptions. `kind` names the class of the exception (python/mscomm/errors.py). If a
// bound function takes an Error, Python code passes an exception. If a bound function returns an Error, Python code gets an
// exception.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <exception>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "src/python.h"

namespace pybind11::detail {

template <>
struct type_caster<mscomm::Error> {
  static constexpr auto name = const_name("Error");
  template <typename>
  using cast_op_type = const mscomm::Error&;

  bool load(handle source, bool) {
    if (!isinstance(source, mscomm::attribute_of("mscomm.errors", "Error"))) return false;
    error.emplace(source.attr("kind").cast<std::string>(), std::string(str(source)),
                  source.attr("ranks").cast<std::vector<int>>(), source.attr("waiting_for").cast<std::vector<int>>());
    return true;
  }
  operator const mscomm::Error&() const { return *error; }

  static handle cast(const mscomm::Error& error, return_value_policy, handle) {
    const object make = mscomm::attribute_of("mscomm.errors", "make");
    return mscomm::call_python(make, error.kind, error.what(), error.ranks, error.waiting_for).release();
  }

  std::optional<mscomm::Error> error;
};

}  // namespace pybind11::detail

namespace mscomm {

// Sets the Python exception. An Error of the kind ValueError, RuntimeError or MemoryError becomes the built-in exception of that
// name, and one of the kind Cancelled becomes Python's CancelledError.
inline void raise(const Error& error) {
  if (error.kind == "ValueError") return PyErr_SetString(PyExc_ValueError, error.what());
  if (error.kind == "RuntimeError") return PyErr_SetString(PyExc_RuntimeError, error.what());
  if (error.kind == "MemoryError") return PyErr_SetString(PyExc_MemoryError, error.what());
  if (error.kind == "Cancelled") return PyErr_SetString(attribute_of("concurrent.futures", "CancelledError").ptr(), error.what());
  const auto made = pybind11::cast(error);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
}

// Calls a function, and returns its result. Throws an Error as the Python exception that it stands for.
template <typename Function>
auto raising(const Function& function) {
  try {
    return function();
  } catch (const Error& error) {
    raise(error);  // raise() runs Python code, in which a signal handler may raise another exception
    throw pybind11::error_already_set();
  }
}

// Calls the body of a function that Python calls without pybind11, and returns its result. If the body throws, sets the Python
// exception and returns nullptr.
template <typename Body>
PyObject* guarded(const Body& body) {
  try {
    return raising(body);
  } catch (pybind11::error_already_set& error) {
    error.restore();
  } catch (const pybind11::builtin_exception& error) {
    error.set_error();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

}  // namespace mscomm
