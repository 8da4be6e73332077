"""Settings for all pipelines in this process: the seed, and how many batches are prefetched."""

from __future__ import annotations

import operator

_seed = 5489  # MindSpore's default
_prefetch_size = 2


def set_seed(seed: int) -> None:
    """Set the seed, which determines the order of rows and all random transformations. The default is 5489.

    Use the same seed on every rank. A pipeline reads the seed at the beginning of its first pass and keeps it. Raise
    TypeError if the seed is not an int, and ValueError if it is outside 0..2**32-1.

    >>> set_seed(1)
    """
    global _seed
    _seed = whole("set_seed", "seed", seed, 0, 2**32 - 1)


def get_seed() -> int:
    """Return the seed that pipelines read at the beginning of their first pass."""
    return _seed


def set_prefetch_size(size: int) -> None:
    """Set how many batches each iterator prefetches, in a separate thread. The default is 2.

    If size is 0, there is no such thread. Each batch is then made when the program asks for it, or earlier if
    num_parallel_workers is above 1. The maximum is 1024. Raise TypeError if size is not an int, and ValueError if it is
    out of range.
    """
    global _prefetch_size
    _prefetch_size = whole("set_prefetch_size", "size", size, 0, 1024)


def get_prefetch_size() -> int:
    """Return how many batches each iterator prefetches."""
    return _prefetch_size


def whole(function: str, argument: str, value: object, low: int | None = None, high: int | None = None) -> int:
    """Return the value as an int. Raise TypeError if it is not an integer, ValueError unless low <= value <= high."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{function}: {argument} is a {type(value).__name__}; expected an int")
    number = operator.index(value)
    if (low is not None and number < low) or (high is not None and number > high):
        expected = f"{low} or more" if high is None else f"{low} to {high}"
        raise ValueError(f"{function}: {argument}={number}; expected {expected}")
    return number
