"""Collective functions with MindSpore's names and arguments. They call the functions of mscomm.

As in MindSpore, src and dst are ranks in the world, whatever the group is. mscomm's own functions and the operators in
mscomm.ops take ranks in the group instead. Each function returns its result, as in MindSpore 2.3, or None on a rank
that gets no result.
"""

from __future__ import annotations

import operator
from typing import Any

from mscomm import collectives, messages
from mscomm.arrays import library, memory_anywhere
from mscomm.arrays.device import OnDevice
from mscomm.communication.management import GlobalComm
from mscomm.group import Group
from mscomm.job import resolve

_WORLD = GlobalComm.WORLD_COMM_GROUP


def all_reduce(tensor: Any, op: str = "sum", group: Group | str | None = _WORLD) -> Any:
    """See mscomm.all_reduce."""
    return collectives.all_reduce(tensor, op, group=group)


def all_gather_into_tensor(tensor: Any, group: Group | str | None = _WORLD) -> Any:
    """Like mscomm.all_gather: join the ranks' arrays along axis 0."""
    return collectives.all_gather(tensor, group=group)


def reduce_scatter_tensor(tensor: Any, op: str = "sum", group: Group | str | None = _WORLD) -> Any:
    """Like mscomm.reduce_scatter: reduce the arrays, and divide the result among the ranks along axis 0."""
    return collectives.reduce_scatter(tensor, op, group=group)


def reduce(tensor: Any, dst: int, op: str = "sum", group: Group | str | None = _WORLD) -> Any:
    """Like mscomm.reduce. Rank dst of the world gets the result, and the other ranks get None."""
    return collectives.reduce(tensor, _rank_in(group, "reduce", "dst", dst), op, group=group)


def scatter_tensor(tensor: Any, src: int = 0, group: Group | str | None = _WORLD) -> Any:
    """Like mscomm.scatter, but src is a rank in the world."""
    return collectives.scatter(tensor, _rank_in(group, "scatter_tensor", "src", src), group=group)


def gather_into_tensor(tensor: Any, dst: int = 0, group: Group | str | None = _WORLD) -> Any:
    """Like mscomm.gather. Rank dst of the world gets the result, and the other ranks get None."""
    return collectives.gather(tensor, _rank_in(group, "gather_into_tensor", "dst", dst), group=group)


def broadcast(tensor: Any, src: int = 0, group: Group | str | None = _WORLD) -> Any:
    """Like mscomm.broadcast, but src is a rank in the world."""
    return collectives.broadcast(tensor, _rank_in(group, "broadcast", "src", src), group=group)


def barrier(group: Group | str | None = _WORLD) -> None:
    """See mscomm.barrier."""
    collectives.barrier(group=group)


def send(tensor: Any, dst: int = 0, group: Group | str | None = _WORLD, tag: int = 0) -> None:
    """Like mscomm.send, but dst is a rank in the world."""
    messages.send(tensor, _rank_in(group, "send", "dst", dst), tag, group=group)


def recv(tensor: Any, src: int = 0, group: Group | str | None = _WORLD, tag: int = 0) -> Any:
    """Receive from rank src of the world, and return a new array with the shape and dtype of `tensor`."""
    shape = memory_anywhere(tensor, "tensor", "recv").shape
    target, result = library(tensor, "tensor", "recv").new(tensor, shape)
    if isinstance(target, OnDevice):
        return messages.recv(result(), _rank_in(group, "recv", "src", src), tag, group=group)
    messages.recv(target, _rank_in(group, "recv", "src", src), tag, group=group)
    return result()


def _rank_in(group: Group | str | None, function: str, argument: str, world_rank: Any) -> int:
    """Convert a rank in the world to a rank in the group. function, argument: names for error messages."""
    members = resolve(group)
    try:
        return members.ranks.index(operator.index(world_rank))
    except TypeError:
        raise TypeError(f"{function}: {argument} is a {type(world_rank).__name__}; expected a rank, an int") from None
    except ValueError:
        raise ValueError(
            f"{function}: {argument}={world_rank} is not in group {members.name}, which has the ranks"
            f" {', '.join(map(str, members.ranks))} of the world; here {argument} is a rank in the world"
        ) from None
