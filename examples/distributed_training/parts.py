"""The common parts of the training scripts in this folder: their settings, and the tutorial's create_dataset().

pytest starts the scripts and cannot pass arguments to them, so they read environment variables:

DATA_PATH   the folder cifar-10-batches-bin, or a folder that `mscomm data make` has written
IMAGE_SIZE  the width and height of the resized images in pixels [224]; 32 needs 49 times less computation
BATCH_SIZE  the number of images in a rank's batch [32]
EPOCH_SIZE  the number of epochs [10]
"""

import os

import pytest
import torch

import mscomm.dataset as ds
import mscomm.dataset.transforms as transforms
import mscomm.dataset.vision as vision
from mscomm import get_group_size, get_local_rank_size, get_rank

IMAGE_SIZE = int(os.getenv("IMAGE_SIZE", "224"))
BATCH_SIZE = int(os.getenv("BATCH_SIZE", "32"))
EPOCH_SIZE = int(os.getenv("EPOCH_SIZE", "10"))


def data_path() -> str:
    path = os.getenv("DATA_PATH")
    if not path:
        pytest.exit(
            "DATA_PATH is not set; it names the folder cifar-10-batches-bin of cifar-10-binary.tar.gz."
            " To try it with few images: mscomm data make --from digits --out digits; export DATA_PATH=$PWD/digits",
            returncode=1,
        )
    return path


def share_cpus() -> None:
    """Let PyTorch use as many threads as this rank's share of the host's CPUs, unless OMP_NUM_THREADS is set."""
    if not os.getenv("OMP_NUM_THREADS"):
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // get_local_rank_size()))


def create_dataset(data_path, repeat_num=1, batch_size=BATCH_SIZE, usage=None):
    """Return batches of this rank's shard of the images.

    Images are cropped and flipped at random unless usage is "test".

    usage: "train", "test", or None for all images, as in the tutorial.
    """
    resize_height = IMAGE_SIZE
    resize_width = IMAGE_SIZE
    rescale = 1.0 / 255.0
    shift = 0.0

    # get rank_id and rank_size
    rank_id = get_rank()
    rank_size = get_group_size()
    data_set = ds.Cifar10Dataset(data_path, usage, num_shards=rank_size, shard_id=rank_id)

    # define map operations
    random_crop_op = vision.RandomCrop((32, 32), (4, 4, 4, 4))
    random_horizontal_op = vision.RandomHorizontalFlip()
    resize_op = vision.Resize((resize_height, resize_width))
    rescale_op = vision.Rescale(rescale, shift)
    normalize_op = vision.Normalize((0.4465, 0.4822, 0.4914), (0.2010, 0.1994, 0.2023))
    changeswap_op = vision.HWC2CHW()
    type_cast_op = transforms.TypeCast("int32")

    c_trans = [] if usage == "test" else [random_crop_op, random_horizontal_op]
    c_trans += [resize_op, rescale_op, normalize_op, changeswap_op]

    # apply map operations on images
    data_set = data_set.map(operations=type_cast_op, input_columns="label")
    data_set = data_set.map(operations=c_trans, input_columns="image")

    # apply shuffle operations
    data_set = data_set.shuffle(buffer_size=10)

    # apply batch operations
    data_set = data_set.batch(batch_size=batch_size, drop_remainder=usage != "test")

    # apply repeat operations
    data_set = data_set.repeat(repeat_num)

    return data_set
