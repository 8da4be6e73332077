// The functions of mscomm that the user calls and that are implemented in C++, to save time: the collectives, send and recv.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "src/group.h"

namespace mscomm {

// Creates the Python function for a collective. The function is implemented in C++, which saves a third of the CPU instructions
// of a small call. `model` is a function written in Python, with the same name, parameters and docstring. If the arguments of a
// call do not match the parameters, the C++ function calls `model`, which raises TypeError.
py::object collective_function(Collective what, const py::function& model, const std::string& signature);

// Creates the Python function send (if `sends` is true) or recv. The C++ function also leaves all unusual calls to `model`.
py::object message_function(bool sends, const py::function& model, const std::string& signature);

// Sets the group for all calls without a `group` argument. core: an mscomm._core.Group, or None before init and after release.
void set_world(py::object core);

}  // namespace mscomm
