"""A rank is stopped at a chosen system call in a call, until its peer has given up and has changed its arrays.

Whatever the rank does when it continues, its result must be right, or it must raise an error: it must never return the
bytes that the peer has written in the meantime. The preloaded library stop_points.cc stops the rank just before the
k-th call of a function, for several k, until the rank is not stopped any more.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import TOLD, everybody_is_here, ranks, tell

import mscomm

GIVES_UP_S = 0.3  # the time limit of the rank that is not stopped
SPOILT = 77  # what that rank writes into its arrays when its call has ended
# Calls that wait yield and read the clock as often as they wait, so for these there is no last k.
POINTS = {"process_vm_readv": range(1, 41), "syscall": range(1, 41)}
POINTS |= dict.fromkeys(("recv", "send", "sched_yield", "clock_gettime"), (1, 2, 3, 5, 8, 13, 21))  # type: ignore[arg-type]
BYTES = {"tiny": 1 << 10, "staged": 256 << 10, "long": 4 << 20}

Arrays = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


# For each call: how many times as long as x its result is, and what each part of a rank's result holds.
CALLS: dict[str, tuple[float, Callable[[int], list[int]]]] = {
    "all_reduce": (1, lambda rank: [3]),
    "all_gather": (2, lambda rank: [1, 2]),
    "broadcast": (1, lambda rank: [1]),
    "reduce_scatter": (0.5, lambda rank: [3]),
    "scan": (1, lambda rank: [[1], [3]][rank]),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler is installed")
    made = tmp_path_factory.mktemp("stop_points") / "stop_points.so"
    source = Path(__file__).with_name("stop_points.cc")
    subprocess.run([compiler, "-std=c++17", "-O1", "-shared", "-fPIC", source, "-o", made, "-ldl"], check=True)
    return str(made)


@pytest.mark.usefixtures("judge_decides")
@pytest.mark.parametrize("memory", ["private", "shared"])
@pytest.mark.parametrize("size", ["tiny", "staged", "long"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("point", ["process_vm_readv", "syscall"])
@pytest.mark.long
@ranks(2, env={"LD_PRELOAD": "{library}"})
def test_a_rank_that_is_stopped_in_the_arena(rank, group, library, point, call, size, memory):
    _stopped_everywhere(rank, library, point, call, BYTES[size], mscomm.empty if memory == "shared" else np.empty)


@pytest.mark.usefixtures("judge_decides")
@pytest.mark.parametrize("call", ["all_reduce", "all_gather"])
@ranks(2, env={"LD_PRELOAD": "{library}"})
def test_a_rank_that_is_stopped_before_it_reads_from_the_other(rank, group, library, call):
    stops = _stopped_everywhere(rank, library, "process_vm_readv", call, BYTES["long"], np.empty)
    assert stops >= 1 or rank == 0


@pytest.mark.usefixtures("judge_decides")
@pytest.mark.parametrize("size", ["tiny", "long"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("point", ["recv", "send", "clock_gettime"])
@pytest.mark.long
@ranks(2, env={"LD_PRELOAD": "{library}", "MSCOMM_ALGO": "direct"})
def test_a_rank_that_is_stopped_over_the_mesh(rank, group, library, point, call, size):
    _stopped_everywhere(rank, library, point, call, BYTES[size], np.empty)


@pytest.mark.usefixtures("judge_decides")
@pytest.mark.parametrize("point", ["sched_yield", "clock_gettime"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.long
@ranks(2, env={"LD_PRELOAD": "{library}"})
def test_a_rank_that_is_stopped_while_it_waits(rank, group, library, point, call):
    _stopped_everywhere(rank, library, point, call, BYTES["staged"], np.empty)


def _stopped_everywhere(rank: int, library: str, point: str, call: str, size: int, empty: Callable[..., Any]) -> int:
    """Stop rank 1 at each point of the call, in a new group each. Return how often it was stopped."""
    stops = 0
    points = ctypes.CDLL(library)
    pids = mscomm.all_gather(np.array([os.getpid()]))
    for at in POINTS[point]:
        group = mscomm.create_group(f"{call} {at}", [0, 1])
        arrays = _arrays(rank, call, size, empty)
        with contextlib.suppress(mscomm.Error):  # the first call decides how the group's calls move their data
            _make(call, arrays, group, 60)
        arrays = _arrays(rank, call, size, empty)
        everybody_is_here()
        if rank == 1:
            stopped = _stopped_at(points, point, at, call, arrays, group)
            tell(f"continued {call} {at}")
        else:
            stopped = False
            _gives_up(call, arrays, group, int(pids[1]), Path(os.environ[TOLD], f"continued {call} {at}"))
        stopped = bool(mscomm.all_reduce(np.array([int(stopped)]), "max")[0])
        mscomm.destroy_group(group)
        stops += stopped
        if not stopped:
            break
    return stops


def _arrays(rank: int, call: str, size: int, empty: Callable[..., Any]) -> Arrays:
    count = size // 4
    x, out = empty(count, np.float32), empty(int(count * CALLS[call][0]), np.float32)
    x[:], out[:] = rank + 1, 0
    return x, out


def _make(call: str, arrays: Arrays, group: mscomm.Group, timeout: float) -> None:
    x, out = arrays
    getattr(mscomm, call)(x, out=out, group=group, timeout=timeout)


def _check(rank: int, call: str, arrays: Arrays) -> None:
    parts = CALLS[call][1](rank)
    for part, expected in zip(np.split(arrays[1], len(parts)), parts, strict=True):
        assert np.unique(part).tolist() == [expected], f"{call} returned {np.unique(part)}, expected {expected}"


def _stopped_at(points: Any, point: str, at: int, call: str, arrays: Arrays, group: mscomm.Group) -> bool:
    """Do rank 1's part. Return whether this rank was stopped."""
    points.stop_points_arm(point.encode(), ctypes.c_long(at))
    try:
        _make(call, arrays, group, 60)
    except mscomm.Error:
        return bool(points.stop_points_disarm())
    stopped = bool(points.stop_points_disarm())
    _check(1, call, arrays)
    return stopped


def _gives_up(call: str, arrays: Arrays, group: mscomm.Group, other: int, continued: Path) -> None:
    """Do rank 0's part: let rank 1 continue only when this rank's call has ended and its arrays have changed."""
    try:
        _make(call, arrays, group, GIVES_UP_S)
    except mscomm.Error:
        pass
    else:
        _check(0, call, arrays)
    for array in arrays:
        array[:] = SPOILT
    waiting = threading.Event()
    while not continued.exists():  # rank 1 may be stopped later than now
        os.kill(other, signal.SIGCONT)
        waiting.wait(0.005)
