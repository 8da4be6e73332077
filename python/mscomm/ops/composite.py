"""MindSpore's functions of mindspore.ops that are not operators: shapes, gradients, and functions of many tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from mscomm.tensor import Tensor, torch_dtype

partial = functools.partial


def shape(x: torch.Tensor) -> tuple[int, ...]:
    """Return the shape as a tuple."""
    return tuple(x.shape)


def rank(x: torch.Tensor) -> int:
    """Return the number of dimensions."""
    return x.ndim


def size(x: torch.Tensor) -> int:
    """Return the number of elements."""
    return x.numel()


def dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype, which is a dtype of PyTorch."""
    return x.dtype


def cast(x: Any, dtype: Any) -> torch.Tensor:
    """Return x with another dtype. x may be a number."""
    return x.to(torch_dtype(dtype)) if isinstance(x, torch.Tensor) else Tensor(x, dtype)


def scalar_to_array(input_x: float) -> Tensor:
    """Return a tensor of shape () with this number.

    >>> mscomm.ops.scalar_to_array(-1.0)
    Tensor(shape=[], dtype=Float32, value=
    -1.)
    """
    return Tensor(input_x)


def scalar_to_tensor(input_x: float, dtype: Any = "float32") -> Tensor:
    """Return a tensor of shape () with this number and dtype."""
    return Tensor(input_x, dtype)


def assign(variable: torch.Tensor, value: Any) -> torch.Tensor:
    """Write the value into the variable, without a gradient, and return the variable."""
    with torch.no_grad():
        return variable.copy_(value)


def depend(value: Any, expr: Any) -> Any:
    """Return the value. In MindSpore's graphs, depend() says that expr is computed first; here it has been."""
    return value


class GradOperation:
    """Makes a function that computes gradients.

    get_all: the gradients of all inputs, not of the first only. get_by_list: the gradients of the weights instead; both
    together give (gradients of the inputs, gradients of the weights). sens_param: the last argument of the new function
    is the gradient of the result; otherwise, the sum of the result is differentiated.

    >>> gradients = GradOperation(get_by_list=True)(net_with_loss, net.trainable_params())(data, label)
    """

    def __init__(self, get_all: bool = False, get_by_list: bool = False, sens_param: bool = False) -> None:
        self.get_all, self.get_by_list, self.sens_param = get_all, get_by_list, sens_param

    def __call__(self, function: Callable[..., Any], weights: Any = None) -> Callable[..., Any]:
        """Return the function. weights: a Parameter, or a sequence of them; needed if get_by_list is True."""
        one_weight = isinstance(weights, torch.Tensor)
        chosen = [weights] if one_weight else list(weights or ())
        if self.get_by_list and not chosen:
            raise ValueError("GradOperation: get_by_list=True needs the weights")

        def gradients(*inputs: Any) -> Any:
            *given, sens = inputs if self.sens_param else (*inputs, None)
            leaves = [_leaf(x) for x in given]
            of_inputs = () if self.get_by_list and not self.get_all else leaves if self.get_all else leaves[:1]
            tensors = [x for x in (*of_inputs, *(chosen if self.get_by_list else ())) if isinstance(x, torch.Tensor)]
            wanted = [x for x in tensors if x.requires_grad]
            create = torch.is_grad_enabled()  # so that the gradients can be differentiated again
            with torch.enable_grad():
                result = function(*leaves)
            parts = [(x, one) for x, one in _results(result, sens) if x.requires_grad]
            found: Any = [None] * len(wanted)
            if parts and wanted:
                results, factors = zip(*parts, strict=True)
                found = torch.autograd.grad(results, wanted, factors, allow_unused=True, create_graph=create)
            by_leaf = dict(zip(map(id, wanted), found, strict=True))

            def of(x: Any) -> torch.Tensor:
                gradient = by_leaf.get(id(x))
                return torch.zeros_like(torch.as_tensor(x)) if gradient is None else gradient

            inputs_part = tuple(map(of, of_inputs)) if self.get_all else of(of_inputs[0]) if of_inputs else ()
            if not self.get_by_list:
                return inputs_part
            weights_part = of(chosen[0]) if one_weight else tuple(map(of, chosen))
            return (inputs_part, weights_part) if self.get_all else weights_part

        return gradients


