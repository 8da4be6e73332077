"""Data-parallel training: each rank computes gradients on its own batch, then all ranks make the same update."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mscomm.train import callback as callback
from mscomm.train import model as model
from mscomm.train import serialization as serialization
from mscomm.train.callback import (
    Callback,
    CheckpointConfig,
    LossMonitor,
    ModelCheckpoint,
    ProgressBar,
    RunContext,
    StepTrace,
    TimeMonitor,
)
from mscomm.train.model import Model
from mscomm.train.optimizers import SGD, Momentum
from mscomm.train.reducer import GradientReducer, broadcast_parameters
from mscomm.train.serialization import (
    load_checkpoint,
    load_distributed_checkpoint,
    load_param_into_net,
    save_checkpoint,
)

__all__ = [
    "SGD",
    "Callback",
    "CheckpointConfig",
    "GradientReducer",
    "LossMonitor",
    "Model",
    "ModelCheckpoint",
    "Momentum",
    "ProgressBar",
    "RunContext",
    "StepTrace",
    "TimeMonitor",
    "broadcast_parameters",
    "load_checkpoint",
    "load_distributed_checkpoint",
    "load_param_into_net",
    "save_checkpoint",
]

if TYPE_CHECKING:
    from mscomm.train.ddp import DistributedDataParallel as DistributedDataParallel
else:

    def __getattr__(name: str) -> Any:
        if name == "DistributedDataParallel":  # import the class only when it is used, because it needs PyTorch
            return importlib.import_module("mscomm.train.ddp").DistributedDataParallel
        raise AttributeError(f"module 'mscomm.train' has no attribute {name!r}")
