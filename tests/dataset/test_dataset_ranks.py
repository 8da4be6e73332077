"""Datasets on several ranks: the tutorials' create_dataset, and how ranks compare what they read."""

from __future__ import annotations

import itertools
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from images import numbers, records, write
from ranks import ranks

import mscomm
import mscomm.dataset as ds


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write(tmp_path_factory.mktemp("data") / "cifar-10-batches-bin"))


@pytest.fixture
def tmp(tmp_path: Path) -> str:
    return str(tmp_path)


# --- the tutorials ----------------------------------------------------------------------------------------------------

TUTORIALS = {
    "new": (
        "import mscomm as ms\nimport mscomm.dataset as ds\nimport mscomm.dataset.vision as vision\n"
        "import mscomm.dataset.transforms as transforms\nfrom mscomm.communication import get_rank, get_group_size\n",
        "transforms.TypeCast(ms.int32)",
    ),
    "gpu": (
        "from mscomm import dtype as mstype\nimport mscomm.dataset as ds\n"
        "import mscomm.dataset.transforms.c_transforms as C\nimport mscomm.dataset.vision.c_transforms as vision\n"
        "from mscomm.communication import get_rank, get_group_size\n",
        "C.TypeCast(mstype.int32)",
    ),
    "ascend": (
        "import mscomm.common.dtype as mstype\nimport mscomm.dataset as ds\n"
        "import mscomm.dataset.transforms.c_transforms as C\nimport mscomm.dataset.vision.c_transforms as vision\n"
        "from mscomm.communication.management import get_rank, get_group_size\n",
        "C.TypeCast(mstype.int32)",
    ),
}
CREATE_DATASET = '''
def create_dataset(data_path, repeat_num=1, batch_size=32):
    """Create training dataset"""
    resize_height = 224
    resize_width = 224
    rescale = 1.0 / 255.0
    shift = 0.0

    # get rank_id and rank_size
    rank_size = get_group_size()
    rank_id = get_rank()
    data_set = ds.Cifar10Dataset(data_path, num_shards=rank_size, shard_id=rank_id)

    # define map operations
    random_crop_op = vision.RandomCrop((32, 32), (4, 4, 4, 4))
    random_horizontal_op = vision.RandomHorizontalFlip()
    resize_op = vision.Resize((resize_height, resize_width))
    rescale_op = vision.Rescale(rescale, shift)
    normalize_op = vision.Normalize((0.4465, 0.4822, 0.4914), (0.2010, 0.1994, 0.2023))
    changeswap_op = vision.HWC2CHW()
    type_cast_op = TYPE_CAST

    c_trans = [random_crop_op, random_horizontal_op]
    c_trans += [resize_op, rescale_op, normalize_op, changeswap_op]

    # apply map operations on images
    data_set = data_set.map(operations=type_cast_op, input_columns="label")
    data_set = data_set.map(operations=c_trans, input_columns="image")

    # apply shuffle operations
    data_set = data_set.shuffle(buffer_size=10)

    # apply batch operations
    data_set = data_set.batch(batch_size=batch_size, drop_remainder=True)

    # apply repeat operations
    data_set = data_set.repeat(repeat_num)

    return data_set
'''


@ranks(2)
def test_the_tutorials_run_with_their_import_lines_changed(rank, data):
    for imports, type_cast in TUTORIALS.values():
        names: dict[str, Any] = {}
        exec(imports + CREATE_DATASET.replace("TYPE_CAST", type_cast), names)  # noqa: S102
        data_set = names["create_dataset"](data)
        assert data_set.get_dataset_size() == 1  # each of the 2 ranks gets 48 of the 96 rows: one batch of 32
        ((image, label),) = list(data_set)
        assert (image.shape, image.dtype) == ((32, 3, 224, 224), np.float32)
        assert (label.shape, label.dtype) == ((32,), np.int32)
        hashes = mscomm.all_gather_object([zlib.crc32(one) for one in image])
        assert not set(hashes[0]) & set(hashes[1])


# --- ranks compare what they read -------------------------------------------------------------------------------------


def one_folder_each(folder: Path, rank: int) -> Path:
    """Return this rank's own folder. The folders of all ranks have the same contents."""
    return write(folder / f"of_{rank}")


def refused(data: ds.Dataset) -> str:
    with pytest.raises(ValueError) as raised:
        next(iter(data))
    return str(raised.value)


