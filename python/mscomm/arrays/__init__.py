"""Array libraries: one module for each. The package that an array's type comes from says which module it is.

A library module has

* `is_array(x)`: whether mscomm takes x;
* `memory(x)` -> a numpy.ndarray over x's memory, with any strides, read-only if x cannot be written. If there is no
  such memory, as for a tensor on a device that this backend does not reach, it raises TypeError with words that can
  follow "x";
* `new(x, shape)` -> C-contiguous memory for a result of x's type, dtype and device, and a function that makes the
  result from the memory when the memory has been filled;
* `over(memory)`, if the library's arrays can be written -> an array over the memory of a C-contiguous numpy.ndarray;
* `written((x,))`, if the library wants to know that the memory of x was written;
* `of_numpy(numbers)`, if its tensors can be in objects (PACKABLE) -> a tensor on the CPU with the shape, dtype and
  numbers of a writable numpy.ndarray in C order, which the caller does not use any more.

If the library has arrays on devices, `memory` returns an `OnDevice` of device.py for them, and the module also has

* `packed(x)` -> x, or a copy of x in C order, which is enqueued on the current stream;
* `assign(out, made)`: enqueues a copy of made to out on the current stream;
* `on_host(x)` -> a numpy.ndarray with the numbers that x has after the work on the current stream;
* `from_host(x, numbers)` -> an array on x's device with the shape, dtype and numbers of a numpy.ndarray, which may be
  changed after the call;
* `namespace`, if mscomm may compute with the arrays: it has the library's `isfinite`, `clip`, `where` and dtypes;
* `used(x)`, if the library may reuse freed memory on another stream: tells it that the current stream has used x.

To make its calls cheap, it may also have (src/calls.cc reads the rows of `plain_types`)

* `PLAIN`: its array types, without subclasses, each with the backend that reaches arrays of that type on a device;
* `plain`: the type's `__dlpack_c_exchange_api__`, or a function: `plain(x)` -> (address, shape, the dtype's number,
  device, current stream), with device -1 for the CPU. It returns None if the elements of x do not lie one after the
  other or cannot be written; then `memory` describes x;
* `pending`, with an exchange API: the dtype's number -> functions that say whether x has other numbers than its memory;
* `empty(x, shape)` -> an array of x's type, dtype and device, in C order.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from mscomm.arrays.device import OnDevice

# For the top-level package of an array's type, the name of the module in this folder.
LIBRARIES = {
    "numpy": "numpy",
    "torch": "torch",
    "jax": "jax",
    "jaxlib": "jax",
    "mindspore": "mindspore",
    "cupy": "cupy",
}

# The libraries whose tensors can be in Python objects.
PACKABLE = ("torch", "jax", "mindspore")

_found: dict[type, ModuleType] = {}


class Plain(NamedTuple):
    """What makes calls on arrays of one type cheap (see above). backend: the one for such arrays on a device."""

    plain: Any
    empty: Callable[[Any, tuple[int, ...]], Any]
    written: Callable[[tuple[Any]], None] | None
    backend: str
    pending: dict[int, tuple[Callable[[Any], bool], ...]]


plain_types: dict[type, Plain] = {}
"""The rows of the array types that were seen so far. The core keeps pointers into a row, so no row is replaced."""
_NOTHING: dict[int, tuple[Callable[[Any], bool], ...]] = {}


def names(x: Any) -> Iterator[str]:
    """The libraries that the type of x and its base classes come from."""
    for kind in type(x).__mro__:
        name = LIBRARIES.get(kind.__module__.partition(".")[0])
        if name is not None:
            yield name


def library(x: Any, argument: str, function: str) -> ModuleType:
    """The module for x's array library; TypeError, naming the function and its argument, if there is none."""
    try:
        return _found[type(x)]
    except KeyError:
        pass
    for name in (*names(x), "numpy", "cuda", "dlpack"):  # "numpy" takes Python's numbers
        module = importlib.import_module(f"mscomm.arrays.{name}")
        if module.is_array(x):
            backend = getattr(module, "PLAIN", {}).get(type(x))
            if backend is not None and module.plain is not None:
                written, pending = getattr(module, "written", None), getattr(module, "pending", _NOTHING)
                plain_types.setdefault(type(x), Plain(module.plain, module.empty, written, backend, pending))
            return _found.setdefault(type(x), module)
    known = ", ".join(dict.fromkeys(LIBRARIES.values()))
    raise TypeError(
        f"{function}: {argument} is a {type(x).__name__}, not an array; give it as np.asarray({argument})"
        f" (known libraries: {known})"
    )


