"""Which algorithm is chosen for the ranks, the hosts and the size of the message."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ranks import ranks

import mscomm
from mscomm import _core
from mscomm.job import resolve

NONE = [""] * len(_core.collectives)


def chosen(what: str, hosts: list[int], forced: list[str] = NONE) -> list[str]:
    return [name for name, _ in _core.select(list(_core.collectives).index(what), hosts, forced)]


def test_the_carrier_follows_from_the_hosts():
    assert chosen("all_reduce", [0, 0, 0]) == ["arena"]
    assert chosen("all_reduce", [0, 0, 1, 1]) == chosen("all_reduce", [0, 1, 1]) == chosen("all_reduce", [0, 1, 0])
    assert chosen("all_reduce", [0, 1, 0]) == ["hierarchical"]
    assert chosen("all_reduce", [0, 1, 2]) == chosen("all_gather", [0, 0, 1]) == ["direct"]


def test_what_is_forced_is_not_asked_about_its_size():
    forced = ["tree" if what == "broadcast" else "" for what in _core.collectives]
    assert chosen("broadcast", [0, 1, 2]) == ["ring", "tree"]
    assert chosen("broadcast", [0, 1, 2], forced) == ["tree"]


@pytest.mark.parametrize(("n", "chain"), [(2, None), (4, 256 << 10)])
@ranks("n", env={"MSCOMM_HOST_ID": "{rank}"})
def test_a_long_broadcast_over_links_goes_along_a_chain(rank: int, group: Any, n: int, chain: int | None):
    """The faster algorithm is chosen. A chain takes the time of one message and n-2 windows of 128 KiB. A tree takes
    the time of log2(n) messages.
    """
    core = resolve(None).core
    for size in (8, (256 << 10) - 1, 256 << 10, (1 << 20) + 1):
        assert core.chosen(size)["broadcast"] == ("ring" if chain and size >= chain else "tree")
        for root in range(n):
            x = np.full(size, rank if rank == root else 99, np.uint8)
            assert (mscomm.broadcast(x, root=root) == root).all(), size
