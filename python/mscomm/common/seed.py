"""set_seed: one seed for everything that mscomm, NumPy and PyTorch draw at random."""

from __future__ import annotations

import random
import sys

import numpy as np

from mscomm.dataset import config

_seed: int | None = None
_drawn = 0  # how many tensors initializer() has drawn since the last set_seed()


def set_seed(seed: int) -> None:
    """Set the seed of mscomm's initializers and pipelines, of Python's `random`, of NumPy, and of PyTorch.

    Use the same seed on every rank. Raise TypeError if seed is not an int, and ValueError if it is outside
    0..2**32-1.

    >>> mscomm.set_seed(1)
    """
    global _seed, _drawn
    config.set_seed(seed)
    _seed, _drawn = config.get_seed(), 0
    random.seed(_seed)
    np.random.seed(_seed)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(_seed)


def get_seed() -> int | None:
    """Return the seed of the last set_seed(), or None."""
    return _seed


def next_seed() -> int:
    """Return a new seed for one tensor.

    All ranks get the same seeds if they draw the same tensors in the same order, also if nobody has called set_seed().
    """
    global _drawn
    _drawn += 1
    return ((_seed or 0) << 31) + _drawn
