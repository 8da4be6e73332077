"""Samplers: how they deal rows to the ranks, and the random numbers that they draw."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from images import numbers
from pipelines import SEED, given_by

import mscomm.dataset as ds
from mscomm.dataset import draws
from mscomm.dataset.sampler import Listed


def dealt_by_hand(order: list[int], shards: int, offset: int) -> list[list[int]]:
    """Deal the rows like cards: one to each rank in turn, beginning with rank `offset`. If the offset is negative,
    begin with rank 0, and at the end deal the first rows again until all ranks have the same number of rows.
    """
    hands: list[list[int]] = [[] for _ in range(shards)]
    for place, row in enumerate(order):
        hands[(place + max(offset, 0)) % shards].append(row)
    if offset < 0:
        again = itertools.cycle(order)
        for hand in hands:
            if len(hand) < len(hands[0]):
                hand.append(next(again))
    return hands


@given(
    rows=st.integers(1, 60),
    shards=st.integers(1, 9),
    offset=st.integers(-1, 9),
    shuffle=st.booleans(),
    limit=st.none() | st.integers(0, 20),
    epoch=st.integers(0, 3),
)
@settings(max_examples=300, deadline=None)
def test_rows_are_dealt_like_cards(rows, shards, offset, shuffle, limit, epoch):
    offset = min(offset, shards)
    order = draws.permutation(rows, 7, 0, epoch).tolist() if shuffle else list(range(rows))
    assert sorted(order) == list(range(rows))
    for shard, hand in enumerate(dealt_by_hand(order, shards, offset)):
        sampler = ds.DistributedSampler(shards, shard, shuffle, limit, offset)
        assert sampler.indices(rows, 7, epoch).tolist() == (hand[:limit] if limit else hand)
        assert sampler.count(rows) == len(hand[:limit] if limit else hand)


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ((0, 0), RuntimeError),
        ((2, 2), RuntimeError),
        ((2, -1), RuntimeError),
        ((2, 0, True, None, 3), RuntimeError),
        ((2, 0, True, None, -2), RuntimeError),
        ((2, 0, True, -1), ValueError),
        (("2", 0), TypeError),
        ((2, True), TypeError),
        ((2, 0, 1), TypeError),
        ((2, 0, True, 1.5), TypeError),
    ],
)
def test_a_sampler_refuses_what_makes_no_sense(arguments, kind):
    with pytest.raises(kind, match="DistributedSampler: "):
        ds.DistributedSampler(*arguments)


def test_a_sampler_may_be_given_to_a_source():
    data = ds.GeneratorDataset(numbers(10), "x", sampler=ds.DistributedSampler(3, 1, shuffle=False))
    assert given_by(data) == [1, 4, 7, 0] and data.get_dataset_size() == 4


def test_rows_may_be_listed():
    data = ds.GeneratorDataset(numbers(10), "x", sampler=np.array([7, 7, 2]))
    assert given_by(data) == given_by(data) == [7, 7, 2]
    with pytest.raises(ValueError, match="there is no row 10; the source has 10"):
        given_by(ds.GeneratorDataset(numbers(10), "x", sampler=[10]))
    assert Listed(range(3)).count(10) == 3


def test_each_pass_has_an_order_of_its_own_that_follows_from_the_seed():
    def passes() -> list[Any]:
        data = ds.GeneratorDataset(numbers(50), "x")
        return [given_by(data) for _ in range(3)]

    first = passes()
    assert [sorted(one) for one in first] == [list(range(50))] * 3
    assert len({tuple(one) for one in first}) == 3
    assert passes() == first
    ds.config.set_seed(SEED + 1)
    assert all(one not in first for one in passes())


def test_the_shards_of_a_pass_are_a_permutation_of_all_rows():
    for epoch in range(2):
        shards = []
        for shard in range(4):
            data = ds.GeneratorDataset(numbers(40), "x", num_shards=4, shard_id=shard)
            shards.append([given_by(data) for _ in range(2)][epoch])
        assert sorted(itertools.chain(*shards)) == list(range(40))


def test_draws_are_the_same_for_ever():
    """Training that resumes from an older version's checkpoint must draw what the older version would have drawn."""
    assert draws.bits(0).tolist() == [16294208416658607535]  # SplitMix64's first output from seed 0
    assert draws.bits(5489, 1, 2, [3, 4]).tolist() == DRAWN
    assert draws.permutation(8, 5489, 0, 0).tolist() == PERMUTED


DRAWN = [6516484407851637237, 17460658747563208815]
PERMUTED = [2, 4, 3, 0, 6, 1, 5, 7]


def test_draws_are_even():
    drawn = draws.bits(1, np.arange(20_000))
    ones = (drawn[:, None] >> np.arange(64, dtype=np.uint64) & np.uint64(1)).mean(axis=0)
    assert abs(ones - 0.5).max() < 0.02  # this bound and the next one are more than 5 standard deviations
    counts = np.bincount([draws.below(9, int(draw)) for draw in drawn], minlength=9)
    assert len(counts) == 9 and abs(counts / 20_000 - 1 / 9).max() < 0.012
    units = [draws.unit(int(draw)) for draw in drawn]
    assert min(units) >= 0 and max(units) < 1 and draws.unit(2**64 - 1) < 1
