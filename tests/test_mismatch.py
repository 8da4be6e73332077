"""If ranks make different calls, all ranks raise a Mismatch that names the calls. No rank hangs or gets wrong data."""

from __future__ import annotations

import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from functions import FUNCTIONS, How, algorithms_of
from ranks import ranks

import mscomm
from mscomm import _core
from mscomm.cluster import hub, security

PAIRS = 67  # with `arena`, the number of jobs for each of 2, 3 and 4 ranks: 201 jobs in all
Made = tuple[str, str, tuple[int, ...], str, int]  # collective, dtype, shape, op, root


def random_call(dice: random.Random, size: int) -> Made:
    # The length of axis 0 is divisible by 2, 3, 4 and 8.
    shape = dice.choice([(24,), (24, 7), (168, 1), (6000,), (72_000,), (300_000,)])
    return (
        dice.choice([what for what in _core.collectives if what != "scatter"]),  # scatter has its own test
        dice.choice(["float32", "int32", "float64", "uint8"]),
        shape,
        dice.choice(["sum", "max", "prod"]),
        dice.randrange(size),
    )


def meaning(made: Made) -> Any:
    """Return the parts of a call on which the ranks must agree."""
    what, dtype, shape, op, root = made
    if what == "barrier":
        return (what,)
    row = FUNCTIONS[what]
    return what, dtype, shape, op if row.has_op else None, root if row.has_root else None


def perform(made: Made) -> None:
    what, dtype, shape, op, root = made
    if what == "barrier":
        mscomm.barrier()
    else:
        FUNCTIONS[what].call(np.ones(shape, dtype), How(op, root, []), mscomm.get_rank())


def words(made: Made) -> str:
    """Return how the error message must describe the call."""
    what, dtype, shape, op, root = made
    if what == "barrier":
        return "barrier #2"
    detail = (f", {op}" if FUNCTIONS[what].has_op else "") + (f", root {root}" if FUNCTIONS[what].has_root else "")
    return f"{what} #2 ({dtype}[{', '.join(map(str, shape))}]{detail})"


def named_calls(text: str) -> dict[int, str]:
    """Return the call that a Mismatch names for each rank."""
    listed = re.search(r"made different calls: (.*)\. Every rank must make", text)
    assert listed, text
    pairs = [re.fullmatch(r"ranks? ([\d, ]+) called (.*)", part) for part in listed[1].split("; ")]
    return {int(rank): pair[2] for pair in pairs if pair for rank in pair[1].split(", ")}


def one_life(life: int) -> None:
    """Join, make one call that matches and one that differs between the ranks, and check the errors."""
    mscomm.init()
    rank, size = mscomm.get_rank(), mscomm.get_group_size()
    dice = random.Random(f"{life} of {size}")
    first = second = random_call(dice, size)
    while meaning(second) == meaning(first):
        second = random_call(dice, size)
    odd = {r for r in range(size) if dice.random() < 0.5} or {0}
    odd = odd if len(odd) < size else {size - 1}
    calls = [second if r in odd else first for r in range(size)]

    with pytest.raises(mscomm.Mismatch) as caught:
        # Over links, this call may also raise the Mismatch: a rank may still be inside it when other ranks are already
        # in the call that differs.
        assert (mscomm.all_reduce(np.ones(3)) == size).all()
        perform(calls[rank])
        mscomm.barrier()
    text = str(caught.value)
    assert words(first) in text and words(second) in text, (calls, text)
    # The text may lack a rank, because that rank may still be inside all_reduce #1.
    named = named_calls(text)
    assert all(call == words(calls[r]) for r, call in named.items()), (calls, text)
    assert caught.value.ranks == tuple(sorted(r for r in named if named[r] != named[min(named)])), text
    with pytest.raises(mscomm.Mismatch):
        mscomm.barrier()
    mscomm.release()


