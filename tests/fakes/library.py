"""Makes mscomm accept DeviceArray, as the modules in python/mscomm/arrays do for the arrays of real libraries.

register() adds this module to mscomm.arrays.LIBRARIES.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from fakes import device_array
from fakes.device_array import DeviceArray

from mscomm import arrays
from mscomm.arrays.device import OnDevice, on_device
from mscomm.arrays.numpy import CODES

BACKEND = "nccl"
namespace = device_array.namespace
PLAIN = {DeviceArray: BACKEND}


def register(backend: str = "nccl") -> None:
    global BACKEND
    BACKEND = PLAIN[DeviceArray] = backend
    arrays.LIBRARIES["fakes"] = "fakes"
    sys.modules["mscomm.arrays.fakes"] = sys.modules[__name__]


def is_array(x: Any) -> bool:
    return isinstance(x, DeviceArray)


def memory(x: DeviceArray) -> OnDevice:
    strides = None if x.is_contiguous() else x.strides
    return on_device(x, x.ptr, x.shape, x.dtype, strides, x.device, device_array.current_stream, backend=BACKEND)


def plain(x: DeviceArray) -> tuple[int, tuple[int, ...], int, int, int] | None:
    code = CODES.get(x.dtype)
    if code is None or not x.is_contiguous():
        return None
    return x.ptr, x.shape, code, x.device, device_array.current_stream()


def empty(x: DeviceArray, shape: tuple[int, ...]) -> DeviceArray:
    return type(x).empty(shape, x.dtype, x.device)


def new(x: DeviceArray, shape: tuple[int, ...]) -> tuple[OnDevice, Callable[[], DeviceArray]]:
    made = empty(x, shape)
    return memory(made), lambda: made


def packed(x: DeviceArray) -> DeviceArray:
    return x.contiguous()


def assign(out: DeviceArray, made: DeviceArray) -> None:
    out.copy_(made if made.dtype == out.dtype else from_host(out, on_host(made).astype(out.dtype)))


users: list[tuple[int, int]] = []  # for each call of used(): an address, and the stream that uses it


def used(x: DeviceArray) -> None:
    """Only record the call in `users`. The call has no effect on when the memory is freed."""
    users.append((x.ptr, device_array.current_stream()))


def on_host(x: DeviceArray) -> np.ndarray[Any, Any]:
    return x.to_numpy()


def from_host(x: DeviceArray, numbers: np.ndarray[Any, Any]) -> DeviceArray:
    return type(x).from_numpy(numbers, x.device)
