"""Checks the arguments that the core does not check: ranks, lists of row counts and lists of arrays."""

from __future__ import annotations

import inspect
import operator
import reprlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mscomm.group import Group


def check_apart(arrays: Sequence[Any], out: Sequence[Any]) -> None:
    """Raise ValueError if out[i] shares memory with another array of `out`, or with arrays[k] where k != i."""
    named = [(y, f"out[{i}]", i) for i, y in enumerate(out) if y is not None]
    if not named:
        return
    if len({id(y) for y, _, _ in named}) == len(named) and all(
        array.base is None for array in (*arrays, *(y for y, _, _ in named))
    ):
        others = {id(x): i for i, x in enumerate(arrays)}
        if all(others.get(id(y), i) == i for y, _, i in named) and len(others) == len(arrays):
            return  # the usual case: no array is a view, and none is passed twice (but out[i] may be arrays[i])
    spans = [(*_bounds(array), name, i, array) for array, name, i in named]
    spans += [(*_bounds(x), f"arrays[{i}]", i, x) for i, x in enumerate(arrays)]
    spans.sort(key=operator.itemgetter(0))
    open_spans: list[Any] = []
    for span in spans:
        begin, _, name, i, array = span
        open_spans = [one for one in open_spans if one[1] > begin]
        for _, _, other, k, owner in open_spans:
            if i != k and (name[0] == "o" or other[0] == "o") and np.shares_memory(array, owner):
                raise ValueError(
                    f"all_reduce_many: {name} and {other} share memory; each array must have its own memory"
                )
        open_spans.append(span)


def _bounds(array: Any) -> tuple[int, int]:
    """Return the address of an array's first byte, and the address just past its last byte."""
    begin = end = array.__array_interface__["data"][0]
    if not array.size:
        return begin, begin
    for extent, stride in zip(array.shape, array.strides, strict=True):
        begin += min(0, (extent - 1) * stride)
        end += max(0, (extent - 1) * stride)
    return begin, end + array.itemsize


def checked_counts(
    function: str, argument: str, counts: Sequence[int], group: Group, shape: tuple[int, ...] | None
) -> list[int]:
    """Return `counts`, one row count for each rank, as ints. Raise TypeError or ValueError if they are invalid.

    shape: the shape of the array x that is divided among the ranks, or None. If it is given, the counts must add up to
    the number of rows of x.
    """
    try:
        rows = [operator.index(count) for count in counts]
    except TypeError:
        raise TypeError(f"{function}: {argument} must be a list of ints, one row count for each rank") from None
    if len(rows) != group.size or min(rows) < 0 or sum(rows) > sys.maxsize:
        raise ValueError(f"{function}: {argument} is {rows}; it needs {group.size} row counts, one for each rank")
    if shape is not None and (not shape or shape[0] != sum(rows)):
        has = f"x of shape {shape} has {shape[0]}" if shape else "x is a scalar"
        raise ValueError(f"{function}: {argument} adds up to {sum(rows)} rows, but {has}")
    return rows


def checked_int(function: str, argument: str, value: Any) -> int:
    """Return the value as an int. Raise TypeError if it is not an integer."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{function}: {argument} {reprlib.repr(value)} is not an integer") from None


def checked_rank(function: str, argument: str, rank: Any, group: Group) -> int:
    """Return the rank as an int. Raise TypeError or ValueError unless it is a rank of the group."""
    number = checked_int(function, argument, rank)
    if not 0 <= number < group.size:
        raise ValueError(
            f"{function}: {argument} {number} is not a rank of group {group.name}, which has the ranks 0 to "
            f"{group.size - 1}"
        )
    return number


def signature_text(function: Callable[..., Any]) -> str:
    """Return the parameters of a function as text, without the annotations."""
    signature = inspect.signature(function)
    plain = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))
