"""Fusion buckets: gradients of one dtype side by side in shared memory, reduced by one call.

Behind the gradients a bucket has a mark for each of them, in the same dtype: 1 where this rank has that gradient. The
reduction adds the marks up with the rest, so that every rank learns which gradients nobody has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mscomm import collectives
from mscomm.arrays.numpy import DTYPES, dtype_of
from mscomm.group import Group, Work

FIRST_BYTES = 1 << 20  # small, so that the first reduction begins early in the backward pass
LINE_BYTES = 64  # each gradient begins on a cache line
COMPRESSIONS = {"bf16": "bfloat16", "fp16": "float16"}
LARGEST = {"bfloat16": float.fromhex("0x1.fep127"), "float16": 65504.0}


def largest(dtype: np.dtype[Any], ranks: int) -> float:
    """What each of so many ranks may give at most, so that their sum is in the range of dtype, however that rounds."""
    limit = LARGEST[dtype.name] / ranks
    given = np.array(limit, dtype)
    return float(given if float(given) <= limit else np.nextafter(given, np.zeros((), dtype)))


class Place(NamedTuple):
    """Where a gradient lies in its bucket, in elements."""

    number: int  # of the parameter
    begin: int
    size: int


class Layout(NamedTuple):
    """What is in a bucket: the gradients, then the marks, one each, then the number that is carried."""

    dtype: np.dtype[Any]
    places: tuple[Place, ...]
    marks: int  # where they begin
    size: int


def layouts(
    kinds: Sequence[tuple[np.dtype[Any], int]], order: Sequence[int], bucket_bytes: int, first_bytes: int = FIRST_BYTES
) -> list[Layout]:
    """How gradients, given by dtype and number of elements, are put into buckets if they become ready in that order.

    A pure function of values that are equal on all ranks. A bucket is full with bucket_bytes, the first of each dtype
    with first_bytes; a larger gradient has one of its own. The buckets come in the order in which they become full.
    """
    made: list[tuple[int, list[int]]] = []  # when its last gradient is ready; its gradients
    filling: dict[np.dtype[Any], tuple[list[int], int]] = {}
    limits: dict[np.dtype[Any], int] = {}
    for turn, index in enumerate(order):
        dtype, size = kinds[index]
        content, filled = filling.get(dtype, ([], 0))
        limit = limits.setdefault(dtype, min(first_bytes, bucket_bytes))
        if content and filled + size * dtype.itemsize > limit:
            limits[dtype] = bucket_bytes
            content, filled = [], 0
        if not content:
            made.append((turn, content))
        content.append(index)
        made = [(turn, one) if one is content else (last, one) for last, one in made]
        filling[dtype] = content, filled + size * dtype.itemsize
    return [_layout(content, kinds) for _, content in sorted(made, key=lambda one: one[0])]


def _layout(content: list[int], kinds: Sequence[tuple[np.dtype[Any], int]]) -> Layout:
    dtype = kinds[content[0]][0]
    line = max(1, LINE_BYTES // dtype.itemsize)
    places, at = [], 0
    for index in content:
        places.append(Place(index, at, kinds[index][1]))
        at += math.ceil(kinds[index][1] / line) * line
    return Layout(dtype, tuple(places), at, at + len(places) + 1)


class Bucket:
    """A bucket's memory, and where it stands in the current step."""

    def __init__(self, layout: Layout, compression: str | None) -> None:
        self.layout = layout
        self.memory = collectives.zeros(layout.size, layout.dtype)
        self.there = bytearray(len(layout.places))  # 1 where this step's gradient has come
        self.missing = len(layout.places)
        self._work: Work | None = None
        self.residual: np.ndarray[Any, Any] | None = None
        self._wire = self.memory
        if compression is not None and layout.dtype.itemsize > 2 and layout.dtype.kind == "f":
            self._wire = collectives.zeros(layout.size, dtype_of(DTYPES.index(COMPRESSIONS[compression])))
            self.residual = np.zeros(layout.marks, layout.dtype)

    def of(self, place: Place) -> np.ndarray[Any, Any]:
        """That gradient's memory."""
        return self.memory[place.begin : place.begin + place.size]

    @property
    def marks(self) -> np.ndarray[Any, Any]:
        return self.memory[self.layout.marks : -1]

    @property
    def carried(self) -> float:
        """A number that goes along."""
        return float(self.memory[-1].real)

    @carried.setter
    def carried(self, value: float) -> None:
        self.memory[-1] = value

    def take(self, turn: int, other: Bucket, its_turn: int) -> None:
        """A gradient with its mark from another bucket, and what compression owes it."""
        here, there = self.layout.places[turn], other.layout.places[its_turn]
        self.of(here)[:] = other.of(there)
        self.marks[turn] = other.marks[its_turn]
        if self.residual is not None and other.residual is not None:
            mine, its = (slice(one.begin, one.begin + one.size) for one in (here, there))
            self.residual[mine] = other.residual[its]

    def clear_missing(self) -> None:
        """Zeros for the gradients that have not come."""
        if self.missing:
            for place, there in zip(self.layout.places, self.there, strict=True):
                if not there:
                    self.of(place)[:] = 0

    def start(self, op: str, group: Group, async_op: bool) -> None:
        """Begin to reduce it, in place; without async_op it is done on return."""
        self.marks[:] = np.frombuffer(self.there, np.uint8)
        if self.residual is not None:
            self._narrow(self.residual, largest(self._wire.dtype, group.size if op == "sum" else 1))
        started = collectives.all_reduce(self._wire, op, out=self._wire, group=group, async_op=async_op)
        self._work = started if async_op else None

    def finish(self) -> None:
        """Wait for the reduction."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._wire is not self.memory:
            self.memory[:] = self._wire

    def forget(self) -> None:
        """The step is over."""
        self.there[:] = bytes(len(self.there))
        self.missing = len(self.there)

    def _narrow(self, residual: np.ndarray[Any, Any], limit: float) -> None:
        """Round to what goes over the wire. What that takes away is added in the next step (error feedback, Seide et
        al., "1-bit stochastic gradient descent", 2014), also what is beyond the narrow type's range. Infinities and NaN
        go as they are, for who looks for them, and leave nothing behind. What is owed to a gradient that this rank does
        not have waits until it has: where no rank has it, nobody takes the result."""
        end = self.layout.marks
        gradients, wire = self.memory[:end], self._wire[:end]
        absent = [place for place, mark in zip(self.layout.places, self.marks, strict=True) if mark == 0]
        waiting = [residual[place.begin : place.begin + place.size].copy() for place in absent]
        for place in absent:
            residual[place.begin : place.begin + place.size] = 0
        gradients += residual
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(gradients.sum()):
                wire[:] = np.clip(gradients, -limit, limit, out=residual)
                np.subtract(gradients, wire, out=residual, dtype=residual.dtype, casting="unsafe")
            else:
                wire[:] = gradients
                residual[:] = 0
        for place, owed in zip(absent, waiting, strict=True):
            residual[place.begin : place.begin + place.size] = owed
        self._wire[end:] = self.memory[end:]  # marks are 0 or 1
