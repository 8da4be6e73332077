"""Computes random numbers from keys, without a generator state. A key is a sequence of integers, for example the seed
and the number of the sample. The functions take the key as the argument `purpose`.

The generator is SplitMix64 (Steele, Lea and Flood, 2014), with one step for each integer of the key. It produces the
same bits on every machine and with every version of NumPy, which NumPy's generators do not guarantee. The random number
for sample 40,000 can be computed without computing the numbers for earlier samples.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))

Bits = np.ndarray[Any, np.dtype[np.uint64]]


def bits(*purpose: Any) -> Bits:
    """Return an array of 64-bit random numbers for a key of non-negative integers.

    The key may contain arrays of the same length in place of integers. The result then has as many elements as these
    arrays. Otherwise, it has one element.

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
    """Return the numbers 0 to n-1 in a random order, which depends only on n and the key."""
    return np.argsort(bits(*purpose, np.arange(n)), kind="stable").astype(np.int64)


def below(n: int, draw: int) -> int:
    """Map the low 32 bits of `draw` to an integer from 0 to n-1. The bias, n / 2**32, is negligible for small n."""
    return (draw & 0xFFFFFFFF) * n >> 32


def unit(draw: int) -> float:
    """Compute a number x with 0 <= x < 1 from the 64 random bits of `draw`."""
    return float((draw >> 11) * 2.0**-53)
