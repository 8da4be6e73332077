"""Forked children, several threads, and the end of a process."""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from api import in_a_forked_child
from ranks import ranks, tell, until_told
from sessions import mscomm_run

import mscomm
from mscomm.collectives import FUNCTION
from mscomm.job import resolve


@ranks(2)
def test_a_forked_child_is_no_rank_and_its_parent_goes_on(rank, group):
    x = mscomm.zeros(3)
    for call in (mscomm.barrier, mscomm.get_rank, lambda: mscomm.all_reduce(x)):
        assert in_a_forked_child(call).startswith("RuntimeError: mscomm: this process was forked from")
    core = resolve(None).core
    call = core.prepare(FUNCTION["barrier"], None)
    assert in_a_forked_child(lambda: core.run(call, 1.0, None)).startswith("RuntimeError: mscomm:")
    heap = resolve(None).epoch.heap

    def gets_no_memory():
        assert heap.allocate(1 << 20) is None

    assert in_a_forked_child(gets_no_memory) == "nothing was raised"
    assert mscomm.all_reduce(np.float32([rank]))[0] == 1


@ranks(2)
def test_a_forked_child_that_ends_takes_nobody_with_it(rank, group):
    child = os.fork()
    if child == 0:
        sys.exit(0)  # runs all exit handlers, including mscomm's
    os.waitpid(child, 0)
    assert mscomm.all_reduce(np.float32([rank]))[0] == 1


@ranks(2)
def test_a_forked_child_ends_though_threads_of_the_parent_wait(rank, group):
    """The child must not wait for threads that only its parent has: the group's worker and a thread in Work.wait()."""
    x = np.float32([rank])
    assert mscomm.all_reduce(x, async_op=True).wait()[0] == 1
    if rank == 1:
        until_told("forked")
    work = mscomm.all_reduce(x, async_op=True)
    waiter = threading.Thread(target=work.wait)
    waiter.start()
    for _ in range(5):
        time.sleep(0.01)
        child = os.fork()
        if child == 0:
            del work, waiter
            gc.collect()
            sys.exit(0)
        assert ends_within(60, child)
    tell("forked")
    waiter.join()
    assert work.wait()[0] == 1


def ends_within(seconds: float, child: int) -> bool:
    """Return whether the process ends by itself within this time and with status 0. Kill it if it does not end."""
    life = os.pidfd_open(child)
    ended = select.select([life], [], [], seconds)[0]
    os.close(life)
    if not ended:
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1] == 0 and bool(ended)


@ranks(2)
def test_two_threads_of_each_rank_may_call_at_once(rank, group):
    calls, wrong = 200, []

    def call() -> None:
        try:
            for _ in range(calls):
                assert (mscomm.all_reduce(np.full(1000, rank + 1.0)) == 1 + 2).all()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert resolve(None).core.where()[0] == 2 * calls


BESIDE = {
    "recv": lambda: mscomm.recv(np.ones(3), 0),
    "wait": lambda: mscomm.recv(np.ones(3), 0, timeout=0.5, async_op=True).wait(),
    "many": lambda: [mscomm.barrier() for _ in iter(int, 1)],
}


@pytest.mark.parametrize("what", list(BESIDE))
@pytest.mark.parametrize("run", range(3))
@ranks(1, finalizes=True)
def test_the_process_ends_well_while_a_daemon_thread_is_in_a_call(what, run):
    threading.Thread(target=BESIDE[what], daemon=True).start()
    time.sleep(0.1)  # by then, the thread is probably in its call


@pytest.mark.parametrize("run", range(3))
@ranks(2, finalizes=True)
def test_the_processes_end_well_while_their_daemon_threads_call_each_other(rank, group, run):
    beside = mscomm.create_group("beside", [0, 1])

    def call() -> None:
        while True:
            mscomm.all_reduce(np.ones(1 << 12), group=beside)

    threading.Thread(target=call, daemon=True).start()
    time.sleep(0.1)  # by then, the threads are probably in their calls


ONE_WAY = {  # each call has x and result of at most 4 KiB; they may return before the other ranks have called
    "broadcast": (lambda x: mscomm.broadcast(x, root=0), {0}),
    "scatter": (lambda x: mscomm.scatter(x, root=0), {0}),
    "broadcast_object": (lambda x: mscomm.broadcast_object(x.sum(), root=0), {0}),
    "gather": (lambda x: mscomm.gather(x[:4], root=0), {1, 2}),
    "reduce": (lambda x: mscomm.reduce(x, root=0), {1, 2}),
}