def memory_anywhere(x: Any, argument: str, function: str) -> np.ndarray[Any, Any]:
    """The memory of an array on the CPU, or an OnDevice for an array on a device.

    Raises TypeError, naming the function and its argument, if x is no array or its memory cannot be reached. Raises
    OverflowError for an int of more than 64 bits.
    """
    if type(x) is np.ndarray:  # the usual case first: small calls take only microseconds
        return x
    arrays = library(x, argument, function)
    try:
        return arrays.memory(x)  # type: ignore[no-any-return]
    except (TypeError, OverflowError) as error:
        kind = OverflowError if isinstance(error, OverflowError) else TypeError
        raise kind(f"{function}: {argument} {error}") from None


def new(function: str, x: Any, shape: tuple[int, ...]) -> tuple[np.ndarray[Any, Any], Callable[[], Any]]:
    """Memory for a result of x's type, dtype and device, and a function that makes the result of the filled memory.

    Raises TypeError, naming the function, if mscomm cannot make arrays of x's library.
    """
    try:
        return library(x, "x", function).new(x, shape)  # type: ignore[no-any-return]
    except TypeError as error:
        raise TypeError(f"{function}: {error}") from None


def packed(function: str, argument: str, x: Any) -> OnDevice:
    """The memory of x, an array on a device, or of a copy of x in C order. The memory keeps its array alive."""
    arrays = library(x, argument, function)
    try:
        return arrays.memory(arrays.packed(x))  # type: ignore[no-any-return]
    except TypeError as error:
        raise TypeError(f"{function}: {argument}: {error}") from None


def packable(x: Any) -> str | None:
    """The library of x, if x is a tensor of exactly the type that the library's of_numpy makes; else None."""
    name = next(names(x), None)
    if name not in PACKABLE:
        return None
    module = importlib.import_module(f"mscomm.arrays.{name}")
    return name if module.is_array(x) and type(x) is type(module.of_numpy(np.zeros(1, np.int8))) else None


def on_cpu(x: Any) -> np.ndarray[Any, Any]:
    """The memory of a tensor on the CPU. For other tensors, raises TypeError with words that can follow "x"."""
    there = library(x, "x", "on_cpu").memory(x)
    if isinstance(there, OnDevice):
        raise TypeError(f"is on device {there.index}; copy it to the CPU first")
    return there  # type: ignore[no-any-return]


def on_host(x: Any, argument: str, function: str) -> np.ndarray[Any, Any]:
    """The numbers of x: its memory if x is on the CPU, else a copy, made after the work on the current stream."""
    there = memory_anywhere(x, argument, function)
    if not isinstance(there, OnDevice):
        return there
    try:
        return library(x, argument, function).on_host(x)  # type: ignore[no-any-return]
    except TypeError as error:
        raise TypeError(f"{function}: {argument}: {error}") from None


def fill(x: Any, numbers: np.ndarray[Any, Any], argument: str, function: str) -> None:
    """Write numbers of x's shape into x, wherever its memory is; they are converted to its dtype."""
    there = memory_anywhere(x, argument, function)
    if not isinstance(there, OnDevice):
        there[...] = numbers
        return
    if not there.flags.writeable:
        raise TypeError(f"{function}: {argument} is read-only")
    arrays = library(x, argument, function)
    try:
        arrays.assign(x, arrays.from_host(x, numbers.astype(there.dtype, copy=False)))
    except TypeError as error:
        raise TypeError(f"{function}: {argument}: {error}") from None


def assigned(out: Any, made: Any) -> Any:
    """Copy `made`, an array of out's library, to `out`, and return `out`. If that cannot be written, return `made`."""
    if isinstance(out, np.ndarray):
        out[...] = made
        return out
    assign = getattr(_library_of_its_own(out), "assign", None)
    if assign is None:
        return made
    assign(out, made)
    return out


def beside(x: Any, numbers: np.ndarray[Any, Any]) -> Any:
    """If x is on a device, the numbers as an array of x's library on that device; otherwise the numbers unchanged."""
    arrays = _library_of_its_own(x)
    if arrays is None or not isinstance(arrays.memory(x), OnDevice):
        return numbers
    return arrays.from_host(x, numbers)


def _library_of_its_own(x: Any) -> ModuleType | None:
    """The module of x's library. None for NumPy's arrays, for numbers, and for arrays known by a protocol alone."""
    return library(x, "x", "library") if next(names(x), "numpy") != "numpy" else None


def written_all(arrays: tuple[Any, ...]) -> None:
    for x in arrays:
        written(x)


def written(x: Any) -> None:
    """Tell x's library that the memory of x was written, if the library wants to know."""
    if type(x) is not np.ndarray:
        tell = getattr(library(x, "x", "written"), "written", None)
        if tell is not None:
            tell((x,))
