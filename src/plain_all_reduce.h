// The short way into all_reduce, for plain NumPy arrays.
#pragma once

#include <pybind11/pybind11.h>

namespace mscomm {

// function(x, op, out) -> out, or a new array if out is None, for the Group that is given. It takes plain NumPy arrays and
// touches nothing but their fields; for whatever else, wrong arguments too, it returns NotImplemented and has done nothing.
pybind11::object plain_all_reduce(pybind11::object group, double timeout_s);

}  // namespace mscomm
