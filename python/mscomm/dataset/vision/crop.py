"""The operation RandomCrop."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import numpy as np

from mscomm.dataset.draws import below
from mscomm.dataset.operation import Array, RandomOperation, images_of, two_sizes


class Border(enum.Enum):
    """Says how a padded border is filled. The values are modes of numpy.pad."""

    CONSTANT = "constant"
    EDGE = "edge"
    REFLECT = "reflect"
    SYMMETRIC = "symmetric"


class RandomCrop(RandomOperation):
    """Crops the image at a random position. All positions are equally likely.

    size: (height, width) of the result, or one int for both. padding: how many pixels to add around the image before
    the crop. It is one int for all sides; two ints, the first for left and right, the second for top and bottom; or
    four ints (left, top, right, bottom). pad_if_needed: if True, images that are smaller than size are padded, as in
    torchvision. If there are too few rows, the top and bottom are padded. If there are too few columns, the left and
    right are padded. fill_value: the value of a constant border, from 0 to 255. It is one int for all channels, or a
    tuple with one int for each channel. padding_mode: Border.CONSTANT, EDGE, REFLECT or SYMMETRIC.

    The operation accepts images of shape (height, width, channels) or (height, width) and any dtype, and keeps the
    dtype. Raises TypeError or ValueError for invalid arguments, and ValueError if an image is smaller than size after
    padding.

    >>> RandomCrop((32, 32), (4, 4, 4, 4))(np.zeros((32, 32, 3), np.uint8)).shape
    (32, 32, 3)
    """

    def __init__(
        self,
        size: int | tuple[int, int],
        padding: int | tuple[int, ...] | None = None,
        pad_if_needed: bool = False,
        fill_value: int | tuple[int, ...] = 0,
        padding_mode: Border = Border.CONSTANT,
    ) -> None:
        self._size = two_sizes("RandomCrop", "size", size)
        self._padding = _four_sides(padding)
        if not isinstance(pad_if_needed, bool):
            raise TypeError(f"RandomCrop: pad_if_needed is a {type(pad_if_needed).__name__}; expected a bool")
        if not isinstance(padding_mode, Border):
            raise TypeError(f"RandomCrop: padding_mode={padding_mode!r}; expected an mscomm.dataset.vision.Border")
        self._pad_if_needed = pad_if_needed
        self._mode = padding_mode
        fill = np.asarray(fill_value)
        if fill.dtype.kind not in "iu" or fill.ndim > 1:
            raise TypeError(f"RandomCrop: fill_value={fill_value!r}; expected an int, or one for each channel")
        if ((fill < 0) | (fill > 255)).any():
            raise ValueError(f"RandomCrop: fill_value={fill_value!r}; expected 0 to 255")
        self._fill = fill

    def on_rows(self, rows: Array, draws: Sequence[int] = ()) -> Array:
        rows = images_of(rows, self)
        if any(self._padding):
            rows = self._padded(rows, *self._padding)
        height, width = self._size
        if self._pad_if_needed:
            down, right = max(height - rows.shape[1], 0), max(width - rows.shape[2], 0)
            if down or right:
                rows = self._padded(rows, right, down, right, down)
        high, wide = rows.shape[1:3]
        if high < height or wide < width:
            raise ValueError(
                f"RandomCrop: the image has {high} x {wide} pixels after padding, the size is"
                f" {height} x {width}; give more padding, or pad_if_needed=True"
            )
        result: Array = np.empty_like(rows, shape=(len(rows), height, width, *rows.shape[3:]))
        for cut, image, draw in zip(result, rows, draws, strict=True):
            top, left = below(high - height + 1, draw), below(wide - width + 1, draw >> 32)
            cut[...] = image[top : top + height, left : left + width]
        return result

    def _padded(self, rows: Array, left: int, top: int, right: int, bottom: int) -> Array:
        sides = [(0, 0), (top, bottom), (left, right), (0, 0)][: rows.ndim]
        if self._mode is not Border.CONSTANT:
            return np.pad(rows, sides, mode=self._mode.value)
        if self._fill.ndim and rows.shape[3:] != self._fill.shape:
            raise ValueError(
                f"RandomCrop: fill_value has {len(self._fill)} numbers, the image is {rows.dtype}{list(rows.shape[1:])}"
            )
        # For a 32 x 32 image, numpy.pad would take five times as long as the following code.
        shape = (len(rows), rows.shape[1] + top + bottom, rows.shape[2] + left + right, *rows.shape[3:])
        padded: Array = np.empty_like(rows, shape=shape)
        padded[...] = self._fill
        padded[:, top : top + rows.shape[1], left : left + rows.shape[2]] = rows
        return padded


def _four_sides(padding: Any) -> tuple[int, int, int, int]:
    """Return the padding as (left, top, right, bottom)."""
    numbers = [0] if padding is None else list(padding) if isinstance(padding, (tuple, list)) else [padding]
    if any(isinstance(number, bool) or not isinstance(number, (int, np.integer)) for number in numbers):
        raise TypeError(f"RandomCrop: padding={padding!r}; expected an int, 2 or 4 of them")
    if len(numbers) not in (1, 2, 4) or min(numbers) < 0:
        raise ValueError(f"RandomCrop: padding={padding!r}; expected an int, 2 or 4 of them, each 0 or more")
    left, top, right, bottom = (int(number) for number in numbers * (4 // len(numbers)))
    return left, top, right, bottom
