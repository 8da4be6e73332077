"""mscomm.dataset: sources, samplers, steps, resuming in the middle, and the thread."""

from __future__ import annotations

import doctest
import gc
import gzip
import importlib
import inspect
import itertools
import json
import os
import pickle
import pkgutil
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from images import numbers, records, write
from sessions import run

import mscomm
import mscomm.dataset as ds
from mscomm.dataset import cifar10, draws, transforms, vision
from mscomm.dataset.sampler import Listed

SEED = 5489


@pytest.fixture(autouse=True)
def settings_as_at_the_start():
    yield
    ds.config.set_seed(SEED)
    ds.config.set_prefetch_size(2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """84 rows for training and 12 for the test."""
    return write(tmp_path_factory.mktemp("data") / "cifar-10-batches-bin")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of CIFAR-10's sizes that take no blocks on the disk: all labels are 0."""
    folder = tmp_path_factory.mktemp("full") / "cifar-10-batches-bin"
    folder.mkdir()
    for name in (*cifar10.TRAIN, cifar10.TEST):
        with open(folder / name, "wb") as file:
            file.truncate(10_000 * cifar10.RECORD_BYTES)
    return folder


def given_by(data: ds.Dataset) -> list[Any]:
    """The first column in one pass, as lists."""
    return [row[0].tolist() for row in data]


def same(some: list[Any], others: list[Any]) -> bool:
    """Whether the rows are the same, bit for bit."""
    return len(some) == len(others) and all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
        for one, other in zip(some, others, strict=True)
        for x, y in zip(one, other, strict=True)
    )


# --- CIFAR-10's files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("usage", "names"), [("train", cifar10.TRAIN), ("test", (cifar10.TEST,)), ("all", None), (None, None)]
)
def test_rows_are_those_of_the_files(folder, usage, names):
    stored = np.concatenate(
        [np.fromfile(folder / name, np.uint8) for name in names or (*cifar10.TRAIN, cifar10.TEST)]
    ).reshape(-1, 3073)
    data = ds.Cifar10Dataset(folder, usage, shuffle=False)
    rows = list(data.create_dict_iterator(num_epochs=1))
    assert len(rows) == len(stored) == data.get_dataset_size()
    for row, record in zip(rows, stored, strict=True):
        assert (row["label"].dtype, row["label"].shape, row["label"]) == (np.uint32, (), record[0])
        assert (row["image"].dtype, row["image"].shape) == (np.uint8, (32, 32, 3))
        red, green, blue = record[1:].reshape(3, 32, 32)
        assert np.array_equal(row["image"], np.dstack([red, green, blue]))


def test_eight_ranks_make_234_steps_of_all_60000_rows(full):
    for shard in range(8):
        data = ds.Cifar10Dataset(full, num_shards=8, shard_id=shard).batch(32, drop_remainder=True)
        assert data.get_dataset_size() == 234
    assert ds.Cifar10Dataset(full, "train", num_shards=8, shard_id=0).batch(32, True).get_dataset_size() == 195
    assert ds.Cifar10Dataset(full).get_dataset_size() == 60_000


class RunsCode:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("unpickled",)


def python_version(folder: Path) -> None:
    for name in ("data_batch_1", "test_batch", "batches.meta"):
        (folder / name).write_bytes(pickle.dumps(RunsCode()))


def cifar_100(folder: Path) -> None:
    (folder / "train.bin").write_bytes(bytes(3074))


def cut(folder: Path) -> None:
    os.truncate(write(folder) / "data_batch_3.bin", 3073 * 7 + 100)


def without(name: str) -> Any:
    return lambda folder: (write(folder) / name).unlink()


def instead(name: str, data: bytes) -> Any:
    return lambda folder: (write(folder) / name).write_bytes(data)


