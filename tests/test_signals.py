"""An exception from a signal handler interrupts a call. Afterwards, the group works on all ranks, or raises on all.

A handler runs where the interpreter looks for signals, or while the core waits. Some tests stop a call at each point of
the first kind. The other ones have a timer, which chooses the points at random.
"""

from __future__ import annotations

import contextlib
import dis
import itertools
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import rotated
from ranks import everybody_is_here, ranks

import mscomm
from mscomm import completing
from mscomm.collectives import FUNCTION
from mscomm.job import resolve
from mscomm.works import Following

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


def _by_message(name: str) -> mscomm.Group:
    group = mscomm.create_group(name, [0, 1])
    peer = 1 - mscomm.get_rank()
    sending = mscomm.send(X, peer, group=group, async_op=True)
    mscomm.recv(np.empty(4), peer, group=group)
    sending.wait()
    return group


MAKE: dict[str, Callable[[str], mscomm.Group]] = {
    "create_group": lambda name: mscomm.create_group(name, [0, 1]),
    "split": lambda name: mscomm.split(0),
    "first message": _by_message,
}


class _Stop(Exception):
    pass


_OURS = str(Path(mscomm.__file__).parent)


class _AtPoint:
    """Raises _Stop at the given one of the points in Python code at which a signal handler can run, counted from 1.

    The interpreter looks for signals after it has entered a function, called one, or jumped backwards. Only the code of
    mscomm counts: an exception within Python's threading or importlib may leave their locks locked for ever.
    """

    def __init__(self, point: int, code: tuple[str, ...] = (_OURS,)) -> None:
        self._left = point
        self._code = code
        self._before: dict[FrameType, str] = {}
        self.where = ""  # where it has stopped the code

    def __enter__(self) -> _AtPoint:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    @property
    def reached(self) -> bool:
        return self._left <= 0

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(self._code):
            return None
        frame.f_trace_opcodes = True
        if event == "return":
            self._before.pop(frame, None)
        if event == "opcode":
            before, now = self._before.get(frame, ""), dis.opname[frame.f_code.co_code[frame.f_lasti]]
            self._before[frame] = now
            # A `with` block that returns a value has ended at the SWAP, and has not at the call before it.
            if before.startswith(("CALL", "RESUME", "JUMP_BACKWARD")) and now != "SWAP":
                self._left -= 1
                if self._left == 0:
                    self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                    raise _Stop
        return self._trace


class _AtRandom:
    """Raises _Stop in a signal handler at a random time, if the call has not ended before."""

    def __init__(self, draw: random.Random, longest_s: float = LONGEST_S) -> None:
        self.reached = False
        self.where = "at random"
        self._draw = draw
        self._longest_s = longest_s
        self._armed = False
        signal.signal(signal.SIGALRM, self._handle)

    def __enter__(self) -> None:
        self._armed = True
        signal.setitimer(signal.ITIMER_REAL, self._draw.uniform(1e-6, self._longest_s))

    def __exit__(self, *_: object) -> None:
        self._armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _handle(self, *_: object) -> None:
        if self._armed:
            self._armed = False
            self.reached = True
            raise _Stop


@pytest.mark.usefixtures("judge_decides")
@pytest.mark.parametrize("function", rotated.rotated(FUNCTIONS, few=1, always=["all_reduce"]))
@ranks(2)
def test_a_call_that_is_interrupted_breaks_the_group_on_all_ranks_or_on_none(rank, group, function):
    _at_each_point(function)


@pytest.mark.usefixtures("judge_decides")
@pytest.mark.parametrize("function", rotated.rotated(["all_reduce", "all_reduce_many", "async all_gather_v"], few=1))
@ranks(2, env={"MSCOMM_RECORD": "{record}"})
def test_a_recorded_call_does_so_too(rank, group, function, record):
    _at_each_point(function)


@pytest.mark.usefixtures("judge_decides")
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.long
@ranks(2, timeout_s=290)
def test_it_does_so_at_random_times(rank, group, function):
    calls = _Calls(function)
    draw = random.Random(f"{rotated.seed()} {function}")
    for _ in range(1000):
        calls.stop(_AtRandom(draw))


@ranks(1)
def test_a_handler_may_interrupt_the_wait_for_another_thread(rank, group):
    """Another thread starts the second call of all_gather_v. Python's own code must not lose a lock, either."""
    follow, begun, goes_on = Following._follow, threading.Event(), threading.Event()

    def slow(self: Following) -> Any:
        begun.set()
        assert goes_on.wait(60)
        return follow(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Following, "_follow", slow)
        for point in itertools.count(1):
            begun.clear()
            goes_on.clear()
            work = mscomm.all_gather_v(X, async_op=True)
            assert begun.wait(60)
            stop = _AtPoint(point, (_OURS, threading.__file__))
            with contextlib.suppress(_Stop, TimeoutError), stop:
                work.wait(0.001)
            goes_on.set()
            assert (work.wait(60)[0] == X).all()
            if not stop.reached:
                break
    assert point > 1


