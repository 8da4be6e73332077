"""One rank's end of its control link: it joins the job, reports failures, and hears of those of others.

A daemon thread reads the link from join() on. It calls `abort`, `left` and `where` on the communicator and nothing
else.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from mscomm.cluster.deadline import Deadline
from mscomm.cluster.frames import Frames, Message
from mscomm.errors import CollectiveTimeout, Error, PeerLost, make

SETTLE_S = 2.0  # how long a rank that failed waits for the first cause
LEAVE_S = 2.0


class Communicator(Protocol):
    """What the member needs of the communicator; all three return at once and may be called from any thread."""

    def abort(self, kind: str, ranks: list[int], waiting_for: list[int], text: str) -> None: ...

    def left(self, rank: int) -> None: ...

    def where(self) -> tuple[int, bool, str]: ...


class Welcome(NamedTuple):
    """What a rank learns when all have joined; `facts` by rank."""

    rank: int
    size: int
    job: bytes
    epoch: int
    key: bytes
    facts: list[dict[str, Any]]


class Member:
    """A rank as the hub knows it. `hub`: what messages call the other end. No rank, no node_id: the hub decides."""

    def __init__(
        self,
        frames: Frames,
        *,
        key: bytes,
        rank: int | None = None,
        node_id: str | None = None,
        hub: str = "the scheduler",
    ) -> None:
        self._frames = frames
        self._key = key
        self._rank = rank
        self._node_id = node_id
        self._hub = hub
        self._communicator: Communicator | None = None
        # Guards what the reading thread learns; waiters sleep on it. Never held while the communicator is called.
        self._news = threading.Condition()
        self._welcome: Welcome | None = None
        self._go = False
        self._failure: Error | None = None  # the verdict, or why we were refused, or that the hub is gone
        self._settled = False  # the failure is the hub's word, not our guess that it is gone
        self._ended: str | None = None  # why the link is over
        self._departed: list[int] = []
        self._leaving = False
        self._forked = False
        self._reader = threading.Thread(target=self._read, name="mscomm-member", daemon=True)
        _members.add(self)

    # -- the way in

    def join(self, facts: Mapping[str, Any], deadline: Deadline) -> Welcome:
        """Register with the hub and wait until all ranks have. Raises the verdict, or why the hub refuses us."""
        known = {"pid": os.getpid(), "hostname": socket.gethostname(), "host": socket.gethostname()}
        self._say({"t": "join", "rank": self._rank, "node_id": self._node_id, "facts": {**known, **facts}}, deadline)
        self._reader.start()
        self._await(lambda: self._welcome is not None, deadline, "the other ranks to join")
        assert self._welcome
        return self._welcome

    def ready(self, deadline: Deadline) -> None:
        """Say that this rank is set up, and wait until all are."""
        self._say({"t": "ready"}, deadline)
        self._await(lambda: self._go, deadline, "the other ranks to finish their set-up")

    def check(self) -> None:
        """Raise what has gone wrong with the job so far, if anything has: for waits of the set-up, before attach()."""
        with self._news:
            if self._failure:
                raise make(
                    type(self._failure).__name__, str(self._failure), self._failure.ranks, self._failure.waiting_for
                )

    def attach(self, communicator: Communicator) -> None:
        """From now on tell the communicator; what came before is told now."""
        with self._news:
            self._communicator = communicator
            failure, departed = self._failure, list(self._departed)
        for rank in departed:
            communicator.left(rank)
        if failure:
            _abort(communicator, failure)

    # -- failures

    def settle(self, symptom: Error, number: int) -> Error:
        """Report an error of our call `number`; returns what to raise: the job's first failure, caused by this one.

        Waits at most 2 s. If the hub is gone or silent the symptom itself is the best that is known.
        """
        if self._forked:
            return symptom
        deadline = Deadline(SETTLE_S)
        if not self._settled:
            self._tell(type(symptom).__name__, str(symptom), symptom.ranks, number, deadline)
        with self._news:
            self._news.wait_for(lambda: self._settled or self._ended is not None, deadline.left())
            verdict = self._failure if self._settled else None
        if verdict is None:
            return symptom
        error = make(type(verdict).__name__, str(verdict), verdict.ranks, verdict.waiting_for)
        if str(symptom) != str(error):
            error.__cause__ = symptom
        return error

    def report(self, kind: str, text: str, ranks: Sequence[int]) -> None:
        """Tell the hub of a failure outside calls: abort(), an uncaught exception. It is sent when this returns."""
        self._tell(kind, text, ranks, -1, Deadline(SETTLE_S))

    def _tell(self, kind: str, text: str, ranks: Sequence[int], number: int, deadline: Deadline) -> None:
        if self._forked or self._ended is not None:
            return
        message = {"t": "failed", "kind": kind, "ranks": list(ranks), "text": text[:16000], "number": number}
        try:
            self._frames.send(message, deadline)
        except OSError as error:  # the reading thread sees the end of the link too, and says so to the communicator
            with self._news:
                self._ended = self._ended or str(error)

    # -- the way out

    def leave(self, number: int) -> None:
        """Say bye after call `number`, make sure that the hub has it, and close the link."""
        if self._forked:
            return
        deadline = Deadline(LEAVE_S)
        with self._news:
            self._leaving = True
        try:
            if self._ended is None:
                self._frames.send({"t": "bye", "number": number}, deadline)
                self._frames.sock.shutdown(socket.SHUT_WR)
                # The hub closes when it has read all of it; to close first, with news unread, could throw the bye away.
                with self._news:
                    self._news.wait_for(lambda: self._ended is not None, deadline.left())
        except OSError as error:
            self._end(f"it was lost at the end: {error}")
        finally:
            self.close()

    def close(self) -> None:
        """End the link without a word: to the hub this rank is lost, unless it said bye before."""
        with contextlib.suppress(OSError):  # the other end closed first
            self._frames.sock.shutdown(
                socket.SHUT_RDWR
            )  # wakes the reading thread, which must not poll a closed socket
        if self._reader.is_alive() and self._reader is not threading.current_thread():
            self._reader.join(1.0)
        self._frames.close()

    # -- the reading thread

    def _read(self) -> None:
        forever = Deadline(float("inf"))
        try:
            while (message := self._frames.receive(forever)) is not None:
                self._hear(message)
            self._end("its process ended or was killed")
        except (Error, OSError, KeyError, TypeError, ValueError) as error:
            self._end(f"the link to it failed: {error}")

    def _hear(self, message: Message) -> None:
        kind = message["t"]
        if kind == "welcome":
            names = ("rank", "size", "job", "epoch", "facts")
            with self._news:
                self._welcome = Welcome(key=self._key, **{name: message[name] for name in names})
                self._news.notify_all()
        elif kind == "go":
            with self._news:
                self._go = True
                self._news.notify_all()
        elif kind == "verdict":
            self._fail(make(message["kind"], message["text"], message["ranks"], message["waiting_for"]), settled=True)
        elif kind == "refused":
            self._fail(Error(message["why"]), settled=True)
        elif kind == "where":
            number, inside, text = (
                self._communicator.where() if self._communicator else (0, False, "has not finished its set-up")
            )
            self._frames.send(
                {"t": "here", "number": number, "inside": inside, "text": text[:1000]}, Deadline(SETTLE_S)
            )
        elif kind == "left":
            with self._news:
                self._departed.append(message["rank"])
                communicator = self._communicator
            if communicator:
                communicator.left(message["rank"])

    def _end(self, why: str) -> None:
        """The link is over. Without a verdict, and unless we left, nobody watches this job any more."""
        with self._news:
            self._ended = self._ended or why
            unexpected = self._failure is None and not self._leaving
            self._news.notify_all()
        if unexpected:
            self._fail(
                make("Aborted", f"{self._hub} is gone: {why}; start the job again and look at its output"),
                settled=False,
            )

    def _fail(self, failure: Error, settled: bool) -> None:
        with self._news:
            if self._failure is not None:
                return
            self._failure, self._settled = failure, settled
            communicator = self._communicator
            self._news.notify_all()
        if communicator:
            _abort(communicator, failure)

    # -- below

    def _say(self, message: Message, deadline: Deadline) -> None:
        if self._forked:
            raise RuntimeError("mscomm cannot be used in a forked child: the rank is its parent")
        try:
            self._frames.send(message, deadline)
        except TimeoutError as error:
            raise CollectiveTimeout(
                f"{self._hub} did not read {message['t']!r} within {deadline.seconds:g} s"
            ) from error
        except OSError as error:
            if self._reader.is_alive():
                self._reader.join(deadline.within(SETTLE_S).left())  # it reads what the hub said last
            raise self._failure or PeerLost(f"{self._hub} is gone: {error}") from error

    def _await(self, met: Callable[[], bool], deadline: Deadline, what: str) -> None:
        with self._news:
            while not (met() or self._failure) and not deadline.passed:
                self._news.wait(deadline.left())
            if self._failure:
                raise make(
                    type(self._failure).__name__, str(self._failure), self._failure.ranks, self._failure.waiting_for
                )
            if not met():
                raise CollectiveTimeout(f"waited {deadline.seconds:g} s for {what}")

    def _disown(self) -> None:
        """In a forked child: the rank is the parent. No locks here, another thread may have held them."""
        self._forked = True
        self._frames.close()


def _abort(communicator: Communicator, failure: Error) -> None:
    communicator.abort(type(failure).__name__, list(failure.ranks), list(failure.waiting_for), str(failure))


_members: weakref.WeakSet[Member] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for member in list(_members):
        member._disown()


os.register_at_fork(after_in_child=_after_fork_in_child)
