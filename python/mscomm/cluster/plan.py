"""Who gets which rank, who shares a host, and whether all agree: pure functions of what ranks say of themselves."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mscomm.errors import Mismatch

Facts = Mapping[str, Any]


class Arrival(NamedTuple):
    """A worker as it registered: the id that its user gave it (MS_NODE_ID), or None, and its host."""

    node_id: str | None
    host: str


def assign_ranks(members: Sequence[Arrival]) -> list[int]:
    """The rank of each member, given in the order of registration.

    If every id is a decimal number it is the rank. Otherwise the members of one host are neighbours, hosts in the order
    of their first registration, and inside a host those with an id come first, by id (worker_2 before worker_10), the
    others as they came.
    """
    size = len(members)
    if all(member.node_id is not None and is_number(member.node_id) for member in members):
        ranks = [int(member.node_id or 0) for member in members]
        for rank in ranks:
            if rank >= size:
                raise ValueError(
                    f"MS_NODE_ID={rank}: ids that are numbers are ranks, and this job has the ranks 0 to {size - 1}"
                )
            if ranks.count(rank) > 1:
                raise ValueError(f"MS_NODE_ID={rank} was given to {ranks.count(rank)} workers; each needs its own")
        return ranks
    first_seen = {member.host: place for place, member in reversed(list(enumerate(members)))}

    def place(index: int) -> tuple[Any, ...]:
        member = members[index]
        return first_seen[member.host], member.node_id is None, _natural(member.node_id or ""), index

    ranks = [0] * size
    for rank, index in enumerate(sorted(range(size), key=place)):
        ranks[index] = rank
    return ranks


def is_number(node_id: str) -> bool:
    return node_id.isascii() and node_id.isdecimal()


def _natural(text: str) -> list[tuple[int, int, str]]:
    """A sort key by which worker_2 comes before worker_10."""
    return [(0, int(part), part) if is_number(part) else (1, 0, part) for part in re.split(r"([0-9]+)", text) if part]


def hosts(facts: Sequence[Facts]) -> list[int]:
    """The index of each rank's host: equal "host" facts are one host, and hosts are numbered by their lowest rank."""
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(fact["host"], len(numbers)) for fact in facts]


def world_id(epoch: int) -> str:
    """What control messages call the group of all ranks; the ids of other groups begin with their epoch too."""
    return f"{epoch}:world"


# What must be equal on every rank, and how a user sets it.
SHARED_FACTS = {
    "version": "install the same mscomm everywhere",
    "size": "start every rank with the same number of ranks",
    "backend": "call init() with the same backend on every rank",
    "algo": "set MSCOMM_ALGO to the same text on every rank",
}


def agree(facts: Sequence[Facts], names: Iterable[str] = tuple(SHARED_FACTS)) -> None:
    """Mismatch naming the ranks that differ from rank 0 in a fact that all must share."""
    for name in names:
        expected = facts[0].get(name)
        differing = [rank for rank, fact in enumerate(facts) if fact.get(name) != expected]
        if differing:
            them = ", ".join(f"rank {rank}: {facts[rank].get(name)!r}" for rank in differing[:8])
            more = f" and {len(differing) - 8} more" if len(differing) > 8 else ""
            advice = SHARED_FACTS.get(name, "it must be the same on every rank")
            raise Mismatch(f"the ranks differ in {name}: rank 0: {expected!r}, {them}{more}; {advice}", differing)
