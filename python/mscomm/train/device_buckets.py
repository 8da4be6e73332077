"""Fusion buckets in a device's memory, as arrays of the array library.

If there is a kernel of csrc/cuda for the dtypes, one launch copies the gradients that lie outside their bucket into the
bucket, casts them and applies error feedback. Otherwise the gradients are copied, and the array library casts them and
applies error feedback. All work is enqueued on the library's current stream; nothing here waits for the device.
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
    """Whether a kernel converts gradients of dtype to the dtype in which they are sent, and back."""
    return group.core.packs(dtype_code(dtype), dtype_code(on_wire))


def why_not(group: Group, dtype: np.dtype[Any], compression: str | None, model: Any) -> str:
    """Return why gradients of this dtype, in arrays of model's library, cannot be reduced here; "" if they can."""
    arrays = library(model, "parameters", "GradientReducer")
    if not hasattr(arrays, "namespace"):
        return f"of {type(model).__name__} mscomm knows a protocol alone; use PyTorch's or CuPy's arrays"
    on_wire = wired(dtype, compression)
    if why := group.refuses(dtype_code(on_wire), _core.ops.index("sum")):
        return why
    if on_wire != dtype and not has_kernel(group, dtype, on_wire) and not hasattr(arrays.namespace, on_wire.name):
        return (
            f"{type(model).__name__} has no {on_wire.name}, and mscomm no kernels that make one of {dtype} (see mscomm"
            " doctor); use another compression"
        )
    return ""


