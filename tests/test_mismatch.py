"""If ranks make different calls, all ranks raise a Mismatch that names the calls. No rank hangs or gets wrong data."""

from __future__ import annotations

import itertools
import os
import random
import re
import time
from typing import Any

import numpy as np
import pytest
from functions import FUNCTIONS, How, algorithms_of
from ranks import everybody_is_here, ranks
from rotated import SEED, rotated, seed

import mscomm
from mscomm import _core

ALGORITHMS = algorithms_of("all_reduce")
# The sizes and algorithms with which ranks make different calls. `bruck` also runs on 8 ranks, because some pairs of
# them send each other nothing over the links.
SIZES = [(size, algo) for algo in ALGORITHMS for size in (2, 3, 4)] + [(8, "bruck")]
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


def perform(made: Made, group: mscomm.Group) -> None:
    what, dtype, shape, op, root = made
    if what == "barrier":
        mscomm.barrier(group=group)
    else:
        FUNCTIONS[what].call(np.ones(shape, dtype), How(op, root, []), mscomm.get_rank(), group=group)


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


def differ(group: mscomm.Group, dice: random.Random) -> None:
    """Make one call in the group that matches and one that differs between the ranks, and check the errors."""
    rank, size = mscomm.get_rank(), mscomm.get_group_size()
    first = second = random_call(dice, size)
    while meaning(second) == meaning(first):
        second = random_call(dice, size)
    odd = {r for r in range(size) if dice.random() < 0.5} or {0}
    odd = odd if len(odd) < size else {size - 1}
    calls = [second if r in odd else first for r in range(size)]

    with pytest.raises(mscomm.Mismatch) as caught:
        # Over links, this call may also raise the Mismatch: a rank may still be inside it when other ranks are already
        # in the call that differs.
        assert (mscomm.all_reduce(np.ones(3), group=group) == size).all()
        perform(calls[rank], group)
        # A rank that only sends may leave the call that differs before its peer can see this. When the first barrier
        # has ended, all ranks have sent their headers. At the beginning of the second one, they read them.
        mscomm.barrier(group=group)
        mscomm.barrier(group=group)
    text = str(caught.value)
    assert words(first) in text and words(second) in text, (calls, text)
    # The text may lack a rank, because that rank may still be inside all_reduce #1.
    named = named_calls(text)
    assert all(call == words(calls[r]) for r, call in named.items()), (calls, text)
    assert caught.value.ranks == tuple(sorted(r for r in named if named[r] != named[min(named)])), text
    with pytest.raises(mscomm.Mismatch):
        mscomm.barrier(group=group)


@pytest.mark.parametrize("pairs", [12, pytest.param(67, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("size", "algo"), rotated(SIZES, few=3, always=[(3, "arena"), (3, "direct"), (3, "hierarchical")])
)
@ranks(
    "size",
    env=lambda rank, algo, **_: {
        "MSCOMM_ALGO": algo,
        "MSCOMM_HOST_ID": "aba"[rank % 3] if algo == "hierarchical" else "a",
        SEED: seed(),
    },
)
def test_mismatched_calls_raise_on_every_rank(size: int, algo: str, pairs: int) -> None:
    """The calls of each pair are in a group of their own, because a Mismatch breaks the group."""
    for pair in range(pairs):
        dice = random.Random(f"{os.environ[SEED]} {algo} {size} {pair}")
        differ(mscomm.create_group(f"pair {pair}", list(range(size))), dice)
    mscomm.barrier()


# Only the first rank of each host takes part in the second level of a barrier.
@ranks(4, env=lambda rank, **_: {"MSCOMM_HOST_ID": "aabb"[rank]})
def test_different_calls_in_which_all_ranks_only_send_are_noticed(rank: int, group: None) -> None:
    for turn in range(20):
        one = mscomm.create_group(f"turn {turn}", [0, 1, 2, 3])
        with pytest.raises(mscomm.Mismatch) as caught:
            # A rank reads all headers when a group's first call begins, and then after 5 ms.
            assert (mscomm.all_reduce(np.ones(3), group=one) == 4).all()
            mscomm.gather(np.ones(3), 3 if rank == 1 else 1, group=one)
            mscomm.barrier(group=one)  # when it has ended, all ranks have sent their headers
            mscomm.barrier(group=one)
        assert "rank 1 called gather #2 (float64[3], root 3)" in str(caught.value)


@pytest.mark.parametrize("algo", ["arena", "direct"])
@ranks(2, env={"MSCOMM_ALGO": "{algo}"})
def test_a_process_whose_job_is_broken_joins_the_next_one(rank: int, algo: str) -> None:
    for _ in range(4):
        assert (mscomm.all_reduce(np.ones(3)) == 2).all()
        everybody_is_here()  # otherwise all_reduce may still wait when the other rank is in the call that differs
        with pytest.raises(mscomm.Mismatch, match="made different calls"):
            (mscomm.all_reduce if rank else mscomm.all_gather)(np.ones(4))
        mscomm.release()
        mscomm.init()
    assert (mscomm.all_reduce(np.ones(3)) == 2).all()


# Over links, a rank compares its call with the call of one peer. The error must name the calls of all ranks anyway.
@pytest.mark.parametrize(("algo", "odd"), rotated(itertools.product(ALGORITHMS, [0, 1]), few=2))
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


def shapes(rank: int, group: mscomm.Group) -> None:
    mscomm.all_reduce_many([np.ones(3), np.ones(4)] if rank else [np.ones(4), np.ones(3)], group=group)


def counts(rank: int, group: mscomm.Group) -> None:
    mscomm.reduce_scatter_v(np.ones(5), [2, 3] if rank else [3, 2], group=group)


def rows(rank: int, group: mscomm.Group) -> None:
    mscomm.all_gather_v(np.ones((2 + rank, 3 + rank)), group=group)


def scattered(rank: int, group: mscomm.Group) -> None:
    mscomm.scatter(np.ones(4, np.float32 if rank else np.float64), group=group)
    mscomm.barrier(group=group)  # the root may already have returned


@ranks(2)
def test_what_the_head_or_the_digest_shows_is_a_mismatch(rank, group):
    """Fused lists of one total size but with other shapes; uneven calls with other counts; gathered arrays with other
    rows; an array that is not the one that the root scatters.
    """
    for call, text in (
        (shapes, "digest"),
        (counts, "digest"),
        (rows, r"float64\[5, 3\].*float64\[5, 4\]"),
        (scattered, r"x is float32\[4\] on rank 1, and float64\[4\] at the root"),
    ):
        made = mscomm.create_group(call.__name__, [0, 1])
        with pytest.raises(mscomm.Mismatch, match=text):
            call(rank, made)


@ranks(3)
def test_an_out_that_turns_out_too_small_breaks_the_group_and_is_named(rank, group):
    out = np.zeros(5 if rank == 1 else 6)
    with pytest.raises(mscomm.Mismatch, match=r"all_gather_v: out has shape \(5,\), the result has \(6,\), on rank 1"):
        mscomm.all_gather_v(np.ones(rank + 1), out=out)
    with pytest.raises(mscomm.Mismatch):
        mscomm.barrier()
