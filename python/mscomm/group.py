"""Defines Group, whose methods run the calls of a group of ranks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from mscomm import _core, environment, log
from mscomm.arrays import new, plain_types
from mscomm.arrays.device import OnDevice
from mscomm.cluster.assemble import Epoch, Founded
from mscomm.cluster.deadline import Deadline, seconds_of
from mscomm.cluster.group_links import GroupLinks
from mscomm.errors import Aborted, Error
from mscomm.notices import warn_once
from mscomm.tracebacks import PACKAGE
from mscomm.works import Following, Several, Work

_LINES_KEPT = 1024

Array = np.ndarray[Any, Any]


class Group:
    """A set of ranks that make collective calls together.

    Attributes: name; rank (this rank's number in the group); size; ranks (the group's ranks, as ranks in the world).
    bool(group) is True if this rank is in the group. If it is not, the group is a NonMember, which has only the name
    and perhaps the ranks and size. Any other use of it raises RuntimeError.
    """

    def __init__(self, name: str, ranks: list[int], timeout_s: float) -> None:
        self.name = name
        self.ranks = ranks
        self.size = len(ranks)
        self.timeout_s = timeout_s
        self.job: Any = None  # the Job while the group can be used; this module is below job.py
        self.job_name = ""
        self.record_dir = environment.read("MSCOMM_RECORD", os.environ)
        self._tracing = threading.Lock()  # protects _traced
        self.collecting = threading.RLock()  # protects the results of Works

    def enter(self, epoch: Epoch, id: str, founded: Founded) -> None:
        """Set up the group on this rank. This method is called again in each new epoch."""
        self.epoch = epoch
        self.id = id
        self.rank = self.ranks.index(epoch.rank)
        self.core = founded.core
        self.control, self._control_ranks = founded.control, founded.control_ranks
        self.member = epoch.member
        self.hosts = [epoch.hosts[rank] for rank in self.ranks]
        self.raised = False  # whether a failure of the group was raised to the user
        self._cause: Error | None = None  # the failure that every call raises; None if the group is not broken
        # the line of Python code of each call, by call number
        self._lines: dict[int, str] | None = {} if self.record_dir else None
        self.following: set[Following] = set()  # started calls with a head that have not ended
        # the highest number of a call that has a line in the log; None if calls are not logged
        self._traced: int | None = 0 if log.enabled(log.TRACE) else None
        mine = epoch.accelerator
        self.core.join_python(
            weakref.ref(self),  # weak, because the garbage collector could not free a cycle through the core
            self.timeout_s,
            plain_types,
            mine.name if mine else "",
            mine.device if mine else -1,
            self._lines is not None or self._traced is not None,
        )
        self.buckets: list[Array] = []  # free buckets, kept for later fused calls
        self._links = GroupLinks(epoch, self.core, id, self.ranks)
        if self.member:
            self.member.attach(id, self.core, self._links)

    def leave(self) -> None:
        """End this rank's use of the group."""
        self.core.close()
        self.ended()
        log.info(f"group {self.name} ({self.id}): ended on this rank, after {self.core.where()[0]} calls")
        founded = Founded(self.core, self.control, self._control_ranks)
        self.control = None  # it is released at most once, even if leave() is interrupted and called again
        self.epoch.drop(self.id, founded)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<mscomm.Group {self.name}: rank {self.rank} of {self.size}>"

    def __copy__(self) -> Group:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        """Return the group itself, so that an object that holds the group can be copied."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"group {self.name!r} cannot be pickled, because it belongs to this process; pickle its name, and pass the"
            " name as group="
        )

    # -- calls

    def call_after(
        self,
        head: _core.Call,
        then: Callable[[], tuple[_core.Call, Callable[[], Any]]],
        timeout: Any,
        async_op: bool,
        on_device: bool = False,
    ) -> Any:
        """Make two calls as one: the head, and the call that then() prepares from the results of the head.

        Return the result of the second call, or a Work. Both call numbers are reserved together. An exception after the
        head breaks the group, even if it occurs only on this rank, because the other ranks have already gone on to the
        second call and would wait for this rank.

        on_device: whether the second call is on device arrays. This thread must start such a call, because the call
        uses the thread's current stream. So even with async_op, this thread first waits for the head, which runs on
        the CPU.
        """
        function = _core.functions[head.function]
        seconds = self.seconds(timeout, function)
        left = seconds_left(seconds)
        with self.core.reserve(2) as numbers, self.committed(what := f"{function} #{numbers.next}"):

            def start(call: _core.Call) -> Work:
                return self.start(call, left(), numbers, part=True)

            if async_op and not on_device:
                following = Following(self, self.start(head, seconds, numbers, part=True), then, start, what)
                return self.together([following], lambda: following.result)
            self.run(head, seconds, numbers)
            try:
                call, result = then()
            except Error as symptom:
                self.fail_after_head(symptom)
            if async_op:
                return self.together([start(call)], result, function if call.result_fills_out else "")
            self.run(call, left(), numbers)
        return result()

    def fail_after_head(self, error: BaseException) -> NoReturn:
        """Raise an error that occurred after a head. If it is an mscomm error, first break the group.

        The caller is in committed(), which breaks the group if it is another error.
        """
        if isinstance(error, Error):
            self.core.abort(self.settle(error))
            self.fail(error)
        raise error

    def check_device(self, function: str, argument: str, there: OnDevice) -> None:
        """Raise TypeError unless the array is on the device with which this rank joined the job."""
        mine = self.epoch.accelerator
        if mine is not None and there.index < 0:
            there.index = mine.opened.runtime.device_of(there.__array_interface__["data"][0])
        if mine is None:
            advice = f'join with init("{there.backend}"), or pass an array on the CPU'
            raise TypeError(f"{function}: {argument} is on a device, and the job's backend is cpu; {advice}")
        if (mine.name, mine.device) != (there.backend, there.index):
            raise TypeError(
                f"{function}: {argument} is on device {there.index} of {there.backend}; this rank has joined with "
                f"device {mine.device} of {mine.name}"
            )

    def apart(self, function: str, x: Any, there: OnDevice) -> np.ndarray[Any, Any]:
        """Copy x to new memory on the same device, and return that memory. The copy is enqueued on x's stream."""
        made, _ = new(function, x, there.shape)
        self.core.pack(made, [there], there.stream)
        return made

    def pack(self, bucket: OnDevice, parts: Sequence[OnDevice], stream: int, **options: Any) -> None:
        """Copy device arrays into a bucket, with casts, a scale and error feedback; see `_core.Group.pack`."""
        with self.failing():
            self.core.pack(bucket, parts, stream, **options)

    def unpack(self, bucket: OnDevice, parts: Sequence[OnDevice], stream: int, **options: Any) -> None:
        """Copy a device bucket into arrays, with casts and a scale; see `_core.Group.unpack`."""
        with self.failing():
            self.core.unpack(bucket, parts, stream, **options)

    def clear(self, memory: OnDevice, stream: int) -> None:
        """Set a device array to zero."""
        with self.failing():
            self.core.clear(memory, stream)

    def refuses(self, dtype: int, op: int) -> str:
        """Return why the accelerator cannot reduce elements of this dtype with this operation; "" if it can."""
        assert self.epoch.accelerator
        return self.epoch.accelerator.opened.vendor.refuses(dtype, op)

    def set_timeout(self, timeout: Any) -> None:
        """Set the time limit of the group's later calls. timeout: see seconds_of."""
        self.timeout_s = seconds_of(timeout, "set_timeout")
        self.core.set_timeout(self.timeout_s)

    def seconds(self, timeout: Any, function: str) -> float:
        """Return the timeout of one call of this function in seconds. timeout: None means the group's timeout."""
        return self.timeout_s if timeout is None else seconds_of(timeout, function)

    def run(self, call: _core.Call, seconds: float, numbers: _core.CallNumbers | None = None) -> None:
        """Run one collective call. If it fails, raise the first cause of the group's failure.

        numbers: reserved call numbers, from which the call takes the next one, or None for the group's next number.
        """
        with self.failing():
            self.core.run(call, seconds, numbers)
        self.ended()

    def start(
        self, call: _core.Call, seconds: float, numbers: _core.CallNumbers | None = None, *, part: bool = False
    ) -> Work:
        """Queue a call, or enqueue it on a stream of the device. The core keeps the arrays alive.

        Return the call's Work. numbers: as in run(). part: whether the Work is for together(). If so, the Work does not
        call call.result(). The argument `result` of together() must do that.
        """
        return self.core.start(call, seconds, numbers, part)

    def together(self, parts: Sequence[Work | Following], result: Callable[[], Any], fills: str = "") -> Work:
        """Combine several parts into one Work. Its wait() returns what result() returns. fills: as in Several."""
        return Several(self, parts, result, fills)

    def drain(self) -> None:
        """Wait until all asynchronous calls have ended, but cancel recvs that have got no message, and warn.

        Do not raise the errors of the calls.
        """
        for call in tuple(self.following):
            call.drain()
        if cancelled := self.core.drain():
            more = f" and {len(cancelled) - 3} more" if len(cancelled) > 3 else ""
            log.warn(
                f"group {self.name}: no message had come for {'; '.join(cancelled[:3])}{more} when this rank left; "
                "wait for each recv before that, or call Work.cancel()"
            )

    def _interrupted(self, error: BaseException) -> None:
        """If `error` has broken the group, tell the other ranks why. The caller re-raises `error`.

        `error` is an exception that has ended a call and is not an mscomm error: for example, a MemoryError, or an
        exception that a signal handler raised.
        """
        failure = self.core.failure()
        if failure is not None and self.member is not None:
            known = failure.error
            words = f"{known}: {type(error).__name__}" if known.kind == "Aborted" else str(known)
            # If the core has run out of memory, its error names this rank only in the text, not in `ranks`.
            ranks = known.ranks or ([self.ranks[self.rank]] if isinstance(error, MemoryError) else [])
            self.member.report(Aborted(words, ranks), self.id)
            self.raised = True
            self._write_record(str(known))

    @contextlib.contextmanager
    def committed(self, what: str) -> Iterator[None]:
        """A context in which the other ranks rely on further calls of this rank.

        An exception in the context breaks the group, and the other ranks are told why.
        """
        try:
            yield
        except Error:
            raise  # the call that raised this error has already told the other ranks
        except BaseException as error:
            if self.core.failure() is None:
                text = printable(f"rank {self.epoch.rank}: {what}: {type(error).__name__}: {error}")
                cause = Aborted(text, [self.epoch.rank])
                self.core.abort(cause)
                if self.member is not None:
                    self.member.report(cause, self.id)
                self._write_record(text)
            self.raised = True
            raise

    # -- messages

    def send(self, peer: int, tag: int, dtype: int, x: Array, seconds: float) -> None:
        """Send one message. The arguments have already been checked. Errors: see run()."""
        with self.failing():
            self.core.send(peer, tag, dtype, x, seconds, self._reach(peer, tag, x, seconds))

    def recv(self, peer: int, tag: int, dtype: int, out: Array, seconds: float) -> tuple[int, int]:
        """Receive one message. Return its source and tag. Errors: see run()."""
        with self.failing():
            return self.core.recv(peer, tag, dtype, out, seconds, 0.0)

    def sendrecv(
        self, sending: tuple[int, int, int, Array], receiving: tuple[int, int, int, Array], seconds: float
    ) -> tuple[int, int]:
        """Send and receive at the same time. Return the source and tag of the message that was received.

        sending, receiving: each is (peer, tag, dtype, array).
        """
        peer, tag, _, x = sending
        with self.failing():
            return self.core.sendrecv(*sending, *receiving, seconds, self._reach(peer, tag, x, seconds))

    def start_send(self, peer: int, tag: int, dtype: int, x: Array, seconds: float) -> Work:
        """Start an asynchronous send. The first send to a peer blocks until the link to that peer is set up."""
        with self.failing():
            return self.core.start_send(peer, tag, dtype, x, seconds, self._reach(peer, tag, x, seconds))

    def start_recv(self, peer: int, tag: int, dtype: int, out: Array, seconds: float) -> Work:
        with self.failing():
            return self.core.start_recv(peer, tag, dtype, out, seconds, 0.0)

    def _reach(self, peer: int, tag: int, x: Array, seconds: float) -> float:
        """Set up the link to the peer if there is none yet. Return how many seconds this took."""
        if peer in self._links.linked:
            return 0.0
        began = time.monotonic()
        self._links.reach(peer, f"send to rank {self.ranks[peer]}, tag {tag} ({x.nbytes} bytes)", Deadline(seconds))
        return time.monotonic() - began

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """A context that replaces an mscomm error with the first cause of the group's failure."""
        try:
            yield
        except Error as symptom:
            self.fail(symptom)
        except BaseException as error:
            self._interrupted(error)
            raise

    # -- failures

    def abort(self, text: str) -> None:
        """Break the group on all its ranks. text: the text of the Aborted error that all ranks raise."""
        self.raised = True
        cause = Aborted(text, [self.epoch.rank])
        if self.member is not None:
            self.member.report(cause, self.id)
        self.core.abort(cause)

    def fail(self, symptom: Error) -> NoReturn:
        """Raise the first cause of the failure instead of the symptom that this rank saw.

        Each later call on the group raises the first cause again.
        """
        cause = self.settle(symptom)
        self.raised = True
        try:
            raise cause from symptom if str(cause) != str(symptom) else None
        finally:
            # The traceback of `cause` refers to this frame, which refers to `cause`. Without `del`, this cycle and all
            # objects in the callers' frames would stay alive until the garbage collector runs.
            del cause

    def settle(self, symptom: Error) -> Error:
        """Return the first cause of the group's failure as a new exception.

        The first call of settle() also reports the symptom to the hub and waits for the verdict, unless the verdict has
        already arrived.
        """
        if self._cause is None:
            self._cause = self._first_cause(symptom)
            self._write_record(str(self._cause))
            self.ended()
            log.info(f"group {self.name} is broken: {self._cause.kind}: {self._cause}")
        return self._cause.again()

    def _first_cause(self, symptom: Error) -> Error:
        failure = self.core.failure()
        if failure is not None and failure.is_verdict:  # the verdict has arrived, perhaps after the symptom was seen
            return failure.error
        number = self.core.where()[0] if failure is None else failure.number
        return self.member.settle(self.id, symptom, number) if self.member is not None else symptom

    # -- called when a call has failed, started or ended

    def failed(self, error: BaseException) -> NoReturn:
        """Raise the error that the user sees when a call has raised `error`."""
        with self.failing():
            raise error

    def raise_cause(self, error: BaseException) -> NoReturn:
        """Raise the error that the user sees when an asynchronous call has failed with `error`."""
        try:
            if isinstance(error, Error):
                self.fail(error)
            raise error
        finally:
            del error  # see fail()

    def cause_of(self, error: BaseException) -> BaseException:
        """Return the exception that raise_cause() would raise."""
        if not isinstance(error, Error):
            return error
        self.raised = True
        return self.settle(error)

    def unfilled(self, function: str) -> None:
        """Warn that out was not filled, because the user has dropped the Work of an asynchronous call too early."""
        warn_once(
            f"{function}: the Work was dropped before wait() returned or done() was True, so out does not hold the "
            "result; keep the Work, and call wait()",
            rank=0,  # so that any rank warns: perhaps no other rank has dropped its Work
        )

    def noted(self, number: int) -> None:
        """Record the line of Python code of a call that has been started."""
        if self._lines is not None:
            self._lines[number] = _caller()
            self._lines.pop(number - _LINES_KEPT, None)

    def ended(self) -> None:
        """If calls are logged, write a line to the log for each call that has ended and has no line yet."""
        if self._traced is None:
            return
        with self._tracing:
            for call in self.core.calls(self._traced):
                if call["state"] == "inside":
                    return  # later calls have not ended either
                self._traced = call["number"]
                log.trace(f"group {self.name}: {call['call']} {call['state']} in {call['took'] * 1e6:.1f} us")

    # -- the record of the latest calls

    def _write_record(self, cause: str) -> None:
        """Write the latest calls, with their lines of Python code, to MSCOMM_RECORD/rank_<rank>.json."""
        if self.record_dir is None or self._lines is None:
            return
        calls = self.core.calls()
        for call in calls:
            call["line"] = self._lines.get(call["number"], "")
        rank = self.epoch.rank
        names = [self.job_name, "" if self.name == "world" else self.name]
        suffix = "".join("." + re.sub(r"[^\w.-]", "_", name) for name in names if name)
        path = Path(self.record_dir, f"rank_{rank}{suffix}.json")
        partial = path.with_suffix(".partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            about = {"rank": rank, "size": self.size, "job": self.job_name, "group": self.name}
            words = {**about, "cause": cause, "calls": calls}
            partial.write_text(json.dumps(words, indent=1))
            partial.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):  # fails if the folder does not exist
                partial.unlink()
            print(f"mscomm: rank {rank}: cannot write the record of the last calls: {error}", file=sys.stderr)


