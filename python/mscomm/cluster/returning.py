"""Decides when a scheduler that was started again stops waiting for a worker of its job. Does no I/O.

Workers that are alive return soon, because they try to connect several times a second. So the scheduler first waits
RETURN_S. During this time, it admits no process in place of a worker, and believes no report that a worker is lost.
After that, it gives up a worker at once if a report says that the worker is lost, or if a new process has the worker's
node id. It gives up any other worker MS_NODE_TIMEOUT after the first worker has come, because the worker's host may be
out of reach.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from mscomm.cluster.links import node_timeout_s
from mscomm.cluster.roster import Link, Roster

RETURN_S = 2.0


class Returning:
    """The workers that an earlier scheduler of the job knew, and that have not returned to this one."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._since: float | None = None  # when the scheduler began to listen; None if it was not started again
        self._first_came: float | None = None  # when the first worker came to this scheduler
        self._suspects: set[int] = set()
        self._reports: list[Callable[[], None]] = []
        # For a rank that is away, the new process that wants its seat, and a function that lets this process join.
        self._claims: dict[int, tuple[Link, Callable[[], None]]] = {}
        self._once_back: dict[int, list[Callable[[], None]]] = {}

    def begin(self) -> None:
        """Begin to wait for the ranks that are away."""
        self._since = time.monotonic() if self._roster.away else None

    def came(self) -> None:
        """A worker has returned or joined, so the others can reach the scheduler, too."""
        self._first_came = self._first_came or time.monotonic()

    def suspect(self, ranks: Iterable[int]) -> None:
        """Somebody says that these ranks are lost."""
        self._suspects.update(ranks)

    def later(self, report: Callable[[], None]) -> bool:
        """Keep the report if it is too early to believe it. Return whether it was kept."""
        if self._is_early(time.monotonic()):
            self._reports.append(report)
            return True
        return False

    def claim(self, rank: int, link: Link, join: Callable[[], None]) -> bool:
        """A new process has the node id of a rank that is away. Return False if another such process waits already."""
        if rank in self._claims and self._claims[rank][0].open:
            return False
        self._claims[rank] = link, join
        self._suspects.add(rank)
        return True

    def once_back(self, rank: int, action: Callable[[], None]) -> None:
        """Keep the action for the return of the rank. Do nothing if the rank is not away."""
        if rank in self._roster.away:
            self._once_back.setdefault(rank, []).append(action)

    def kept_for(self, rank: int) -> list[Callable[[], None]]:
        """The rank has returned. Return the actions that were kept for this moment."""
        return self._once_back.pop(rank, [])

    def returned(self, rank: int) -> Link | None:
        """A rank has returned. Return the link of the new process that wanted its seat; None if there is none."""
        claim = self._claims.pop(rank, None)
        return claim[0] if claim else None

    def may_come(self, nobody_came: bool) -> bool:
        """Return whether the scheduler must wait for workers of an earlier scheduler, although no worker is there.

        nobody_came: whether no worker has come yet. They may all have been killed, and be started again later.
        """
        return bool(self._roster.away) or (nobody_came and any(not seat.left for seat in self._roster.kept.values()))

    def due(self) -> float | None:
        """Return when to call lost() again; None if nobody is away."""
        if self._since is None:
            return None
        if self._reports or self._suspects:
            return self._since + RETURN_S
        return self._all_lost_at()

    def _all_lost_at(self) -> float | None:
        """Return when all ranks that are still away count as lost; None if nobody has come yet."""
        return None if self._first_came is None else self._first_came + max(RETURN_S, node_timeout_s())

    def lost(self, now: float) -> list[int]:
        """Return the ranks that have just been given up. Their seats in the roster then count as lost."""
        if self._since is None or self._is_early(now):
            return []
        away, until = self._roster.away, self._all_lost_at()
        lost = away if until is not None and now >= until else [rank for rank in away if rank in self._suspects]
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
        ready = [claim for rank, claim in self._claims.items() if rank not in self._roster.away]
        self._claims = {rank: claim for rank, claim in self._claims.items() if rank in self._roster.away}
        return [*reports, *(join for link, join in ready if link.open)]

    def _is_early(self, now: float) -> bool:
        return self._since is not None and bool(self._roster.away) and now < self._since + RETURN_S
