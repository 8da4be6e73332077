"""Cifar10Dataset: what it reads from CIFAR-10's files, how it reports bad files, and a rank's share of the rows."""

from __future__ import annotations

import gc
import gzip
import importlib
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from images import numbers, records, write
from pipelines import none_is_left, same

import mscomm.dataset as ds
from mscomm.dataset import cifar10


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
    """An object that makes a folder when it is unpickled."""

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
    # Change the time stamp, so that mscomm reads and checks the whole file again.
    os.utime(tmp_path / "data_batch_1.bin", (1, 1))
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


def test_a_folder_that_is_not_set_is_refused():
    with pytest.raises(TypeError, match="dataset_dir is None; expected the folder's path"):
        ds.Cifar10Dataset(os.environ.get("DATA_PATH_THAT_NOBODY_SETS"))
