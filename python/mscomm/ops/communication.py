"""Provides MindSpore's communication operators with MindSpore's argument names, such as AllReduce(ReduceOp.SUM)(x).

The operators call the functions of mscomm, accept the same arrays and raise the same errors. The group's timeout
applies to them. An operator may be created before init(), because its group is looked up only when the operator is
called. An argument such as dest_rank is a rank in the group. Invalid arguments raise TypeError or ValueError as in
MindSpore. A rank that has no result gets None, where MindSpore would return a meaningless tensor.

If an array is a PyTorch tensor that requires a gradient, the gradient flows through the operators that have a
`gradient` method. All ranks must then run the backward pass, because it calls operators, too. Through the other
operators, no gradient flows: PyTorch raises an error in the backward pass.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from mscomm import collectives, messages, notices
from mscomm.arrays import memory_anywhere
from mscomm.arrays.numpy import dtype_named
from mscomm.communication import GlobalComm
from mscomm.group import Group
from mscomm.job import resolve

_WORLD = GlobalComm.WORLD_COMM_GROUP


class ReduceOp:
    """MindSpore's names for reductions, and names for the reductions that only mscomm has."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"
    PROD = "prod"
    AVG = "avg"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"


class _Operator:
    """The base class of the operators.

    The constructor raises an error for invalid arguments, as MindSpore does, and warns about arguments that have no
    effect.
    """

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            if field.name in _CHECKS:
                _CHECKS[field.name](type(self).__name__, field.name, getattr(self, field.name))
            notices.tell_without_effect(type(self).__name__, **{field.name: getattr(self, field.name)})

    @property
    def __ms_class__(self) -> bool:
        """Raises RuntimeError, because operators do not work in a cell that MindSpore compiles.

        Only MindSpore's compiler reads this attribute. Without the error, the compiler would continue with mscomm's
        Python code and fail somewhere inside it. Also, a compiled graph may run its calls in a different order on each
        rank.
        """
        raise RuntimeError(
            f"mscomm.ops.{type(self).__name__} is called in a cell that MindSpore compiles (GRAPH_MODE, or jit), but"
            " it works only in Python. Call it outside of the cell, set_context(mode=PYNATIVE_MODE), or let"
            " mscomm.Model or GradientReducer reduce the gradients: with them the cell may be compiled"
        )


class _OfArray(_Operator):
    """The base class of the operators that are called with an array."""

    def __call__(self, x: Any) -> Any:
        """Call the operator. The result is of the same library as x."""
        torch = sys.modules.get("torch")  # if nobody has imported torch, x is not its tensor
        if torch is None or not isinstance(x, torch.Tensor):
            return self.compute(x)
        return importlib.import_module("mscomm.ops.gradients").call(self, x)

    def compute(self, x: Any) -> Any:
        """Call the function of mscomm."""
        raise NotImplementedError(f"{type(self).__name__}.compute")

    def gradient(self, by_result: Any, x: Any, result: Any) -> Any:
        """Return the gradient of x from the gradient of the result. All ranks of the group call this together."""
        raise NotImplementedError(f"mscomm.ops.{type(self).__name__}: no gradient flows through this operator")


@dataclass(frozen=True)
class AllReduce(_OfArray):
    """Calls mscomm.all_reduce."""

    op: str = ReduceOp.SUM
    group: Group | str | None = _WORLD

    def compute(self, x: Any) -> Any:
        return collectives.all_reduce(x, self.op, group=self.group)

    def gradient(self, by_result: Any, x: Any, result: Any) -> Any:
        if self.op in (ReduceOp.SUM, ReduceOp.AVG):
            return self.compute(by_result)
        if self.op in (ReduceOp.MAX, ReduceOp.MIN):
            return collectives.all_reduce(by_result, group=self.group) * (x == result)
        raise NotImplementedError(f"mscomm.ops.AllReduce({self.op!r}): no gradient flows through this reduction")


