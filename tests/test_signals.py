"""An exception from a signal handler interrupts a call. Afterwards, the group works on all ranks, or raises on all.

The handler runs between two bytecodes of Python, or while the core waits. A timer chooses the points at random.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rotated
from ranks import everybody_is_here, ranks

import mscomm

LONGEST_S = 400e-6  # the longest time from the start of the timer to the signal

X = np.arange(4.0)
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda group: mscomm.all_reduce(X, group=group),
    "all_reduce_many": lambda group: mscomm.all_reduce_many([X, np.arange(3)], group=group),
    "all_gather_v": lambda group: mscomm.all_gather_v(X, group=group),
    "all_to_all_v": lambda group: mscomm.all_to_all_v(X, [1, 3], group=group),
    "scatter": lambda group: mscomm.scatter(X, 0, group=group),
    "broadcast_object": lambda group: mscomm.broadcast_object({"a": [1, 2]}, 0, group=group),
    "all_gather_object": lambda group: mscomm.all_gather_object("text", group=group),
    "async": lambda group: mscomm.all_reduce(X, group=group, async_op=True).wait(),
    "async all_gather_v": lambda group: mscomm.all_gather_v(X, group=group, async_op=True).wait(),
    "barrier": lambda group: mscomm.barrier(group=group),
}


class _Stop(Exception):
    pass


@pytest.mark.usefixtures("judge_decides")
@pytest.mark.parametrize("function", FUNCTIONS)
@ranks(2)
def test_an_interrupted_call_breaks_the_group_on_all_ranks_or_on_none(rank, group, function):
    _interrupt(rank, function, 100)


@pytest.mark.usefixtures("judge_decides")
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.long
@ranks(2, timeout_s=290)
def test_it_does_so_at_many_points(rank, group, function):
    _interrupt(rank, function, 1000)


@pytest.mark.usefixtures("judge_decides")
@pytest.mark.parametrize("function", FUNCTIONS)
@ranks(2, env={"MSCOMM_RECORD": "{record}"})
def test_a_recorded_call_does_so_too(rank, group, function, record):
    _interrupt(rank, function, 100)


@pytest.fixture
def record(tmp_path: Path) -> str:
    return str(tmp_path)


def _interrupt(rank: int, function: str, times: int) -> None:
    armed = False

    def handler(*_: object) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise _Stop

    signal.signal(signal.SIGALRM, handler)
    draw = random.Random(f"{rotated.seed()} {function}")
    group, made = None, 0
    for _ in range(times):
        if group is None:
            group, made = mscomm.create_group(f"{function} {made}", [0, 1]), made + 1
        everybody_is_here()
        try:
            if rank == 0:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-6, LONGEST_S))
            FUNCTIONS[function](group)
            armed = False
        except (_Stop, mscomm.Error):
            armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        works = True
        try:
            mscomm.all_reduce(np.ones(5), group=group, timeout=60)  # no call of FUNCTIONS has the same signature
        except mscomm.CollectiveTimeout:
            raise  # a call number is lost
        except mscomm.Error:
            works = False
        assert len(set(mscomm.all_gather(np.array([works])).tolist())) == 1
        if not works:
            mscomm.destroy_group(group)
            group = None
