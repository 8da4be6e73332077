"""Decides when a scheduler that was started again stops waiting for a worker of its job. Does no I/O.

Workers that are alive return soon, because they try to connect several times a second. So the scheduler first waits
RETURN_S. During this time, it admits no process in place of a worker, and believes no report that a worker is lost.
After that, it gives up a worker at once if a report says that the worker is lost, or if a new process has the worker's
node id. It gives up any other worker after MS_NODE_TIMEOUT, because the worker's host may be out of reach.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from mscomm.cluster.links import node_timeout_s
from mscomm.cluster.roster import Link, Roster

RETURN_S = 2.0


class Returning:
    """The workers that an earlier scheduler of the job knew, and that have not returned to this one.

    `claims`: for each such rank, the new process with its node id, and a function that lets this process join.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._since: float | None = None  # when the scheduler began to listen; None if it was not started again
        self._suspects: set[int] = set()
        self._reports: list[Callable[[], None]] = []
        self.claims: dict[int, tuple[Link, Callable[[], None]]] = {}

    def begin(self) -> None:
        """Begin to wait for the ranks that are away."""
        self._since = time.monotonic() if self._roster.away else None

    def suspect(self, ranks: Iterable[int]) -> None:
        """Somebody says that these ranks are lost."""
        self._suspects.update(ranks)

    def later(self, report: Callable[[], None]) -> bool:
        """Keep the report if it is too early to believe it. Return whether it was kept."""
        if self._is_early(time.monotonic()):
            self._reports.append(report)
            return True
        return False

    def due(self) -> float | None:
        """Return when to call lost() again; None if nobody is away."""
        if self._since is None:
            return None
        return self._since + (RETURN_S if self._reports or self._suspects else node_timeout_s())

    def lost(self, now: float) -> list[int]:
        """Return the ranks that have just been given up. Their seats in the roster then count as lost."""
        if self._since is None or self._is_early(now):
            return []
        away = self._roster.away
        lost = away if now >= self._since + node_timeout_s() else [rank for rank in away if rank in self._suspects]
        for rank in lost:
            self._roster.kept[rank].lost = True
        self._suspects.clear()
        if not self._roster.away:
            self._since = None
        return lost

    def believed(self) -> Iterable[Callable[[], None]]:
        """Return the kept reports, and what lets the new processes join, if it is no longer too early for them."""
        if self._is_early(time.monotonic()):
            return []
        reports, self._reports = self._reports, []
        claims = [join for rank, (_, join) in self.claims.items() if rank not in self._roster.away]
        self.claims = {rank: claim for rank, claim in self.claims.items() if rank in self._roster.away}
        return [*reports, *claims]

    def _is_early(self, now: float) -> bool:
        return self._since is not None and bool(self._roster.away) and now < self._since + RETURN_S