@dataclass(frozen=True)
class AllGather(_OfArray):
    """Calls mscomm.all_gather, which concatenates the ranks' arrays along axis 0."""

    group: Group | str | None = _WORLD

    def compute(self, x: Any) -> Any:
        return collectives.all_gather(x, group=self.group)

    def gradient(self, by_result: Any, x: Any, result: Any) -> Any:
        return collectives.reduce_scatter(by_result, group=self.group)


@dataclass(frozen=True)
class ReduceScatter(_OfArray):
    """Calls mscomm.reduce_scatter, which divides the reduced array among the ranks along axis 0."""

    op: str = ReduceOp.SUM
    group: Group | str | None = _WORLD

    def compute(self, x: Any) -> Any:
        return collectives.reduce_scatter(x, self.op, group=self.group)

    def gradient(self, by_result: Any, x: Any, result: Any) -> Any:
        if self.op not in (ReduceOp.SUM, ReduceOp.AVG):
            raise NotImplementedError(
                f"mscomm.ops.ReduceScatter({self.op!r}): no gradient flows through this reduction"
            )
        gathered = collectives.all_gather(by_result, group=self.group)
        return gathered / resolve(self.group).size if self.op == ReduceOp.AVG else gathered


@dataclass(frozen=True)
class Broadcast(_OfArray):
    """Calls mscomm.broadcast. Returns a tuple for a tuple of arrays, as in MindSpore, and an array for an array."""

    root_rank: int
    group: Group | str | None = _WORLD

    def __call__(self, x: Any) -> Any:
        return (
            tuple(super(Broadcast, self).__call__(one) for one in x)
            if isinstance(x, (tuple, list))
            else super().__call__(x)
        )

    def compute(self, x: Any) -> Any:
        return collectives.broadcast(x, self.root_rank, group=self.group)


@dataclass(frozen=True)
class Reduce(_OfArray):
    """Calls mscomm.reduce: dest_rank gets the result, and the other ranks get None."""

    dest_rank: int
    op: str = ReduceOp.SUM
    group: Group | str | None = _WORLD

    def compute(self, x: Any) -> Any:
        return collectives.reduce(x, self.dest_rank, self.op, group=self.group)


@dataclass(frozen=True)
class CollectiveGather(_OfArray):
    """Calls mscomm.gather: dest_rank gets the ranks' arrays joined along axis 0, and the other ranks get None."""

    dest_rank: int
    group: Group | str | None = _WORLD

    def compute(self, x: Any) -> Any:
        return collectives.gather(x, self.dest_rank, group=self.group)


@dataclass(frozen=True)
class CollectiveScatter(_OfArray):
    """Calls mscomm.scatter, which divides src_rank's array along axis 0: each rank gets one part."""

    src_rank: int = 0
    group: Group | str | None = _WORLD

    def compute(self, x: Any) -> Any:
        return collectives.scatter(x, self.src_rank, group=self.group)


@dataclass(frozen=True)
class AlltoAll(_OfArray):
    """Splits x along split_dim, sends part i to rank i, and joins the received parts along concat_dim in rank order.

    split_count must be the size of the group. With split_dim = concat_dim = 0 this is the same as mscomm.all_to_all.
    """

    split_count: int
    split_dim: int
    concat_dim: int
    group: Group | str | None = _WORLD

    def compute(self, x: Any) -> Any:
        n = self.split_count
        size = resolve(self.group).size
        if n != size:
            raise ValueError(f"AlltoAll: split_count is {n}, the group has {size} ranks; they must be equal")
        shape = list(memory_anywhere(x, "x", "AlltoAll").shape)
        for name, dim in (("split_dim", self.split_dim), ("concat_dim", self.concat_dim)):
            if not 0 <= dim < len(shape):
                raise ValueError(f"AlltoAll: {name} is {dim}, x of shape {tuple(shape)} has no such axis")
        part, rest = divmod(shape[self.split_dim], n)
        if rest:
            raise ValueError(
                f"AlltoAll: axis {self.split_dim} of {tuple(shape)} cannot be divided into {n} equal parts"
            )
        # Use only reshape and swapaxes, which arrays of every library have.
        parts = x.reshape((*shape[: self.split_dim], n, part, *shape[self.split_dim + 1 :]))
        for axis in range(self.split_dim, 0, -1):  # move the parts to the front: (n, ..., part, ...)
            parts = parts.swapaxes(axis, axis - 1)
        came = collectives.all_to_all(parts, group=self.group)
        for axis in range(self.concat_dim):  # move the axis of the source ranks in front of concat_dim
            came = came.swapaxes(axis, axis + 1)
        shape[self.split_dim] = part
        shape[self.concat_dim] *= n
        return came.reshape(tuple(shape))

    def gradient(self, by_result: Any, x: Any, result: Any) -> Any:
        return AlltoAll(self.split_count, self.concat_dim, self.split_dim, self.group).compute(by_result)


