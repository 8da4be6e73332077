// The collective functions of mscomm, as the user calls them.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "src/group.h"

namespace mscomm {

// The function of that collective, for Python. A function in C saves a quarter of the time of a small call. `model` is a function
// in Python with the same name, parameters and docstring. It is called with arguments that do not fit, and raises TypeError.
py::object collective_function(Collective what, const py::function& model, const std::string& signature);

// The group of a call without `group`: an object of the class Group here, or None before init and after release.
void set_world(py::object core);

}  // namespace mscomm
