"""Fits the prices of the model in csrc/algo/cost.h to measured times."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from mscomm.cluster.prices import Prices

_US = np.array([1, 1, 1e-3, 1e-3, 1e-3])  # the unit of each price in microseconds
_FITS = 100  # after this many steps of fit(), the factors hardly change


class Sample(NamedTuple):
    """The cost of a call and its measured time. row: samples with the same number were measured in turn."""

    cost: list[float]
    us: float
    row: int = 0


def fit(measured: Iterable[Sample]) -> Prices | None:
    """Return the prices that explain the measured times best. None if nothing was measured.

    The prices have the least sum of squares of relative errors. Two things make the choice by these prices better. The
    algorithms of a row were measured in turn, so a machine that was slower for some seconds made all of them slower. So
    each row has a factor for its times; the median of all factors is 1. And the longer an algorithm takes than the best
    of its row, the less its error counts, because it will not be chosen.
    """
    found = list(measured)
    if not found:
        return None
    _, rows = np.unique([one.row for one in found], return_inverse=True)
    us = np.array([one.us for one in found])
    costs = np.array([one.cost for one in found]) * _US
    best = np.full(rows.max() + 1, math.inf)
    np.minimum.at(best, rows, us)
    weights = best[rows] / us
    factors = np.ones(len(best))
    for _ in range(_FITS):
        prices = _least_squares(costs * (weights / (us * factors[rows]))[:, None], weights)
        logs = weights * np.log(np.maximum(costs @ prices, 1e-9) / us)
        factors = np.exp(np.bincount(rows, logs) / np.bincount(rows, weights))
        factors /= np.median(factors)
    return Prices(*(float(price) for price in prices))


def _least_squares(table: Any, right: Any) -> Any:
    """Return the prices, none of them negative, with which table @ prices is nearest to `right`.

    There are only five prices. So this function tries which of them are 0, and takes the best of the solutions without
    negative prices.
    """
    best, least = np.zeros(table.shape[1]), math.inf
    for used in itertools.product([False, True], repeat=len(best)):
        found = np.zeros(len(best))
        found[list(used)] = np.linalg.lstsq(table[:, used], right, rcond=None)[0]
        error = float(((table @ found - right) ** 2).sum())
        if (found >= 0).all() and error < least:
            best, least = found, error
    return best
