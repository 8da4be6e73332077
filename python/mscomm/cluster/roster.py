"""Keeps track of a job's members: decides who may join, assigns ranks, and says who is missing. Does no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from mscomm.cluster.bytestream import ByteStream
from mscomm.cluster.frames import Frame
from mscomm.cluster.plan import Arrival, assign_ranks, is_number
from mscomm.cluster.recovery_file import Seat
from mscomm.cluster.switchboard import Line


class Link(Line):
    """One control link, and the hub's information about the process at its other end."""

    def __init__(self, stream: ByteStream, rank: int | None, adopted: bool) -> None:
        super().__init__(stream)
        self.adopted = adopted  # whether the rank inherited the other end of a socket pair
        self.rank = rank  # None if not known yet
        self.seat = -1  # the position of the process in the order of joining; -1 if it has not joined
        self.since = 0.0  # when the process joined, in time.monotonic() seconds
        self.left = False
        self.welcomed = False  # whether the process has taken part in an epoch
        self.returned_in = -1  # the epoch of the process when it returned to a scheduler; -1 if it did not return
        self.waits = False  # whether the process waits for the next epoch, and no longer takes part in this one
        self.rejoin_key = ""  # the key of the latest rejoin() of the process; the answer must contain it
        self.node_id: str | None = None
        self.facts: Frame = {}
        self.nonce = b""  # see security.token

    @property
    def joined(self) -> bool:
        return self.seat >= 0

    @property
    def number(self) -> int:
        """The rank or, before ranks are assigned, a negative number derived from the seat."""
        return self.rank if self.rank is not None else -1 - self.seat

    def __str__(self) -> str:
        return _named(self.rank, self.node_id, self.facts)


def _named(rank: int | None, node_id: str | None, facts: Frame) -> str:
    who = f"rank {rank}" if rank is not None else f"worker {node_id}" if node_id else "a worker"
    host = facts.get("hostname", facts.get("host", "?"))
    return f"{who} (pid {facts['pid']} on host {host})" if "pid" in facts else who


