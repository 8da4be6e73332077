"""Makes NumPy arrays over memory that another library owns, given the address of the memory."""

from __future__ import annotations

from typing import Any

import numpy as np


class _Described:
    """An object that describes memory to NumPy. The array that NumPy makes keeps this object and the owner alive."""

    def __init__(self, owner: Any, interface: dict[str, Any]) -> None:
        self.owner = owner
        self.__array_interface__ = interface


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
    return np.asarray(_Described(owner, interface)).view(dtype)
