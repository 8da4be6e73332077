"""What the optimizers share: the learning rate of each step, and the call with gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch


class Optimizer:
    """A part of the optimizers, which comes before a class of torch.optim among the base classes."""

    param_groups: list[dict[str, Any]]

    def __call__(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Set the gradients of the parameters, in their order, and take a step. Return True."""
        parameters = [one for group in self.param_groups for one in group["params"]]
        if len(gradients) != len(parameters):
            raise ValueError(f"{type(self).__name__}: got {len(gradients)} gradients for {len(parameters)} parameters")
        for one, gradient in zip(parameters, gradients, strict=True):
            one.grad = gradient.detach().as_subclass(torch.Tensor)
        self.step()
        return True

    def step(self, closure: Any = None) -> Any:
        """Take a step with the gradients of the parameters. closure: as in torch.optim."""
        for group in self.param_groups:
            rates = group["learning_rates"]
            if rates:
                group["lr"] = rates[min(group["taken"], len(rates) - 1)]
            group["taken"] += 1
        return super().step(closure)  # type: ignore[misc]


def arguments(
    optimizer: str, params: Iterable[Any], learning_rate: Any, weight_decay: float, loss_scale: float
) -> tuple[list[dict[str, Any]], float]:
    """Return (parameter groups, learning rate of the first step) for a class of torch.optim.

    learning_rate: a number, or a sequence with a number for each step, of which the last is kept. As in MindSpore,
    weight_decay applies to the parameters without "beta" or "gamma" in their names. Raise TypeError or ValueError for
    invalid arguments.
    """
    if loss_scale != 1.0:
        raise NotImplementedError(f"{optimizer}: loss_scale={loss_scale}; only 1.0 is in mscomm")
    rates = [learning_rate] if isinstance(learning_rate, int | float) else _numbers(optimizer, learning_rate)
    if not rates or min(rates) < 0:
        raise ValueError(f"{optimizer}: learning_rate={learning_rate!r}; expected numbers from 0")
    given = list(params)
    if not given:
        raise ValueError(f"{optimizer}: there are no parameters")
    if isinstance(given[0], dict):
        groups = [dict(group) for group in given]
    else:
        undecayed = [one for one in given if any(word in str(getattr(one, "name", "")) for word in ("beta", "gamma"))]
        split = bool(weight_decay and undecayed)
        kept = {id(one) for one in undecayed} if split else set()
        groups = [{"params": [one for one in given if id(one) not in kept], "weight_decay": weight_decay}]
        if split:
            groups.append({"params": undecayed, "weight_decay": 0.0})
    for group in groups:
        group["learning_rates"] = [float(rate) for rate in rates] if len(rates) > 1 else []
        group["taken"] = 0  # steps; in the group, so that state_dict() has it
    return [group for group in groups if group["params"]], float(rates[0])


def _numbers(optimizer: str, given: Any) -> list[float]:
    if isinstance(given, torch.Tensor):
        given = given.reshape(-1).tolist()
    try:
        return [float(rate) for rate in given]
    except TypeError:
        kind = type(given).__name__
        raise TypeError(
            f"{optimizer}: learning_rate is a {kind}; expected a number, or a sequence with a number for each step."
            " For other schedules, use torch.optim and torch.optim.lr_scheduler"
        ) from None