BAD_FILES = {
    "empty folder": (lambda folder: None, r"no data_batch_1\.bin\. Take .*mscomm data make"),
    "python version": (python_version, "python version of CIFAR-10, which are pickles.*mscomm loads no pickles"),
    "pickles as bin": (instead("data_batch_1.bin", pickle.dumps(RunsCode())), r"data_batch_1\.bin is a pickle"),
    "CIFAR-100": (cifar_100, "looks like CIFAR-100"),
    "folder above": (lambda folder: write(folder / "inside"), "the files are in .*inside"),
    "truncated": (cut, r"data_batch_3\.bin has 21611 bytes, which is 7 records of 3073 and 100 bytes more"),
    "empty file": (instead("test_batch.bin", b""), r"test_batch\.bin has 0 bytes"),
    "hole": (without("data_batch_2.bin"), r"has no data_batch_2\.bin"),
    "no test": (without("test_batch.bin"), r"has no test_batch\.bin"),
    "compressed": (instead("data_batch_1.bin", gzip.compress(bytes(3073))), "compressed by gzip; unpack it"),
    "web page": (instead("data_batch_1.bin", b"<html>404" + bytes(3064)), "is a web page"),
    "pointer": (instead("data_batch_1.bin", b"version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_named_with_what_is_wrong(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data"
    folder.mkdir()
    make, said = BAD_FILES[case]
    make(folder)
    with pytest.raises(ValueError, match=said) as raised:
        ds.Cifar10Dataset(folder)
    assert str(folder) in str(raised.value)
    assert not (tmp_path / "unpickled").exists()


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere: No such file or directory\. Take cifar-10-binary"):
        ds.Cifar10Dataset(tmp_path / "nowhere")


@pytest.mark.parametrize("record", [0, 2047, 2048, 2500])
def test_a_label_above_9_is_named_before_the_first_batch(tmp_path, record):
    write(tmp_path)
    labels = np.zeros(2501, np.uint8)
    labels[record] = 10
    records(labels).tofile(tmp_path / "data_batch_2.bin")
    data = ds.Cifar10Dataset(tmp_path, shuffle=False)
    with pytest.raises(ValueError, match=rf"data_batch_2\.bin: record {record} has the label 10; expected 0 to 9"):
        next(iter(data))


def test_a_file_system_that_gives_a_little_at_a_time_is_read_all_the_same(tmp_path, monkeypatch):
    write(tmp_path)
    whole = list(ds.Cifar10Dataset(tmp_path, shuffle=False))
    os.utime(tmp_path / "data_batch_1.bin", (1, 1))  # otherwise the file counts as checked already
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: preadv(fd, [into[0][:1000]], at))
    assert same(list(ds.Cifar10Dataset(tmp_path, shuffle=False)), whole)


def test_fewer_files_for_training_are_read_if_none_is_missing_between(tmp_path):
    write(tmp_path)
    for name in cifar10.TRAIN[2:]:
        (tmp_path / name).unlink()
    assert ds.Cifar10Dataset(tmp_path, "train").get_dataset_size() == 40


def test_a_file_that_is_cut_short_during_a_pass_is_named(tmp_path):
    write(tmp_path)
    ds.config.set_prefetch_size(0)
    rows = iter(ds.Cifar10Dataset(tmp_path, shuffle=False))
    next(rows)
    os.truncate(tmp_path / "data_batch_1.bin", 3073)
    with pytest.raises(ValueError, match=r"data_batch_1\.bin: record 1 is gone; the file was cut short"):
        next(rows)


def test_files_are_read_through_once_a_process_unless_they_change(tmp_path, monkeypatch):
    write(tmp_path)
    seen = []
    monkeypatch.setattr(
        cifar10, "blake2b", lambda **size: seen.append(1) or importlib.import_module("hashlib").blake2b(**size)
    )
    for _ in range(2):
        next(iter(ds.Cifar10Dataset(tmp_path)))
    assert len(seen) == 6
    os.utime(tmp_path / "test_batch.bin", (1, 1))
    next(iter(ds.Cifar10Dataset(tmp_path)))
    assert len(seen) == 7


def test_descriptors_are_closed_with_the_dataset(folder, no_thread_before):
    before = len(os.listdir("/proc/self/fd"))
    data = ds.Cifar10Dataset(folder)
    assert len(list(data)) == 96
    assert len(os.listdir("/proc/self/fd")) == before + 6
    del data
    assert none_is_left()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


WRONG_SHARES = [
    ({"num_shards": 2}, RuntimeError, "shard_id is not"),
    ({"shard_id": 0}, RuntimeError, "num_shards is not"),
    ({"num_shards": 2, "shard_id": 2}, ValueError, "expected 0 to 1"),
    ({"num_shards": 2, "shard_id": -1}, ValueError, "expected 0 to 1"),
    ({"num_shards": 0, "shard_id": 0}, ValueError, "expected 1 or more"),
    ({"num_shards": "2", "shard_id": 0}, TypeError, "num_shards is a str"),
    ({"sampler": [1], "shuffle": True}, RuntimeError, "sampler and shuffle"),
    ({"sampler": [1], "num_shards": 2, "shard_id": 0}, RuntimeError, "sampler and num_shards"),
    ({"sampler": ["one"]}, TypeError, "numbers of rows"),
    ({"shuffle": 1}, TypeError, "shuffle is a int"),
    ({"num_samples": -1}, ValueError, "num_samples=-1"),
]


@pytest.mark.parametrize(("options", "kind", "said"), WRONG_SHARES, ids=repr)
def test_shares_that_make_no_sense_are_refused(folder, options, kind, said):
    with pytest.raises(kind, match=said):
        ds.Cifar10Dataset(folder, **options)
    with pytest.raises(kind, match=said):
        ds.GeneratorDataset(numbers(9), "x", **options)


def test_usage_is_checked(folder):
    with pytest.raises(ValueError, match="expected one of train, test, all"):
        ds.Cifar10Dataset(folder, "valid")


# --- dealing ----------------------------------------------------------------------------------------------------------


def dealt_by_hand(order: list[int], shards: int, offset: int) -> list[list[int]]:
    """Deal the rows like cards, one to each rank in turn, the first to rank `offset`. With a negative offset, start
    with rank 0, and at the end deal from the beginning again until all ranks have the same number."""
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
    """Checkpoints rely on these numbers: a pass that an older version began must continue the same way."""
    assert draws.bits(0).tolist() == [16294208416658607535]  # SplitMix64's first output from seed 0
    assert draws.bits(5489, 1, 2, [3, 4]).tolist() == DRAWN
    assert draws.permutation(8, 5489, 0, 0).tolist() == PERMUTED


DRAWN = [6516484407851637237, 17460658747563208815]
PERMUTED = [2, 4, 3, 0, 6, 1, 5, 7]


def test_draws_are_even():
    drawn = draws.bits(1, np.arange(20_000))
    ones = (drawn[:, None] >> np.arange(64, dtype=np.uint64) & np.uint64(1)).mean(axis=0)
    assert abs(ones - 0.5).max() < 0.02  # at least 5 standard deviations
    counts = np.bincount([draws.below(9, int(draw)) for draw in drawn], minlength=9)
    assert len(counts) == 9 and abs(counts / 20_000 - 1 / 9).max() < 0.012
    units = [draws.unit(int(draw)) for draw in drawn]
    assert min(units) >= 0 and max(units) < 1 and draws.unit(2**64 - 1) < 1


# --- GeneratorDataset -------------------------------------------------------------------------------------------------


class Rows:
    """A source with random access."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.read: list[int] = []

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.read.append(index)
        return np.full(3, index, np.float32), index

    def __len__(self) -> int:
        return self.n


class Again:
    """A source that can be iterated repeatedly, but only in order."""

    def __iter__(self) -> Any:
        return iter([(i, -i) for i in range(5)])


@pytest.mark.parametrize("source", [lambda: iter([(i, -i) for i in range(5)]), Again()], ids=["function", "iterable"])
def test_sources_without_random_access_are_read_in_order_in_each_pass(source):
    data = ds.GeneratorDataset(source, ["x", "y"])
    for _ in range(2):
        assert [(x.item(), y.item()) for x, y in data] == [(i, -i) for i in range(5)]
    assert data.get_dataset_size() == 5
    assert data.batch(2).get_dataset_size() == 3 and data.batch(2, True).repeat(2).get_dataset_size() == 4


def test_random_access_shuffles_unless_told_otherwise():
    assert given_by(ds.GeneratorDataset(numbers(30), "x", shuffle=False)) == list(range(30))
    assert given_by(ds.GeneratorDataset(numbers(30), "x")) != list(range(30))


def test_only_this_ranks_rows_are_read():
    source = Rows(10)
    list(ds.GeneratorDataset(source, ["x", "y"], num_shards=5, shard_id=2, shuffle=False))
    assert source.read == [2, 7]


@pytest.mark.parametrize(
    "options",
    [{"num_shards": 2, "shard_id": 0}, {"sampler": [0]}, {"shuffle": True}],
    ids=lambda options: next(iter(options)),
)
def test_what_needs_random_access_is_refused_without(options):
    with pytest.raises(ValueError, match=r"needs a source with __getitem__ and __len__"):
        ds.GeneratorDataset(Again(), ["x", "y"], **options)


def test_what_can_be_read_only_once_is_refused():
    with pytest.raises(ValueError, match="can be read only once; give the function that makes it"):
        ds.GeneratorDataset((i for i in range(3)), "x")


@pytest.mark.parametrize(
    ("source", "names", "kind"),
    [
        (3, "x", TypeError),
        (numbers(3), [], TypeError),
        (numbers(3), 3.5, TypeError),
        (numbers(3), ["x", "x"], ValueError),
    ],
)
def test_a_generator_dataset_refuses_what_makes_no_sense(source, names, kind):
    with pytest.raises(kind):
        ds.GeneratorDataset(source, names)


@pytest.mark.parametrize(
    ("row", "said"),
    [((1, 2), "it has 2 values, there are 1 columns"), ((object(),), "Python objects"), (({},), "Python objects")],
)
def test_a_row_that_is_none_is_named(row, said):
    with pytest.raises(RuntimeError, match=f"row 1 of the source: .*{said}"):
        list(ds.GeneratorDataset([(1,), row], "x", shuffle=False))


def test_what_a_source_raises_comes_with_the_row():
    def generate() -> Any:
        yield (1,)
        raise OSError("disk on fire")

    rows = iter(ds.GeneratorDataset(generate, "x"))
    assert next(rows)[0] == 1
    with pytest.raises(RuntimeError, match="row 1 of the source: OSError: disk on fire") as raised:
        next(rows)
    assert isinstance(raised.value.__cause__, OSError)


@pytest.mark.parametrize("source", [numbers(9), lambda: iter(numbers(9))], ids=["random access", "in order"])
def test_num_samples_limits_a_pass(source):
    data = ds.GeneratorDataset(source, "x", num_samples=4)
    assert len(list(data)) == data.get_dataset_size() == 4


# --- steps ------------------------------------------------------------------------------------------------------------


def ordered(n: int) -> ds.Dataset:
    return ds.GeneratorDataset(numbers(n), "x", shuffle=False)


@given(rows=st.integers(0, 60), size=st.integers(2, 70))
@settings(max_examples=60, deadline=None)
def test_shuffle_takes_each_row_from_the_next_buffer_size_ones(rows, size):
    ds.config.set_prefetch_size(0)
    got = given_by(ordered(rows).shuffle(size))
    assert sorted(got) == list(range(rows))
    left = list(range(rows))
    for row in got:
        assert row in left[:size]
        left.remove(row)


def test_shuffle_leaves_no_row_its_place():
    data = ordered(6).shuffle(6)
    firsts = [given_by(data)[0] for _ in range(60)]
    assert set(firsts) == set(range(6))


@given(rows=st.integers(0, 40), size=st.integers(1, 12), drop=st.booleans(), times=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_batch_and_repeat_give_the_rows_in_order_and_the_size_that_they_say(rows, size, drop, times):
    ds.config.set_prefetch_size(0)
    whole = list(range(rows))
    batches = [whole[at : at + size] for at in range(0, rows, size)]
    if drop:
        batches = [batch for batch in batches if len(batch) == size]
    data = ordered(rows).batch(size, drop).repeat(times)
    assert given_by(data) == batches * times
    assert (data.get_dataset_size(), data.get_batch_size(), data.get_repeat_count()) == (
        len(batches) * times,
        size,
        times,
    )


def test_repeat_before_batch_fills_batches_over_the_seam():
    assert given_by(ordered(3).repeat(2).batch(4)) == [[0, 1, 2, 0], [1, 2]]


def test_the_rounds_of_repeat_are_passes_of_their_own():
    data = ds.GeneratorDataset(numbers(20), "x")
    passes = [given_by(data) for _ in range(6)]
    again = ds.GeneratorDataset(numbers(20), "x").repeat(3)
    assert [given_by(again) for _ in range(2)] == [[*itertools.chain(*passes[at : at + 3])] for at in (0, 3)]


@pytest.mark.parametrize("count", [None, -1])
def test_repeat_without_end(count):
    data = ordered(3).repeat(count)
    rows = iter(data)
    assert [next(rows)[0].item() for _ in range(10)] == [0, 1, 2] * 3 + [0]
    assert (data.get_repeat_count(), data.get_dataset_size()) == (-1, 3)
    rows.close()
    assert list(ordered(0).repeat(count)) == []


def test_batches_are_in_c_order_and_writable(folder):
    data = ds.Cifar10Dataset(folder).map(vision.HWC2CHW(), "image").batch(8)
    image, label = next(iter(data))
    assert image.flags.c_contiguous and image.flags.writeable and label.flags.writeable


@pytest.mark.parametrize(
    "operation", [vision.RandomHorizontalFlip(1.0), vision.HWC2CHW(), vision.RandomCrop(8)], ids=repr
)
def test_rows_are_in_c_order_with_and_without_batch(folder, operation):
    data = ds.Cifar10Dataset(folder)
    for changed in (data.map(operation, "image"), data.batch(4).map(vision.HWC2CHW(), "image")):
        assert next(iter(changed))[0].flags.c_contiguous


def test_rows_that_do_not_fit_in_a_batch_are_named():
    data = ds.GeneratorDataset([(np.zeros(2),), (np.zeros(3),)], "x", shuffle=False).batch(2)
    with pytest.raises(
        RuntimeError, match=r"column x is float64\[3\] in row 1 of the source and float64\[2\] in row 0"
    ):
        next(iter(data))


def test_text_of_any_length_is_batched():
    assert given_by(ds.GeneratorDataset([("a",), ("long",)], "x", shuffle=False).batch(2)) == [["a", "long"]]


def test_map_changes_the_columns_that_it_is_told_to():
    data = ds.GeneratorDataset([(1, 2, 3)], ["a", "b", "c"])
    add = data.map(lambda a, c: (a + c, a * c), ["a", "c"])
    assert next(add.create_dict_iterator()) == {"a": 4, "b": 2, "c": 3}
    first = data.map([lambda a: a + 1, lambda a: a * 10])
    assert next(first.create_dict_iterator()) == {"a": 20, "b": 2, "c": 3}
    renamed = data.map(lambda b: -b, "b", "minus")
    assert renamed.get_col_names() == ["a", "minus", "c"] and next(iter(renamed)) == (1, -2, 3)
    split = data.map(lambda a: (a, a + 7), "a", ["low", "high"])
    assert split.get_col_names() == ["low", "high", "b", "c"] and next(iter(split)) == (1, 8, 2, 3)
    joined = data.map(lambda a, b: a + b, ["a", "b"], "sum")
    assert joined.get_col_names() == ["sum", "c"] and next(iter(joined)) == (3, 3)
    assert data.get_col_names() == ["a", "b", "c"]  # it is unchanged


@pytest.mark.parametrize(
    ("step", "arguments", "kind", "said"),
    [
        ("map", ([],), ValueError, "operations is empty"),
        ("map", (3,), TypeError, "3 is not callable"),
        ("map", (abs, "y"), ValueError, "there is no column 'y'; there are x"),
        ("map", (abs, 3), TypeError, "'int' object is not iterable"),
        ("map", (abs, ["x", "x"]), ValueError, "a name twice"),
        ("map", (abs, "x", []), TypeError, "output_columns"),
        ("shuffle", (1,), ValueError, "buffer_size=1; expected 2 or more"),
        ("shuffle", (2.0,), TypeError, "buffer_size is a float"),
        ("batch", (0,), ValueError, "batch_size=0; expected 1 or more"),
        ("batch", (True,), TypeError, "batch_size is a bool"),
        ("batch", (2, 1), TypeError, "drop_remainder is a int"),
        ("repeat", (0,), ValueError, "count=0; expected 1 or more"),
        ("repeat", ("2",), TypeError, "count is a str"),
        ("create_dict_iterator", (0,), ValueError, "num_epochs=0"),
        ("create_tuple_iterator", (["y"],), ValueError, "there is no column 'y'; there are x"),
        ("create_tuple_iterator", (None, "1"), TypeError, "num_epochs is a str"),
    ],
)
def test_a_step_refuses_what_makes_no_sense(step, arguments, kind, said):
    with pytest.raises(kind, match=said):
        getattr(ordered(3), step)(*arguments)


def test_a_number_of_results_that_does_not_fit_is_told():
    with pytest.raises(RuntimeError, match=r"map of x: <lambda> on row 0 .*returned 2 values for 1 columns"):
        next(iter(ordered(3).map(lambda x: (x, x))))


def fails_at_5(x: Any) -> Any:
    if x == 5:
        raise KeyError("no such word")
    return x


@pytest.mark.parametrize("ahead", [0, 2])
def test_what_an_operation_raises_comes_with_its_name_the_row_and_the_place(ahead):
    ds.config.set_prefetch_size(ahead)
    data = ds.GeneratorDataset(numbers(10), "x", shuffle=False).map([abs, fails_at_5]).batch(2)
    rows = iter(data)
    assert next(rows)[0].tolist() == [0, 1] and next(rows)[0].tolist() == [2, 3]
    with pytest.raises(
        RuntimeError, match=r"map of x: fails_at_5 \(2 of 2\) on row 5 of the source: KeyError"
    ) as raised:
        next(rows)
    assert "fails_at_5" in "".join(traceback.format_tb(raised.value.__cause__.__traceback__))
    assert data.state_dict()["batch"] == 2
    with pytest.raises(StopIteration):
        next(rows)


def test_what_an_operation_on_batches_raises_names_the_batch():
    with pytest.raises(
        RuntimeError, match="<lambda> on the batch that begins with row 4 of the source: ZeroDivisionError"
    ):
        list(ordered(6).batch(2).map(lambda x: 1 // int(x[0] != 4)))


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_is_no_exception_comes_as_it_is(kind):
    def leave(x: Any) -> Any:
        raise kind

    with pytest.raises(kind):
        list(ordered(3).map(leave))


def test_a_tuple_iterator_gives_the_columns_that_it_is_asked_for():
    data = ds.GeneratorDataset([(1, 2, 3)], ["a", "b", "c"])
    assert next(data.create_tuple_iterator(["c", "a"])) == (3, 1)


def test_an_iterator_gives_as_many_passes_as_it_was_made_for():
    rows = ds.GeneratorDataset(numbers(20), "x").create_tuple_iterator(num_epochs=2)
    first, second, third = ([row[0].item() for row in rows] for _ in range(3))
    assert sorted(first) == sorted(second) == list(range(20)) and first != second and third == []


def test_an_iterator_goes_on_after_a_break():
    rows = ordered(5).create_tuple_iterator()
    for row in rows:
        if row[0] == 2:
            break
    assert [row[0].item() for row in rows] == [3, 4]
    rows.close()


# --- resuming in the middle -------------------------------------------------------------------------------------------


def pipeline(folder: Path, shards: int = 2, shard: int = 1) -> ds.Dataset:
    """Like the tutorials' pipeline, with smaller images."""
    data = ds.Cifar10Dataset(folder, num_shards=shards, shard_id=shard)
    data = data.map(transforms.TypeCast(mscomm.int32), "label")
    image = [vision.RandomCrop((32, 32), (4, 4, 4, 4)), vision.RandomHorizontalFlip(), vision.Resize((40, 36))]
    image += [vision.Rescale(1.0 / 255.0, 0.0), vision.Normalize((0.4,) * 3, (0.2,) * 3), vision.HWC2CHW()]
    return data.map(image, "image").shuffle(10).batch(8, drop_remainder=True).repeat(2)


def in_order(folder: Path) -> ds.Dataset:
    """A source without random access."""
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
            next(rows, None) or next(rows)  # continues after the end of a pass
        state = json.loads(json.dumps(data.state_dict()))
        rows.close()
        ds.config.set_seed(123)  # the state has its own seed
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
    until = time.monotonic() + 10
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
    def pipeline() -> Any:  # its source's rows can only be counted in a pass
        return ds.GeneratorDataset(lambda: iter([(i,) for i in range(4)]), ["x"]).batch(2)

    first = pipeline()
    rows = first.create_tuple_iterator(num_epochs=1)
    next(rows), next(rows)
    state = first.state_dict()  # before the pass reports its end
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
        (lambda state: {}, "no state of a pipeline"),
        (lambda state: {**state, "version": 2}, "version 2"),
        (lambda state: {**state, "batch": -1}, "batch -1"),
        (lambda state: {**state, "seed": 2**32}, "is no state"),
        (lambda state: {**state, "pipeline": 3}, "no state of a pipeline"),
        (lambda state: {**state, "pipeline": state["pipeline"][:1]}, r"has nothing where this has batch\(2\)"),
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
    with pytest.raises(ValueError, match=r"the state is of another pipeline: it has .* where this has"):
        ordered(10).batch(2).load_state_dict(OTHERS[other]().state_dict())


def test_what_happens_to_a_sample_does_not_depend_on_who_reads_it(folder):
    """The same sample in the same pass is augmented in the same way with 1 rank and with 3, whatever its neighbours."""

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
    assert 24 < flipped < 72  # 48 within 5 standard deviations; 0 if both drew the same numbers


def test_maps_draw_for_themselves(folder):
    data = ds.Cifar10Dataset(folder, shuffle=False).map(lambda image: (image, image), "image", ["a", "b"])
    twice = data.map(vision.RandomCrop(32, 4), "a").map(vision.RandomCrop(32, 4), "b")
    assert sum(not np.array_equal(a, b) for a, b, _ in twice) > 80


# --- the thread -------------------------------------------------------------------------------------------------------


def fillers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("mscomm-data")]


def none_is_left() -> bool:
    """Whether all threads end; one that was told to end does so when it has made its batch."""
    until = time.monotonic() + 10
    while fillers() and time.monotonic() < until:
        time.sleep(0.001)
    return not fillers()


@pytest.fixture
def no_thread_before():
    gc.collect()
    assert none_is_left()


def endless() -> ds.Dataset:
    return ordered(5).repeat()


def test_a_pass_to_the_end_leaves_no_thread(no_thread_before):
    list(ordered(50))
    assert none_is_left()


def test_close_ends_the_thread(no_thread_before):
    rows = iter(endless())
    next(rows)
    assert len(fillers()) == 1
    rows.close()
    assert not fillers()
    rows.close()
    with pytest.raises(StopIteration):
        next(rows)


def test_leaving_a_with_ends_the_thread(no_thread_before):
    with endless().create_dict_iterator() as rows:
        next(rows)
    assert not fillers()


def test_a_loop_that_is_left_ends_the_thread(no_thread_before):
    for _ in endless():
        break
    assert none_is_left()


def test_an_iterator_in_a_cycle_that_is_collected_ends_the_thread(no_thread_before):
    rows = endless().create_tuple_iterator()
    next(rows)
    rows.me = rows
    del rows
    assert fillers()
    gc.collect()
    assert none_is_left()


def test_an_error_ends_the_thread(no_thread_before):
    with pytest.raises(RuntimeError):
        list(ordered(10).map(fails_at_5))
    assert none_is_left()


def test_a_generator_that_is_left_is_closed(no_thread_before):
    ended = []

    def generate() -> Any:
        try:
            while True:
                yield (1,)
        finally:
            ended.append(threading.current_thread().name)

    rows = iter(ds.GeneratorDataset(generate, "x"))
    next(rows)
    rows.close()
    assert ended == ["mscomm-data"]


def test_no_more_is_made_ahead_than_there_is_room():
    taken = 0
    ahead = []

    class Counted(Rows):
        def __getitem__(self, index: int) -> tuple[Any, Any]:
            ahead.append(len(self.read) - taken)
            return super().__getitem__(index)

    rows = iter(ds.GeneratorDataset(Counted(50), ["x", "y"], shuffle=False))
    for taken, _ in enumerate(rows, 1):
        until = time.monotonic() + 10
        while len(ahead) < min(taken + 3, 50) and time.monotonic() < until:
            time.sleep(0.0005)
    # Two batches are in the queue and one waits for room when another is read; `taken` may be one behind.
    assert len(ahead) == 50 and max(ahead) in (2, 3)


def test_without_prefetching_there_is_no_thread(no_thread_before):
    ds.config.set_prefetch_size(0)
    rows = iter(ordered(5))
    next(rows)
    assert not fillers()
    rows.close()


@pytest.mark.parametrize("kept", ["rows", "None"])
def test_a_process_ends_well_in_the_middle_of_a_pass(kept):
    program = f"""
import atexit, itertools, threading
atexit.register(lambda: print(threading.active_count()))  # is called after those of mscomm
import mscomm.dataset as ds
rows = iter(ds.GeneratorDataset(lambda: itertools.repeat((1,)), "x").map(lambda x: x).batch(7))
next(rows)
kept = {kept}
print("end")
"""
    done = run([sys.executable, "-c", program])
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n1\n", "")


def test_a_forked_child_is_told_and_makes_its_own():
    program = """
import os, sys, gc, signal, threading, warnings
warnings.simplefilter("ignore", DeprecationWarning)
import mscomm.dataset as ds
rows = iter(ds.GeneratorDataset([(i,) for i in range(1000)], "x", shuffle=False))
next(rows)
held, forked = threading.Event(), threading.Event()
def hold():  # the fork finds the lock in the hands of a thread that the child has not
    with rows._rows._queue.news:
        held.set()
        forked.wait()
threading.Thread(target=hold).start()
held.wait()
child = os.fork()
if child:
    forked.set()
if child == 0:
    signal.alarm(30)  # it must not outlive a failure of this test
    try:
        next(rows)
    except RuntimeError as error:
        assert "make a new one here" in str(error), error
    else:
        os._exit(1)
    rows.close()
    del rows
    gc.collect()
    assert sum(1 for _ in ds.GeneratorDataset([(i,) for i in range(100)], "x")) == 100
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert sum(1 for _ in rows) == 999
"""
    done = run([sys.executable, "-c", program])
    assert (done.returncode, done.stderr) == (0, "")


# --- threads ----------------------------------------------------------------------------------------------------------


def threads_of(data: ds.Dataset) -> int:
    """The number of threads that work on a pass, besides the one that hands over the batches."""
    rows = iter(data)
    next(rows)
    count = len([thread for thread in threading.enumerate() if thread.name.startswith("mscomm-data-")])
    rows.close()
    return count


@pytest.fixture
def four_cpus(monkeypatch):
    """Pretend to have four CPUs: num_parallel_workers is limited to the number of CPUs."""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)


