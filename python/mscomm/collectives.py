"""The collective operations. All ranks of the group must make the same calls in the same order.

`root` is a rank in the group (in torch.distributed it is a rank in the world). `group` is a Group, the name of a group,
or None for all ranks. `timeout` is a number of seconds or a timedelta; None takes the timeout given to init. A strided
x is read in C order.

`out` receives the result, and has x's dtype. If the result has x's shape, out may be x. Otherwise the smaller of x and
out may be this rank's part of the larger one: in all_gather x may be this rank's rows of out, and in reduce_scatter out
may be this rank's rows of x, as with NCCL. Any other overlap is a ValueError.

With `async_op=True` a function returns a Work at once; the wait() of this Work returns the result. The calls of a group
are carried out in the order in which they were made.

If x is on the rank's device (see init), the accelerator does the work. The call returns when it is enqueued on
`stream`, a stream handle of the vendor's library; the default is the current stream of the array's library. Work that
is enqueued on that stream later sees a complete out. All ranks must give x and out on the device, or all on the CPU.
The uneven forms and scatter first exchange lengths on the CPU; this exchange waits for the other ranks. barrier always
runs on the CPU.

All functions raise TypeError or ValueError for wrong arguments, before anything is sent. If a call fails, it raises
PeerLost, CollectiveTimeout, Mismatch or Aborted (see mscomm.errors); then the group is broken and the contents of out
are undefined.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
import operator
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

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
F = TypeVar("F", bound=Callable[..., Any])

FUNCTION = {name: number for number, name in enumerate(_core.functions)}

# all_reduce_many reduces an array of at least ALONE_BYTES in a call of its own; smaller arrays share buckets of
# BUCKET_BYTES.
ALONE_BYTES = 1 << 20
BUCKET_BYTES = 4 << 20
# The largest page size of any kernel. The filled part of a bucket is rounded up to whole pages, because only whole
# pages can be shared. The contents of the last page behind the arrays do not matter.
PAGE_BYTES = 64 << 10


def _collective(function: F) -> F:
    """Replace a function by one of the core, with the same name, parameters and docstring (see src/functions.cc)."""
    signature = inspect.signature(function)
    plain = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
    text = str(signature.replace(parameters=plain, return_annotation=signature.empty))
    return _core.collective(FUNCTION[function.__name__], function, text)


@_collective
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
    combined in float32 and rounded once. Integers wrap around. min and max propagate NaN as np.minimum does. On bool,
    sum means "or" and prod means "and".

    Returns out, or a new array like x. Shape and dtype of x must be the same on all ranks.

    >>> mscomm.all_reduce(np.full(3, mscomm.get_rank(), np.float32))       # on 4 ranks
    array([6., 6., 6.], dtype=float32)
    """


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


@_collective
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

    On n ranks, x of shape (a, ...) gives a result of shape (n * a, ...). A scalar x (shape ()) gives a result of shape
    (n,). Shape and dtype must be the same on all ranks. Returns out, or a new array of x's type.

    >>> mscomm.all_gather(np.array([[mscomm.get_rank()]], np.float32))     # on 2 ranks
    array([[0.],
           [1.]], dtype=float32)
    """


@_collective
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

    On n ranks, x of shape (n * a, ...) gives results of shape (a, ...): rank r gets the rows r * a to r * a + a - 1 of
    what all_reduce would give, with the same bits. op: see all_reduce. Raises ValueError if the rows of x cannot be
    divided by n. Shape and dtype must be the same on all ranks. Returns out, or a new array of x's type.

    >>> mscomm.reduce_scatter(np.arange(4.0))                              # on 2 ranks: rank 0, rank 1
    array([0., 2.])
    array([4., 6.])
    """


@_collective
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

    x must have the same shape and dtype on all ranks; its contents are read at the root only. Returns out, or a new
    array like x. On the root, this new array is a copy of x.

    >>> mscomm.broadcast(np.full(2, mscomm.get_rank()), root=1)            # on 2 ranks
    array([1, 1])
    """


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


@_collective
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
    out is ignored.

    >>> mscomm.reduce(np.ones(2))                                          # on 4 ranks, at rank 0
    array([4., 4.])
    """


