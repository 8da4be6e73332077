"""Array libraries: one module each, found by the name of the module that an array's type comes from.

A library module has

* `is_array(x)`: whether mscomm takes it;
* `memory(x)` -> a numpy.ndarray over x's memory, of any strides, read-only where x cannot be written; TypeError if
  there is none, as for a tensor on a device that this backend does not reach, with words that follow "x";
* `new(x, shape)` -> C-contiguous memory for a result of x's type, dtype and device, and the function that makes the
  result of it when it is filled;
* `over(memory)`, if the library's arrays can be written -> one of them over a C-contiguous numpy.ndarray's memory;
* `written((x,))`, if the library wants to know that the memory of x was written.

* `of_numpy(numbers)`, if its tensors can be in objects (PACKABLE) -> one of them on the CPU with the shape, dtype and
  numbers of a writable numpy.ndarray in C order, which nobody else has.

Of arrays on a device `memory` is an `OnDevice` of device.py, and the module also has

* `packed(x)` -> x, or a copy of it in C order, made in the order of the current stream;
* `assign(out, made)`: copies made to out in that order;
* `on_host(x)` -> a numpy.ndarray with the numbers that x has when the current stream has got there;
* `from_host(x, numbers)` -> an array on x's device with the shape, dtype and numbers of a numpy.ndarray, which may
  change after the call;
* `namespace`, if mscomm may compute with them: has the library's `isfinite`, `clip`, `where` and its dtypes;
* `used(x)`, if memory that is given back may come to be used on another stream: the current one uses x until now.

And, if its calls shall be cheap (src/calls.cc knows the rows of `plain_types`),

* `PLAIN`: its types of arrays, and no subclass, with the backend that reaches those of them that are on a device;
* `plain`: the type's `__dlpack_c_exchange_api__`, or a function: `plain(x)` -> (address, shape, dtype's number, device,
  current stream), with device -1 for the CPU, if the elements of x lie one after the other and can be written; None for
  all others, which `memory` describes;
* `pending`, with an exchange API: dtype's number -> functions that say whether x has other numbers than its memory;
* `empty(x, shape)` -> an array of x's type, dtype and device, in C order.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from mscomm.arrays.device import OnDevice

# The top-level package of an array's type, and the module here.
LIBRARIES = {
    "numpy": "numpy",
    "torch": "torch",
    "jax": "jax",
    "jaxlib": "jax",
    "mindspore": "mindspore",
    "cupy": "cupy",
}

# Those whose tensors can be in Python objects.
PACKABLE = ("torch", "jax", "mindspore")

_found: dict[type, ModuleType] = {}


class Plain(NamedTuple):
    """What a library offers for arrays of one type, so that calls on them are cheap. backend: that of its devices."""

    plain: Any
    empty: Callable[[Any, tuple[int, ...]], Any]
    written: Callable[[tuple[Any]], None] | None
    backend: str
    pending: dict[int, tuple[Callable[[Any], bool], ...]]


plain_types: dict[type, Plain] = {}
"""A type is here as soon as one array of it was seen. The core keeps pointers into a row, so none is replaced."""
_NOTHING: dict[int, tuple[Callable[[Any], bool], ...]] = {}


def names(x: Any) -> Iterator[str]:
    """The libraries that the type of x comes from, or those that it is derived from."""
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
    for name in (*names(x), "numpy", "cuda", "dlpack"):  # Python's numbers are NumPy's
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
    """The memory of an array of the CPU, or an OnDevice of one on a device.

    TypeError, naming the function and its argument, if x is no array or cannot be reached; OverflowError for an int of
    more than 64 bits.
    """
    if type(x) is np.ndarray:  # as most are, and small calls count microseconds
        return x
    arrays = library(x, argument, function)
    try:
        return arrays.memory(x)  # type: ignore[no-any-return]
    except (TypeError, OverflowError) as error:
        kind = OverflowError if isinstance(error, OverflowError) else TypeError
        raise kind(f"{function}: {argument} {error}") from None


def new(function: str, x: Any, shape: tuple[int, ...]) -> tuple[np.ndarray[Any, Any], Callable[[], Any]]:
    """Memory for a result of x's type, dtype and device, and what makes the result when it is filled.

    TypeError, naming the function, if mscomm makes no arrays of x's library.
    """
    try:
        return library(x, "x", function).new(x, shape)  # type: ignore[no-any-return]
    except TypeError as error:
        raise TypeError(f"{function}: {error}") from None


def packed(function: str, argument: str, x: Any) -> OnDevice:
    """The memory of a copy of x, an array on a device, in C order. The memory keeps the copy alive."""
    arrays = library(x, argument, function)
    try:
        return arrays.memory(arrays.packed(x))  # type: ignore[no-any-return]
    except TypeError as error:
        raise TypeError(f"{function}: {argument}: {error}") from None


def packable(x: Any) -> str | None:
    """The library of x, if of_numpy there makes tensors of the type that x has; None for what is no such tensor."""
    name = next(names(x), None)
    if name not in PACKABLE:
        return None
    module = importlib.import_module(f"mscomm.arrays.{name}")
    return name if module.is_array(x) and type(x) is type(module.of_numpy(np.zeros(1, np.int8))) else None


def on_cpu(x: Any) -> np.ndarray[Any, Any]:
    """The memory of a tensor of the CPU. TypeError, with words that follow "x", for all others."""
    there = library(x, "x", "on_cpu").memory(x)
    if isinstance(there, OnDevice):
        raise TypeError(f"is on device {there.index}; copy it to the CPU first")
    return there  # type: ignore[no-any-return]


def on_host(x: Any, argument: str, function: str) -> np.ndarray[Any, Any]:
    """The numbers of x: its memory on the CPU, or a copy of what a device has when it has done what was enqueued."""
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
    """Copy made, an array of out's library, to out, and return out. If out cannot be written, return made."""
    if isinstance(out, np.ndarray):
        out[...] = made
        return out
    assign = getattr(_library_of_its_own(out), "assign", None)
    if assign is None:
        return made
    assign(out, made)
    return out


def beside(x: Any, numbers: np.ndarray[Any, Any]) -> Any:
    """The numbers as an array of x's library on its device; where that is the CPU, they are what they were."""
    arrays = _library_of_its_own(x)
    if arrays is None or not isinstance(arrays.memory(x), OnDevice):
        return numbers
    return arrays.from_host(x, numbers)


def _library_of_its_own(x: Any) -> ModuleType | None:
    """None for NumPy's arrays and scalars, and for what is known by a protocol alone, or not at all."""
    return library(x, "x", "library") if next(names(x), "numpy") != "numpy" else None


def written_all(arrays: tuple[Any, ...]) -> None:
    for x in arrays:
        written(x)


def written(x: Any) -> None:
    """The memory of x was written: tell its library, if that keeps track."""
    if type(x) is not np.ndarray:
        tell = getattr(library(x, "x", "written"), "written", None)
        if tell is not None:
            tell((x,))