def pixels(image: Any) -> Any:
    """A function of the user's program."""
    return image[::2]


STEPS_WITH_THREADS = {
    "Cifar10Dataset": lambda folder, n: ds.Cifar10Dataset(folder, num_parallel_workers=n).map(pixels),
    "GeneratorDataset": lambda folder, n: ds.GeneratorDataset(numbers(50), "x", num_parallel_workers=n).repeat(2),
    "map": lambda folder, n: ds.Cifar10Dataset(folder).map(vision.RandomCrop(8), num_parallel_workers=n).batch(2),
    "batch": lambda folder, n: ds.Cifar10Dataset(folder).batch(5, num_parallel_workers=n).repeat(2),
}


@pytest.mark.parametrize("step", STEPS_WITH_THREADS)
def test_num_parallel_workers_is_the_number_of_threads_and_changes_no_bit(step, folder, four_cpus, no_thread_before):
    make = STEPS_WITH_THREADS[step]
    assert threads_of(make(folder, None)) == threads_of(make(folder, 1)) == 0 and threads_of(make(folder, 3)) == 3
    alone = make(folder, None)
    want = [row for _ in range(2) for row in alone]
    for ahead in (0, 2):
        ds.config.set_prefetch_size(ahead)
        data = make(folder, 4)
        assert same([row for _ in range(2) for row in data], want)
    assert none_is_left() and data.state_dict()["pipeline"] == alone.state_dict()["pipeline"]