@_collective
def scan(
    x: Any,
    op: str = "sum",
    *,
    out: Any = None,
    group: Group | str | None = None,
    timeout: Timeout = None,
    async_op: bool = False,
) -> Any:
    """Combine x elementwise over the ranks up to this one: rank r gets the combination of ranks 0 to r.

    op: sum, prod, min, max, band, bor, bxor, as in all_reduce. Elements are combined in rank order, so the bits are the
    same in every run and with every algorithm. float16 and bfloat16 are combined in float32, and each rank's result is
    rounded once. If each host has one rank, or one host has all ranks, the last rank's result has the bits of
    all_reduce.

    Returns out, or a new array like x. Shape and dtype of x must be the same on all ranks. Raises ValueError for avg,
    and TypeError for an array on a device: copy it to the CPU first. Like MPI_Scan.

    >>> mscomm.scan(np.full(2, mscomm.get_rank() + 1))                     # on 3 ranks: rank 0, rank 1, rank 2
    array([1, 1])
    array([3, 3])
    array([6, 6])
    """


@_collective
def exscan(
    x: Any,
    op: str = "sum",
    *,
    out: Any = None,
    group: Group | str | None = None,
    timeout: Timeout = None,
    async_op: bool = False,
) -> Any:
    """Combine x elementwise over the ranks before this one: rank r gets the combination of ranks 0 to r - 1.

    Rank 0 gets the operation's identity. This is 0 for sum, bor and bxor, 1 for prod, and all bits set for band. For
    min it is the largest value of the dtype (infinity, if the dtype has it), and for max the smallest. On bool it is
    False for sum, max, bor and bxor, and True for prod, min and band. (MPI_Exscan leaves rank 0's result undefined;
    mpi4py's `exscan` gives None.) Everything else is as in scan.

    >>> rows = np.array([len(mine)])                                       # where this rank's rows begin in the whole
    >>> begin = mscomm.exscan(rows)
    """


@_collective
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

    The root gets the result of all_gather, in out or in a new array of x's type. Other ranks get None, and their out is
    ignored. Shape and dtype must be the same on all ranks.

    >>> mscomm.gather(np.array([mscomm.get_rank()]))                       # on 2 ranks, at rank 0
    array([0, 1])
    """


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

    On n ranks, x of shape (n * a, ...) at the root gives each rank a result of shape (a, ...): rank r gets the rows
    r * a to r * a + a - 1. x is read at the root only. Other ranks may pass None, and learn shape and dtype from the
    root; if they pass an array, it must have the root's shape and dtype. Returns out, or a new array: of x's type, or a
    NumPy array if x is None. Raises ValueError if the rows of x cannot be divided by n, and Mismatch on all ranks if a
    rank's x or out does not fit.

    >>> mscomm.scatter(np.arange(4) if mscomm.get_rank() == 0 else None)   # on 2 ranks: rank 0, rank 1
    array([0, 1])
    array([2, 3])
    """
    return _scatter("scatter", x, None, root, out, resolve(group), timeout, async_op, stream)