@ranks(1)
def test_a_handler_may_interrupt_the_end_of_a_call_that_fails_after_its_head(rank, group):
    """The main thread does the step, which leaves a function that breaks the group. The function must not get lost."""

    def fails() -> Any:
        raise ValueError("no such shape")

    call_after = completing.call_after
    for point in itertools.count(1):
        alone = mscomm.create_group(f"alone {point}", [0])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(completing, "call_after", lambda work, step: work or call_after(work, step))
            work = mscomm.all_gather_v(X, group=alone, async_op=True)
            (following,) = alone.following
            following._then = fails
            with contextlib.suppress(_Stop, ValueError), _AtPoint(point) as stop:
                work.wait()
            with pytest.raises(Exception, match="no such shape"):
                work.wait(60)
        mscomm.destroy_group(alone)
        if not stop.reached:
            break
    assert point > 1


@pytest.mark.parametrize(
    ("function", "hosts"), rotated.rotated(itertools.product(MAKE, [1, 2]), few=0, always=[("create_group", 1)])
)
@ranks(2, env=lambda rank, hosts, **_: {"MSCOMM_HOST_ID": str(rank % hosts)}, timeout_s=290)
def test_a_group_that_could_not_be_made_or_destroyed_can_be_made_again(rank, group, function, hosts):
    for point in itertools.count(1):
        if not _make_and_destroy(function, f"{point}", _AtPoint(point)):
            break
    assert point > 1


@pytest.mark.parametrize("function", MAKE)
@pytest.mark.long
@ranks(2, timeout_s=290)
def test_it_can_be_made_again_after_a_signal_at_a_random_time(rank, group, function):
    draw = random.Random(f"{rotated.seed()} {function}")
    for turn in range(300):
        _make_and_destroy(function, f"{turn}", _AtRandom(draw, 4e-3))


@pytest.fixture
def record(tmp_path: Path) -> str:
    return str(tmp_path)


@ranks(2)
def test_a_handler_cannot_call_between_the_two_calls_of_a_head(rank, group):
    """The call would wait for its turn, after the second call, which waits until the handler has returned."""
    core = resolve(None).core
    barrier = core.prepare(FUNCTION["barrier"], None)
    refused = []

    def handler(*_: object) -> None:
        with pytest.raises(RuntimeError, match="a call in a signal handler that interrupted") as caught:
            mscomm.barrier()
        refused.append(caught.value)

    signal.signal(signal.SIGUSR1, handler)
    with core.reserve(2) as numbers:
        core.run(barrier, 60.0, numbers)
        signal.raise_signal(signal.SIGUSR1)
        core.run(barrier, 60.0, numbers)
    assert refused
    mscomm.barrier()


def _make_and_destroy(function: str, name: str, stop: Any) -> bool:
    """Make a group on both ranks, use it and destroy it. Stop rank 0. Return whether rank 0 has reached the stop.

    A rank whose attempt fails makes the group again.
    """
    world = mscomm.job.default()
    there = set(world.groups)

    def context() -> Any:
        return stop if mscomm.get_rank() == 0 and not stop.reached else contextlib.nullcontext()

    everybody_is_here()
    seen, used, began = [], False, time.monotonic()
    while not used:
        try:
            with context():
                made = MAKE[function](name)
            mscomm.all_reduce(X, group=made, timeout=60)
            used = True
            with context():
                mscomm.destroy_group(made)
        except (_Stop, mscomm.Error) as error:
            seen.append(f"{type(error).__name__} {error}")
        for left in set(world.groups) - there:  # create_group() or destroy_group() had nearly ended
            mscomm.destroy_group(left)
        assert len(seen) < 5 and time.monotonic() - began < 20, (stop.where, seen)
    (reached,) = mscomm.broadcast(np.array([stop.reached]), timeout=60)
    return bool(reached)


def _at_each_point(function: str) -> None:
    calls, point = _Calls(function), 1
    while calls.stop(_AtPoint(point)):
        point += 1
    assert point > 1


class _Calls:
    """Calls one function in a group, and makes a new group after each failure."""

    def __init__(self, function: str) -> None:
        self._function = function
        self._group: Any = None
        self._made = 0
        self._unraisable: list[Any] = []  # exceptions that Python itself has dropped, for example in a __del__
        sys.unraisablehook = self._unraisable.append

    def stop(self, stop: Any) -> bool:
        """Call the function on both ranks, and stop rank 0. Return whether rank 0 has reached the point of the stop."""
        rank = mscomm.get_rank()
        if self._group is None:
            self._group = mscomm.create_group(f"{self._function} {self._made}", [0, 1])
            self._made += 1
        everybody_is_here()
        self._unraisable.clear()
        told = False
        try:
            if rank == 0:
                with stop:
                    FUNCTIONS[self._function](self._group)
            else:
                FUNCTIONS[self._function](self._group)
        except (_Stop, mscomm.Error):
            told = True
        reached = rank == 0 and stop.reached
        assert told or self._unraisable or not reached, "the exception of the signal handler is lost"
        works = True
        try:
            mscomm.all_reduce(np.ones(5), group=self._group, timeout=60)  # no call of FUNCTIONS has the same signature
        except mscomm.CollectiveTimeout:
            raise  # a call number is lost
        except mscomm.Error:
            works = False
        all_work, all_reached = mscomm.all_gather(np.array([[works, reached]])).T
        assert len(set(all_work.tolist())) == 1
        if not works:
            mscomm.destroy_group(self._group)
            self._group = None
        return bool(all_reached.any())