class Roster:
    """The members of a job of `size` ranks in the order of joining, including members that have ended.

    `kept`: the seats that an earlier scheduler of the job gave out, and that no process has taken again from this one.
    """

    def __init__(self, size: int, ranks_known: bool, kept: Iterable[Seat] = ()) -> None:
        self.size = size
        self.address = ""  # the address where members join, as text for messages
        self.plural = "ranks" if ranks_known else "workers"
        self.ranks_known = ranks_known
        self._members: list[Link] = []
        self._by_number: dict[int, Link] = {}  # by Link.number
        self._by_id: dict[str, Link] = {}  # by node id, for members that have one
        self.kept = {seat.rank: seat for seat in kept}  # by rank

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Link]:
        return iter(self._members)

    def admit(self, link: Link, rank: Any, node_id: Any, facts: Frame) -> str | None:
        """Give the newcomer a seat, or return why it cannot have one."""
        link.facts, link.node_id = facts, node_id if isinstance(node_id, str) else None
        refusal = self._objection(link, rank)
        if refusal is None:
            link.rank = link.rank if link.rank is not None else rank
            kept = self.kept_by(link.node_id)
            if kept:
                link.rank = kept.rank
            self.seat(link, self._holder(link, link.rank))
        return refusal

    def seat(self, link: Link, former: Link | None) -> None:
        """Give the link a seat: the seat of the former member or, if there is none, a new one."""
        if former:
            link.rank, link.seat = former.rank, former.seat
            self._members[link.seat] = link
        else:
            link.seat = len(self._members)
            self._members.append(link)
        if link.rank is not None:
            self.kept.pop(link.rank, None)
        self._index(link)

    def kept_by(self, node_id: str | None) -> Seat | None:
        """Return the kept seat of this node id; None if there is none."""
        return next((seat for seat in self.kept.values() if node_id and seat.node_id == node_id), None)

    @property
    def away(self) -> list[int]:
        """The ranks that an earlier scheduler knew, and that may still return to this one."""
        return [rank for rank, seat in self.kept.items() if not (seat.left or seat.lost)]

    def seats(self) -> list[Seat]:
        """Return all seats, for the recovery file."""
        here = [Seat(link.number, link.node_id, link.nonce, link.facts, link.left) for link in self._members]
        return sorted([*here, *self.kept.values()], key=lambda seat: seat.rank)

    @property
    def left(self) -> list[int]:
        """The ranks that have left the job."""
        here = [link.number for link in self._members if link.left]
        return sorted([*here, *(rank for rank, seat in self.kept.items() if seat.left)])

    def _holder(self, link: Link, rank: Any) -> Link | None:
        """Return the member that already has the rank or the id that the newcomer claims; None if no member has it."""
        if self.ranks_known:
            return self.at(rank)
        return self._by_id.get(link.node_id or "")

    def _index(self, link: Link) -> None:
        self._by_number[link.number] = link
        if link.node_id:
            self._by_id[link.node_id] = link

    def gone(self, rank: int) -> str | None:
        """Return why the rank no longer takes part in this epoch; None if it takes part, or may still join."""
        link = self.at(rank)
        if link is None and rank in self.kept and rank not in self.away:
            left = self.kept[rank].left
            return f"{self.name(rank)} {'has left the job' if left else 'did not return to the scheduler'}"
        if link is None or (link.open and not link.left and not link.waits):
            return None
        if link.waits:
            return f"{link} waits for the next epoch of the job: call rejoin() too"
        return f"{link} has left the job" if link.left else f"{link} ended without release"

    def known(self, ranks: list[Any]) -> list[int]:
        """Return the values that are ranks of the job. ranks: values from a control frame, which may be invalid."""
        return [rank for rank in ranks if isinstance(rank, int) and 0 <= rank < self.size]

    def at(self, number: int) -> Link | None:
        """Return the member with this Link.number; None if no member has it."""
        return self._by_number.get(number)

    def forget(self, link: Link) -> None:
        """Remove a member that ended before the job began; it may join again."""
        self._members.remove(link)
        for seat, member in enumerate(self._members):
            member.seat = seat
        self._index_all()

    def _index_all(self) -> None:
        self._by_number.clear()
        self._by_id.clear()
        for link in self._members:
            self._index(link)

    def _objection(self, link: Link, rank: Any) -> str | None:
        size = link.facts.get("size", self.size)
        if size != self.size:
            setting = "the number of ranks" if self.ranks_known else "MS_WORKER_NUM"
            return (
                f"{setting} is {size} here and {self.size} at the scheduler: give both the same, or this job another "
                "port if the scheduler is another job's"
            )
        if self.ranks_known:
            if link.rank is not None and rank not in (None, link.rank):
                return f"it is rank {link.rank} by its connection and wants to join as rank {rank}"
            rank = rank if link.rank is None else link.rank
            if not isinstance(rank, int) or not 0 <= rank < self.size:
                return f"rank {rank!r} is not one of 0 to {self.size - 1}"
            holder = self._holder(link, rank)
            if holder and (holder.open or holder.left):
                return f"rank {rank} is taken already: {holder}; was it started twice, or by another job at this port?"
        else:
            if rank is not None or link.rank is not None:
                return "the scheduler gives out the ranks of this job; set MS_NODE_ID to a number to choose one"
            holder = self._holder(link, None)
            if holder and (holder.open or holder.left):
                return f"MS_NODE_ID={link.node_id} is taken already: {holder}; look for leftovers of an earlier start"
        kept = self.kept_by(link.node_id)
        if kept and kept.left:
            return f"{self.name(kept.rank)} has left the job, which is not over for the other ranks"
        if self.kept and link.node_id is None:
            return "the scheduler was started again: give this worker the MS_NODE_ID that it had before"
        if len(self._members) + len(self.kept) >= self.size and not (holder or kept):
            return (
                f"the job at {self.address} already has its {self.size} {self.plural}: one too many was started, or "
                "this one is of another job that uses the same port. Give each job a port of its own"
            )
        return None

    def assign(self) -> None:
        """Assign a rank to each member, after all have joined. Raise ValueError if numeric ids are not valid ranks."""
        if any(link.rank is None for link in self._members):
            arrivals = [
                Arrival(link.node_id, *(str(link.facts.get(name, "")) for name in ("link", "hostname", "host")))
                for link in self._members
            ]
            for link, rank in zip(self._members, assign_ranks(arrivals), strict=True):
                link.rank = rank
            self._index_all()

    def facts(self) -> list[Frame]:
        """Return the facts of all members, in the order of their ranks."""
        return [link.facts for link in sorted(self._members, key=lambda link: link.number)]

    def name(self, number: int) -> str:
        """Return the name that messages use for the member with this Link.number."""
        if (seat := self.kept.get(number)) is not None:
            return _named(number, seat.node_id, seat.facts)
        return str(self.at(number) or f"rank {number}")

    def missing(self) -> str:
        """Return, as text, the ranks that have not joined: their numbers or, if unknown, how many are missing."""
        ranks = self._numbers()
        if len(ranks) < len(self._members):
            return f"{self.size - len(self._members)} more {self.plural}"
        absent = ", ".join(str(rank) for rank in range(self.size) if rank not in ranks)
        return f"rank {absent}" if absent else ""

    def _numbers(self) -> list[int]:
        """Return the ranks of the members, as far as they are known before ranks are assigned."""
        if self.ranks_known:
            return [link.number for link in self._members]
        return [int(link.node_id) for link in self._members if link.node_id and is_number(link.node_id)]

    def too_few(self, timeout_s: float) -> str:
        """Return the message that says which ranks did not join in time."""
        came = len(self._members)
        text = f"only {came} of {self.size} {self.plural} joined within {timeout_s:g} s (MS_TOPO_TIMEOUT)"
        if len(self._numbers()) < came:
            return f"{text}: {self.size - came} missing; here are: {'; '.join(map(str, self._members))}"
        return f"{text}: missing {self.missing()}; look at their output, they may have failed before init()"
