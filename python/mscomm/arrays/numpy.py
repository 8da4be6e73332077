"""NumPy arrays, and functions for the memory of any CPU array. mscomm describes such memory with a NumPy array.

NumPy scalars and Python numbers count as arrays of shape () that cannot be written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mscomm import _core

Array = np.ndarray[Any, Any]

DTYPES = tuple(_core.dtypes())
# The dtypes that NumPy has only if ml-dtypes is installed.
OF_ML_DTYPES = tuple(name for name in DTYPES if name == "bfloat16" or name.startswith("float8"))
# A dtype with one field for each of these names. NumPy can copy the elements of arrays with such a dtype, but cannot
# compute with them.
_STAND_INS = {name: np.dtype([(name, f"u{_core.itemsize(DTYPES.index(name))}")], align=True) for name in OF_ML_DTYPES}
# The core's number for each dtype. dtype_code() adds a dtype of ml-dtypes when it is first called for this dtype.
CODES: dict[np.dtype[Any], int] = {
    _STAND_INS[name] if name in OF_ML_DTYPES else np.dtype(name): code for code, name in enumerate(DTYPES)
}

_NUMBERS: dict[type, type[np.generic]] = {
    bool: np.bool_,
    int: np.int64,
    float: np.float64,
    complex: np.complex128,
}  # Only these types count as numbers, not their subclasses: a member of an IntEnum, for example, is rejected.


def is_array(x: Any) -> bool:
    if isinstance(x, np.ndarray):
        return not isinstance(x, np.ma.MaskedArray)
    return isinstance(x, np.generic) or type(x) in _NUMBERS


def dtype_code(dtype: np.dtype[Any]) -> int:
    """Return the core's number for dtype. Raise TypeError if mscomm does not move elements of this dtype.

    The dtypes of ml_dtypes, such as bfloat16, are recognised by their names. The error's text continues a sentence that
    begins with the name of the array.
    """
    try:
        return CODES[dtype]
    except KeyError:
        pass
    if dtype.name not in DTYPES:
        raise TypeError(f"has dtype {dtype}, which mscomm does not move; it knows {', '.join(DTYPES)}")
    if not dtype.isnative:
        raise TypeError(
            f"has dtype {dtype.str}, which is big-endian; convert the array first: np.asarray(x, dtype=np.{dtype.name})"
        )
    return CODES.setdefault(dtype, DTYPES.index(dtype.name))


def checked_code(function: str, argument: str, dtype: np.dtype[Any]) -> int:
    """Return the core's number for the dtype of an argument. Raise a TypeError that names the function and argument."""
    try:
        return dtype_code(dtype)
    except TypeError as error:
        raise TypeError(f"{function}: {argument} {error}") from None


def known_code(dtype: np.dtype[Any]) -> int | None:
    """Return the core's number for dtype, or None if mscomm does not move elements of this dtype."""
    try:
        return dtype_code(dtype)
    except TypeError:
        return None


def dtype_named(given: Any) -> np.dtype[Any]:
    """Return the NumPy dtype for a dtype that the user has passed.

    given: anything that numpy.dtype accepts, or a MindSpore or PyTorch dtype such as mindspore.int32 or torch.bfloat16,
    which is recognised by its name. None means float64, as in NumPy. Raise TypeError for anything else.

    >>> dtype_named("int32")
    dtype('int32')
    """
    module, _, name = repr(given).rpartition(".")
    if module in ("mindspore", "torch") and name in DTYPES:
        return dtype_by_name(name)
    dtype: np.dtype[Any] = np.dtype(given)
    return dtype


def dtype_of(code: int) -> np.dtype[Any]:
    """Return the NumPy dtype for a dtype number of the core.

    Raise TypeError for bfloat16 and float8 if ml-dtypes is not installed.
    """
    return dtype_by_name(DTYPES[code])


