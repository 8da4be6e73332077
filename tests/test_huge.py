"""Calls and messages of more than 2^31 bytes. `pytest -m huge tests/test_huge.py` runs them, and needs 16 GiB of free
memory. CI does not run them.
"""

from __future__ import annotations

import numpy as np
import pytest
from ranks import ranks

import mscomm

BYTES = (1 << 31) + 3 * 4096 + 5  # an odd number, so that two ranks cannot divide it equally
MARKS = [0, 1 << 20, (1 << 31) - 1, 1 << 31, BYTES - 1]  # the indices that the tests check

pytestmark = [pytest.mark.huge, pytest.mark.timeout(1200)]


def marked(rank: int) -> np.ndarray:
    """Return an array of zeros with rank + 1 at the indices MARKS. Pages without these indices are never written, so
    they take no memory.
    """
    x = np.zeros(BYTES, np.uint8)
    x[MARKS] = rank + 1
    return x


@pytest.mark.parametrize("algorithm", ["arena", "direct", "doubling", "halving", "ring", "bruck"])
@ranks(2, env={"MSCOMM_ALGO": "{algorithm}"}, timeout_s=1000)
def test_all_reduce_of_more_than_two_gib(rank, group, algorithm):
    x = mscomm.all_reduce_(marked(rank))
    assert (x[MARKS] == 3).all() and np.count_nonzero(x) == len(MARKS)


@pytest.mark.parametrize("algorithm", ["arena", "direct", "ring"])
@ranks(2, env={"MSCOMM_ALGO": "all_gather={algorithm}"}, timeout_s=1000)
def test_all_gather_of_more_than_two_gib(rank, group, algorithm):
    both = mscomm.all_gather(marked(rank)[: BYTES // 2 + 7])
    assert both.size == 2 * (BYTES // 2 + 7) and both[0] == 1 and both[BYTES // 2 + 7] == 2


@pytest.mark.parametrize("algorithm", ["arena", "direct"])
@ranks(2, env={"MSCOMM_ALGO": "all_to_all={algorithm}"}, timeout_s=1000)
def test_all_to_all_v_of_more_than_two_gib(rank, group, algorithm):
    """Rank 0 sends nearly everything to rank 1, and rank 1 sends one byte to each rank."""
    x = marked(0) if rank == 0 else np.array([8, 9], np.uint8)
    rows, counts = mscomm.all_to_all_v(x, [1, BYTES - 1] if rank == 0 else [1, 1])
    assert counts == ([1, 1] if rank == 0 else [BYTES - 1, 1])
    assert rows[-1] == (8 if rank == 0 else 9)
    if rank == 1:
        assert (rows[[mark - 1 for mark in MARKS[1:]]] == 1).all() and np.count_nonzero(rows) == len(MARKS)


@ranks(2, timeout_s=1000)
def test_a_shared_array_and_a_message_of_more_than_two_gib(rank, group):
    x = mscomm.zeros(BYTES, np.uint8)
    x[MARKS] = rank + 1
    mscomm.all_reduce_(x)
    assert (x[MARKS] == 3).all()
    if rank == 0:
        mscomm.send(x, 1)
    else:
        x[MARKS] = 0
        mscomm.recv(x, 0)
        assert (x[MARKS] == 3).all()
