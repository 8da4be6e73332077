"""Meetings, in which ranks wait for each other and exchange facts. This module does no I/O.

A meeting has a key, which all its ranks use, and a human-readable name. A meeting ends for all its ranks at once,
either with the facts of all ranks or with the reason why the meeting cannot take place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from mscomm.cluster.frames import Frame
from mscomm.cluster.judge import Judge
from mscomm.errors import Aborted, CollectiveTimeout, Error, Mismatch, PeerLost


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
        self.refused: Error | None = None  # why a rank refused to meet
        self.told: set[int] = set()  # ranks that know about the refusal; the others are told when they arrive

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
        # The ranks that met in each meeting of survivors. An entry is removed when one of its ranks is lost.
        self._shrunk: list[list[int]] = []

    def come(self, rank: int, key: str, name: str, ranks: list[int], facts: Frame, survivors: bool) -> Iterable[Answer]:
        """Handle the arrival of a rank at the meeting. survivors: whether to wait only for ranks that are not lost."""
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
                return [*self._cancel(other_key, error), *self._cancel(key, error)]
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
        meeting.refused = Aborted(why, [rank])
        answer = unmet(meeting.here, key, meeting.refused)
        self._tell(key, {rank, *meeting.facts})
        meeting.facts.clear()
        return [answer]

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
        """End all meetings."""
        return [answer for key in list(self._open) for answer in self._cancel(key, why)]

    @staticmethod
    def _wait_for_each_other(one: _Meeting, other: _Meeting) -> bool:
        return any(r in other.missing for r in one.here) and any(r in one.missing for r in other.here)

    def _look(self, key: str) -> list[Answer]:
        meeting = self._open[key]
        lost = {rank: why for rank in meeting.ranks if (why := self._gone(rank)) is not None}
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
        meeting = self._open.pop(key)
        return [unmet(meeting.here, key, why)]
