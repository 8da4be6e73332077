"""Pure functions of the ranks' facts. They assign ranks, find ranks on one host, and check that all ranks agree."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mscomm.errors import Mismatch

Facts = Mapping[str, Any]


class Arrival(NamedTuple):
    """What a worker says when it registers.

    node_id: MS_NODE_ID; None if the user has not set it. address: the address from which the worker has connected; ""
    on the scheduler's host. hostname: the name of its host. host: the id of its host, the same for all its processes.
    """

    node_id: str | None
    address: str
    hostname: str
    host: str


def assign_ranks(members: Sequence[Arrival]) -> list[int]:
    """Return the rank of each member. `members` is in the order of registration.

    If every id is a decimal number, the ids are the ranks. Otherwise, the members on one host get consecutive ranks.
    The scheduler's host comes first, and the other hosts follow in the order of their addresses. Within a host, members
    with an id come first, in the order of the ids; the others follow in the order of registration. Numbers inside
    addresses and ids are compared as numbers: worker_2 comes before worker_10. So if all members have ids, the same
    members get the same ranks at each start.
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
    # One host can have several addresses. Its place is that of its lowest address.
    places: dict[str, Any] = {}
    for member in members:
        here = (_natural(member.address), _natural(member.hostname), member.host)
        places[member.host] = min(here, places.get(member.host, here))

    def place(index: int) -> tuple[Any, ...]:
        member = members[index]
        return places[member.host], member.node_id is None, _natural(member.node_id or ""), index

    ranks = [0] * size
    for rank, index in enumerate(sorted(range(size), key=place)):
        ranks[index] = rank
    return ranks


def is_number(node_id: str) -> bool:
    """Return whether the id is a number that can be a rank. int() refuses a number with thousands of digits."""
    return node_id.isascii() and node_id.isdecimal() and len(node_id) < 20


def _natural(text: str) -> list[tuple[int, int, str]]:
    """Return a sort key that sorts worker_2 before worker_10."""
    return [(0, int(part), part) if is_number(part) else (1, 0, part) for part in re.split(r"([0-9]+)", text) if part]


def hosts(facts: Sequence[Facts]) -> list[int]:
    """Return the index of each rank's host.

    Ranks with equal "host" facts are on the same host. Hosts are ordered by their first rank.
    """
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(fact["host"], len(numbers)) for fact in facts]


def numbers(ranks: Sequence[int]) -> str:
    """Return the ranks as text: for three or more consecutive ranks a range such as "0 to 7", otherwise a list."""
    whole = list(ranks) == list(range(ranks[0], ranks[0] + len(ranks)))
    return f"{ranks[0]} to {ranks[-1]}" if whole and len(ranks) > 2 else ", ".join(map(str, ranks))


def named(ranks: Sequence[int]) -> str:
    """Return the ranks as text: rank 3; ranks 2, 3; ranks 8 to 15."""
    return f"rank{'s' * (len(ranks) > 1)} {numbers(ranks)}"


def world_id(epoch: int) -> str:
    """Return the id of the world group in control frames. It begins with the epoch, like the ids of all groups."""
    return f"{epoch}:world"


def group_id(epoch: int, name: str, ranks: Sequence[int], turn: int) -> str:
    """Return the id of a group. turn: 1 for the first group with this name and these ranks, 2 for the next, ..."""
    digest = hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
    return world_id(epoch) if name == "world" else f"{epoch}:{name}:{digest}:{turn}"


def group_name(id: str) -> str:
    """Return the name of the group with this id."""
    return re.sub(r"^\d+:|:[0-9a-f]{16}:\d+$", "", id)


# The facts that must be equal on every rank, with advice for a user whose ranks differ.
SHARED_FACTS = {
    "version": "install the same mscomm everywhere",
    "size": "start every rank with the same number of ranks",
    "backend": "call init() with the same backend on every rank",
    "job": "give join() the same name on every rank, and join jobs of one name in the same order",
    "algo": "set MSCOMM_ALGO to the same text on every rank",
}


def agree(facts: Sequence[Facts]) -> None:
    """Raise a Mismatch if a fact that must be equal differs. The Mismatch names the ranks that differ from rank 0."""
    for name, advice in SHARED_FACTS.items():
        expected = facts[0].get(name)
        differing = [rank for rank, fact in enumerate(facts) if fact.get(name) != expected]
        if differing:
            them = ", ".join(f"rank {rank}: {facts[rank].get(name)!r}" for rank in differing[:8])
            more = f" and {len(differing) - 8} more" if len(differing) > 8 else ""
            raise Mismatch(f"the ranks differ in {name}: rank 0: {expected!r}, {them}{more}; {advice}", differing)
