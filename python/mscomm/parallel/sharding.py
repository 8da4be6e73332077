"""shard(): strategies for functions and modules of PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from mscomm.ops.computing import Identity
from mscomm.ops.operator import Operator, Strategy

F = TypeVar("F", bound=Callable[..., Any])


def shard(
    function: F,
    in_strategy: Sequence[tuple[int, ...] | None],
    out_strategy: Sequence[tuple[int, ...] | None] | None = None,
) -> F:
    """Return a function whose inputs, and results, are divided as the strategies say when a network is planned.

    function: a function of tensors; or a torch.nn.Module, which is changed and returned. in_strategy: for each
    positional input, into how many parts each of its dimensions is divided, or None to leave the choice to the plan.
    out_strategy: the same for each result. The plan divides the operators inside the function so that the inputs fit.
    Outside of plan() and of the modes that divide networks, the strategies have no effect, and a warning says so.

    Raise TypeError if a strategy has another form, and ValueError for a number below 1. plan() raises ValueError if a
    strategy does not fit the inputs.

    >>> matmul = mscomm.parallel.shard(torch.matmul, ((2, 4), (4, 1)))
    >>> net.head = mscomm.parallel.shard(net.head, ((8, 1),))
    """
    name = getattr(function, "__name__", type(function).__name__)
    ins, outs = _marks(name, "in_strategy", in_strategy), _marks(name, "out_strategy", out_strategy or ())

    def before(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(ins) > len(inputs):
            raise ValueError(f"shard: in_strategy has {len(ins)} items, {name} was called with {len(inputs)} inputs")
        return (*_marked(ins, inputs), *inputs[len(ins) :])

    def after(result: Any) -> Any:
        if not outs:
            return result
        results = result if isinstance(result, tuple) else (result,)
        if len(outs) != len(results):
            raise ValueError(f"shard: out_strategy has {len(outs)} items, {name} has returned {len(results)} results")
        marked = tuple(_marked(outs, results))
        return marked if isinstance(result, tuple) else marked[0]

    if isinstance(function, torch.nn.Module):
        function.register_forward_pre_hook(lambda _, inputs: before(inputs))
        function.register_forward_hook(lambda _, inputs, result: after(result))
        return function

    @functools.wraps(function)
    def sharded(*inputs: Any, **named: Any) -> Any:
        return after(function(*before(inputs), **named))

    return sharded  # type: ignore[return-value]


def _marks(name: str, argument: str, strategy: Any) -> list[Operator | None]:
    """Return an operator for each input or result, which has the strategy and changes nothing else."""
    if not isinstance(strategy, tuple | list):
        raise TypeError(
            f"shard: {argument} is a {type(strategy).__name__}; expected a tuple with a tuple for each tensor"
        )
    made: list[Operator | None] = []
    for one in strategy:
        mark = None
        if one is not None:
            given: Strategy = (one,)
            mark = Identity().shard(given)
            mark.instance_name = name
        made.append(mark)
    return made


def _marked(marks: list[Operator | None], tensors: Sequence[Any]) -> list[Any]:
    return [x if mark is None else mark(x) for mark, x in zip(marks, tensors, strict=False)]
