// The short way into the collectives, for plain arrays: NumPy's, and those of the group's device.
#pragma once

#include <pybind11/pybind11.h>

namespace mscomm {

// function(what, x, op, root, out) -> out, or a new array if out is None, for the Group that is given: all_reduce, all_gather,
// reduce_scatter, broadcast, all_to_all (what: the collective's number; root: -1 where there is none), and barrier, whose x and
// out are not looked at. It takes plain NumPy arrays, of which it touches nothing but their fields, and arrays on the device of
// that number, whose exact type is in `libraries`: type -> (plain, empty, written) of python/mscomm/arrays/__init__.py. For
// whatever else, wrong arguments too, and while `beside` is not empty, it returns NotImplemented and has done nothing. What a
// call raises is given to `failed`, which raises what the user gets.
pybind11::object plain_calls(pybind11::object group, double timeout_s, pybind11::list beside, pybind11::function failed,
                             pybind11::dict libraries, int device);

}  // namespace mscomm
