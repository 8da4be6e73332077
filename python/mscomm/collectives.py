"""The collective operations: every rank of the group calls the same one, in the same order.

`root` is a rank in the group (torch.distributed counts it in the world). `group` is None for all ranks, a Group or the
name of one. `timeout` is in seconds or a timedelta; None takes init's. Strided input is read in C order.

`out` receives the result, which has x's dtype. It may be x where the result has x's shape, and in general it may lie
where x is in the whole: x of all_gather at this rank's place in out, out of reduce_scatter at its place in x, as with
NCCL. Any other overlap is a ValueError.

`async_op=True` returns a Work at once, whose wait() gives the result; the calls of a group are carried out in the order
in which they were made.

Arrays on the rank's device (see init) are the accelerator's: a call returns when it is enqueued on `stream`, a handle
of the vendor's, by default the current stream of the array's library, and out is complete for what is enqueued there
after it. x and out are both on the device, or both the CPU's, and the same on all ranks. What goes ahead of the data in
the uneven forms and scatter, and barrier, are the CPU's: they return when all ranks have come.

All raise TypeError or ValueError for wrong arguments, before anything is sent, and PeerLost, CollectiveTimeout,
Mismatch or Aborted (see mscomm.errors) if the call fails; then the group is broken and the contents of out are
undefined.
"""

from __future__ import annotations

import functools
import hashlib
import math
import operator
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from mscomm import _core, arguments
from mscomm.arrays import memory_anywhere, new
from mscomm.arrays import numpy as host
from mscomm.arrays.device import OnDevice
from mscomm.arrays.numpy import dtype_code, dtype_named
from mscomm.errors import Mismatch
from mscomm.group import Group
from mscomm.job import resolve, shared_empty

Timeout = float | timedelta | None
Array = np.ndarray[Any, Any]

FUNCTION = {name: number for number, name in enumerate(_core.functions)}
(
    _ALL_REDUCE,
    _ALL_GATHER,
    _REDUCE_SCATTER,
    _BROADCAST,
    _REDUCE,
    _GATHER,
    _SCATTER,
    _ALL_TO_ALL,
    _BARRIER,
    _SCAN,
    _EXSCAN,
) = (FUNCTION[name] for name in _core.collectives)

# all_reduce_many: an array of at least ALONE_BYTES goes as it is; smaller ones share buckets of BUCKET_BYTES.
ALONE_BYTES = 1 << 20
BUCKET_BYTES = 4 << 20
# The largest page of any kernel: of a bucket that is not full whole pages take part, whatever is in the rest, because
# only these can be shared.
PAGE_BYTES = 64 << 10


# `call` is looked up on a line of its own, because CPython 3.11 is slower to call an attribute as if it were a method.
def all_reduce(
    x: Any,
    op: str = "sum",
    *,
    out: Any = None,
    group: Group | str | None = None,
    timeout: Timeout = None,
    async_op: bool = False,
    stream: int | None = None,
) -> Any:
    """Combine x elementwise over the ranks; every rank gets the same bits.

    op: sum, prod, min, max, avg (not on integers), band, bor, bxor (integers and bool). float16 and bfloat16 are
    combined in float32 and rounded once; integers wrap; min and max propagate NaN as np.minimum does; on bool, sum
    is or and prod is and.

    Returns out, or a new array like x. Shape and dtype of x must be the same on all ranks.

    >>> mscomm.all_reduce(np.full(3, mscomm.get_rank(), np.float32))       # on 4 ranks
    array([6., 6., 6.], dtype=float32)
    """
    call = resolve(group).call
    return call(_ALL_REDUCE, x, out, op, None, timeout, async_op, stream)


def all_reduce_(
    x: Any,
    op: str = "sum",
    *,
    group: Group | str | None = None,
    timeout: Timeout = None,
    async_op: bool = False,
    stream: int | None = None,
) -> Any:
    """all_reduce in place: short for `all_reduce(x, op, out=x)`."""
    return all_reduce(x, op, out=x, group=group, timeout=timeout, async_op=async_op, stream=stream)


