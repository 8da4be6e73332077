"""What a signal handler's exception cannot leave half done.

A signal handler may raise an exception between almost any two bytecodes of the main thread, but not inside a function
that is written in C. Python's own Condition may then keep its lock for ever, and code that sends may not know how much
it has sent. So this module takes locks by `with lock`, which calls only functions in C. But CPython 3.14 may run the
handler when `with` has taken the lock and has not begun the block (https://github.com/python/cpython/issues/148874).
There, the lock can still be lost. And a handler must not raise an exception that interrupts another handler in mscomm.
"""

from __future__ import annotations

import _thread
import collections
import contextlib
import operator
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from mscomm.threads import memory_for_one

# wake_all(map(wake, waiters)) wakes all waiters in one call of C code.
wake = operator.methodcaller("put", None)
wake_all = collections.deque[None](maxlen=0).extend

_GRACE_S = 1.0  # how much longer CallingThread.call() waits than its function may take


class Condition:
    """A lock, and the threads that wait for changes of what it protects.

    Call wait_for() without the lock: a thread could not be sure to take a lock again that it had released for the wait.
    Only a signal handler that has interrupted the thread which holds the lock may call wait_for() with it.
    """

    def __init__(self) -> None:
        self.lock: Any = threading.RLock()  # Any, because type checkers do not know the methods for conditions
        self._waiters: list[queue.SimpleQueue[None]] = []

    def notify_all(self) -> None:
        """Let all threads in wait_for() look again."""
        with self.lock:
            wake_all(map(wake, self._waiters))
            self._waiters.clear()

    def wait_for(self, met: Callable[[], bool], seconds: float) -> bool:
        """Wait until met() is true, at most for this time. Return its last value. The lock is held during each call."""
        until = time.monotonic() + seconds
        while True:
            waiter = queue.SimpleQueue[None]()
            with self.lock:
                if met():
                    return True
                if time.monotonic() >= until:
                    return False
                self._waiters.append(waiter)
            held = self.lock._release_save() if self.lock._is_owned() else None
            try:
                waiter.get(timeout=_allowed(until - time.monotonic()))
            except queue.Empty:
                pass  # the loop looks once more
            finally:
                if held is not None:
                    self.lock._acquire_restore(held)
                with self.lock, contextlib.suppress(ValueError):
                    self._waiters.remove(waiter)


_Order = tuple[Callable[[], None], queue.SimpleQueue[BaseException | None]]


class CallingThread:
    """Calls functions for the main thread, one after the other, so that no signal handler can interrupt them."""

    def __init__(self) -> None:
        # Each function comes with a queue for its result: the exception that it raised, or None. None ends the thread.
        self._orders = queue.SimpleQueue[_Order | None]()
        self._ids: list[int] = []  # of the thread, when it has begun
        self._ended = False

    def call(self, function: Callable[[], None], seconds: float) -> None:
        """Call the function, which must end within this time, and raise what it raises.

        If a signal handler's exception ends the wait, the function goes on all the same. If the function, or an earlier
        one that goes on, takes much too long, raise TimeoutError; the function is then called later. Threads other than
        the main thread call the function themselves.
        """
        if threading.current_thread() is not threading.main_thread() or not self._begin():
            function()
            return
        answer = queue.SimpleQueue[BaseException | None]()
        self._orders.put((function, answer))
        if self._ended:
            self._call_the_rest()
        try:
            error = answer.get(timeout=_allowed(seconds + _GRACE_S))
        except queue.Empty:
            raise TimeoutError(f"this function or an earlier one took longer than {seconds:g} s") from None
        if error is not None:
            try:
                raise error
            finally:
                del error  # the frame and the traceback would form a cycle

    def _begin(self) -> bool:
        """Begin the thread. Return False if the system has no memory for it, or after end()."""
        if not self._ids and not self._ended and memory_for_one():
            try:
                # All of this happens in C. A Thread object would wait for its thread.
                self._ids.extend(map(_thread.start_new_thread, [_serve], [(self._orders,)]))
            except (RuntimeError, MemoryError):
                if self._ids:  # a signal handler has raised it
                    raise
        return bool(self._ids) and not self._ended

    def end(self) -> None:
        """End the thread when it has called all functions. After that, the main thread calls them itself."""
        self._ended = True
        self._orders.put(None)

    def _call_the_rest(self) -> None:
        """Call what the thread may have left, because it has ended."""
        with contextlib.suppress(queue.Empty):
            while True:
                if order := self._orders.get_nowait():
                    _obey(*order)
        self._orders.put(None)  # for the thread, if it has not ended yet


def _allowed(seconds: float) -> float:
    """Return a timeout that Python's functions accept."""
    return min(max(seconds, 0.0), threading.TIMEOUT_MAX)


def _serve(orders: queue.SimpleQueue[_Order | None]) -> None:
    while order := orders.get():
        _obey(*order)
        del order  # may hold the last references to large objects


def _obey(function: Callable[[], None], answer: queue.SimpleQueue[BaseException | None]) -> None:
    try:
        function()
        answer.put(None)
    except BaseException as error:
        answer.put(error)
