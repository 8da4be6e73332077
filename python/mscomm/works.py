"""The Works of asynchronous calls that consist of several calls of the core, and functions that follow a Work."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import threading
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from typing import Any

from mscomm import _core, completing
from mscomm.cluster.deadline import Deadline, seconds_of
from mscomm.errors import on_failure
from mscomm.undisturbed import wake, wake_all

Timeout = float | timedelta | None
Work = _core.Work
Group = Any  # a mscomm.group.Group, which this module is below


class Following:
    """A head that has been started, and the call that follows it.

    When the head has completed, then() prepares the second call, and start() starts it. When this call has completed,
    the result is computed. A thread that waits does these steps itself. If none waits, the thread of completing.py does
    them.

    A signal handler may raise an exception between any two bytecodes of the main thread. So this class uses only locks
    and queues in C: an exception within Python's Condition can lose the lock. If the exception interrupts a step,
    another thread does the step again.
    """

    def __init__(
        self,
        group: Group,
        head: Work,
        then: Callable[[], tuple[_core.Call, Callable[[], Any]]],
        start: Callable[[_core.Call], Work],
        what: str,
    ) -> None:
        self.result: Any = None
        self._group = group
        self._core = group.core  # rejoin() gives the group another core
        self._then: Callable[[], tuple[_core.Call, Callable[[], Any]]] | None = then
        self._start = start
        self._what = what
        self._make: Callable[[], Any] | None = None  # computes the result
        self._error: BaseException | None = None  # an error that occurred neither in the head nor in the second call
        self._lock = threading.RLock()  # protects _part, _step, _mover, _over and _waiters
        self._waiters: list[queue.SimpleQueue[None]] = []  # one for each thread that waits for a change of these
        self._part = head  # later the second call
        self._step: completing.Step | None = self._follow  # what follows _part; None while a thread does it
        self._mover = 0  # the thread that does it
        self._over = False
        self._ended = False  # whether nothing is left to do after the end
        self._hurried = False  # whether a function waits for the end
        self._after: list[completing.Step] = []
        self._blocking: list[Callable[[], object]] | None = None  # the function for _take(); None if there was none
        self._process = os.getpid()
        with on_failure(group.following.discard, self):
            group.following.add(self)  # Group.drain() waits for this call
            completing.call_after(head, functools.partial(self._go_on, head))

    def _go_on(self, part: Work) -> Callable[[], object] | None:
        """Do what follows `part`, which has completed, unless another thread has begun to. May return a function that
        blocks; then this thread must call it."""
        step = None
        try:
            with self._lock:
                if self._part is not part or self._step is None:
                    return None
                step, self._step = self._step, None
                self._mover = threading.get_ident()
            function = step()
            if function is None or threading.current_thread() is not threading.main_thread():
                return function
            self._blocking = [function]  # not returned: a signal handler's exception could lose it on the way
            completing.call_after(None, self._take)
            self._mover = 0
        except BaseException:  # a signal handler has raised it in the main thread; another thread does the step
            with self._lock:
                again = step is not None and self._part is part and not self._ended
                if again and self._blocking is None:
                    self._step = step
                self._mover = 0
            if again and threading.current_thread() is threading.main_thread():
                next_step = functools.partial(self._go_on, part) if self._blocking is None else self._take
                completing.call_after(None, next_step)
            raise
        return None

    def _take(self) -> Callable[[], object] | None:
        """Return the function that the main thread has left to the thread of completing.py, but only once."""
        return self._blocking.pop() if self._blocking else None

    def _follow(self) -> Callable[[], object] | None:
        if self._part._failed():
            self._end()
            return None
        if self._group.core is not self._core:
            return functools.partial(self._break, RuntimeError(f"mscomm: rejoin() has ended {self._what}"))
        head = self._part
        try:
            assert self._then is not None
            call, self._make = self._then()
            part = self._start(call)
            with self._lock:
                waiters = map(wake, self._waiters)
                self._part, self._step = part, self._finish
                wake_all(waiters)
        except BaseException as error:
            if self._part is head:
                return functools.partial(self._break, error)
            self._after_second()
            raise
        with on_failure(self._after_second):
            self._after_second()
        return None

    def _after_second(self) -> None:
        """Let the thread of completing.py compute the result after the second call. May be called twice."""
        completing.call_after(self._part, functools.partial(self._go_on, self._part))
        if self._hurried:
            self._part._hurry()

    def _break(self, error: BaseException) -> None:
        """Break the group because of an error after the head. May block until the hub has decided the cause."""
        with on_failure(completing.call_after, None, self._end):
            self._error = error
            if self._group.core is self._core:
                try:
                    with self._group.committed(self._what):
                        self._group.fail_after_head(error)
                except BaseException as cause:
                    self._error = cause
            self._end()

    def _finish(self) -> None:
        try:
            if self._make is not None and not self._part._failed():
                self.result = self._make()
        except BaseException as error:  # _join() raises this error
            self._error = error
        self._end()

    def _end(self) -> None:
        self._then = self._make = None  # releases the arrays
        self._group.following.discard(self)
        with self._lock:
            waiters = map(wake, self._waiters)
            self._over = True
            wake_all(waiters)
        completing.call_after(None, self._call_after_steps)
        self._ended = True

    def call_after(self, step: completing.Step) -> None:
        """Call the step after the end, in the thread of completing.py."""
        self._after.append(step)
        if self._over:
            completing.call_after(None, self._call_after_steps)

    def _call_after_steps(self) -> None:
        """Is itself a step, so that no signal handler can interrupt it."""
        with contextlib.suppress(IndexError):  # two threads may be here; each step is popped once
            while True:
                completing.call_after(None, self._after.pop())

    def _hurry(self) -> None:
        self._hurried = True
        self._part._hurry()

    def drain(self) -> None:
        """Wait for the end. Do not raise the error of the call."""
        self._hurry()
        while not self._over:  # no thread is left for the next step if a signal handler's exception has ended it
            part = self._part
            try:
                part._join(None)
            except Exception:
                if not part._failed():
                    raise
            function = self._go_on(part)
            if function is not None:
                function()
            else:
                self._wait_for_move(part, Deadline(float("inf")))

    def done(self) -> bool:
        if self._process != os.getpid():
            raise RuntimeError("mscomm: this call was made in the parent process, before the fork")
        return self._over or self._part._failed()

    def _join(self, seconds: float | None, /) -> bool:
        deadline = Deadline(float("inf") if seconds is None else seconds)
        while not self.done():
            part = self._part
            if not part._join(None if seconds is None else deadline.rest()):
                return False
            function = self._go_on(part)
            if function is not None:
                function()
            elif not self._wait_for_move(part, deadline):
                return False
        if self._error is not None:
            self._group.raise_cause(self._error)
        return self._part._join(seconds)

    def _wait_for_move(self, part: Work, deadline: Deadline) -> bool:
        """Wait until another thread has done what follows `part`."""
        waiter = queue.SimpleQueue[None]()
        with self._lock:
            if self._part is not part or self._over:
                return True
            if self._mover == threading.get_ident():
                raise RuntimeError(f"mscomm: a signal handler that interrupted {self._what} waits for this call")
            self._waiters.append(waiter)
        try:
            waiter.get(timeout=min(deadline.rest(), threading.TIMEOUT_MAX))
        except queue.Empty:
            return False
        finally:
            with self._lock:
                self._waiters.remove(waiter)
        return True

    def _failed(self) -> bool:
        return self._error is not None or self._part._failed()

    def exception(self) -> BaseException | None:
        return self._part.exception() if self._error is None else self._group.cause_of(self._error)


class Several(Work):
    """The Work of a call that consists of several calls, or whose result is computed in Python.

    result: a function that computes the result. fills: if the result is also written to arrays that the user passed,
    the name of the function that the user called; otherwise "".
    """

    _fills = ""  # for __del__, if a signal handler's exception has interrupted __init__

    def __init__(self, group: Group, parts: Sequence[Work | Following], result: Callable[[], Any], fills: str) -> None:
        super().__init__()
        self._group = group
        self._fills = fills
        self._process = os.getpid()
        self._parts = parts
        self._first = next((part for part in parts if isinstance(part, Work)), None)
        self._result: Callable[[], Any] | None = result  # None when self._value holds the result
        self._making = False  # whether self._result() is running
        self._value: Any = None

    def wait(self, timeout: Timeout = None) -> Any:
        seconds = None if timeout is None else seconds_of(timeout, "Work.wait", may_be_zero=True)
        if not self._join(seconds):
            raise TimeoutError(f"Work.wait: the call did not end within {seconds:g} s; it is still running")
        self._collect()
        self.done()  # releases the arrays if the call has completed
        return self._value

    def _collect(self) -> None:
        with self._group.collecting:  # only one of several waiting threads computes the result
            # If _making is True, a signal handler has interrupted self._result() and called wait().
            if self._result is not None and not self._making:
                self._making = True
                try:
                    self._value = self._result()
                    self._result = None
                finally:
                    self._making = False

    def _join(self, seconds: float | None, /) -> bool:
        deadline = None if seconds is None else Deadline(seconds)
        return all(part._join(None if deadline is None else deadline.rest()) for part in self._parts)

    def done(self) -> bool:
        if not all(part.done() for part in self._parts):
            return False
        if not any(part._failed() for part in self._parts):
            self._collect()
            self._parts = ()  # releases the arrays
        return True

    is_completed = done

    def exception(self) -> BaseException | None:
        errors = (part.exception() for part in self._parts)
        return next((error for error in errors if error is not None), None)

    def cancel(self) -> bool:
        return self._first is not None and self._first.cancel()

    def __repr__(self) -> str:
        ended = all(part.done() for part in self._parts)
        failed = any(part._failed() for part in self._parts)
        return f"<mscomm.Work: {'failed' if failed else 'completed' if ended else 'running'}>"

    def matched(self) -> tuple[int, int] | None:
        return None if self._first is None else self._first.matched()

    def __del__(self) -> None:
        unfilled = self._fills and self._result is not None and self._process == os.getpid()
        if unfilled and not any(part._failed() for part in self._parts):
            self._group.unfilled(self._fills)


def awaited(work: Work) -> Generator[Any, None, Any]:
    """Implement `await work` in a coroutine of asyncio: the event loop goes on until the call has completed."""
    import asyncio

    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def end() -> None:
        if not ended.done():  # done if it was cancelled
            ended.set_result(None)

    def tell() -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(end)

    when_done([work], tell)
    yield from ended
    return work.wait()


def when_done(works: Sequence[Work], function: Callable[[], object], *, hurry: bool = True) -> None:
    """Call the function in another thread when all the Works have completed, with or without an error.

    The function may block, and may wait for other Works. If it raises an exception, threading.excepthook prints it.
    hurry: whether the core's thread is to carry out the calls at once. If not, it leaves them for a while to a thread
    that waits for them.
    """
    parts = [part for work in works for part in (work._parts if isinstance(work, Several) else (work,))]
    for part in parts if hurry else ():
        part._hurry()
    left = iter(parts)

    def step() -> Callable[[], object] | None:
        part = next(left, None)
        if part is None:
            return function
        if isinstance(part, Following):
            part.call_after(step)
        else:
            completing.call_after(part, step)
        return None

    if step() is not None:
        completing.call_after(None, lambda: function)
