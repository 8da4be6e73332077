"""all_to_all_v with recv_counts: each rank knows only its own counts, and the ranks compare them in the call itself."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from ranks import ranks
from rotated import rotated

import mscomm
from mscomm.job import resolve

ALGORITHMS = ["arena", "direct", "hierarchical"]
CARRIERS = pytest.mark.parametrize("algorithm", ALGORITHMS)


def forced(rank: int, algorithm: str, **_: object) -> dict[str, str]:
    """Return the variables that force the algorithm. `hierarchical` uses arena and mesh, so it needs two hosts."""
    hosts = {"MSCOMM_HOST_ID": "aabb"[rank]} if algorithm == "hierarchical" else {}
    return {"MSCOMM_ALGO": f"all_to_all={algorithm}", **hosts}


# The largest number of rows from one rank to another. A row has 8 bytes, so x is empty, tiny, or in several chunks.
MOST_ROWS = [0, 3, 400, 30_000, 300_000]


def table(most: int, n: int, symmetric: bool) -> np.ndarray[Any, Any]:
    """Return how many rows each rank (first index) sends to each rank."""
    rows = np.random.default_rng(most).integers(0, most + 1, (n, n))
    return rows + rows.T if symmetric else rows


def of_rank(rank: int, count: int) -> np.ndarray[Any, Any]:
    return np.arange(2 * count, dtype=np.float32).reshape(-1, 2) + 1000 * rank


def expected(counts: np.ndarray[Any, Any], rank: int) -> np.ndarray[Any, Any]:
    ends = counts.cumsum(axis=1)[:, rank]
    parts = [of_rank(s, counts[s].sum())[end - counts[s, rank] : end] for s, end in enumerate(ends)]
    return np.concatenate(parts)


@CARRIERS
@ranks(4, env=forced)
def test_every_rank_gets_the_rows_that_it_expects(rank, group, algorithm):
    for most in MOST_ROWS:
        for kind in range(6):  # memory of the arrays: private, shared, or shared on odd ranks only; in place or not
            memory, in_place = kind % 3, kind >= 3
            counts = table(most, 4, symmetric=in_place)
            sent, received = counts[rank].tolist(), counts[:, rank].tolist()
            make = mscomm.empty if memory == 1 or (memory == 2 and rank % 2) else np.empty
            x = make((sum(sent), 2), np.float32)
            x[...] = of_rank(rank, sum(sent))
            out = x if in_place else make((sum(received), 2), np.float32)
            rows, same = mscomm.all_to_all_v(x, sent, recv_counts=received, out=out)
            assert rows is out and same == received
            np.testing.assert_array_equal(rows, expected(counts, rank))


@CARRIERS
@ranks(3, env=forced)
def test_the_call_takes_one_number_and_may_run_beside_the_caller(rank, group, algorithm):
    counts = table(50, 3, symmetric=False)
    sent, received = counts[rank].tolist(), counts[:, rank].tolist()
    strided = np.zeros((sum(received), 4), np.float32)[:, ::2]
    works = [
        mscomm.all_to_all_v(of_rank(rank, sum(sent)), sent, recv_counts=received, out=out, async_op=True)
        for out in (None, strided)
    ]
    for work, out in zip(works, (None, strided), strict=True):
        rows, same = work.wait()
        assert same == received and (out is None or rows is out)
        np.testing.assert_array_equal(rows, expected(counts, rank))
    assert resolve(None).core.where()[0] == 2


@pytest.mark.parametrize(
    ("algorithm", "rows"),
    rotated(
        itertools.product(ALGORITHMS, [2, 5000]), few=0, always=[("arena", 2), ("direct", 5000), ("hierarchical", 5000)]
    ),
)
@ranks(3, env=forced)
def test_counts_that_do_not_fit_fail_on_every_rank(rank, group, algorithm, rows):
    sent = [rows] * 3
    if rank == 0:
        sent[1] += 1
    with pytest.raises(mscomm.Mismatch) as caught:
        mscomm.all_to_all_v(np.zeros((sum(sent), 7)), sent, recv_counts=[rows] * 3)
        mscomm.barrier()  # over the mesh, rank 2 has no part in the difference, and may learn of it only here
    assert f"rank 0 sends {rows + 1} rows to rank 1, but rank 1 expects {rows} rows from rank 0" in str(caught.value)
    assert caught.value.ranks == (0, 1)


@pytest.mark.parametrize(
    ("algorithm", "what"),
    rotated(
        itertools.product(ALGORITHMS, ["row", "dtype", "head", "even"]),
        few=1,
        always=[("arena", "row"), ("direct", "dtype"), ("arena", "head"), ("direct", "even"), ("hierarchical", "even")],
    ),
)
@ranks(3, env=forced)
def test_calls_that_differ_fail_on_every_rank(rank, group, algorithm, what):
    odd = rank == 1
    x = np.zeros((6, 3 if odd and what == "row" else 2), np.float64 if odd and what == "dtype" else np.float32)
    with pytest.raises(mscomm.Mismatch, match="made different calls"):
        if odd and what == "even":
            mscomm.all_to_all(x)
        else:
            mscomm.all_to_all_v(x, [2] * 3, recv_counts=None if odd and what == "head" else [2] * 3)
        mscomm.barrier()


@ranks(2)
def test_wrong_counts_are_refused_before_anything_is_sent(rank, group):
    x = np.zeros((4, 2))
    for received, why in (
        ([1], "it needs 2 row counts"),
        ([2, -1], "it needs 2 row counts"),
        ([2**62, 2**62], "it needs 2 row counts"),
        ([1.5, 2], "must be a list of ints"),
        ([3 - rank, 2 + rank], rf"send_counts\[{rank}\] is 2 and recv_counts\[{rank}\] is 3"),
    ):
        with pytest.raises((TypeError, ValueError), match=why):
            mscomm.all_to_all_v(x, [2, 2], recv_counts=received)
    with pytest.raises(ValueError, match="out has shape"):
        mscomm.all_to_all_v(x, [2, 2], recv_counts=[2, 2], out=np.zeros((3, 2)))
    rows, _ = mscomm.all_to_all_v(x + rank, [2, 2], recv_counts=[2, 2])
    assert rows.mean() == 0.5 and resolve(None).core.where()[0] == 1


@ranks(1)
def test_a_rank_alone_gets_its_own_rows(rank, group):
    rows, counts = mscomm.all_to_all_v(np.arange(3), [3], recv_counts=[3])
    assert rows.tolist() == [0, 1, 2] and counts == [3]
