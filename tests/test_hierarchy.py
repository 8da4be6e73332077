"""all_reduce where hosts have several ranks: by shared memory on each host, by links between them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ranks import everybody_is_here, ranks

import mscomm
from mscomm import _core
from mscomm.groups import resolve

TWO = ["a", "a", "b", "b"]


def algorithm(hosts: list[int]) -> str:
    return _core.select(list(_core.collectives).index("all_reduce"), hosts, [""] * len(_core.collectives))[0]


def test_it_is_chosen_where_hosts_have_several_ranks():
    assert algorithm([0, 0, 1, 1]) == algorithm([0, 1, 1]) == algorithm([0, 1, 0]) == "hierarchical"
    assert algorithm([0, 1, 2]) == "direct" and algorithm([0, 0, 0]) == "arena"


@pytest.mark.parametrize("hosts", [["a", "a", "a", "b"], ["b", "a", "a", "c"], TWO], ids="-".join)
@ranks(4, env={"MSCOMM_HOST_ID": "{hosts}"})
def test_every_memory_in_place_and_not_of_many_sizes(rank: int, group: Any, hosts: list[str]):
    assert resolve(None).core.chosen()["all_reduce"] == "hierarchical"
    for count in (0, 1, 16, 17, 5000, (1 << 18) - 1, 1 << 20):
        for make in (np.empty, mscomm.empty):
            x, out = make(count, np.float32), make(count, np.float32)
            x[...] = np.arange(count) % 97 + rank
            expected = 4 * (np.arange(count, dtype=np.float32) % 97) + 6
            mixed = mscomm.empty(count, np.float32) if rank % 2 else out
            for into in (None, out, mixed, x):
                found = mscomm.all_reduce(x, out=into)
                assert np.array_equal(found, expected), (count, make)
    assert resolve(None).core.carried()["mesh"] > 0


@pytest.mark.parametrize("hosts", [TWO])
@pytest.mark.parametrize("other", ["broadcast", "all_reduce"])
@ranks(4, env={"MSCOMM_HOST_ID": "{hosts}"})
def test_another_call_is_a_mismatch_on_all(rank: int, group: Any, hosts: list[str], other: str):
    x = np.ones(100_000)
    mscomm.all_reduce(x)
    everybody_is_here()
    with pytest.raises(mscomm.Mismatch, match=r"rank.* called all_reduce #2 \(float64\[100000\], sum\)"):
        if rank != 3:
            mscomm.all_reduce(x)
        elif other == "broadcast":
            mscomm.broadcast(x, root=3)
        else:
            mscomm.all_reduce(x, "max")
        mscomm.barrier()
