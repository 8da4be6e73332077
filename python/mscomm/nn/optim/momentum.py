"""Momentum and SGD."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from mscomm.nn.optim.optimizer import Optimizer, arguments


class Momentum(Optimizer, torch.optim.SGD):
    """Gradient descent with momentum: v = momentum * v + gradient; parameter -= learning_rate * v.

    params: parameters, or groups of them as for torch.optim. learning_rate: a number, or a sequence with a number for
    each step. weight_decay is added to the gradient, times the parameter; parameters with "beta" or "gamma" in their
    names are left out. use_nesterov: Nesterov's momentum. The optimizer is a torch.optim.SGD.

    >>> mscomm.nn.Momentum(net.trainable_params(), 0.01, 0.9)
    """

    def __init__(
        self,
        params: Iterable[Any],
        learning_rate: Any,
        momentum: float,
        weight_decay: float = 0.0,
        loss_scale: float = 1.0,
        use_nesterov: bool = False,
    ) -> None:
        groups, parameters = arguments("Momentum", params, learning_rate, weight_decay, loss_scale)
        torch.optim.SGD.__init__(self, groups, groups[0]["lr"], momentum, nesterov=use_nesterov)
        self.begin(parameters)


class SGD(Optimizer, torch.optim.SGD):
    """Stochastic gradient descent, by default with learning rate 0.1. The arguments are those of Momentum; dampening as
    in torch.optim.SGD."""

    def __init__(
        self,
        params: Iterable[Any],
        learning_rate: Any = 0.1,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        loss_scale: float = 1.0,
    ) -> None:
        groups, parameters = arguments("SGD", params, learning_rate, weight_decay, loss_scale)
        torch.optim.SGD.__init__(self, groups, groups[0]["lr"], momentum, dampening, nesterov=nesterov)
        self.begin(parameters)
