"""A group of ranks, its calls, and the handles of calls that run beside the caller."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from mscomm import _core
from mscomm.cluster.assemble import Founded, Job
from mscomm.cluster.deadline import Deadline, seconds_of
from mscomm.cluster.hello import LETTERS
from mscomm.errors import Error, make

PACKAGE = os.path.dirname(__file__) + os.sep
_LINES_KEPT = 1024
_DIAL_S = 30.0

Array = np.ndarray[Any, Any]


class Work:
    """A call that runs on its group's worker thread, from `async_op=True`.

    It keeps x and out alive. Do not touch them until it has ended; out is complete when wait() has returned. If it is
    dropped before somebody waited, the next call on the group raises its error.
    """

    def __init__(
        self, group: Group, parts: list[_core.Work], result: Any, keeps: Any, finish: Callable[[], None] | None
    ) -> None:
        self._group = group
        self._parts = parts
        self._result = result
        self._keeps = keeps
        self._finish = finish
        self._finishing = threading.Lock()  # the result is copied out once

    def wait(self, timeout: float | timedelta | None = None) -> Any:
        """The call's result. Raises the call's error; TimeoutError if it has not ended in time: then it goes on."""
        deadline = Deadline(float("inf") if timeout is None else seconds_of(timeout))
        for part in self._parts:
            while not part.wait(min(deadline.left(), 0.05)):  # between two, Python looks at its signals
                if deadline.passed:
                    raise TimeoutError(f"Work.wait: the call has not ended within {deadline.seconds:g} s; it goes on")
            try:
                part.check()
            except Error as symptom:
                self._group.fail(symptom)
        with self._finishing:
            finish, self._finish = self._finish, None
            if finish:
                finish()
        return self._result

    def done(self) -> bool:
        """Whether the call has ended, well or not."""
        return all(part.done() for part in self._parts)

    is_completed = done

    def exception(self) -> Error | None:
        """The error of a call that has ended; None if it ended well, or has not ended yet."""
        for part in self._parts:
            if part.done():
                try:
                    part.check()
                except Error as symptom:
                    self._group.raised = True
                    return self._group.settle(symptom)
        return None


class Group:
    """Ranks that make collective calls together. Attributes: name, rank, size, ranks (their ranks in the world)."""

    def __init__(self, name: str, ranks: list[int], timeout_s: float) -> None:
        self.name = name
        self.ranks = ranks
        self.size = len(ranks)
        self.timeout_s = timeout_s
        self.record_dir = os.environ.get("MSCOMM_RECORD")
        self._dialling = threading.Lock()  # one link to a peer is made at a time

    def enter(self, job: Job, id: str, founded: Founded) -> None:
        """Begin to work, in a new epoch perhaps again."""
        self.job = job
        self.id = id
        self.rank = self.ranks.index(job.rank)
        self.core = founded.core
        self.control = founded.control
        self.member = job.member
        self.hosts = [job.hosts[rank] for rank in self.ranks]
        self.raised = False  # the user has seen the failure
        self._cause: Error | None = None  # what every call raises from now on
        self._lines: dict[int, str] | None = {} if self.record_dir else None  # by call number
        self._calls = 0
        self._running: list[Work] = []
        if self.member:
            self.member.attach(id, self.core, self._dialled)

    def leave(self) -> None:
        """End this rank's part; the memory that it lent goes back when all have ended theirs."""
        self.core.close()
        if self.member:
            self.member.detach(self.id)
        if self.control is not None and self.job.heap is not None:
            self.job.heap.release_control(self.control, self.size)
            self.control = None

    def __repr__(self) -> str:
        return f"<mscomm.Group {self.name}: rank {self.rank} of {self.size}>"

    # -- calls

    def run(
        self,
        what: int,
        function: int,
        dtype: int,
        op: int,
        root: int,
        x: Array | None,
        out: Array | None,
        timeout: Any,
        shape: Sequence[int] | None = None,
        counts: Sequence[int] = (),
        digest: int = 0,
        head: bool = False,
    ) -> None:
        """One collective call on checked arguments; every failure becomes the group's first cause here."""
        seconds = self.timeout_s if timeout is None else seconds_of(timeout)
        if self._lines is not None:
            self._note_line()
        try:
            self.core.run(what, function, dtype, op, root, x, out, seconds, shape, counts, digest, head)
        except Error as symptom:
            self.fail(symptom)
        except BaseException as error:
            self._interrupted(error)
            raise

    def start(
        self,
        what: int,
        function: int,
        dtype: int,
        op: int,
        root: int,
        x: Array | None,
        out: Array | None,
        timeout: Any,
        shape: Sequence[int] | None = None,
        counts: Sequence[int] = (),
        digest: int = 0,
        head: bool = False,
    ) -> _core.Work:
        """The same on the group's worker thread; the caller makes a Work of it by `watch`."""
        seconds = self.timeout_s if timeout is None else seconds_of(timeout)
        if self._lines is not None:
            self._note_line()
        try:
            return self.core.start(what, function, dtype, op, root, x, out, seconds, shape, counts, digest, head)
        except Error as symptom:
            self.fail(symptom)

    def watch(
        self, parts: list[_core.Work], result: Any, keeps: Any, finish: Callable[[], None] | None = None
    ) -> Work:
        """The user's handle; what it keeps lives until the calls have ended, also if the user drops it."""
        work = Work(self, parts, result, keeps, finish)
        self._running = [one for one in self._running if not one.done()]
        self._running.append(work)
        return work

    def drain(self) -> None:
        """Until the calls that nobody waits for have ended; how, the group remembers."""
        for work in self._running:
            while not work.done():
                time.sleep(0.001)

    def _interrupted(self, error: BaseException) -> None:
        """Not ours: a signal handler's exception. The group is broken, the others learn why, the exception passes."""
        failure = self.core.failure()
        if failure is not None and self.member is not None:
            kind, text, ranks, _, _ = failure
            words = f"{text}: {type(error).__name__}" if kind == "Aborted" else text
            self.member.report("Aborted", words, ranks, self.id)
            self.raised = True
            self._write_record(text)

    # -- failures

    def fail(self, symptom: Error) -> NoReturn:
        """Raise the first cause in place of what this rank saw of it; the same one each time."""
        cause = self.settle(symptom)
        self.raised = True
        if str(cause) != str(symptom):
            raise cause from symptom
        raise cause from None

    def settle(self, symptom: Error) -> Error:
        """The group's first cause, as a new exception; the others learn of the symptom."""
        if self._cause is None:
            self._cause = self._first_cause(symptom)
            self._write_record(str(self._cause))
        return make(type(self._cause).__name__, str(self._cause), self._cause.ranks, self._cause.waiting_for)

    def _first_cause(self, symptom: Error) -> Error:
        failure = self.core.failure()
        if failure is not None and failure[4]:  # the verdict has come, perhaps while the symptom was on its way here
            kind, text, ranks, waiting_for, _ = failure
            return make(kind, text, ranks, waiting_for)
        return self.member.settle(self.id, symptom, self.core.where()[0]) if self.member is not None else symptom

    # -- links for messages

    def _dialled(self, rank: int, addresses: Any) -> None:
        """A thread of its own: that rank of the job wants to send to this one."""

    # -- the record

    def _note_line(self) -> None:
        assert self._lines is not None
        self._calls += 1
        self._lines[self._calls] = _caller()
        self._lines.pop(self._calls - _LINES_KEPT, None)

    def _write_record(self, cause: str) -> None:
        """The last calls with their Python lines, to MSCOMM_RECORD/rank_<rank>.json."""
        if self.record_dir is None or self._lines is None:
            return
        calls = self.core.calls()
        for call in calls:
            call["line"] = self._lines.get(call["number"], "")
        rank = self.job.rank
        suffix = "" if self.name == "world" else f".{self.name}"
        path = Path(self.record_dir, f"rank_{rank}{suffix}.json")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            words = {"rank": rank, "size": self.size, "group": self.name, "cause": cause, "calls": calls}
            partial.write_text(json.dumps(words, indent=1))
            partial.replace(path)
        except OSError as error:
            print(f"mscomm: rank {rank}: cannot write the record of the last calls: {error}", file=sys.stderr)


def _caller() -> str:
    """File and line of the first frame outside mscomm."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
