"""PyTorch's part of GradientReducer: hooks that tell when a gradient is there, and gradients that are views."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from mscomm.arrays import torch as arrays
from mscomm.train.step import Step

_alive: weakref.WeakSet[Autograd] = weakref.WeakSet()


class Autograd:
    """Keeps the gradients of the parameters in the step's buffers. others: parameters that it only zeroes.

    A gradient that autograd has made elsewhere is copied into its buffer at once on the CPU; on a device it stays where
    it is until its bucket is started, which gathers all such ones.
    """

    def __init__(self, step: Step, parameters: list[Any], others: Iterable[Any]) -> None:
        self._step = step
        self._parameters = parameters
        self._others = list(others)
        self._hooks: list[Any] = []
        self._elsewhere: set[int] = set()  # gradients of this step, on a device, that do not lie in their buffers
        self._stream: Any = None  # of the gradient before
        self.syncing = True  # False inside no_sync()
        mine = {id(parameter) for parameter in parameters}
        for earlier in list(_alive):  # two would write to one gradient
            if any(id(parameter) in mine for parameter in earlier._parameters):
                earlier.end()
        # The hooks know the object weakly, so that they end with the reducer and not with the parameters.
        this = weakref.ref(self)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(functools.partial(_accumulated, this, index))
            for index, parameter in enumerate(parameters)
        ]
        _alive.add(self)
        self._look_at_buffers()

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def __del__(self) -> None:
        self.end()

    def _look_at_buffers(self) -> None:
        self._on_device = isinstance(self._step.buffers[0], torch.Tensor)
        self._views = self._step.buffers if self._on_device else [arrays.over(one) for one in self._step.buffers]
        # A gradient is told by its address: users may exchange the memory of a tensor that they were given.
        self._addresses = [view.data_ptr() for view in self._views]
        self._strides = [view.stride() for view in self._views]

    def accumulated(self, index: int) -> None:
        """The backward pass has put this gradient where it belongs."""
        if self.syncing:
            self._put(index)

    def _put(self, index: int) -> None:
        """The gradient is there, if there is one: for its buffer, if autograd made a new tensor for it."""
        parameter = self._parameters[index]
        gradient = parameter.grad
        if gradient is None:  # a hook before ours took it away
            return
        if gradient.layout is not torch.strided:
            raise TypeError(
                f"GradientReducer: a gradient of layout {gradient.layout}; use dense gradients (sparse=False), or"
                " exclude the parameter"
            )
        self._follow(gradient)
        source = None
        if gradient.data_ptr() != self._addresses[index] or gradient.stride() != self._strides[index]:
            as_it_is = gradient.is_contiguous() and not (gradient.is_conj() or gradient.is_neg())
            if self._on_device and as_it_is:
                source = arrays.memory(gradient)
                self._elsewhere.add(index)
            else:
                view = self._views[index]
                view.copy_(gradient.detach())
                parameter.grad = view.detach()
        self._take_over(self._step.ready(index, source))

    def _follow(self, on_it: torch.Tensor) -> None:
        """A bucket is started on the then current stream, which comes after those of all its gradients."""
        if not on_it.is_cuda:
            return
        stream = torch.cuda.current_stream(on_it.device)
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def _take_over(self, indices: Iterable[int]) -> None:
        """These lie in their buffers now: what autograd made is no longer needed."""
        for index in self._elsewhere.intersection(indices):
            parameter = self._parameters[index]
            if parameter.grad is not None:
                arrays.used(parameter.grad)
                parameter.grad = self._views[index].detach()
            self._elsewhere.remove(index)

    def gather(self) -> list[int]:
        """At the end of the backward pass: what took no part in it, but has a gradient of passes before. What this rank
        does not have."""
        self._follow(self._views[0])
        for index in self._step.missing():
            self._put(index)
        return self._step.missing()

    def hand_out(self, missing: list[int]) -> None:
        """After the step: the gradients that only other ranks had, and those of the last buckets."""
        for index in missing:
            if self._step.was_used(index):
                self._parameters[index].grad = self._views[index].detach()
        self._take_over(list(self._elsewhere))
        self._stream = None

    def move(self) -> None:
        """The gradients are in new buffers."""
        self._look_at_buffers()
        for view, parameter in zip(self._views, self._parameters, strict=True):
            if parameter.grad is not None:
                parameter.grad = view.detach()

    def zero(self) -> None:
        self._step.clear()
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None and parameter.grad.data_ptr() != self._addresses[index]:
                parameter.grad = self._views[index].detach()
        for parameter in self._others:
            if parameter.grad is not None:
                parameter.grad = torch.zeros_like(parameter.grad)


def _accumulated(autograd: weakref.ref[Autograd], index: int, _parameter: torch.Tensor) -> None:
    there = autograd()
    if there is not None:
        there.accumulated(index)
