"""PyTorch's part of GradientReducer: hooks that tell when a gradient is there, and gradients that are views."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

from mscomm.arrays import torch as arrays


class Autograd:
    """Keeps the gradients of the parameters in the reducer's buffers."""

    def __init__(self, reducer: Any, parameters: list[torch.nn.Parameter]) -> None:
        self._reducer = weakref.proxy(reducer)
        self._parameters = parameters
        self._views: list[torch.Tensor] = []
        self._look_at_buffers()
        # The hooks live as long as the parameters; they do nothing when the reducer, and so this, is gone.
        this = weakref.ref(self)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(functools.partial(_accumulated, this, index))
            for index, parameter in enumerate(parameters)
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _look_at_buffers(self) -> None:
        self._views = [arrays.over(buffer) for buffer in self._reducer.buffers]

    def accumulated(self, index: int) -> None:
        """The backward pass has put this gradient where it belongs."""
        if self._reducer.syncing:
            self._put(index)
            self._reducer.ready(index)

    def _put(self, index: int) -> None:
        """The gradient into its buffer, if autograd made a new tensor for it."""
        parameter, view = self._parameters[index], self._views[index]
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise TypeError(
                f"GradientReducer: a gradient of layout {gradient.layout}; use dense gradients (sparse=False), or"
                " exclude the parameter"
            )
        if gradient.data_ptr() != view.data_ptr() or gradient.stride() != view.stride():
            view.copy_(gradient)
            parameter.grad = view

    def gather(self) -> None:
        """At the end of the backward pass: what took no part in it, but has a gradient of passes before."""
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None and self._reducer.is_missing(index):
                self._put(index)
                self._reducer.ready(index)

    def hand_out(self) -> None:
        """After the step: the gradients that other ranks had."""
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is None and self._reducer.was_used(index):
                parameter.grad = self._views[index]

    def zero(self) -> None:
        self._reducer.clear()
        for view, parameter in zip(self._views, self._parameters, strict=True):
            if parameter.grad is not None:
                parameter.grad = view

    def move(self) -> None:
        """The buckets were laid out anew, and the gradients are in the new ones."""
        self._look_at_buffers()
        for view, parameter in zip(self._views, self._parameters, strict=True):
            if parameter.grad is not None:
                parameter.grad = view


def _accumulated(autograd: weakref.ref[Autograd], index: int, _parameter: torch.Tensor) -> None:
    there = autograd()
    if there is not None:
        there.accumulated(index)