@dataclass(frozen=True)
class Barrier(_Operator):
    """Calls mscomm.barrier."""

    group: Group | str | None = _WORLD

    def __call__(self) -> None:
        collectives.barrier(group=self.group)


@dataclass(frozen=True)
class Send(_OfArray):
    """Calls mscomm.send with sr_tag as the tag.

    group_back, which MindSpore uses in gradients, has no effect; a warning says so.
    """

    sr_tag: int
    dest_rank: int
    group: Group | str | None = _WORLD
    group_back: Group | str | None = _WORLD

    def compute(self, x: Any) -> None:
        messages.send(x, self.dest_rank, self.sr_tag, group=self.group)


@dataclass(frozen=True)
class Receive(_Operator):
    """Calls mscomm.recv with a new NumPy array of the given shape and dtype, and returns the array.

    dtype is a NumPy, MindSpore or PyTorch dtype, such as mindspore.float32. group_back has no effect; a warning says
    so.
    """

    sr_tag: int
    src_rank: int
    shape: Sequence[int]
    dtype: Any
    group: Group | str | None = _WORLD
    group_back: Group | str | None = _WORLD

    def __call__(self) -> np.ndarray[Any, Any]:
        out: np.ndarray[Any, Any] = np.empty(tuple(self.shape), dtype_named(self.dtype))
        messages.recv(out, self.src_rank, self.sr_tag, group=self.group)
        return out


def _check_op(operator: str, argument: str, op: Any) -> None:
    known = [value for name, value in vars(ReduceOp).items() if name.isupper()]
    if not isinstance(op, str):
        raise TypeError(f"{operator}: {argument} is a {type(op).__name__}; expected one of {', '.join(known)}")
    if op not in known:
        raise ValueError(f"{operator}: {argument} {op!r} is not one of {', '.join(known)}")


def _check_group(operator: str, argument: str, group: Any) -> None:
    if not (group is None or isinstance(group, (str, Group))):
        kind = type(group).__name__
        raise TypeError(f"{operator}: {argument} is a {kind}; expected the name of a group, a Group or None")


def _check_int(operator: str, argument: str, value: Any) -> None:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise TypeError(f"{operator}: {argument} is a {type(value).__name__}; expected an int")


def _check_shape(operator: str, argument: str, shape: Any) -> None:
    if not isinstance(shape, (tuple, list)):
        raise TypeError(f"{operator}: {argument} is a {type(shape).__name__}; expected a tuple or a list of int")
    for extent in shape:
        _check_int(operator, f"an element of {argument}", extent)


_CHECKS: dict[str, Callable[[str, str, Any], None]] = {
    "op": _check_op,
    "group": _check_group,
    "group_back": _check_group,
    "shape": _check_shape,
    **dict.fromkeys(
        ("root_rank", "dest_rank", "src_rank", "sr_tag", "split_count", "split_dim", "concat_dim"), _check_int
    ),
}
