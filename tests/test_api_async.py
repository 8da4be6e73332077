"""async_op=True: the Work that a call returns, and calls that run while their caller continues."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from api import in_a_forked_child
from ranks import everybody_is_here, ranks, tell, until_told, when_inside

import mscomm
from mscomm import arrays, collectives


@ranks(3)
def test_a_work_gives_the_result_as_often_as_it_is_asked(rank, group):
    work = mscomm.all_reduce(np.full(1000, rank), async_op=True)
    assert isinstance(work, mscomm.Work)
    assert (work.wait() == 3).all() and work.wait() is work.wait(timeout=1)
    assert work.done() and work.is_completed() and work.exception() is None


@ranks(1)
def test_a_garbage_collection_may_run_while_the_first_work_is_made(rank, group):
    gc.set_threshold(1)
    assert mscomm.all_gather_v(np.arange(2), async_op=True).wait()[0].tolist() == [0, 1]


@ranks(2)
def test_a_coroutine_can_await_a_call_while_others_go_on(rank, group):
    async def summed(call: Any, x: Any) -> Any:
        return await call(x, async_op=True)

    async def several() -> list[Any]:
        calls = [mscomm.all_reduce, mscomm.all_gather_v, lambda x, **options: mscomm.all_reduce_many([x], **options)]
        results = [asyncio.ensure_future(summed(call, np.full(2, rank + 1.0))) for call in calls]
        if rank == 0:
            await asyncio.sleep(0)  # the calls have started, and the event loop goes on, although rank 1 waits
            mscomm.send(np.ones(1), 1)
        else:
            await asyncio.to_thread(mscomm.recv, np.zeros(1), 0)
        return await asyncio.gather(*results)

    total, (rows, counts), (many,) = asyncio.run(several())
    assert (total.tolist(), rows.tolist(), counts, many.tolist()) == ([3, 3], [1, 1, 2, 2], [2, 2], [3, 3])
    with pytest.raises(mscomm.Mismatch):
        asyncio.run(summed(mscomm.all_reduce, np.ones(2 + rank)))


@ranks(2)
def test_a_work_says_whether_it_runs_and_wait_0_only_looks(rank, group):
    x = np.ones(2)
    starts = [
        lambda: mscomm.all_reduce(x, async_op=True),
        lambda: mscomm.all_gather_v(x, async_op=True),
        lambda: mscomm.recv(np.empty(2), 1 - rank, async_op=True),
    ]
    for start in starts:
        if rank == 0:
            work = start()
            assert repr(work) == "<mscomm.Work: running>"
            with pytest.raises(TimeoutError, match="did not end within 0 s; it is still running"):
                work.wait(0)
            tell(f"seen {starts.index(start)}")
        else:
            until_told(f"seen {starts.index(start)}")
            work = mscomm.send(x, 0, async_op=True) if start is starts[-1] else start()
        work.wait()
        work.wait(timeout=0)
        assert repr(work) == "<mscomm.Work: completed>"
    with pytest.raises(ValueError, match=r"Work\.wait: timeout -1 is not more than 0 seconds"):
        work.wait(-1)
    failing = mscomm.all_reduce(np.ones(2 + rank), async_op=True)
    with pytest.raises(mscomm.Mismatch):
        failing.wait()
    assert repr(failing) == "<mscomm.Work: failed>"


@ranks(3)
def test_calls_beside_the_caller_are_carried_out_in_order(rank, group):
    x, works = np.full(50_000, rank + 1.0), []
    for _ in range(20):
        # x is also out, so each all_reduce depends on the result of the previous one.
        works.append(mscomm.all_reduce(x, "max", out=x, async_op=True))
        works.append(mscomm.all_gather_v(np.full(rank, rank), async_op=True))
    assert mscomm.all_reduce(np.ones(1))[0] == 3  # this call runs after all of the asynchronous ones
    assert all((work.wait(timeout=60) == 3).all() for work in works[::2])
    rows, counts = works[-1].wait()
    assert rows.tolist() == [1, 2, 2] and counts == [0, 1, 2]


@ranks(2)
def test_a_wait_completes_all_earlier_calls(rank, group):
    x = np.full(1000, rank + 1.0)
    works = [mscomm.all_reduce(x, "max", out=x, async_op=True)]
    works += [mscomm.all_reduce(x, out=x, async_op=True) for _ in range(9)]
    assert (works[5].wait() >= 2 * 2**5).all() and all(work.done() for work in works[:6])
    assert (works[9].wait() == 2 * 2**9).all()


@ranks(2)
def test_a_call_that_nobody_waits_for_ends_all_the_same(rank, group):
    """The worker thread carries it out, also if it sleeps, and also if wait() has carried out the call before."""
    for size, waits in itertools.product((1, 4 << 20), (False, True)):
        for pause in (0, 0.02, 0.1):  # 0.1: the worker thread sleeps by then
            work = mscomm.all_reduce(np.ones(size, np.float32), async_op=True)
            while not work.done():
                time.sleep(0.001)
            if waits:
                mscomm.all_reduce(np.ones(1), async_op=True).wait()
            time.sleep(pause)


@ranks(2)
def test_threads_wait_for_different_works(rank, group):
    works = [mscomm.all_reduce(np.full(size, i), async_op=True) for i, size in enumerate((3, 100_000) * 10)]
    results: dict[int, np.ndarray] = {}
    threads = [
        threading.Thread(target=lambda i=i: results.update({i: works[i].wait()}))
        for i in (range(20) if rank else reversed(range(20)))
    ]
    for thread in threads:
        thread.start()
    assert mscomm.all_reduce(np.ones(1)) == [2]
    for thread in threads:
        thread.join()
    assert all((results[i] == 2 * i).all() for i in range(20))


@ranks(2)
def test_a_wait_raises_the_timeout_of_its_call(rank, group):
    if rank == 0:
        with pytest.raises(mscomm.CollectiveTimeout, match=r"all_reduce #1 .*waiting for rank 1") as raised:
            mscomm.all_reduce(np.ones(3), timeout=0.2, async_op=True).wait()
        assert raised.value.waiting_for == (1,)
        tell("timed out")
    until_told("timed out")
    with pytest.raises(mscomm.CollectiveTimeout):
        mscomm.barrier()


class Stop(Exception):
    pass


@pytest.mark.parametrize("what", ["call", "message"])
@ranks(2)
def test_a_handler_that_raises_ends_the_wait_but_not_the_call(rank, group, what):
    x = np.ones(3)
    mscomm.sendrecv(x, 1 - rank, np.empty(3), 1 - rank)

    def stop(*_):
        tell("stopped")
        raise Stop

    if rank == 0:
        signal.signal(signal.SIGUSR1, stop)
        out = np.zeros(3)
        work = mscomm.all_reduce(x, out=out, async_op=True) if what == "call" else mscomm.recv(out, 1, async_op=True)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(Stop):
            work.wait()
        work.wait()
        assert (out == (2 if what == "call" else 1)).all()
    else:
        until_told("stopped")
        if what == "call":
            mscomm.all_reduce(x)
        else:
            mscomm.send(x, 0)
    everybody_is_here()
    assert mscomm.all_reduce(np.ones(1)) == [2]


@pytest.mark.parametrize("thread", ["caller", "worker"])
@ranks(2)
def test_a_wait_that_is_interrupted_for_good_ends_the_call(rank, group, thread):
    def stop(*_):
        raise Stop

    def interrupt():
        inside.set()
        waits.wait()
        time.sleep(0.05)  # until the main thread is in Work.wait()
        os.kill(os.getpid(), signal.SIGUSR1)

    inside, waits = threading.Event(), threading.Event()
    if rank == 0:
        signal.signal(signal.SIGUSR1, stop)
        when_inside(1, interrupt)
        work = mscomm.all_reduce(np.ones(3), async_op=True)
        if thread == "worker":
            inside.wait()
        with pytest.raises(Stop):
            waits.set()
            work.wait()
        if not work.done():  # the worker thread runs the call
            mscomm.abort("rank 0 is interrupted in all_reduce #1")
            with pytest.raises(mscomm.Aborted):
                work.wait()
        assert isinstance(work.exception(), mscomm.Aborted)
        tell("over")
    until_told("over")
    with pytest.raises(mscomm.Aborted, match=r"rank 0 .*interrupted in all_reduce #1"):
        mscomm.barrier()


@ranks(2)
def test_a_work_that_is_waited_for_too_briefly_goes_on(rank, group):
    work = mscomm.barrier(async_op=True) if rank == 0 else None
    if work:
        with pytest.raises(TimeoutError, match="it is still running"):
            work.wait(timeout=0.05)
        assert not work.done() and work.exception() is None
    mscomm.all_gather(np.ones(1), group=mscomm.create_group("other", [0, 1]))
    if work:
        mscomm.barrier(group="other")
        work.wait()
    else:
        mscomm.barrier(group="other")
        mscomm.barrier()


@ranks(2)
def test_arrays_of_a_dropped_work_live_until_it_has_ended(rank, group):
    for size in (10, 100_000) * 20:
        mscomm.all_reduce(np.full(size, rank + 1.0), async_op=True)
        mscomm.all_gather_v(np.ones(rank + size), async_op=True)
        gc.collect()
        np.zeros(size)  # overwrites the dropped calls' arrays if their memory was freed too early
    mscomm.barrier()


@ranks(2)
def test_arrays_of_dropped_works_die_after_the_works_have_ended(rank, group):
    """A call looks at a few of the running messages, not at all. Later calls must find all that have ended."""
    count, peer = 200, 1 - rank
    arrays = [np.full(3, i) for i in range(count)]
    gone = [weakref.ref(x) for x in arrays]
    works = [mscomm.recv(np.empty(3, int), peer, tag=i, async_op=True) for i in range(count)]
    for i in reversed(range(count)):
        mscomm.send(arrays.pop(), peer, tag=i, async_op=True)
    for i, work in enumerate(works):
        assert (work.wait() == i).all()
    mscomm.barrier()
    for _ in range(count):
        mscomm.send(np.ones(1), peer, tag=count, async_op=True)
        mscomm.recv(np.empty(1), peer, tag=count)
    assert all(ref() is None for ref in gone)
    mscomm.barrier()


@pytest.mark.long
@ranks(2)
def test_a_wait_takes_the_same_time_however_many_calls_are_outstanding(rank, group):
    """Rank 1 makes the first calls slowly, so that rank 0 waits for each of them while the others stay queued."""

    def wait_us(count: int, waits: int = 100) -> float:
        x = np.ones(4)
        mscomm.barrier()
        if rank == 1:
            for i in range(count):
                mscomm.all_reduce(x)
                time.sleep(2e-3 if i < waits else 0)
            return 0
        works = [mscomm.all_reduce(x, async_op=True) for _ in range(count)]
        works[0].wait(timeout=60)  # the timeout makes the worker thread run the calls
        begun = time.thread_time()  # the CPU time of this thread only
        for work in works[:waits]:
            work.wait()
        return (time.thread_time() - begun) / waits * 1e6

    few, many = wait_us(300), wait_us(10_000)
    assert many <= 5 * max(few, 15), (few, many)


@ranks(2)
def test_the_error_of_a_dropped_work_is_raised_by_the_next_call(rank, group):
    if rank == 0:
        mscomm.all_reduce(np.ones(3), async_op=True)
        with pytest.raises(mscomm.Mismatch, match=r"all_reduce #1.*barrier #1"):
            while True:
                mscomm.barrier()
    else:
        with pytest.raises(mscomm.Mismatch, match=r"all_reduce #1.*barrier #1"):
            mscomm.barrier()


@ranks(2)
def test_a_work_raises_what_ended_its_call_and_shows_it(rank, group):
    other = mscomm.create_group("other", [0, 1])
    with pytest.raises(mscomm.Aborted, match="rank 1 called abort: enough"):
        if rank == 0:
            work = mscomm.all_gather_v(np.ones(3), async_op=True)
            mscomm.barrier(group=other)
            try:
                work.wait()
            finally:
                assert isinstance(work.exception(), mscomm.Aborted)
        mscomm.barrier(group=other)
        mscomm.abort("enough")
        mscomm.barrier()


@ranks(2)
def test_arrays_that_were_started_live_though_a_later_one_could_not_be(rank, group):
    calls = []
    filled = collectives._FusedCall.filled

    def full(self: Any, *given: Any) -> Any:
        calls.append(self)
        if len(calls) == 3:
            raise MemoryError("no more")
        return filled(self, *given)

    collectives._FusedCall.filled = full
    big = [np.full(300_000, rank + 1.0) for _ in range(6)]  # each is so large that it gets a call of its own
    with pytest.raises((MemoryError, mscomm.Aborted)):
        mscomm.all_reduce_many(big, async_op=True)
    del big
    gc.collect()
    [np.zeros(300_000) for _ in range(6)]  # overwrites the arrays in `big` if their memory was freed too early
    with pytest.raises(mscomm.Aborted, match="MemoryError: no more"):
        mscomm.barrier()


STARTED = {
    "all_reduce": lambda x, peer: mscomm.all_reduce(x, async_op=True),
    "all_gather_v": lambda x, peer: mscomm.all_gather_v(x, async_op=True),
    "all_reduce_many": lambda x, peer: mscomm.all_reduce_many([x, x.copy()], async_op=True),
    "send": lambda x, peer: mscomm.send(x, peer, async_op=True),
}


@pytest.mark.parametrize("timeout", [None, 60])
@pytest.mark.parametrize("function", STARTED)
@ranks(2)
def test_a_work_that_was_waited_for_keeps_nothing(rank, group, function, timeout):
    x = np.ones(1000)
    held = sys.getrefcount(x)
    work = STARTED[function](x, 1 - rank)
    if function == "send":
        mscomm.recv(np.empty(1000), 1 - rank)
    result = work.wait(timeout)
    assert sys.getrefcount(x) == held
    result = weakref.ref(result) if function == "all_reduce" else None
    del work
    assert result is None or result() is None


@ranks(2)
def test_a_second_wait_writes_nothing(rank, group):
    out = np.zeros((2, 10))[:, ::2][0]  # strided, so mscomm copies the result into it
    work = mscomm.all_reduce_many([np.ones(5)], out=[out], async_op=True)
    assert (work.wait(timeout=60)[0] == 2).all()
    out[:] = 7  # the second wait() must not overwrite these values
    assert work.wait()[0] is out and (out == 7).all()


@ranks(2)
def test_a_work_in_a_cycle_with_its_array_is_collected(rank, group):
    class Holder(np.ndarray[Any, Any]):
        work: Any

    for waits in (True, False):
        x = np.ones(3).view(Holder)
        x.work = mscomm.all_reduce(x, out=x, async_op=True)
        if waits:
            x.work.wait()
        while not x.work.done():
            time.sleep(0.001)
        mscomm.barrier()  # frees the Works that have ended, as each call does
        gone = weakref.ref(x)
        del x
        gc.collect()
        assert gone() is None


@ranks(2)
def test_a_work_is_of_the_process_that_made_the_call(rank, group):
    work = mscomm.all_reduce(np.ones(3), async_op=True)
    work.wait()
    for call in (work.wait, work.done, work.exception):
        assert in_a_forked_child(call).startswith(
            "RuntimeError: mscomm: this call was made in the parent process, before the fork"
        )


def test_a_work_is_made_by_a_call_only():
    with pytest.raises(TypeError, match="a Work is made by a call with async_op=True"):
        mscomm.Work().wait()


@pytest.mark.parametrize("function", ["all_reduce", "all_reduce_many"])
@ranks(2)
def test_two_threads_that_wait_for_a_work_get_the_same_result(rank, group, function):
    class Slow(np.ndarray[Any, Any]):
        pass

    def slowly(_: Any) -> None:
        time.sleep(0.2)  # in the meantime, other threads reach wait()

    # mscomm calls this function after it has copied the result to `out`, because `out` is of a subclass of ndarray.
    arrays.written_all = slowly
    x, out = np.full(500, rank + 1.0), np.zeros(1000).view(Slow)[::2]
    if function == "all_reduce":
        work = mscomm.all_reduce(x, out=out, async_op=True)
    else:
        work = mscomm.all_reduce_many([x], out=[out], async_op=True)
    got: list[Any] = []
    threads = [threading.Thread(target=lambda: got.append(work.wait())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results = [one if function == "all_reduce" else one[0] for one in got]
    assert len(results) == 4 and all(one is out for one in results)
    assert (out == 3.0).all()


@ranks(2)
def test_an_array_may_make_a_call_when_the_end_of_a_work_frees_it(rank, group):
    class Loud(np.ndarray[Any, Any]):
        def __del__(self) -> None:
            calls.append(mscomm.all_reduce(np.ones(1))[0])

    calls: list[float] = []
    work = mscomm.all_reduce(np.ones(3).view(Loud), async_op=True)
    while not work.done():
        time.sleep(0.001)
    del work  # nobody has called work.wait()
    mscomm.barrier()  # each call frees the Works that have ended
    assert calls == [2.0]


def strided(size: int) -> np.ndarray[Any, Any]:
    return np.zeros(2 * size)[::2]


# Asynchronous calls whose `out` is strided. The core cannot write to it, so done() or wait() copies the result to it.
FILLS: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda out, peer: mscomm.all_reduce(np.ones(500), out=out, async_op=True),
    "all_reduce_many": lambda out, peer: mscomm.all_reduce_many([np.ones(500)] * 2, out=[out, out + 0], async_op=True),
    "recv": lambda out, peer: mscomm.recv(out, peer, async_op=True),
}


@pytest.mark.parametrize("function", FILLS)
@ranks(2)
def test_the_result_is_in_out_when_a_work_is_done(rank, group, function):
    out = strided(500)
    work = FILLS[function](out, 1 - rank)
    if function == "recv":
        mscomm.send(np.full(500, 2.0), 1 - rank)
    while not work.done():
        time.sleep(0.001)
    assert (out == 2).all()
    out[:] = 7  # neither done() nor wait() fills `out` again
    assert work.done()
    work.wait()
    assert (out == 7).all()


@pytest.mark.parametrize("function", FILLS)
@ranks(2)
def test_a_work_that_is_dropped_before_out_is_filled_warns(rank, group, function):
    told: list[str] = []
    mscomm.log.warn = told.append
    FILLS[function](strided(500), 1 - rank)
    if function == "recv":
        mscomm.send(np.ones(500), 1 - rank)
    mscomm.barrier()
    (text,) = told
    assert text.startswith(f"{function}: the Work was dropped before wait() returned or done() was True")
    x = np.ones(500)
    mscomm.all_reduce(x, out=x, async_op=True)  # the core itself writes to this `out`, so there is no warning
    mscomm.barrier()
    assert (x == 2).all() and len(told) == 1
