"""The groups of the job's current epoch, and the first failure of each group. This module does no I/O.

Each group has a judge (judge.py), which decides which failure was the first. The hub says what has happened to a rank,
and this module tells the judges of the rank's groups. look() yields the frames to send to the ranks: the verdicts, and
the questions that a judge must ask before its verdict.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from mscomm.cluster.frames import Frame
from mscomm.cluster.judge import Judge, Progress
from mscomm.cluster.plan import group_name, world_id
from mscomm.cluster.roster import Roster
from mscomm.errors import Error


class Notice(NamedTuple):
    """A control frame for the ranks of a group."""

    group: Group
    frame: Frame


def verdict_frame(id: str, verdict: Error) -> Frame:
    """Return the frame with the verdict on the group with this id, or on all groups if the id is empty."""
    return {"t": "verdict", "group": id, **verdict.fields()}


class Group:
    """What the hub knows about a group: its ranks and its first failure."""

    def __init__(self, id: str, ranks: frozenset[int], judge: Judge) -> None:
        self.id = id
        self.ranks = ranks
        self.judge = judge
        self.announced: Error | None = None  # the verdict that was sent to the group
        self.closed: set[int] = set()  # the ranks that have destroyed the group
        self.rejoining: set[int] = set()  # the ranks in `closed` that destroyed the group after the world had failed

    def failed(self, rank: int, error: Error, number: int = -1) -> None:
        """Tell the judge about an error of this rank, which the rank reported or the hub noticed."""
        self.judge.failed(rank, error, number, time.monotonic())

    def set_verdict(self, why: Error) -> None:
        """Make this the verdict, unless there is one already."""
        self.judge.verdict = self.judge.verdict or why


class Groups:
    """All groups of the current epoch.

    `watched`, `restarts`: see Judge. `log`: a function that writes a short line to the log. `world`: the group of all
    ranks. `aborted`: why all groups of this epoch are aborted, even those created later; None if they are not.
    """

    world: Group
    aborted: Error | None

    def __init__(
        self, roster: Roster, epoch: int, *, watched: bool, restarts: bool, log: Callable[[str], None]
    ) -> None:
        self._roster = roster
        self._watched = watched
        self._restarts = restarts
        self._log = log
        self._by_id: dict[str, Group] = {}
        self.begin(epoch)

    def begin(self, epoch: int) -> None:
        """Begin an epoch. The world is its only group."""
        self.aborted, self._abort_announced = None, False
        self._by_id.clear()
        self.world = self.found(world_id(epoch), range(self._roster.size))

    def found(self, id: str, ranks: Collection[int]) -> Group:
        """Add a group, and tell its judge which of its ranks have left the job before."""
        judge = Judge(self._roster.name, lambda: self.members(group), group_name(id), self._watched, self._restarts)
        group = self._by_id[id] = Group(id, frozenset(ranks), judge)
        for rank in self._roster.left:
            if rank in group.ranks:
                judge.left(rank, 0, time.monotonic())
        return group

    def known(self, id: str, ranks: Collection[int]) -> Group:
        """Return the group with this id. If an earlier hub has founded it, found it here, too."""
        return self.get(id) or self.found(id, ranks)

    def get(self, id: str) -> Group | None:
        """Return the group with this id; None if there is none in this epoch."""
        return self._by_id.get(id)

    def members(self, group: Group) -> list[int]:
        """Return the ranks that the hub can ask: they are still in the group and have an open control link."""
        return [
            link.number
            for link in self._roster
            if link.open
            and not link.left
            and link.number not in group.closed
            and (group is self.world or link.number in group.ranks)
        ]

    def __iter__(self) -> Iterator[Group]:
        return iter(self._by_id.values())

    def _named(self, id: str) -> list[Group]:
        return [group for group in self if id in ("", group.id)]

    def _of(self, rank: int) -> list[Group]:
        return [group for group in self if group is self.world or rank in group.ranks]

    # -- what happens to a rank

    def process_ended(self, rank: int, how: str, badly: bool) -> None:
        """The launcher says how the rank's process ended. badly: whether the process failed."""
        for group in self._of(rank):
            group.judge.process_ended(rank, how, badly, time.monotonic())

    def lost(self, rank: int, how: str) -> None:
        """The rank's control link ended without a bye."""
        for group in self._of(rank):
            group.judge.gone(rank, how, time.monotonic())

    def left(self, rank: int, number: int, numbers: Mapping[str, Any]) -> None:
        """The rank has left the job. number: of its last call in the world; numbers: the same for the other groups."""
        for group in self._of(rank):
            if group is self.world:
                group.judge.left(rank, number, time.monotonic())
            elif rank not in group.closed:
                last = numbers.get(group.id)
                group.judge.left(rank, last if isinstance(last, int) else 0, time.monotonic())

    def destroyed(self, rank: int, id: str, number: int) -> bool:
        """The rank has destroyed the group after call `number`. Return whether other ranks must be told.

        That a rank destroys a group is a failure only if another rank is waiting for this rank.
        """
        group = self.get(id)
        if group is None or group is self.world or rank not in group.ranks or rank in group.closed:
            return False
        group.closed.add(rank)
        if self._restarts and self.world.judge.verdict:
            # Other ranks may report this rank as lost before its "rejoin" arrives. Then _explained() must find it here.
            group.rejoining.add(rank)
        if not self.members(group) and not self._roster.away:
            del self._by_id[id]
            return False
        group.judge.left(rank, number, time.monotonic(), destroyed=True)
        return True

    def failed(self, rank: int, id: str, error: Error, number: int, call: str) -> None:
        """The rank reports an error of its call `number` in this group, or in all groups if the id is empty."""
        for group in self._named(id):
            group.judge.called(rank, number, call, time.monotonic())
            group.failed(rank, error, number)

    def compare(self, rank: int, id: str, number: int, call: str) -> None:
        """The rank is stuck in this call, and asks for a comparison of what the ranks have called."""
        if group := self.get(id):
            group.judge.compare(rank, number, call, time.monotonic())

    def here(self, rank: int, id: str, asked: int, call: str, progress: Progress) -> None:
        """The rank answers "where are you". asked, call: the number that the hub asked about, and the rank's call."""
        if group := self.get(id):
            group.judge.called(rank, asked, call, time.monotonic())
            group.judge.here(rank, progress, time.monotonic())

    # -- verdicts

    def abort(self, why: Error) -> bool:
        """Abort all groups of this epoch, also those created later. Return False if they were aborted before."""
        if self.aborted:
            return False
        self.aborted = why
        return True

    def set_verdict(self, id: str, why: Error) -> None:
        """Make this the verdict on the group, or on all groups if the id is empty, except on groups that have one."""
        for group in self._named(id):
            group.set_verdict(why)

    def due(self) -> list[float]:
        """Return when to call look() again, if no event occurs before that."""
        return [due for group in self if (due := group.judge.due()) is not None]

    def look(self, now: float) -> Iterator[Notice]:
        """Let each judge reach its verdict if it can. Yield the frames that are due.

        The caller must send each frame before it takes the next one.
        """
        for group in list(self):
            judge = group.judge
            judge.look(now)
            if judge.ask is not None:
                number, judge.ask = judge.ask, None
                yield Notice(group, {"t": "where", "group": group.id, "number": number})
            if judge.verdict and not group.announced:
                verdict = group.announced = self._explained(judge.verdict, group)
                self._log(f"verdict on {group.id}: {verdict.kind}: {verdict}")
                yield Notice(group, verdict_frame(group.id, verdict))
        if self.aborted and not self._abort_announced:
            # This frame comes last, because groups that failed earlier must first get their own verdicts, above.
            self._abort_announced = True
            yield Notice(self.world, verdict_frame("", self.aborted))

    def verdicts_for(self, rank: int) -> Iterator[Frame]:
        """Yield the frames with the verdicts on the rank's groups, for a process that may not have got them."""
        for group in self:
            if group.announced and rank in group.ranks:
                yield verdict_frame(group.id, group.announced)
        if self.aborted and self._abort_announced:
            yield verdict_frame("", self.aborted)

    def _explained(self, verdict: Error, group: Group) -> Error:
        """Return the verdict to announce. It differs from `verdict` if a rank left this group because of a failure.

        If the rank may have left because another group failed, add that failure. If the rank left to wait for the next
        epoch, return the world's verdict instead of this group's.
        """
        if verdict.kind != "PeerLost":
            return verdict
        first = self.world.judge.verdict
        leaving = (link for link in self._roster if (link.waits and link.welcomed) or link.number in group.rejoining)
        waiting = [link for link in leaving if link.number in verdict.ranks]
        if first and waiting and group is not self.world:
            return first.again(f"{first}; {waiting[0]} therefore left this group for the next epoch")
        left = set(self._roster.left).intersection(verdict.ranks)
        for other in self:
            if other is not group and other.announced and left.intersection(other.ranks):
                return verdict.again(f"{verdict}; before that another group of that rank failed: {other.announced}")
        return verdict
