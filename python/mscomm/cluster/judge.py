"""Decides which failure was the first, by the rules in docs/design/0001-call.md, "What ends a call early".

The hub tells the judge what each rank reported, how each rank ended, and when. The judge reaches one verdict. It does
no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from mscomm.errors import CollectiveTimeout, Error, PeerLost

CALLS_WITHIN_S = 1.0  # after a mismatch: how long the ranks may take to say which call they made
# After a mismatch, some ranks may not have made the call yet. They are asked again after this time, and then after
# intervals that double, so that a large job gets few questions.
ASKED_AGAIN_S = 0.03
BELIEVED_AFTER_S = 0.2  # how long the judge waits for a report from the rank that a symptom names
ANSWERS_WITHIN_S = 0.3  # how long the ranks may take to answer "where are you"
REASON_WITHIN_S = 0.5  # how long the launcher may take to say how a process ended
RESTARTED_WITHIN_S = 0.1  # replaces REASON_WITHIN_S if ranks are restarted: survivors rejoin only after the verdict
# The minimum time between two comparisons of what the ranks have called. There is a minimum, because every rank that is
# stuck in a call asks for a comparison.
ASKED_EVERY_S = 1.0
_CALLS_KEPT = 16
# The last words of a symptom's text if the peer has closed the link (csrc/net/stream.cc). A rank closes its links when
# its group is broken, so such a symptom is the consequence of an earlier failure.
_CLOSED = ("closed by the other side", "Broken pipe", "Connection reset by peer")


class Progress(NamedTuple):
    """How far a rank has got: the number of its latest call, whether it is inside this call, and text for messages."""

    number: int
    inside: bool
    text: str


class _Symptom(NamedTuple):
    """A rank's report that other ranks are lost, or that a device library failed, perhaps because a rank is lost."""

    reporter: int
    error: Error
    until: float  # when the symptom becomes the verdict, if its cause has not been found by then


class _Question(NamedTuple):
    """What the hub has asked the ranks before the verdict: where they are, or which call they made."""

    error: Error  # the timeout to explain, or a Mismatch that may not name all ranks
    number: int  # the number of the call that timed out, or of the calls that differ
    until: float  # when to stop waiting for answers
    unanswered: set[int]  # the ranks that have not said where they are, or whose call is not known


