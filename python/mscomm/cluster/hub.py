"""The hub: one thread that registers the ranks of a job, runs their meetings, watches their control links, and tells
each group its first failure.

The hub runs in `mscomm run`, in the MS_SCHED process, or in a small process that rank 0 starts under other launchers,
such as mpirun. The section "Frames" of docs/design/0001-call.md lists the control frames. groups.py and judge.py
decide which failure of a group was the first, meetings.py decides when a meeting is complete, and switchboard.py moves
the bytes.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import selectors
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mscomm.cluster import key_stream, security
from mscomm.cluster.bytestream import PERMITTED, ByteStream
from mscomm.cluster.frames import FROM_HUB_BYTES, JOIN, READY, Frame, encode
from mscomm.cluster.groups import Groups, verdict_frame
from mscomm.cluster.handlers import handlers
from mscomm.cluster.hello import CONTROL, LAUNCHER, UNKNOWN_JOB, UNKNOWN_RANK, Identity, package_version
from mscomm.cluster.judge import Progress
from mscomm.cluster.launchers import Launchers, State
from mscomm.cluster.links import Door, is_between_hosts, require_same_user
from mscomm.cluster.meetings import Answer, Meetings, unmet
from mscomm.cluster.plan import group_name, world_id
from mscomm.cluster.recovery_file import Membership, RecoveryFile, Seat
from mscomm.cluster.returning import Returning
from mscomm.cluster.roster import Link, Roster
from mscomm.cluster.switchboard import Switchboard
from mscomm.cluster.waiting import WaitNotices
from mscomm.errors import Aborted, CollectiveTimeout, Error, PeerLost, make

if TYPE_CHECKING:
    from mscomm.cluster.protection import Protection

_LEAVERS_EVERY_S = 0.05
# A worker that is lost this many times in a row, each time soon after it joined, is not waited for any more.
_SHORT_LIFE_S = 10.0
_SHORT_LIVES = 10
_KEY_CHARACTERS = 1024  # the longest key of a meeting, and the longest id of a group
_CONTESTED_S = 5.0  # if two jobs use one port: how long the hub keeps telling processes why they cannot join


class Outcome(NamedTuple):
    """How the job ended: successfully, with a verdict, or with the reason why it never began."""

    ok: bool
    text: str
    verdict: Error | None = None


class Hub:
    """The hub of one job of `size` ranks. Pass it sockets with listen() or adopt(), then call serve() in a thread.

    `key`: the job key.
    `ranks_known`: whether each process says which rank it is; if not, the hub assigns ranks (plan.assign_ranks).
    `watched`: whether a launcher calls process_ended() for each rank. `restarts`: whether lost ranks may be restarted;
    if so, a launcher that reports the end of a process also says whether it restarts the rank. `named`: the job id,
    which every hello must contain (links.job_of). `log`: a function that writes a short line to the log; it must not
    raise an error.

    `nodes` and `layout`: see Launchers. `tell`: a function that writes a line for a user who is waiting. `protection`:
    how the user wants the links to be protected. `recovery`: the file in which the hub keeps the membership. If an
    earlier hub of the job has written it, this hub takes over the ranks.
    """

    def __init__(
        self,
        size: int,
        *,
        key: bytes,
        topo_timeout_s: float,
        ranks_known: bool,
        named: bytes = UNKNOWN_JOB,
        watched: bool = False,
        restarts: bool = False,
        log: Callable[[str], None] = lambda text: None,
        nodes: Mapping[str, range] | None = None,
        layout: str = "",
        tell: Callable[[str], None] = lambda text: None,
        protection: Protection | None = None,
        recovery: RecoveryFile | None = None,
    ) -> None:
        self._protection = protection
        self._all = list(range(size))
        self._admissions = {purpose: security.admission_key(key, purpose) for purpose in (CONTROL, LAUNCHER)}
        self._key = key
        self._recovery = recovery
        former = recovery.found if recovery else None
        self._roster = Roster(size, ranks_known, former.seats if former else ())
        self.run = former.run if former else os.urandom(16)  # the id of this start of the job
        self._epoch = former.epoch if former else 0
        self._topo_timeout_s = topo_timeout_s
        self._topo_until: float | None = None
        self._watched = watched
        self._restarts = restarts
        self._log = log
        self._listening = False
        self._absent: dict[int, str] = {}  # for each rank that was lost before any rank had joined, how it was lost
        # The ranks whose inherited link has ended before they joined. A wrapper may have closed it, and the rank may
        # ask the launcher for another one.
        self._unlinked: set[int] = set()
        self._starter_gone = False
        # Ranks that ended with status 0, after a bye if they had joined. If a rank's launcher is gone, a bye is enough.
        self._ended_well: set[int] = set()
        self._ended_badly: dict[int, str] = {}  # for each rank that failed and is not restarted, how its process ended
        self._started_again: set[int] = set()  # ranks that were lost in this epoch and are restarted
        self.state = State()  # any thread may read this
        self._stopped_here: Sequence[int] = ()
        self._welcomed = former is not None
        self._ready: set[int] = set()
        self._returning = Returning(self._roster)
        self._leaving: list[Link] = []  # links whose bye is confirmed when the recovery file is written
        self._short_lives: Counter[str] = Counter()  # how often in a row each member was lost soon after it joined
        # For each group id, the ranks that have left since the last frames "left"; "" stands for the job. If many ranks
        # leave at once, a few frames announce all of them.
        self._leavers: dict[str, list[int]] = {}
        self._tell_leavers_at = 0.0  # do not send the next of these frames earlier
        self._never_began: str | None = None
        self._contested_until = 0.0  # if two jobs use one port, the hub serves until this time, to refuse newcomers
        self._groups = Groups(self._roster, self._epoch, watched=watched, restarts=restarts, log=log)
        self._meetings = Meetings(self._roster.gone, self._roster.name, lambda: self._groups.world.judge)
        self._selector = selectors.DefaultSelector()
        self._board: Switchboard[Link] = Switchboard(self._selector, self._handle, self._ended, self._log)
        # Epoch 0, because a process that joins does not know the epoch yet.
        mine = Identity(named, package_version(), run=self.run)
        self._launchers = Launchers(
            self._selector,
            self._roster,
            nodes or {},
            layout,
            process_ended=self._process_ended,
            lost=self._without_launcher,
            contested=self._contested,
            log=self._log,
            tell=tell,
        )
        self._waiting = WaitNotices(self._roster, self._launchers, tell)
        self._door = Door(
            self._selector,
            self._admissions,
            mine,
            range(size),
            self._enter,
            self._log,
            self._turned_away,
            protection=protection,
        )
        # Requests from other threads. A thread appends a function and sends a byte. The byte wakes the hub's thread,
        # which calls the function.
        self._orders: deque[Callable[[], None]] = deque()
        self._stopped, self._stopped_why = False, ""
        self._wake_r, self._wake_w = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._selector.register(self._wake_r, selectors.EVENT_READ, self._woken)
        if former:
            self._take_over(former)

    def listen(self, sock: socket.socket) -> None:
        """Accept connections at this listening socket. The caller still owns the socket and must close it."""
        self._door.listen(sock)
        name = sock.getsockname()
        self._roster.address = f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "a unix socket"
        self._listening = True

    def adopt(self, sock: socket.socket, rank: int) -> None:
        """Take over our end of a socket pair. The rank inherits the other end. Any thread may call this.

        Such a link does not begin with a hello, but with the rank's admission, which the hub sends.
        """
        require_same_user(sock)
        self._order(lambda: self._adopt(ByteStream(sock), rank))

    def _adopt(self, stream: ByteStream, rank: int) -> None:
        stream.secret = self._admissions[CONTROL]
        self._board.write(self._board.add(Link(stream, rank, adopted=True)), self.admission)

    @property
    def admission(self) -> bytes:
        """What a rank reads from the descriptor that it inherits: its admission key, and the id of this start."""
        return self._admissions[CONTROL] + self.run

    def started_by(self, rank: int, pidfd: int) -> None:
        """Watch the process of the rank that started the hub. When it has ended, expect no more connections."""
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._starter_ended(rank, pidfd))

    def process_ended(self, rank: int, how: str, *, badly: bool = False, again: bool = False) -> None:
        """Tell the hub that the rank's process has ended. The launcher calls this, from any thread.

        how: for example "killed by SIGKILL" or "exit code 1". badly: whether the process failed. again: whether the
        launcher restarts the rank after this call.
        """
        self._order(lambda: self._process_ended(rank, how, badly, again))

    def stopped_here(self, ranks: Sequence[int]) -> None:
        """Tell the hub whether all ranks on this host have ended or are stopped (SIGSTOP). Any thread may call this.

        ranks: the ranks that have not ended, if all of them are stopped; otherwise empty.
        """
        if ranks != self._stopped_here:
            self._stopped_here = ranks
            self._wake()

    def stop(self, why: str = "") -> None:
        """Make serve() return soon, whatever the ranks are doing. Any thread and any signal handler may call this.

        why: what to tell the ranks, unless another hub may take over the job.
        """
        self._stopped_why = why
        self._stopped = True  # only now, because the hub's thread may look at once
        self._wake()

    @property
    def is_over(self) -> bool:
        """Whether the job has ended, so that no other scheduler can take it over. Call this after serve()."""
        nobody_returned = self._welcomed and self._never_began is not None
        return not (self._stopped or nobody_returned)

    @property
    def attended(self) -> set[int]:
        """The ranks of other hosts whose launcher has connected. Any thread may read this."""
        return self._launchers.attended

    @property
    def verdict(self) -> Error | None:
        """The job's first failure or, with `restarts`, the failure that ended the job. Any thread may read this."""
        return self.state.over if self._restarts else self._groups.world.judge.verdict

    @property
    def can_restart(self) -> bool:
        """Whether a rank that is restarted now can take part in the job. Any thread may read this."""
        left = self._welcomed and self._ended_well
        return not (left or self.state.over or self._never_began or self._stopped)

    # -- the loop of the hub's thread

    def serve(self) -> Outcome:
        """Serve until all ranks have left or are lost. Also end if not all ranks join in time. Call this only once."""
        if not self._watched:
            self._topo_until = time.monotonic() + self._topo_timeout_s
        if self._launchers.missing():
            self._waiting.begin()
        self._returning.begin()
        try:
            self._obey()
            while not self._finished():
                for ready, _ in self._selector.select(self._sleep_s()):
                    ready.data()
                self._look()
        finally:
            self._close()
        outcome = self._outcome()
        self._log(f"the job {'ended well' if outcome.ok else 'failed'}: {outcome.text}")
        return outcome

    def _finished(self) -> bool:
        if self._stopped:
            return True
        if time.monotonic() < self._contested_until:
            return False
        # Wait for the end of each process, not for byes, because a rank can fail after its bye and be restarted.
        if self._watched and self._restarts:
            return len(self._ended_well) + len(self._ended_badly) == self._roster.size or self._never_began is not None
        if self._unlinked or any(link.joined or link.adopted for link in self._board.lines):
            return False
        if self._never_began is None and self._returning.may_come(nobody_came=self._topo_until is not None):
            return False
        if self._welcomed or self._groups.world.announced or self._never_began is not None:
            return True  # ignore links over which no rank has joined
        if self._board.lines or self._door.expire() is not None:
            return False
        return self._starter_gone or not self._listening

    def _outcome(self) -> Outcome:
        verdict = self.state.over or self._groups.world.judge.verdict
        if verdict:
            return Outcome(False, f"{verdict.kind}: {verdict}", verdict)
        if self._never_began is not None:
            return Outcome(False, self._never_began)
        staying = sum(not link.left for link in self._roster)
        if staying:
            how = self._stopped_why or "stopped"
            return Outcome(False, f"{how} while {staying} {self._roster.plural} were there")
        if self._roster.away:
            away = ", ".join(map(self._roster.name, self._roster.away))
            return Outcome(False, f"stopped before these had returned: {away}")
        if self._welcomed:
            return Outcome(True, f"all {self._roster.size} {self._roster.plural} have left")
        return Outcome(self._watched, f"no {self._roster.plural} came")

    def _sleep_s(self) -> float | None:
        """Return how many seconds to wait for events until the next action is due; None if no action is due."""
        now = time.monotonic()
        dues = [
            *self._groups.due(),
            self._tell_leavers_at if self._leavers else None,
            self._returning.due(),
            self._topo_until,
            self._waiting.due,
            self._contested_until if now < self._contested_until else None,
        ]
        waits = [until - now for until in dues if until is not None]
        if (half_open_s := self._door.expire()) is not None:
            waits.append(half_open_s)
        return max(0.0, min(*waits, 3600.0)) if waits else None

    def _look(self) -> None:
        """Do everything that is due now, because time has passed or because of the latest events."""
        now = time.monotonic()
        if self._topo_until is not None and now >= self._topo_until:
            self._refuse_all(self._roster.too_few(self._topo_timeout_s))
        self._waiting.look(now)
        for rank in self._returning.lost(now):
            self._lost(rank, self._roster.name(rank), "did not return to the scheduler, which was started again")
        for action in self._returning.believed():
            action()
        if self._leavers and now >= self._tell_leavers_at:
            self._tell_leavers(now)
        for group, frame in self._groups.look(now):
            self._broadcast(frame, group.ranks)
            if frame["t"] == "verdict" and frame["group"] == self._groups.world.id:
                self._topo_until = None
                self._answer(self._meetings.look())  # meetings with lost ranks were waiting for this verdict
        if self.state.over is None and (end := self._end()):
            self._give_up(end)
        self._set_state(goes_on=self._meetings.survivors_go_on, only_stopped=self._only_stopped())

    def _tell_leavers(self, now: float) -> None:
        """Tell the ranks that stay which ranks have left since the last call. Confirm the byes of the others."""
        if self._leaving:
            self._save()
        for link in self._leaving:
            self._send(link, {"t": "bye"})
        self._leaving.clear()
        for group, leavers in self._leavers.items():
            found = self._groups.get(group)
            staying = set(self._groups.members(found)) if found else self._groups.world.ranks
            if found or not group:
                self._broadcast({"t": "left", "group": group, "ranks": leavers}, staying)
        self._leavers.clear()
        self._tell_leavers_at = now + _LEAVERS_EVERY_S

    def _set_state(self, **changes: Any) -> None:
        """Change the state of the job, and tell the launchers of other hosts."""
        self.state = self.state._replace(**changes)
        self._launchers.announce(self.state)

    def _give_up(self, verdict: Error) -> None:
        """Record that the job cannot continue. Tell the launchers, and the ranks that wait for the next epoch."""
        self._log(f"the job cannot go on: {verdict}")
        self._waiting.end()
        self._set_state(over=verdict)
        self._begin_epoch()

    def _only_stopped(self) -> bool:
        """Return whether some ranks have ended, and all others are stopped (SIGSTOP)."""
        ended = self._ended_well | self._ended_badly.keys()
        stopped = self._launchers.stopped().union(self._stopped_here)
        return bool(ended) and not stopped <= ended and len(ended | stopped) == self._roster.size

    def _end(self) -> Error | None:
        """Return why the job cannot continue, or None if it can."""
        judge = self._groups.world.judge
        verdict = judge.verdict
        if self._ended_badly and judge.due() is None:
            if verdict and not any(rank in self._started_again for rank in verdict.ranks):
                return verdict
            rank, how = next(iter(self._ended_badly.items()))
            end = ", and it is not started again" if self._restarts else ""
            return PeerLost(f"{self._roster.name(rank)}: {how}{end}", [rank])
        return verdict if verdict and verdict.kind == "PeerLost" and not self._restarts else None

    def _close(self) -> None:
        self._door.close()
        if self._stopped_why and not self._recovery:
            self._tell_stopped(Aborted(f"the scheduler at {self._roster.address} was {self._stopped_why}"))
        for link in list(self._board.lines):
            if link.joined or link.adopted:
                self._board.drop(link)
            else:
                self._refuse(link, f"the job is over: {self._outcome().text}")
        self.state = State(self.state.over)  # not announced, because dismiss() tells the launchers on other hosts "end"
        self._launchers.dismiss()
        self._selector.close()
        self._wake_r.close()
        self._wake_w.close()

    def _tell_stopped(self, why: Error) -> None:
        for link in [link for link in self._roster if link.open and not link.left]:
            self._board.drain(link)  # TCP cuts a link that is closed with unread bytes, and the rank could miss `why`
            if not link.open or link.left:
                continue
            if not self._welcomed:
                self._refuse(link, str(why))
            elif link.waits:
                self._turn_away(link, why)
            else:
                self._send(link, verdict_frame("", why))

    # -- requests from other threads

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        self._wake()

    def _wake(self) -> None:
        # Ignore errors. If the socket is full, the hub wakes anyway. If it is closed, serve() has returned.
        with contextlib.suppress(OSError):
            self._wake_w.send(b"!")

    def _woken(self) -> None:
        self._wake_r.recv(4096)
        self._obey()

    def _obey(self) -> None:
        while self._orders:
            self._orders.popleft()()

    def _process_ended(self, rank: int, how: str, badly: bool, again: bool) -> None:
        links = [link for link in self._board.lines if link.rank == rank]
        for link in links:
            self._board.drain(link)  # first handle everything that the process sent before it ended
        member = self._roster.at(rank)
        if again:
            self._started_again.add(rank)
        elif badly or (member is not None and not member.left):
            self._ended_badly.setdefault(rank, how)
        else:
            self._ended_well.add(rank)
        if badly:
            self._meetings.lost(rank)
        self._groups.process_ended(rank, how, badly)
        for link in links:
            self._board.end(link, "")  # do not wait for EOF, because a child of the rank may hold the socket open
        self._unlinked.discard(rank)
        if member is None and not again and not self._restarts and not self._welcomed:
            self._lost(rank, f"rank {rank}", "ended before it joined")
        if self._restarts:
            if badly and member is not None:
                member.left = False  # its process failed after its bye, so the bye does not count
            if not again and not self._welcomed and self._roster.at(rank) is None:
                self._lost(rank, f"rank {rank}", f"ended before it joined: {how}")
            self._begin_epoch()

    def _starter_ended(self, rank: int, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        self._starter_gone = True
        for link in [link for link in self._board.lines if link.rank == rank]:
            self._board.drain(link)
            self._board.end(link, "")
        if rank not in self._absent and all(link.rank != rank for link in self._roster):
            self._lost(rank, f"rank {rank}", "ended before it joined")

    # -- control frames from the ranks

    def _enter(self, stream: ByteStream, peer: Identity, purpose: int) -> None:
        if purpose == LAUNCHER:
            self._launchers.add(stream)
            return
        known = self._roster.ranks_known and peer.rank != UNKNOWN_RANK
        self._board.add(Link(stream, peer.rank if known else None, adopted=False))

    def _turned_away(self, address: str, why: str, unproven: bool) -> None:
        self._waiting.turned_away(address, why, unproven and not self._welcomed)

    def _handle(self, link: Link, frame: Frame) -> None:
        """Handle one control frame from a rank. If this raises Error, the caller ends the rank's link."""
        kind = frame["t"]
        if kind not in ("join", "give up", "return") and (not link.joined or link.left):
            raise Error(f"{kind!r} is not allowed before join or after bye")
        if kind not in FROM_RANKS:
            raise Error(f"{kind!r} is not a message to the hub")
        FROM_RANKS[kind](self, link, frame)

    def _on_ready(self, link: Link, epoch: int) -> None:
        if epoch != self._epoch:
            return
        self._ready.add(link.number)
        if len(self._ready) == self._roster.size:
            self._save()
            self._log(f"all {self._roster.size} {self._roster.plural} are ready")
            self._broadcast({"t": "go", "epoch": self._epoch}, self._groups.world.ranks)

    def _on_failed(
        self,
        link: Link,
        kind: str,
        text: str,
        ranks: list[Any],
        waiting_for: list[Any],
        group: str,
        number: int,
        call: str,
    ) -> None:
        error = make(kind, text, self._roster.known(ranks), self._roster.known(waiting_for))
        if kind != "Aborted":
            self._returning.suspect(error.ranks)
            words = (kind, text, ranks, waiting_for, group, number, call)
            if self._returning.later(lambda: self._on_failed(link, *words)):
                return
        self._groups.failed(link.number, group, error, number, call)
        if not group:
            self._abort_epoch(error)

    def _abort_epoch(self, verdict: Error) -> None:
        """Abort all groups of this epoch, including groups that are yet to be created."""
        if self._groups.abort(verdict):
            # End the meetings now, not in _look(). If a link ended before _look(), they would end with PeerLost.
            self._answer(self._meetings.clear(verdict))

    def _on_compare(self, link: Link, group: str, number: int, call: str) -> None:
        self._groups.compare(link.number, group, number, call)

    def _on_here(self, link: Link, group: str, asked: int, call: str, number: int, inside: bool, text: str) -> None:
        self._groups.here(link.number, group, asked, call, Progress(number, inside, text))

    def _on_meet(
        self,
        link: Link,
        key: str,
        name: str,
        ranks: list[Any],
        facts: Frame,
        founds: object,
        survivors: object,
        alone: object,
    ) -> None:
        ranks = self._checked_meeting("meet", link, key, ranks)
        if self._groups.aborted:
            self._answer([unmet((link.number,), key, self._groups.aborted)])
            return
        answers = self._meetings.come(link.number, key, name, ranks, facts, bool(survivors), bool(alone))
        met = any(answer.frame["t"] == "met" for answer in answers)
        if founds and key != self._groups.world.id:
            if met:
                self._groups.found(key, ranks)
            elif self._groups.get(key):
                self._half_founded(key, ranks, link)
                return
        self._answer(answers)

    def _checked_meeting(self, kind: str, link: Link, key: str, ranks: list[Any]) -> list[int]:
        if ranks == self._all:
            ranks = self._all  # in place of floats that are equal to ranks
        elif self._roster.known(ranks) != ranks or len(set(ranks)) != len(ranks):
            ranks = []
        if link.number not in ranks or len(key) > _KEY_CHARACTERS:
            raise Error(f"{kind!r} needs a key and the ranks that meet, this one among them")
        return ranks

    def _on_unmeet(self, link: Link, key: str, seconds: float) -> None:
        self._answer(self._meetings.withdraw(link.number, key, seconds))

    def _on_refuse(self, link: Link, key: str, name: str, ranks: list[Any], why: str) -> None:
        ranks = self._checked_meeting("refuse", link, key, ranks)
        group = self._groups.get(key)
        if group:  # all ranks have met in the meantime, so the group exists
            group.failed(link.number, Aborted(why, [link.number]))
        else:
            self._answer(self._meetings.refuse(link.number, key, name, ranks, why))

    def _on_dial(self, link: Link, group: str, to: int, purpose: int, addresses: list[Any]) -> None:
        """A rank asks another rank of its group to connect to it or, without addresses, to ask for a connection."""
        found = self._groups.get(group)
        if found is None or to not in found.ranks or link.number not in found.ranks:
            return  # the frame is from an earlier epoch
        if to in found.closed and not addresses:
            return  # it may have set up the link meanwhile; if not, the one that asks learns that it has left
        if to in found.closed:
            text = f"{self._roster.name(to)} has destroyed the group, but {link} needs it"
            found.failed(link.number, PeerLost(text, [to]))
            return
        other = self._roster.at(to)
        if other and other.open and not other.left:
            words = {"group": group, "purpose": purpose, "addresses": addresses}
            self._send(other, {"t": "dial", "from": link.number, **words})
        else:
            self._returning.once_back(to, lambda: self._on_dial(link, group, to, purpose, addresses))

    def _on_close(self, link: Link, group: str, number: int) -> None:
        if self._groups.destroyed(link.number, group, number):
            self._leavers.setdefault(group, []).append(link.number)

    def _on_waits(self, link: Link, key: str) -> None:
        """A rank has waited for a long time, and asks which ranks are missing. Only one waiting rank tells the user."""
        ranks, here = list[int](), [one.number for one in self._roster]
        if link.waits and key in (JOIN, link.rejoin_key):
            here, ranks = self._rejoining()
            words = self._absence(ranks)
        elif key == JOIN:
            words = self._roster.missing()
        else:
            if key == READY:
                here, ranks = sorted(self._ready), [rank for rank in here if rank not in self._ready]
            else:
                here, ranks = sorted(self._meetings.present(key)), self._meetings.missing(key)
            words = ", ".join(map(self._roster.name, ranks))
        tells = here[:1] == [link.number]
        self._send(link, {"t": "missing", "key": key, "ranks": ranks, "text": words, "tells": tells})

    def _on_rejoin(self, link: Link, key: str, facts: Frame) -> None:
        """A survivor waits for the next epoch, and no longer takes part in the current epoch."""
        link.facts, link.rejoin_key, link.waits = facts, key, True
        if len(self._ready) < self._roster.size:
            # The other ranks are still setting up the epoch, and need this rank. Let the set-up fail.
            text = f"{link} gave up its set-up, and waits for the next epoch"
            self._groups.world.failed(link.number, PeerLost(text, [link.number]), 0)
        self._begin_epoch()
        self._answer(self._meetings.look())  # other ranks may be waiting for this rank in a meeting

    def _on_unrejoin(self, link: Link, seconds: float) -> None:
        """A rank stops waiting for the next epoch, after a timeout or a signal. Do nothing if the epoch has begun."""
        if not link.waits:
            return
        _, absent = self._rejoining()
        text = f"rejoin: {link} waited {seconds:g} s for {self._absence(absent)}"
        self._turn_away(link, CollectiveTimeout(text, waiting_for=absent))

    def _rejoining(self) -> tuple[list[int], list[int]]:
        """Return the ranks that wait for the next epoch, and the ranks for which they wait."""
        here = sorted(link.number for link in self._roster if link.waits)
        return here, [rank for rank in range(self._roster.size) if rank not in here]

    def _absence(self, ranks: Iterable[int]) -> str:
        """Return the names of these ranks, and why each of them does not wait for the next epoch."""
        links = {rank: self._roster.at(rank) for rank in ranks}
        return ", ".join(
            f"{link}, which has not called rejoin()"
            if link and link.open
            else f"{self._roster.name(rank)}, which was not restarted, or has not called init() yet"
            for rank, link in links.items()
        )

    def _on_bye(self, link: Link, number: int, numbers: dict[str, Any]) -> None:
        if not self._welcomed:
            self._board.end(link, f"left before all {self._roster.size} {self._roster.plural} had joined")
            return
        verdict = self._groups.world.judge.verdict
        if self._restarts and not self._watched and verdict and link.number in verdict.ranks:
            self._board.end(link, "left after its failure")  # lost now, because no launcher will report how it ended
            return
        link.left, link.waits = True, False
        self._groups.left(link.number, number, numbers)
        self._leavers.setdefault("", []).append(link.number)
        if self._restarts and not self._watched:
            self._leaving.append(link)
        self._answer(self._meetings.look())
        self._begin_epoch()

    def _on_give_up(self, link: Link, why: str) -> None:
        """A rank ends before it has joined."""
        if link.joined:
            raise Error("'give up' is not allowed after join")
        if link.rank is None or self._roster.at(link.rank) is not None:  # a stranger, or a second process of a rank
            self._log(f"a process gave up before it joined: {why}")
        else:
            self._lost(link.rank, f"rank {link.rank}", f"gave up before it joined: {why}")

    def _on_join(self, link: Link, rank: object, node_id: object, facts: Frame) -> None:
        if link.joined:
            raise Error("it joined twice")
        if self._contested_until and self._never_began:
            self._refuse(link, self._never_began)
            return
        seat = self._roster.kept_by(node_id if isinstance(node_id, str) else None)
        if seat and seat.rank in self._roster.away:
            # The worker of this seat is alive, or this process replaces it. Wait for the worker for a while.
            if not self._returning.claim(seat.rank, link, lambda: self._on_join(link, rank, node_id, facts)):
                self._refuse(link, f"MS_NODE_ID={node_id} is taken already, by a process that waits to join")
            return
        link.since = time.monotonic()
        refusal = self._roster.admit(link, rank, node_id, facts)
        if refusal:
            self._log(f"refused {link}: {refusal}")
            self._refuse(link, refusal)
            return
        self._log(f"{link} joined, {len(self._roster)} of {self._roster.size}")
        if self._welcomed or self.state.over:
            self._topo_until = None
            self._returning.came()
            link.waits = True
            self._begin_epoch()
            return
        if self._watched and self._topo_until is None and not self._groups.world.announced:
            self._topo_until = time.monotonic() + self._topo_timeout_s
        for absent, how in self._absent.items():
            self._groups.lost(absent, how)
        self._absent.clear()
        if verdict := self._groups.world.announced:
            self._send(link, verdict_frame(self._groups.world.id, verdict))
        elif len(self._roster) == self._roster.size:
            self._welcome()

    def _welcome(self) -> None:
        """Tell each rank its number and the facts of all ranks. Call this when all ranks have joined."""
        self._topo_until = None
        try:
            self._roster.assign()
            facts = encode({"t": "facts", "facts": self._roster.facts()}, FROM_HUB_BYTES)
            tls = self._tls()
        except (ValueError, Error) as error:
            self._refuse_all(str(error))
            return
        self._welcomed = True
        self._waiting.end()
        self._set_state(complete=self.state.complete + 1)
        for link in self._roster:
            link.nonce = link.nonce or os.urandom(16)
        self._save()
        shared = {"t": "welcome", "size": self._roster.size, "run": self.run, "epoch": self._epoch}
        shared |= {"tls": tls, "restarts": self._restarts}
        session = security.new_key()
        for link in self._roster:
            link.waits, link.welcomed = False, True
            self._board.write(link, facts)
            key = security.sealed(session, link.stream.secret, security.session_name(self._epoch))
            token = security.sealed(self._token(link.nonce), link.stream.secret, security.SEAT)
            self._send(link, {**shared, "rank": link.rank, "key": key, "token": token})

    def _tls(self) -> str:
        """Return what the links between ranks use: "certificates", "key", or "" if they are not encrypted.

        Raise Error if a link between hosts cannot be encrypted, and nobody has permitted plain links.
        """
        over_tcp = [link for link in self._roster if not link.stream.is_local]
        plain = [link for link in over_tcp if not link.stream.encrypted]
        if exposed := [link for link in plain if is_between_hosts(link.stream.sock)]:
            self._require_permission(exposed)
            self._log(f"links between hosts are not encrypted, because {exposed[0]} has a plain link to the scheduler")
        if plain or not over_tcp:
            return ""
        return "certificates" if self._protection and self._protection.credentials else "key"

    def _require_permission(self, exposed: Sequence[Link]) -> None:
        """Raise Error unless the user permits plain links, here or on a rank. exposed: ranks whose links are plain."""
        reasons = {link: str(link.facts.get("plain", "")) for link in exposed}
        if not self._protection or self._protection.permit_plain or PERMITTED in reasons.values():
            return
        lacks = {str(link): why for link, why in reasons.items() if why}
        if not lacks:
            lacks = {"the process that serves the job": key_stream.lacking() or "it does not offer TLS"}
        raise Error(
            f"the links between hosts must be encrypted, but {', '.join(lacks)} cannot do that: "
            f"{next(iter(lacks.values()))}. Or permit plain links, which anybody between the hosts can read and "
            f"change: {self._protection.permits}"
        )

    def _begin_epoch(self) -> None:
        """Begin a new epoch if every rank is waiting for it: survivors after "rejoin", restarted ranks after "join"."""
        waiting = [link for link in self._roster if link.waits]
        if not waiting:
            return
        never = self._never_again()
        if never:
            for link in waiting:
                self._turn_away(link, never)
            return
        if len(waiting) < self._roster.size:
            return
        self._epoch += 1
        self._log(f"epoch {self._epoch} begins")
        self._ready.clear()
        self._started_again.clear()
        self._meetings.forget_survivors()
        # Begin it before the answers: if a link ends while they are sent, the judge of the new epoch must hear of that.
        self._groups.begin(self._epoch)
        self._answer(self._meetings.clear(PeerLost("another epoch of the job has begun")))
        self._leavers.clear()
        self._welcome()

    def _never_again(self) -> Error | None:
        """Return why there cannot be another epoch, or None if there can be one."""
        if not self._restarts:
            return PeerLost("rejoin: nothing restarts lost ranks in this job; use `mscomm run --max-restarts N`")
        if self.state.over:
            return PeerLost(f"rejoin: {self.state.over}", self.state.over.ranks)
        for rank in self._roster.left:
            if not self._watched or rank in self._ended_well:
                why = f"rejoin: {self._roster.name(rank)} has left the job, so its ranks can never all be there again"
                return PeerLost(why, [rank])
        return None

    def _turn_away(self, link: Link, why: Error) -> None:
        """Tell a rank that is waiting for the next epoch why it cannot join that epoch."""
        link.waits = False
        if link.welcomed:
            self._answer([unmet((link.number,), link.rejoin_key, why)])
            return
        verdict = self.state.over or self._groups.world.judge.verdict or why
        self._send(link, verdict_frame(world_id(0), verdict))
        if link.open:
            self._board.drop(link)

    def _ended(self, link: Link, how: str) -> None:
        """A control link has ended."""
        link.waits = False
        if link.left:
            return
        if not (link.joined or link.adopted):  # a hello alone changes nothing
            if how:
                self._log(f"a process that had not joined {how}")
            return
        if not link.joined and any(other.rank == link.rank for other in self._roster):
            return  # the rank has joined over another link
        if not link.joined and self._watched:
            self._unlinked.add(link.number)  # the launcher says when its process has ended
            return
        how = how or ("ended without release" if link.joined else "ended before it joined")
        self._lost(link.number, str(link), how)

    def _lost(self, number: int, name: str, how: str) -> None:
        if self._restarts and not self._watched:
            self._count_short_lives(number, name, how)
        if self._restarts and not self._welcomed and number not in self._ended_badly.keys() | self._ended_well:
            self._log(f"{name} {how}; it may come again")
            for link in [link for link in self._roster if link.number == number]:
                self._roster.forget(link)
            return
        if not len(self._roster) and not self._welcomed:
            self._absent.setdefault(number, how)
            return
        self._log(f"{name} {how}")
        self._meetings.lost(number)
        self._groups.lost(number, how)
        self._answer(self._meetings.look())

    def _count_short_lives(self, number: int, name: str, how: str) -> None:
        """Give the job up if a member is lost again and again, each time soon after it joined."""
        link = self._roster.at(number)
        if link is None:
            return
        who = link.node_id or str(number)
        is_short = time.monotonic() - link.since < _SHORT_LIFE_S
        self._short_lives[who] = self._short_lives[who] + 1 if is_short else 0
        if self._short_lives[who] < _SHORT_LIVES:
            return
        why = f"{name} {how}, {_SHORT_LIVES} times in a row within {_SHORT_LIFE_S:g} s of joining"
        if self._welcomed:
            self._give_up(PeerLost(why, [number]))
        else:
            self._refuse_all(why)

    # -- the recovery file, and workers that return

    def _take_over(self, former: Membership) -> None:
        """Take over the ranks of a scheduler that has ended."""
        if former.ready:
            self._ready.update(self._all)
        else:
            why = f"the scheduler was started again while the ranks set up epoch {self._epoch}"
            self._groups.world.set_verdict(PeerLost(why))
        self._log(f"takes over the {self._roster.plural} of epoch {self._epoch}")

    def _save(self) -> None:
        if self._recovery and self._welcomed:
            ready = len(self._ready) == self._roster.size
            try:
                self._recovery.write(Membership(self.run, self._epoch, ready, self._roster.seats()))
            except OSError as error:  # the job can go on, unless the scheduler ends now
                self._log(f"cannot write {self._recovery.path}: {error.strerror or error}")

    def _token(self, nonce: bytes) -> bytes:
        return security.token(self._key, self.run, nonce)

    def _proof(self, nonce: bytes, link: Link) -> bytes:
        return security.proof(self._token(nonce), link.stream.secret)

    def _on_return(self, link: Link, rank: int, epoch: int, proof: bytes, facts: Frame) -> None:
        """A process that has been welcomed before is back, after its control link or the scheduler had ended."""
        if link.joined:
            raise Error("'return' is not allowed after join")
        seat: Seat | Link | None = self._roster.kept.get(rank) or self._roster.at(rank)
        # Without a nonce, a process was not welcomed yet, and everybody who has the job key could make its proof.
        proven = seat is not None and seat.nonce and self._proof(seat.nonce, link)
        if seat is None or rank < 0 or not proven or not hmac.compare_digest(proof, proven):
            self._refuse(link, f"another process has taken the place of rank {rank}, because this one was away")
            return
        if seat.left:  # only the hub's answer to its bye was lost
            self._send(link, {"t": "bye"})
            self._board.drop(link)
            return
        if epoch > self._epoch:
            self._jump_to(epoch)
        former = self._roster.at(rank)
        if former and former.open:  # the hub has not noticed yet that the former link has ended
            self._board.drop(former)
        link.rank, link.node_id, link.nonce, link.facts = rank, seat.node_id, seat.nonce, {**seat.facts, **facts}
        link.welcomed, link.since, self._topo_until = True, time.monotonic(), None
        link.returned_in = epoch
        self._returning.came()
        self._roster.seat(link, former)
        self._log(f"{link} is back, {len(self._roster)} of {self._roster.size}")
        if claimant := self._returning.returned(rank):
            self._refuse(claimant, f"rank {rank} is taken already: {link}; was it started twice?")
        for frame in self._groups.verdicts_for(link.number):
            self._send(link, frame)
        for action in self._returning.kept_for(rank):
            action()

    def _jump_to(self, epoch: int) -> None:
        """A rank is in a later epoch than the recovery file says, because the former hub could not write the file."""
        self._epoch = epoch
        self._ready.clear()
        self._groups.begin(epoch)
        self._groups.world.set_verdict(PeerLost(f"the recovery file of the scheduler did not know epoch {epoch}"))
        self._save()

    def _on_in_group(self, link: Link, group: str, ranks: list[Any]) -> None:
        """A process that has returned is in this group, which this scheduler may not know."""
        ranks = self._roster.known(ranks)
        if not group.startswith(f"{self._epoch}:") or link.number not in ranks or len(group) > _KEY_CHARACTERS:
            return
        if self._meetings.present(group):
            self._half_founded(group, ranks, link)
        self._groups.known(group, ranks)

    def _half_founded(self, key: str, ranks: Collection[int], link: Link) -> None:
        """Fail a group that some ranks have founded, while others still wait in its meeting.

        link: a rank that has founded it and has returned, or one that comes to the meeting. Usually, a former hub ended
        before its answer had reached all ranks. This hub cannot repeat the answer, because it does not know the facts
        of the ranks that have met.
        """
        name = group_name(key)
        if link.returned_in == self._epoch:
            why: Error = PeerLost(f"the scheduler was started again while the ranks created group {name}")
        else:
            why = Aborted(f"{link} creates group {name}, which its ranks have created already", [link.number])
        self._groups.known(key, ranks).set_verdict(why)
        self._answer(self._meetings.end(key, why))

    def _on_saw(self, link: Link, group: str, kind: str, text: str, ranks: list[Any], waiting_for: list[Any]) -> None:
        """A process that has returned knows a verdict, which this scheduler may not know."""
        verdict = make(kind, text, self._roster.known(ranks), self._roster.known(waiting_for))
        if not group:
            if link.returned_in < self._epoch:
                return  # the abort was of an earlier epoch, and this rank waits for the next one
            self._abort_epoch(verdict)
        self._groups.set_verdict(group, verdict)

    # -- launchers of other hosts

    def _without_launcher(self, ranks: Sequence[int], why: str) -> None:
        """No launcher starts or restarts these ranks any more."""
        ended = self._ended_well | self._ended_badly.keys()
        for rank in [rank for rank in ranks if rank not in ended]:
            member = self._roster.at(rank)
            if member is not None and member.left:  # the rank said bye; only the report on how it ended is missing
                self._ended_well.add(rank)
            elif self._restarts:
                self._ended_badly.setdefault(rank, why)
            elif member is None:
                self._process_ended(rank, why, badly=True, again=False)
        self._begin_epoch()  # if there can be no new epoch, this tells the ranks that wait for it

    def _contested(self, who: str, seconds: float) -> None:
        """A process tried to serve another job at our port, and could not. That job was started `seconds` ago.

        The ranks of that job connect to this hub instead. If a rank joined after the start of that job, it may belong
        to either job, so neither job can continue.
        """
        self._log(f"{who} wanted to serve another job at this port")
        now = time.monotonic()
        settled = self._welcomed and all(now - link.since > seconds for link in self._roster)
        if settled or self._never_began or self.state.over:
            return
        why = (
            f"two jobs were started at {self._roster.address}, here and by {who}: which job's {self._roster.plural} "
            "joined is unclear, so neither job can go on. Give each job its own port or MSCOMM_JOB_ID"
        )
        self._contested_until = now + _CONTESTED_S
        if not self._welcomed:
            self._refuse_all(why)
            return
        self._groups.failed(UNKNOWN_RANK, "", Aborted(why), -1, "")
        self._abort_epoch(Aborted(why))
        self._give_up(Aborted(why))

    # -- control frames to the ranks

    def _send(self, link: Link, frame: Frame) -> None:
        self._board.write(link, encode(frame, FROM_HUB_BYTES))

    def _answer(self, answers: Iterable[Answer]) -> None:
        for ranks, frame in answers:
            data = encode(frame, FROM_HUB_BYTES)
            for link in map(self._roster.at, ranks):
                if link and not link.left:
                    self._board.write(link, data)

    def _broadcast(self, frame: Frame, ranks: Collection[int]) -> None:
        """Send the frame to these ranks, and to processes without a rank.

        Do not send it to processes that have left or that wait for the next epoch.
        """
        data = encode(frame, FROM_HUB_BYTES)
        for link in self._roster:
            if not link.left and not link.waits and (link.rank is None or link.rank in ranks):
                self._board.write(link, data)

    def _refuse(self, link: Link, why: str) -> None:
        self._send(link, {"t": "refused", "why": why})
        if link.open:
            self._board.drop(link)

    def _refuse_all(self, why: str) -> None:
        """Refuse all processes that have joined, because the job can never begin."""
        self._topo_until, self._never_began = None, why
        self._waiting.end()
        self._log(why)
        for link in self._roster:
            self._refuse(link, why)


FROM_RANKS = handlers(Hub)