def _leaf(x: Any) -> Any:
    """Return a tensor whose gradient can be asked for, and through which gradients flow to x."""
    if not isinstance(x, torch.Tensor):
        return x
    return x.view_as(x) if x.requires_grad else x.detach().requires_grad_(x.is_floating_point())


def _results(result: Any, sens: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (result, its gradient) for each result of a function."""
    results = list(result) if isinstance(result, tuple | list) else [result]
    given = list(sens) if isinstance(sens, tuple | list) else [sens] * len(results)
    return [(x, torch.ones_like(x) if one is None else one) for x, one in zip(results, given, strict=True)]


class MultitypeFuncGraph:
    """A function with an implementation for each combination of types, which `register` adds.

    >>> add = MultitypeFuncGraph("add")
    >>> @add.register("Tensor", "Tensor")
    ... def add_tensors(x, y):
    ...     return x + y
    """

    _KINDS: dict[str, Any] = {  # noqa: RUF012
        "Tensor": torch.Tensor, "Number": (int, float), "Bool": bool, "String": str, "Tuple": tuple, "List": list,
    }  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        self._rows: list[tuple[tuple[Any, ...], Callable[..., Any]]] = []

    def register(self, *types: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a decorator that adds an implementation. types: "Tensor", "Number", "Bool", "String", "Tuple", "List"
        or "Function", one for each argument. Raise ValueError for another name."""
        for name in types:
            if name not in self._KINDS and name != "Function":
                raise ValueError(f"{self.name}.register: {name!r} is not one of {', '.join(self._KINDS)}, Function")

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            self._rows.append((types, function))
            return function

        return add

    def __call__(self, *args: Any) -> Any:
        for types, function in self._rows:
            if len(types) == len(args) and all(map(self._is, args, types)):
                return function(*args)
        kinds = ", ".join(type(one).__name__ for one in args)
        raise TypeError(f"{self.name}: no implementation is registered for ({kinds})")

    def _is(self, value: Any, kind: str) -> bool:
        if kind == "Function":
            return callable(value)
        if kind == "Number" and isinstance(value, bool):
            return False
        return isinstance(value, self._KINDS[kind])


class HyperMap:
    """Calls a function on the elements of tuples or lists, also nested ones, and returns a tuple of the results.

    >>> HyperMap()(mscomm.ops.Add(), (x1, x2), (y1, y2))  # (x1 + y1, x2 + y2)
    """

    def __init__(self, ops: Callable[..., Any] | None = None, reverse: bool = False) -> None:
        if reverse:
            raise NotImplementedError("HyperMap: reverse=True is not in mscomm")
        self._function = ops

    def __call__(self, *args: Any) -> Any:
        function, sequences = (args[0], args[1:]) if self._function is None else (self._function, args)
        if not any(isinstance(one, tuple | list) for one in sequences):
            return function(*sequences)
        lengths = {len(one) for one in sequences if isinstance(one, tuple | list)}
        if len(lengths) > 1 or not all(isinstance(one, tuple | list) for one in sequences):
            raise ValueError(f"HyperMap: the sequences have the lengths {sorted(lengths)}; they must be equally long")
        first = (function,) if self._function is None else ()
        return tuple(self(*first, *items) for items in zip(*sequences, strict=True))


Map = HyperMap

__all__ = [
    "GradOperation", "HyperMap", "Map", "MultitypeFuncGraph", "assign", "cast", "depend", "dtype", "partial", "rank",
    "scalar_to_array", "scalar_to_tensor", "shape", "size",
]  # fmt: skip