def all_gather(
    x: Any,
    *,
    out: Any = None,
    group: Group | str | None = None,
    timeout: Timeout = None,
    async_op: bool = False,
    stream: int | None = None,
) -> Any:
    """Concatenate every rank's x along axis 0, in rank order.

    x of shape (a, ...) gives (n * a, ...) on n ranks; a scalar (shape ()) gives (n,). Shape and dtype must be the
    same on all ranks. Returns out, or a new array of x's type.

    >>> mscomm.all_gather(np.array([[mscomm.get_rank()]], np.float32))     # on 2 ranks
    array([[0.],
           [1.]], dtype=float32)
    """
    call = resolve(group).call
    return call(_ALL_GATHER, x, out, None, None, timeout, async_op, stream)


def reduce_scatter(
    x: Any,
    op: str = "sum",
    *,
    out: Any = None,
    group: Group | str | None = None,
    timeout: Timeout = None,
    async_op: bool = False,
    stream: int | None = None,
) -> Any:
    """Combine x over the ranks, and give each rank its part along axis 0.

    x of shape (n * a, ...) gives (a, ...) on n ranks: rank r gets rows r * a to (r + 1) * a of what all_reduce would
    give, to the bit. op: see all_reduce. ValueError if axis 0 does not divide by n. Shape and dtype must be the same on
    all ranks. Returns out, or a new array of x's type.

    >>> mscomm.reduce_scatter(np.arange(4.0))                              # on 2 ranks: rank 0, rank 1
    array([0., 2.])
    array([4., 6.])
    """
    call = resolve(group).call
    return call(_REDUCE_SCATTER, x, out, op, None, timeout, async_op, stream)


def broadcast(
    x: Any,
    root: int = 0,
    *,
    out: Any = None,
    group: Group | str | None = None,
    timeout: Timeout = None,
    async_op: bool = False,
    stream: int | None = None,
) -> Any:
    """Give every rank the root's x.

    Each rank's x says shape and dtype, which must be the same; its contents count at the root alone. Returns out, or
    a new array like x; on the root a copy of x.

    >>> mscomm.broadcast(np.full(2, mscomm.get_rank()), root=1)            # on 2 ranks
    array([1, 1])
    """
    call = resolve(group).call
    return call(_BROADCAST, x, out, None, root, timeout, async_op, stream)


def broadcast_(
    x: Any,
    root: int = 0,
    *,
    group: Group | str | None = None,
    timeout: Timeout = None,
    async_op: bool = False,
    stream: int | None = None,
) -> Any:
    """broadcast in place: short for `broadcast(x, root, out=x)`."""
    return broadcast(x, root, out=x, group=group, timeout=timeout, async_op=async_op, stream=stream)


def reduce(
    x: Any,
    root: int = 0,
    op: str = "sum",
    *,
    out: Any = None,
    group: Group | str | None = None,
    timeout: Timeout = None,
    async_op: bool = False,
    stream: int | None = None,
) -> Any:
    """Combine x elementwise over the ranks, at the root.

    The root gets out, or a new array like x, with the bits that all_reduce would give. Other ranks get None, and their
    out is not looked at.

    >>> mscomm.reduce(np.ones(2))                                          # on 4 ranks, at rank 0
    array([4., 4.])
    """
    call = resolve(group).call
    return call(_REDUCE, x, out, op, root, timeout, async_op, stream)


def scan(
    x: Any,
    op: str = "sum",
    *,
    out: Any = None,
    group: Group | str | None = None,
    timeout: Timeout = None,
    async_op: bool = False,
) -> Any:
    """Combine x elementwise over the ranks up to this one: rank r gets what ranks 0 to r give together.

    op: sum, prod, min, max, band, bor, bxor, as in all_reduce. Elements are combined in rank order; float16 and
    bfloat16 in float32, rounded once for each rank's result. So the bits are the same in every run and by every
    algorithm. Where each host has one rank, or one host has all, the last rank's result has all_reduce's bits.

    Returns out, or a new array like x. Shape and dtype of x must be the same on all ranks. ValueError for avg.
    TypeError for an array of a device: copy it to the CPU first. As MPI_Scan.

    >>> mscomm.scan(np.full(2, mscomm.get_rank() + 1))                     # on 3 ranks: rank 0, rank 1, rank 2
    array([1, 1])
    array([3, 3])
    array([6, 6])
    """
    call = resolve(group).call
    return call(_SCAN, x, out, op, None, timeout, async_op, None)


