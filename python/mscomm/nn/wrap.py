"""Cells that wrap a network: with its loss, and with a training step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mscomm import collectives, context
from mscomm.context import ParallelMode
from mscomm.nn.cell import Cell
from mscomm.ops.composite import GradOperation
from mscomm.tensor import ParameterTuple


class WithLossCell(Cell):
    """Computes loss_fn(backbone(data), label)."""

    def __init__(self, backbone: Any, loss_fn: Any) -> None:
        super().__init__(auto_prefix=False)
        self._backbone = backbone
        self._loss_fn = loss_fn

    def construct(self, data: Any, label: Any) -> Any:
        return self._loss_fn(self._backbone(data), label)

    @property
    def backbone_network(self) -> Any:
        """The network without its loss."""
        return self._backbone


class DistributedGradReducer(Cell):
    """Combines gradients over all ranks: reducer(gradients) returns a tuple of sums or means.

    parameters: the parameters, in the order of the gradients. mean: True for means, False for sums; None means
    gradients_mean of set_auto_parallel_context. All gradients are combined in one call of mscomm.all_reduce_many, which
    raises its errors. The gradients of parameters with layerwise_parallel=True are returned as they are. For reductions
    that run during the backward pass, use mscomm.Model or mscomm.train.GradientReducer.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], mean: bool | None = None) -> None:
        super().__init__(auto_prefix=False)
        self._own = [bool(getattr(one, "layerwise_parallel", False)) for one in parameters]
        self._op = "avg" if (context.get_auto_parallel_context("gradients_mean") if mean is None else mean) else "sum"

    def construct(self, gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        if len(gradients) != len(self._own):
            raise ValueError(f"DistributedGradReducer: {len(gradients)} gradients, {len(self._own)} parameters")
        shared = [one.contiguous() for one, own in zip(gradients, self._own, strict=True) if not own]
        reduced = iter(collectives.all_reduce_many(shared, self._op) if shared else ())
        return tuple(one if own else next(reduced) for one, own in zip(gradients, self._own, strict=True))


class TrainOneStepCell(Cell):
    """Takes a training step when it is called, and returns the loss.

    network: a cell that returns the loss, such as WithLossCell. optimizer: an optimizer of mscomm.nn. sens: the factor
    of the gradients. In data-parallel mode, which must be set before the cell is created, gradients are combined over
    the ranks. Attributes for subclasses: network, optimizer, weights, grad, sens, grad_reducer.
    """

    def __init__(self, network: Any, optimizer: Any, sens: float = 1.0) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.optimizer = optimizer
        self.weights = ParameterTuple(one for group in optimizer.param_groups for one in group["params"])
        self.grad = GradOperation(get_by_list=True, sens_param=True)
        self.sens = sens
        shared = context.get_auto_parallel_context("parallel_mode") == ParallelMode.DATA_PARALLEL
        self.reducer_flag = shared
        self.grad_reducer = DistributedGradReducer(self.weights) if shared else torch.nn.Identity()
        self.set_train()

    def construct(self, *inputs: Any) -> Any:
        loss = self.network(*inputs)
        found = torch.autograd.grad(loss, self.weights, torch.full_like(loss, self.sens), allow_unused=True)
        gradients = tuple(torch.zeros_like(w) if g is None else g for w, g in zip(self.weights, found, strict=True))
        self.optimizer(self.grad_reducer(gradients))
        return loss.detach()
