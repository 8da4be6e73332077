"""How many times as fast one is as another, of times that both took in turn, in rounds."""

from __future__ import annotations

from typing import Any, NamedTuple

ENOUGH_ROUNDS = 11  # with fewer, few medians can be drawn: the interval is little else than the range of the rounds


class Ratio(NamedTuple):
    value: float
    low: float  # of the interval
    high: float


def ratio(theirs: Any, ours: Any) -> Ratio:
    """The median of their rounds over the median of ours, and where 95 of 100 paired draws of rounds have it."""
    import numpy as np  # not above: mindspore_step.py first says how many threads it may have

    theirs, ours = np.asarray(theirs), np.asarray(ours)
    draw = np.random.default_rng(0).integers(0, len(ours), (2000, len(ours)))
    ratios = np.median(theirs[draw], axis=1) / np.median(ours[draw], axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return Ratio(float(np.median(theirs) / np.median(ours)), float(low), float(high))


def interval(rounds: int) -> str:
    """What the interval of so many rounds may be called: 95 % supposes that rounds are independent of each other."""
    return "95 %" if rounds >= ENOUGH_ROUNDS else "range"
