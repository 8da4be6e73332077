"""NumPy arrays over memory that another library owns, by its address."""

from __future__ import annotations

from typing import Any

import numpy as np


class _Described:
    """What NumPy makes an array of without looking at the memory. The array keeps this alive, and this the owner."""

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
    """An array of that shape and dtype at the address, which keeps the owner of the memory alive.

    strides: in bytes; None: in C order, without gaps.
    """
    interface = {
        "version": 3,
        "shape": shape,
        "typestr": f"|V{dtype.itemsize}",  # NumPy has no other for bfloat16
        "strides": strides,
        # NumPy takes address 0 to mean memory of its own. An array without elements may have none.
        "data": (address or 1 << 12, not writable),
    }
    return np.asarray(_Described(owner, interface)).view(dtype)
