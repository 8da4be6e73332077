"""Fusion buckets in device memory. The buckets are arrays of the parameters' array library.

If csrc/cuda has a kernel for the gradients' dtype and the dtype that is sent, one kernel launch gathers the gradients
of a bucket, including those that lie outside it, casts them and applies error feedback. Otherwise, the gradients are
first copied into the bucket, and the array library then casts them and applies error feedback. All work is enqueued on
the library's current stream. No function in this file waits for the device.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from mscomm import _core
from mscomm.arrays import library
from mscomm.arrays.device import OnDevice
from mscomm.arrays.numpy import dtype_code
from mscomm.collectives import all_reduce
from mscomm.group import Group
from mscomm.train.buckets import Bucket, Layout, largest, wired


def has_kernel(group: Group, dtype: np.dtype[Any], on_wire: np.dtype[Any]) -> bool:
    """Return whether a kernel converts gradients of dtype to the dtype in which they are sent, and back."""
    return group.core.packs(dtype_code(dtype), dtype_code(on_wire))


def why_not(group: Group, dtype: np.dtype[Any], compression: str | None, model: Any) -> str:
    """Return why this rank cannot reduce gradients of this dtype in arrays like `model`, or "" if it can."""
    arrays = library(model, "parameters", "GradientReducer")
    if not hasattr(arrays, "namespace"):
        return f"mscomm knows {type(model).__name__} only by its protocol; use arrays of PyTorch or CuPy"
    on_wire = wired(dtype, compression)
    if why := group.refuses(dtype_code(on_wire), _core.ops.index("sum")):
        return why
    if on_wire != dtype and not has_kernel(group, dtype, on_wire) and not hasattr(arrays.namespace, on_wire.name):
        return (
            f"{type(model).__name__} has no {on_wire.name}, and mscomm has no kernels that make one of {dtype} (see "
            "mscomm doctor); use another compression"
        )
    return ""


class DeviceBucket(Bucket):
    """A bucket in device memory. It is an array of the same library as `model`. Create it only if why_not() is ""."""

    memory: OnDevice

    def __init__(self, layout: Layout, op: str, compression: str | None, group: Group, model: Any) -> None:
        super().__init__(layout)
        self._group = group
        self._arrays = library(model, "parameters", "GradientReducer")
        self.marks = np.zeros(len(layout.places))
        self._streams: set[int] = set()  # the streams that have used the memory
        self._made: list[Any] = []
        self.array, self.memory = self._new(model, layout.marks)
        self._sources: list[OnDevice | None] = [None] * len(layout.places)  # None if the gradient lies in the bucket
        self._wire_array, self._wire, self._limit = self.array, self.memory, np.inf
        self._residual: OnDevice | None = None  # the memory of `residual`
        self._has_kernel = False
        on_wire = wired(layout.dtype, compression)
        if on_wire != layout.dtype:
            self.residual, self._residual = self._new(model, layout.marks)
            bits, memory = self._new(model, layout.marks * on_wire.itemsize // layout.dtype.itemsize)
            self._wire = cast(OnDevice, memory.view(on_wire))
            self._has_kernel = has_kernel(group, layout.dtype, on_wire)
            if not self._has_kernel:
                self._wire_array = bits.view(getattr(self._arrays.namespace, on_wire.name))
            self._limit = largest(on_wire, group.size)
        # Compute the mean from the sum if gradients are sent in a narrow dtype, or if the vendor's library cannot
        # compute a mean. In a narrow dtype, the library's mean is less exact: NCCL multiplies by 1 / n in the dtype
        # that is sent (hostToDevRedOp in NCCL's enqueue.cc), and 1 / n in bfloat16 has a relative error of up to 1/512.
        narrow = on_wire != layout.dtype or on_wire.name == "bfloat16"
        sums = op == "sum" or narrow or bool(group.refuses(dtype_code(on_wire), _core.ops.index("avg")))
        self._op = "sum" if sums else "avg"
        self._factor = 1 / group.size if op == "avg" and sums else 1.0

    def _new(self, model: Any, size: int) -> tuple[Any, OnDevice]:
        """Return an array of zeros with the dtype of `model`, and the memory of this array."""
        memory, made = self._arrays.new(model, (size,))
        self._group.clear(memory, memory.stream)
        self._made.append(made())
        return self._made[-1], memory

    def _stream(self) -> int:
        """Return the current stream. When the bucket uses a stream for the first time, tell the array library, because
        a library that allocated the memory on a different stream might otherwise reuse the memory too early."""
        stream = self.memory.current()
        if stream not in self._streams:
            self._streams.add(stream)
            if hasattr(self._arrays, "used"):
                for one in self._made:
                    self._arrays.used(one)
        return stream

    def put(self, turn: int, source: np.ndarray[Any, Any]) -> None:
        assert isinstance(source, OnDevice)
        self._sources[turn] = source

    def take(self, turn: int, other: DeviceBucket, its_turn: int) -> None:
        self.marks[turn] = other.marks[its_turn]
        stream = self._stream()
        other._stream()
        self._group.pack(self.parts[turn], [other.parts[its_turn]], stream)
        if self._residual is not None and other._residual is not None:
            mine, its = self.layout.places[turn].span, other.layout.places[its_turn].span
            self._group.pack(self._residual[mine], [other._residual[its]], stream)

    def clear(self) -> None:
        self._group.clear(self.memory, self._stream())

    def start(self, async_op: bool) -> None:
        self.marks[:] = np.frombuffer(self.there, np.uint8)
        stream = self._stream()
        if self._has_kernel:
            self._pack(self._wire, stream)
        else:
            self._pack(self.memory, stream)
            if self.residual is not None:
                self._narrow()
        self._sources = [None] * len(self._sources)
        self._wire.stream = stream
        started = all_reduce(self._wire, self._op, out=self._wire, group=self._group, async_op=async_op)
        self._work = started if async_op else None

    def _pack(self, bucket: OnDevice, stream: int) -> None:
        """Copy the gradients into `bucket`, and write zeros for gradients that this rank does not have."""
        if not any(self.there):
            self._group.clear(bucket, stream)
            return
        begins, parts = [], []
        for place, there, source, here in zip(self.layout.places, self.there, self._sources, self.parts, strict=True):
            if not there:
                self._group.clear(bucket[place.span], stream)
            elif source is not None or bucket is not self.memory:
                begins.append(place.begin)
                parts.append(here if source is None else source)
        if bucket is self.memory:
            self._group.pack(bucket, parts, stream, begins=begins)
        else:
            self._group.pack(bucket, parts, stream, begins=begins, residual=self._residual, largest=self._limit)

    def finish(self) -> None:
        super().finish()
        stream = self._stream()
        if self._has_kernel:
            self._group.unpack(self._wire, [self.memory], stream, scale=self._factor)
            return
        if self.residual is not None:
            self._widen()
        if self._factor != 1:
            self.scale(self._factor)

    # -- computations by the array library

    def scale(self, factor: float) -> None:
        self.array *= factor

    def _widen(self) -> None:
        self.array[...] = self._wire_array

    def _narrow(self) -> None:
        """Round the gradients with error feedback, as narrow_and_owe() in csrc/base/numbers.h does, but with the array
        library. This function, the kernels and CPU buckets give bit-identical results."""
        use = self._arrays.namespace
        spans = [place.span for place, there in zip(self.layout.places, self.there, strict=True) if there]
        if len(spans) == len(self.there):
            spans = [slice(None)]
        for span in spans:
            residual, wire = self.residual[span], self._wire_array[span]
            whole = self.array[span] + residual
            finite = use.isfinite(whole)
            wire[...] = use.where(finite, use.clip(whole, -self._limit, self._limit), whole)
            residual[...] = use.where(finite, whole - wire, 0.0)
        for place, there in zip(self.layout.places, self.there, strict=True):
            if not there:
                self._group.clear(self._wire[place.span], self._wire.current())
