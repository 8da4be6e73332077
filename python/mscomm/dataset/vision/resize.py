"""Resize."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np

from mscomm.dataset.operation import Array, Operation, image_of, two_sizes


class Inter(enum.Enum):
    """How pixels are interpolated; the values are Pillow's names."""

    NEAREST = "NEAREST"
    LINEAR = BILINEAR = "BILINEAR"
    CUBIC = BICUBIC = "BICUBIC"


class Resize(Operation):
    """The image in another size.

    size: (height, width), or one int for the shorter side; the longer one then keeps the proportion. interpolation:
    Inter.LINEAR, NEAREST or CUBIC.

    The pixels are Pillow's: their centres lie at half numbers, and where an image gets smaller the filter is stretched
    over all pixels that fall together (antialias), as in torchvision. An image that gets larger is the same as without
    antialias, as MindSpore has it from OpenCV, up to the rounding of uint8.

    Takes uint8 or float32 of shape (height, width, channels) or (height, width), and keeps the dtype; TypeError for
    others. ImportError where Pillow is missing. TypeError and ValueError for wrong arguments.

    >>> Resize((224, 224))(np.zeros((32, 32, 3), np.uint8)).shape
    (224, 224, 3)
    """

    def __init__(self, size: int | tuple[int, int], interpolation: Inter = Inter.LINEAR) -> None:
        self._shorter = not isinstance(size, (tuple, list)) or len(size) == 1
        self._size = two_sizes("Resize", "size", size)
        if not isinstance(interpolation, Inter):
            raise TypeError(f"Resize: interpolation={interpolation!r}; expected a mscomm.dataset.vision.Inter")
        self._interpolation = interpolation

    def __call__(self, x: Any) -> Array:
        image = image_of(x, self)
        if image.dtype not in (np.uint8, np.float32):
            raise TypeError(f"Resize: the image is {image.dtype}; expected uint8 or float32, see TypeCast")
        height, width = self._size
        if self._shorter:
            high, wide = image.shape[:2]
            height, width = (height, height * wide // high) if high <= wide else (width * high // wide, width)
        if image.shape[:2] == (height, width):
            return image
        if image.dtype == np.uint8 and image.shape[2:] == (3,):
            return self._resized(image, height, width)
        if image.ndim == 2:
            return self._resized(image, height, width)
        channels = [self._resized(image[:, :, channel], height, width) for channel in range(image.shape[2])]
        return np.stack(channels, axis=-1)

    def _resized(self, image: Array, height: int, width: int) -> Array:
        try:
            from PIL import Image
        except ImportError:
            raise ImportError("Resize needs Pillow: pip install pillow, or mscomm[train]") from None
        how = Image.Resampling[self._interpolation.value]
        return np.array(Image.fromarray(np.ascontiguousarray(image)).resize((width, height), how))