@_collective
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

    Axis 0 of x is divided into n parts, one for each rank; the result has x's shape. Raises ValueError if the rows of x
    cannot be divided by n. Shape and dtype must be the same on all ranks. Returns out, or a new array of x's type.

    >>> mscomm.all_to_all(np.array([0, 1]) + 10 * mscomm.get_rank())       # on 2 ranks: rank 0, rank 1
    array([ 0, 10])
    array([ 1, 11])
    """


@_collective
def barrier(*, group: Group | str | None = None, timeout: Timeout = None, async_op: bool = False) -> Any:
    """Wait until every rank of the group has called barrier. With async_op, return a Work, whose wait() waits."""


# -- uneven calls: the parts of the ranks have different lengths


def all_gather_v(
    x: Any,
    *,
    out: Any = None,
    group: Group | str | None = None,
    timeout: Timeout = None,
    async_op: bool = False,
    stream: int | None = None,
) -> Any:
    """all_gather of arrays that differ in the length of axis 0. Returns (rows, counts).

    x has the shape (a, ...), where a may differ between ranks and may be 0. The rest of the shape and the dtype must be
    the same on all ranks. `rows` is out, or a new array of x's type. It has the shape (sum of all a, ...), and holds
    the rows of all ranks in rank order. `counts` is the list of the ranks' a. If a rank's out has the wrong shape, all
    ranks raise Mismatch.

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
    """Does what all_gather_v does, at the root only. The root gets (rows, counts), other ranks get None."""
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

    counts: a list with the number of rows for each rank, the same on all ranks. At the root it must add up to
    x.shape[0]. Everything else is as in scatter.

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

    counts: a list with the number of rows for each rank, the same on all ranks; it must add up to x.shape[0]. Shape and
    dtype of x must be the same on all ranks. Returns out, or a new array of shape (counts[rank], ...).

    >>> mscomm.reduce_scatter_v(np.arange(3.0), [1, 2])                    # on 2 ranks: rank 0, rank 1
    array([0.])
    array([2., 4.])
    """
    group = resolve(group)
    given = group.core.array(FUNCTION["reduce_scatter_v"], x, stream=stream)
    rows = arguments.checked_counts("reduce_scatter_v", "counts", counts, group, given.shape)
    call = group.core.prepare(
        FUNCTION["reduce_scatter_v"],
        given,
        out,
        what=FUNCTION["reduce_scatter"],
        op=op,
        rows=rows,
        digest=_digest(rows),
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

    The first send_counts[0] rows of x go to rank 0, the next send_counts[1] rows to rank 1, and so on; send_counts must
    add up to x.shape[0]. `rows` is out, or a new array of x's type. It holds the received rows in rank order:
    recv_counts[s] rows from rank s. x.shape[1:] and dtype must be the same on all ranks. If a rank's out has the wrong
    shape, all ranks raise Mismatch.

    >>> mscomm.all_to_all_v(np.arange(3), [1, 2])                          # on 2 ranks: rank 0, rank 1
    (array([0, 0]), [1, 1])
    (array([1, 2, 1, 2]), [2, 2])
    """
    group = resolve(group)
    function = FUNCTION["all_to_all_v"]
    given = group.core.array(function, x, stream=stream)
    sent = arguments.checked_counts("all_to_all_v", "send_counts", send_counts, group, given.shape)
    n = group.size
    table = np.empty((n, n), np.int64)  # table[s, d]: how many rows rank s sends to rank d
    head = group.core.prepare(
        function, np.array(sent, np.int64), table.reshape(-1), what=FUNCTION["all_gather"], head=True
    )

    def data() -> tuple[_core.Call, Callable[[], Any]]:
        call = _late(
            group,
            lambda: group.core.prepare(
                function, given, out, what=FUNCTION["all_to_all"], rows=table.reshape(-1).tolist()
            ),
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
    """Carries out all_gather_v or, if there is a root, gather_v. The functions for Python objects use this, too."""
    number = FUNCTION[function]
    given = group.core.array(number, x, stream=stream)
    if not given.shape:
        raise ValueError(f"{function}: x is a scalar; it needs an axis 0, which may differ by rank")
    lengths = np.empty(group.size, np.int64)
    length = np.array([given.shape[0]], np.int64)
    head = group.core.prepare(number, length, lengths, what=FUNCTION["all_gather"], root=root, head=True)
    what = FUNCTION["all_gather"] if root is None else FUNCTION["gather"]

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
    """Carries out scatter or, if there are counts, scatter_v. The root broadcasts dtype and shape, then sends the
    parts."""
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
            number, x, out, what=FUNCTION["scatter"], root=root, rows=rows, digest=digest, told=told, stream=stream
        )

    # If the root has an out, check it before anything is sent. Otherwise prepare the call after the head: the other
    # ranks wait for this rank by then, so an error must fail the call on all ranks (see _late).
    mine = parts(given) if at_root and out is not None and stream is None else None
    if given is not None and rows is None:
        core.part(number, given.shape)
    if given is None:
        on_device = out is not None and isinstance(memory_anywhere(out, "out", function), OnDevice)
    else:
        on_device = given.on_device
    # about the root's x: whether it is on a device, dtype, number of dimensions, shape
    told = np.zeros(3 + _core.max_dims, np.int64)
    if given is not None and at_root:
        told[: 3 + len(given.shape)] = (given.on_device, given.dtype, len(given.shape), *given.shape)
    head = core.prepare(number, told, told, what=FUNCTION["broadcast"], root=root, digest=digest, head=True)

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
    """Prepare the call that follows a head. The other ranks wait in it by now, so a wrong out is a Mismatch."""
    try:
        return prepare()
    except (TypeError, ValueError) as error:
        rank = group.ranks[group.rank]
        raise Mismatch(f"{error}, on rank {rank}", [rank]) from error


# -- all_reduce of many arrays


