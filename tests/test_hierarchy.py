"""Calls on several hosts with several ranks each: shared memory inside a host, links between hosts."""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np
import pytest
from ranks import everybody_is_here, ranks, tell, until_told

import mscomm
from mscomm import _core
from mscomm.job import resolve

TWO = ["a", "a", "b", "b"]


@pytest.mark.parametrize("hosts", [["a", "a", "a", "b"], ["b", "a", "a", "c"], TWO], ids="-".join)
@ranks(4, env={"MSCOMM_HOST_ID": "{hosts}"})
def test_every_memory_in_place_and_not_of_many_sizes(rank: int, group: Any, hosts: list[str]):
    assert resolve(None).core.layout.chosen(_core.collectives.index("all_reduce"), 0) == "hierarchical"
    for count in (0, 1, 16, 17, 5000, (1 << 18) - 1, 1 << 20):
        for make in (np.empty, mscomm.empty):
            x, out = make(count, np.float32), make(count, np.float32)
            x[...] = np.arange(count) % 97 + rank
            expected = 4 * (np.arange(count, dtype=np.float32) % 97) + 6
            mixed = mscomm.empty(count, np.float32) if rank % 2 else out
            for into in (None, out, mixed, x):
                found = mscomm.all_reduce(x, out=into)
                assert np.array_equal(found, expected), (count, make)
    alone = hosts.count(hosts[rank]) == 1
    carried = resolve(None).core.carried()
    assert carried["mesh"] > 0 and (carried["arena"] == 0) == alone, carried


@pytest.mark.parametrize("hosts", [TWO, ["a", "b", "a", "b"]], ids="-".join)
@ranks(4, env={"MSCOMM_HOST_ID": "{hosts}"})
def test_who_waits_in_shared_memory_hears_another_call_over_a_link(rank: int, group: Any, hosts: list[str]):
    x = np.ones(1000)
    mscomm.all_reduce(x)
    everybody_is_here()
    near = hosts[rank] == hosts[3]
    if not near:
        until_told("it was raised")
    with pytest.raises(mscomm.Mismatch) as caught:
        if rank == 3:
            mscomm.all_gather(x)  # all_gather sends a header to every rank, so all ranks see the mismatch
        else:
            mscomm.all_reduce(x)
        mscomm.barrier()
    tell("it was raised")
    text = str(caught.value)
    mate = next(other for other in range(3) if hosts[other] == hosts[3])
    assert f"rank {mate} called all_reduce #2 (float64[1000], sum)" in text, text
    assert "rank 3 called all_gather #2 (float64[1000])" in text, text


@pytest.mark.parametrize("hosts", [TWO])
@ranks(4, env={"MSCOMM_HOST_ID": "{hosts}"})
def test_two_calls_that_meet_in_shared_memory_are_both_quoted(rank: int, group: Any, hosts: list[str]):
    """Rank 1 is the root of its broadcast, so it waits for no other rank and makes its next call, all_reduce #3. When
    rank 0 makes all_reduce #2, it finds one of these two calls in shared memory, and the error must quote that call.
    """
    x = np.ones(1000)
    mscomm.all_reduce(x)
    everybody_is_here()
    if rank >= 2:
        until_told("it was raised")
    with pytest.raises(mscomm.Mismatch) as caught:
        if rank == 1:
            mscomm.broadcast(x, root=1)
        mscomm.all_reduce(x)
        mscomm.barrier()
    tell("it was raised")
    text = str(caught.value)
    assert "rank 0 called all_reduce #2 (float64[1000], sum)" in text, text
    assert re.search(r"rank 1 called (all_reduce #3 \(float64\[1000\], sum\)|broadcast #2 )", text), text


@pytest.mark.parametrize("roots", [[0, 0, 1, 1], [0, 1, 0, 0], [0, 0, 2, 0], [2, 2, 3, 2], [0, 0, 0, None]], ids=str)
@pytest.mark.parametrize("hosts", [TWO], ids="-".join)
@ranks(4, env={"MSCOMM_HOST_ID": "{hosts}"})
def test_short_broadcasts_from_different_roots_are_noticed(rank: int, group: Any, hosts: list[str], roots: list[Any]):
    """Each rank waits only for one other rank, and the root for none, so a rank may notice it in the next call only."""
    x = np.full(7, rank)
    assert mscomm.broadcast(x, root=3)[0] == 3
    with pytest.raises(mscomm.Mismatch, match=r"broadcast #2 \(int64\[7\], root \d\)"):
        if roots[rank] is None:
            mscomm.all_reduce(x)
        elif mscomm.broadcast(x, root=roots[rank])[0] == roots[rank]:
            mscomm.barrier()


@pytest.mark.parametrize("hosts", [TWO, ["b", "a", "a", "c"], ["a", "a", "a", "b"]], ids="-".join)
@ranks(4, env={"MSCOMM_HOST_ID": "{hosts}"})
def test_short_broadcasts_in_a_row(rank: int, group: Any, hosts: list[str]):
    """Roots run ahead of the others, and a late rank still gets each message."""
    for number in range(300):
        root = number // 20 % 4  # several times the same root, then another one
        if number % 60 == 7 and rank == number // 60 % 4:
            time.sleep(0.02)
        size = (1, 0, 100, 512)[number % 4]
        x = np.full(size, number if rank == root else -1)
        assert (mscomm.broadcast(x, root=root) == number).all() and x.nbytes <= 4096
        if number % 50 == 49:
            assert mscomm.all_reduce(np.ones(3))[0] == 4


@pytest.mark.parametrize("hosts", [TWO])
@ranks(4, env={"MSCOMM_HOST_ID": "{hosts}"})
def test_ranks_and_roots_are_named_by_their_numbers_in_the_group(rank: int, group: Any, hosts: list[str]):
    """Ranks 2 and 3 share memory, in which they have the numbers 0 and 1."""
    x = np.ones(1 << 16)
    with pytest.raises(mscomm.Mismatch) as caught:
        if rank < 2:
            until_told("it was raised")
        mscomm.gather(x, root=3 if rank == 3 else 2)
        mscomm.barrier()
    tell("it was raised")
    # What this rank has seen itself, unless it has only seen that a link had ended.
    seen = caught.value.__cause__
    text = str(seen if isinstance(seen, mscomm.Mismatch) else caught.value)
    for other in (2, 3):
        assert f"rank {other} called gather #1 (float64[65536], root {other})" in text, text