def exscan(
    x: Any,
    op: str = "sum",
    *,
    out: Any = None,
    group: Group | str | None = None,
    timeout: Timeout = None,
    async_op: bool = False,
) -> Any:
    """Combine x elementwise over the ranks before this one: rank r gets what ranks 0 to r - 1 give together.

    Rank 0 gets the operation's identity: 0 for sum, bor and bxor, 1 for prod, all bits set for band; for min the
    largest value of the dtype, infinity if it has one, and for max the smallest. On bool that is False for sum, max,
    bor and bxor, and True for prod, min and band. (MPI_Exscan leaves rank 0's result undefined; mpi4py's `exscan` gives
    None.) For the rest see scan.

    >>> rows = np.array([len(mine)])                                       # where this rank's rows begin in the whole
    >>> begin = mscomm.exscan(rows)
    """
    call = resolve(group).call
    return call(_EXSCAN, x, out, op, None, timeout, async_op, None)


def gather(
    x: Any,
    root: int = 0,
    *,
    out: Any = None,
    group: Group | str | None = None,
    timeout: Timeout = None,
    async_op: bool = False,
    stream: int | None = None,
) -> Any:
    """Concatenate every rank's x along axis 0, in rank order, at the root.

    The root gets out, or a new array of x's type, as from all_gather. Other ranks get None, and their out is not looked
    at. Shape and dtype must be the same on all ranks.

    >>> mscomm.gather(np.array([mscomm.get_rank()]))                       # on 2 ranks, at rank 0
    array([0, 1])
    """
    call = resolve(group).call
    return call(_GATHER, x, out, None, root, timeout, async_op, stream)


def scatter(
    x: Any = None,
    root: int = 0,
    *,
    out: Any = None,
    group: Group | str | None = None,
    timeout: Timeout = None,
    async_op: bool = False,
    stream: int | None = None,
) -> Any:
    """Give each rank its part of the root's x along axis 0.

    x of shape (n * a, ...) at the root gives (a, ...) on each of n ranks: rank r gets rows r * a to (r + 1) * a. It is
    read at the root alone; other ranks may pass None, and learn shape and dtype from the root. If they pass an array,
    it must have the root's shape and dtype. Returns out, or a new array of x's type, where there is no x a NumPy array.
    ValueError if axis 0 does not divide by n; Mismatch on all ranks if a rank's x or out does not fit.

    >>> mscomm.scatter(np.arange(4) if mscomm.get_rank() == 0 else None)   # on 2 ranks: rank 0, rank 1
    array([0, 1])
    array([2, 3])
    """
    return _scatter("scatter", x, None, root, out, resolve(group), timeout, async_op, stream)


def all_to_all(
    x: Any,
    *,
    out: Any = None,
    group: Group | str | None = None,
    timeout: Timeout = None,
    async_op: bool = False,
    stream: int | None = None,
) -> Any:
    """Exchange parts: part d of rank s's x becomes part s of rank d's result.

    Axis 0 of x is divided into n parts, one for each rank; the result has x's shape. ValueError if axis 0 does not
    divide by n. Shape and dtype must be the same on all ranks. Returns out, or a new array of x's type.

    >>> mscomm.all_to_all(np.array([0, 1]) + 10 * mscomm.get_rank())       # on 2 ranks: rank 0, rank 1
    array([ 0, 10])
    array([ 1, 11])
    """
    call = resolve(group).call
    return call(_ALL_TO_ALL, x, out, None, None, timeout, async_op, stream)


def barrier(*, group: Group | str | None = None, timeout: Timeout = None, async_op: bool = False) -> Any:
    """Return when every rank of the group has called it. The result is None; with async_op it is a Work of None."""
    call = resolve(group).call
    return call(_BARRIER, None, None, None, None, timeout, async_op, None)


# -- parts that differ by rank


