"""Converts the state of a training run, such as the results of state_dict(), to text and arrays. In this form, the
state can be written to safetensors files and sent to other ranks."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mscomm.arrays import names, on_host
from mscomm.arrays.numpy import readable
from mscomm.train import trees

PREFIX = "mscomm.state."  # the names of a state's arrays begin with this; the other arrays in a file are weights


def to_text(state: Any) -> tuple[str, dict[str, np.ndarray[Any, Any]]]:
    """Convert a state to (text, arrays): JSON that refers to arrays by name, and a dict of these arrays.

    A state can contain None, bool, int, float, str, list, tuple, dict, arrays of a known library, and NumPy scalars.
    from_text returns NumPy scalars as arrays. For any other object, raise a TypeError that says where the object is in
    the state.
    """
    arrays: dict[str, np.ndarray[Any, Any]] = {}

    def write(x: Any, where: str) -> Any:
        if isinstance(x, np.generic):
            x = np.asarray(x)
        if x is None or isinstance(x, bool | int | float | str):
            return x
        if isinstance(x, list):
            return [write(one, f"{where}[{i}]") for i, one in enumerate(x)]
        if isinstance(x, tuple):
            return {"tuple": [write(one, f"{where}[{i}]") for i, one in enumerate(x)]}
        if isinstance(x, Mapping):  # keys need not be strings: PyTorch uses the indices of parameters
            return {"dict": [[write(key, f"a key of {where}"), write(x[key], f"{where}[{key!r}]")] for key in x]}
        if next(names(x), None) is not None:
            name = f"{PREFIX}{len(arrays)}"
            arrays[name] = on_host(x, where, "checkpoint")
            return {"array": name}
        raise TypeError(f"checkpoint: {where} is a {type(x).__name__}; a checkpoint holds numbers, text and arrays")

    return json.dumps(write(state, "state"), separators=(",", ":")), arrays


def from_text(text: str, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Any:
    """Return the state that to_text converted, with NumPy arrays. Raise ValueError if `text` has another form."""

    def read(x: Any) -> Any:
        if isinstance(x, list):
            return [read(one) for one in x]
        if not isinstance(x, dict):
            return x
        ((kind, content),) = x.items()
        if kind == "tuple":
            return tuple(read(one) for one in content)
        if kind == "dict":
            return {read(key): read(value) for key, value in content}
        if kind == "array":
            return arrays[content]
        raise ValueError(kind)

    try:
        return read(json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"this is not a training state: {text!r:.100}") from error


def copied(state: Any) -> Any:
    """Return a copy of the state, with NumPy arrays."""
    text, arrays = to_text(state)
    return from_text(text, {name: x.copy() for name, x in arrays.items()})


def checksum_of(state: Any) -> int:
    """Return the CRC-32 of a whole state."""
    text, arrays = to_text(state)
    return zlib.crc32(repr([text, *(checksum(x, name, "checkpoint") for name, x in arrays.items())]).encode())


def entries(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield (path, item) for each item of a nested state, except containers. path: the keys and indices that lead to
    the item."""
    if isinstance(state, Mapping):
        for key in state:
            yield from entries(state[key], (*path, key))
    elif isinstance(state, list | tuple):
        for number, one in enumerate(state):
            yield from entries(one, (*path, number))
    else:
        yield path, state


def with_arrays(state: Any, convert: Any) -> Any:
    """Return a copy of the state in which each NumPy array x is replaced by convert(x)."""
    return trees.mapped(state, lambda x: convert(x) if isinstance(x, np.ndarray) else x)


def checksum(x: Any, argument: str, function: str) -> int:
    """Return the CRC-32 of an array's dtype, shape and bits in C order. The array may be on the CPU or on a device.

    For a number or a string, return the CRC-32 of its repr. For any other object, return the CRC-32 of the repr of its
    type. argument, function: names for the error message if an array cannot be read.
    """
    if next(names(x), None) is None or not (hasattr(x, "dtype") and hasattr(x, "shape")):
        return zlib.crc32(repr(x if isinstance(x, bool | int | float | str | None) else type(x)).encode())
    array = readable(on_host(np.asarray(x) if isinstance(x, np.generic) else x, argument, function))
    return zlib.crc32(array.reshape(-1).view(np.uint8).data, zlib.crc32(f"{array.dtype} {array.shape}".encode()))
