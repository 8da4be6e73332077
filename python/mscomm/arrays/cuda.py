"""Arrays with the CUDA array interface (version 3) from libraries that have no module in this folder, such as Numba.

Calls are enqueued on the stream that the array's interface names, or on the legacy default stream if the interface
names no stream. mscomm cannot create such arrays, so `out` must be passed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mscomm.arrays.device import OnDevice, on_device
from mscomm.arrays.foreign import assign, from_host, new, on_host, packed

__all__ = ["assign", "from_host", "is_array", "memory", "new", "on_host", "packed"]


def is_array(x: Any) -> bool:
    # Some libraries define the property for all of their arrays, and raise AttributeError for those on the CPU.
    return hasattr(type(x), "__cuda_array_interface__") and hasattr(x, "__cuda_array_interface__")


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
