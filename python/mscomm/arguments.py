"""What every collective does with the arrays and words that it is given: checks them, and finds their memory.

What is wrong is a TypeError or ValueError that names the function and the argument, before anything is sent.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from mscomm import _core
from mscomm.arrays import library, memory_anywhere, written
from mscomm.arrays import numpy as host
from mscomm.arrays.device import OnDevice
from mscomm.arrays.numpy import dtype_code
from mscomm.errors import Mismatch
from mscomm.group import Group

Array = np.ndarray[Any, Any]

OPS = {name: code for code, name in enumerate(_core.ops)}


class Given(NamedTuple):
    """An array that was given: its library, itself, its memory, what the core reads, its shape, its dtype's number."""

    arrays: ModuleType
    x: Any
    memory: Array
    source: Array
    shape: tuple[int, ...]
    code: int

    @property
    def on_device(self) -> bool:
        return isinstance(self.memory, OnDevice)


def given(function: str, x: Any, group: Group, argument: str = "x", *, stream: int | None = None) -> Given:
    there = memory_anywhere(x, argument, function)
    if there.ndim > _core.max_dims:
        raise ValueError(
            f"{function}: {argument} has {there.ndim} dimensions, arrays have at most {_core.max_dims} dimensions;"
            " reshape this one"
        )
    arrays = host if there is x else library(x, argument, function)
    if isinstance(there, OnDevice):
        group.check_device(function, argument, there)
        if stream is not None:
            there.stream, there.chosen = _stream(function, argument, there, stream), True
        source = there if there.flags.c_contiguous else _packed(function, argument, arrays, x)
        return Given(arrays, x, there, source, there.shape, dtype_code(there.dtype))
    if stream is not None:
        raise TypeError(f"{function}: stream is for arrays on a device, {argument} is the CPU's")
    return Given(arrays, x, there, host.readable(there), there.shape, dtype_code(there.dtype))


def _stream(function: str, argument: str, there: OnDevice, stream: int) -> int:
    """The handle that the user gave: what has to be copied is copied on the library's own."""
    if not there.flags.c_contiguous:
        raise ValueError(f"{function}: with stream= {argument} must be in C order")
    try:
        return operator.index(stream)
    except TypeError:
        raise TypeError(f"{function}: stream {stream!r} is not an integer, the handle of a stream") from None


def _packed(function: str, argument: str, arrays: ModuleType, x: Any) -> OnDevice:
    """The memory of a copy of x in C order, which lives as long as that is referred to."""
    try:
        packed: OnDevice = arrays.memory(arrays.packed(x))
        return packed
    except TypeError as error:
        raise TypeError(f"{function}: {argument}: {error}") from None


def result(
    function: str, given: Given, out: Any, shape: tuple[int, ...], place: int | None, argument: str = "out"
) -> tuple[Array, Callable[[], Any]]:
    """Where the core writes a result of that shape, and what gives the user the result then.

    place: the element of the longer of x and out at which the other one may begin, for work in place; None: nowhere.
    """
    if out is None:
        return new(function, given, shape)
    target, finish = _target(function, given, out, check_out(function, given, out, shape, place, argument))

    def result() -> Any:
        if finish:
            finish()
        written(out)
        return out

    return target, result


def new(function: str, given: Given, shape: tuple[int, ...]) -> tuple[Any, Callable[[], Any]]:
    """Memory for a result of that shape, and what makes the result of it."""
    if isinstance(given.memory, OnDevice) and given.memory.chosen:
        # New memory is the library's current stream's: whoever had it before may not be done on another one.
        raise TypeError(f"{function}: with stream= give out=, in C order and apart from x")
    made: tuple[Any, Callable[[], Any]]
    try:
        made = given.arrays.new(given.x, shape)
    except TypeError as error:
        raise TypeError(f"{function}: {error}") from None
    return made


def _target(function: str, given: Given, out: Any, there: Array) -> tuple[Array, Callable[[], None] | None]:
    """Where to write the result for out, and what to do afterwards (None: out itself is written)."""
    if not isinstance(there, OnDevice):
        return host.writable(there)
    if there.flags.carray:
        assert isinstance(given.memory, OnDevice)
        there.stream = given.memory.stream
        return there, None
    made, finish = new(function, given, there.shape)
    return made, lambda: library(out, "out", function).assign(out, finish())


def late_result(
    function: str, given: Given, out: Any, shape: tuple[int, ...], place: int | None, group: Group
) -> tuple[Array, Callable[[], Any]]:
    """As result, when the others are in the call already: what is wrong with out is a failure of the group then."""
    try:
        return result(function, given, out, shape, place)
    except (TypeError, ValueError) as error:
        rank = group.ranks[group.rank]
        raise Mismatch(f"{error}, on rank {rank}", [rank]) from error


def check_out(
    function: str, given: Given, out: Any, shape: tuple[int, ...], place: int | None, argument: str = "out"
) -> Array:
    """The memory of out, after checking that the result can be written to it."""
    x, y = given.memory, memory_anywhere(out, argument, function)
    if y.shape != tuple(shape):
        raise ValueError(f"{function}: {argument} has shape {y.shape}, the result has {tuple(shape)}")
    if y.dtype != x.dtype:
        raise TypeError(f"{function}: {argument} has dtype {y.dtype}, x has {x.dtype}")
    if not y.flags.writeable:
        raise TypeError(f"{function}: {argument} is read-only")
    if where(x) != where(y):
        raise TypeError(f"{function}: {argument} is {where(y)}, x is {where(x)}; give both of one")
    if out is given.x and place == 0:
        return y
    if np.may_share_memory(x, y) and np.shares_memory(x, y) and not _in_place(x, y, place):
        raise ValueError(
            f"{function}: x and {argument} overlap, but not as work in place does; give {argument} memory of its own"
        )
    return y


