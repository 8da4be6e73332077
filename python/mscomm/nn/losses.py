"""Loss functions with MindSpore's arguments and defaults."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from mscomm.nn.cell import Cell


class _Loss(Cell):
    """The base class. reduction: "mean", "sum" or "none"."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f'{type(self).__name__}: reduction={reduction!r}; expected "mean", "sum" or "none"')
        self.reduction = reduction

    def _reduced(self, losses: Any) -> Any:
        return losses if self.reduction == "none" else getattr(torch, self.reduction)(losses)


class MSELoss(_Loss):
    """The squared differences of logits and labels. Raises ValueError if their shapes differ, where MindSpore would
    broadcast them."""

    def construct(self, logits: Any, labels: Any) -> Any:
        return self._reduced(torch.square(logits - _same_shape("MSELoss", logits, labels)))


class L1Loss(_Loss):
    """The absolute differences of logits and labels. Raises ValueError if their shapes differ, where MindSpore would
    broadcast them."""

    def construct(self, logits: Any, labels: Any) -> Any:
        return self._reduced(torch.abs(logits - _same_shape("L1Loss", logits, labels)))


class SoftmaxCrossEntropyWithLogits(_Loss):
    """The cross entropy of softmax(logits) and the labels, for each row. sparse: True if the labels are class numbers;
    otherwise they are probabilities. reduction: "none" by default."""

    def __init__(self, sparse: bool = False, reduction: str = "none") -> None:
        super().__init__(reduction)
        self.sparse = sparse

    def construct(self, logits: Any, labels: Any) -> Any:
        if self.sparse:
            if logits.ndim != 2 or labels.ndim != 1:
                shapes = f"{list(logits.shape)} and {list(labels.shape)}"
                raise ValueError(f"SoftmaxCrossEntropyWithLogits: logits and labels {shapes}; expected (N, C) and (N)")
            none_is_ignored = -(2**31)
            return functional.cross_entropy(
                logits, labels.long(), ignore_index=none_is_ignored, reduction=self.reduction
            )
        return self._reduced(-torch.sum(labels * torch.log_softmax(logits, -1), -1))


def _same_shape(loss: str, logits: Any, labels: Any) -> Any:
    if logits.shape != labels.shape:  # broadcasting would give a loss of other pairs than the user means
        raise ValueError(f"{loss}: logits have the shape {list(logits.shape)}, labels {list(labels.shape)}")
    return labels
