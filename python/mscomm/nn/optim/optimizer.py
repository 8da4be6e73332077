"""What the optimizers share: the learning rate of each step, and the call with gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from mscomm.tensor import ParameterTuple


class Optimizer:
    """A part of the optimizers, which comes before a class of torch.optim among the base classes.

    parameters: the parameters in the order in which they were given.
    """

    parameters: ParameterTuple

    def __call__(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Set the gradients of `parameters`, in this order, and take a step. Return True.

        Raise ValueError if there is another number of gradients.
        """
        if len(gradients) != len(self.parameters):
            raise ValueError(
                f"{type(self).__name__}: got {len(gradients)} gradients for {len(self.parameters)} parameters"
            )
        for one, gradient in zip(self.parameters, gradients, strict=True):
            one.grad = gradient.detach().as_subclass(torch.Tensor)
        self.step()  # type: ignore[attr-defined]
        return True

    def begin(self, parameters: ParameterTuple) -> None:
        """Called by the constructors, after that of torch.optim."""
        self.parameters = parameters
        self.register_step_pre_hook(_set_rates)  # type: ignore[attr-defined]


def _set_rates(optimizer: Any, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        rates = group.get("learning_rates")
        if rates:
            group["lr"] = rates[min(group["taken"], len(rates) - 1)]
        group["taken"] = group.get("taken", 0) + 1


def arguments(
    optimizer: str, params: Iterable[Any], learning_rate: Any, weight_decay: float, loss_scale: float
) -> tuple[list[dict[str, Any]], ParameterTuple]:
    """Return (parameter groups for torch.optim, all parameters in the order in which they were given).

    params: parameters, or groups of them: dicts with "params" and perhaps "lr" and "weight_decay", and perhaps a dict
    with "order_params". learning_rate: a number, or a sequence with a number for each step, of which the last is kept.
    As in MindSpore, weight_decay applies to the parameters without "beta" or "gamma" in their names, unless there are
    groups. Raise TypeError or ValueError for invalid arguments.
    """
    if loss_scale != 1.0:
        raise NotImplementedError(f"{optimizer}: loss_scale={loss_scale}; only 1.0 is in mscomm")
    given = list(params)
    if not given:
        raise ValueError(f"{optimizer}: there are no parameters")
    order: list[Any] | None = None
    groups: list[dict[str, Any]] = []
    if isinstance(given[0], dict):
        for group in given:
            if "order_params" in group:
                order = list(group["order_params"])
            else:
                groups.append({"lr": learning_rate, "weight_decay": weight_decay, **group})
                groups[-1]["params"] = list(group["params"])
    else:
        order = given
        undecayed = [one for one in given if any(word in str(getattr(one, "name", "")) for word in ("beta", "gamma"))]
        left_out = {id(one) for one in undecayed} if weight_decay else set()
        groups.append({"params": [one for one in given if id(one) not in left_out], "weight_decay": weight_decay})
        groups.append({"params": [one for one in given if id(one) in left_out], "weight_decay": 0.0})
    for group in groups:
        rates = _rates(optimizer, group.get("lr", learning_rate))
        # The schedule and the number of steps are in the group, so that state_dict() has them.
        group.update(lr=rates[0], learning_rates=rates if len(rates) > 1 else [], taken=0)
    every = [one for group in groups for one in group["params"]] if order is None else order
    return [group for group in groups if group["params"]], ParameterTuple(every)


def _rates(optimizer: str, given: Any) -> list[float]:
    if isinstance(given, torch.Tensor):
        given = given.reshape(-1).tolist()
    try:
        rates = [float(given)] if isinstance(given, int | float) else [float(rate) for rate in given]
    except TypeError:
        raise TypeError(
            f"{optimizer}: learning_rate is a {type(given).__name__}; expected a number, or one for each step"
            ". For other schedules, use torch.optim and torch.optim.lr_scheduler"
        ) from None
    if not rates or min(rates) < 0:
        raise ValueError(f"{optimizer}: learning_rate={given!r}; expected numbers from 0")
    return rates
