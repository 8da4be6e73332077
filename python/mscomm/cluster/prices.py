"""The prices by which mscomm chooses among algorithms over connections. `mscomm bench tune` measures them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mscomm import environment
from mscomm.cluster import plan


class Prices(NamedTuple):
    """The time that each kind of work of a call takes.

    latency_us: from the send of a message until its receiver can answer. message_us: the CPU time to send a message and
    to receive one. byte_ns: a byte of a message. crowded_byte_ns: what a byte takes in addition if several ranks send
    to one rank at once. copied_byte_ns: a byte that the call copies or adds. csrc/algo/cost.h has the same fields.
    """

    latency_us: float
    message_us: float
    byte_ns: float
    crowded_byte_ns: float
    copied_byte_ns: float

    def us(self, cost: Sequence[float]) -> float:
        """Return how many microseconds a call with this cost takes. cost: see _core.Layout.cost."""
        latencies, messages, *sizes = cost
        in_ns = sum(size * price for size, price in zip(sizes, self[2:], strict=True))
        return latencies * self.latency_us + messages * self.message_us + in_ns / 1e3


def read(env: Mapping[str, str]) -> list[float] | str | None:
    """Return the prices in the file that MSCOMM_TUNED names, or the reason why they cannot be read.

    Return None if the variable is not set. It is no error if a rank cannot read the file: only rank 0 must have it.
    """
    path = environment.read("MSCOMM_TUNED", env)
    if path is None:
        return None
    import json  # takes 2 ms, which most jobs do not need

    said = f"MSCOMM_TUNED={path!r}"
    try:
        document = json.loads(Path(path).read_text())
        found = document["prices"]
        prices = [float(found[name]) for name in Prices._fields]
    except OSError as error:
        return f"{said}: {error.strerror}"
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return f"{said}: there are no prices in it; `mscomm bench tune --json FILE` writes a file with them"
    if not all(math.isfinite(price) and price >= 0 for price in prices):
        return f"{said}: a price is not a number of 0 or more"
    return prices


def agreed(facts: Sequence[plan.Facts], epoch: int = 0) -> list[float] | None:
    """Return the prices that all ranks use: those of rank 0. None means the default prices.

    facts: the facts of all ranks. Raise ValueError if rank 0 could not read its file. In a later epoch, it is no error:
    rank 0 may have been started again on a host without the file, and the training must go on.
    """
    prices: Any = facts[0].get("prices")
    if isinstance(prices, str):
        if epoch == 0:
            raise ValueError(f"rank 0: {prices}")
        return None
    return None if prices is None else [float(price) for price in prices]


def without_effect(facts: Sequence[plan.Facts]) -> list[int]:
    """Return the ranks on which MSCOMM_TUNED has no effect, because rank 0 has other prices or none.

    A rank that cannot read its file is among them only if rank 0 has no file.
    """
    prices = [fact.get("prices") for fact in facts]
    return [
        rank
        for rank, mine in enumerate(prices)
        if mine not in (None, prices[0]) and (prices[0] is None or not isinstance(mine, str))
    ]