class DeviceBucket(Bucket):
    """A bucket that is an array of model's library on the device. Make a DeviceBucket only if why_not() returns ""."""

    def __init__(self, layout: Layout, op: str, compression: str | None, group: Group, model: Any) -> None:
        super().__init__(layout)
        self._group = group
        self._arrays = library(model, "parameters", "GradientReducer")
        self._marks = np.zeros(len(layout.places))
        self._streams: set[int] = set()  # the streams that have used the memory
        self._made: list[Any] = []
        self._array, self._memory = self._new(model, layout.marks)
        self._parts: list[OnDevice] = [self._memory[place.span] for place in layout.places]
        self._sources: list[OnDevice | None] = [None] * len(layout.places)  # None if the gradient lies in the bucket
        self._wire_array, self._wire, self._limit = self._array, self._memory, np.inf
        self._residual_array: Any = None
        self._residual: OnDevice | None = None
        self._has_kernel = False
        on_wire = wired(layout.dtype, compression)
        if on_wire != layout.dtype:
            self._residual_array, self._residual = self._new(model, layout.marks)
            bits, memory = self._new(model, layout.marks * on_wire.itemsize // layout.dtype.itemsize)
            self._wire = cast(OnDevice, memory.view(on_wire))
            self._has_kernel = has_kernel(group, layout.dtype, on_wire)
            if not self._has_kernel:
                self._wire_array = bits.view(getattr(self._arrays.namespace, on_wire.name))
            self._limit = largest(on_wire, group.size)
        # Compute the mean from the sum if gradients are sent in a narrow dtype, or if the vendor's library has no mean.
        # For a mean, NCCL multiplies by 1 / n in the dtype that is sent (hostToDevRedOp in NCCL's enqueue.cc). In
        # bfloat16, 1 / n has a relative error of up to 1/512.
        narrow = on_wire != layout.dtype or on_wire.name == "bfloat16"
        sums = op == "sum" or narrow or bool(group.refuses(dtype_code(on_wire), _core.ops.index("avg")))
        self._op = "sum" if sums else "avg"
        self._factor = 1 / group.size if op == "avg" and sums else 1.0

    def _new(self, model: Any, size: int) -> tuple[Any, OnDevice]:
        """Return an array of zeros with model's dtype, and the memory of this array."""
        memory, made = self._arrays.new(model, (size,))
        with self._group.failing():
            self._group.core.clear(memory, memory.stream)
        self._made.append(made())
        return self._made[-1], memory

    def _stream(self) -> int:
        """Return the current stream. If the bucket has not used this stream before, tell the array library about it,
        because the library may have allocated the memory on another stream."""
        stream = self._memory.current()
        if stream not in self._streams:
            self._streams.add(stream)
            if hasattr(self._arrays, "used"):
                for one in self._made:
                    self._arrays.used(one)
        return stream

    @property
    def marks(self) -> np.ndarray[Any, Any]:
        return self._marks

    @property
    def memory(self) -> OnDevice:
        return self._memory

    @property
    def narrows(self) -> bool:
        return self._residual is not None

    def memory_of(self, turn: int) -> OnDevice:
        return self._parts[turn]

    def array_of(self, turn: int, shape: tuple[int, ...]) -> Any:
        return self._array[self.layout.places[turn].span].reshape(shape)

    def put(self, turn: int, source: np.ndarray[Any, Any]) -> None:
        assert isinstance(source, OnDevice)
        self._sources[turn] = source

    def take(self, turn: int, other: DeviceBucket, its_turn: int) -> None:
        self._marks[turn] = other._marks[its_turn]
        stream = self._stream()
        other._stream()
        with self._group.failing():
            self._group.core.pack(self._parts[turn], [other._parts[its_turn]], stream)
            if self._residual is not None and other._residual is not None:
                mine, its = self.layout.places[turn].span, other.layout.places[its_turn].span
                self._group.core.pack(self._residual[mine], [other._residual[its]], stream)

    def clear(self) -> None:
        with self._group.failing():
            self._group.core.clear(self._memory, self._stream())

    def start(self, async_op: bool) -> None:
        self._marks[:] = np.frombuffer(self.there, np.uint8)
        stream = self._stream()
        with self._group.failing():
            if self._has_kernel:
                self._pack(self._wire, stream)
            else:
                self._pack(self._memory, stream)
                if self._residual is not None:
                    self._narrow()
        self._sources = [None] * len(self._sources)
        self._wire.stream = stream
        started = all_reduce(self._wire, self._op, out=self._wire, group=self._group, async_op=async_op)
        self._work = started if async_op else None

    def _pack(self, bucket: OnDevice, stream: int) -> None:
        """Copy the gradients into `bucket`, and write zeros for gradients that this rank does not have."""
        if not any(self.there):
            self._group.core.clear(bucket, stream)
            return
        begins, parts = [], []
        for place, there, source, here in zip(self.layout.places, self.there, self._sources, self._parts, strict=True):
            if not there:
                self._group.core.clear(bucket[place.span], stream)
            elif source is not None or bucket is not self._memory:
                begins.append(place.begin)
                parts.append(here if source is None else source)
        if bucket is self._memory:
            self._group.core.pack(bucket, parts, stream, begins=begins)
        else:
            self._group.core.pack(bucket, parts, stream, begins=begins, residual=self._residual, largest=self._limit)

    def finish(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
        stream = self._stream()
        if self._has_kernel:
            with self._group.failing():
                self._group.core.unpack(self._wire, [self._memory], stream, scale=self._factor)
            return
        if self._residual is not None:
            self._widen()
        if self._factor != 1:
            self.scale(self._factor)

    def residual_of(self, turn: int) -> np.ndarray[Any, Any] | None:
        if self._residual_array is None:
            return None
        there: np.ndarray[Any, Any] = self._arrays.on_host(self._residual_array[self.layout.places[turn].span])
        return there

    def owe(self, turn: int, residual: np.ndarray[Any, Any]) -> None:
        if self._residual_array is not None:
            there = self._residual_array[self.layout.places[turn].span]
            self._arrays.assign(there, self._arrays.from_host(there, residual.reshape(-1)))

    # -- computations by the array library

    def scale(self, factor: float) -> None:
        self._array *= factor

    def _widen(self) -> None:
        self._array[...] = self._wire_array

    def _narrow(self) -> None:
        """Round the gradients like HostBucket._narrow. The array library does this, with the same bits as the
        kernels."""
        use = self._arrays.namespace
        spans = [place.span for place, there in zip(self.layout.places, self.there, strict=True) if there]
        if len(spans) == len(self.there):
            spans = [slice(None)]
        for span in spans:
            residual, wire = self._residual_array[span], self._wire_array[span]
            whole = self._array[span] + residual
            finite = use.isfinite(whole)
            wire[...] = use.where(finite, use.clip(whole, -self._limit, self._limit), whole)
            residual[...] = use.where(finite, whole - wire, 0.0)
        for place, there in zip(self.layout.places, self.there, strict=True):
            if not there:
                self._group.core.clear(self._wire[place.span], self._wire.current())
