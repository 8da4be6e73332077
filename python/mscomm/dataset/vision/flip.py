"""The operation RandomHorizontalFlip."""

from __future__ import annotations

from collections.abc import Sequence

from mscomm.dataset.draws import unit
from mscomm.dataset.operation import Array, RandomOperation, images_of


class RandomHorizontalFlip(RandomOperation):
    """Mirrors an image, left to right, with probability prob.

    The operation accepts images of shape (height, width, channels) or (height, width) and any dtype. Raises TypeError
    if prob is not a number, and ValueError if it is outside 0..1.

    >>> RandomHorizontalFlip(1.0)(np.array([[1, 2, 3]]))
    array([[3, 2, 1]])
    """

    def __init__(self, prob: float = 0.5) -> None:
        if isinstance(prob, bool) or not isinstance(prob, (int, float)):
            raise TypeError(f"RandomHorizontalFlip: prob is a {type(prob).__name__}; expected a number")
        if not 0 <= prob <= 1:
            raise ValueError(f"RandomHorizontalFlip: prob={prob}; expected 0 to 1")
        self._prob = prob

    def on_rows(self, rows: Array, draws: Sequence[int] = ()) -> Array:
        result = images_of(rows, self).copy(order="K")
        for flipped, image, draw in zip(result, rows, draws, strict=True):
            if unit(draw) < self._prob:
                flipped[...] = image[:, ::-1]
        return result
