"""The training loop with gradient accumulation."""

import sys

import mscomm.nn as nn
import mscomm.ops as ops
from cell_wrapper import TrainAccuStepsCell
from mscomm import Tensor


class Model_ACCU:
    """Trains with steps of several batches."""

    def __init__(self, network, loss_fn, optimizer):
        self.train_cell = TrainAccuStepsCell(nn.WithLossCell(network, loss_fn), optimizer)
        self.mean = ops.AllReduce("avg")

    def train(self, mini_steps, epoch, train_dataset):
        """Take a step of the optimizer after every mini_steps batches, and at the end of an epoch. Print the mean loss
        over the batches of a step and over the ranks."""
        for epoch_num in range(1, epoch + 1):
            losses, step, size = [], 0, train_dataset.get_dataset_size()
            for number, (data, label) in enumerate(train_dataset, start=1):
                losses.append(self.train_cell(Tensor(data), Tensor(label)))
                if number % mini_steps == 0 or number == size:
                    self.train_cell.update()
                    step += 1
                    loss = self.mean(ops.Stack()(losses).mean())
                    losses = []
                    # Write the whole line at once, so that the lines of different ranks do not mix.
                    sys.stdout.write(f"epoch: {epoch_num} step: {step}, loss is {loss.item()}\n")
                    sys.stdout.flush()
