"""Gradient accumulation: one training step over several micro-batches."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn, optim

from mscomm.train import GradientReducer


class TrainAccuStepsWithLossCell:
    """Takes training steps that sum the gradients of all micro-batches, and then combine the sums over the ranks.

    A step needs only the memory of one micro-batch. If all micro-batches have the same size and the network treats each
    image independently, the gradients equal the gradients of one large batch, up to rounding. A network with BatchNorm
    does not treat images independently, because BatchNorm computes its means over a micro-batch.
    """

    def __init__(self, network: nn.Module, loss_fn: Callable[[Tensor, Tensor], Tensor], optimizer: optim.Optimizer):
        self.network = network
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.reducer = GradientReducer(network.named_parameters())

    def __call__(self, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> float:
        """Take one step and return the mean loss over micro-batches and ranks.

        Every rank must pass the same number of micro-batches.
        """
        *first, last = micro_batches
        loss_so_far = 0.0
        self.reducer.zero_grad()
        with self.reducer.no_sync():  # in this context, backward() only adds to this rank's gradients
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
