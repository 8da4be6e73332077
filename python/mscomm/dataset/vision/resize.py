"""The operation Resize."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from mscomm.dataset.operation import Array, Operation, image_of, images_of, two_sizes


class Inter(enum.Enum):
    """Says how pixels are interpolated. The values are Pillow's names."""

    NEAREST = "NEAREST"
    LINEAR = BILINEAR = "BILINEAR"
    CUBIC = BICUBIC = "BICUBIC"


class Resize(Operation):
    """Changes the size of an image.

    size: (height, width), or one int for the shorter side. With one int, the image keeps its proportions.
    interpolation: Inter.LINEAR, NEAREST or CUBIC.

    The pixels are computed as in Pillow: the centres of pixels have half-integer coordinates. When an image is shrunk,
    each new pixel depends on all old pixels that it replaces (antialiasing), as in torchvision. When an image is
    enlarged, antialiasing has no effect. With Inter.LINEAR, enlarged images are the same as in MindSpore, which uses
    OpenCV, except for the rounding to uint8.

    The operation accepts uint8 or float32 images of shape (height, width, channels) or (height, width), and keeps the
    dtype. Raises TypeError for another dtype, and TypeError or ValueError for invalid arguments. Raises ImportError if
    Pillow is not installed, except when it enlarges uint8 images with Inter.LINEAR, which needs no Pillow.

    >>> Resize((224, 224))(np.zeros((32, 32, 3), np.uint8)).shape
    (224, 224, 3)
    """

    def __init__(self, size: int | tuple[int, int], interpolation: Inter = Inter.LINEAR) -> None:
        self._shorter = not isinstance(size, (tuple, list)) or len(size) == 1
        self._size = two_sizes("Resize", "size", size)
        if not isinstance(interpolation, Inter):
            raise TypeError(f"Resize: interpolation={interpolation!r}; expected an mscomm.dataset.vision.Inter")
        self._interpolation = interpolation

    def __call__(self, x: Any) -> Array:
        rows = image_of(x, self)[None]
        result = self.on_rows(rows)
        image: Array = x if result is rows else result[0]
        return image

    def on_rows(self, rows: Array, draws: Sequence[int] = ()) -> Array:
        images_of(rows, self)
        if rows.dtype not in (np.uint8, np.float32):
            raise TypeError(f"Resize: the image is {rows.dtype}; expected uint8 or float32, see TypeCast")
        high, wide = rows.shape[1:3]
        height, width = self._size
        if self._shorter:
            height, width = (height, height * wide // high) if high <= wide else (width * high // wide, width)
        if (high, wide) == (height, width):
            return rows
        larger = 0 < high <= height and 0 < wide <= width
        if larger and rows.dtype == np.uint8 and self._interpolation is Inter.LINEAR:
            return _enlarged(rows, height, width)
        return np.stack([self._by_pillow(image, height, width) for image in rows])

    def _by_pillow(self, image: Array, height: int, width: int) -> Array:
        if image.ndim == 2 or (image.dtype == np.uint8 and image.shape[2] == 3):
            return self._resized(image, height, width)
        channels = [self._resized(image[:, :, channel], height, width) for channel in range(image.shape[2])]
        return np.stack(channels, axis=-1)

    def _resized(self, image: Array, height: int, width: int) -> Array:
        try:
            from PIL import Image
        except ImportError:
            raise ImportError("Resize needs Pillow: pip install pillow") from None
        how = Image.Resampling[self._interpolation.value]
        return np.array(Image.fromarray(np.ascontiguousarray(image)).resize((width, height), how))


# -- enlarging uint8 images with NumPy: many rows at once, with the same bits as Pillow --------------------------------
#
# The following code does the same as Pillow's Resample.c, which resizes first along the width, then along the height,
# and rounds each result to uint8. Weights have 22 fraction bits. When an image is enlarged, each new pixel depends on
# two old pixels per direction.

_FRACTION_BITS = 22
_BLOCK_BYTES = 1 << 18  # how many bytes of int32 results are computed at once, so that they stay in the cache


def _enlarged(rows: Array, height: int, width: int) -> Array:
    """Enlarge the images in rows: uint8 of shape (n, high, wide) or (n, high, wide, channels).

    In memory, the channels of the result come before height and width. This layout makes the next operations faster,
    and after HWC2CHW the array is in C order.
    """
    images = rows[..., None] if rows.ndim == 3 else rows
    count, high, _, channels = images.shape
    columns: Array = np.empty((width, count, high, channels), np.uint8)
    _weighed(images.transpose(2, 0, 1, 3), columns)
    planes: Array = np.empty((count, channels, height, width), np.uint8)
    _weighed(columns.transpose(2, 1, 3, 0), planes.transpose(2, 0, 1, 3))
    result = planes.transpose(0, 2, 3, 1)
    return result[..., 0] if rows.ndim == 3 else result


def _weighed(lines: Array, result: Array) -> None:
    """Resize `lines` along axis 0: each line of `result` is the weighted sum of the two nearest lines in `lines`.

    The two weights add up to 1, so the sum is the first line plus a fraction of the difference between the two lines.
    """
    old, new = len(lines), len(result)
    if new == old:
        result[...] = lines
        return
    first, weights = _neighbours(old, new)
    numbers = lines.reshape(old, -1).astype(np.int32)
    ways = np.diff(numbers, axis=0, append=numbers[-1:])
    numbers <<= _FRACTION_BITS
    numbers += 1 << (_FRACTION_BITS - 1)  # add one half, so that cutting off the fraction rounds to the nearest number
    step = max(1, _BLOCK_BYTES // max(numbers[0].nbytes, 1))
    for begin in range(0, new, step):
        block = slice(begin, begin + step)
        total = np.take(ways, first[block], axis=0)
        total *= weights[block]
        total += np.take(numbers, first[block], axis=0)
        total >>= _FRACTION_BITS
        result[block] = total.reshape(-1, *result.shape[1:])


@lru_cache(maxsize=64)
def _neighbours(old: int, new: int) -> tuple[Array, Array]:
    """Each new line is made from two neighbouring old lines. For each new line, return the number of the first old line
    and the weight of the second old line. The weights have shape (new, 1)."""
    centres = (np.arange(new) + 0.5) * (old / new)
    first = np.maximum((centres - 1.0 + 0.5).astype(np.int64), 0)
    end = np.minimum((centres + 1.0 + 0.5).astype(np.int64), old)
    lines = first + np.arange(2)[:, None]
    weights = np.maximum(0.0, 1.0 - abs(lines - centres + 0.5)) * (lines < end)
    weights /= weights.sum(axis=0)
    # Each new line has two weights. If there are fewer than 2**22 new lines, the rounded weights still add up to
    # exactly 1 << _FRACTION_BITS, so the second weight determines the first.
    whole = (weights * (1 << _FRACTION_BITS) + 0.5).astype(np.int32)
    return first, whole[1, :, None]
