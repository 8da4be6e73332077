"""A group of ranks, its calls, and the handles of calls that run beside the caller."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from mscomm import _core, environment, log
from mscomm.arrays import new, plain_types
from mscomm.arrays.device import OnDevice
from mscomm.cluster.assemble import Epoch, Founded
from mscomm.cluster.deadline import Deadline, seconds_of
from mscomm.cluster.message_links import MessageLinks
from mscomm.errors import Error, make
from mscomm.tracebacks import PACKAGE

_LINES_KEPT = 1024

Array = np.ndarray[Any, Any]

Work = _core.Work


class _Beside:
    """A function on a thread of its own."""

    def __init__(self, group: Group, function: Callable[[], Any]) -> None:
        self.result: Any = None
        self._group = group
        self._function = function
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._process = os.getpid()
        threading.Thread(target=self._run, name="mscomm-call", daemon=True).start()  # Group.drain waits for it

    def _run(self) -> None:
        try:
            self.result = self._function()
        except BaseException as error:  # raised by ends_within()
            self._error = error
        self._ended.set()

    def done(self) -> bool:
        if self._process != os.getpid():
            raise RuntimeError("mscomm: this call was made by the process that forked this one")
        return self._ended.is_set()

    def ends_within(self, timeout_s: float, /) -> bool:
        ended = self.done() or self._ended.wait(None if timeout_s > threading.TIMEOUT_MAX else timeout_s)
        if self._error is not None:
            self._group.raise_cause(self._error)
        return ended

    def exception(self) -> BaseException | None:
        return self._group.cause_of(self._error) if self.done() and self._error is not None else None


class _Several(Work):
    """A call that consists of several, or whose result is made in Python."""

    def __init__(self, group: Group, parts: Sequence[Work | _Beside], result: Callable[[], Any]) -> None:
        super().__init__()
        self._group = group
        self._parts = parts
        self._result: Callable[[], Any] | None = result
        self._value: Any = None  # what result returned

    def wait(self, timeout: float | timedelta | None = None) -> Any:
        deadline = Deadline(math.inf if timeout is None else seconds_of(timeout))
        for part in self._parts:
            if timeout is None and isinstance(part, Work):
                part.wait()
            elif not part.ends_within(deadline.rest()):
                raise TimeoutError(f"Work.wait: the call has not ended within {deadline.seconds:g} s; it goes on")
        if self._result is not None:
            with self._group.collecting:  # of two threads that wait, one makes the result
                result, self._result = self._result, None
                try:
                    self._value = self._value if result is None else result()
                except BaseException:
                    self._result = result
                    raise
        return self._value

    def done(self) -> bool:
        return all(part.done() for part in self._parts)

    is_completed = done

    def exception(self) -> BaseException | None:
        errors = (part.exception() for part in self._parts)
        return next((error for error in errors if error is not None), None)


class Group:
    """Ranks that make collective calls together. Attributes: name, rank, size, ranks (their ranks in the world).

    bool(group) says whether this rank is a member; the Group of a rank that is none raises RuntimeError at every use.
    """

    def __init__(self, name: str, ranks: list[int], timeout_s: float) -> None:
        self.name = name
        self.ranks = ranks
        self.size = len(ranks)
        self.timeout_s = timeout_s
        self.record_dir = environment.read("MSCOMM_RECORD", os.environ)
        self._tracing = threading.Lock()  # protects _traced
        self.collecting = threading.RLock()  # protects the results of Works

    def enter(self, epoch: Epoch, id: str, founded: Founded) -> None:
        """Begin to work, in a new epoch perhaps again."""
        self.epoch = epoch
        self.id = id
        self.rank = self.ranks.index(epoch.rank)
        self.core = founded.core
        self.control, self._control_ranks = founded.control, founded.control_ranks
        self.member = epoch.member
        self.hosts = [epoch.hosts[rank] for rank in self.ranks]
        self.raised = False  # the user has seen the failure
        self._cause: Error | None = None  # what every call raises from now on
        self._lines: dict[int, str] | None = {} if self.record_dir else None  # by call number
        self._beside: list[_Beside] = []  # some may have ended
        # The last call of which a line was written; None: nobody asked for such lines.
        self._traced: int | None = 0 if log.enabled(log.TRACE) else None
        mine = epoch.accelerator
        self.core.join_python(
            weakref.ref(self),  # the garbage collector does not see what the core refers to
            self.timeout_s,
            plain_types,
            mine.name if mine else "",
            mine.device if mine else -1,
            self._lines is not None or self._traced is not None,
        )
        self.buckets: list[Array] = []  # of fused calls, kept from one to the next
        self._message_links = MessageLinks(epoch, self.core, id, self.ranks)
        if self.member:
            self.member.attach(id, self.core, self._message_links.dialled)

    def leave(self) -> None:
        """End this rank's part; the memory that it lent goes back when all have ended theirs."""
        self.core.close()
        if self._traced is not None:
            self._trace()
        log.info(f"group {self.name} ({self.id}): ended on this rank, after {self.core.where()[0]} calls")
        if self.member:
            self.member.detach(self.id)
        if self.control is not None and self.epoch.heap is not None:
            self.epoch.heap.release_control(self.control, self._control_ranks)
            self.control = None

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<mscomm.Group {self.name}: rank {self.rank} of {self.size}>"

    # -- calls

    def call_after(
        self,
        head: _core.Call,
        then: Callable[[], tuple[_core.Call, Callable[[], Any]]],
        timeout: Any,
        async_op: bool,
        on_device: bool = False,
    ) -> Any:
        """Two calls as one: the head, and what then() makes of what it brought. Both have their numbers at once.

        Whatever is wrong after the head, on this rank alone, breaks the group: the others are on their way.
        on_device: the second is on arrays of a device, whose current stream is that of the caller's thread: the head,
        which is the CPU's, is waited for then, also with async_op.
        """
        seconds = self.seconds(timeout)
        function = _core.functions[head.function]
        first = self.reserve(2)
        began = time.monotonic()

        def left() -> float:
            return max(seconds - (time.monotonic() - began), 0.001)

        def second() -> tuple[_core.Call, Callable[[], Any]]:
            self.run(head, seconds, first)
            try:
                return then()
            except Error as symptom:
                cause = self.settle(symptom)
                self.core.abort(type(cause).__name__, list(cause.ranks), list(cause.waiting_for), str(cause))
                self.fail(symptom)

        def both() -> Any:
            with self.committed(f"{function} #{first}"):
                call, result = second()
                self.run(call, left(), first + 1)
            return result()

        if not async_op:
            return both()
        with self.committed(f"{function} #{first}"):
            if on_device:
                call, result = second()
                return self.together([self.start(call, left(), first + 1)], result)
            beside = _Beside(self, both)
        self._beside = [one for one in self._beside if not one.done()] + [beside]
        return self.together([beside], lambda: beside.result)

    def check_device(self, function: str, argument: str, there: OnDevice) -> None:
        """TypeError unless the array is on the device with which this rank has joined."""
        mine = self.epoch.accelerator
        if mine is not None and there.index < 0:
            there.index = mine.opened.runtime.device_of(there.__array_interface__["data"][0])
        if mine is None:
            advice = f'join with init("{there.backend}"), or give an array of the CPU'
            raise TypeError(f"{function}: {argument} is on a device, and the job's backend is cpu; {advice}")
        if (mine.name, mine.device) != (there.backend, there.index):
            raise TypeError(
                f"{function}: {argument} is on device {there.index} of {there.backend}; this rank has joined with "
                f"device {mine.device} of {mine.name}"
            )

    def apart(self, function: str, x: Any, there: OnDevice) -> np.ndarray[Any, Any]:
        """The memory of a copy of x on its device, made in the order of its stream."""
        made, _ = new(function, x, there.shape)
        self.core.pack(made, [there], there.stream)
        return made

    def refuses(self, dtype: int, op: int) -> str:
        """Why the accelerator cannot reduce such elements so; "": it can."""
        assert self.epoch.accelerator
        return self.epoch.accelerator.opened.vendor.refuses(dtype, op)

    def seconds(self, timeout: Any) -> float:
        """The limit of one call."""
        return self.timeout_s if timeout is None else seconds_of(timeout)

    def reserve(self, count: int) -> int:
        """Reserve that many call numbers in a row, and return the first. A call must then be run with each."""
        try:
            first = self.core.reserve(count)
        except Error as symptom:
            self.fail(symptom)
        if self._lines is not None:
            with self.committed(f"call #{first}"):
                for number in range(first, first + count):
                    self._note_line(number)
        return first

    def next_number(self) -> int:
        """The number of a call whose line is to be noted; 0: the core may choose it."""
        return 0 if self._lines is None else self.reserve(1)

    def run(self, call: _core.Call, seconds: float, number: int = 0) -> None:
        """One collective call; every failure becomes the group's first cause here. number: reserved, 0: the next."""
        number = number or self.next_number()
        with self.failing():
            self.core.run(call, seconds, number)
        self.ended()

    def start(self, call: _core.Call, seconds: float, number: int = 0) -> Work:
        """Like run(), on the group's worker thread or beside the device's stream. The core keeps the arrays alive."""
        return self.core.start(call, seconds, number)

    def together(self, parts: Sequence[Work | _Beside], result: Callable[[], Any]) -> Work:
        """A Work of several parts. result() makes what its wait() returns."""
        return _Several(self, parts, result)

    def drain(self) -> None:
        """Wait until the calls that nobody waits for have ended. The group remembers how they ended."""
        for one in self._beside:
            while not one.done():
                time.sleep(0.001)
        self.core.drain()

    def _interrupted(self, error: BaseException) -> None:
        """A signal handler raised `error`. The group is broken, the other ranks learn why, and `error` goes on."""
        failure = self.core.failure()
        if failure is not None and self.member is not None:
            kind, text, ranks, _, _, _ = failure
            words = f"{text}: {type(error).__name__}" if kind == "Aborted" else text
            self.member.report("Aborted", words, ranks, self.id)
            self.raised = True
            self._write_record(text)

    @contextlib.contextmanager
    def committed(self, what: str) -> Iterator[None]:
        """Inside, this rank owes the others calls: an exception breaks the group, and they learn why."""
        try:
            yield
        except Error:
            raise  # from a call, which has told them
        except BaseException as error:
            if self.core.failure() is None:
                text = printable(f"rank {self.epoch.rank}: {what}: {type(error).__name__}: {error}")
                self.core.abort("Aborted", [self.epoch.rank], [], text)
                if self.member is not None:
                    self.member.report("Aborted", text, [self.epoch.rank], self.id)
                self._write_record(text)
            self.raised = True
            raise

    # -- messages

    def send(self, peer: int, tag: int, dtype: int, x: Array, seconds: float) -> None:
        """Send one message, with checked arguments. A failure becomes the group's first cause, as in run()."""
        with self.failing():
            self.core.send(peer, tag, dtype, x, seconds, self._reach(peer, tag, x, seconds))

    def recv(self, peer: int, tag: int, dtype: int, out: Array, seconds: float) -> tuple[int, int]:
        """Returns the message's source and tag."""
        with self.failing():
            return self.core.recv(peer, tag, dtype, out, seconds, 0.0)

    def sendrecv(
        self, sending: tuple[int, int, int, Array], receiving: tuple[int, int, int, Array], seconds: float
    ) -> tuple[int, int]:
        """A send and a recv (peer, tag, dtype, array) that begin together; the received message's source and tag."""
        peer, tag, _, x = sending
        with self.failing():
            return self.core.sendrecv(*sending, *receiving, seconds, self._reach(peer, tag, x, seconds))

    def start_send(self, peer: int, tag: int, dtype: int, x: Array, seconds: float) -> Work:
        """Start a send beside the caller. The first one to a peer waits for the link to that peer."""
        with self.failing():
            return self.core.start_send(peer, tag, dtype, x, seconds, self._reach(peer, tag, x, seconds))

    def start_recv(self, peer: int, tag: int, dtype: int, out: Array, seconds: float) -> Work:
        with self.failing():
            return self.core.start_recv(peer, tag, dtype, out, seconds, 0.0)

    def _reach(self, peer: int, tag: int, x: Array, seconds: float) -> float:
        """Make the link to the peer if there is none yet. Returns the seconds that this took."""
        if peer in self._message_links.linked:
            return 0.0
        began = time.monotonic()
        self._message_links.reach(
            peer, f"send to rank {self.ranks[peer]}, tag {tag} ({x.nbytes} bytes)", Deadline(seconds)
        )
        return time.monotonic() - began

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Every failure inside becomes the group's first cause."""
        try:
            yield
        except Error as symptom:
            self.fail(symptom)
        except BaseException as error:
            self._interrupted(error)
            raise

    # -- failures

    def fail(self, symptom: Error) -> NoReturn:
        """Raise the first cause in place of what this rank saw of it; the same one each time."""
        cause = self.settle(symptom)
        self.raised = True
        try:
            raise cause from symptom if str(cause) != str(symptom) else None
        finally:
            # The traceback of cause refers to this frame. Without this line both, and what the frames above refer to,
            # would live until the garbage collector runs.
            del cause

    def settle(self, symptom: Error) -> Error:
        """The group's first cause, as a new exception; the others learn of the symptom."""
        if self._cause is None:
            self._cause = self._first_cause(symptom)
            self._write_record(str(self._cause))
            if self._traced is not None:
                self._trace()
            log.info(f"group {self.name} is broken: {type(self._cause).__name__}: {self._cause}")
        return make(type(self._cause).__name__, str(self._cause), self._cause.ranks, self._cause.waiting_for)

    def _first_cause(self, symptom: Error) -> Error:
        failure = self.core.failure()
        if failure is not None and failure[4]:  # the verdict has come, perhaps while the symptom was on its way here
            kind, text, ranks, waiting_for, _, _ = failure
            return make(kind, text, ranks, waiting_for)
        number = self.core.where()[0] if failure is None else failure[5]
        return self.member.settle(self.id, symptom, number) if self.member is not None else symptom

    # -- the log

    def failed(self, error: BaseException) -> NoReturn:
        """Raise what the user gets for what a call has raised."""
        with self.failing():
            raise error

    def raise_cause(self, error: BaseException) -> NoReturn:
        """Raise what the user gets for the error of a call that ran beside the caller."""
        if isinstance(error, Error):
            self.fail(error)
        raise error

    def cause_of(self, error: BaseException) -> BaseException:
        """What raise_cause() would raise."""
        if not isinstance(error, Error):
            return error
        self.raised = True
        return self.settle(error)

    def noted(self, number: int) -> None:
        """A call of that number has been started."""
        if self._lines is not None:
            self._note_line(number)

    def ended(self) -> None:
        """A call has ended."""
        if self._traced is not None:
            self._trace()

    def _trace(self) -> None:
        """A line for each call that has ended and has none yet."""
        with self._tracing:
            for call in self.core.calls(self._traced or 0):
                if call["state"] == "inside":
                    return  # and so those after it
                self._traced = call["number"]
                log.trace(f"group {self.name}: {call['call']} {call['state']} in {call['took'] * 1e6:.1f} us")

    # -- the record

    def _note_line(self, number: int) -> None:
        assert self._lines is not None
        self._lines[number] = _caller()
        self._lines.pop(number - _LINES_KEPT, None)

    def _write_record(self, cause: str) -> None:
        """The last calls with their Python lines, to MSCOMM_RECORD/rank_<rank>.json."""
        if self.record_dir is None or self._lines is None:
            return
        calls = self.core.calls()
        for call in calls:
            call["line"] = self._lines.get(call["number"], "")
        rank = self.epoch.rank
        suffix = "" if self.name == "world" else "." + re.sub(r"[^\w.-]", "_", self.name)
        path = Path(self.record_dir, f"rank_{rank}{suffix}.json")
        partial = path.with_suffix(".partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            words = {"rank": rank, "size": self.size, "group": self.name, "cause": cause, "calls": calls}
            partial.write_text(json.dumps(words, indent=1))
            partial.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):  # a folder that is not there, most likely
                partial.unlink()
            print(f"mscomm: rank {rank}: cannot write the record of the last calls: {error}", file=sys.stderr)


class NonMember(Group):
    """What create_group and split give a rank that takes no part: it is False, and says who it is.

    ranks is there if this rank was told them. What a member's Group has beside that is never set here, so that asking
    for it raises.
    """

    def __init__(self, name: str, ranks: list[int] | None, me: int) -> None:
        self.name = name
        if ranks is not None:
            self.ranks = ranks
        self._me = me

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"<mscomm.Group {self.name}: rank {self._me} is no member>"

    def refusal(self) -> RuntimeError:
        """The error of every use."""
        ranks = vars(self).get("ranks")
        why = "it gave split the color None" if ranks is None else f"the members are {ranks}"
        return RuntimeError(
            f"rank {self._me} is no member of {self.name}: {why}; only members may use a group (`if group:`)"
        )

    if not TYPE_CHECKING:  # a type checker that saw it would take every misspelt name for Any

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            raise self.refusal()


def printable(text: str) -> str:
    """text as the wire can carry it: what is no UTF-8 (file names with stray bytes) in escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _caller() -> str:
    """File and line of the first frame outside mscomm."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
