"""MindSpore tensors on the CPU, in PyNative mode.

`asnumpy()` returns an array over the memory of the tensor or, if the tensor is a view of another tensor, a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore
import numpy as np

from mscomm.arrays.numpy import dtype_by_name


def is_array(x: Any) -> bool:
    return isinstance(x, mindspore.Tensor)


def memory(x: mindspore.Tensor) -> np.ndarray[Any, Any]:
    there: np.ndarray[Any, Any] = x.asnumpy()
    if x.asnumpy().__array_interface__["data"] != there.__array_interface__["data"]:
        there.flags.writeable = False  # x is a view and `there` is a copy, so writing to `there` would not change x
    # For bfloat16, `asnumpy()` uses MindSpore's own NumPy dtype. mscomm uses the dtype of ml_dtypes.
    return there.view(dtype_by_name("bfloat16")) if there.dtype.name == "bfloat16" else there


def new(x: mindspore.Tensor, shape: tuple[int, ...]) -> tuple[np.ndarray[Any, Any], Callable[[], mindspore.Tensor]]:
    filled = np.empty(shape, memory(x).dtype)
    return filled, lambda: over(filled)


def over(memory: np.ndarray[Any, Any]) -> mindspore.Tensor:
    return mindspore.Tensor.from_numpy(memory)


def of_numpy(numbers: np.ndarray[Any, Any]) -> mindspore.Tensor:
    return over(numbers)
