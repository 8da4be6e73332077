// Converts Python objects to bytes and back. python/mscomm/packing.py says what these bytes promise.
#pragma once

#include <pybind11/pybind11.h>

namespace mscomm {

inline constexpr int max_depth = 128;  // how deep containers may be nested

// Returns the bytes of an object. converted(part) returns a tuple for each part that this file does not know: whether the part
// stays one object if it occurs several times, its kind (below 256), and the values from which the reader creates it. Only the
// values of kind 0 may contain containers. Objects of the class `fields`, which is derived from dict, are written as dicts.
pybind11::bytes pack_object(pybind11::object obj, const pybind11::function& converted, const pybind11::type& fields);

// Returns the object that pack_object() has converted to these bytes. make(kind, values) makes a part from what converted()
// returned for it. may_be_shared(part) tells whether a part may occur several times. Raises ValueError if pack_object() does not
// write such bytes.
pybind11::object unpack_object(const pybind11::buffer& data, const pybind11::function& make,
                               const pybind11::function& may_be_shared);

}  // namespace mscomm
