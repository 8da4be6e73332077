"""The training loop with gradient accumulation."""

import itertools
import sys

import torch
from cell_wrapper import TrainAccuStepsWithLossCell

from mscomm.train import broadcast_parameters


class Model_ACCU:
    """Trains like mscomm.Model, but each step uses `mini_steps` batches.

    The last step of an epoch uses the remaining batches.
    """

    def __init__(self, network, loss_fn, optimizer, mini_steps):
        broadcast_parameters(network.state_dict())  # all ranks begin with rank 0's weights
        self.network = network
        self.train_step = TrainAccuStepsWithLossCell(network, loss_fn, optimizer)
        self.mini_steps = mini_steps

    def train(self, epoch, train_dataset):
        """Train for `epoch` epochs. Every rank prints each step's loss, which is the mean over the ranks."""
        self.network.train()
        for epoch_num in range(1, epoch + 1):
            batches = iter(train_dataset)
            for step in itertools.count(1):
                micro_batches = [
                    (torch.from_numpy(image), torch.from_numpy(label).long())
                    for image, label in itertools.islice(batches, self.mini_steps)
                ]
                if not micro_batches:
                    break
                loss = self.train_step(micro_batches)
                # Write the whole line at once, so that the lines of different ranks do not mix. With
                # PYTHONUNBUFFERED=1, print() would write the newline separately.
                sys.stdout.write(f"epoch: {epoch_num} step: {step}, loss is {loss}\n")
                sys.stdout.flush()
