"""A condition and a thread that no exception of a signal handler can leave half done."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mscomm.undisturbed import Apart, Condition


class Enough(Exception):
    pass


@contextmanager
def interrupted(seconds: float) -> Iterator[None]:
    def handler(*_: object) -> None:
        raise Enough

    former = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


@pytest.fixture
def apart() -> Iterator[Apart]:
    made = Apart()
    yield made
    made.end()


def test_a_function_goes_on_when_its_caller_is_interrupted_and_comes_before_the_next_one(apart: Apart) -> None:
    goes_on, done = threading.Event(), list[str]()

    def first() -> None:
        assert goes_on.wait(60)
        done.append("first")

    with pytest.raises(Enough), interrupted(0.05):
        apart.call(first, 60)
    with pytest.raises(TimeoutError, match=r"longer than 0\.05 s"):
        apart.call(lambda: done.append("second"), 0.05)
    goes_on.set()
    apart.call(lambda: done.append("third"), 60)
    assert done == ["first", "second", "third"]


def test_errors_reach_the_caller_and_other_threads_call_for_themselves(apart: Apart) -> None:
    where = list[threading.Thread]()

    def fails() -> None:
        where.append(threading.current_thread())
        raise ConnectionResetError("gone")

    with pytest.raises(ConnectionResetError, match="gone"):
        apart.call(fails, 60)
    assert where[0] is not threading.main_thread()

    def elsewhere() -> None:
        with pytest.raises(ConnectionResetError):
            apart.call(fails, 60)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(60)
    assert where[1] is thread

    apart.end()
    with pytest.raises(ConnectionResetError):
        apart.call(fails, 60)
    assert where[2] is threading.main_thread()


def test_a_wait_that_is_interrupted_leaves_the_lock_free() -> None:
    condition = Condition()
    with pytest.raises(Enough), interrupted(0.05):
        condition.wait_for(lambda: False, 60)
    free = list[bool]()
    thread = threading.Thread(target=lambda: free.append(condition.lock.acquire(timeout=10)))
    thread.start()
    thread.join(60)
    assert free == [True]


def test_waits_end_when_the_condition_is_met_or_the_time_has_passed() -> None:
    condition, met = Condition(), list[bool]()

    def tells() -> None:
        for value in (False, True):
            time.sleep(0.02)
            with condition.lock:
                met.append(value)
                condition.notify_all()

    thread = threading.Thread(target=tells)
    thread.start()
    assert condition.wait_for(lambda: True in met, 60)
    thread.join(60)
    assert not condition.wait_for(lambda: False, 0.01)
    assert condition.wait_for(lambda: True, 0)
