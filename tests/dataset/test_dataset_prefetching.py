"""The thread that prepares batches ahead of time: how far ahead it works, and what ends it."""

from __future__ import annotations

import gc
import sys
import threading
import time
from typing import Any

import pytest
from pipelines import Rows, fails_at_5, fillers, none_is_left, ordered
from sessions import run

import mscomm.dataset as ds


def endless() -> ds.Dataset:
    return ordered(5).repeat()


def test_a_pass_to_the_end_leaves_no_thread(no_thread_before):
    list(ordered(50))
    assert none_is_left()


def test_close_ends_the_thread(no_thread_before):
    rows = iter(endless())
    next(rows)
    assert len(fillers()) == 1
    rows.close()
    assert not fillers()
    rows.close()
    with pytest.raises(StopIteration):
        next(rows)


def test_leaving_a_with_ends_the_thread(no_thread_before):
    with endless().create_dict_iterator() as rows:
        next(rows)
    assert not fillers()


def test_a_loop_that_is_left_ends_the_thread(no_thread_before):
    for _ in endless():
        break
    assert none_is_left()


def test_an_iterator_in_a_cycle_that_is_collected_ends_the_thread(no_thread_before):
    rows = endless().create_tuple_iterator()
    next(rows)
    rows.me = rows
    del rows
    assert fillers()
    gc.collect()
    assert none_is_left()


def test_an_error_ends_the_thread(no_thread_before):
    with pytest.raises(RuntimeError):
        list(ordered(10).map(fails_at_5))
    assert none_is_left()


def test_a_generator_that_is_left_is_closed(no_thread_before):
    ended = []

    def generate() -> Any:
        try:
            while True:
                yield (1,)
        finally:
            ended.append(threading.current_thread().name)

    rows = iter(ds.GeneratorDataset(generate, "x"))
    next(rows)
    rows.close()
    assert ended == ["mscomm-data"]


def test_no_more_is_made_ahead_than_there_is_room():
    taken = 0
    ahead = []

    class Counted(Rows):
        def __getitem__(self, index: int) -> tuple[Any, Any]:
            ahead.append(len(self.read) - taken)
            return super().__getitem__(index)

    rows = iter(ds.GeneratorDataset(Counted(50), ["x", "y"], shuffle=False))
    for taken, _ in enumerate(rows, 1):
        until = time.monotonic() + 60
        while len(ahead) < min(taken + 3, 50) and time.monotonic() < until:
            time.sleep(0.0005)
    # The thread reads a row only while at most two others are waiting. The test increases `taken` shortly after it
    # takes a row. So `taken` can be one too low, and `ahead` can contain a 3.
    assert len(ahead) == 50 and max(ahead) in (2, 3)


def test_without_prefetching_there_is_no_thread(no_thread_before):
    ds.config.set_prefetch_size(0)
    rows = iter(ordered(5))
    next(rows)
    assert not fillers()
    rows.close()


@pytest.mark.parametrize("kept", ["rows", "None"])
def test_a_process_ends_well_in_the_middle_of_a_pass(kept):
    program = f"""
import atexit, itertools, threading
atexit.register(lambda: print(threading.active_count()))  # runs after mscomm's exit handlers
import mscomm.dataset as ds
rows = iter(ds.GeneratorDataset(lambda: itertools.repeat((1,)), "x").map(lambda x: x).batch(7))
next(rows)
kept = {kept}
print("end")
"""
    done = run([sys.executable, "-c", program])
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n1\n", "")


def test_a_forked_child_is_told_and_makes_its_own():
    program = """
import os, sys, gc, signal, threading, warnings
warnings.simplefilter("ignore", DeprecationWarning)
import mscomm.dataset as ds
rows = iter(ds.GeneratorDataset([(i,) for i in range(1000)], "x", shuffle=False))
next(rows)
held, forked = threading.Event(), threading.Event()
def hold():  # the thread that holds the lock during the fork does not exist in the child
    with rows._rows._queue.news:
        held.set()
        forked.wait()
threading.Thread(target=hold).start()
held.wait()
child = os.fork()
if child:
    forked.set()
if child == 0:
    signal.alarm(60)  # the child must not outlive a failed test
    try:
        next(rows)
    except RuntimeError as error:
        assert "create a new one here" in str(error), error
    else:
        os._exit(1)
    rows.close()
    del rows
    gc.collect()
    assert sum(1 for _ in ds.GeneratorDataset([(i,) for i in range(100)], "x")) == 100
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert sum(1 for _ in rows) == 999
"""
    done = run([sys.executable, "-c", program])
    assert (done.returncode, done.stderr) == (0, "")
