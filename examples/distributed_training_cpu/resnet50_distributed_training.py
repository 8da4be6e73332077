"""Trains ResNet-50 on CIFAR-10, data parallel on CPUs: each rank trains on its share of the images.

bash run.sh DATA_PATH                                           a scheduler and 8 workers
mscomm run -n 4 resnet50_distributed_training.py DATA_PATH      or any other launcher; see README.md
"""

import argparse
import os

import torch
from resnet import resnet50
from torch import Tensor, nn

import mscomm as ms
import mscomm.dataset as ds
import mscomm.dataset.transforms as transforms
import mscomm.dataset.vision as vision
from mscomm import train
from mscomm.communication import get_group_size, get_local_rank_size, get_rank, init


def create_dataset(data_path: str, repeat_num: int = 1, batch_size: int = 32, image_size: int = 224) -> ds.Dataset:
    """Return batches of this rank's share of the images, with random crops and flips."""
    resize_height = image_size
    resize_width = image_size
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
    type_cast_op = transforms.TypeCast(ms.int32)

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


class SoftmaxCrossEntropyExpand(nn.Module):
    """Computes the batch mean of -log(softmax(logit)) at the label. sparse: True if labels are class numbers."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.sparse = sparse

    def forward(self, logit: Tensor, label: Tensor) -> Tensor:
        logit = logit - logit.amax(-1, keepdim=True)  # so that exp cannot overflow; the softmax stays the same
        # Compute log(exp / sum) as a difference, because the logarithm of the quotient is infinite if exp is 0.
        softmax_result_log = logit - logit.exp().sum(-1, keepdim=True).log()
        if self.sparse:
            label = nn.functional.one_hot(label, logit.shape[1])
        return -(softmax_result_log * label).sum(-1).mean()


def train_resnet50_with_cifar10(
    data_path: str, epoch_size: int = 10, batch_size: int = 32, image_size: int = 224, learning_rate: float = 0.01
) -> None:
    """Train a new ResNet-50 on the images in data_path."""
    loss_cb = train.LossMonitor()
    dataset = create_dataset(data_path, batch_size=batch_size, image_size=image_size)
    torch.manual_seed(1)  # all ranks begin with the same weights
    num_classes = 10
    net = resnet50(num_classes)
    loss = SoftmaxCrossEntropyExpand(sparse=True)
    opt = torch.optim.SGD(filter(lambda x: x.requires_grad, net.parameters()), learning_rate, momentum=0.9)
    model = train.Model(net, loss_fn=loss, optimizer=opt)
    model.train(epoch_size, dataset, callbacks=[loss_cb], dataset_sink_mode=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train ResNet-50 on CIFAR-10 over all ranks.")
    parser.add_argument(
        "data_path",
        metavar="DATA_PATH",
        nargs="?",
        default=os.getenv("DATA_PATH"),
        help="the folder cifar-10-batches-bin; by default what the environment variable DATA_PATH says",
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images in a step of one rank (default: 32)")
    parser.add_argument("--image-size", type=int, default=224, help="pixels; 32 is much faster (default: 224)")
    parser.add_argument("--learning-rate", type=float, default=0.01)
    args = parser.parse_args()
    if not args.data_path:
        parser.error(
            "no data: name the folder of CIFAR-10's binary files as DATA_PATH."
            " To try it without a download: mscomm data make --from digits --out digits"
        )
    return args


def share_cpus() -> None:
    """Let PyTorch use as many threads as this rank's share of the host's CPUs, unless OMP_NUM_THREADS is set."""
    if not os.getenv("OMP_NUM_THREADS"):
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // get_local_rank_size()))


if __name__ == "__main__":
    args = arguments()
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True)
    init()
    share_cpus()
    train_resnet50_with_cifar10(args.data_path, args.epochs, args.batch_size, args.image_size, args.learning_rate)
