"""Makes NumPy arrays over memory that another library owns, given the address of the memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np


def in_memory(
    owner: Any,
    address: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    strides: tuple[int, ...] | None,
    *,
    writable: bool = True,
) -> np.ndarray[Any, Any]:
    """Return a NumPy array of this shape and dtype over the memory at `address`. The array keeps `owner` alive.

    strides: in bytes; None means C order without gaps.
    """
    interface = {
        "version": 3,
        "shape": shape,
        "typestr": f"|V{dtype.itemsize}",  # raw bytes, because NumPy has no typestr for bfloat16
        "strides": strides,
        # An empty array may have address 0, for which NumPy would allocate new memory. Such an array gets address 4096.
        "data": (address or 1 << 12, not writable),
    }
    described = SimpleNamespace(owner=owner, __array_interface__=interface)  # the array keeps this object alive
    return np.asarray(described).view(dtype)
