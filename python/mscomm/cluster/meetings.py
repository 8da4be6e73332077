"""Meetings, in which ranks wait for each other and exchange facts. This module does no I/O.

A meeting has a key, which all its ranks use, and a human-readable name. A meeting ends for all its ranks, either with
the facts of all ranks or with the reason why the meeting cannot take place. In the second case, a rank that comes later
is told the reason at once. If a rank that knows the reason comes again, a new meeting with this key begins.

A meeting is forgotten when all its ranks know the reason or cannot come any more. If more than MOST_REFUSED meetings
wait for that, the oldest one is forgotten, too. A rank that comes to it later waits until its deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from mscomm.cluster.frames import Frame
from mscomm.cluster.judge import Judge
from mscomm.errors import Aborted, CollectiveTimeout, Error, Mismatch, PeerLost

MOST_REFUSED = 1000


class Answer(NamedTuple):
    """A control frame, and the ranks to which it is sent."""

    ranks: tuple[int, ...]
    frame: Frame


def unmet(to: tuple[int, ...], key: str, why: Error) -> Answer:
    """Return an answer which says that the meeting cannot take place."""
    return Answer(to, {"t": "unmet", "key": key, **why.fields()})


class _Meeting:
    def __init__(self, name: str, ranks: list[int], survivors: bool) -> None:
        self.name = name
        self.ranks = ranks
        self.survivors = survivors  # whether the meeting waits only for ranks that are not lost
        self.facts: dict[int, Frame] = {}
        self.lacks = False  # whether one of the ranks was gone when they were last checked
        self.refused: Error | None = None  # why the meeting cannot take place
        self.told: set[int] = set()  # the ranks that know `refused`; the others are told when they arrive

    @property
    def here(self) -> tuple[int, ...]:
        return tuple(self.facts)

    @property
    def missing(self) -> list[int]:
        return [rank for rank in self.ranks if rank not in self.facts]


class Meetings:
    """All open meetings of a job.

    `gone(rank)`: why the rank can no longer take part in any meeting, or None if it can. `name(rank)`: the rank's name
    in messages. `judge()`: the judge of the job, which may know why ranks are gone.
    """

    def __init__(
        self, gone: Callable[[int], str | None], name: Callable[[int], str], judge: Callable[[], Judge]
    ) -> None:
        self._gone = gone
        self._name = name
        self._judge = judge
        self._open: dict[str, _Meeting] = {}
        # For each rank that does nothing else while it waits, the key of the meeting where it came last.
        self._waits: dict[int, str] = {}
        # The ranks that met in each meeting of survivors. An entry is removed when one of its ranks is lost.
        self._shrunk: list[list[int]] = []

    def come(
        self, rank: int, key: str, name: str, ranks: list[int], facts: Frame, survivors: bool, alone: bool = False
    ) -> Iterable[Answer]:
        """Handle the arrival of a rank at the meeting.

        survivors: whether to wait only for ranks that are not lost. alone: whether the rank comes to no other meeting
        while it waits in this one.
        """
        meeting = self._open.get(key)
        if meeting is not None and meeting.refused is not None and rank not in meeting.told:
            self._tell(key, {rank})
            return [unmet((rank,), key, meeting.refused)]
        begins = meeting is None or meeting.refused is not None
        if meeting is None or begins:
            meeting = self._open[key] = _Meeting(name, ranks, survivors)
        meeting.facts[rank] = facts
        if ranks != meeting.ranks:
            why = (
                f"{name}: the ranks do not agree on who takes part: "
                f"{self._name(rank)} named {ranks}, not {meeting.ranks}"
            )
            return self._cancel(key, Mismatch(why, [rank]))
        for other_key, other in self._open.items():
            if other_key != key and other.name == name and self._wait_for_each_other(meeting, other):
                text = "; ".join(
                    f"{', '.join(self._name(r) for r in one.here)} named {one.ranks}" for one in (other, meeting)
                )
                why = f"{name}: the ranks do not agree on who takes part: {text}"
                error = Mismatch(why, [r for one in (other, meeting) for r in one.here])
                return self._cancel_together([other_key, key], error)
        if alone:
            self._waits[rank] = key
        if circle := self._circle(rank, key):
            return self._break(circle)
        # look() notices a loss, so an arrival checks all ranks only if the meeting begins, may end, or lacks a rank.
        return self._look(key) if begins or meeting.lacks or len(meeting.facts) >= len(ranks) else []

    def withdraw(self, rank: int, key: str, seconds: float) -> Iterable[Answer]:
        """End the meeting for all its ranks, because this rank's wait has timed out."""
        meeting = self._open.get(key)
        if meeting is None or rank not in meeting.facts:
            return []  # the meeting was over already
        missing = self.missing(key)
        names = ", ".join(map(self._name, missing))
        why = f"{meeting.name}: {self._name(rank)} waited {seconds:g} s for {names}"
        return self._cancel(key, CollectiveTimeout(why, waiting_for=missing))

    def refuse(self, rank: int, key: str, name: str, ranks: list[int], why: str) -> Iterable[Answer]:
        """Handle a rank that gives up a meeting, before or after its arrival.

        Ranks that have arrived are told why at once. The other ranks are told when they arrive.
        """
        meeting = self._open.setdefault(key, _Meeting(name, ranks, False))
        meeting.facts.pop(rank, None)
        meeting.told.add(rank)
        return self._cancel(key, meeting.refused or Aborted(why, [rank]))

    def present(self, key: str) -> tuple[int, ...]:
        """Return the ranks that are waiting in the meeting; none if there is no such meeting."""
        return self._open[key].here if key in self._open else ()

    def missing(self, key: str) -> list[int]:
        """Return the ranks for which the meeting is waiting; none if there is no such meeting."""
        ranks = self._open[key].missing if key in self._open else []
        return [rank for rank in ranks if self._gone(rank) is None]

    @property
    def survivors_go_on(self) -> bool:
        """Whether ranks continue without the lost ranks, or wait in a meeting that does not wait for lost ranks."""
        waiting = any(meeting.survivors and meeting.facts for meeting in self._open.values())
        return waiting or any(self._gone(rank) is None for ranks in self._shrunk for rank in ranks)

    def lost(self, rank: int) -> None:
        """Record that the rank was lost. Survivors in a group with this rank no longer count as continuing."""
        self._shrunk = [ranks for ranks in self._shrunk if rank not in ranks]

    def forget_survivors(self) -> None:
        """Forget which ranks continue without the lost ranks, because a new epoch has begun."""
        self._shrunk.clear()

    def look(self) -> Iterable[Answer]:
        """Check again whether any meeting can end. Call this whenever a rank is lost, leaves, or calls rejoin()."""
        return [answer for key in list(self._open) for answer in self._look(key)]

    def end(self, key: str, why: Error) -> Iterable[Answer]:
        """End this meeting; do nothing if there is no such meeting."""
        return self._cancel(key, why) if key in self._open else []

    def clear(self, why: Error) -> Iterable[Answer]:
        """End all meetings, and forget them."""
        answers = [answer for key in list(self._open) for answer in self.end(key, why)]
        self._open.clear()
        return answers

    @staticmethod
    def _wait_for_each_other(one: _Meeting, other: _Meeting) -> bool:
        return any(r in other.missing for r in one.here) and any(r in one.missing for r in other.here)

    def _circle(self, rank: int, key: str) -> list[tuple[str, int, str]]:
        """Return a circle of meetings that wait for each other, now that the rank has come to this meeting.

        Each item is a meeting, a rank that waits there and comes to no other one, and the meeting that this rank lacks.
        """
        others = (other for other in self._open.values() if other.refused is None)
        if not any(rank in other.ranks and rank not in other.facts for other in others):
            return []
        reached: dict[str, tuple[str, int, str]] = {}
        todo = [key]
        while todo and key not in reached:
            lacks = todo.pop()
            for absent in self.missing(lacks):
                there = self._waits.get(absent, "")
                if there not in reached and there in self._open and absent in self._open[there].facts:
                    reached[there] = there, absent, lacks
                    todo.append(there)
        circle = [reached[key]] if key in reached else []
        while circle and circle[-1][2] != key:
            circle.append(reached[circle[-1][2]])
        return circle

    def _break(self, circle: list[tuple[str, int, str]]) -> list[Answer]:
        """End the meetings of the circle."""
        text = "; ".join(
            f"{self._name(rank)} waits in {self._open[there].name}, and {self._open[lacks].name} waits for it"
            for there, rank, lacks in circle
        )
        why = f"the ranks create groups in different orders, so they wait for each other: {text}"
        advice = "All ranks must create the groups that share ranks in the same order"
        error = Mismatch(f"{why}. {advice}", sorted(rank for _, rank, _ in circle))
        return self._cancel_together([there for there, *_ in circle], error)

    def _cancel_together(self, keys: Sequence[str], why: Error) -> list[Answer]:
        """End the meetings for one reason. Each rank that has arrived at one of them then knows about all of them."""
        here = [rank for key in keys for rank in self._open[key].here]
        for key in keys:
            self._open[key].told.update(here)
        return [answer for key in keys for answer in self._cancel(key, why)]

    def _look(self, key: str) -> list[Answer]:
        meeting = self._open.get(key)
        if meeting is None:  # an earlier answer of look() has ended it
            return []
        lost = {rank: why for rank in meeting.ranks if (why := self._gone(rank)) is not None}
        if meeting.refused is not None:
            self._tell(key, lost)
            return []
        meeting.lacks = bool(lost)
        if lost and not meeting.survivors and self._judge().due() is not None:
            return []  # the hub calls look() when the judge has reached its verdict
        if lost and not meeting.survivors:
            return self._cancel(key, self._explained(meeting, lost))
        for rank in lost:
            meeting.facts.pop(rank, None)  # the rank had arrived, but was lost before all others arrived
        if any(rank not in lost for rank in meeting.missing):
            return []
        del self._open[key]
        ranks = [rank for rank in meeting.ranks if rank in meeting.facts]
        if meeting.survivors:
            self._shrunk.append(ranks)
        frame = {"t": "met", "key": key, "ranks": ranks, "facts": [meeting.facts[rank] for rank in ranks]}
        return [Answer(meeting.here, frame)]

    def _explained(self, meeting: _Meeting, lost: dict[int, str]) -> Error:
        """Return the error for a meeting at which these ranks will not arrive.

        The error also names the first failure of the job.
        """
        first = self._judge().verdict
        told = [str(first) if str(first).startswith(why) else why for why in lost.values()]
        if first is not None and str(first) not in told:
            told.append(f"before that, the job failed: {first}")
        return PeerLost(f"{meeting.name}: {'; '.join(told)}", lost)

    def _tell(self, key: str, ranks: Iterable[int]) -> None:
        meeting = self._open[key]
        meeting.told.update(ranks)
        if meeting.told.issuperset(meeting.ranks):
            del self._open[key]

    def _cancel(self, key: str, why: Error) -> list[Answer]:
        """End the meeting. Ranks that have arrived are told why now, and the other ranks when they arrive."""
        meeting = self._open[key] = self._open.pop(key)  # to the end, because it is the last one that was refused
        meeting.refused = why
        here = meeting.here
        meeting.facts.clear()
        self._tell(key, [*here, *(rank for rank in meeting.ranks if self._gone(rank) is not None)])
        refused = [key for key, meeting in self._open.items() if meeting.refused is not None]
        for oldest in refused[:-MOST_REFUSED]:
            del self._open[oldest]
        return [unmet(here, key, why)] if here else []
