"""Defines a DeviceArray with arithmetic, like CuPy's arrays. Each operation waits for the current stream, and returns a
new array on the device. NumPy computes the numbers on the host, so a program gets the same bits as with NumPy arrays.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from fakes.device_array import DeviceArray


def _on_the_host(function: Callable[..., Any]) -> Callable[..., DeviceNumbers]:
    def compute(self: DeviceNumbers, *others: Any, **options: Any) -> DeviceNumbers:
        given = [one.to_numpy() if isinstance(one, DeviceArray) else one for one in (self, *others)]
        return type(self).from_numpy(function(*given, **options), self.device)

    return compute


def _swapped(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda x, y: function(y, x)


class DeviceNumbers(DeviceArray):
    __array_ufunc__ = None  # makes NumPy leave `scalar + array` to __radd__ of this class

    __add__, __radd__ = _on_the_host(operator.add), _on_the_host(_swapped(operator.add))
    __sub__, __rsub__ = _on_the_host(operator.sub), _on_the_host(_swapped(operator.sub))
    __mul__, __rmul__ = _on_the_host(operator.mul), _on_the_host(_swapped(operator.mul))
    __matmul__ = _on_the_host(operator.matmul)
    __pow__ = _on_the_host(operator.pow)
    sum, mean = _on_the_host(np.sum), _on_the_host(np.mean)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("a device array is not converted to NumPy implicitly")  # as CuPy does
