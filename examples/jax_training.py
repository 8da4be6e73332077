"""Data-parallel training with JAX on CPUs: a small convolutional network learns to classify images.

    mscomm data make --from digits --out digits
    mscomm run -n 2 jax_training.py digits
    mpirun -n 2 python jax_training.py digits

mscomm.Model compiles the computation of the loss and its gradient, with jax.jit(jax.value_and_grad(loss)). It combines
the ranks' gradients outside of the compiled code. To train on CIFAR-10, pass the folder with its binary files instead.
"""

import math
import os
import sys

import jax
import jax.numpy as jnp

import mscomm
import mscomm.dataset as ds
from mscomm.dataset import transforms, vision

BATCH_SIZE = 32  # images per rank and step
EPOCHS = 3
LEARNING_RATE, MOMENTUM = 0.05, 0.9

Parameters = dict[str, jax.Array]


def data_path() -> str:
    """Return the folder that the first argument or the environment variable DATA_PATH names."""
    path = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("DATA_PATH")
    if not path:
        sys.exit(
            "jax_training.py: no data. Give the folder of CIFAR-10's binary files as argument or in DATA_PATH;"
            " `mscomm data make --from digits --out digits` makes one of small images"
        )
    return path


def create_dataset(path: str, usage: str, rank: int, size: int, drop_remainder: bool) -> ds.Dataset:
    """Return batches of this rank's share of the images."""
    data = ds.Cifar10Dataset(path, usage, num_shards=size, shard_id=rank)
    data = data.map(operations=transforms.TypeCast("int32"), input_columns="label")
    data = data.batch(BATCH_SIZE, drop_remainder=drop_remainder)
    return data.map(operations=vision.Rescale(1 / 255, -0.5), input_columns="image")


def initial(seed: int) -> Parameters:
    """Return the initial parameters. Biases are zero. Weights are normal, with variance 2 / (number of inputs)."""
    shapes = {"convolution1": (3, 3, 3, 8), "convolution2": (3, 3, 8, 16), "dense": (8 * 8 * 16, 10)}
    parameters: Parameters = {}
    for key, (name, shape) in zip(jax.random.split(jax.random.key(seed), len(shapes)), shapes.items(), strict=True):
        parameters[f"{name}.weight"] = jax.random.normal(key, shape) * math.sqrt(2 / math.prod(shape[:-1]))
        parameters[f"{name}.bias"] = jnp.zeros(shape[-1])
    return parameters


def convolution(parameters: Parameters, name: str, x: jax.Array) -> jax.Array:
    """Return the result of a convolution and a ReLU. The convolution halves height and width."""
    kernel = parameters[f"{name}.weight"]
    x = jax.lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jax.nn.relu(x + parameters[f"{name}.bias"])


def scores(parameters: Parameters, images: jax.Array) -> jax.Array:
    """Return scores for ten classes, from two convolutions and a dense layer.

    images: an array of 32 x 32 x 3 images.
    """
    x = convolution(parameters, "convolution2", convolution(parameters, "convolution1", images))
    return x.reshape(len(x), -1) @ parameters["dense.weight"] + parameters["dense.bias"]


def loss(parameters: Parameters, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean cross entropy of a batch."""
    logarithms = jax.nn.log_softmax(scores(parameters, images))
    return -jnp.take_along_axis(logarithms, labels[:, None], axis=1).mean()


def accuracy(parameters: Parameters, path: str) -> float:
    """Return the share of the test images that the network classifies correctly."""
    predict = jax.jit(scores)
    right, seen = 0, 0
    for images, labels in create_dataset(path, "test", 0, 1, drop_remainder=False):
        right += int((predict(parameters, images).argmax(1) == labels).sum())
        seen += len(labels)
    return right / seen


def main() -> None:
    path = data_path()
    mscomm.init("gloo")
    mscomm.set_auto_parallel_context(parallel_mode=mscomm.ParallelMode.DATA_PARALLEL, gradients_mean=True)
    rank, size = mscomm.get_rank(), mscomm.get_group_size()

    optimizer = mscomm.train.Momentum(initial(seed=1), LEARNING_RATE, MOMENTUM)  # the same weights on every rank
    model = mscomm.Model(loss, optimizer=optimizer)
    model.train(EPOCHS, create_dataset(path, "train", rank, size, drop_remainder=True), [mscomm.LossMonitor()])

    if rank == 0:
        print(f"{accuracy(optimizer.parameters, path):.1%} of the test's images are classified correctly", flush=True)


if __name__ == "__main__":
    main()