class _NoMember(RuntimeError, AttributeError):
    """A rank that is not in a group has used it. Also an AttributeError, so that hasattr() and getattr() work."""


class NonMember(Group):
    """The Group that create_group and split return on a rank that is not in the group. Its truth value is False.

    `name` is set, and also `ranks` and `size` if this rank knows the group's ranks. Reading another attribute of a
    Group raises RuntimeError, whose text says why this rank is not in the group.
    """

    def __init__(self, name: str, ranks: list[int] | None, job: Any) -> None:
        self.name = name
        if ranks is not None:
            self.ranks, self.size = ranks, len(ranks)
        self.job = job  # None when this process has left the job
        self._me = job.rank

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"<mscomm.Group {self.name}: rank {self._me} is not a member>"

    def refusal(self) -> RuntimeError:
        """Return the error to raise for any use of this group."""
        ranks = vars(self).get("ranks")
        why = "it gave split the color None" if ranks is None else f"the members are {ranks}"
        return _NoMember(
            f"rank {self._me} is no member of {self.name}: {why}; only members may use a group (`if group:`)"
        )

    if not TYPE_CHECKING:  # hidden from type checkers, which would otherwise accept any misspelt name

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            raise self.refusal()


def seconds_left(seconds: float) -> Callable[[], float]:
    """Start a timeout that several calls share. Return a function that returns how many seconds are left."""
    until = time.monotonic() + seconds
    return lambda: max(until - time.monotonic(), 0.001)


def printable(text: str) -> str:
    """Return the text with escapes for the characters that UTF-8 cannot encode, which some file names contain."""
    return text.encode("utf-8", "backslashreplace").decode()


def _caller() -> str:
    """Return the file and line of the innermost frame outside mscomm."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
