"""The base classes of mscomm's operations for `map`. These operations can transform many rows in one call.

For other functions, `map` makes one call per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mscomm.dataset import config, draws

Array = np.ndarray[Any, Any]


class Operation:
    """An operation that transforms one array. A program may also call the operation directly.

    In a pipeline, no call changes the result of a later call, so several threads may use an operation at once.
    """

    def __call__(self, x: Any) -> Array:
        raise NotImplementedError

    def on_rows(self, rows: Array, draws: Sequence[int] = ()) -> Array:
        """Transform several arrays of one shape, which are stacked along axis 0. Return the results in the same form.

        Separate calls for the rows would give bit-identical results. `rows` and the returned array may have any memory
        order. draws: for a RandomOperation, the random bits of each row. If a row is invalid, on_rows raises an
        exception. The pipeline then applies the operation row by row to find out which row is invalid.
        """
        return np.stack([self(rows[which, ...]) for which in range(len(rows))])

    def __repr__(self) -> str:
        return type(self).__name__


class RandomOperation(Operation):
    """An operation whose result depends on 64 random bits.

    In a pipeline, the bits depend on the seed, the pass, the sample and the operation's place in the pipeline. In a
    direct call, the bits depend on the seed and on how often this object was called before.
    """

    _calls = 0

    def __call__(self, x: Any) -> Array:
        self._calls += 1
        return self.apply(x, int(draws.bits(config.get_seed(), self._calls)[0]))

    def apply(self, x: Any, draw: int) -> Array:
        """Return the result for the array x and the random bits `draw`."""
        result: Array = self.on_rows(image_of(x, self)[None], [draw])[0]
        return result

    def on_rows(self, rows: Array, draws: Sequence[int] = ()) -> Array:
        raise NotImplementedError


def image_of(x: Any, operation: object) -> Array:
    """Return x if it is an image: (height, width) or (height, width, channels). Else raise TypeError or ValueError."""
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{operation}: expected an image, a NumPy array, got a {type(x).__name__}")
    if x.ndim not in (2, 3):
        raise ValueError(
            f"{operation}: expected an image of shape (height, width, channels) or (height, width),"
            f" got {x.dtype}{list(x.shape)}"
        )
    return x


def images_of(rows: Array, operation: object) -> Array:
    """Return `rows` if it is a stack of images along axis 0. Otherwise raise TypeError or ValueError."""
    image_of(rows[0, ...], operation)
    return rows


def two_sizes(operation: str, argument: str, value: Any) -> tuple[int, int]:
    """Return (height, width), given two ints, or one int for both. Raise TypeError or ValueError for anything else."""
    sizes = list(value) if isinstance(value, (tuple, list)) else [value]
    if any(isinstance(size, bool) or not isinstance(size, (int, np.integer)) for size in sizes):
        raise TypeError(f"{operation}: {argument}={value!r}; expected an int or (height, width)")
    if len(sizes) not in (1, 2) or min(sizes) < 1:
        raise ValueError(f"{operation}: {argument}={value!r}; expected an int or (height, width), each 1 or more")
    return int(sizes[0]), int(sizes[-1])