# `bruck` also runs on 8 ranks, because some pairs of them send each other nothing over the links.
@pytest.mark.parametrize(
    ("size", "algo"),
    [
        pytest.param(size, algo, marks=pytest.mark.long if size == 4 else [])
        for algo in algorithms_of("all_reduce")
        for size in (2, 3, 4)
    ]
    + [(8, "bruck")],
)
def test_mismatched_calls_raise_on_every_rank(size: int, algo: str, tmp_path: Path) -> None:
    lives = PAIRS if algo == "arena" else 20
    hubs = [
        hub.Hub(size, key=security.new_key(), topo_timeout_s=60, ranks_known=True, watched=True) for _ in range(lives)
    ]
    links: list[list[socket.socket]] = [[] for _ in range(size)]
    for one in hubs:
        for rank in range(size):
            ours, theirs = socket.socketpair()
            one.adopt(ours, rank)
            links[rank].append(theirs)
    threads = [threading.Thread(target=one.serve, daemon=True) for one in hubs]
    for thread in threads:
        thread.start()
    ranks = []
    for rank in range(size):
        variables = {
            "MSCOMM_RANK": str(rank),
            "MSCOMM_HOST_ID": "aba"[rank % 3] if algo == "hierarchical" else "a",
            "MSCOMM_WORLD_SIZE": str(size),
            "MSCOMM_LOCAL_RANK": str(rank),
            "MSCOMM_LOCAL_WORLD_SIZE": str(size),
            "MSCOMM_ALGO": algo,
        }
        fds = [sock.fileno() for sock in links[rank]]
        with open(tmp_path / f"rank_{rank}.log", "wb") as log:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, __file__, *map(str, fds)],
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **variables},
                    pass_fds=fds,
                )
            )
        for sock in links[rank]:
            sock.close()
    try:
        codes = [process.wait(120) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        for one in hubs:
            one.stop()
        for thread in threads:
            thread.join(10)
    logs = "\n".join(f"--- rank {rank}\n" + (tmp_path / f"rank_{rank}.log").read_text()[-2000:] for rank in range(size))
    assert codes == [0] * size, logs


# Over links, a rank compares its call with the call of one peer. The error must name the calls of all ranks anyway.
@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("algo", algorithms_of("all_reduce"))
@ranks(4, env={"MSCOMM_ALGO": "{algo}"})
def test_every_rank_names_the_rank_with_the_other_call(rank: int, group: None, algo: str, odd: int) -> None:
    meeting = mscomm.create_group("meeting", [0, 1, 2, 3])
    x = np.ones(5 if rank == odd else 4)
    if rank != odd:
        work = mscomm.all_reduce(x, async_op=True)
        while not mscomm.job.default().world.core.where()[0]:
            time.sleep(0.001)
    mscomm.barrier(group=meeting)  # now the other ranks are inside their call
    with pytest.raises(mscomm.Mismatch) as caught:
        mscomm.all_reduce(x) if rank == odd else work.wait()
    usual, unusual = "all_reduce #1 (float64[4], sum)", "all_reduce #1 (float64[5], sum)"
    others = [r for r in range(4) if r != odd]
    assert named_calls(str(caught.value)) == {odd: unusual, **dict.fromkeys(others, usual)}, caught.value
    assert list(caught.value.ranks) == ([odd] if odd else others)


@ranks(2)
def test_fused_lists_of_one_total_size_but_other_shapes_are_a_mismatch(rank, group):
    mine = [np.ones(3), np.ones(4)] if rank else [np.ones(4), np.ones(3)]
    with pytest.raises(mscomm.Mismatch, match="digest"):
        mscomm.all_reduce_many(mine)


@ranks(2)
def test_uneven_calls_with_other_counts_are_a_mismatch(rank, group):
    with pytest.raises(mscomm.Mismatch, match="digest"):
        mscomm.reduce_scatter_v(np.ones(5), [2, 3] if rank else [3, 2])


@ranks(2)
def test_gathered_arrays_with_other_rows_are_a_mismatch_that_names_both(rank, group):
    with pytest.raises(mscomm.Mismatch, match=r"float64\[5, 3\].*float64\[5, 4\]"):
        mscomm.all_gather_v(np.ones((2 + rank, 3 + rank)))


@ranks(2)
def test_an_array_that_is_not_the_one_that_the_root_scatters_is_a_mismatch(rank, group):
    with pytest.raises(mscomm.Mismatch, match=r"x is float32\[4\] on rank 1, and float64\[4\] at the root"):
        mscomm.scatter(np.ones(4, np.float32 if rank else np.float64))


@ranks(3)
def test_an_out_that_turns_out_too_small_breaks_the_group_and_is_named(rank, group):
    out = np.zeros(5 if rank == 1 else 6)
    with pytest.raises(mscomm.Mismatch, match=r"all_gather_v: out has shape \(5,\), the result has \(6,\), on rank 1"):
        mscomm.all_gather_v(np.ones(rank + 1), out=out)
    with pytest.raises(mscomm.Mismatch):
        mscomm.barrier()


if __name__ == "__main__":
    for life, fd in enumerate(sys.argv[1:]):
        os.environ["MSCOMM_CONTROL_FD"] = fd
        one_life(life)
