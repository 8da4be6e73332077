"""Momentum and SGD for NumPy, CuPy and JAX arrays. PyTorch and MindSpore have their own optimizers.

Writable arrays are changed in place. JAX arrays cannot be written, so `parameters` holds new arrays after each step.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from mscomm.arrays import assigned, beside
from mscomm.train import trees

_all: weakref.WeakSet[_Optimizer] = weakref.WeakSet()


def with_velocities(parameters: Sequence[Any]) -> list[_Optimizer]:
    """Return the optimizers that have velocities for some of these arrays."""
    wanted = set(map(id, parameters))
    return [one for one in _all if one._velocities and wanted & set(map(id, trees.leaves(one.parameters).values()))]


class _Optimizer:
    """The base class of both optimizers. It holds the parameters, and a velocity for each parameter."""

    def __init__(self, params: Any, learning_rate: float, momentum: float, weight_decay: float, nesterov: bool) -> None:
        name = type(self).__name__
        numbers = {"learning_rate": learning_rate, "momentum": momentum, "weight_decay": weight_decay}
        for argument, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, float | int):
                raise TypeError(f"{name}: {argument} is a {type(value).__name__}; expected a number")
            if value < 0:
                raise ValueError(f"{name}: {argument} is {value}; it must not be negative")
        self.parameters = params
        self.learning_rate = learning_rate
        """A program may change the learning rate between steps."""
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.nesterov = nesterov
        self._velocities: list[Any] = []
        _all.add(self)

    def step(self, gradients: Any) -> None:
        """Update the parameters by one step. gradients: arrays in the same structure as the parameters."""
        before, given = trees.leaves(self.parameters), trees.leaves(gradients)
        if given.keys() != before.keys():
            raise ValueError(f"{type(self).__name__}.step: gradients of {list(given)}, parameters {list(before)}")
        first = not self._velocities
        after = []
        for i, (name, parameter) in enumerate(before.items()):
            gradient = given[name]
            if self.weight_decay:
                gradient = gradient + self.weight_decay * parameter
            if self.momentum:
                if first:
                    self._velocities.append(gradient + 0)  # a copy, because the next step overwrites the gradient
                else:
                    self._velocities[i] = self._next(self._velocities[i], gradient)
                velocity = self._velocities[i]
                gradient = gradient + self.momentum * velocity if self.nesterov else velocity
            changed = parameter - self.learning_rate * gradient
            after.append(assigned(parameter, changed))
        self.parameters = trees.rebuilt(self.parameters, after)

    def _next(self, velocity: Any, gradient: Any) -> Any:
        return self.momentum * velocity + gradient

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state for a checkpoint: the learning rate and the velocities."""
        return {"learning_rate": self.learning_rate, "velocities": list(self._velocities)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state_dict(). Raise ValueError if the state belongs to other parameters."""
        parameters = list(trees.leaves(self.parameters).values())
        velocities = list(state["velocities"])
        if velocities and [_shape(one) for one in velocities] != [_shape(one) for one in parameters]:
            raise ValueError(f"{type(self).__name__}.load_state_dict: the state belongs to other parameters")
        self.learning_rate = state["learning_rate"]
        self._velocities = [
            beside(parameter, one) if isinstance(one, np.ndarray) else one
            for parameter, one in zip(parameters, velocities, strict=bool(velocities))
        ]


class Momentum(_Optimizer):
    """Gradient descent with momentum: v = momentum v + g; p = p - learning_rate v.

    p is a parameter, g is its gradient and v is its velocity. params: arrays in a list, a tuple or a dict, possibly
    nested. use_nesterov: if True, p = p - learning_rate (g + momentum v). weight_decay: weight_decay p is added to g.
    Raises TypeError if learning_rate, momentum or weight_decay is not a number, and ValueError if one of them is
    negative.

    >>> optimizer = mscomm.train.Momentum({"w": np.zeros((10, 3))}, 0.01, 0.9)
    >>> optimizer.step({"w": np.ones((10, 3))})
    """

    def __init__(
        self,
        params: Any,
        learning_rate: float,
        momentum: float,
        weight_decay: float = 0.0,
        *,
        use_nesterov: bool = False,
    ) -> None:
        super().__init__(params, learning_rate, momentum, weight_decay, use_nesterov)


class SGD(_Optimizer):
    """Gradient descent: v = momentum v + (1 - dampening) g; p = p - learning_rate v.

    v is g in the first step, or in every step if momentum is 0. nesterov: if True, p = p - learning_rate (g + momentum
    v). The other arguments are those of Momentum.

    >>> optimizer = mscomm.train.SGD([np.zeros(3)], 0.1)
    """

    def __init__(
        self,
        params: Any,
        learning_rate: float = 0.1,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        super().__init__(params, learning_rate, momentum, weight_decay, nesterov)
        self.dampening = dampening

    def _next(self, velocity: Any, gradient: Any) -> Any:
        return self.momentum * velocity + (1 - self.dampening) * gradient


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(x.shape) if hasattr(x, "shape") else np.shape(x)
