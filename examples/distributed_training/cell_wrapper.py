"""Gradient accumulation: one training step over several micro-batches."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn, optim

from mscomm.train import GradientReducer


class TrainAccuStepsWithLossCell:
    """A training step whose gradients are those of all micro-batches of all ranks, combined once.

    The memory is that of one micro-batch. The gradients are those of one batch that holds them all, up to rounding, if
    the network treats each image by itself and the micro-batches have the same size. BatchNorm does not: its means are
    those of a micro-batch.
    """

    def __init__(self, network: nn.Module, loss_fn: Callable[[Tensor, Tensor], Tensor], optimizer: optim.Optimizer):
        self.network = network
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.reducer = GradientReducer(network.named_parameters())

    def __call__(self, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> float:
        """Take the step; the mean loss over micro-batches and ranks. Every rank gives the same number of them."""
        *first, last = micro_batches
        loss_so_far = 0.0
        self.reducer.zero_grad()
        with self.reducer.no_sync():  # these add to the rank's own gradients, and nothing is sent
            for micro_batch in first:
                loss = self._share_of_loss(micro_batch, len(micro_batches))
                loss.backward()
                loss_so_far += loss.item()
        loss = self._share_of_loss(last, len(micro_batches))
        self.reducer.carry(loss_so_far + loss.item())
        loss.backward()
        self.reducer.wait()
        self.optimizer.step()
        return self.reducer.carried

    def _share_of_loss(self, micro_batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        data, label = micro_batch
        return self.loss_fn(self.network(data), label) / number
