"""Optimizers with MindSpore's arguments: torch.optim optimizers that may also be called with gradients."""

from __future__ import annotations

from mscomm.nn.optim.adam import Adam as Adam
from mscomm.nn.optim.momentum import SGD as SGD
from mscomm.nn.optim.momentum import Momentum as Momentum
