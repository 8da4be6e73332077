"""One rank's end of its control link: joins the job, meets other ranks, reports failures, and learns about failures.

From join() on, a daemon thread reads the link. This thread uses only the two parts of a group that attach() was given:
the core's group and its SetsUpLinks. Their methods return at once.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import select
import socket
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple, Protocol

from mscomm import _core, log
from mscomm.cluster import security
from mscomm.cluster.bytestream import ByteStream
from mscomm.cluster.deadline import Deadline, join_timeout_s
from mscomm.cluster.frames import JOIN, READY, Frame, Frames
from mscomm.cluster.handlers import ERROR, check
from mscomm.cluster.hello import UNKNOWN_RUN, Busy, NotMscomm
from mscomm.cluster.interfaces import listen_address
from mscomm.cluster.links import node_timeout_s
from mscomm.cluster.plan import world_id
from mscomm.cluster.returning import RETURN_S
from mscomm.errors import Aborted, BackendUnavailable, CollectiveTimeout, Error, PeerLost, of_fields
from mscomm.threads import start_thread
from mscomm.undisturbed import CallingThread, Condition

SETTLE_S = 2.0  # how long a rank that reported a failure waits for the verdict
LEAVE_S = 2.0
# When a rank that waits says so: after 10 s, after 60 s, and then every 300 s. Calls do the same (csrc/net/wait.h).
NOTICES_S = (10.0, 60.0, 300.0)
_DIAL_PAUSE_S = 0.1  # between two attempts
_DIAL_S = 3.0  # how long one attempt to reach a hub that is away may take
_CALL_CHARACTERS = 1000
_NUMBERS = 500  # a bye holds the final call number of at most this many groups; for further groups, the hub assumes 0
# The errors that a link reports if the host at the other end, or the network to it, is down.
_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)

_OF_WELCOME: Mapping[str, type] = {"restarts": bool, "key": bytes, "token": bytes}
# The types of the fields in the frames from the hub.
_FIELDS: Mapping[str, Mapping[str, type]] = {
    "refused": {"why": str},
    "verdict": {"group": str, **ERROR},
    "where": {"group": str, "number": int},
    "left": {"group": str, "ranks": list},
    "dial": {"group": str, "from": int, "purpose": int, "addresses": list},
    "facts": {"facts": list},
    "welcome": {"rank": int, "size": int, "run": bytes, "epoch": int, "tls": str, **_OF_WELCOME},
    "go": {"epoch": int},
    "met": {"key": str, "ranks": list, "facts": list},
    "unmet": {"key": str, **ERROR},
    "missing": {"key": str, "ranks": list, "text": str, "tells": bool},
    "bye": {},
}
# The keys of frames that a rank sends again to a scheduler that was started again. See Member._ask.
_BYE, _FAILED, _REFUSED, _DIALLED, _REJOIN, _WAITS = "bye", "failed ", "refuse ", "dial ", "rejoin ", "waits "


class Welcome(NamedTuple):
    """What the hub tells a rank when all ranks have joined.

    run: the id of this start of the job. tls: what encrypts the links between hosts: "certificates", "key", or "" if
    they are plain. key: the session key of the epoch. facts[r]: the facts of rank r. restarts: whether lost ranks are
    restarted, so that the others can rejoin().
    """

    rank: int
    size: int
    run: bytes
    epoch: int
    tls: str
    restarts: bool
    key: bytes
    facts: list[dict[str, Any]]


class Met(NamedTuple):
    """The ranks that met, and their facts in the same order."""

    ranks: list[int]
    facts: list[dict[str, Any]]


class SetsUpLinks(Protocol):
    """Sets up the links of a group. Both methods return at once."""

    def dialled(self, rank: int, purpose: int, addresses: Any) -> None:
        """`rank` has called Member.dial() for this rank."""

    def wanted(self, peers: Sequence[int]) -> None:
        """Collective calls of this rank need links to these ranks of the group."""


class Missing(NamedTuple):
    """The ranks for which this rank waits, as far as the hub has said. tells: whether this rank must tell the user."""

    words: str = "the other ranks"
    ranks: Sequence[int] = ()
    tells: bool = False


@dataclass(eq=False, repr=False)
class Member:
    """A rank's membership in the job.

    `key`: the admission key. `hub`: the name of the hub in messages. If `rank` is None, the hub assigns a rank, which
    may depend on `node_id`. `dial_again(run, deadline)`: a function that connects to a hub that was started again; None
    if this never happens, so that the end of the link is the end of the job.
    """

    frames: Frames
    _: KW_ONLY
    key: bytes
    rank: int | None = None
    node_id: str | None = None
    hub: str = "the scheduler"
    dial_again: Callable[[bytes, Deadline], ByteStream] | None = None

    def __post_init__(self) -> None:
        self._stream = self.frames.stream
        self._hub_address = ""  # the address of the hub's host; "" if the hub is on this host
        self._own_address = ""  # the address from which this rank has connected to the hub; "" on the hub's host
        # This condition protects what the reading thread learns. Other threads wait on it for changes. A thread that
        # holds it must not call a communicator.
        self._news = Condition()
        self._sender = CallingThread()  # sends the frames of the main thread
        self._communicators: dict[str, _core.Group] = {}
        self._links: dict[str, SetsUpLinks] = {}
        # requests to connect, for groups that are not attached yet
        self._early: dict[str, list[tuple[int, int, Any]]] = {}
        self._requests: set[tuple[str, int, int, str]] = set()  # all requests to connect in this epoch
        self._told: set[str] = set()  # groups whose failure this rank has reported to the hub
        self._facts: list[dict[str, Any]] = []  # the facts for the next welcome
        self._welcome: Welcome | None = None
        self._go = -1  # the latest epoch in which all ranks became ready
        self._rejoins = 0
        self._met: dict[str, Met | Error] = {}
        self._missing: dict[str, Missing] = {}  # for the key of each wait, the hub's latest answer
        self._attending: dict[str, str] = {}  # the names of the meetings in which this rank waits, by key
        self._given_up: set[str] = set()  # the keys of meetings that this rank has left before the hub's answer
        # For each meeting that the caller has not recorded yet: its result, if the hub has told this rank.
        self._unrecorded: dict[str, Met | None] = {}
        self._refused: str | None = None  # the key of the latest meeting that the hub refused
        self._failure: Error | None = None  # a failure of the whole link: the hub has refused us or is gone
        self._verdicts: dict[str, Error] = {}  # by group; "" stands for all groups of this epoch, even later ones
        self._ended: str | None = None  # why the link has ended; None if it has not
        self._departed: list[int] = []
        self._closed: dict[str, list[int]] = {}  # for each group in set-up, the ranks that have destroyed it
        self._leaving = False
        self._closing = threading.Event()
        self._away = False  # whether the link has ended, and the reading thread tries to connect again
        self._token = b""  # see security.token
        self._unanswered: dict[str, Frame] = {}  # what this rank has said, and what a new hub must hear again, by key
        self._ranks: dict[str, list[int]] = {}  # the ranks of each group that this rank is in
        self._listen_at = ""  # see address()
        self._hub_is_lost = False  # whether the hub ended or fell silent before this rank left
        self._forked = False
        # The core writes to this eventfd when it has a notice, when a call is stuck, when a call needs a link, and when
        # a call has failed while no thread was waiting for it.
        self.news_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._reader = threading.Thread(target=self._read, name="mscomm-member", daemon=True)
        _members.add(self)

    # -- joining the job

    def join(self, facts: Mapping[str, Any], deadline: Deadline) -> Welcome:
        """Register with the hub and wait until all ranks have joined.

        If the job fails before all have joined, raise the verdict. If the hub refuses this rank, raise an Error with
        the reason.
        """
        self._hub_address = _address(self._stream.sock.getpeername())
        self._own_address = _address(self._stream.sock.getsockname())
        self._listen_at = listen_address(self._stream.sock)
        known = {**self._known(), **facts}
        self._ask(JOIN, {"t": "join", "rank": self.rank, "node_id": self.node_id, "facts": known}, deadline)
        start_thread(self._reader)
        self._await(lambda: self._welcome is not None, deadline, "init", JOIN, world_id(0))
        assert self._welcome
        return self._welcome

    def give_up(self, error: BaseException) -> None:
        """Tell the hub why this rank ends before join()."""
        with contextlib.suppress(OSError):  # the hub may be gone
            self._send(self.frames, {"t": "give up", "why": _words(error)}, Deadline(SETTLE_S))

    def _known(self) -> dict[str, Any]:
        host = socket.gethostname()
        where = {"link": self._own_address, "listen": self._listen_at, "plain": self._stream.plain}
        return {"pid": os.getpid(), "hostname": host, "host": host, **where}

    def rejoin(self, facts: Mapping[str, Any], deadline: Deadline) -> Welcome:
        """Wait for the next epoch, and return the Welcome of that epoch.

        The next epoch begins when every surviving rank has called rejoin(), and every restarted rank has joined.
        """
        assert self._welcome
        now = self._welcome.epoch
        self._rejoins += 1
        key = f"{_REJOIN}{self._rejoins}"  # a new key each time: a late answer must not count for the next rejoin

        def answered() -> bool:
            return key in self._met or (self._welcome is not None and self._welcome.epoch > now)

        try:
            try:
                self._ask(key, {"t": "rejoin", "key": key, "facts": {**self._known(), **facts}}, deadline)
                self._await(answered, deadline, "rejoin", key)
            except CollectiveTimeout:
                # Ask the hub which ranks are missing. It may answer instead that all ranks have arrived meanwhile.
                self._say({"t": "unrejoin", "seconds": float(deadline.seconds)}, Deadline(SETTLE_S))
                self._await_last(answered, deadline, "rejoin")
        except Error:
            raise  # the link has ended
        except BaseException:  # raised by a signal handler: this rank stops waiting
            with contextlib.suppress(Error):  # the link may have ended
                self._say({"t": "unrejoin", "seconds": float(deadline.seconds)}, Deadline(SETTLE_S))
            raise
        with self._news.lock:
            refused = self._met.pop(key, None)
        if isinstance(refused, Error):
            raise refused
        return self._welcome

    def ready(self, deadline: Deadline) -> None:
        """Tell the hub that this rank has finished its set-up, and wait until all ranks have finished theirs."""
        assert self._welcome
        epoch = self._welcome.epoch
        self._ask(READY, {"t": "ready", "epoch": epoch}, deadline)
        self._await(lambda: self._go >= epoch, deadline, "set-up", READY, world_id(epoch))

    # -- meetings and groups

    def meet(
        self,
        key: str,
        name: str,
        ranks: Sequence[int],
        facts: Mapping[str, Any],
        deadline: Deadline,
        *,
        founds: bool = False,
        records: bool = False,
        survivors: bool = False,
    ) -> Met:
        """Wait until all these ranks have sent the same key. Return the ranks that met, and their facts.

        name: the name of the meeting in messages. founds: whether the meeting founds a group; key is then the group's
        id. records: whether the caller will call recorded() if the ranks have met. For a group, attach() does that.
        survivors: whether to wait only for ranks that are not lost.

        Raise Mismatch if the ranks give different lists of ranks, PeerLost if a rank is lost, and Aborted if a rank
        gives up. Raise CollectiveTimeout at the deadline.
        """
        try:
            with self._news.lock:
                self._unanswered.pop(_REFUSED + key, None)
                self._met.pop(key, None)  # if a signal handler has interrupted an earlier attempt
                if founds:
                    self._closed[key] = []
                if founds or records:
                    self._unrecorded[key] = None
            if key in self._given_up:
                self._hear_out(key, name, deadline)
            self._attending[key] = name
            words = {"key": key, "name": name, "ranks": list(ranks), "facts": dict(facts)}
            options = {"founds": founds, "survivors": survivors, "alone": _is_alone()}
            try:
                self._ask(key, {"t": "meet", **options, **words}, deadline)
                self._await(lambda: key in self._met, deadline, name, key)
            except CollectiveTimeout:
                # Ask the hub which ranks are missing. It may answer instead that all ranks have arrived meanwhile.
                try:
                    self._say({"t": "unmeet", "key": key, "seconds": float(deadline.seconds)}, Deadline(SETTLE_S))
                    self._await_last(lambda: key in self._met, deadline, name)
                except CollectiveTimeout as error:
                    self._given_up.add(key)
                    self.refuse(key, name, ranks, error)  # perhaps the hub will tell the others that all have met
                    raise
        except Error:
            raise  # the link has ended
        except BaseException as error:  # raised by a signal handler
            self._given_up.add(key)
            self.refuse(key, name, ranks, error)
            raise
        finally:
            with self._news.lock:
                self._attending.pop(key, None)
                self._unanswered.pop(key, None)
                met = self._met.pop(key, None)
        assert met is not None
        with self._news.lock:
            if founds and isinstance(met, Met):
                self._ranks[key] = list(ranks)
        if isinstance(met, Error):
            self._refused = key
            self.recorded(key)
            raise met
        return met

    def _hear_out(self, key: str, name: str, deadline: Deadline) -> None:
        """Wait until the hub has said everything about earlier meetings with this key, which this rank has left.

        A late answer to an earlier attempt must not count for the next one. The hub answers in the order of our frames.
        """
        with self._news.lock:
            self._missing.pop(key, None)
        self._ask(_WAITS + key, {"t": "waits", "key": key}, deadline)
        self._await(lambda: key in self._missing, deadline, name)
        self._given_up.discard(key)

    def hear_out(self, key: str, name: str, deadline: Deadline) -> Met | None:
        """Return what unrecorded() returns. If this rank has left meet(), first wait for the hub's answer."""
        if key in self._given_up:
            self._hear_out(key, name, deadline)
        return self.unrecorded(key)

    def unrecorded(self, key: str) -> Met | None:
        """Return the result of a meeting with this key that this rank has not recorded, or None if it knows of none."""
        with self._news.lock:
            return self._unrecorded.get(key)

    def has_met(self, group: str) -> bool:
        """Return whether all ranks of the group have met, as far as this rank has heard."""
        with self._news.lock:
            told = self._unrecorded.get(group) is not None or group in self._verdicts
            return told or group in self._communicators

    def has_come(self, group: str) -> bool:
        """Return whether the other ranks may have been told that this rank has come, or that it will not come."""
        return group in self._given_up or self._refused == group or self.has_met(group)

    def recorded(self, key: str) -> None:
        """The caller has recorded that the ranks have met, so that its next meeting has another key."""
        with self._news.lock:
            self._unrecorded.pop(key, None)

    def was_refused(self, key: str) -> bool:
        """Return whether meet() raised an error for this key because the hub refused the meeting.

        If so, no rank has received the facts of the meeting.
        """
        return self._refused == key

    def refuse(self, key: str, name: str, ranks: Sequence[int], error: BaseException) -> None:
        """Tell the other ranks that this rank leaves the meeting, or will not take part in it, and why."""
        assert self._welcome
        why = f"rank {self._welcome.rank}: {name}: {_words(error)}"
        frame = {"t": "refuse", "key": key, "name": name, "ranks": list(ranks), "why": why}
        with contextlib.suppress(Error):  # the link may have ended
            self._ask(_REFUSED + key, frame, Deadline(SETTLE_S))

    def check(self, group: str) -> None:
        """Raise the failure of the group, if there is one. Call this during the set-up of a group, before attach()."""
        with self._news.lock:
            failure = self._verdict(group) or self._failure
        if failure:
            raise failure.again()

    def attach(self, group: str, communicator: _core.Group, links: SetsUpLinks) -> None:
        """Pass the group's events to the communicator and to `links` from now on, and earlier ones at once."""
        with self._news.lock:
            self._told.discard(group)  # an earlier attempt to set up the group may have failed and been reported
            self._communicators[group] = communicator
            self._links[group] = links
            early = self._early.pop(group, [])
            failure = self._failure or self._verdict(group)
            departed = [*self._departed, *self._closed.pop(group, [])]
            self._unrecorded.pop(group, None)
        for rank in departed:
            communicator.left(rank)
        if failure:
            communicator.abort(failure)
        for rank, purpose, addresses in early:
            links.dialled(rank, purpose, addresses)

    def detach(self, group: str) -> None:
        """End this rank's membership in the group, and tell the hub. May be called again if it was interrupted."""
        communicator = self._communicators.get(group)
        is_there = self._ended is None and not self._away
        if (communicator is not None or self.has_met(group)) and not self._forked and is_there and not self._leaving:
            words = {"group": group, "number": communicator.where()[0] if communicator else 0}
            with contextlib.suppress(OSError):  # the reading thread sees the end of the link too
                self._send(self.frames, {"t": "close", **words}, Deadline(SETTLE_S))
        with self._news.lock:
            tables = (self._communicators, self._links, self._early, self._verdicts, self._ranks, self._closed)
            for table in (*tables, self._unrecorded):
                table.pop(group, None)
            self._unanswered.pop(_REFUSED + group, None)
            for key, frame in list(self._unanswered.items()):
                if key.startswith(_DIALLED) and frame["group"] == group:
                    del self._unanswered[key]
            if not self._away:  # otherwise, the next hub must hear of the failure
                self._unanswered.pop(_FAILED + group, None)
            self._told.discard(group)

    def dial(self, group: str, rank: int, purpose: int, addresses: list[Any], deadline: Deadline) -> None:
        """Ask a rank of the group to connect to one of the addresses. Call connected() when it has done so.

        purpose: see Epoch.invite(). addresses: if empty, the rank is to ask this rank to connect.
        """
        words = {"group": group, "to": rank, "purpose": purpose, "addresses": addresses}
        self._ask(f"{_DIALLED}{purpose} {rank} {group}", {"t": "dial", **words}, deadline)

    def connected(self, group: str, rank: int, purpose: int) -> None:
        """The rank has connected, or will not, so that a new hub need not ask it again."""
        with self._news.lock:
            self._unanswered.pop(f"{_DIALLED}{purpose} {rank} {group}", None)

    def address(self) -> str:
        """Return the address at which this rank listens for peers on other hosts (interfaces.listen_address)."""
        return self._listen_at

    # -- reporting failures

    def settle(self, group: str, symptom: Error, number: int) -> Error:
        """Report an error of the group's call `number`. Return the error to raise.

        The error to raise is the verdict, with the symptom as its __cause__. Wait for the verdict for at most 2 s, or
        up to node_timeout_s() + 1 s longer if the hub's host is silent. If no verdict has arrived by then, return the
        symptom itself, or the failure of the hub if that may have caused the symptom.
        """
        if self._forked:
            return symptom
        deadline = Deadline(SETTLE_S)
        if self._verdict(group) is None:
            self._tell(group, symptom, number, deadline)
        self._news.wait_for(lambda: self._settled(group) or self._away, deadline.left())
        with self._news.lock:  # the reading thread closes the stream only after it has set _away
            is_silent = not self._settled(group) and not self._away and self._stream.unacknowledged()
        if is_silent:
            # If the hub's host is down, the link will report this soon. That report explains more than our symptom.
            self._news.wait_for(lambda: self._settled(group) or self._away, node_timeout_s() + 1)
        limit = Deadline(join_timeout_s(os.environ)) if self._away else deadline
        while self._away and not self._settled(group) and not limit.passed:
            self._news.wait_for(lambda: self._settled(group) or not self._away, limit.left())
            self._news.wait_for(lambda: self._settled(group) or self._away, RETURN_S + SETTLE_S)
        with self._news.lock:
            verdict = self._verdict(group)
            if verdict is None and isinstance(symptom, (PeerLost, CollectiveTimeout)):
                verdict = self._failure  # the peer may be lost for the same reason as the hub
        if verdict is None:
            return symptom
        error = verdict.again()
        if str(symptom) != str(error):
            error.__cause__ = symptom
        return error

    def report(self, failure: Error, group: str = "") -> None:
        """Tell the hub about a failure outside calls, such as abort() or an uncaught exception.

        Return when the report has been sent. group: "" stands for all groups of the job.
        """
        if not group:  # on this rank, the failure counts at once, before the hub's verdict
            with self._news.lock:
                self._verdicts.setdefault("", failure)
        self._tell(group, failure, -1, Deadline(SETTLE_S))

    def _tell(self, group: str, failure: Error, number: int, deadline: Deadline) -> None:
        if self._forked or self._ended is not None:
            return
        self._told.add(group)
        with self._news.lock:
            communicator = self._communicators.get(group)
        call = communicator.called(number)[:_CALL_CHARACTERS] if communicator else ""
        words = {**failure.again(str(failure)[:16000]).fields(), "number": number, "call": call}
        try:
            self._post(_FAILED + group, {"t": "failed", "group": group, **words}, deadline)
        except OSError as error:  # the reading thread sees the end of the link too, and tells the communicators
            with self._news.lock:
                self._ended = self._ended or str(error)

    # -- leaving the job

    def leave(self, number: int) -> None:
        """Say bye after call `number`, make sure that the hub has received the bye, and close the link."""
        if self._forked:
            return
        deadline = Deadline(LEAVE_S)
        with self._news.lock:
            groups = list(self._communicators.items())[-_NUMBERS:]
        numbers = {group: communicator.where()[0] for group, communicator in groups}
        bye = {"t": "bye", "number": number, "numbers": numbers}
        with self._news.lock:
            self._leaving = True
            self._unanswered[_BYE] = bye
        try:
            if self._ended is None:
                self._bid_farewell(bye, deadline)
                self._stream.close_for_writing()
                # Wait for the hub to close first. If we closed with unread data in our socket, the kernel could reset
                # the connection, and the bye could be lost.
                self._news.wait_for(lambda: self._ended is not None, deadline.left())
        except OSError as error:
            self._end(f"it was lost at the end: {error}")
        finally:
            self.close()

    def _bid_farewell(self, frame: Frame, deadline: Deadline) -> None:
        """Send the bye. If the hub may be started again, wait until it has confirmed the bye, also while it is away."""
        if self.dial_again is None:
            self._send(self.frames, frame, deadline)
            return
        self._ask(_BYE, frame, deadline)

        def over() -> bool:
            return _BYE not in self._unanswered or self._ended is not None

        self._news.wait_for(lambda: over() or self._away, deadline.left())
        if not over() and self._away:
            self._news.wait_for(over, node_timeout_s())
        if not over():
            log.warn(f"{self.hub} did not confirm that this rank has left the job")

    def close(self) -> None:
        """Close the link at once. The hub then counts this rank as lost, unless the rank has said bye."""
        self._closing.set()
        with contextlib.suppress(OSError):  # the other end may have closed already
            self._stream.shut_down()  # wakes the reading thread, which must not poll a closed socket
        if self._reader.is_alive() and self._reader is not threading.current_thread():
            self._reader.join(1.0)
        self._sender.end()
        self.frames.close()
        fd, self.news_fd = self.news_fd, -1
        if fd >= 0:
            os.close(fd)
        if self._hub_is_lost:  # if the hub was killed on this host, its key file is still there
            security.remove_stale(self.key)

    # -- the reading thread

    def _read(self) -> None:
        try:
            while True:
                why, silent = self._follow()
                if not self._return(why):
                    break
            self._end(why, self._beside_the_hub() if silent else [])
        except BaseException as error:  # a bug: end the link, because without this thread nobody watches the job
            self._end(f"this rank does not hear it any more: {type(error).__name__}: {error}")
            raise

    def _follow(self) -> tuple[str, bool]:
        """Read the link until it ends. Return why it has ended, and whether the hub's host was silent."""
        try:
            poller = select.poll()
            poller.register(self._stream, select.POLLIN)
            poller.register(self.news_fd, select.POLLIN)
            while True:
                if not self._stream.pending:
                    poller.poll()
                self._look_at_news()
                frames = self.frames.arrived()
                if frames is None:
                    return "its process ended or was killed", False
                for frame in frames:
                    self._hear(frame)
        except (Error, OSError, KeyError, TypeError, ValueError) as error:
            return f"the link to it failed: {error}", isinstance(error, OSError) and error.errno in _SILENT

    # -- returning to a hub that was started again

    def _return(self, why: str) -> bool:
        """Connect to the hub again after the link has ended. Return whether this rank has a new link.

        The groups go on meanwhile: a collective call does not need the hub. What needs the hub waits for it.
        """
        has_left = self._closing.is_set() or (self._leaving and _BYE not in self._unanswered)
        if self.dial_again is None or self._failure or has_left:
            return False
        run = self._welcome.run if self._welcome else UNKNOWN_RUN
        deadline = Deadline(join_timeout_s(os.environ))
        with self._news.lock:
            self._away = True
            self._news.notify_all()
        log.warn(f"{self.hub} is gone: {why}; this rank goes on, and waits for it up to {deadline.seconds:g} s")
        self._stream.close()
        while not (self._closing.is_set() or deadline.passed):
            with contextlib.suppress(OSError):  # a report that only the hub needs
                self._look_at_news()
            try:
                stream = self.dial_again(run, deadline.within(_DIAL_S))
            except (BackendUnavailable, NotMscomm, Busy):
                self._closing.wait(_DIAL_PAUSE_S)
                continue  # nobody listens there yet, or the new hub has just started and is slow
            except Error as error:
                self._fail(Aborted(f"{self.hub} was started again, but: {error}"))
                break
            try:
                if not self._closing.is_set():
                    self._hub_address = _address(stream.sock.getpeername())
                    self._repeat(Frames(stream))
                    log.warn(f"{self.hub} is back")
                    return True
            except OSError:  # this link has ended, too; TimeoutError is an OSError
                pass
            stream.close()
        with self._news.lock:
            self._away = False
        return False

    def _repeat(self, frames: Frames) -> None:
        """Tell a new hub who this rank is, what it knows, and what it has asked and was not answered yet.

        Other threads may use the new link only after that.
        """
        limit = Deadline(SETTLE_S)
        if self._welcome:
            with self._news.lock:
                groups, verdicts = dict(self._ranks), dict(self._verdicts)
            proof = security.proof(self._token, frames.stream.secret)
            me = {"rank": self._welcome.rank, "epoch": self._welcome.epoch, "proof": proof, "facts": self._known()}
            frames.send({"t": "return", **me}, limit)
            for group, ranks in groups.items():
                frames.send({"t": "in group", "group": group, "ranks": ranks}, limit)
            for group, verdict in verdicts.items():
                frames.send({"t": "saw", "group": group, **verdict.fields()}, limit)
        said: dict[str, Frame] = {}
        while True:
            with self._news.lock:
                rest = {key: frame for key, frame in self._unanswered.items() if said.get(key) is not frame}
                if not rest:
                    self.frames, self._stream, self._away = frames, frames.stream, False
                    self._news.notify_all()
                    os.eventfd_write(self.news_fd, 1)  # what could not be sent meanwhile
                    return
            for frame in rest.values():
                frames.send(frame, limit)
            said |= rest

    def _look_at_news(self) -> None:
        """Pass on news from the groups: notices, stuck calls, links that are needed, and failed calls."""
        try:
            os.eventfd_read(self.news_fd)
        except BlockingIOError:
            return
        with self._news.lock:
            communicators = list(self._communicators.items())
            links = dict(self._links)
        for group, communicator in communicators:
            if peers := communicator.wanted_data_links():
                links[group].wanted(peers)
            for notice in communicator.notices():
                log.notice(notice)
            if number := communicator.stuck():
                call = communicator.called(number)[:_CALL_CHARACTERS]
                self.frames.send({"t": "compare", "group": group, "number": number, "call": call}, Deadline(SETTLE_S))
            failure = communicator.failure()
            if failure and not failure.is_verdict and group not in self._told:
                self._tell(group, failure.error, failure.number, Deadline(SETTLE_S))

    def _hear(self, frame: Frame) -> None:
        kind = frame["t"]
        check(frame, _FIELDS.get(kind, {}))
        if kind == "refused":
            self._fail(Error(frame["why"]))
        elif kind == "verdict":
            verdict = of_fields(frame)
            with self._news.lock:
                group = frame["group"]
                self._verdicts.setdefault(group, verdict)
                for key in [key for key in self._unanswered if key.startswith(_FAILED)]:
                    if group in ("", key.removeprefix(_FAILED)):
                        del self._unanswered[key]
                everyone = self._communicators.items()
                named = [one for name, one in everyone if group == name or not (group or name in self._verdicts)]
                self._news.notify_all()
            for one in named:
                one.abort(verdict)
        elif kind == "where":
            with self._news.lock:
                communicator = self._communicators.get(frame["group"])
            number, inside, text = communicator.where() if communicator else (0, False, "is not in the group now")
            text += "".join(f" and waits in {name}" for name in tuple(self._attending.values()))
            place = {"number": number, "inside": inside, "text": text[:_CALL_CHARACTERS]}
            asked = frame["number"]
            called = {"asked": asked, "call": communicator.called(asked)[:_CALL_CHARACTERS] if communicator else ""}
            self.frames.send({"t": "here", "group": frame["group"], **place, **called}, Deadline(SETTLE_S))
        elif kind == "left":
            group, ranks = frame["group"], frame["ranks"]  # group "": the ranks have left the job
            with self._news.lock:
                (self._closed.get(group, []) if group else self._departed).extend(ranks)
                communicators = [one for name, one in self._communicators.items() if group in ("", name)]
            for one in communicators:
                for rank in ranks:
                    one.left(rank)
        elif kind == "dial":
            group, asked = frame["group"], (frame["from"], frame["purpose"], frame["addresses"])
            request = group, *asked[:2], repr(asked[2])
            with self._news.lock:
                if request in self._requests:
                    return  # the sender has repeated it to a new hub
                self._requests.add(request)
                links = self._links.get(group)
                # A rank that has destroyed the group need not answer a request without addresses.
                if links is None and (frame["addresses"] or group in self._closed):
                    self._early.setdefault(group, []).append(asked)
            if links:
                links.dialled(*asked)
        else:
            with self._news.lock:
                self._learn(frame)
                self._news.notify_all()

    def _learn(self, frame: Frame) -> None:
        """Store the information for which a thread may be waiting. The caller must hold self._news."""
        kind = frame["t"]
        if kind == "facts":
            self._facts = frame["facts"]
        elif kind == "welcome":
            names = ("rank", "size", "run", "epoch", "tls", "restarts")
            key = security.sealed(frame["key"], self._stream.secret, security.session_name(frame["epoch"]))
            self._token = security.sealed(frame["token"], self._stream.secret, security.SEAT)
            if not frame["restarts"]:
                self.dial_again = None  # this scheduler does not use recovery, and will not take anybody back
            self._unanswered.clear()
            self._requests.clear()
            self._ranks.clear()
            self._welcome = Welcome(key=key, facts=self._facts, **{name: frame[name] for name in names})
            self._departed.clear()
            self._closed.clear()
            self._unrecorded.clear()
            self._given_up.clear()
            self._verdicts.pop("", None)
        elif kind == "go":
            self._go = frame["epoch"]
            self._unanswered.pop(READY, None)
        elif kind == "bye":
            self._unanswered.pop(_BYE, None)
        elif kind in ("met", "unmet"):
            key = frame["key"]
            answer = Met(frame["ranks"], frame["facts"]) if kind == "met" else of_fields(frame)
            if isinstance(answer, Met) and key in self._unrecorded:
                self._unrecorded[key] = answer
            if key in self._attending or key == f"{_REJOIN}{self._rejoins}":  # otherwise, the answer is too late
                self._met[key] = answer
            self._unanswered.pop(key, None)
        elif kind == "missing":
            words = frame["text"]  # "" if nobody is missing any more
            self._unanswered.pop(_WAITS + frame["key"], None)
            self._missing[frame["key"]] = Missing(words, frame["ranks"], frame["tells"]) if words else Missing()

    def _beside_the_hub(self) -> list[int]:
        """Return the known ranks on the hub's host, or no ranks if this rank is on the same host."""
        facts = self._welcome.facts if self._welcome and self._hub_address else []
        return [rank for rank, fact in enumerate(facts) if fact.get("link") in ("", self._hub_address)]

    def _end(self, why: str, lost: Sequence[int] = ()) -> None:
        """Handle the end of the link. Unless we said bye, this is a failure, because nobody watches the job any more.

        lost: the ranks whose host is silent.
        """
        with self._news.lock:
            self._ended = self._ended or why
            unexpected = not self._leaving
            self._hub_is_lost = self._hub_is_lost or unexpected
            self._news.notify_all()
        if unexpected and lost:
            words = f"rank {', '.join(map(str, lost))}: lost with the host of {self.hub}: {why}"
            self._fail(PeerLost(words, lost))
        elif unexpected:
            self._fail(Aborted(f"{self.hub} is gone: {why}; start the job again and look at its output"))

    def _fail(self, failure: Error) -> None:
        with self._news.lock:
            if self._failure is not None:
                return
            self._failure = failure
            communicators = list(self._communicators.values())
            self._news.notify_all()
        for communicator in communicators:
            communicator.abort(failure)

    # -- sending frames and waiting

    def _send(self, frames: Frames, frame: Frame, deadline: Deadline) -> None:
        """Send the frame once, even if a signal handler raises an exception. Raise what Frames.send() raises."""
        self._sender.call(functools.partial(frames.send, frame, deadline), deadline.rest())

    def _post(self, key: str, frame: Frame, deadline: Deadline) -> None:
        """Send a frame, and keep it until the hub has answered it: if a new hub takes over, it must hear the frame too.

        Raise OSError if the link has ended, and no new hub can take over. The answer removes `key` from _unanswered.
        """
        with self._news.lock:
            self._unanswered[key] = frame
            if self._away:
                return  # the reading thread sends it
            frames = self.frames
        try:
            self._send(frames, frame, deadline)
        except TimeoutError:
            raise
        except OSError:
            if self.dial_again is None or self._failure:
                raise

    def _ask(self, key: str, frame: Frame, deadline: Deadline) -> None:
        """Send a frame that the hub will answer. See _post."""
        self._convert(frame, deadline, lambda: self._post(key, frame, deadline))

    def _say(self, frame: Frame, deadline: Deadline) -> None:
        """Send a frame. If the hub is away, wait for it."""

        def changed(frames: Frames) -> bool:
            """Wait until the reading thread has seen the end of this link. Return whether there will be another."""
            self._news.wait_for(lambda: self._away or self.frames is not frames or self._ended is not None, SETTLE_S)
            with self._news.lock:
                return self._away or self.frames is not frames

        def send() -> None:
            while True:
                back = self._news.wait_for(lambda: not self._away or self._failure is not None, deadline.left())
                with self._news.lock:
                    if self._away and back and self._failure is None:  # it has ended again just now
                        continue
                    if self._away:
                        raise TimeoutError
                    frames = self.frames
                try:
                    self._send(frames, frame, deadline)
                    return
                except TimeoutError:
                    raise
                except OSError:
                    if not changed(frames):
                        raise

        self._convert(frame, deadline, send)

    def _convert(self, frame: Frame, deadline: Deadline, send: Callable[[], None]) -> None:
        """Call send(). Raise an Error that names the hub in place of its OSError."""
        if self._forked:
            raise RuntimeError("mscomm cannot be used in a forked child: the rank is its parent")
        try:
            send()
        except TimeoutError as error:
            raise CollectiveTimeout(f"{self.hub} did not read {frame['t']!r} within {deadline.seconds:g} s") from error
        except OSError as error:
            if self._reader.is_alive():
                self._reader.join(deadline.within(SETTLE_S).left())  # the hub's final frames may say why it is gone
            raise self._failure or PeerLost(f"{self.hub} is gone: {error}") from error

    def _await(
        self, met: Callable[[], bool], deadline: Deadline, what: str, key: str = "", group: str | None = None
    ) -> None:
        """Wait until met() is true. Raise a failure of the link or the group, or CollectiveTimeout at the deadline.

        key: the hub's key for this wait. With a key, a long wait prints lines on stderr that name the missing ranks.
        """

        def over() -> bool:
            return met() or self._failure is not None or verdict() is not None

        def verdict() -> Error | None:
            return None if group is None else self._verdict(group)

        began = time.monotonic()
        first, second, every = NOTICES_S
        notices_s = itertools.chain((first, second), itertools.count(every, every))
        notice = began + next(notices_s)
        while True:
            until_notice_s = notice - time.monotonic() if key else float("inf")
            self._news.wait_for(over, min(deadline.rest(), until_notice_s))
            with self._news.lock:
                failure = verdict() or self._failure  # the verdict explains more than "the hub is gone"
                if met():
                    return
            if failure:
                raise failure.again()
            missing = Missing()
            # At the deadline of a meeting or of rejoin(), the caller asks the hub instead.
            if not deadline.passed or key in (JOIN, READY):
                missing = self._ask_for_missing(key, over) if key else missing
            with self._news.lock:
                if over():
                    continue
            if deadline.passed:
                words = f"{what}: waited {deadline.seconds:g} s for {missing.words}"
                raise CollectiveTimeout(words, waiting_for=missing.ranks)
            if missing.tells:
                log.notice(
                    f"mscomm: {self._me()}{what} has waited {time.monotonic() - began:.0f} s for {missing.words}"
                )
            notice = began + next(notices_s)

    def _await_last(self, met: Callable[[], bool], deadline: Deadline, what: str) -> None:
        """Wait for the hub's last answer, after the deadline. Raise what _await() raises."""
        try:
            self._await(met, Deadline(SETTLE_S), what)
        except CollectiveTimeout as error:
            missing = f"the other ranks, and {self.hub} did not say within {SETTLE_S:g} s which ones"
            raise error.again(f"{what}: waited {deadline.seconds:g} s for {missing}") from None

    def _ask_for_missing(self, key: str, over: Callable[[], bool]) -> Missing:
        """Ask the hub which ranks this rank is waiting for. over(): whether the wait has ended in the meantime."""
        with self._news.lock:
            self._missing.pop(key, None)
        with contextlib.suppress(Error):  # if the hub is gone, the caller notices that
            self._say({"t": "waits", "key": key}, Deadline(SETTLE_S))
        self._news.wait_for(lambda: key in self._missing or over(), SETTLE_S)
        with self._news.lock:
            return self._missing.pop(key, None) or Missing()

    def _me(self) -> str:
        """Return the name of this rank in notices; "" if its number is not known yet."""
        rank = self._welcome.rank if self._welcome else self.rank
        return "" if rank is None else f"rank {rank}: "

    def _settled(self, group: str) -> bool:
        """Return whether the group's first failure is known, or can no longer become known."""
        over = self._ended is not None and (self._leaving or self._reader is threading.current_thread())
        return over or self._verdict(group) is not None or self._failure is not None

    def _verdict(self, group: str) -> Error | None:
        return self._verdicts.get(group) or self._verdicts.get("")

    def _disown(self) -> None:
        """Stop acting as the rank in a forked child, because the parent is the rank.

        Take no locks here: another thread of the parent may have held them at the time of the fork.
        """
        self._forked = True
        self.frames.close()
        fd, self.news_fd = self.news_fd, -1
        if fd >= 0:
            os.close(fd)


def _is_alone() -> bool:
    """Return whether no other thread of the user's program can call mscomm while this thread waits."""
    own = threading.current_thread()
    return all(one is own or one.name.startswith("mscomm-") for one in threading.enumerate())


def _words(error: BaseException) -> str:
    """Return the exception as text for a control frame."""
    words = "".join(traceback.format_exception_only(error)).strip()
    return words.encode("utf-8", "backslashreplace").decode()[:16000]


def _address(name: Any) -> str:
    """Return the host part of a socket's name; "" for loopback and unix sockets, which connect to the same host."""
    host = str(name[0]) if isinstance(name, tuple) else ""
    return "" if host == "::1" or host.startswith("127.") else host


_members: weakref.WeakSet[Member] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for member in list(_members):
        member._disown()


os.register_at_fork(after_in_child=_after_fork_in_child)