def all_reduce_many(
    arrays: Sequence[Any],
    op: str = "sum",
    *,
    out: Sequence[Any] | None = None,
    group: Group | str | None = None,
    timeout: Timeout = None,
    async_op: bool = False,
) -> Any:
    """all_reduce of a list of arrays, fused: small arrays of one dtype are reduced together in one call.

    Returns the list `[all_reduce(x, op) for x in arrays]`, with the same bits. out: a list of arrays; it may be
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
        return core.prepare(number, x, out, what=FUNCTION["all_reduce"], op=op, digest=digest, out_argument=f"out[{i}]")

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

    if not given:  # an empty list needs a call, too: the call finds ranks whose lists are not empty
        nothing = np.empty(0, np.uint8)
        empty = core.prepare(number, nothing, nothing, what=FUNCTION["all_reduce"], op="sum", digest=digest)
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
    """Arrays that one call reduces: several side by side in a bucket in shared memory, or one in its own memory."""

    def __init__(self, alone: list[_core.Call]) -> None:
        self._alone = alone
        self._bucket: tuple[Array, Array] | None = None  # the memory of the bucket, and an array over the filled part

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
        """Copy the results from the bucket to their arrays, unless this was done before. Then the bucket is free."""
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
    """A _FusedCall of arrays on a device. The bucket is an array of the same library."""

    def __init__(self, alone: list[_core.Call], model: _core.Array) -> None:
        super().__init__(alone)
        self._made: Any = None
        if len(alone) > 1:
            # Make the bucket here, and not in filled(): an error that is raised here uses up no call number. The bucket
            # lives as long as this object.
            size = sum(math.prod(one.source.shape) for one in alone)
            self._made, self._owner = new("all_reduce_many", model.given, (size,))

    def filled(self, group: Group, prepared: Callable[[Any, Any], _core.Call]) -> _core.Call:
        if self._made is None:
            return self._alone[0]
        group.core.pack(self._made, [one.source for one in self._alone], self._made.stream)
        return prepared(self._made, self._made)

    def spread(self, group: Group) -> None:
        """Like _FusedCall.spread. The copies are enqueued on the library's current stream."""
        if self._made is not None:
            bucket, self._made = self._made, None
            group.core.unpack(bucket, [one.target for one in self._alone], bucket.current())


@functools.lru_cache(64)
def _fused(kinds: tuple[tuple[int, tuple[int, ...], bool], ...]) -> tuple[int, list[list[int]]]:
    """Divide a list of arrays into calls. Returns a digest of the list, and the indices of the arrays of each call.

    kinds: the dtype and shape of each array, and whether it is on the device. Two different lists may fill buckets of
    the same size. The digest lets the ranks notice this: it is part of each call's signature.
    """
    parts: list[list[int]] = []
    # by dtype and on_device: the bucket being filled (indices of arrays), and its bytes
    filling: dict[tuple[int, bool], tuple[list[int], int]] = {}
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

    If every rank's x and out are in such memory, a collective of more than 16 KiB (all_reduce and reduce: 4 KiB) works
    on them in place, and copies nothing through buffers of its own. This is true for slices and views of such an array,
    and for tensors that torch.from_numpy makes of it, too, if their memory pages hold nothing else: they must begin at
    a page boundary, and end at a page boundary or at the end of the whole array. Other arrays are copied, with the same
    result.

    The memory lives as long as an array refers to it. Before init(), and if this rank is alone on its host, the memory
    is private. A forked child shares the shared memory with its parent. Raises MemoryError if the host has not enough
    memory.
    """
    kind = dtype_named(dtype)
    dtype_code(kind)
    shape = (operator.index(shape),) if not isinstance(shape, Sequence) else tuple(map(operator.index, shape))
    if any(extent < 0 for extent in shape):
        raise ValueError(f"empty: negative dimensions in {shape}")
    return shared_empty(shape, kind)


def zeros(shape: int | Sequence[int], dtype: Any = np.float32) -> Array:
    """Does the same as empty(), but fills the array with zeros."""
    array = empty(shape, dtype)
    array[...] = 0
    return array


# -- the digest of arguments


def _digest(agreed: object) -> int:
    """A hash of the repr of arguments that must be the same on all ranks. It is never 0, which means "no digest"."""
    return int.from_bytes(hashlib.blake2b(repr(agreed).encode(), digest_size=8).digest(), "little") | 1
