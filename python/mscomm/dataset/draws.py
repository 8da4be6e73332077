"""Random numbers without a state: each is a function of the numbers that say what it is for.

The generator is SplitMix64 (Steele, Lea and Flood, 2014), with one step for each of these numbers. It gives the same
bits on every machine and in every version, while the streams of NumPy's generators may change between versions. The
random number for sample 40,000 can be computed without those before it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))

Bits = np.ndarray[Any, np.dtype[np.uint64]]


def bits(*purpose: Any) -> Bits:
    """64 random bits for each purpose, which is a sequence of numbers of 0 or more. Arrays are broadcast.

    >>> bits(5489, 0, [7, 8]).shape
    (2,)
    """
    mixed: Bits = np.zeros(1, np.uint64)
    for number in purpose:
        mixed = mixed + (np.atleast_1d(np.asarray(number, np.uint64)) + np.uint64(1)) * _GOLDEN
        mixed = (mixed ^ (mixed >> np.uint64(30))) * _FACTORS[0]
        mixed = (mixed ^ (mixed >> np.uint64(27))) * _FACTORS[1]
        mixed = mixed ^ (mixed >> np.uint64(31))
    return mixed


def permutation(n: int, *purpose: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The numbers 0 to n-1 in random order."""
    return np.argsort(bits(*purpose, np.arange(n)), kind="stable").astype(np.int64)


def below(n: int, draw: int) -> int:
    """A number from 0 to n-1, made of 32 random bits. Its bias, n / 2**32, is negligible for the pixels of an image."""
    return (draw & 0xFFFFFFFF) * n >> 32


def unit(draw: int) -> float:
    """A number from 0 up to, but not including, 1, from 64 random bits."""
    return float((draw >> 11) * 2.0**-53)
