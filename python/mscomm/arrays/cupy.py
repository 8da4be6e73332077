"""CuPy arrays. Calls are enqueued on CuPy's current stream; results come from CuPy's memory pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy
import numpy as np

from mscomm.arrays.device import OnDevice, on_device
from mscomm.arrays.numpy import CODES

PLAIN = {cupy.ndarray: "nccl"}

namespace = cupy


def is_array(x: Any) -> bool:
    return isinstance(x, cupy.ndarray)


def memory(x: cupy.ndarray) -> OnDevice:
    index = x.data.device_id
    return on_device(
        x, x.data.ptr, x.shape, x.dtype, x.strides, index, lambda: int(cupy.cuda.get_current_stream(index).ptr)
    )


def plain(x: cupy.ndarray) -> tuple[int, tuple[int, ...], int, int, int] | None:
    data, code = x.data, CODES.get(x.dtype)
    if code is None or not x.flags.c_contiguous:
        return None
    index = data.device_id
    return data.ptr, x.shape, code, index, cupy.cuda.get_current_stream(index).ptr


def empty(x: cupy.ndarray, shape: tuple[int, ...]) -> cupy.ndarray:
    with cupy.cuda.Device(x.data.device_id):
        return cupy.empty(shape, x.dtype)


def new(x: cupy.ndarray, shape: tuple[int, ...]) -> tuple[OnDevice, Callable[[], cupy.ndarray]]:
    made = empty(x, shape)
    return memory(made), lambda: made


def packed(x: cupy.ndarray) -> cupy.ndarray:
    return cupy.ascontiguousarray(x)


def assign(out: cupy.ndarray, made: cupy.ndarray) -> None:
    out[...] = made


def on_host(x: cupy.ndarray) -> np.ndarray[Any, Any]:
    return x.get()  # type: ignore[no-any-return]


def from_host(x: cupy.ndarray, numbers: np.ndarray[Any, Any]) -> cupy.ndarray:
    with cupy.cuda.Device(x.data.device_id):
        made, stream = cupy.empty(numbers.shape, numbers.dtype), cupy.cuda.get_current_stream()
        made.set(np.asarray(numbers, order="C"), stream)
        stream.synchronize()  # from here on, the caller may change `numbers`
    return made
