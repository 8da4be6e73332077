"""Resuming in the middle of a pass gives bit-identical data. Every rank augments a sample in the same way."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from images import numbers
from pipelines import SEED, Rows, given_by, ordered, same

import mscomm
import mscomm.dataset as ds
from mscomm.dataset import transforms, vision


def pipeline(folder: Path, shards: int = 2, shard: int = 1) -> ds.Dataset:
    """Return a pipeline like that of the tutorials, with smaller images."""
    data = ds.Cifar10Dataset(folder, num_shards=shards, shard_id=shard)
    data = data.map(transforms.TypeCast(mscomm.int32), "label")
    image = [vision.RandomCrop((32, 32), (4, 4, 4, 4)), vision.RandomHorizontalFlip(), vision.Resize((40, 36))]
    image += [vision.Rescale(1.0 / 255.0, 0.0), vision.Normalize((0.4,) * 3, (0.2,) * 3), vision.HWC2CHW()]
    return data.map(image, "image").shuffle(10).batch(8, drop_remainder=True).repeat(2)


def in_order(folder: Path) -> ds.Dataset:
    """Return a pipeline whose source has no random access."""
    rows = [(np.random.default_rng(i).integers(0, 256, (8, 8, 3), np.uint8), i) for i in range(22)]
    data = ds.GeneratorDataset(lambda: iter(rows), ["image", "label"])
    return data.map(vision.RandomCrop(8, 2), "image").shuffle(4).batch(4)


def maps_after_batch(folder: Path) -> ds.Dataset:
    data = ds.Cifar10Dataset(folder).batch(16).map([vision.Rescale(2.0, 1.0), vision.HWC2CHW()], "image")
    return data.map(np.negative, "label", "minus").shuffle(3)


PIPELINES = {"tutorial": pipeline, "in order": in_order, "map after batch": maps_after_batch}


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("ahead", [0, 3])
def test_a_pass_goes_on_at_any_batch_with_the_same_bits(folder, name, ahead):
    ds.config.set_prefetch_size(ahead)
    make = PIPELINES[name]
    data = make(folder)
    size = data.get_dataset_size()
    whole = [row for _ in range(2) for row in data]
    assert len(whole) == 2 * size > 10 and not same(whole[:size], whole[size:])
    for taken in {0, 1, size // 2, size - 1, size, size + 1, 2 * size - 1}:
        data = make(folder)
        data.get_dataset_size()
        rows = data.create_tuple_iterator()
        for _ in range(taken):
            next(rows, None) or next(rows)  # at the end of a pass, go on to the first batch of the next pass
        state = json.loads(json.dumps(data.state_dict()))
        rows.close()
        ds.config.set_seed(123)  # must have no effect, because the state contains a seed
        resumed = make(folder)
        resumed.load_state_dict(state)
        ds.config.set_seed(SEED)
        passes = 2 - state["epoch"]
        assert same([row for _ in range(passes) for row in resumed], whole[taken:]), taken
        assert (state["epoch"], state["batch"]) == divmod(taken, size)


@given(cuts=st.lists(st.integers(0, 12), min_size=1, max_size=4), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_a_pass_may_be_gone_on_with_again_and_again(cuts, seed):
    ds.config.set_prefetch_size(0)
    ds.config.set_seed(seed)

    def make() -> ds.Dataset:
        return ds.GeneratorDataset(numbers(17), "x").shuffle(5).batch(2).repeat(2)

    whole = make()
    want = [row for _ in range(6) for row in given_by(whole)]
    got: list[Any] = []
    data = make()
    for cut_after in cuts:
        rows = data.create_tuple_iterator()
        while cut_after:
            row = next(rows, None)
            if row is not None:
                got.append(row[0].tolist())
                cut_after -= 1
        state = data.state_dict()
        data = make()
        data.load_state_dict(state)
    assert got == want[: len(got)] and len(got) == sum(cuts)
    assert given_by(data) == want[len(got) : (len(got) // 18 + 1) * 18]


def test_rows_before_the_place_are_not_read():
    source = Rows(20)
    data = ds.GeneratorDataset(source, ["x", "y"], shuffle=False).batch(5)
    data.load_state_dict({**data.state_dict(), "batch": 2})
    list(data)
    assert source.read == list(range(10, 20))


def test_what_was_made_ahead_does_not_count():
    ds.config.set_prefetch_size(8)
    data = ordered(20)
    rows = iter(data)
    next(rows)
    until = time.monotonic() + 60
    while len(rows._rows._queue.items) < 8 and time.monotonic() < until:
        time.sleep(0.001)
    assert data.state_dict()["batch"] == 1
    rows.close()


def test_a_new_pass_after_a_break_is_the_next_epoch():
    data = ds.GeneratorDataset(numbers(20), "x")
    second = [given_by(data) for _ in range(2)][1]
    data = ds.GeneratorDataset(numbers(20), "x")
    for _ in data:
        break
    assert given_by(data) == second


def test_a_state_behind_the_last_batch_goes_on_with_the_next_pass():
    def pipeline() -> Any:  # the number of rows is known only after a whole pass
        return ds.GeneratorDataset(lambda: iter([(i,) for i in range(4)]), ["x"]).batch(2)

    first = pipeline()
    rows = first.create_tuple_iterator(num_epochs=1)
    next(rows), next(rows)
    state = first.state_dict()  # all batches were taken, but the iterator has not raised StopIteration yet
    rows.close()
    resumed = pipeline()
    resumed.load_state_dict(state)
    assert [x.tolist() for (x,) in resumed] == [[0, 1], [2, 3]]
    assert [x.tolist() for (x,) in resumed] == [[0, 1], [2, 3]]


def test_the_state_is_the_same_on_every_rank(folder):
    assert pipeline(folder, 2, 0).state_dict() == pipeline(folder, 2, 1).state_dict()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: {}, "not the state of a pipeline"),
        (lambda state: {**state, "version": 2}, "version 2"),
        (lambda state: {**state, "batch": -1}, "batch -1"),
        (lambda state: {**state, "seed": 2**32}, "is not a valid state"),
        (lambda state: {**state, "pipeline": 3}, "not the state of a pipeline"),
        (lambda state: {**state, "pipeline": state["pipeline"][:1]}, r"has nothing, and this one has batch\(2\)"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change, said):
    data = ordered(10).batch(2)
    with pytest.raises(ValueError, match=said):
        data.load_state_dict(change(data.state_dict()))
    assert data.state_dict()["batch"] == 0


OTHERS = {
    "rows": lambda: ordered(11).batch(2),
    "shuffle": lambda: ds.GeneratorDataset(numbers(10), "x").batch(2),
    "batch": lambda: ordered(10).batch(3),
    "drop": lambda: ordered(10).batch(2, True),
    "shards": lambda: ds.GeneratorDataset(numbers(10), "x", shuffle=False, num_shards=2, shard_id=0).batch(2),
    "buffer": lambda: ordered(10).shuffle(3).batch(2),
    "repeat": lambda: ordered(10).batch(2).repeat(2),
}


@pytest.mark.parametrize("other", OTHERS)
def test_the_state_of_another_pipeline_is_refused(other):
    with pytest.raises(ValueError, match=r"the state belongs to another pipeline: it has .*, and this one has"):
        ordered(10).batch(2).load_state_dict(OTHERS[other]().state_dict())


def test_what_happens_to_a_sample_does_not_depend_on_who_reads_it(folder):
    """A sample is augmented in the same way by one rank that reads all samples and by three ranks that share them."""

    def changed(shards: int, shard: int) -> dict[bytes, bytes]:
        data = ds.Cifar10Dataset(folder, num_shards=shards, shard_id=shard)
        data = data.map(lambda image: (image, image), "image", ["image", "key"])
        data = data.map([vision.RandomCrop(32, 4), vision.RandomHorizontalFlip()], "image")
        return {key.tobytes(): image.tobytes() for image, key, _ in data}

    alone = changed(1, 0)
    assert len(alone) == 96
    together: dict[bytes, bytes] = {}
    for shard in range(3):
        together |= changed(3, shard)
    assert together == alone


def test_a_sample_is_changed_in_another_way_in_each_pass(folder):
    data = ds.Cifar10Dataset(folder, shuffle=False).map(vision.RandomCrop(32, 4), "image")
    assert sum(not np.array_equal(one, other) for (one, _), (other, _) in zip(list(data), list(data), strict=True)) > 80


def test_the_operations_of_a_map_draw_for_themselves(folder):
    plain = ds.Cifar10Dataset(folder, shuffle=False)
    twice = plain.map([vision.RandomHorizontalFlip(), vision.RandomHorizontalFlip()], "image")
    flipped = sum(not np.array_equal(one, other) for (one, _), (other, _) in zip(plain, twice, strict=True))
    # `flipped` is 48 on average, and each bound is about 5 standard deviations away. If both flips drew the same
    # numbers, `flipped` would be 0.
    assert 24 < flipped < 72


def test_maps_draw_for_themselves(folder):
    data = ds.Cifar10Dataset(folder, shuffle=False).map(lambda image: (image, image), "image", ["a", "b"])
    twice = data.map(vision.RandomCrop(32, 4), "a").map(vision.RandomCrop(32, 4), "b")
    assert sum(not np.array_equal(a, b) for a, b, _ in twice) > 80
