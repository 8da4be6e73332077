"""Calls with a head, made with async_op, and functions that are called when a Work has completed."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from ranks import ranks

import mscomm
from mscomm import completing
from mscomm.works import when_done

CARRIERS = pytest.mark.parametrize("algorithm", ["", "all_gather=direct"])
LONGEST_S = 60


def wait_for(event: threading.Event) -> None:
    assert event.wait(LONGEST_S)


def completing_threads() -> int:
    return sum(thread.name == "mscomm-completing" for thread in threading.enumerate())


@CARRIERS
@ranks(3, env={"MSCOMM_ALGO": "{algorithm}"})
def test_calls_with_a_head_run_in_order_without_threads_of_their_own(rank, group, algorithm):
    works = []
    for k in range(20):
        works.append(mscomm.all_gather_v(np.full(rank + k, k), async_op=True))
        works.append(mscomm.all_reduce(np.full(3, k), async_op=True))
        x = np.arange(6) + k if rank == k % 3 else None
        works.append(mscomm.scatter(x, root=k % 3, async_op=True))
    assert threading.active_count() <= 4  # this thread, the member, the completing thread, and one that takes over
    assert mscomm.all_reduce(np.ones(1)) == 3  # a call of this thread waits for the calls with lower numbers
    assert all(work.done() for work in works[1::3])
    for k in range(20):
        rows, counts = works[3 * k].wait()
        assert counts == [k, k + 1, k + 2] and rows.tolist() == [k] * (3 * k + 3)
        assert works[3 * k + 1].wait().tolist() == [3 * k] * 3
        assert works[3 * k + 2].wait().tolist() == [2 * rank + k, 2 * rank + 1 + k]


@ranks(4)
def test_a_group_does_not_wait_for_calls_of_another_group(rank, group):
    """Two ranks make their calls of the two groups in the other order than the other two."""
    a, b = mscomm.create_group("a", [0, 1, 2, 3]), mscomm.create_group("b", [0, 1, 2, 3])
    first, second = (a, b) if rank < 2 else (b, a)
    for _ in range(10):
        one = mscomm.all_gather_v(np.arange(rank), group=first, async_op=True)
        rows, _ = mscomm.all_gather_v(np.arange(rank), group=second, async_op=True).wait()
        assert one.wait()[0].tolist() == rows.tolist() == [0, 0, 1, 0, 1, 2]


@ranks(2)
def test_a_function_is_called_when_the_work_has_completed(rank, group):
    one, strided = np.ones(1), np.zeros((4, 4))[:, ::2]
    works = {
        "one call": mscomm.all_reduce(np.ones(2), async_op=True),
        "two calls": mscomm.all_gather_v(np.ones(rank), async_op=True),
        "out is filled later": mscomm.all_reduce(np.ones((4, 2)), out=strided, async_op=True),
        "several calls": mscomm.all_reduce_many([np.ones(2), np.ones(300_000)], async_op=True),
        "a message": mscomm.send(one, 1, async_op=True) if rank == 0 else mscomm.recv(one, 0, async_op=True),
    }
    called = {name: threading.Event() for name in works}
    for name, work in works.items():

        def function(name: str = name, work: mscomm.Work = work) -> None:
            assert work.done() and threading.current_thread() is not threading.main_thread()
            called[name].set()

        when_done([work], function)
    for event in called.values():
        wait_for(event)
    again = threading.Event()
    when_done([works["two calls"]], again.set)  # it completed long ago
    wait_for(again)
    assert (strided == 2).all()


def switches() -> int:
    """Return how many times the threads of this process, apart from this one, have gone to sleep."""
    count = 0
    for file in Path("/proc/self/task").glob("*/status"):
        if file.parent.name != str(threading.get_native_id()):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                count += int(re.findall(r"^voluntary_ctxt_switches:\t(\d+)$", file.read_text(), re.M)[0])
    return count


@ranks(2)
def test_no_thread_wakes_up_after_a_call_that_another_thread_has_run(rank, group):
    """The thread that runs such calls would interrupt a computation each time."""
    ended = threading.Event()
    when_done([mscomm.all_reduce(np.ones(1), async_op=True)], ended.set)
    wait_for(ended)
    time.sleep(0.01)
    before = switches()
    time.sleep(0.03)
    assert switches() - before < 10


@ranks(2)
def test_a_function_may_wait_for_later_calls(rank, group):
    """Each function blocks until the next one has waited, so all of them block at the same time."""
    results, ended = [], threading.Event()

    def go_on(depth: int) -> None:
        if depth == 0:
            return ended.set()
        plain = mscomm.all_reduce(np.full(1, depth), async_op=True)
        headed = mscomm.all_gather_v(np.full(rank, depth), async_op=True)
        inner = threading.Event()

        def function() -> None:
            go_on(depth - 1)
            inner.set()

        when_done([headed], function)
        wait_for(inner)
        results.append((plain.wait()[0], headed.wait()[0].tolist()))

    when_done([mscomm.barrier(async_op=True)], lambda: go_on(5))
    wait_for(ended)
    until = time.monotonic() + LONGEST_S
    while len(results) < 5 or completing_threads() > 2:  # the threads that took over end when they are not needed
        assert time.monotonic() < until
        time.sleep(0.01)
    assert sorted(results) == [(2 * depth, [depth]) for depth in range(1, 6)]


@ranks(2)
def test_an_exception_in_a_function_is_printed_and_ends_nothing(rank, group):
    printed: list[str] = []
    threading.excepthook = lambda args: printed.append(str(args.exc_value))
    called = threading.Event()

    def function() -> None:
        called.set()
        raise ValueError("no such bucket")

    when_done([mscomm.barrier(async_op=True)], function)
    wait_for(called)
    rows, _ = mscomm.all_gather_v(np.ones(rank), async_op=True).wait()
    assert len(rows) == 1
    after = threading.Event()
    when_done([mscomm.barrier(async_op=True)], after.set)
    wait_for(after)
    assert printed == ["no such bucket"]


@ranks(3)
def test_an_error_after_the_head_fails_the_call_on_every_rank(rank, group):
    out = np.zeros(5 if rank == 1 else 3)
    work = mscomm.all_gather_v(np.ones(1), out=out, async_op=True)
    with pytest.raises(mscomm.Mismatch, match="out has shape"):  # at the call, if the group has failed by then
        mscomm.all_gather_v(np.ones(1), async_op=True).wait(timeout=LONGEST_S)
    failed = threading.Event()
    when_done([work], failed.set)
    wait_for(failed)
    with pytest.raises(mscomm.Mismatch, match="out has shape"):
        work.wait(timeout=LONGEST_S)
    assert isinstance(work.exception(), mscomm.Mismatch)
    with pytest.raises(mscomm.Mismatch, match="out has shape"):
        mscomm.barrier()


@ranks(2)
def test_a_head_that_waits_too_long_fails(rank, group):
    if rank == 0:
        work = mscomm.all_gather_v(np.ones(1), async_op=True, timeout=0.2)
        with pytest.raises(mscomm.CollectiveTimeout):
            work.wait(timeout=LONGEST_S)
    else:
        with pytest.raises(mscomm.CollectiveTimeout):
            mscomm.recv(np.ones(1), 0)  # fails when rank 0 has failed
    with pytest.raises(mscomm.CollectiveTimeout):
        mscomm.barrier()


@ranks(2)
def test_release_waits_for_calls_with_a_head(rank, group):
    outs = [np.zeros((3, 2))[:, 0] for _ in range(20)]
    for k, out in enumerate(outs):
        mscomm.all_gather_v(np.full(1 + rank, k), out=out.view(np.int64), async_op=True)
    mscomm.release()
    assert [out.view(np.int64).tolist() for out in outs] == [[k] * 3 for k in range(20)]


def test_the_end_waits_for_a_thread_that_is_being_started(monkeypatch):
    start, starting, called = threading.Thread.start, threading.Event(), list[int]()

    def start_late(thread):
        starting.set()
        time.sleep(0.05)
        start(thread)

    for _ in range(10):  # end() joins the threads in any order
        starting.clear()
        called.clear()
        made = completing._Completing()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start_late)
            for number in range(3):
                made.call_after(None, lambda number=number: lambda: called.append(number))
            wait_for(starting)
            made.end()
        assert sorted(called) == [0, 1, 2]
        assert not made._threads


@ranks(2)
def test_a_forked_child_may_not_wait(rank, group):
    work = mscomm.all_gather_v(np.ones(rank), async_op=True)
    child = os.fork()
    if child == 0:
        try:
            work.wait()
        except RuntimeError as error:
            os._exit(0 if "before the fork" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert len(work.wait()[0]) == 1
