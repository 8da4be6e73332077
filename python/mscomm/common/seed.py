"""set_seed: one seed for everything that mscomm, NumPy and PyTorch draw at random."""

from __future__ import annotations

import importlib.util
import itertools
import random

import numpy as np

from mscomm.dataset import config

_seed: int | None = None
_numbers = itertools.count(1)  # numbers the tensors that initializer() has drawn since the last set_seed()


def set_seed(seed: int) -> None:
    """Set the seed of mscomm's initializers and pipelines, of Python's `random`, of NumPy, and of PyTorch.

    Use the same seed on every rank. Raise TypeError if seed is not an int, and ValueError if it is outside
    0..2**32-1.

    >>> mscomm.set_seed(1)
    """
    global _seed, _numbers
    config.set_seed(seed)
    _seed, _numbers = config.get_seed(), itertools.count(1)
    random.seed(_seed)
    np.random.seed(_seed)
    if importlib.util.find_spec("torch") is not None:
        importlib.import_module("torch").manual_seed(_seed)


def get_seed() -> int | None:
    """Return the seed of the last set_seed(), or None."""
    return _seed


def next_seed() -> int:
    """Return a new seed for one tensor.

    All ranks get the same seeds if they draw the same tensors in the same order, in one thread each, also if nobody has
    called set_seed().
    """
    return ((_seed or 0) << 31) + next(_numbers)