def described_dtype(code: int) -> np.dtype[Any]:
    """Return a dtype for an array that only describes memory with elements of this dtype number of the core.

    If ml-dtypes is not installed, the dtype for bfloat16 and float8 is a stand-in, with which NumPy can only copy.
    """
    name = DTYPES[code]
    return np.dtype(name) if name not in OF_ML_DTYPES else _of_ml_dtypes(name) or _STAND_INS[name]


def with_values(memory: Array) -> Array:
    """Return `memory`. Raise TypeError if NumPy cannot read its values, because ml-dtypes is not installed.

    The error's text continues a sentence that begins with the name of the array.
    """
    name = next((name for name, dtype in _STAND_INS.items() if dtype == memory.dtype), None)
    if name is not None:
        raise TypeError(f"has dtype {name}, whose values mscomm reads only with ml-dtypes: pip install ml-dtypes")
    return memory


@functools.cache
def _of_ml_dtypes(name: str) -> np.dtype[Any] | None:
    try:
        import ml_dtypes
    except ImportError:
        return None
    kind = getattr(ml_dtypes, name, None)
    return None if kind is None else np.dtype(kind)


def dtype_by_name(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype for a dtype name of the core.

    Raise TypeError for bfloat16 and float8 if ml-dtypes is not installed.
    """
    if name not in OF_ML_DTYPES:
        return np.dtype(name)
    dtype = _of_ml_dtypes(name)
    if dtype is None:
        raise TypeError(f"NumPy arrays of {name} need ml-dtypes: pip install 'ml-dtypes>=0.5'")
    return dtype


def memory(x: Any) -> Array:
    if isinstance(x, np.ndarray):
        return x
    try:
        made = np.array(x, _NUMBERS.get(type(x)))
    except OverflowError:
        raise OverflowError(f"is an int of {x.bit_length()} bits, the largest dtype is int64") from None
    made.flags.writeable = False
    return made


def new(x: Any, shape: tuple[int, ...]) -> tuple[Array, Callable[[], Array]]:
    made = np.empty(shape, memory(x).dtype)
    return made, lambda: made


def empty(shape: tuple[int, ...], code: int) -> Array:
    return np.empty(shape, dtype_of(code))


def over(memory: Array) -> Array:
    return memory


def readable(x: Array) -> Array:
    """Return x itself if it is contiguous and aligned, otherwise a copy in C order."""
    return x if x.flags.carray or (x.flags.c_contiguous and x.flags.aligned) else np.array(x, order="C", subok=False)


def repeats(shape: Sequence[int], strides: Sequence[int], size: int = 1) -> bool:
    """Return whether several elements of a strided array share memory, as after as_strided(), expand() or unfold().

    size: the size of an element, in the unit of the strides. From the smallest step on, each step must lead past all
    elements that the smaller steps reach. A few strides that only as_strided() makes are taken for shared, although
    they are not.
    """
    if 0 in shape:
        return False
    reached = size - 1
    for step, extent in sorted((abs(step), extent) for step, extent in zip(strides, shape, strict=True) if extent > 1):
        if step <= reached:
            return True
        reached += step * (extent - 1)
    return False


def check_out(function: str, argument: str, out: Array) -> None:
    """Raise an error if mscomm cannot write one value to each element of out, the memory of an array."""
    if not out.flags.writeable:
        raise TypeError(f"{function}: {argument} is read-only")
    if not out.flags.c_contiguous and repeats(out.shape, out.strides, out.itemsize):
        raise ValueError(f"{function}: elements of {argument} share memory, so they cannot hold different values")


def writable(out: Array) -> tuple[Array, Callable[[], None] | None]:
    """Return the array to write a result to, and a function that copies the result to `out` afterwards.

    If the result can be written to `out` directly, the array is `out` and the function is None.
    """
    if out.flags.carray:
        return out, None
    result = np.empty(out.shape, out.dtype)
    return result, lambda: np.copyto(out, result)
