"""The Works that the calls of a ProcessGroup return."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import Work as _TorchWork
from torch._C._dynamo import eval_frame as _eval_frame

import mscomm
from mscomm.works import when_done


def uncompiled(*methods: Any) -> None:
    """Let torch.compile run these functions, and what they call, as they are.

    Torch calls the methods of a process group also while it runs a compiled module, and would compile them otherwise.
    torch.compiler.disable would import the compiler, which takes seconds, so this calls what that calls.
    """
    skipped = _eval_frame._FrameAction.SKIP
    for method in methods:
        if isinstance(method, types.FunctionType):
            _eval_frame.set_code_exec_strategy(method.__code__, _eval_frame._FrameExecStrategy(skipped, skipped))


def timed_out(error: mscomm.CollectiveTimeout) -> mscomm.CollectiveTimeout:
    """Return the error of a time limit with a text that contains "Timed out", as that of gloo does."""
    return mscomm.CollectiveTimeout(f"mscomm: Timed out in {error}", error.ranks, error.waiting_for)


class Work(_TorchWork):  # type: ignore[misc, unused-ignore]
    """The Work of a call of a ProcessGroup that has ended. tensors: the result."""

    _parts: Sequence[Any] = ()
    _future: torch.futures.Future[list[Any]] | None = None
    _completion: Finish  # completes the future; there is one if there is a future

    def __init__(self, tensors: list[Any]) -> None:
        _TorchWork.__init__(self)
        self._tensors = tensors

    def wait(self, timeout: Any = None) -> bool:
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        return None

    def result(self) -> list[Any]:
        self.wait()
        return self._tensors

    def get_future(self, *, hurry: bool = True) -> torch.futures.Future[list[Any]]:
        """Return a future of the list of tensors. A callback of another future may wait for it.

        hurry: see when_done.
        """
        if self._future is None:
            base: torch.futures.Future[Any] = torch.futures.Future()
            # An exception that is set on a future would reach the reducer of DistributedDataParallel as a value. If a
            # callback raises it, the reducer raises it, too.
            self._future = base.then(_value_or_raise)
            self._completion = Finish(self._parts, functools.partial(self._complete, base), set())
            if self._parts:
                when_done(self._parts, self._completion.call, hurry=hurry)
            else:
                self._completion.call()
        return self._future

    def complete(self) -> None:
        """Complete the future of a call that has ended, unless that has been done."""
        self._completion.call()

    def _complete(self, base: torch.futures.Future[Any]) -> None:
        try:
            self.wait()
        except BaseException as error:  # _value_or_raise raises it
            base.set_result(error)
        else:
            base.set_result(self._tensors)


class Finish:
    """What is to be done when the calls of a Pending have ended, such as copying the result to its tensors.

    parts: the Works of these calls. unfinished: a set that contains this object until the function has been called.
    """

    def __init__(self, parts: Sequence[Any], function: Callable[[], object], unfinished: set[Finish]) -> None:
        self.error: BaseException | None = None
        self._parts = parts
        self._function: Callable[[], object] | None = function
        self._calling = threading.Lock()  # only one thread calls the function
        self._unfinished = unfinished
        unfinished.add(self)

    def call(self) -> None:
        """Call the function, unless it has been called. If it has raised an error, raise that. The calls have ended."""
        with self._calling:
            function, self._function = self._function, None
            if function is not None:
                try:
                    function()
                except BaseException as error:
                    self.error = error
                self._unfinished.discard(self)  # not before: a barrier waits for a function that another thread calls
                self._parts = ()  # releases the arrays
        if self.error is not None:
            raise self.error

    def call_unless_failed(self) -> None:
        """Do the same, but do nothing if a call has not ended, or has failed."""
        if all(part.done() and part.exception() is None for part in self._parts):
            self.call()

    def wait(self) -> None:
        """Wait for the end of the calls, and call the function."""
        for part in self._parts:
            part.wait()
        self.call()


class Pending(Work):
    """The Work of a call of a ProcessGroup that goes on. It consists of calls of mscomm.

    tensors: the result. parts: the Works of these calls. finish: what is to be done when they have ended.
    """

    _finish: Finish | None = None
    _event: Finish | None = None

    def __init__(self, tensors: list[Any], parts: Sequence[Any], finish: Finish | None = None) -> None:
        Work.__init__(self, tensors)
        self._parts = parts
        self._first: Any = parts[0] if parts else None  # tells the source of a message
        self._process = os.getpid()
        self._finish = finish

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the end of the call. timeout: a timedelta; None, 0 and less stand for the time limit of the call."""
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        until = time.monotonic() + seconds if seconds > 0 else None
        try:
            for part in self._parts:
                part.wait(None if until is None else max(until - time.monotonic(), 1e-6))
        except mscomm.CollectiveTimeout as error:
            raise timed_out(error) from error
        except TimeoutError as error:  # the call goes on
            raise RuntimeError(f"mscomm: Timed out in {error}") from error
        finally:
            if self._event is not None and all(part.done() for part in self._parts):
                self._event.call()
        if self._finish is not None:
            self._finish.call()
        self._parts = ()
        return True

    def end_with(self, event: Any) -> None:
        """End an event of torch's profiler when the calls have ended, and before wait() returns.

        The program may stop the profiler after wait(). If the event ended later, torch would crash.
        """
        ended: torch.futures.Future[None] = torch.futures.Future()
        event._call_end_callbacks_on_future(ended)
        self._event = Finish(self._parts, functools.partial(ended.set_result, None), set())
        when_done(self._parts, self._event.call)

    def __del__(self) -> None:
        # The user has dropped the Work of a call whose result is still to be copied to its tensors.
        finish = self._finish
        if finish is not None and self._parts and self._process == os.getpid():
            when_done(self._parts, finish.call_unless_failed)

    def is_completed(self) -> bool:
        if not all(part.done() for part in self._parts):
            return False
        if self.exception() is None:
            with contextlib.suppress(Exception):  # exception() returns it
                self.wait()
        return True

    def exception(self) -> BaseException | None:
        errors = (part.exception() for part in self._parts)
        error = next((error for error in errors if error is not None), None)
        return self._finish.error if error is None and self._finish is not None else error

    def _source_rank(self) -> int:
        """Return the sender of a message from any source, as a rank in the group."""
        matched = None if self._first is None else self._first.matched()
        if matched is None:
            raise RuntimeError("mscomm: source_rank: only the Work of a recv that has received a message has a source")
        return int(matched[0])

    source_rank = _source_rank


uncompiled(*vars(Work).values(), *vars(Finish).values(), *vars(Pending).values())


def _value_or_raise(done: torch.futures.Future[Any]) -> Any:
    value = done.value()
    if isinstance(value, BaseException):
        raise value
    return value