def where(memory: Array) -> str:
    return f"on device {memory.index} of {memory.backend}" if isinstance(memory, OnDevice) else "the CPU's"


def _in_place(x: Any, out: Any, place: int | None) -> bool:
    """Whether the shorter of the two lies at its place in the longer one."""
    if place is None:
        return False
    shorter, longer = (x, out) if x.size <= out.size else (out, x)
    at, begin = (array.__array_interface__["data"][0] for array in (shorter, longer))
    if x.shape == out.shape and place == 0:
        return bool(at == begin and x.strides == out.strides)
    return bool(
        shorter.flags.c_contiguous and longer.flags.c_contiguous and at == begin + place * longer.dtype.itemsize
    )


def check_apart(arrays: Sequence[Any], out: Sequence[Any]) -> None:
    """Of a list: no out shares memory with another one, or with another array. ValueError if it does."""
    named = [(y, f"out[{i}]", i) for i, y in enumerate(out) if y is not None]
    if not named:
        return
    if len({id(y) for y, _, _ in named}) == len(named) and all(
        array.base is None for array in (*arrays, *(y for y, _, _ in named))
    ):
        others = {id(x): i for i, x in enumerate(arrays)}
        if all(others.get(id(y), i) == i for y, _, i in named) and len(others) == len(arrays):
            return  # arrays with memory of their own
    spans = [(*_bounds(array), name, i, array) for array, name, i in named]
    spans += [(*_bounds(x), f"arrays[{i}]", i, x) for i, x in enumerate(arrays)]
    spans.sort(key=operator.itemgetter(0))
    open_spans: list[Any] = []
    for span in spans:
        begin, _, name, i, array = span
        open_spans = [one for one in open_spans if one[1] > begin]
        for _, _, other, k, owner in open_spans:
            if i != k and (name[0] == "o" or other[0] == "o") and np.shares_memory(array, owner):
                raise ValueError(f"all_reduce_many: {name} and {other} share memory; each array must have its own")
        open_spans.append(span)


def _bounds(array: Any) -> tuple[int, int]:
    """The addresses between which an array lies."""
    begin = end = array.__array_interface__["data"][0]
    if not array.size:
        return begin, begin
    for extent, stride in zip(array.shape, array.strides, strict=True):
        begin += min(0, (extent - 1) * stride)
        end += max(0, (extent - 1) * stride)
    return begin, end + array.itemsize


def times(shape: tuple[int, ...], n: int) -> tuple[int, ...]:
    """The shape of n such arrays along axis 0; of n scalars."""
    return (shape[0] * n, *shape[1:]) if shape else (n,)


def share(function: str, shape: tuple[int, ...], n: int) -> tuple[int, ...]:
    """The shape of one of n parts along axis 0."""
    if not shape or shape[0] % n:
        rows = f"axis 0 of {shape}" if shape else "a scalar"
        raise ValueError(f"{function}: {rows} does not divide into {n} parts, one for each rank; see {function}_v")
    return (shape[0] // n, *shape[1:])


def checked_counts(function: str, argument: str, counts: Sequence[int], group: Group, given: Given | None) -> list[int]:
    """The rows of each rank, which must add up to those of x."""
    try:
        rows = [operator.index(count) for count in counts]
    except TypeError:
        raise TypeError(f"{function}: {argument} must be a list of ints, a row count for each rank") from None
    if len(rows) != group.size or min(rows) < 0:
        raise ValueError(f"{function}: {argument} is {rows}; it needs {group.size} numbers of rows, one for each rank")
    if given is not None and (not given.shape or given.shape[0] != sum(rows)):
        has = f"x of shape {given.shape} has {given.shape[0]}" if given.shape else "x is a scalar"
        raise ValueError(f"{function}: {argument} adds up to {sum(rows)} rows, {has}")
    return rows


def op_code(function: str, op: str, given: Given, group: Group) -> int:
    code = known_op(function, op)
    if not _core.supports(given.code, code):
        raise TypeError(f"{function}: {op} is not defined on {given.memory.dtype} arrays")
    if given.on_device and (why := group.refuses(given.code, code)):
        raise TypeError(f"{function}: {why}. Arrays of the CPU are reduced by every operation")
    return code


def known_op(function: str, op: str) -> int:
    code = OPS.get(op) if isinstance(op, str) else None
    if code is None:
        raise ValueError(f"{function}: op {op!r} is none of {', '.join(OPS)}")
    return code


def checked_root(function: str, root: int, group: Group) -> int:
    try:
        root = operator.index(root)
    except TypeError:
        raise TypeError(f"{function}: root {root!r} is not an integer") from None
    if not 0 <= root < group.size:
        raise ValueError(
            f"{function}: root {root} is no rank of group {group.name}, which has the ranks 0 to {group.size - 1}"
        )
    return root