class Judge:
    """Receives events and reaches at most one verdict.

    `name(rank)`: the name of the rank in messages. `members()`: the ranks that can be asked. `group`: the name of the
    group. `watched`: whether a launcher reports how processes end. `restarts`: whether lost ranks may be restarted.
    """

    def __init__(
        self,
        name: Callable[[int], str],
        members: Callable[[], Iterable[int]],
        group: str = "world",
        watched: bool = False,
        restarts: bool = False,
    ) -> None:
        self.verdict: Error | None = None  # the first cause, which every rank of the group raises
        # The number of a call, if the hub must now ask all ranks where they are and which call with this number they
        # made. The hub resets it to None.
        self.ask: int | None = None
        self._name = name
        self._members = members
        self._group = group
        self._watched = watched
        self._reason_s = RESTARTED_WITHIN_S if restarts else REASON_WITHIN_S
        self._spoke: set[int] = set()
        self._left: dict[int, int] = {}  # for each rank that has left, the number of its final call
        self._destroyed: set[int] = set()  # the ranks in _left that left only the group, not the job
        self._ends: dict[int, str] = {}  # for each rank whose process has ended, how it ended, as the launcher says
        # For each lost rank: how it was lost, and until when the judge waits for the launcher to say how the rank's
        # process ended.
        self._gone: dict[int, tuple[str, float]] = {}
        self._symptoms: list[_Symptom] = []
        self._question: _Question | None = None
        self._progress: dict[int, Progress] = {}
        # After a mismatch: when to ask again, and how long to wait after that.
        self._ask_again, self._ask_again_s = 0.0, ASKED_AGAIN_S
        # At most one entry: the number of the call that compare() asked about last, and when it asked.
        self._asked_at: dict[int, float] = {}
        self._calls: dict[int, dict[int, str]] = {}  # for a few call numbers, the call that each rank made

    # -- events that the hub reports

    def failed(self, rank: int, error: Error, number: int, now: float) -> None:
        """A rank reports an error of its call `number`. The number is -1 outside calls, and 0 during set-up."""
        if self.verdict:
            return
        self._spoke.add(rank)
        named = set(error.ranks)
        if error.kind == "Mismatch" and number > 0:
            self._differ(error, number, now)
        elif difference := self._difference():
            if error.kind == "Aborted":  # the hub may be about to abort all groups, so reach the verdict before that
                self._question = difference._replace(until=now)
            elif 0 < number < difference.number:  # the rank will not make the call any more
                difference.unanswered.discard(rank)
        elif self._question:
            self.here(rank, Progress(number, True, str(error)), now)
        elif error.kind == "CollectiveTimeout" and number >= 0:
            self._question = _Question(error, number, now + ANSWERS_WITHIN_S, set(self._members()) - {rank})
            self.ask = number
            self._progress[rank] = Progress(number, True, str(error))
        elif (error.kind == "PeerLost" or (error.kind == "Error" and number >= 0)) and not self._left.keys() & named:
            self._symptoms.append(_Symptom(rank, error, now + BELIEVED_AFTER_S))
        else:
            error = self._how_they_left(error)
            unexplained = self._left.keys() - self._ends.keys() - self._destroyed
            if error.kind == "PeerLost" and self._watched and unexplained & named:
                # A rank that the error names has said bye. Wait until the launcher says how its process ended.
                self._symptoms.append(_Symptom(rank, error, now + self._reason_s))
            elif not self._gone.keys() - {rank}:  # if another rank was lost earlier, look() reports it instead
                self.verdict = error
        self.look(now)

    def compare(self, rank: int, number: int, call: str, now: float) -> None:
        """A rank is stuck in call `number`. Other ranks may have made a different call, so ask all ranks for theirs."""
        asked_lately = now - self._asked_at.get(number, -ASKED_EVERY_S) < ASKED_EVERY_S
        if not (self.verdict or self._difference() or asked_lately):
            self._asked_at = {number: now}
            self.ask = number
        self.called(rank, number, call, now)

    def called(self, rank: int, number: int, call: str, now: float) -> None:
        """Record what a rank says about its call with this number.

        call: "" if the rank has not made that call, or made it too long ago.
        """
        difference = self._difference()
        if not call or self.verdict or (difference and difference.number != number):
            return
        calls = self._calls.setdefault(number, {})
        calls[rank] = call
        if len(self._calls) > _CALLS_KEPT:
            del self._calls[next(iter(self._calls))]
        if difference:
            difference.unanswered.discard(rank)
        elif len(set(calls.values())) > 1:
            self._differ(self._mismatch(number), number, now)
        self.look(now)

    def _difference(self) -> _Question | None:
        """Return the question for the calls of all ranks, if ranks have made different calls.

        The verdict waits for the answers, because it must name every rank whose call differs.
        """
        return self._question if self._question and self._question.error.kind == "Mismatch" else None

    def _differ(self, error: Error, number: int, now: float) -> None:
        """Ranks have made different calls with this number, so ask all ranks for their calls.

        Do nothing if they have been asked, or if a rank was lost before. If a timeout was reported before, this
        question replaces the question about the timeout, because the difference also explains the timeout.
        """
        if not self._difference() and not self._gone:
            unknown = set(self._members()) - self._calls.get(number, {}).keys()
            self._question = _Question(error, number, now + CALLS_WITHIN_S, unknown)
            self.ask = number
            self._ask_again, self._ask_again_s = now + ASKED_AGAIN_S, 2 * ASKED_AGAIN_S

    def here(self, rank: int, progress: Progress, now: float) -> None:
        """A rank says where it is. Only its first answer counts. A report of an error also counts as an answer."""
        if self._question and not self._difference() and rank in self._question.unanswered:
            self._question.unanswered.remove(rank)
            self._progress[rank] = progress
        self.look(now)

    def left(self, rank: int, number: int, now: float, destroyed: bool = False) -> None:
        """A rank has left the job after call `number`. destroyed: whether it has left only this group."""
        self._left[rank] = number
        if destroyed:
            self._destroyed.add(rank)
            for symptom in self._symptoms:  # a peer may have seen this rank leave before the hub did
                if rank in symptom.error.ranks and not self.verdict and not self._difference():
                    self.verdict = self._how_they_left(symptom.error)
        if self._question:
            self._question.unanswered.discard(rank)
        self.look(now)

    def gone(self, rank: int, how: str, now: float) -> None:
        """A rank's control link ended without a bye. If the rank has reported a symptom, only the symptom counts."""
        if not any(symptom.reporter == rank for symptom in self._symptoms):
            self._gone.setdefault(rank, (how, now + (self._reason_s if self._watched else 0.0)))
        if self._question:
            self._question.unanswered.discard(rank)
        self.look(now)

    def process_ended(self, rank: int, how: str, badly: bool, now: float) -> None:
        """The launcher says how the rank's process ended.

        While the rank's link is open, the end of its process decides nothing. If the process failed after the rank's
        bye, this failure becomes the verdict at once.
        """
        self._ends[rank] = how
        if rank in self._left and badly and not self.verdict and not self._difference():
            self.verdict = PeerLost(f"{self._name(rank)} left the job: {how}", [rank])
        self.look(now)

    # -- finding the verdict

    def due(self) -> float | None:
        """Return when to call look() again if no event occurs before that; None if no decision is pending."""
        if self.verdict:
            return None
        if self._question:
            return min(self._question.until, self._ask_again) if self._difference() else self._question.until
        if self._gone:
            return min(until for _, until in self._gone.values())
        return self._symptoms[0].until if self._symptoms else None

    def look(self, now: float) -> None:
        """Reach the verdict if it can be decided now."""
        if self.verdict:
            return
        if self._question:
            if not self._question.unanswered or now >= self._question.until:
                self.verdict = self._explained(self._question)
            elif self._difference() and now >= self._ask_again:
                self.ask = self._question.number
                self._ask_again, self._ask_again_s = now + self._ask_again_s, 2 * self._ask_again_s
            return
        for rank, (how, until) in self._gone.items():
            if rank in self._ends or until <= now:
                reason = f": {self._ends[rank]}" if rank in self._ends else ""
                self.verdict = PeerLost(f"{self._name(rank)} {how}{reason}", [rank] if rank >= 0 else [])
                return
        if not self._gone and self._symptoms and (now >= self._symptoms[0].until or self._all_named_reported()):
            self.verdict = self._root().error

    def _explained(self, question: _Question) -> Error:
        """Return the error of the question, with what the ranks have answered.

        If fewer than two different calls are known, return a Mismatch as it is: the ranks have not answered, or they
        differ in something that the text of a call does not show.
        """
        if not self._difference():
            return self._timeout(question)
        calls = self._calls.get(question.number, {})
        return self._mismatch(question.number) if len(set(calls.values())) > 1 else question.error

    def _mismatch(self, number: int) -> Error:
        """Return the Mismatch that names all known calls with this number."""
        from mscomm import _core  # imported here because the hub process must start fast

        by_call: dict[str, list[int]] = {}
        for rank, call in sorted(self._calls[number].items()):
            by_call.setdefault(call, []).append(rank)
        return _core.mismatch(f"the ranks of group {self._group}", list(by_call.items()))

    def _timeout(self, question: _Question) -> Error:
        """Return the timeout with the ranks for which the call was waiting."""
        waiting_for, words = set(), []
        for rank in sorted(question.unanswered | self._progress.keys() | self._left.keys() | self._gone.keys()):
            progress = self._progress.get(rank)
            if rank in self._left:
                behind = self._left[rank] < question.number
                how = "destroyed the group" if rank in self._destroyed else "ended well"
                what = f"{how} after call #{self._left[rank]}"
            elif rank in self._gone:
                behind, what = True, "ended without release"
            elif progress is None:
                behind, what = True, f"gave no sign of life within {ANSWERS_WITHIN_S:g} s"
            else:
                behind = progress.number < question.number
                what = progress.text or f"is {'inside' if progress.inside else 'after'} call #{progress.number}"
            if behind:
                waiting_for.add(rank)
                words.append(f"{self._name(rank)}: {what}")
        stuck = "every rank is in that call or has ended it: the links between them are stuck"
        found = "; ".join(words) if words else stuck
        return CollectiveTimeout(f"{question.error}. Waiting for: {found}", question.error.ranks, sorted(waiting_for))

    def _how_they_left(self, error: Error) -> Error:
        """Return the error. If it is a PeerLost about ranks that have left, add to its text how these ranks left."""
        text = str(error)
        for lost in error.ranks if error.kind == "PeerLost" else ():
            if lost not in self._left:
                continue
            # A peer reports this text even if the rank only destroyed the group, because the peer sees no difference.
            seen = f"{self._name(lost)} has left the job"
            words = f"{self._name(lost)} has destroyed the group" if lost in self._destroyed else seen
            text = text.replace(seen, words)
            if words not in text:
                text = f"{words}; {text}"
        return error.again(text)

    def _root(self) -> _Symptom:
        """Return the symptom that becomes the verdict.

        Start with the first symptom. If a rank that this symptom names has also reported a symptom, continue with that
        rank's symptom, and so on. If this leads in a circle, return the first symptom that is not about a closed link.
        """
        by_reporter = {symptom.reporter: symptom for symptom in reversed(self._symptoms)}
        chain = [self._symptoms[0]]
        while nexts := [by_reporter[rank] for rank in chain[-1].error.ranks if rank in by_reporter]:
            if nexts[0] in chain:
                return next((one for one in chain if not str(one.error).endswith(_CLOSED)), chain[0])
            chain.append(nexts[0])
        return chain[-1]

    def _all_named_reported(self) -> bool:
        """Return whether each rank that a symptom names has sent a report. If so, there is nothing left to wait for."""
        # A symptom from NCCL names no rank, because NCCL does not know which rank is lost. So wait for other reports.
        return all(symptom.error.ranks and self._spoke.issuperset(symptom.error.ranks) for symptom in self._symptoms)
