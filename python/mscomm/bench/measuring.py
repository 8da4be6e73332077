"""Measures contenders in turn, round by round. If one rank cannot measure a contender, all ranks exit."""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

import mscomm
from mscomm.bench.contenders import Contender
from mscomm.bench.peers import Unfit
from mscomm.bench.plan import WARMUP_CALLS, Plan
from mscomm.bench.table import Case

Result = dict[str, Any]


def rehearse(contender: Contender, count: int, in_place: bool) -> None:
    """Try a contender before anything is measured. Raise Unfit if it cannot make the call."""
    cell = contender.cell(count, in_place)
    try:
        cell.measure(1, 1)
    except (TypeError, ValueError, RuntimeError) as error:
        raise Unfit(f"{contender.name}: {error}") from error
    cell.close()


def of_size(plan: Plan, case: Case, contenders: list[Contender], count: int) -> Result:
    """Measure the contenders in turn, round by round. Return the times of each round and the number of wrong elements,
    for each contender and mode (in place or not).
    """
    found: Result = {contender.name: {} for contender in contenders}
    for in_place in plan.modes(case):
        cells = {contender.name: contender.cell(count, in_place) for contender in contenders}
        rounds: dict[str, list[list[float]]] = {name: [] for name in cells}
        # `trials` holds the times of a few calls of each contender. The number of calls in a round depends on these
        # times. If the contender is an MPI, rank 0 alone gets the times, and it tells the MPI how many calls to make.
        # The other ranks use 1.0, which has no effect.
        trials = {name: [1.0] for name in cells}
        if plan.warmup is None or plan.iterations is None:
            trials = {name: cell.measure(WARMUP_CALLS, WARMUP_CALLS) or [1.0] for name, cell in cells.items()}
        for _ in range(plan.rounds):
            for name, cell in cells.items():
                shortest = min(statistics.median(one) for one in (trials[name], *rounds[name]) if one)
                rounds[name].append(cell.measure(*plan.calls(shortest)))
        for name, cell in cells.items():
            wrong = cell.wrong() if plan.check else None
            medians = [statistics.median(one) for one in rounds[name] if one]
            us = statistics.median(medians) if medians else 0.0
            mode = "in_place" if in_place else "out_of_place"
            found[name][mode] = {"us": us, "wrong": wrong, "rounds_us": rounds[name]}
            cell.close()
    return found


@contextlib.contextmanager
def telling(rank: int) -> Iterator[None]:
    """Return a context at whose end all ranks exit if any rank has raised Unfit. The lowest such rank prints why."""
    problem = ""
    try:
        yield
    except Unfit as error:
        problem = str(error)
    ranks = mscomm.get_group_size()
    first = int(mscomm.all_reduce(np.array([rank if problem else ranks]), "min")[0])
    if rank == first:
        print(f"mscomm bench: {problem}", file=sys.stderr, flush=True)
    if first < ranks:
        sys.exit(1)
