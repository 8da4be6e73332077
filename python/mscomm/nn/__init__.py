"""MindSpore's cells, losses and optimizers over PyTorch. A Cell is a torch.nn.Module.

This module needs PyTorch. The name of any other class of mindspore.nn raises an AttributeError that says what PyTorch
has instead; PyTorch's modules work inside a Cell.

>>> class Net(mscomm.nn.Cell):
...     def __init__(self):
...         super().__init__()
...         self.dense = mscomm.nn.Dense(8, 2)
...
...     def construct(self, x):
...         return self.dense(x)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mscomm import tensor as _tensor  # noqa: F401  # first, because its error message says what is missing
from mscomm.nn.cell import Cell as Cell
from mscomm.nn.cell import CellList as CellList
from mscomm.nn.cell import SequentialCell as SequentialCell
from mscomm.nn.layers import GELU as GELU
from mscomm.nn.layers import AvgPool2d as AvgPool2d
from mscomm.nn.layers import BatchNorm2d as BatchNorm2d
from mscomm.nn.layers import Conv2d as Conv2d
from mscomm.nn.layers import Dense as Dense
from mscomm.nn.layers import Dropout as Dropout
from mscomm.nn.layers import Flatten as Flatten
from mscomm.nn.layers import MaxPool2d as MaxPool2d
from mscomm.nn.layers import ReLU as ReLU
from mscomm.nn.layers import Sigmoid as Sigmoid
from mscomm.nn.layers import Softmax as Softmax
from mscomm.nn.layers import Tanh as Tanh
from mscomm.nn.losses import L1Loss as L1Loss
from mscomm.nn.losses import MSELoss as MSELoss
from mscomm.nn.losses import SoftmaxCrossEntropyWithLogits as SoftmaxCrossEntropyWithLogits
from mscomm.nn.optim import SGD as SGD
from mscomm.nn.optim import Adam as Adam
from mscomm.nn.optim import Momentum as Momentum
from mscomm.nn.wrap import DistributedGradReducer as DistributedGradReducer
from mscomm.nn.wrap import TrainOneStepCell as TrainOneStepCell
from mscomm.nn.wrap import WithLossCell as WithLossCell
from mscomm.ops.operator import missing

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"module 'mscomm.nn' has no attribute {name!r}")
        raise AttributeError(missing("nn", name))