@pytest.mark.parametrize(
    ("number", "kind", "said"),
    [
        (0, ValueError, "num_parallel_workers=0; expected 1 to 4, the number of CPUs"),
        (5, ValueError, "num_parallel_workers=5; expected 1 to 4"),
        (True, TypeError, "num_parallel_workers is a bool"),
        ("2", TypeError, "num_parallel_workers is a str"),
    ],
)
@pytest.mark.parametrize("step", STEPS_WITH_THREADS)
def test_num_parallel_workers_is_checked(step, number, kind, said, folder, four_cpus):
    with pytest.raises(kind, match=f"{step}: {said}"):
        STEPS_WITH_THREADS[step](folder, number)


def test_a_pass_in_threads_goes_on_at_any_batch_with_the_same_bits(folder, four_cpus):
    def make(number: int | None) -> ds.Dataset:
        data = ds.Cifar10Dataset(folder, num_shards=2, shard_id=1)
        image = [vision.RandomCrop((32, 32), 4), vision.RandomHorizontalFlip(), vision.Resize(40), vision.HWC2CHW()]
        return data.map(image, "image", num_parallel_workers=number).shuffle(10).batch(8, True).repeat(2)

    whole = list(make(None))
    for taken in (1, 5, len(whole) - 1):
        data = make(4)
        rows = iter(data)
        assert same([next(rows) for _ in range(taken)], whole[:taken])
        state = data.state_dict()
        rows.close()
        resumed = make(3)
        resumed.load_state_dict(state)
        assert same(list(resumed), whole[taken:])