@pytest.mark.parametrize("what", list(ONE_WAY))
@ranks(3)
def test_a_rank_of_a_small_call_with_a_root_waits_only_for_whom_it_needs(rank, group, what):
    call, first = ONE_WAY[what]
    x = np.arange(24.0) + 100 * rank
    right = {
        "broadcast": np.arange(24.0) + 1,
        "scatter": np.arange(8.0) + 8 * rank + 1,
        "broadcast_object": 276 + 24,
        "gather": np.array([100 * r + i + 1 for r in range(3) for i in range(4)]) if rank == 0 else None,
        "reduce": 3 * np.arange(24.0) + 303 if rank == 0 else None,
    }[what]
    if rank not in first:
        until_told(*(f"rank {r} has returned" for r in first))
    x += 1
    result = call(x)
    if rank in first:
        x[:] = -1  # belongs to the program again
        tell(f"rank {rank} has returned")
    assert (result is None and right is None) or (np.asarray(result) == right).all()
    mscomm.barrier()


# Rank 0 ends without an error before rank 1 makes the calls.
ENDS_EARLY = """
import contextlib, os, sys, time
import mscomm, numpy, psutil
mscomm.init()
if mscomm.get_rank() == 1:
    until = time.monotonic() + 60
    while not os.path.exists(sys.argv[1]): assert time.monotonic() < until
    rank_0 = psutil.Process(int(open(sys.argv[1]).read()))
    with contextlib.suppress(psutil.NoSuchProcess):
        while rank_0.status() != psutil.STATUS_ZOMBIE: assert time.monotonic() < until
for value in range(3): got = mscomm.broadcast(numpy.full(500, value + mscomm.get_rank()), root=0).sum(); print(got)
if mscomm.get_rank() == 0:
    with open(sys.argv[1] + ".new", "w") as file: file.write(str(os.getpid()))
    os.rename(sys.argv[1] + ".new", sys.argv[1])
"""


def test_the_values_of_a_root_that_has_ended_arrive(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ENDS_EARLY)
    done = mscomm_run("-n", 2, script, tmp_path / "ended")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == sorted(3 * ["[0]", "[1]"] + 2 * ["0", "500", "1000"])


# Each thread makes a call for which the core runs Python code, which then gives up the GIL and never returns. Before
# Python 3.14, Python ends such a thread when the process exits.
IN_PYTHON = """
import threading, time
import mscomm, mscomm.arrays, numpy

def stay(*_):
    if threading.current_thread() is threading.main_thread(): return
    inside.release()
    while True: time.sleep(0.001)

def late(group):
    work = mscomm.recv(numpy.ones(3), 0, timeout=0.01, group=group, async_op=True)
    while not work.done(): time.sleep(0.001)
    return work

calls = {
    "unfilled": lambda group: mscomm.all_reduce(numpy.ones(3), out=numpy.ones(6)[::2], group=group, async_op=True),
    "cause_of": lambda group: late(group).exception(),
    "raise_cause": lambda group: late(group).wait(),
    "noted": lambda group: mscomm.barrier(group=group),
    "ended": lambda group: mscomm.barrier(group=group),
    "memory_anywhere": lambda group: mscomm.all_reduce("no array", group=group),
}
inside = threading.Semaphore(0)
mscomm.init()
for name, call in calls.items():
    group = mscomm.create_group(name, [0])
    setattr(mscomm.arrays if name == "memory_anywhere" else group, name, stay)
    threading.Thread(target=call, args=(group,), daemon=True).start()
for _ in calls: assert inside.acquire(timeout=20)
"""


def test_the_process_ends_well_while_daemon_threads_are_in_python_code_of_a_call(tmp_path):
    env = {**os.environ, "MSCOMM_RECORD": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", IN_PYTHON], capture_output=True, text=True, timeout=100, env=env)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("later_s", [0.0002, 0.0005, 0.1])
def test_the_end_of_a_process_prints_nothing_about_the_call_of_a_daemon_thread(later_s):
    program = (
        "import threading, time, mscomm, numpy\n"
        "mscomm.init()\n"
        "def call():\n"
        "    mscomm.recv(numpy.ones(3), 0)\n"
        "threading.Thread(target=call, daemon=True).start()\n"
        f"time.sleep({later_s})\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
