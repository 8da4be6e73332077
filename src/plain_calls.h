// The short way into the collectives, a fast path for plain arrays: NumPy's, and those on the group's device.
#pragma once

#include <pybind11/pybind11.h>

namespace mscomm {

// Returns function(what, x, op, root, out) -> out, or a new array if out is None. It makes the calls all_reduce, all_gather,
// reduce_scatter, broadcast, all_to_all and barrier on this Group. what: the collective's number; root: -1 if the collective has
// none. A barrier ignores x and out.
//
// The function takes plain NumPy arrays, whose fields it reads directly, and arrays on the device with that number, if their
// exact type is in `libraries`: type -> (plain, empty, written), as in python/mscomm/arrays/__init__.py. For anything else,
// including wrong arguments, and while `beside`, the list of started calls, is not empty, it does nothing and returns
// NotImplemented. It hands an exception of the call to `failed`, which raises what the user gets.
pybind11::object plain_calls(pybind11::object group, double timeout_s, pybind11::list beside, pybind11::function failed,
                             pybind11::dict libraries, int device);

}  // namespace mscomm
