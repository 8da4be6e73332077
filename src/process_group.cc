#include "src/process_group.h"

#include <datetime.h>

#include <utility>

#include "src/calls.h"
#include "src/errors.h"
#include "src/group.h"
#include "src/python.h"

namespace mscomm {

namespace {

struct Names {
  PyObject* reduce_op = PyUnicode_InternFromString("reduceOp");
  PyObject* async_op = PyUnicode_InternFromString("asyncOp");
  PyObject* timeout = PyUnicode_InternFromString("timeout");
  PyObject* requires_grad = PyUnicode_InternFromString("requires_grad");
  PyObject* profiling = PyUnicode_InternFromString("_is_profiler_enabled");
};

py::object attribute(PyObject* of, PyObject* name) {
  return taken(stopping_at_exit([&] { return PyObject_GetAttr(of, name); }));
}

bool equal(PyObject* one, PyObject* other) {
  const int whether = stopping_at_exit([&] { return PyObject_RichCompareBool(one, other, Py_EQ); });
  if (whether < 0) throw py::error_already_set();
  return whether != 0;
}

double seconds(PyObject* delta) {
  return 86'400.0 * PyDateTime_DELTA_GET_DAYS(delta) + PyDateTime_DELTA_GET_SECONDS(delta) +
         1e-6 * PyDateTime_DELTA_GET_MICROSECONDS(delta);
}

PyObject* all_reduce(PyObject* known, PyObject* const* given, Py_ssize_t count) {
  static const Names& names = *new Names;
  if (count != 3) return PyErr_Format(PyExc_TypeError, "mscomm: 3 arguments are needed, not %zd", count);
  return guarded([&]() -> PyObject* {
    PyObject *const core = given[0], *const tensors = given[1], *const options = given[2];
    const auto knows = [known](Py_ssize_t i) { return PyTuple_GET_ITEM(known, i); };
    const auto leave = [] { return py::none().release().ptr(); };
    if (reinterpret_cast<PyObject*>(Py_TYPE(options)) != knows(0) || !PyList_CheckExact(tensors) || PyList_GET_SIZE(tensors) != 1)
      return leave();
    auto tensor = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(tensors, 0));
    if (!attribute(knows(2), names.profiling).is(py::handle(Py_False))) return leave();
    if (!equal(attribute(options, names.reduce_op).ptr(), knows(1))) return leave();
    Calls& calls = py::handle(core).cast<Group&>().ready();
    auto array = plain_on_host(calls, std::move(tensor));
    // The caller sends complex numbers as pairs of real numbers. Every rank must do the same.
    if (!array || !array->library || *array->dtype == Dtype::complex64 || *array->dtype == Dtype::complex128) return leave();
    if (!attribute(array->given.ptr(), names.requires_grad).is(py::handle(Py_False))) return leave();
    const py::object timeout = attribute(options, names.timeout);
    if (!PyDelta_Check(timeout.ptr())) return leave();
    const double limit_s = seconds(timeout.ptr());  // 0 and less stand for the group's
    const bool async_op = attribute(options, names.async_op).is(py::handle(Py_True));
    return sum_in_place(calls, *std::move(array), limit_s > 0 ? limit_s : calls.timeout_s, async_op).release().ptr();
  });
}

}  // namespace

py::object usual_all_reduce(const py::object& options, const py::object& sum, const py::object& profiler) {
  PyDateTime_IMPORT;
  if (!PyDateTimeAPI) throw py::error_already_set();
  static PyMethodDef definition{"usual_all_reduce", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(all_reduce)),
                                METH_FASTCALL, nullptr};
  return py::reinterpret_steal<py::object>(PyCFunction_New(&definition, py::make_tuple(options, sum, profiler).ptr()));
}

}  // namespace mscomm
