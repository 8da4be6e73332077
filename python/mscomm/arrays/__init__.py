"""Gives access to arrays of many libraries. Each library has a module, which is selected by the array's type.

A library module has

* `is_array(x)`: whether mscomm accepts x;
* `memory(x)` -> a numpy.ndarray over x's memory. The array may have any strides, and is read-only if x cannot be
  written. If mscomm cannot reach x's memory, for example because no backend supports x's device, `memory` raises
  TypeError. The error's text continues a sentence that begins with "x", such as "x is on ...";
* `new(x, shape)` -> (memory, finish). `memory` is C-contiguous memory for a result of x's type, dtype and device. The
  caller fills the memory and then calls the function `finish`, which returns the result;
* `over(memory)`, if the library's arrays can be written -> an array over the memory of a C-contiguous numpy.ndarray;
* `written((x,))`, if the library must be told that mscomm has written the memory of x;
* `of_numpy(numbers)`, if mscomm can send the library's tensors in Python objects (PACKABLE) -> a tensor on the CPU with
  the shape, dtype and elements of `numbers`. `numbers` is a writable numpy.ndarray in C order, which the caller must
  not use afterwards.

If the library has arrays on devices, `memory` returns an `OnDevice` of device.py for them, and the module also has

* `packed(x)` -> x if it is in C order; otherwise a copy of x in C order, which is enqueued on the current stream;
* `assign(out, made)`: enqueues a copy of made to out on the current stream;
* `on_host(x)` -> a numpy.ndarray with the elements that x has when the work on the current stream has completed;
* `from_host(x, numbers)` -> an array on x's device with the shape, dtype and elements of the numpy.ndarray `numbers`.
  The caller may change `numbers` after the call;
* `namespace`, if mscomm may compute with the arrays: the module that has `isfinite`, `clip`, `where` and the dtypes;
* `used(x)`, if the library may reuse freed memory on another stream: tells the library that the current stream uses x.

To make calls on its arrays cheap, the module may also define the following names, which src/calls.cc finds in
`plain_types`:

* `PLAIN`: a dict with the library's array types (but not their subclasses) as keys. The value is the backend for arrays
  of that type on a device;
* `plain`: the type's `__dlpack_c_exchange_api__`, or a function: `plain(x)` -> (address, shape, the dtype's number,
  device, current stream), with device -1 for the CPU. If x is not contiguous or cannot be written, the function returns
  None, and mscomm calls `memory`;
* `pending`, if `plain` is an exchange API: a dict from a dtype's number to functions of x. Each function returns
  whether x's memory does not hold x's values in this dtype, for example because the library has deferred a negation.
  Then mscomm calls `memory`;
* `empty(x, shape)` -> an array of x's type, dtype and device, in C order;
* `held(x)`, if `memory` takes longer -> an object that keeps the memory of x on the CPU, even if the user assigns
  different memory to x;
* `written_untracked` and `TRACKED`, if the module has `written`: a faster function for each x whose attribute named
  TRACKED is not True.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from mscomm.arrays.device import OnDevice
from mscomm.arrays.numpy import with_values

# The top-level package of an array's type -> the name of a module in this folder.
LIBRARIES = {
    "numpy": "numpy",
    "torch": "torch",
    "jax": "jax",
    "jaxlib": "jax",
    "mindspore": "mindspore",
    "cupy": "cupy",
}

# The libraries whose tensors mscomm can send in Python objects.
PACKABLE = ("torch", "jax", "mindspore")

# Modules for arrays that are known only by a protocol. One array of a type may be on the CPU, another one on a device.
_PROTOCOLS = ("cuda", "dlpack")

_found: dict[type, ModuleType] = {}


class Plain(NamedTuple):
    """What a library's module defines to make calls on arrays of one type cheap; see the module docstring.

    written: the module's written_untracked. tracked: its TRACKED. backend: the backend for arrays of this type on a
    device.
    """

    plain: Any
    empty: Callable[[Any, tuple[int, ...]], Any]
    written: Callable[[tuple[Any]], None] | None
    tracked: str | None
    backend: str
    pending: dict[int, tuple[Callable[[Any], bool], ...]]
    held: Callable[[Any], Any] | None


plain_types: dict[type, Plain] = {}
"""A row for each array type that is in its library's PLAIN and has been used so far. The core keeps pointers into a
row, so rows are never replaced."""


def names(x: Any) -> Iterator[str]:
    """Yield the names of the libraries that define the type of x and its base classes."""
    for kind in type(x).__mro__:
        name = LIBRARIES.get(kind.__module__.partition(".")[0])
        if name is not None:
            yield name


def library(x: Any, argument: str, function: str) -> ModuleType:
    """Return the module for x's array library. If no module accepts x, raise a TypeError that names the function and
    the argument."""
    try:
        return _found[type(x)]
    except KeyError:
        pass
    for name in (*names(x), "numpy", *_PROTOCOLS):  # the module "numpy" also accepts Python numbers
        module = importlib.import_module(f"mscomm.arrays.{name}")
        if module.is_array(x):
            backend = getattr(module, "PLAIN", {}).get(type(x))
            if backend is not None and module.plain is not None:
                written, tracked = getattr(module, "written_untracked", None), getattr(module, "TRACKED", None)
                pending, held = getattr(module, "pending", {}), getattr(module, "held", None)
                row = Plain(module.plain, module.empty, written, tracked, backend, pending, held)
                plain_types.setdefault(type(x), row)
            return module if name in _PROTOCOLS else _found.setdefault(type(x), module)
    known = ", ".join(dict.fromkeys(LIBRARIES.values()))
    advice = _as_array(x, argument, function)
    raise TypeError(
        f"{function}: {argument} is a {type(x).__name__}, not an array; {advice} (known libraries: {known})"
    )


def _as_array(x: Any, argument: str, function: str) -> str:
    """Return how the user can pass x as an array, for an error message."""
    if isinstance(x, np.ma.MaskedArray):
        return f"give its data and its mask as two arrays: {argument}.data and np.ma.getmaskarray({argument})"
    if function == "all_reduce" and isinstance(x, (list, tuple)) and any(next(names(one), None) for one in x):
        return "for a list of arrays, call all_reduce_many"
    if hasattr(type(x), "__dlpack__"):
        return f"give it as np.from_dlpack({argument})"
    if argument.startswith("out") and not hasattr(type(x), "__array_interface__"):
        return "give an array that the result can be written to; np.asarray would write to a copy"
    return f"give it as np.asarray({argument})"


def memory_anywhere(x: Any, argument: str, function: str) -> np.ndarray[Any, Any]:
    """Return the memory of an array on the CPU, or an OnDevice for an array on a device.

    If x is not an array or its memory cannot be reached, raise a TypeError that names the function and its argument.
    Raise OverflowError for an int of more than 64 bits.
    """
    if type(x) is np.ndarray:  # the usual case first, because small calls take only microseconds
        return x
    arrays = library(x, argument, function)
    try:
        return arrays.memory(x)  # type: ignore[no-any-return]
    except (TypeError, OverflowError) as error:
        kind = OverflowError if isinstance(error, OverflowError) else TypeError
        raise kind(f"{function}: {argument} {error}") from None


def new(function: str, x: Any, shape: tuple[int, ...]) -> tuple[np.ndarray[Any, Any], Callable[[], Any]]:
    """Return (memory, finish), where `memory` is for a result of x's type, dtype and device.

    The caller fills the memory and then calls the function `finish`, which returns the result.

    If mscomm cannot create arrays of x's library, raise a TypeError that names the function `function`.
    """
    try:
        return library(x, "x", function).new(x, shape)  # type: ignore[no-any-return]
    except TypeError as error:
        raise TypeError(f"{function}: {error}") from None


def packed(function: str, argument: str, x: Any) -> OnDevice:
    """Return the memory of the device array x, or of a copy in C order if x is not in C order.

    The returned memory keeps x or the copy alive.
    """
    arrays = library(x, argument, function)
    try:
        return arrays.memory(arrays.packed(x))  # type: ignore[no-any-return]
    except TypeError as error:
        raise TypeError(f"{function}: {argument}: {error}") from None


def packable(x: Any) -> str | None:
    """Return the name of x's library if mscomm can send x in a Python object, else None.

    The type of x must be exactly the type that the library's of_numpy returns, not a subclass.
    """
    name = next(names(x), None)
    if name not in PACKABLE:
        return None
    module = importlib.import_module(f"mscomm.arrays.{name}")
    return name if module.is_array(x) and type(x) is type(module.of_numpy(np.zeros(1, np.int8))) else None


def on_cpu(x: Any) -> np.ndarray[Any, Any]:
    """Return the memory of a tensor on the CPU. Raise TypeError for any other tensor.

    The error's text continues a sentence that begins with "x".
    """
    there = library(x, "x", "on_cpu").memory(x)
    if isinstance(there, OnDevice):
        raise TypeError(f"is on device {there.index}; copy it to the CPU first")
    return with_values(there)


def on_host(x: Any, argument: str, function: str) -> np.ndarray[Any, Any]:
    """Return the elements of x as a NumPy array: x's memory if x is on the CPU, otherwise a copy.

    The copy is made after the work on the current stream has completed. Raise TypeError if NumPy lacks x's dtype.
    """
    return _readable(described_on_host(x, argument, function), argument, function)


def _readable(memory: np.ndarray[Any, Any], argument: str, function: str) -> np.ndarray[Any, Any]:
    try:
        return with_values(memory)
    except TypeError as error:
        raise TypeError(f"{function}: {argument} {error}") from None


def values(x: Any, argument: str, function: str) -> np.ndarray[Any, Any]:
    """Do the same as memory_anywhere, but raise TypeError if NumPy lacks x's dtype."""
    return _readable(memory_anywhere(x, argument, function), argument, function)


