"""What a signal handler's exception cannot leave half done.

A signal handler may raise an exception between almost any two bytecodes of the main thread, but not inside a function
that is written in C. Python's own Condition may then keep its lock for ever, and code that sends may not know how much
it has sent.
"""

from __future__ import annotations

import _thread
import collections
import operator
import queue
import threading
import time
from collections.abc import Callable

# wake_all(map(wake, waiters)) wakes all waiters in one call of C code.
wake = operator.methodcaller("put", None)
wake_all = collections.deque[None](maxlen=0).extend


class Condition:
    """A lock, and the threads that wait for changes of what it protects.

    `with condition.lock` uses only functions in C. wait_for() must be called without the lock, because a thread could
    not be sure to take a lock again that it had released for the wait.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._waiters: list[queue.SimpleQueue[None]] = []

    def notify_all(self) -> None:
        """Let all threads in wait_for() look again."""
        with self.lock:
            wake_all(map(wake, self._waiters))

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
            try:
                waiter.get(timeout=_allowed(until - time.monotonic()))
            except queue.Empty:
                pass  # the loop looks once more
            finally:
                with self.lock:
                    self._waiters.remove(waiter)


class Apart:
    """Calls functions in a thread of its own, if the caller is the main thread."""

    def __init__(self) -> None:
        # Each function comes with a queue for its result: the exception that it raised, or None.
        self._orders = queue.SimpleQueue[tuple[Callable[[], None], queue.SimpleQueue[BaseException | None]] | None]()
        self._begun = self._ended = False

    def call(self, function: Callable[[], None], seconds: float) -> None:
        """Call the function. If a signal handler's exception ends the wait for it, the function goes on all the same.

        Raise what the function raises. Raise TimeoutError after this time, which the function must observe, too.
        """
        if threading.current_thread() is not threading.main_thread() or not self._begin():
            function()
            return
        answer = queue.SimpleQueue[BaseException | None]()
        self._orders.put((function, answer))
        try:
            error = answer.get(timeout=_allowed(seconds))
        except queue.Empty:
            raise TimeoutError(f"an earlier function took longer than {seconds:g} s") from None
        if error is not None:
            raise error

    def _begin(self) -> bool:
        """Begin the thread. Return False if the system has no memory for it, or after end()."""
        if not self._begun and not self._ended:
            try:
                self._begun = True
                _thread.start_new_thread(_serve, (self._orders,))  # in C; a Thread object would wait for its thread
            except RuntimeError:
                self._begun = False
        return self._begun and not self._ended

    def end(self) -> None:
        """End the thread when it has called all functions. After that, the caller's own thread calls them."""
        self._ended = True
        self._orders.put(None)


def _allowed(seconds: float) -> float:
    """Return a timeout that Python's functions accept."""
    return min(max(seconds, 0.0), threading.TIMEOUT_MAX)


def _serve(
    orders: queue.SimpleQueue[tuple[Callable[[], None], queue.SimpleQueue[BaseException | None]] | None],
) -> None:
    while (order := orders.get()) is not None:
        function, answer = order
        try:
            function()
            answer.put(None)
        except BaseException as error:
            answer.put(error)
        del order, function, answer  # may hold the last references to large objects
