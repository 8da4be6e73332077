"""Which algorithm is chosen, depending on the ranks, the hosts and the size of the message."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from ranks import ranks

import mscomm
from mscomm import _core
from mscomm.job import resolve

NONE = [""] * len(_core.collectives)


def chosen(what: str, hosts: list[int], forced: list[str] = NONE) -> list[str]:
    return _core.Layout(hosts=hosts, rank=0, forced=forced).rows(list(_core.collectives).index(what))


def test_the_carrier_follows_from_the_hosts():
    assert chosen("all_reduce", [0, 0, 0]) == ["arena"]
    assert chosen("all_reduce", [0, 0, 1, 1]) == chosen("all_reduce", [0, 1, 1]) == chosen("all_reduce", [0, 1, 0])
    assert chosen("all_reduce", [0, 1, 0]) == ["hierarchical"]
    assert chosen("all_reduce", [0, 1, 2]) == ["bruck", "direct"]
    assert chosen("all_gather", [0, 0, 1]) == ["hierarchical"]
    assert chosen("all_to_all", [0, 0, 1]) == ["direct"]


@pytest.mark.parametrize(
    ("hosts", "rank", "forced", "at_home", "arena", "mesh"),
    [
        ([0], 0, "", [0], False, False),
        ([0, 0, 0], 1, "", [0, 1, 2], True, False),
        ([0, 0], 1, "direct", [0, 1], False, True),
        ([0, 0], 1, "hierarchical", [0, 1], True, True),
        ([0, 1, 0], 2, "", [0, 2], True, True),
        ([0, 1, 0], 2, "direct", [0, 2], True, True),  # for the other collectives
        ([0, 1, 0], 1, "", [1], False, True),
        ([0, 1, 2], 2, "", [2], False, True),
    ],
)
def test_the_layout_says_what_a_rank_sets_up(hosts, rank, forced, at_home, arena, mesh):
    algorithms = [forced if what == "all_reduce" else "" for what in _core.collectives]
    layout = _core.Layout(hosts=hosts, rank=rank, forced=algorithms)
    assert (layout.rank, layout.at_home, layout.arena, layout.mesh) == (rank, at_home, arena, mesh)


def test_the_arena_cannot_be_forced_on_several_hosts():
    forced = ["arena" if what == "all_reduce" else "" for what in _core.collectives]
    with pytest.raises(ValueError, match="MSCOMM_ALGO: arena needs all ranks on one host"):
        _core.Layout(hosts=[0, 1], rank=0, forced=forced)


def test_what_is_forced_is_not_asked_about_its_size():
    forced = ["tree" if what == "broadcast" else "" for what in _core.collectives]
    assert chosen("broadcast", [0, 1, 2]) == ["ring", "tree"]
    assert chosen("broadcast", [0, 1, 2], forced) == ["tree"]


def sizes_chosen(what: str, ranks: int, sizes: Iterable[int]) -> list[str]:
    """Return the algorithm for each size, if each rank is on a host of its own."""
    layout = _core.Layout(hosts=list(range(ranks)), rank=0, forced=NONE)
    return [layout.chosen(list(_core.collectives).index(what), size) for size in sizes]


LONG = (8, (256 << 10) - 1, 256 << 10, (1 << 20) + 1)


def test_a_long_broadcast_over_links_goes_along_a_chain():
    """Check that the faster algorithm is chosen. A chain (the algorithm `ring`) takes as long as one message plus n-2
    windows of 128 KiB. A tree takes as long as log2(n) messages.
    """
    assert sizes_chosen("broadcast", 2, LONG) == ["tree"] * 4
    assert sizes_chosen("broadcast", 4, LONG) == ["tree", "tree", "ring", "ring"]


@ranks(4, env={"MSCOMM_HOST_ID": "{rank}"})
def test_ranks_on_hosts_of_their_own_take_the_chosen_algorithm(rank: int, group: Any):
    layout, broadcast = resolve(None).core.layout, list(_core.collectives).index("broadcast")
    assert [layout.chosen(broadcast, size) for size in LONG] == sizes_chosen("broadcast", 4, LONG)
    for size in LONG:
        for root in range(4):
            x = np.full(size, rank if rank == root else 99, np.uint8)
            assert (mscomm.broadcast(x, root=root) == root).all(), size


def test_many_hosts_choose_what_takes_few_messages_or_a_ring():
    """With more than 32 hosts, `direct` takes longer for short messages than `bruck`, because each rank sends n-1
    messages instead of log2(n). Long messages of all_gather go around a ring. Reductions do not use a ring, because the
    bits of their results would change.
    """
    sizes = (8, 7 << 10, 8 << 10, 1 << 20, 34 << 20)
    assert sizes_chosen("all_reduce", 34, sizes) == ["bruck", "bruck", "direct", "direct", "direct"]
    assert sizes_chosen("all_gather", 34, sizes) == ["bruck", "bruck", "direct", "ring", "ring"]
    assert sizes_chosen("reduce_scatter", 34, sizes) == ["direct"] * 5


@pytest.mark.long
@ranks(34, env={"MSCOMM_HOST_ID": "{rank}"})
def test_many_hosts_make_calls(rank: int, group: Any):
    x = np.arange(5.0) + rank
    assert (mscomm.all_reduce(x) == 34 * np.arange(5.0) + 33 * 17).all()
    assert (mscomm.all_gather(x[None]) == np.arange(34)[:, None] + np.arange(5.0)).all()
    rows, counts = mscomm.all_gather_v(np.full(rank % 3, rank))
    assert counts == [rank % 3 for rank in range(34)]
    assert (rows == np.repeat(np.arange(34), counts)).all()


@pytest.mark.parametrize("algorithm", ["direct", ""])
@ranks(2, env={"MSCOMM_ALGO": "{algorithm}"})
def test_a_rank_that_only_receives_may_send_an_empty_part_of_out(rank: int, group: Any, algorithm: str):
    """Rank 1's x is an empty part of out. Writing to out cannot overwrite x, so mscomm must allow the overlap."""
    out = np.zeros(1_000_000, np.int32)
    x, counts = (np.arange(1_000_000, dtype=np.int32), [0, 1_000_000]) if rank == 0 else (out[:0], [0, 0])
    rows, received = mscomm.all_to_all_v(x, counts, out=out if rank == 1 else None)
    assert received == ([0, 0] if rank == 0 else [1_000_000, 0])
    assert len(rows) == sum(received) and (rows == np.arange(len(rows))).all()
    assert mscomm.all_gather(np.array([rank])).tolist() == [0, 1]