class Busy:
    """Records how many threads were inside at once, and in which order rows came."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = self.most = 0
        self.order: list[int] = []

    def __call__(self, x: Any) -> Any:
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
            self.order.append(int(x))
        time.sleep(0.002)
        with self.lock:
            self.inside -= 1
        return x


def test_a_function_of_the_program_is_called_by_so_many_threads_as_its_step_allows(four_cpus):
    busy, alone = Busy(), Busy()
    data = ordered(40).map(alone).map(busy, num_parallel_workers=4)
    assert given_by(data) == list(range(40))
    assert busy.most > 1  # 1 would mean 40 sleeps in a row, with three threads idle
    assert alone.most == 1 and alone.order == list(range(40))  # as with one thread
    alone = Busy()
    assert given_by(ordered(24).map(alone).batch(2).batch(3, num_parallel_workers=4)) == [
        [[i, i + 1] for i in range(begin, begin + 6, 2)] for begin in range(0, 24, 6)
    ]
    assert alone.most == 1 and alone.order == list(range(24))


def test_a_source_is_read_by_one_thread_unless_it_allows_more(four_cpus):
    for number, most in ((None, 1), (1, 1), (3, 3)):
        busy = Busy()

        class Source:
            def __getitem__(self, index: int, busy: Busy = busy) -> Any:
                return (busy(index),)

            def __len__(self) -> int:
                return 40

        data = ds.GeneratorDataset(Source(), "x", shuffle=False, num_parallel_workers=number)
        assert given_by(data.map(np.negative, num_parallel_workers=4)) == [-i for i in range(40)]
        assert busy.most <= most and (most > 1 or busy.order == list(range(40)))


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_error_in_a_thread_comes_in_its_place_with_the_row(ahead, four_cpus, no_thread_before):
    ds.config.set_prefetch_size(ahead)
    data = ordered(40).map([abs, fails_at_5], num_parallel_workers=4).batch(2)
    rows = iter(data)
    assert next(rows)[0].tolist() == [0, 1] and next(rows)[0].tolist() == [2, 3]
    with pytest.raises(RuntimeError, match=r"map of x: fails_at_5 \(2 of 2\) on row 5 of the source: KeyError"):
        next(rows)
    assert none_is_left()


def test_threads_end_with_an_iterator_that_is_dropped(four_cpus, no_thread_before):
    for ahead in (0, 2):
        ds.config.set_prefetch_size(ahead)
        rows = iter(ordered(5).map(np.negative, num_parallel_workers=4).repeat())
        next(rows)
        assert fillers()
        del rows
        gc.collect()
        assert none_is_left()


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_process_with_threads_ends_well_and_a_forked_child_is_told(ahead):
    program = f"""
