"""Fusion buckets: gradients of one dtype that lie side by side in memory and are reduced in one call.

This file defines the layout of buckets. It also defines CPU buckets, which are in memory that the ranks share. Device
buckets are in device_buckets.py. A bucket has one mark per gradient, which is 1 if this rank has the gradient. The
marks are reduced like the gradients, so every rank learns which gradients no rank has. In a CPU bucket, the marks are
stored after the gradients, in the same dtype. One carried number follows the marks (see Step.carry). The marks of
device buckets are in CPU memory, and are sent in a separate call (see Step.finish). If they were in device memory, a
rank could read them only after waiting for the device.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mscomm import _core, collectives
from mscomm.arrays import fill, on_host
from mscomm.arrays.numpy import dtype_by_name
from mscomm.group import Group
from mscomm.works import Work

FIRST_BYTES = 1 << 20  # small, so that the first reduction begins early in the backward pass
LINE_BYTES = 64  # each gradient begins on a cache line
COMPRESSIONS = {"bf16": "bfloat16", "fp16": "float16"}
LARGEST = {"bfloat16": float.fromhex("0x1.fep127"), "float16": 65504.0}


def largest(dtype: np.dtype[Any], ranks: int) -> float:
    """Return the largest value that each rank may send if the sum over the ranks must fit into dtype."""
    limit = LARGEST[dtype.name] / ranks
    given = np.array(limit, dtype)
    return float(given if float(given) <= limit else np.nextafter(given, np.zeros((), dtype)))


class Span(NamedTuple):
    """Says where a gradient lies in its bucket. begin and size are numbers of elements."""

    number: int  # the index of the parameter
    begin: int
    size: int

    @property
    def span(self) -> slice:
        return slice(self.begin, self.begin + self.size)


class Layout(NamedTuple):
    """Describes the content of a bucket: the gradients, then one mark per gradient, then the carried number."""

    dtype: np.dtype[Any]
    places: tuple[Span, ...]
    marks: int  # where the marks begin, in elements
    size: int


def layouts(
    kinds: Sequence[tuple[np.dtype[Any], int]], order: Sequence[int], bucket_bytes: int, first_bytes: int = FIRST_BYTES
) -> list[Layout]:
    """Distribute gradients over buckets, and return the bucket layouts in the order in which the buckets fill up.

    kinds: the dtype and the size of each gradient. order: the gradients' indices in the order in which the gradients
    become ready. All arguments are equal on all ranks, so all ranks create the same buckets. A bucket holds at most
    bucket_bytes, and the first bucket of each dtype holds at most first_bytes. A gradient that is larger than this
    limit gets a bucket of its own.
    """
    # For each bucket: the position of its final gradient in `order`, and the indices of its gradients.
    made: list[tuple[int, list[int]]] = []
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
        places.append(Span(index, at, kinds[index][1]))
        at += math.ceil(kinds[index][1] / line) * line
    return Layout(dtype, tuple(places), at, at + len(places) + 1)


def wired(dtype: np.dtype[Any], compression: str | None) -> np.dtype[Any]:
    """Return the dtype in which gradients of this dtype are sent with this compression."""
    if compression is None or dtype.itemsize <= 2 or dtype.kind != "f":
        return dtype
    return dtype_by_name(COMPRESSIONS[compression])


class Bucket(ABC):
    """Holds a bucket's memory, and its state in the current step. A subclass sets `array`, `memory` and `marks`."""

    array: Any
    """Holds the gradients one after the other. It is a one-dimensional array of NumPy or of the parameters' library."""
    memory: np.ndarray[Any, Any]
    """The memory of `array`. In a CPU bucket, this memory also holds the marks and the carried number."""
    marks: np.ndarray[Any, Any]
    """Holds one number per gradient. After the step, the number is nonzero if at least one rank had the gradient."""
    marks_go_along = False
    """Whether the marks are reduced with the gradients. If not, Step sends them in a separate call."""
    residual: Any = None
    """With compression, an array like `array` that holds the gradients' residuals. Without compression, None."""
    carries = False
    """Whether the number `carried` can be sent with the gradients, in a dtype that is precise enough for a loss."""
    carried = 0.0

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.there = bytearray(len(layout.places))  # 1 for each gradient that is ready in this step
        self.missing = len(layout.places)
        self._work: Work | None = None

    @functools.cached_property
    def parts(self) -> list[Any]:
        """Return the memory of each gradient as a one-dimensional array."""
        return [self.memory[place.span] for place in self.layout.places]

    def array_of(self, turn: int, shape: tuple[int, ...]) -> Any:
        """Return one gradient, as a view of `array`. turn: the gradient's position in the layout."""
        return self.array[self.layout.places[turn].span].reshape(shape)

    def residual_of(self, turn: int) -> np.ndarray[Any, Any] | None:
        """Return a copy of one gradient's compression residual, or None without compression."""
        if self.residual is None:
            return None
        return on_host(self.residual[self.layout.places[turn].span], "residual", "GradientReducer").copy()

    def owe(self, turn: int, residual: np.ndarray[Any, Any]) -> None:
        """Set one gradient's compression residual. Without compression, do nothing."""
        if self.residual is not None:
            fill(self.residual[self.layout.places[turn].span], residual.reshape(-1), "residual", "GradientReducer")

    @abstractmethod
    def put(self, turn: int, source: np.ndarray[Any, Any]) -> None:
        """Copy a gradient of this step from source, which is in C order. A device bucket copies it only when the bucket
        is started."""

    @abstractmethod
    def take(self, turn: int, other: Any, its_turn: int) -> None:
        """Copy a gradient, its mark and its compression residual from another bucket of the same class."""

    @abstractmethod
    def clear(self) -> None:
        """Set all gradients to zero."""

    @abstractmethod
    def start(self, async_op: bool) -> None:
        """Start to reduce the bucket in place, with zeros for gradients that this rank does not have. If async_op is
        False, return only when the all_reduce has completed."""

    def finish(self) -> None:
        """Wait until the bucket has been reduced."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    @abstractmethod
    def scale(self, factor: float) -> None:
        """Multiply all gradients by factor."""

    def forget(self) -> None:
        """Begin a new step, in which no gradient is ready yet."""
        self.there[:] = bytes(len(self.there))
        self.missing = len(self.there)


class HostBucket(Bucket):
    """A bucket in memory that the ranks of a host share."""

    marks_go_along = True

    def __init__(self, layout: Layout, op: str, compression: str | None, group: Group) -> None:
        super().__init__(layout)
        self._op, self._group = op, group
        self.memory = self._wire = collectives.zeros(layout.size, layout.dtype)
        self.array = self.memory[: layout.marks]
        self.marks = self.memory[layout.marks : -1]
        on_wire = wired(layout.dtype, compression)
        if on_wire != layout.dtype:
            self._wire = collectives.zeros(layout.size, on_wire)
            self.residual = np.zeros(layout.marks, layout.dtype)
            self._limit = largest(on_wire, group.size if op == "sum" else 1)
        self.carries = layout.dtype.itemsize >= 4 and self.residual is None

    def put(self, turn: int, source: np.ndarray[Any, Any]) -> None:
        self.parts[turn][:] = source.reshape(-1)

    def take(self, turn: int, other: HostBucket, its_turn: int) -> None:
        self.parts[turn][:] = other.parts[its_turn]
        self.marks[turn] = other.marks[its_turn]
        if self.residual is not None:
            mine, its = self.layout.places[turn].span, other.layout.places[its_turn].span
            self.residual[mine] = other.residual[its]

    def clear(self) -> None:
        self.array[:] = 0

    def start(self, async_op: bool) -> None:
        if self.missing:
            for part, there in zip(self.parts, self.there, strict=True):
                if not there:
                    part[:] = 0
        self.marks[:] = np.frombuffer(self.there, np.uint8)
        self.memory[-1] = self.carried
        if self.residual is not None:
            self._compress()
        started = collectives.all_reduce(self._wire, self._op, out=self._wire, group=self._group, async_op=async_op)
        self._work = started if async_op else None

    def finish(self) -> None:
        super().finish()
        if self._wire is not self.memory:
            _core.expand(self._wire, self.memory)
        self.carried = float(self.memory[-1].real)

    def scale(self, factor: float) -> None:
        self.array *= self.layout.dtype.type(factor)

    def _compress(self) -> None:
        """Round the gradients to the dtype in which they are sent, with error feedback.

        If this rank does not have a gradient, it sends zeros, and keeps the gradient's residual until it has the
        gradient again. If the residual were sent although no rank had the gradient, the result would not be used, and
        the residual would be lost.
        """
        end = self.layout.marks
        spans = [slice(0, end)]
        if not all(self.there):
            spans = [place.span for place, there in zip(self.layout.places, self.there, strict=True) if there]
            self._wire[:end] = 0
        for span in spans:
            _core.compress(self.array[span], self.residual[span], self._wire[span], self._limit)
        self._wire[end:] = self.memory[end:]  # the marks are 0 or 1, which any dtype can hold
