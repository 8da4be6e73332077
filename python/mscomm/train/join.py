"""join(): lets some ranks train fewer steps than others, and gives all ranks the same model at the end.

Before each step, the ranks meet: they call all_gather, in which each rank says what it will do next. In this module, a
rank "has left" when it has run out of batches. It still makes the same calls as the other ranks, with zeros, until all
ranks have left. At the end, the last rank sends its model and its states to all ranks. The last rank is the rank that
left last, or the highest such rank if there are several.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from mscomm import collectives, log, objects
from mscomm.arrays import memory_anywhere, names
from mscomm.arrays.numpy import dtype_by_name
from mscomm.group import Group
from mscomm.train import trees
from mscomm.train.optimizers import SGD, Momentum
from mscomm.train.states import from_text, to_text, with_arrays
from mscomm.train.step import LEFT, REDUCES, Step

_open: set[str] = set()  # the names of the groups on which this rank is inside a join()


class OutOfBatches(RuntimeError):
    """Raised on all ranks when one rank has no batches left, if the program has asked for this error. The group stays
    usable."""


@contextlib.contextmanager
def join(
    step: Step,
    group: Group,
    sync: Iterable[Any] | None,
    *,
    by_all: bool = False,
    on_forward: Callable[[int], None] | None = None,
    at_end: Callable[[int, bool], None],
    throw: bool = False,
    own: Iterable[Any] = (),
) -> Iterator[None]:
    """Return a context for this rank's training loop.

    sync: as in GradientReducer.join. by_all: if True, the mean is taken over all ranks; if False, over the ranks that
    have not left. on_forward(root): called on a rank that has left, to receive the buffers that rank root sends before
    a forward pass. at_end(root, uneven): called after the loops to make the models equal; `uneven` says whether some
    ranks left before others. throw: if True, all ranks raise OutOfBatches as soon as one rank has left. own: parameters
    that each rank keeps for itself.
    """
    step.check_between("join")
    if group.name in _open:  # otherwise an all_gather of the inner loop could be matched with one of the outer loop
        raise RuntimeError(
            f"join: a join() on group {group.name} is open already; put the modules that are trained together into one"
            " wrapper or reducer"
        )
    holders = checked(sync)
    _check_alike([type(one).__qualname__ for one in holders], by_all, throw, group)
    refusal: OutOfBatches | None = None
    with step.owed():
        step.begin_join(by_all)
        _open.add(group.name)
        try:
            yield
            step.check_between("join")
            _until_all_have_left(step, group, on_forward, throw)
        except OutOfBatches as error:
            refusal = error
        finally:
            _open.discard(group.name)
            step.end_join()
        if refusal is None and step.last_met.any():
            root = last_rank(step.last_met)
            at_end(root, not step.last_met.all())
            for one in holders:
                _take_over(one, root, group, own)
    if refusal is not None:
        raise refusal


def last_rank(kinds: np.ndarray[Any, Any]) -> int:
    """Return the highest rank that has not left. kinds: what each rank does next."""
    return int(np.flatnonzero(kinds)[-1])


def _until_all_have_left(step: Step, group: Group, on_forward: Callable[[int], None] | None, throw: bool) -> None:
    step.carry(0.0)
    while (kinds := step.meet(LEFT)).any():
        if throw:
            raise OutOfBatches(f"join: rank {group.rank} of the group has no batches left, others have")
        if kinds.max() == REDUCES:
            step.finish()
        elif on_forward is not None:
            on_forward(last_rank(kinds))


# -- the states that all ranks receive from the last rank that has batches


def checked(sync: Iterable[Any] | None) -> list[Any]:
    """Return sync as a list. Raise TypeError if an item does not have state_dict() and load_state_dict()."""
    holders = [] if sync is None else [sync] if hasattr(sync, "state_dict") else list(sync)
    for one in holders:
        if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
            raise TypeError(
                f"join: sync has a {type(one).__name__}; expected modules, optimizers, schedulers: what has"
                " state_dict() and load_state_dict()"
            )
    return holders


def warn_of_old_state(optimizer: Any) -> None:
    """Warn that the optimizer's state is outdated on ranks that left early."""
    log.warn(
        f"join: ranks that ran out of batches early keep their old state of {type(optimizer).__name__}, and then train"
        " differently from the others; join(sync=[optimizer]) gives them the state of the last rank"
    )


def _check_alike(kinds: list[str], by_all: bool, throw: bool, group: Group) -> None:
    mine = {"sync": kinds, "divide_by_initial_world_size": by_all, "throw_on_early_termination": throw}
    first, *others = objects.all_gather_object(mine, group=group)
    for rank, theirs in enumerate(others, 1):
        for name, value in theirs.items():
            if value != first[name]:
                raise ValueError(
                    f"join: {name} differs by rank: {first[name]} on rank 0 of the group, {value} on rank {rank}; "
                    "pass the same on all ranks"
                )


def _take_over(one: Any, root: int, group: Group, own: Iterable[Any]) -> None:
    if hasattr(one, "named_parameters") and hasattr(one, "named_buffers"):  # overwrite a torch.nn.Module in place
        arrays = {**dict(one.named_parameters()), **dict(one.named_buffers())}
        kept = {id(x) for x in own}
        broadcast_all([(name, x) for name, x in arrays.items() if id(x) not in kept], root, group)
        return
    if isinstance(one, Momentum | SGD):
        weights = trees.leaves(one.parameters)
        one.parameters = trees.rebuilt(one.parameters, broadcast_all(weights.items(), root, group))
    state = _broadcast_state(one.state_dict() if root == group.rank else None, root, group)
    if root != group.rank:
        load = one.load_state_dict
        if hasattr(one, "param_groups") and next(names(one), None) == "torch":
            load = importlib.import_module("mscomm.train.autograd").loader(one)
        load(state)


def broadcast_all(arrays: Iterable[tuple[str, Any]], root: int, group: Group) -> list[Any]:
    """Broadcast the arrays of rank root, and return the results. Writable arrays are overwritten in place."""
    works = []
    for name, x in arrays:
        writable = memory_anywhere(x, name, "broadcast_parameters").flags.writeable
        works.append(collectives.broadcast(x, root, out=x if writable else None, group=group, async_op=True))
    return [work.wait() for work in works]


def _broadcast_state(state: Any, root: int, group: Group) -> Any:
    """Return the state of rank root on all ranks. The state is sent as JSON and CPU arrays. If the state contains
    PyTorch tensors, the other ranks get all of its arrays as PyTorch tensors. Otherwise, they get NumPy arrays."""
    head: Any = None
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    if root == group.rank:
        text, arrays = to_text(state)
        kinds = [[name, x.dtype.name, list(x.shape)] for name, x in arrays.items()]
        head = [text, kinds, any(next(names(x), "") == "torch" for x in trees.leaves(state).values())]
    text, kinds, of_torch = objects.broadcast_object(head, root, group=group)
    if root != group.rank:
        arrays = {name: np.empty(shape, dtype_by_name(dtype)) for name, dtype, shape in kinds}
    broadcast_all(arrays.items(), root, group)
    if root == group.rank:
        return state
    read = from_text(text, arrays)
    return with_arrays(read, importlib.import_module("mscomm.arrays.torch").of_numpy) if of_torch else read
