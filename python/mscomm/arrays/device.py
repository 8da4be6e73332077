"""The memory of an array on a device, described in the same way for all libraries that have such arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mscomm.arrays.described import in_memory

_BY_ADDRESS = (np.shares_memory, np.may_share_memory)


class OnDevice(np.ndarray[Any, Any]):
    """The memory of an array on a device: address, shape, strides and dtype, as NumPy describes them.

    The host cannot read or write this memory: an attempt raises TypeError. `backend` is the backend that can access the
    memory, and `index` is the number of the device. Calls on the array are enqueued on `stream`, which is a stream
    handle of the vendor's library. `current()` returns the handle of the array library's current stream at the time of
    the call.
    """

    backend: str
    index: int  # -1 if the library does not say which device it is
    stream: int
    current: Callable[[], int]

    def __array_finalize__(self, parent: Any) -> None:
        if isinstance(parent, OnDevice):
            self.backend, self.index = parent.backend, parent.index
            self.stream, self.current = parent.stream, parent.current

    def __getitem__(self, key: Any) -> Any:
        if not all(isinstance(one, slice) for one in (key if isinstance(key, tuple) else (key,))) or key == ():
            raise TypeError("this memory is on a device: its elements cannot be read")
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("this memory is on a device: it cannot be written")

    def __array_ufunc__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("this memory is on a device: NumPy cannot compute with it")

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function not in _BY_ADDRESS:
            raise TypeError(f"this memory is on a device: numpy.{function.__name__} cannot be used on it")
        return super().__array_function__(function, types, args, kwargs)

    def __repr__(self) -> str:
        return f"<{self.dtype}{list(self.shape)} on device {self.index}>"

    __str__ = __repr__


def on_device(
    owner: Any,
    address: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    strides: tuple[int, ...] | None,
    index: int,
    current: Callable[[], int],
    *,
    backend: str = "nccl",
    writable: bool = True,
) -> OnDevice:
    """Describe the memory of an array on a device. strides: in bytes; None means C order without gaps.

    owner: the object to keep alive. current: a function that returns the handle of the library's current stream.
    """
    there = in_memory(owner, address, shape, dtype, strides, writable=writable).view(OnDevice)
    there.backend, there.index, there.current = backend, index, current
    there.stream = current()
    return there
