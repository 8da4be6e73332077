"""The ratio of the times of two contenders that took turns in rounds, and the interval of the ratio."""

from __future__ import annotations

from typing import Any, NamedTuple

ENOUGH_ROUNDS = 11  # with fewer, the bootstrap has few distinct medians: the interval is little more than their range


class Ratio(NamedTuple):
    value: float
    low: float  # the ends of the interval
    high: float


def ratio(theirs: Any, ours: Any) -> Ratio:
    """The median of their rounds over the median of ours, and the interval with 95 % of the paired bootstraps."""
    import numpy as np  # imported here, because mindspore_step.py first sets the number of threads

    theirs, ours = np.asarray(theirs), np.asarray(ours)
    draw = np.random.default_rng(0).integers(0, len(ours), (2000, len(ours)))
    ratios = np.median(theirs[draw], axis=1) / np.median(ours[draw], axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return Ratio(float(np.median(theirs) / np.median(ours)), float(low), float(high))


def interval(rounds: int) -> str:
    """What to call the interval of a ratio over so many rounds. "95 %" assumes that the rounds are independent."""
    return "95 %" if rounds >= ENOUGH_ROUNDS else "range"
