"""Data-parallel training in MindSpore's PyNative mode on CPUs: a small convolutional network learns to classify images.

    mscomm data make --from digits --out digits
    mscomm run -n 2 mindspore_pynative.py digits
    mpirun -n 2 python mindspore_pynative.py digits

In PyNative mode, a cell runs line by line as Python code. mscomm.Model combines the ranks' gradients outside of the
cell. MindSpore's own communication is not used. ms.GRAPH_MODE also works, and is faster. To train on CIFAR-10, pass the
folder with its binary files instead.
"""

import os
import sys

import mindspore as ms
from mindspore import nn

import mscomm
import mscomm.dataset as ds
from mscomm.dataset import transforms, vision

BATCH_SIZE = 32  # images per rank and step
EPOCHS = 3
LEARNING_RATE, MOMENTUM = 0.05, 0.9


def data_path() -> str:
    """Return the folder that the first argument or the environment variable DATA_PATH names."""
    path = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("DATA_PATH")
    if not path:
        sys.exit(
            "mindspore_pynative.py: no data. Give the folder of CIFAR-10's binary files as argument or in DATA_PATH;"
            " `mscomm data make --from digits --out digits` makes one of small images"
        )
    return path


def create_dataset(path: str, usage: str, rank: int, size: int, drop_remainder: bool) -> ds.Dataset:
    """Return batches of this rank's share of the images."""
    data = ds.Cifar10Dataset(path, usage, num_shards=size, shard_id=rank)
    data = data.map(operations=transforms.TypeCast("int32"), input_columns="label")
    data = data.batch(BATCH_SIZE, drop_remainder=drop_remainder)
    return data.map(operations=[vision.Rescale(1 / 255, -0.5), vision.HWC2CHW()], input_columns="image")


class Net(nn.Cell):
    """A network of two convolutions and a dense layer, for 3 x 32 x 32 images in ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.SequentialCell(
            nn.Conv2d(3, 8, 3, stride=2, has_bias=True),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, has_bias=True),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.classes = nn.Dense(16 * 8 * 8, 10)

    def construct(self, images: ms.Tensor) -> ms.Tensor:
        return self.classes(self.features(images))


def accuracy(net: nn.Cell, path: str) -> float:
    """Return the share of the test images that the network classifies correctly."""
    net.set_train(False)
    right, seen = 0, 0
    for images, labels in create_dataset(path, "test", 0, 1, drop_remainder=False):
        right += int((net(ms.Tensor(images)).asnumpy().argmax(1) == labels).sum())
        seen += len(labels)
    return right / seen


def main() -> None:
    path = data_path()
    ms.set_context(mode=ms.PYNATIVE_MODE)
    mscomm.init("gloo")
    mscomm.set_auto_parallel_context(parallel_mode=mscomm.ParallelMode.DATA_PARALLEL, gradients_mean=True)
    rank, size = mscomm.get_rank(), mscomm.get_group_size()

    ms.set_seed(1)  # the same weights on every rank
    net = Net()
    loss = nn.CrossEntropyLoss()
    optimizer = nn.Momentum(net.trainable_params(), LEARNING_RATE, MOMENTUM)
    model = mscomm.Model(net, loss, optimizer)
    model.train(EPOCHS, create_dataset(path, "train", rank, size, drop_remainder=True), [mscomm.LossMonitor()])

    if rank == 0:
        print(f"{accuracy(net, path):.1%} of the test's images are classified correctly", flush=True)


if __name__ == "__main__":
    main()
