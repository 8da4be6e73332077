"""Adam."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from mscomm.nn.optim.optimizer import Optimizer, arguments


class Adam(Optimizer, torch.optim.Adam):
    """Kingma and Ba, Adam: A Method for Stochastic Optimization (2014). The optimizer is a torch.optim.Adam.

    params, learning_rate, weight_decay: as in Momentum. beta1, beta2: as in the paper. eps is added to the root after
    the correction of the bias, as in PyTorch; MindSpore adds it before, which differs if eps is not small. use_locking
    has no effect. Raises NotImplementedError for use_nesterov=True and use_amsgrad=True.
    """

    def __init__(
        self,
        params: Iterable[Any],
        learning_rate: Any = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        use_locking: bool = False,
        use_nesterov: bool = False,
        weight_decay: float = 0.0,
        loss_scale: float = 1.0,
        use_amsgrad: bool = False,
    ) -> None:
        if use_nesterov or use_amsgrad:
            raise NotImplementedError("Adam: use_nesterov and use_amsgrad are not in mscomm")
        groups, parameters = arguments("Adam", params, learning_rate, weight_decay, loss_scale)
        torch.optim.Adam.__init__(self, groups, groups[0]["lr"], (beta1, beta2), eps)
        self.begin(parameters)