def all_gather_v(
    x: Any,
    *,
    out: Any = None,
    group: Group | str | None = None,
    timeout: Timeout = None,
    async_op: bool = False,
    stream: int | None = None,
) -> Any:
    """all_gather of arrays whose axis 0 differs by rank. Returns (rows, counts).

    x has the shape (a, ...), with another a on each rank, 0 among them, and the same rest and dtype on all. rows: out,
    or a new array of x's type, of shape (sum of all a, ...), the ranks' rows in rank order. counts: each rank's a.
    out must have the right shape: Mismatch on all ranks if it has not.

    >>> mscomm.all_gather_v(np.full(mscomm.get_rank() + 1, mscomm.get_rank()))   # on 2 ranks
    (array([0, 1, 1]), [1, 2])
    """
    return gather_rows("all_gather_v", x, None, out, resolve(group), timeout, async_op, stream)


def gather_v(
    x: Any,
    root: int = 0,
    *,
    out: Any = None,
    group: Group | str | None = None,
    timeout: Timeout = None,
    async_op: bool = False,
    stream: int | None = None,
) -> Any:
    """gather of arrays whose axis 0 differs by rank. At the root (rows, counts) as all_gather_v; None elsewhere."""
    group = resolve(group)
    root = group.core.root(FUNCTION["gather_v"], root)
    return gather_rows("gather_v", x, root, out, group, timeout, async_op, stream)


def scatter_v(
    x: Any,
    counts: Sequence[int],
    root: int = 0,
    *,
    out: Any = None,
    group: Group | str | None = None,
    timeout: Timeout = None,
    async_op: bool = False,
    stream: int | None = None,
) -> Any:
    """scatter in parts of different length: rank r gets counts[r] rows of the root's x.

    counts: a row count for each rank, the same on all of them; at the root they add up to x.shape[0]. For the rest see
    scatter.

    >>> mscomm.scatter_v(np.arange(3) if mscomm.get_rank() == 0 else None, [1, 2])   # on 2 ranks: rank 0, rank 1
    array([0])
    array([1, 2])
    """
    return _scatter("scatter_v", x, counts, root, out, resolve(group), timeout, async_op, stream)


def reduce_scatter_v(
    x: Any,
    counts: Sequence[int],
    op: str = "sum",
    *,
    out: Any = None,
    group: Group | str | None = None,
    timeout: Timeout = None,
    async_op: bool = False,
    stream: int | None = None,
) -> Any:
    """reduce_scatter in parts of different length: rank r gets counts[r] rows.

    counts: a row count for each rank, the same on all of them; they add up to x.shape[0]. Shape and dtype of x must be
    the same on all ranks. Returns out, or a new array of shape (counts[rank], ...).

    >>> mscomm.reduce_scatter_v(np.arange(3.0), [1, 2])                    # on 2 ranks: rank 0, rank 1
    array([0.])
    array([2., 4.])
    """
    group = resolve(group)
    given = group.core.array(FUNCTION["reduce_scatter_v"], x, stream=stream)
    rows = arguments.checked_counts("reduce_scatter_v", "counts", counts, group, given.shape)
    call = group.core.prepare(
        FUNCTION["reduce_scatter_v"], given, out, what=_REDUCE_SCATTER, op=op, rows=rows, digest=_digest(rows)
    )
    seconds = group.seconds(timeout)
    if async_op:
        return group.start(call, seconds)
    group.run(call, seconds)
    return call.result()


def all_to_all_v(
    x: Any,
    send_counts: Sequence[int],
    *,
    out: Any = None,
    group: Group | str | None = None,
    timeout: Timeout = None,
    async_op: bool = False,
    stream: int | None = None,
) -> Any:
    """Exchange parts of different length. Returns (rows, recv_counts).

    send_counts[d] rows of x, in rank order, go to rank d; they add up to x.shape[0]. rows: out, or a new array of x's
    type: what came, in rank order, recv_counts[s] rows from rank s. x.shape[1:] and dtype must be the same on all
    ranks. out must have the right shape: Mismatch on all ranks if it has not.

    >>> mscomm.all_to_all_v(np.arange(3), [1, 2])                          # on 2 ranks: rank 0, rank 1
    (array([0, 0]), [1, 1])
    (array([1, 2, 1, 2]), [2, 2])
    """
    group = resolve(group)
    function = FUNCTION["all_to_all_v"]
    given = group.core.array(function, x, stream=stream)
    sent = arguments.checked_counts("all_to_all_v", "send_counts", send_counts, group, given.shape)
    n = group.size
    table = np.empty((n, n), np.int64)  # a row for each sender
    head = group.core.prepare(function, np.array(sent, np.int64), table.reshape(-1), what=_ALL_GATHER, head=True)

    def data() -> tuple[_core.Call, Callable[[], Any]]:
        call = _late(
            group, lambda: group.core.prepare(function, given, out, what=_ALL_TO_ALL, rows=table.reshape(-1).tolist())
        )
        return call, lambda: (call.result(), table[:, group.rank].tolist())

    return group.call_after(head, data, timeout, async_op, given.on_device)


