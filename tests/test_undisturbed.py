"""A condition and a thread that no exception of a signal handler can leave half done."""

from __future__ import annotations

import functools
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mscomm import undisturbed
from mscomm.undisturbed import CallingThread, Condition


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
def thread_of_calls() -> Iterator[CallingThread]:
    made = CallingThread()
    yield made
    made.end()


def test_a_function_goes_on_without_its_caller_and_comes_before_the_next(
    thread_of_calls: CallingThread,
) -> None:
    goes_on, done = threading.Event(), list[str]()

    def first() -> None:
        assert goes_on.wait(60)
        done.append("first")

    with pytest.raises(Enough), interrupted(0.05):
        thread_of_calls.call(first, 60)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(TimeoutError, match=r"took longer than 0\.05 s"):
        patch.setattr(undisturbed, "_GRACE_S", 0.05)
        thread_of_calls.call(lambda: done.append("second"), 0.05)
    goes_on.set()
    thread_of_calls.call(lambda: done.append("third"), 60)
    assert done == ["first", "second", "third"]


def test_errors_reach_the_caller_and_other_threads_call_for_themselves(thread_of_calls: CallingThread) -> None:
    where = list[threading.Thread]()

    def fails() -> None:
        where.append(threading.current_thread())
        raise ConnectionResetError("gone")

    with pytest.raises(ConnectionResetError, match="gone"):
        thread_of_calls.call(fails, 60)
    assert where[0] is not threading.main_thread()

    def elsewhere() -> None:
        with pytest.raises(ConnectionResetError):
            thread_of_calls.call(fails, 60)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(60)
    assert where[1] is thread

    thread_of_calls.end()
    with pytest.raises(ConnectionResetError):
        thread_of_calls.call(fails, 60)
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


def test_a_handler_that_interrupts_the_owner_of_the_lock_lets_others_change_something() -> None:
    condition, met = Condition(), list[bool]()

    def tells() -> None:
        with condition.lock:
            met.append(True)
            condition.notify_all()

    thread = threading.Thread(target=tells)
    with condition.lock:
        thread.start()
        assert condition.wait_for(lambda: bool(met), 60)
    thread.join(60)
    assert condition._waiters == []


def test_without_memory_for_a_thread_the_caller_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def note(where: list[threading.Thread]) -> None:
        where.append(threading.current_thread())

    for error in (RuntimeError("can't start new thread"), MemoryError()):

        def no_thread(*_: object, error: BaseException = error) -> int:
            raise error

        calls, where = CallingThread(), list[threading.Thread]()
        with monkeypatch.context() as patch:
            patch.setattr(undisturbed._thread, "start_new_thread", no_thread)
            calls.call(functools.partial(note, where), 60)
        calls.call(functools.partial(note, where), 60)
        calls.end()
        assert [one is threading.main_thread() for one in where] == [True, False]


def test_what_was_ordered_before_the_end_is_done(thread_of_calls: CallingThread) -> None:
    done = list[int]()

    def note(value: int) -> None:
        time.sleep(0.05)
        done.append(value)

    for value in range(3):
        with pytest.raises(Enough), interrupted(0.02):
            thread_of_calls.call(functools.partial(note, value), 60)
    thread_of_calls.end()
    thread_of_calls.call(lambda: done.append(3), 60)
    until = time.monotonic() + 60
    while len(done) < 4 and time.monotonic() < until:
        time.sleep(0.01)
    assert sorted(done) == [0, 1, 2, 3]
