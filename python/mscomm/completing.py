"""Calls functions when asynchronous calls have completed.

One thread waits for the completions of all groups, and calls the functions. A function that may block, for example in
Work.wait(), must not delay the completions that it waits for. So before such a function is called, another thread takes
over the waiting.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import itertools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from mscomm import _core
from mscomm.cluster.deadline import Deadline
from mscomm.errors import on_failure
from mscomm.threads import start_thread

_PATIENCE_S = 5  # how long a process that exits waits for the functions that have begun

# A step does not block, and returns None or a function that may block.
Step = Callable[[], Callable[[], object] | None]


class _Completing:
    def __init__(self) -> None:
        self._completions = _core.Completions()
        self._tokens = itertools.count()
        self._steps: dict[int, Step] = {}  # what to call for each token
        self._leading = threading.Lock()  # held by the thread that waits for completions
        self._blocking: collections.deque[Callable[[], object]] = collections.deque()  # protected by _leading
        self._counting = threading.Lock()  # protects _waiting, and is held while a thread is started
        # The number of threads that wait for completions, or for _leading: at most two. The second one takes over while
        # the first one calls a function.
        self._waiting = 0
        self._threads: set[threading.Thread] = set()
        self._ending = False
        with on_failure(self.end):  # a signal handler's exception may come after the thread has begun
            self._add_thread()

    def call_after(self, work: _core.Work | None, step: Step) -> None:
        token = next(self._tokens)
        self._steps[token] = step
        if work is None:
            self._completions.add(token)
        else:
            work._when_ended(self._completions, token)

    def _add_thread(self) -> None:
        thread = threading.Thread(target=self._run, name="mscomm-completing", daemon=True)
        with on_failure(self._threads.discard, thread):
            self._threads.add(thread)
            start_thread(thread)
        self._waiting += 1

    def end(self) -> None:
        """Call what can be called, and end the threads. The calls of all groups have ended."""
        self._ending = True
        self.call_after(None, lambda: None)  # wakes the thread that waits
        deadline = Deadline(_PATIENCE_S)
        while self._threads and not deadline.passed:  # a thread may still start others
            with self._counting:  # with this lock, no thread is being started, and only a started one can be joined
                threads = tuple(self._threads)
            for thread in threads:
                thread.join(deadline.left())

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._threads.discard(threading.current_thread())

    def _serve(self) -> None:
        while True:
            with self._leading:
                function = self._next_blocking()
            if function is None:
                return
            with self._counting:
                self._waiting -= 1
                if not self._waiting:
                    with contextlib.suppress(RuntimeError):  # no memory for a thread, so all others wait for this one
                        self._add_thread()
            try:
                function()
            except BaseException:
                _print_exception()
            del function  # may hold the last references to large arrays
            with self._counting:
                if self._waiting >= 2 and not self._ending:
                    return
                self._waiting += 1

    def _next_blocking(self) -> Callable[[], object] | None:
        """Call steps until one returns a function that may block. Return that function, or None in the end."""
        while not self._blocking:
            if not self._ending:
                os.read(self._completions.fd, 8)
            tokens = self._completions.take()
            if self._ending and not tokens:
                return None
            for token in tokens:
                try:
                    function = self._steps.pop(token)()
                except BaseException:  # this thread must go on for the other steps
                    _print_exception()
                    continue
                if function is not None:
                    self._blocking.append(function)
        return self._blocking.popleft()


def _print_exception() -> None:
    threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))


_completing: _Completing | None = None
_creating = threading.RLock()  # a garbage collection in _Completing() may end a Work that calls call_after()


def call_after(work: Any, step: Step) -> None:
    """Call the step when a Work of the core has completed, with or without an error. work: None means at once.

    The thread that waits for completions calls the step.
    """
    global _completing
    with _creating:
        if _completing is None:
            created = _Completing()
            if _completing is None:
                _completing = created
            else:
                created.end()
        completing = _completing
    completing.call_after(work, step)


def _in_child() -> None:
    """Forget the thread that only the parent process has."""
    global _completing, _creating
    _completing, _creating = None, threading.RLock()


def _at_exit() -> None:
    if _completing is not None:
        _completing.end()


os.register_at_fork(after_in_child=_in_child)
# CPython ends a thread that still wants to run Python code when the interpreter has ended. If the thread is inside C++
# code at that time, such as a future of torch, this aborts the process. Exit handlers run in the reverse order, so this
# one runs after that of a job, which ends the calls.
atexit.register(_at_exit)