def gather_rows(
    function: str,
    x: Any,
    root: int | None,
    out: Any,
    group: Group,
    timeout: Timeout,
    async_op: bool,
    stream: int | None = None,
) -> Any:
    """all_gather_v, and with a root gather_v."""
    number = FUNCTION[function]
    given = group.core.array(number, x, stream=stream)
    if not given.shape:
        raise ValueError(f"{function}: x is a scalar; it needs an axis 0, which may differ by rank")
    lengths = np.empty(group.size, np.int64)
    length = np.array([given.shape[0]], np.int64)
    head = group.core.prepare(number, length, lengths, what=_ALL_GATHER, root=root, head=True)
    what = _ALL_GATHER if root is None else _GATHER

    def data() -> tuple[_core.Call, Callable[[], Any]]:
        call = _late(group, lambda: group.core.prepare(number, given, out, what=what, root=root, rows=lengths.tolist()))

        def result() -> Any:
            rows = call.result()
            return None if rows is None else (rows, lengths.tolist())

        return call, result

    return group.call_after(head, data, timeout, async_op, given.on_device)


def _scatter(
    function: str,
    x: Any,
    counts: Sequence[int] | None,
    root: int,
    out: Any,
    group: Group,
    timeout: Timeout,
    async_op: bool,
    stream: int | None,
) -> Any:
    """scatter, and with counts scatter_v: the root tells dtype and shape, then it sends the parts."""
    number, core = FUNCTION[function], group.core
    given = None if x is None else core.array(number, x, stream=stream)
    root = core.root(number, root)
    at_root = group.rank == root
    rows = None
    if counts is not None:
        rows = arguments.checked_counts(function, "counts", counts, group, None if given is None else given.shape)
    if at_root and given is None:
        raise TypeError(f"{function}: x is None at the root, whose array is divided; other ranks may pass None")
    digest = 0 if rows is None else _digest(rows)

    def parts(x: _core.Array | None, told: tuple[tuple[int, ...], int] | None = None) -> _core.Call:
        return core.prepare(
            number, x, out, what=_SCATTER, root=root, rows=rows, digest=digest, told=told, stream=stream
        )

    # The root knows before anything is sent whether its out fits. Memory is made when the others are on their way: what
    # is wrong then fails on all ranks.
    mine = parts(given) if at_root and out is not None and stream is None else None
    if given is not None and rows is None:
        core.part(number, given.shape)
    if given is None:
        on_device = out is not None and isinstance(memory_anywhere(out, "out", function), OnDevice)
    else:
        on_device = given.on_device
    told = np.zeros(3 + _core.max_dims, np.int64)  # whether it is on a device, dtype, how many dimensions, and these
    if given is not None and at_root:
        told[: 3 + len(given.shape)] = (given.on_device, given.dtype, len(given.shape), *given.shape)
    head = core.prepare(number, told, told, what=_BROADCAST, root=root, digest=digest, head=True)

    def data() -> tuple[_core.Call, Callable[[], Any]]:
        at_the_device, dtype, dims, *extents = told.tolist()
        shape = tuple(extents[:dims])
        rank = group.ranks[group.rank]
        if bool(at_the_device) != on_device:
            here = "x or out is on a device" if on_device else "x or out is the CPU's"
            if x is None and out is None:
                here = "no array was given"
            root_has = (
                "on its device; give x or out on the device" if at_the_device else "the CPU's; give None, or the CPU's"
            )
            raise Mismatch(f"{function}: {here} on rank {rank}, and at the root x is {root_has}", [rank])
        if given is not None and (given.dtype, given.shape) != (dtype, shape):
            here, there = (f"{_core.dtypes()[d]}{list(s)}" for d, s in ((given.dtype, given.shape), (dtype, shape)))
            raise Mismatch(f"{function}: x is {here} on rank {rank}, and {there} at the root")
        call = mine or _late(group, lambda: parts(given, (shape, dtype)))
        return call, call.result

    return group.call_after(head, data, timeout, async_op, on_device)


