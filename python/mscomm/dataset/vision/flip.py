"""RandomHorizontalFlip."""

from __future__ import annotations

from typing import Any

from mscomm.dataset import draws
from mscomm.dataset.operation import Array, RandomOperation, image_of


class RandomHorizontalFlip(RandomOperation):
    """The image with left and right exchanged, with probability prob.

    Takes (height, width, channels) or (height, width) of any dtype. TypeError for a prob that is no number, ValueError
    outside 0..1.

    >>> RandomHorizontalFlip(1.0)(np.array([[1, 2, 3]]))
    array([[3, 2, 1]])
    """

    def __init__(self, prob: float = 0.5) -> None:
        if isinstance(prob, bool) or not isinstance(prob, (int, float)):
            raise TypeError(f"RandomHorizontalFlip: prob is a {type(prob).__name__}; expected a number")
        if not 0 <= prob <= 1:
            raise ValueError(f"RandomHorizontalFlip: prob={prob}; expected 0 to 1")
        self._prob = prob

    def apply(self, x: Any, draw: int) -> Array:
        image = image_of(x, self)
        return image[:, ::-1] if draws.unit(draw) < self._prob else image
