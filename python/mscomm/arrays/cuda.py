"""Any other array with the CUDA array interface (version 3), as Numba's and PyCUDA's.

Calls are enqueued on the stream that the array names, else on the legacy default stream. mscomm cannot make such
arrays: `out` must be given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from mscomm.arrays.device import OnDevice, on_device


def is_array(x: Any) -> bool:
    return hasattr(type(x), "__cuda_array_interface__")


def memory(x: Any) -> OnDevice:
    told = x.__cuda_array_interface__
    if told.get("mask") is not None:
        raise TypeError("is a masked array, which mscomm does not move")
    address, read_only = told["data"]
    stream = told.get("stream") or 0
    return on_device(
        x,
        address,
        tuple(told["shape"]),
        np.dtype(told["typestr"]),
        told.get("strides"),
        getattr(getattr(x, "device", None), "id", -1),
        lambda: int(stream),
        writable=not read_only,
    )


def new(x: Any, shape: tuple[int, ...]) -> tuple[OnDevice, Callable[[], Any]]:
    _refuse(x, f"give out=, an array of shape {shape}")


def packed(x: Any) -> Any:
    _refuse(x, "give it in C order")


def assign(out: Any, made: Any) -> None:
    _refuse(out, "give out in C order")


def _refuse(x: Any, advice: str) -> NoReturn:
    raise TypeError(f"{type(x).__name__} has the CUDA array interface alone, by which mscomm makes no arrays: {advice}")