def _late(group: Group, prepare: Callable[[], _core.Call]) -> _core.Call:
    """The call, when the others are on their way already: what is wrong with out is a failure of the group then."""
    try:
        return prepare()
    except (TypeError, ValueError) as error:
        rank = group.ranks[group.rank]
        raise Mismatch(f"{error}, on rank {rank}", [rank]) from error


# -- many arrays


def all_reduce_many(
    arrays: Sequence[Any],
    op: str = "sum",
    *,
    out: Sequence[Any] | None = None,
    group: Group | str | None = None,
    timeout: Timeout = None,
    async_op: bool = False,
) -> Any:
    """all_reduce of a list of arrays, fused: small arrays of one dtype share an exchange.

    The result is a list, that of `[all_reduce(x, op) for x in arrays]`, to the bit. out: a list of arrays; it may be
    `arrays` itself. The list must have the same length, shapes and dtypes on all ranks.

    >>> mscomm.all_reduce_many([np.ones(2), np.ones(1, np.int32)])         # on 2 ranks
    [array([2., 2.]), array([2], dtype=int32)]
    """
    group = resolve(group)
    core, number = group.core, FUNCTION["all_reduce_many"]
    core.op(number, op)
    given = [core.array(number, x, argument=f"arrays[{i}]") for i, x in enumerate(arrays)]
    if out is None:
        out = [None] * len(given)
    elif len(out) != len(given):
        raise ValueError(f"all_reduce_many: out has {len(out)} arrays, arrays has {len(given)}")
    digest, parts = _fused(tuple((one.dtype, one.shape, one.on_device) for one in given))

    def prepared(x: Any, out: Any, i: int = 0) -> _core.Call:
        return core.prepare(number, x, out, what=_ALL_REDUCE, op=op, digest=digest, out_argument=f"out[{i}]")

    alone = [prepared(x, y, i) for i, (x, y) in enumerate(zip(given, out, strict=True))]
    arguments.check_apart(
        [memory_anywhere(x, f"arrays[{i}]", "all_reduce_many") for i, x in enumerate(arrays)],
        [None if y is None else memory_anywhere(y, f"out[{i}]", "all_reduce_many") for i, y in enumerate(out)],
    )
    fused = [_fused_call([alone[i] for i in part], given[part[0]]) for part in parts]
    seconds = group.seconds(timeout)

    def result() -> list[Any]:
        for one in fused:
            one.spread(group)
        return [one.result() for one in alone]

    if not given:  # a call too: the others may have another list
        nothing = np.empty(0, np.uint8)
        empty = core.prepare(number, nothing, nothing, what=_ALL_REDUCE, op="sum", digest=digest)
        fused = [_FusedCall([empty])]
    with group.committed("all_reduce_many"):
        if async_op:
            return group.together([group.start(one.filled(group, prepared), seconds) for one in fused], result)
        first = group.reserve(len(fused))
        for i, one in enumerate(fused):
            group.run(one.filled(group, prepared), seconds, first + i)
            one.spread(group)
    return result()


