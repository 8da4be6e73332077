"""Trains a network with one hidden layer on 1, 2, 4, 8 or 16 ranks. Each rank takes a shard of the same batch.

The losses do not depend on the number of ranks: `python net.py`, `mscomm run -n 8 net.py`, `mpirun` (see
run_with_mpi.sh) and a scheduler with workers (see run.sh) print the same lines, up to rounding.
"""

import sys
from collections.abc import Callable, Iterator

import numpy as np

import mscomm

GLOBAL_BATCH = 16
IN_DIM, HIDDEN_DIM, OUT_DIM = 32, 16, 16
EPOCH_SIZE, STEP_PER_EPOCH = 5, 4
LEARNING_RATE, MOMENTUM = 0.2, 0.1

Batch = tuple[np.ndarray, np.ndarray]


def get_dataset(batch_size: int, in_dim: int, out_dim: int, step_per_epoch: int) -> Callable[[], Iterator[Batch]]:
    """Return a function that iterates over the batches of an epoch. All steps use the same random batch."""
    np.random.seed(1)
    input_data = np.random.rand(batch_size, in_dim).astype(np.float32)
    label_data = np.random.rand(batch_size, out_dim).astype(np.float32)

    def generate() -> Iterator[Batch]:
        for _ in range(step_per_epoch):
            yield input_data, label_data

    return generate


class Net:
    """A network that computes relu(x @ weight) @ weight2."""

    def __init__(self, in_dim: int, hidden_dim: int, out_dim: int) -> None:
        random = np.random.default_rng(1)  # the same weights on every rank
        self.weight = random.normal(0, 0.1, (in_dim, hidden_dim)).astype(np.float32)
        self.weight2 = random.normal(0, 0.1, (hidden_dim, out_dim)).astype(np.float32)

    def parameters(self) -> list[np.ndarray]:
        return [self.weight, self.weight2]

    def loss_and_gradients(self, x: np.ndarray, label: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return the mean squared error, and its derivatives with respect to the parameters."""
        hidden = np.maximum(x @ self.weight, 0)
        error = hidden @ self.weight2 - label
        by_out = error * np.float32(2 / error.size)
        by_hidden = by_out @ self.weight2.T * (hidden > 0)
        return np.mean(np.square(error), keepdims=True).reshape(1), [x.T @ by_hidden, hidden.T @ by_out]


class Momentum:
    """Implements gradient descent with momentum: v = momentum * v + gradient; parameter -= learning_rate * v."""

    def __init__(self, parameters: list[np.ndarray], learning_rate: float, momentum: float) -> None:
        self.parameters = parameters
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.velocities = [np.zeros_like(parameter) for parameter in parameters]

    def step(self, gradients: list[np.ndarray]) -> None:
        for parameter, velocity, gradient in zip(self.parameters, self.velocities, gradients, strict=True):
            velocity *= self.momentum
            velocity += gradient
            parameter -= self.learning_rate * velocity


def shard(batch: Batch, rank: int, size: int) -> Batch:
    """Return this rank's rows of the global batch."""
    x, label = batch
    if len(x) % size:
        raise SystemExit(f"net.py: the batch of {len(x)} rows does not divide over {size} ranks; use 1, 2, 4, 8 or 16")
    return np.split(x, size)[rank], np.split(label, size)[rank]


def train() -> None:
    rank, size = mscomm.get_rank(), mscomm.get_group_size()
    dataset = get_dataset(GLOBAL_BATCH, IN_DIM, OUT_DIM, STEP_PER_EPOCH)
    net = Net(IN_DIM, HIDDEN_DIM, OUT_DIM)
    optimizer = Momentum(net.parameters(), LEARNING_RATE, MOMENTUM)
    for epoch in range(1, EPOCH_SIZE + 1):
        for step, batch in enumerate(dataset(), start=1):
            loss, gradients = net.loss_and_gradients(*shard(batch, rank, size))
            # All shards have the same size, so the mean of the ranks' means is the mean over the global batch.
            loss, *gradients = mscomm.all_reduce_many([loss, *gradients], op="avg")
            optimizer.step(gradients)
            sys.stdout.write(f"epoch: {epoch} step: {step}, loss is {float(loss[0])}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    mscomm.init()
    train()
