"""A rank is stopped at a chosen system call in a call, until its peers have given up and have changed their arrays.

Whatever the rank does when it continues, its result must be right, or it must raise an error: it must never return the
bytes that a peer has written in the meantime. The preloaded library stop_points.cc stops the rank just before the k-th
call of a function, for several k, until the rank is not stopped any more. Or it kills the rank: then each of the other
ranks must return the right result, or raise an error.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import TOLD, everybody_is_here, ranks, tell, until_told
from sessions import shared_library
from test_memory import may_read_each_other

import mscomm

GIVES_UP_S = 0.3  # the time limit of the ranks that are not stopped
SPOILT = 77  # what these ranks write into their arrays when their calls have ended
# Calls that wait yield, and read the clock, as often as they wait, so for these functions there is no last k.
POINTS: dict[str, Sequence[int]] = {
    **dict.fromkeys(("process_vm_readv", "syscall", "mmap"), range(1, 41)),
    **dict.fromkeys(("recv", "send", "sendmsg", "sched_yield", "clock_gettime"), (1, 2, 3, 5, 8, 13, 21)),
}
BYTES = {"tiny": 768, "staged": 192 << 10, "long": 3 << 20}  # of x; a multiple of 12

Arrays = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def _ring(x: Any, *, out: Any, group: mscomm.Group, timeout: float) -> None:
    rank, size = mscomm.get_rank(), mscomm.get_group_size()
    mscomm.sendrecv(x, (rank + 1) % size, out, (rank - 1) % size, group=group, timeout=timeout)


# For each call: the function, and what each part of a rank's result holds. The x of rank r holds r + 1.
CALLS: dict[str, tuple[Callable[..., Any], Callable[[int, int], list[int]]]] = {
    "all_reduce": (mscomm.all_reduce, lambda rank, n: [n * (n + 1) // 2]),
    "all_gather": (mscomm.all_gather, lambda rank, n: list(range(1, n + 1))),
    "all_to_all": (mscomm.all_to_all, lambda rank, n: list(range(1, n + 1))),
    "broadcast": (mscomm.broadcast, lambda rank, n: [1]),
    "reduce_scatter": (mscomm.reduce_scatter, lambda rank, n: [n * (n + 1) // 2]),
    "scan": (mscomm.scan, lambda rank, n: [(rank + 1) * (rank + 2) // 2]),
    "messages": (_ring, lambda rank, n: [(rank - 1) % n + 1]),
}
LENGTHS: dict[str, Callable[[int, int], int]] = {  # of out, from the length of x and the number of ranks
    "all_gather": lambda count, n: count * n,
    "reduce_scatter": lambda count, n: count // n,
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("stop_points") / "stop_points.so"
    return str(shared_library(Path(__file__).with_name("stop_points.cc"), made, "-O1"))


@pytest.mark.skipif(not may_read_each_other(), reason="this process may not read the memory of another one")
@pytest.mark.usefixtures("judge_decides")
@pytest.mark.parametrize("call", ["all_reduce", pytest.param("all_gather", marks=pytest.mark.long)])
@ranks(2, env={"LD_PRELOAD": "{library}"})
def test_a_rank_that_is_stopped_before_it_reads_from_the_other(rank, group, library, call):
    stops = _stopped_everywhere(rank, library, "process_vm_readv", call, BYTES["long"], np.empty)
    assert stops > {"all_reduce": 2, "all_gather": 1}[call]  # a rank first tries to read each of its own arrays


@pytest.mark.usefixtures("judge_decides")
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("memory", ["private", "shared"])
@pytest.mark.parametrize("size", BYTES)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("point", ["process_vm_readv", "syscall", "mmap"])
@pytest.mark.long
@ranks("n", env={"LD_PRELOAD": "{library}"})
def test_a_rank_that_is_stopped_in_shared_memory(rank, group, library, point, call, size, memory):
    _stopped_everywhere(rank, library, point, call, BYTES[size], mscomm.empty if memory == "shared" else np.empty)


@pytest.mark.usefixtures("judge_decides")
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("size", ["tiny", "long"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("point", ["recv", "sendmsg"])
@pytest.mark.long
@ranks("n", env={"LD_PRELOAD": "{library}", "MSCOMM_ALGO": "direct"})
def test_a_rank_that_is_stopped_over_the_mesh(rank, group, library, point, call, size):
    _stopped_everywhere(rank, library, point, call, BYTES[size], np.empty)


@pytest.mark.usefixtures("judge_decides")
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("point", ["recv", "send"])
@pytest.mark.long
@ranks("n", env={"LD_PRELOAD": "{library}", "MSCOMM_HOST_ID": "{rank}"})
def test_a_rank_that_is_stopped_over_encrypted_links(rank, group, library, point, call):
    _stopped_everywhere(rank, library, point, call, BYTES["staged"], np.empty)


@pytest.mark.usefixtures("judge_decides")
@pytest.mark.parametrize(("n", "host"), [(3, list("aab")), (4, list("aabb"))])
@pytest.mark.parametrize(
    ("call", "size"),
    [
        *itertools.product(["all_reduce", "all_gather", "broadcast", "reduce_scatter"], ["staged", "long"]),
        ("broadcast", "tiny"),
    ],
)
@pytest.mark.parametrize("point", ["recv", "send", "syscall", "clock_gettime"])
@pytest.mark.long
@ranks("n", env={"LD_PRELOAD": "{library}", "MSCOMM_HOST_ID": "{host}"})
def test_a_rank_that_is_stopped_on_two_levels(rank, group, library, point, call, size, host, n):
    _stopped_everywhere(rank, library, point, call, BYTES[size], mscomm.empty)


@pytest.mark.usefixtures("judge_decides")
@pytest.mark.parametrize("point", ["sched_yield", "clock_gettime"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.long
@ranks(2, env={"LD_PRELOAD": "{library}"})
def test_a_rank_that_is_stopped_while_it_waits(rank, group, library, point, call):
    _stopped_everywhere(rank, library, point, call, BYTES["staged"], np.empty)


@pytest.mark.usefixtures("judge_decides")
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("call", ["all_reduce", "all_gather", "scan", "messages"])
@pytest.mark.parametrize(
    ("point", "env"),
    [
        ("process_vm_readv", {}),
        ("syscall", {}),
        ("clock_gettime", {}),
        ("sendmsg", {"MSCOMM_ALGO": "direct"}),
        ("recv", {"MSCOMM_ALGO": "direct"}),
        ("send", {"MSCOMM_HOST_ID": "{rank}"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.long
@ranks(
    "n",
    env=lambda rank, library, env, **_: {"LD_PRELOAD": library, **{k: v.format(rank=rank) for k, v in env.items()}},
    expect={1: -signal.SIGKILL},
)
def test_a_rank_that_is_killed(rank, group, library, point, env, at, call):
    arrays = _arrays(rank, call, BYTES["long"], np.empty)
    everybody_is_here()
    if rank == 1:
        ctypes.CDLL(library).stop_points_arm(point.encode(), ctypes.c_long(at), signal.SIGKILL)
        _make(call, arrays, None, 60)
        until_told(*(f"ended {peer}" for peer in range(mscomm.get_group_size()) if peer != 1))
        os.kill(os.getpid(), signal.SIGKILL)  # the call has ended before the point
    try:
        _make(call, arrays, None, 60)
    except mscomm.PeerLost:
        return
    _check(rank, call, arrays)
    tell(f"ended {rank}")


def _stopped_everywhere(rank: int, library: str, point: str, call: str, size: int, empty: Callable[..., Any]) -> int:
    """Stop rank 1 at each point of the call, in a new group each. Return how often it was stopped."""
    stops = 0
    points = ctypes.CDLL(library)
    pids = mscomm.all_gather(np.array([os.getpid()]))
    for at in POINTS[point]:
        name = f"{call} {at}"
        group = mscomm.create_group(name, list(range(len(pids))))
        arrays = _arrays(rank, call, size, empty)
        with contextlib.suppress(mscomm.Error):  # the first call decides how the group's calls move their data
            _make(call, arrays, group, 60)
        arrays = _arrays(rank, call, size, empty)
        everybody_is_here()
        stopped = False
        if rank == 1:
            stopped = _stopped_at(points, point, at, call, arrays, group)
            tell(f"{name} continued")
        else:
            _gives_up(rank, call, arrays, group)
            tell(f"{name} spoilt {rank}")
        if rank == 0:
            until_told(*(f"{name} spoilt {peer}" for peer in range(2, len(pids))))
            _continue(int(pids[1]), Path(os.environ[TOLD], f"{name} continued"))
        stopped = bool(mscomm.all_reduce(np.array([int(stopped)]), "max")[0])
        assert rank == 1 or all((array == SPOILT).all() for array in arrays), (
            f"rank 1 wrote to the arrays of rank {rank} late"
        )
        mscomm.destroy_group(group)
        stops += stopped
        if not stopped:
            break
    return stops


def _arrays(rank: int, call: str, size: int, empty: Callable[..., Any]) -> Arrays:
    count = size // 4
    length = LENGTHS[call](count, mscomm.get_group_size()) if call in LENGTHS else count
    x, out = empty(count, np.float32), empty(length, np.float32)
    x[:], out[:] = rank + 1, 0
    return x, out


def _make(call: str, arrays: Arrays, group: mscomm.Group | None, timeout: float) -> None:
    x, out = arrays
    CALLS[call][0](x, out=out, group=group, timeout=timeout)


def _check(rank: int, call: str, arrays: Arrays) -> None:
    parts = CALLS[call][1](rank, mscomm.get_group_size())
    for part, expected in zip(np.split(arrays[1], len(parts)), parts, strict=True):
        assert np.unique(part).tolist() == [expected], f"{call} returned {np.unique(part)}, expected {expected}"


def _stopped_at(points: Any, point: str, at: int, call: str, arrays: Arrays, group: mscomm.Group) -> bool:
    """Do rank 1's part. Return whether this rank was stopped."""
    points.stop_points_arm(point.encode(), ctypes.c_long(at), signal.SIGSTOP)
    try:
        _make(call, arrays, group, 60)
    except mscomm.Error:
        return bool(points.stop_points_disarm())
    stopped = bool(points.stop_points_disarm())
    _check(1, call, arrays)
    return stopped


def _gives_up(rank: int, call: str, arrays: Arrays, group: mscomm.Group) -> None:
    """Do the part of another rank."""
    try:
        _make(call, arrays, group, GIVES_UP_S)
    except mscomm.Error:
        pass
    else:
        _check(rank, call, arrays)
    for array in arrays:
        array[:] = SPOILT


def _continue(pid: int, continued: Path) -> None:
    """Let rank 1 continue. It may be stopped only later than now."""
    waiting = threading.Event()
    while not continued.exists():
        os.kill(pid, signal.SIGCONT)
        waiting.wait(0.005)