@ranks(3)
def test_ranks_with_the_same_files_in_different_places_agree(rank, tmp):
    mine = one_folder_each(Path(tmp), rank)
    data = ds.Cifar10Dataset(mine, num_shards=3, shard_id=rank).batch(4)
    shards = mscomm.all_gather_object([image.tobytes() for batch in data for image in batch[0]])
    assert len(set(itertools.chain(*shards))) == 96
    assert len(list(data)) == 8  # a second pass works, too; the ranks compare their data only before the first


@ranks(3)
def test_every_rank_says_which_file_differs(rank, tmp):
    mine = one_folder_each(Path(tmp), rank)
    if rank == 1:
        with open(mine / "data_batch_4.bin", "r+b") as file:
            file.seek(5000)
            file.write(b"\xff\x00\xff")
    told = refused(ds.Cifar10Dataset(mine, num_shards=3, shard_id=rank))
    assert "Cifar10Dataset: the ranks would not train on the same data; they differ in files." in told
    assert re.search(r"ranks 0, 2 \(.*of_0 on .*\): files with the hash \w+\n  rank 1 \(.*of_1 on ", told)
    assert "Not the same everywhere: data_batch_4.bin." in told and "Give every rank the same files." in told
    assert mscomm.all_reduce(np.ones(1)) == 3  # the group still works


@ranks(2)
def test_every_rank_says_who_has_how_many_rows_and_who_cannot_read_them(rank, tmp):
    mine = one_folder_each(Path(tmp), rank)
    if rank == 1:
        (mine / "data_batch_5.bin").unlink()
    told = refused(ds.Cifar10Dataset(mine, num_shards=2, shard_id=rank))
    assert "they differ in rows and files" in told
    assert "rank 0" in told and "rows 96" in told and "rank 1" in told and "rows 92" in told
    assert "Not the same everywhere: data_batch_5.bin." in told
    if rank == 0:
        records([99]).tofile(mine / "test_batch.bin")
    told = refused(ds.Cifar10Dataset(mine, num_shards=2, shard_id=rank))
    assert "record 0 has the label 99" in told
    assert ("another rank cannot read its data. rank 0" in told) == (rank == 1)


@ranks(2)
def test_seeds_and_places_that_differ_are_told(rank):
    ds.config.set_seed(5 + rank)
    told = refused(ds.GeneratorDataset(numbers(10), "x", num_shards=2, shard_id=rank))
    assert "differ in seed" in told and "rank 0 (list on " in told and "seed 5" in told and "seed 6" in told
    ds.config.set_seed(1)
    data = ds.GeneratorDataset(numbers(10), "x", num_shards=2, shard_id=rank)
    data.load_state_dict({**data.state_dict(), "batch": rank})
    assert "position [0, 0]" in refused(data)
    data = ds.GeneratorDataset(numbers(10), "x", num_shards=2, shard_id=rank).batch(2 + rank)
    assert "Build the same pipeline on every rank." in refused(data)


@ranks(2)
def test_a_dataset_that_is_not_shared_is_not_compared(rank):
    if rank == 1:  # rank 0 makes no dataset, so a comparison of datasets would wait forever
        assert len(list(ds.GeneratorDataset(numbers(10), "x"))) == 10
        assert len(list(ds.GeneratorDataset(numbers(10), "x", num_shards=4, shard_id=3))) == 3


@ranks(2)
def test_a_state_that_was_loaded_is_compared_again(rank):
    data = ds.GeneratorDataset(numbers(10), "x", num_shards=2, shard_id=rank)
    want = [row[0].item() for _ in range(2) for row in data]
    data.load_state_dict({**data.state_dict(), "epoch": 0, "batch": 0})
    assert [row[0].item() for _ in range(2) for row in data] == want
    if rank == 1:
        ds.config.set_seed(3)
    data.load_state_dict({**data.state_dict(), "seed": rank})
    assert "seed 0" in refused(data)


class Unsure:
    """A source whose length cannot be read on rank 1."""

    def __len__(self) -> int:
        if mscomm.get_rank() == 1:
            raise OSError("the index is gone")
        return 4

    def __getitem__(self, index: int) -> tuple[int]:
        return (index,)


@ranks(2)
def test_a_source_that_fails_on_one_rank_is_told_on_the_other(rank, group):
    data = ds.GeneratorDataset(Unsure(), ["x"], num_shards=2, shard_id=rank)
    expected = OSError if rank == 1 else ValueError
    with pytest.raises(expected, match="the index is gone"):
        next(iter(data))