import os, signal, warnings
warnings.simplefilter("ignore", DeprecationWarning)
os.cpu_count = lambda: 4
import mscomm.dataset as ds
ds.config.set_prefetch_size({ahead})
rows = iter(ds.GeneratorDataset([(i,) for i in range(999)], "x").map(lambda x: x, num_parallel_workers=4).repeat())
next(rows)
child = os.fork()
if child == 0:
    signal.alarm(30)
    try:
        while True:
            next(rows)
    except RuntimeError as error:
        os._exit(7 if "make a new one here" in str(error) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
next(rows)
"""
    done = run([sys.executable, "-c", program])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_function_gets_arrays_in_c_order(folder):
    data = ds.Cifar10Dataset(folder).map([vision.RandomHorizontalFlip(1.0), lambda image: image.flags.c_contiguous])
    assert all(contiguous for contiguous, _ in data)


def test_a_batch_is_no_window_on_the_programs_own_arrays():
    mine = np.zeros((2, 2, 1), np.uint8)
    for step in (ds.Dataset.batch, lambda data, n: data.map(vision.Resize(2)).batch(n)):
        (batch,) = next(iter(step(ds.GeneratorDataset([(mine,)], "x"), 1)))
        batch += 1
    assert not mine.any()


# --- imports ----------------------------------------------------------------------------------------------------------


def test_import_mscomm_imports_no_dataset_and_import_dataset_no_library():
    program = """
import sys, mscomm
assert not [name for name in sys.modules if name.startswith(("mscomm.dataset", "PIL", "mscomm.dtype"))]
assert mscomm.dataset.vision and mscomm.common.dtype
heavy = ("PIL", "sklearn", "torch", "pickle", "multiprocessing", "mscomm.cli")
print([name for name in sys.modules if name.split(".")[0] in heavy and name not in before])
"""
    done = run([sys.executable, "-c", "import sys, numpy; before = set(sys.modules)" + program])
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


MODULES = [module.name for module in pkgutil.walk_packages(ds.__path__, "mscomm.dataset.")]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_the_docstrings_are_true(name, full, tmp_path, monkeypatch):
    monkeypatch.chdir(full.parent)
    module = importlib.import_module(name)
    small = write(tmp_path / "data")
    names = {**vars(module), "np": np, "vision": vision, "data": ds.Cifar10Dataset(small)}
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, extraglobs=names):
        report: list[str] = []
        doctest.DocTestRunner(verbose=False).run(test, out=report.append)
        assert report == []
        ds.config.set_seed(SEED)


@pytest.mark.parametrize("name", ["Cifar10Dataset", "GeneratorDataset", "DistributedSampler"])
def test_every_public_class_has_an_example(name):
    assert ">>>" in inspect.getdoc(getattr(ds, name))
