"""Adam."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from mscomm.nn.optim.optimizer import Optimizer, arguments


class Adam(Optimizer, torch.optim.Adam):
    """Kingma and Ba, Adam: A Method for Stochastic Optimization (2014). The optimizer is a torch.optim.Adam.

    params, learning_rate, weight_decay: as in Momentum. beta1, beta2, eps: as in the paper.
    """

    def __init__(
        self,
        params: Iterable[Any],
        learning_rate: Any = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        loss_scale: float = 1.0,
    ) -> None:
        groups, rate = arguments("Adam", params, learning_rate, weight_decay, loss_scale)
        torch.optim.Adam.__init__(self, groups, rate, (beta1, beta2), eps)