def described_on_host(x: Any, argument: str, function: str) -> np.ndarray[Any, Any]:
    """Do the same as on_host, but without the check: NumPy may be able only to copy the elements."""
    there = memory_anywhere(x, argument, function)
    if not isinstance(there, OnDevice):
        return there
    try:
        return library(x, argument, function).on_host(x)  # type: ignore[no-any-return]
    except TypeError as error:
        raise TypeError(f"{function}: {argument}: {error}") from None


def fill(x: Any, numbers: np.ndarray[Any, Any], argument: str, function: str) -> None:
    """Convert `numbers` to x's dtype, and copy them into x, which has the same shape. x may be on a device."""
    there = memory_anywhere(x, argument, function)
    if there.dtype != numbers.dtype:
        _readable(there, argument, function)
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
    """Copy `made`, an array of out's library, to `out`. Return `out`, or `made` if `out` cannot be written."""
    if isinstance(out, np.ndarray):
        out[...] = made
        return out
    assign = getattr(_library_of_its_own(out), "assign", None)
    if assign is None:
        return made
    assign(out, made)
    return out


def beside(x: Any, numbers: np.ndarray[Any, Any]) -> Any:
    """Return `numbers` as an array of x's library on x's device, or `numbers` itself if x is not on a device."""
    arrays = _library_of_its_own(x)
    if arrays is None or not isinstance(arrays.memory(x), OnDevice):
        return numbers
    return arrays.from_host(x, numbers)


def _library_of_its_own(x: Any) -> ModuleType | None:
    """Return the module for x's library. Return None for numbers, NumPy arrays and libraries without a module."""
    return library(x, "x", "library") if next(names(x), "numpy") != "numpy" else None


def written_all(arrays: tuple[Any, ...]) -> None:
    for x in arrays:
        written(x)


def written(x: Any) -> None:
    """If x's library must know when x's memory has been written, tell it."""
    if type(x) is not np.ndarray:
        tell = getattr(library(x, "x", "written"), "written", None)
        if tell is not None:
            tell((x,))