class _FusedCall:
    """Arrays that go in one call: side by side in a bucket in shared memory; one alone as it is."""

    def __init__(self, alone: list[_core.Call]) -> None:
        self._alone = alone
        self._bucket: tuple[Array, Array] | None = None  # the memory, what is filled

    def filled(self, group: Group, prepared: Callable[[Any, Any], _core.Call]) -> _core.Call:
        if len(self._alone) == 1:
            return self._alone[0]
        try:
            room = group.buckets.pop()
        except IndexError:
            room = shared_empty((BUCKET_BYTES,), np.dtype(np.uint8))
        sources = [one.source for one in self._alone]
        filled = sum(source.nbytes for source in sources)
        if filled > PAGE_BYTES:
            filled = -(-filled // PAGE_BYTES) * PAGE_BYTES
        bucket = room[:filled].view(sources[0].dtype)
        at = 0
        for source in sources:
            bucket[at : at + source.size] = source.reshape(-1)
            at += source.size
        self._bucket = room, bucket
        return prepared(bucket, bucket)

    def spread(self, group: Group) -> None:
        """Copy the results to where they belong, once. The bucket can be filled again then."""
        if self._bucket is None:
            return
        room, bucket = self._bucket
        self._bucket = None
        at = 0
        for one in self._alone:
            target = one.target
            target.reshape(-1)[...] = bucket[at : at + target.size]
            at += target.size
        group.buckets.append(room)


def _fused_call(alone: list[_core.Call], model: _core.Array) -> _FusedCall:
    return _FusedOnDevice(alone, model) if model.on_device else _FusedCall(alone)


class _FusedOnDevice(_FusedCall):
    """A _FusedCall of arrays on a device: they lie side by side in a bucket of their library's memory."""

    def __init__(self, alone: list[_core.Call], model: _core.Array) -> None:
        super().__init__(alone)
        self._made: Any = None
        if len(alone) > 1:
            # Make the bucket here: an error that is raised now uses up no call number. It lives as long as this call.
            size = sum(math.prod(one.source.shape) for one in alone)
            self._made, self._owner = new("all_reduce_many", model.given, (size,))

    def filled(self, group: Group, prepared: Callable[[Any, Any], _core.Call]) -> _core.Call:
        if self._made is None:
            return self._alone[0]
        group.core.pack(self._made, [one.source for one in self._alone], self._made.stream)
        return prepared(self._made, self._made)

    def spread(self, group: Group) -> None:
        """Like _FusedCall.spread. The copies run in the order of the stream that is the current one now."""
        if self._made is not None:
            bucket, self._made = self._made, None
            group.core.unpack(bucket, [one.target for one in self._alone], bucket.current())


@functools.lru_cache(64)
def _fused(kinds: tuple[tuple[int, tuple[int, ...], bool], ...]) -> tuple[int, list[list[int]]]:
    """How a list of arrays, given by dtypes, shapes and whether they are on the device, is divided into calls; and a
    digest of the list.

    Lists that differ may still fill buckets of one size: the digest is compared with the rest of the call.
    """
    parts: list[list[int]] = []
    filling: dict[tuple[int, bool], tuple[list[int], int]] = {}  # by dtype and place: the bucket, and its bytes
    for i, (code, shape, on_device) in enumerate(kinds):
        size = math.prod(shape) * host.dtype_of(code).itemsize
        if size >= ALONE_BYTES:
            parts.append([i])
            continue
        bucket, filled = filling.get((code, on_device), ([], 0))
        if not bucket or filled + size > BUCKET_BYTES:
            bucket, filled = [], 0
            parts.append(bucket)
        bucket.append(i)
        filling[code, on_device] = bucket, filled + size
    return _digest(kinds), parts


# -- memory


def empty(shape: int | Sequence[int], dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    """A new, uninitialised array in memory that the ranks of this host share.

    Where every rank's x and out lie in such memory, a collective of more than 16 KiB (all_reduce and reduce: 4 KiB)
    works on them in place and copies nothing through buffers of its own.
    Any array whose memory lies in it counts (slices, views, torch.from_numpy) if it has its memory pages for itself: it
    begins on a page, and ends on one or where the whole array ends. Others give the same result by a copy.
    The memory lives as long as an array refers to it. Before init(), in a job of one, or when ranks do not share a
    host, it is private memory. In a forked child it stays shared with the parent. MemoryError if the host has not that
    much memory.
    """
    kind = dtype_named(dtype)
    dtype_code(kind)
    shape = (operator.index(shape),) if not isinstance(shape, Sequence) else tuple(map(operator.index, shape))
    if any(extent < 0 for extent in shape):
        raise ValueError(f"empty: negative dimensions in {shape}")
    return shared_empty(shape, kind)


def zeros(shape: int | Sequence[int], dtype: Any = np.float32) -> Array:
    """Like empty(), but filled with zeros."""
    array = empty(shape, dtype)
    array[...] = 0
    return array


# -- results


def _digest(agreed: object) -> int:
    """A hash of what all ranks must have given alike, from its repr. It is never 0, which stands for nothing."""
    return int.from_bytes(hashlib.blake2b(repr(agreed).encode(), digest_size=8).digest(), "little") | 1
