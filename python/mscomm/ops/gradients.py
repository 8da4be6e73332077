"""Calls the communication operators with PyTorch tensors, through which gradients can flow."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from mscomm.tensor import like


class _Call(torch.autograd.Function):
    """A call of a communication operator, whose backward pass calls the operator's gradient()."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, operator: Any) -> Any:
        result = operator.compute(x.detach())
        ctx.operator = operator
        ctx.save_for_backward(x, *([result] if isinstance(result, torch.Tensor) else []))
        return result

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # PyTorch raises an error for gradients of gradients
    def backward(ctx: Any, by_result: torch.Tensor) -> Any:
        x, *result = ctx.saved_tensors
        return ctx.operator.gradient(by_result.contiguous(), x, *result), None


def call(operator: Any, x: torch.Tensor) -> Any:
    """Call the operator, so that a gradient can flow from the result to x. The result is a Tensor if x is one."""
    if not x.requires_grad:
        return like(x, operator.compute(x))
    return like(x, _Call.apply(x.as_subclass(torch.Tensor), operator))
