"""Operator: the base class of the computing operators, and the decorator that makes one from a function."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, ClassVar

import torch

from mscomm import context, notices

Strategy = tuple[tuple[int, ...], ...]

_DOCS = "https://www.mindspore.cn/docs/en/r2.0"


# What is called instead of operators, while mscomm.parallel traces a network.
_interceptor: ContextVar[Callable[[Operator, tuple[Any, ...]], Any] | None] = ContextVar("interceptor", default=None)


@contextlib.contextmanager
def intercepted(interceptor: Callable[[Operator, tuple[Any, ...]], Any]) -> Iterator[None]:
    """In this context, operators call interceptor(operator, inputs), and compute only if it returns NotImplemented."""
    token = _interceptor.set(interceptor)
    try:
        yield
    finally:
        _interceptor.reset(token)


class Operator:
    """A computing operator, such as MatMul: created once with its attributes, then called with tensors.

    Attributes: `attributes`, the arguments of the constructor by name; `instance_name`, the name of the attribute of
    the Cell that holds the operator, or ""; `in_strategy`, see shard().
    """

    compute: ClassVar[Callable[..., Any]]
    input_names: ClassVar[tuple[str, ...]]
    __signature__: ClassVar[inspect.Signature]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        try:
            bound = self.__signature__.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{type(self).__name__}: {error}") from None
        bound.apply_defaults()
        self.attributes: dict[str, Any] = dict(bound.arguments)
        self.instance_name = ""
        self.in_strategy: Strategy | None = None

    def shard(self, in_strategy: Strategy | None = None, out_strategy: Strategy | None = None) -> Operator:
        """Set into how many parts each dimension of each input is divided, and return the operator.

        in_strategy has a tuple for each input, and this tuple has a number for each dimension: ((2, 4), (4, 1)) divides
        the rows of the first input into 2 parts and its columns into 4. mscomm.parallel.plan and the modes
        SEMI_AUTO_PARALLEL and AUTO_PARALLEL of Model.train use it. In data-parallel and stand-alone mode, each rank
        computes the operator on its own data, and a warning says so. Strategies of results, out_strategy, are not in
        this release: NotImplementedError. mscomm.parallel.shard takes them.

        Raise TypeError if a strategy is not a tuple of tuples of ints, and ValueError for a number below 1.

        >>> matmul = mscomm.ops.MatMul().shard(((2, 4), (4, 1)))
        """
        if out_strategy is not None:
            name = type(self).__name__
            raise NotImplementedError(
                f"{name}.shard: out_strategy is not in this release; use mscomm.parallel.shard({name}(), in_strategy, "
                "out_strategy), which returns a function with the operator's inputs and results"
            )
        _check(f"{type(self).__name__}.shard: in_strategy", in_strategy)
        self.in_strategy = in_strategy
        return self

    def __call__(self, *inputs: Any) -> Any:
        interceptor = None if torch.compiler.is_compiling() else _interceptor.get()
        if interceptor is not None:
            result = interceptor(self, inputs)
            return type(self).compute(*inputs, **self.attributes) if result is NotImplemented else result
        if self.in_strategy is not None:
            mode = context.get_auto_parallel_context("parallel_mode")
            if mode not in context.DIVIDING:
                notices.warn_once(
                    f"{self}: shard() has no effect in the parallel mode {mode}: each rank computes the operator on its"
                    " own data"
                )
        return type(self).compute(*inputs, **self.attributes)

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.attributes.items())
        return f"{type(self).__name__}({given})"


def _check(where: str, strategy: Any) -> None:
    if strategy is None:
        return
    if not (isinstance(strategy, tuple) and all(isinstance(one, tuple) for one in strategy)):
        raise TypeError(f"{where}={strategy!r}; expected a tuple with a tuple of ints for each tensor")
    for number in (number for one in strategy for number in one):
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{where}={strategy!r}: {number!r} is a {type(number).__name__}; expected an int")
        if number < 1:
            raise ValueError(f"{where}={strategy!r}: {number}; expected 1 or more parts")


def operator(function: Callable[..., Any]) -> type[Operator]:
    """Make an operator from a function whose positional parameters are the operator's inputs. Its keyword-only
    parameters are the arguments of the operator's constructor, which may be passed by position."""
    parameters = inspect.signature(function).parameters.values()
    inputs = tuple(one.name for one in parameters if one.kind is not one.KEYWORD_ONLY)
    attributes = [one.replace(kind=one.POSITIONAL_OR_KEYWORD) for one in parameters if one.kind is one.KEYWORD_ONLY]
    return type(
        function.__name__,
        (Operator,),
        {
            "__doc__": function.__doc__,
            "__module__": function.__module__,
            "__signature__": inspect.Signature(attributes),
            "compute": staticmethod(function),
            "input_names": inputs,
        },
    )


def missing(module: str, name: str) -> str:
    """Return the message for a name of MindSpore's module "ops" or "nn" that mscomm does not have."""
    places = [("torch", torch), ("torch.nn.functional", torch.nn.functional)]
    if module == "nn":
        places.insert(0, ("torch.nn", torch.nn))
    instead = f"What PyTorch has instead: {_DOCS}/note/api_mapping/pytorch_api_mapping.html"
    for path, where in places:
        known = {one.lower().replace("_", ""): one for one in dir(where) if "_" not in (one[0], one[-1])}
        found = known.get(name.lower().replace("_", ""), "")
        if found and callable(getattr(where, found)):
            instead = f"PyTorch has {path}.{found}, which accepts mscomm's tensors"
            break
    return (
        f"mscomm.{module} has no {name!r}. {instead}."
        f" In MindSpore: {_DOCS}/api_python/{module}/mindspore.{module}.{name}.html"
    )
