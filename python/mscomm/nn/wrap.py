"""Cells that wrap a network: with its loss, and with a training step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mscomm import collectives, context
from mscomm.context import ParallelMode
from mscomm.group import Group
from mscomm.job import resolve
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
    gradients_mean of set_auto_parallel_context. degree: the number of ranks, which is checked. fusion_type: no effect.
    group: the ranks; None means all. All gradients are combined in one call of mscomm.all_reduce_many, which raises its
    errors. The gradients of parameters with layerwise_parallel=True are returned as they are. For reductions that run
    during the backward pass, use mscomm.Model or mscomm.train.GradientReducer.

    Raises ValueError for a wrong degree, and NotImplementedError in the modes that divide the network.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        mean: bool | None = None,
        degree: int | None = None,
        fusion_type: int = 1,
        group: Group | str | None = None,
    ) -> None:
        super().__init__(auto_prefix=False)
        _refuse_division("DistributedGradReducer")
        if degree is not None and degree != resolve(group).size:
            raise ValueError(f"DistributedGradReducer: degree={degree}, but there are {resolve(group).size} ranks")
        self._group = group
        self._own = [bool(getattr(one, "layerwise_parallel", False)) for one in parameters]
        self._op = "avg" if (context.get_auto_parallel_context("gradients_mean") if mean is None else mean) else "sum"

    def construct(self, gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        if len(gradients) != len(self._own):
            raise ValueError(f"DistributedGradReducer: {len(gradients)} gradients, {len(self._own)} parameters")
        shared = [one.contiguous() for one, own in zip(gradients, self._own, strict=True) if not own]
        reduced = iter(collectives.all_reduce_many(shared, self._op, group=self._group) if shared else ())
        return tuple(one if own else next(reduced) for one, own in zip(gradients, self._own, strict=True))


def _refuse_division(name: str) -> None:
    mode = context.get_auto_parallel_context("parallel_mode")
    if mode in context.DIVIDING:
        raise NotImplementedError(f"{name}: not in the parallel mode {mode}; use mscomm.Model")


class TrainOneStepCell(Cell):
    """Takes a training step when it is called, and returns the loss.

    network: a cell that returns the loss, such as WithLossCell. optimizer: an optimizer of mscomm.nn. sens: the factor
    of the gradients, not 0. In data-parallel mode, which must be set before the cell is created, gradients are combined
    over the ranks. The cell is in training mode. Attributes for subclasses: network, optimizer, weights, grad, sens,
    grad_reducer.

    Raises ValueError for sens=0, and NotImplementedError in the modes that divide the network.
    """

    def __init__(self, network: Any, optimizer: Any, sens: float = 1.0) -> None:
        super().__init__(auto_prefix=False)
        _refuse_division("TrainOneStepCell")
        if sens == 0:
            raise ValueError("TrainOneStepCell: sens=0; expected another number")
        self.network = network
        self.optimizer = optimizer
        self.weights: ParameterTuple = optimizer.parameters
        self.grad = GradOperation(get_by_list=True, sens_param=True)
        self.sens = sens
        mode = context.get_auto_parallel_context("parallel_mode")
        shared = mode in (ParallelMode.DATA_PARALLEL, ParallelMode.HYBRID_PARALLEL)
        self.reducer_flag = shared
        self.grad_reducer = DistributedGradReducer(self.weights) if shared else torch.nn.Identity()
        self.set_train()

    def construct(self, *inputs: Any) -> Any:
        loss = self.network(*inputs)
        trained = [weight for weight in self.weights if weight.requires_grad]
        found = torch.autograd.grad(loss, trained, torch.full_like(loss, self.sens), allow_unused=True)
        by_weight = dict(zip(map(id, trained), found, strict=True))
        gradients = tuple(torch.zeros_like(w) if (g := by_weight.get(id(w))) is None else g for w in self.weights)
        self.optimizer(self.grad_reducer(gradients))
        return loss.detach()
