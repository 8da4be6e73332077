"""Computes the ratio of the times of two contenders that took turns in rounds, and an interval for this ratio."""

from __future__ import annotations

from typing import Any, NamedTuple

# With fewer rounds, a bootstrap has only a few distinct medians, and the interval is nearly the range of all ratios.
ENOUGH_ROUNDS = 11


class Ratio(NamedTuple):
    value: float
    low: float  # low and high are the ends of the interval
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def ratio(theirs: Any, ours: Any) -> Ratio:
    """Return the median of `theirs` divided by the median of `ours`, and a 95 % interval from a paired bootstrap."""
    import numpy as np  # not at the top: mindspore_step.py must set the number of threads before NumPy is imported

    theirs, ours = np.asarray(theirs), np.asarray(ours)
    draw = np.random.default_rng(0).integers(0, len(ours), (2000, len(ours)))
    ratios = np.median(theirs[draw], axis=1) / np.median(ours[draw], axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return Ratio(float(np.median(theirs) / np.median(ours)), float(low), float(high))


def interval(rounds: int) -> str:
    """Return the interval's name: "95 %" for enough rounds, otherwise "range". "95 %" assumes independent rounds."""
    return "95 %" if rounds >= ENOUGH_ROUNDS else "range"
