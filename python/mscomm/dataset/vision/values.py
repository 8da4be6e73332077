"""The operations that turn pixels into numbers for a network: Rescale, Normalize and HWC2CHW."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mscomm.dataset.operation import Array, Operation

_RUN = 512  # if a run of elements with the same mean is at least this long, NumPy's cost per run is negligible


class Rescale(Operation):
    """Computes x * rescale + shift in float32, for any shape and any real dtype.

    Raises TypeError if an argument is not a number.

    >>> Rescale(1.0 / 255.0, 0.0)(np.full((1, 1, 3), 255, np.uint8))
    array([[[1., 1., 1.]]], dtype=float32)
    """

    def __init__(self, rescale: float, shift: float) -> None:
        for name, value in (("rescale", rescale), ("shift", shift)):
            if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
                raise TypeError(f"Rescale: {name} is a {type(value).__name__}; expected a number")
        self._rescale = np.float32(rescale)
        self._shift = np.float32(shift)

    def __call__(self, x: Any) -> Array:
        result: Array = np.asarray(x).astype(np.float32)
        result *= self._rescale
        if self._shift:
            result += self._shift
        return result

    def on_rows(self, rows: Array, draws: Sequence[int] = ()) -> Array:
        return self(rows)


class Normalize(Operation):
    """Computes (x - mean) / std for each channel, in float32.

    mean, std: a tuple with one number for each channel, or with one number for all channels. A mean must be from 0 to
    255, and a std must be above 0 and at most 255. is_hwc: True if the channels are the last axis, False if they are
    the third axis from the end, as after HWC2CHW. The operation accepts an image with three axes, or a batch of such
    images, of any real dtype. Raises TypeError or ValueError for invalid arguments, and ValueError if mean and std have
    several numbers, but not one for each channel of the image.

    >>> Normalize((0.5,), (0.25,))(np.ones((1, 1, 3), np.float32))
    array([[[2., 2., 2.]]], dtype=float32)
    """

    def __init__(self, mean: Any, std: Any, is_hwc: bool = True) -> None:
        self._mean, self._std = _numbers("mean", mean), _numbers("std", std)
        if len(self._mean) != len(self._std):
            raise ValueError(
                f"Normalize: mean has {len(self._mean)} numbers and std {len(self._std)}; expected the same number"
            )
        if not ((self._mean >= 0) & (self._mean <= 255)).all():
            raise ValueError(f"Normalize: mean={mean!r}; expected 0 to 255")
        if not ((self._std > 0) & (self._std <= 255)).all():
            raise ValueError(f"Normalize: std={std!r}; expected more than 0 and up to 255")
        if not isinstance(is_hwc, bool):
            raise TypeError(f"Normalize: is_hwc is a {type(is_hwc).__name__}; expected a bool")
        self._axis = -1 if is_hwc else -3

    def __call__(self, x: Any) -> Array:
        return self._normalized(np.asarray(x), 3)

    def on_rows(self, rows: Array, draws: Sequence[int] = ()) -> Array:
        return self._normalized(rows, 4)

    def _normalized(self, x: Array, least_axes: int) -> Array:
        if x.ndim < least_axes:
            raise ValueError(f"Normalize: expected an image with channels, got {x.dtype}{list(x.shape)}")
        channels = x.shape[self._axis]
        if len(self._mean) not in (1, channels):
            raise ValueError(
                f"Normalize: mean and std have {len(self._mean)} numbers, the image {x.dtype}{list(x.shape)} has"
                f" {channels} channels"
            )
        shape = (-1,) if self._axis == -1 else (-1, 1, 1)
        mean, std = self._mean.reshape(shape), self._std.reshape(shape)
        order = sorted(range(x.ndim), key=lambda axis: -x.strides[axis])  # the axes in memory order, outermost first
        inside = order.index(x.ndim + self._axis)  # the place of the channels in that order
        lines = x.transpose(order)
        if math.prod(lines.shape[inside + 1 :]) >= _RUN or not lines.flags.c_contiguous or not x.size:
            return _divided(np.subtract(x, mean, dtype=np.float32), std)
        # NumPy runs a separate loop for each run of elements with the same mean, so short runs are up to seven times
        # slower than long runs. Instead, repeat mean and std over a longer line of memory, and compute line by line.
        # Both ways give bit-identical results.
        begin = inside
        while begin and math.prod(lines.shape[begin:]) < _RUN:
            begin -= 1
        mean, std = (
            np.broadcast_to(numbers, x.shape).transpose(order)[(0,) * begin].reshape(-1) for numbers in (mean, std)
        )
        result = _divided(np.subtract(lines.reshape(-1, mean.size), mean, dtype=np.float32), std)
        return result.reshape(lines.shape).transpose(np.argsort(order))


class HWC2CHW(Operation):
    """Moves the channels before height and width: (height, width, channels) becomes (channels, height, width).

    The array may have a batch axis in front of these axes. Any dtype is allowed. Raises ValueError if there are fewer
    than three axes.

    >>> HWC2CHW()(np.zeros((32, 24, 3))).shape
    (3, 32, 24)
    """

    def __call__(self, x: Any) -> Array:
        return self._moved(np.asarray(x), 3)

    def on_rows(self, rows: Array, draws: Sequence[int] = ()) -> Array:
        return self._moved(rows, 4)

    def _moved(self, x: Array, least_axes: int) -> Array:
        if x.ndim < least_axes:
            raise ValueError(f"HWC2CHW: expected (height, width, channels), got {x.dtype}{list(x.shape)}")
        return x.transpose(*range(x.ndim - 3), -1, -3, -2)


def _divided(x: Array, by: Array) -> Array:
    x /= by
    return x


def _numbers(name: str, values: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    listed = values if isinstance(values, (tuple, list)) else ()
    if not listed or any(isinstance(one, bool) or not isinstance(one, (int, float, np.number)) for one in listed):
        raise TypeError(f"Normalize: {name}={values!r}; expected a tuple of numbers, one for each channel")
    return np.array(values, np.float32)
