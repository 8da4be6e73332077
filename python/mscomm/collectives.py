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
from mscomm.arrays import library, memory_anywhere
from mscomm.arrays import numpy as host
from mscomm.arrays.device import OnDevice
from mscomm.arrays.numpy import dtype_code, dtype_named
from mscomm.errors import Mismatch
from mscomm.group import Call, Group, Pending
from mscomm.job import resolve, shared_empty

Timeout = float | timedelta | None
Array = np.ndarray[Any, Any]

WHAT = {name: code for code, name in enumerate(_core.collectives)}
_ALL_REDUCE, _ALL_GATHER, _REDUCE_SCATTER, _BROADCAST, _ALL_TO_ALL, _BARRIER = (
    WHAT[name] for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier")
)
FUNCTION = {name: code for code, name in enumerate(_core.functions)}
_INT64 = dtype_code(np.dtype(np.int64))

# all_reduce_many: an array of at least ALONE_BYTES goes as it is; smaller ones share buckets of BUCKET_BYTES.
ALONE_BYTES = 1 << 20
BUCKET_BYTES = 4 << 20
# The largest page of any kernel: of a bucket that is not full whole pages take part, whatever is in the rest, because
# only these can be shared.
PAGE_BYTES = 64 << 10


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
    group = resolve(group)
    if timeout is None and not async_op and stream is None:
        done = group.call_plain(_ALL_REDUCE, x, op, -1, out)
        if done is not NotImplemented:
            return done
    given = arguments.given("all_reduce", x, group, stream=stream)
    op_code = arguments.op_code("all_reduce", op, given, group)
    target, result = arguments.result("all_reduce", given, out, given.shape, 0)
    call = Call(WHAT["all_reduce"], given.source, target, dtype=given.code, op=op_code)
    return group.call(call, timeout, async_op, result)


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
    group = resolve(group)
    if timeout is None and not async_op and stream is None:
        done = group.call_plain(_ALL_GATHER, x, None, -1, out)
        if done is not NotImplemented:
            return done
    given = arguments.given("all_gather", x, group, stream=stream)
    target, result = arguments.result(
        "all_gather", given, out, arguments.times(given.shape, group.size), group.rank * given.source.size
    )
    call = Call(WHAT["all_gather"], given.source, target, dtype=given.code)
    return group.call(call, timeout, async_op, result)


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
    group = resolve(group)
    if timeout is None and not async_op and stream is None:
        done = group.call_plain(_REDUCE_SCATTER, x, op, -1, out)
        if done is not NotImplemented:
            return done
    given = arguments.given("reduce_scatter", x, group, stream=stream)
    op_code = arguments.op_code("reduce_scatter", op, given, group)
    shape = arguments.share("reduce_scatter", given.shape, group.size)
    target, result = arguments.result("reduce_scatter", given, out, shape, group.rank * math.prod(shape))
    call = Call(WHAT["reduce_scatter"], given.source, target, dtype=given.code, op=op_code)
    return group.call(call, timeout, async_op, result)


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
    group = resolve(group)
    if timeout is None and not async_op and stream is None:
        done = group.call_plain(_BROADCAST, x, None, root, out)
        if done is not NotImplemented:
            return done
    given = arguments.given("broadcast", x, group, stream=stream)
    root = arguments.checked_root("broadcast", root, group)
    target, result = arguments.result("broadcast", given, out, given.shape, 0)
    call = Call(WHAT["broadcast"], given.source, target, dtype=given.code, root=root)
    return group.call(call, timeout, async_op, result)


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

    At the root as all_reduce, to the bit: out, or a new array like x. None elsewhere, where out is not looked at.

    >>> mscomm.reduce(np.ones(2))                                          # on 4 ranks, at rank 0
    array([4., 4.])
    """
    group = resolve(group)
    given = arguments.given("reduce", x, group, stream=stream)
    op_code = arguments.op_code("reduce", op, given, group)
    root = arguments.checked_root("reduce", root, group)
    target, result = arguments.result("reduce", given, out, given.shape, 0) if group.rank == root else (None, _nothing)
    call = Call(WHAT["reduce"], given.source, target, dtype=given.code, op=op_code, root=root)
    return group.call(call, timeout, async_op, result)


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
    return _scan("scan", x, op, out, group, timeout, async_op)


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
    return _scan("exscan", x, op, out, group, timeout, async_op)


def _scan(function: str, x: Any, op: str, out: Any, group: Group | str | None, timeout: Timeout, async_op: bool) -> Any:
    group = resolve(group)
    if isinstance(memory_anywhere(x, "x", function), OnDevice):
        raise TypeError(f"{function}: x is on a device, and neither NCCL nor HCCL has a {function}; copy it to the CPU")
    given = arguments.given(function, x, group)
    op_code = arguments.op_code(function, op, given, group)
    if op == "avg":
        raise ValueError(f"{function}: op avg would divide by another number on each rank; divide the sum yourself")
    target, result = arguments.result(function, given, out, given.shape, 0)
    call = Call(WHAT[function], given.source, target, dtype=given.code, op=op_code)
    return group.call(call, timeout, async_op, result)


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

    At the root as all_gather: out, or a new array of x's type. None elsewhere, where out is not looked at. Shape and
    dtype must be the same on all ranks.

    >>> mscomm.gather(np.array([mscomm.get_rank()]))                       # on 2 ranks, at rank 0
    array([0, 1])
    """
    group = resolve(group)
    given = arguments.given("gather", x, group, stream=stream)
    root = arguments.checked_root("gather", root, group)
    target, result = None, _nothing
    if group.rank == root:
        shape, place = arguments.times(given.shape, group.size), group.rank * given.source.size
        target, result = arguments.result("gather", given, out, shape, place)
    call = Call(WHAT["gather"], given.source, target, dtype=given.code, root=root)
    return group.call(call, timeout, async_op, result)


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
    group = resolve(group)
    given = None if x is None else arguments.given("scatter", x, group, stream=stream)
    root = arguments.checked_root("scatter", root, group)
    if group.rank == root and given is None:
        raise TypeError("scatter: x is None at the root, whose array is divided; other ranks may pass None")
    if given is not None:
        arguments.share("scatter", given.shape, group.size)
    return _scatter("scatter", given, None, root, out, group, timeout, async_op, stream)


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
    group = resolve(group)
    if timeout is None and not async_op and stream is None:
        done = group.call_plain(_ALL_TO_ALL, x, None, -1, out)
        if done is not NotImplemented:
            return done
    given = arguments.given("all_to_all", x, group, stream=stream)
    arguments.share("all_to_all", given.shape, group.size)
    target, result = arguments.result("all_to_all", given, out, given.shape, 0)
    call = Call(WHAT["all_to_all"], _apart("all_to_all", given, target, group), target, dtype=given.code)
    return group.call(call, timeout, async_op, result)


def barrier(*, group: Group | str | None = None, timeout: Timeout = None, async_op: bool = False) -> Any:
    """Return when every rank of the group has called it. None; with async_op a Work of None."""
    group = resolve(group)
    if timeout is None and not async_op:
        done = group.call_plain(_BARRIER, None, None, -1, None)
        if done is not NotImplemented:
            return done
    return group.call(Call(_BARRIER), timeout, async_op, _nothing)


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
    return gather_rows(
        "gather_v", x, arguments.checked_root("gather_v", root, group), out, group, timeout, async_op, stream
    )


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
    group = resolve(group)
    given = None if x is None else arguments.given("scatter_v", x, group, stream=stream)
    root = arguments.checked_root("scatter_v", root, group)
    counts = arguments.checked_counts("scatter_v", "counts", counts, group, given)
    if group.rank == root and given is None:
        raise TypeError("scatter_v: x is None at the root, whose array is divided; other ranks may pass None")
    return _scatter("scatter_v", given, counts, root, out, group, timeout, async_op, stream)


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
    given = arguments.given("reduce_scatter_v", x, group, stream=stream)
    op_code = arguments.op_code("reduce_scatter_v", op, given, group)
    counts = arguments.checked_counts("reduce_scatter_v", "counts", counts, group, given)
    row = math.prod(given.shape[1:])
    shape = (counts[group.rank], *given.shape[1:])
    target, result = arguments.result("reduce_scatter_v", given, out, shape, row * sum(counts[: group.rank]))
    call = Call(
        WHAT["reduce_scatter"],
        given.source,
        target,
        function=FUNCTION["reduce_scatter_v"],
        dtype=given.code,
        op=op_code,
        counts=[row * count for count in counts],
        digest=_digest(counts),
    )
    return group.call(call, timeout, async_op, result)


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
    given = arguments.given("all_to_all_v", x, group, stream=stream)
    sent = arguments.checked_counts("all_to_all_v", "send_counts", send_counts, group, given)
    n = group.size
    table = np.empty((n, n), np.int64)  # a row for each sender
    head = Call(
        WHAT["all_gather"],
        np.array(sent, np.int64),
        table,
        function=FUNCTION["all_to_all_v"],
        dtype=_INT64,
        head=True,
    )

    def data() -> tuple[Call, Callable[[], Any]]:
        got = table[:, group.rank].tolist()
        shape = (sum(got), *given.shape[1:])
        target, result = arguments.late_result("all_to_all_v", given, out, shape, 0, group)
        call = Call(
            WHAT["all_to_all"],
            _apart("all_to_all_v", given, target, group),
            target,
            function=FUNCTION["all_to_all_v"],
            dtype=given.code,
            shape=(0, *given.shape[1:]),
            counts=(table.reshape(-1) * math.prod(given.shape[1:])).tolist(),
        )
        return call, functools.partial(_with_counts, result, got)

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
    given = arguments.given(function, x, group, stream=stream)
    if not given.shape:
        raise ValueError(f"{function}: x is a scalar; it needs an axis 0, which may differ by rank")
    lengths = np.empty(group.size, np.int64)
    head = Call(
        WHAT["all_gather"],
        np.array([given.shape[0]], np.int64),
        lengths,
        function=FUNCTION[function],
        dtype=_INT64,
        root=-1 if root is None else root,
        head=True,
    )

    def data() -> tuple[Call, Callable[[], Any]]:
        counts = lengths.tolist()
        row = math.prod(given.shape[1:])
        shape = (sum(counts), *given.shape[1:])
        target: Array | None = None
        result: Callable[[], Any] = _nothing
        if root is None or root == group.rank:
            place = row * sum(counts[: group.rank])
            target, rows = arguments.late_result(function, given, out, shape, place, group)
            result = functools.partial(_with_counts, rows, counts)
        call = Call(
            WHAT["all_gather" if root is None else "gather"],
            given.source,
            target,
            function=FUNCTION[function],
            dtype=given.code,
            root=-1 if root is None else root,
            shape=shape,
            counts=[row * count for count in counts],
        )
        return call, result

    return group.call_after(head, data, timeout, async_op, given.on_device)


def _scatter(
    function: str,
    given: arguments.Given | None,
    counts: list[int] | None,
    root: int,
    out: Any,
    group: Group,
    timeout: Timeout,
    async_op: bool,
    stream: int | None,
) -> Any:
    """scatter, and with counts scatter_v: the root tells dtype and shape, then it sends the parts."""
    at_root = group.rank == root
    if given is not None and at_root and out is not None:  # known here before anything is sent
        arguments.check_out(function, given, out, *_part_of(given.shape, counts, group))
    digest = 0 if counts is None else _digest(counts)
    there = None if given is None else given.memory
    if there is None and out is not None:
        there = memory_anywhere(out, "out", function)
    told = np.zeros(3 + _core.max_dims, np.int64)  # whether it is on a device, dtype, how many dimensions, and these
    if given is not None and at_root:
        told[: 3 + len(given.shape)] = (given.on_device, given.code, len(given.shape), *given.shape)
    head = Call(
        WHAT["broadcast"],
        told,
        told,
        function=FUNCTION[function],
        dtype=_INT64,
        root=root,
        digest=digest,
        head=True,
    )

    def data() -> tuple[Call, Callable[[], Any]]:
        on_device, code, dims, *extents = told.tolist()
        shape = tuple(extents[:dims])
        if bool(on_device) != isinstance(there, OnDevice):
            rank = group.ranks[group.rank]
            here = "no array was given" if there is None else f"x or out is {arguments.where(there)}"
            root_has = (
                "on its device; give x or out on the device" if on_device else "the CPU's; give None, or the CPU's"
            )
            raise Mismatch(f"{function}: {here} on rank {rank}, and at the root x is {root_has}", [rank])
        model = given or _model(function, out, shape, code, stream)
        if (model.code, model.shape) != (code, shape):
            mine, theirs = (f"{_core.dtypes()[c]}{list(s)}" for c, s in ((model.code, model.shape), (code, shape)))
            raise Mismatch(f"{function}: x is {mine} on rank {group.ranks[group.rank]}, and {theirs} at the root")
        part, place = _part_of(shape, counts, group)
        target, result = arguments.late_result(function, model, out, part, place if at_root else None, group)
        call = Call(
            WHAT["scatter"],
            model.source if at_root else None,
            target,
            function=FUNCTION[function],
            dtype=code,
            root=root,
            shape=shape,
            counts=() if counts is None else [math.prod(shape[1:]) * count for count in counts],
            digest=digest,
        )
        return call, result

    return group.call_after(head, data, timeout, async_op, isinstance(there, OnDevice))


def _model(function: str, out: Any, shape: tuple[int, ...], code: int, stream: int | None) -> arguments.Given:
    """What stands for x, where the root alone has one: an array of that dtype without elements."""
    if out is not None and isinstance(there := memory_anywhere(out, "out", function), OnDevice):
        nothing = there[:0]
        if stream is not None:
            nothing.stream, nothing.chosen = operator.index(stream), True
        return arguments.Given(library(out, "out", function), out, nothing, nothing, shape, code)
    nothing = np.empty(0, host.dtype_of(code))
    return arguments.Given(host, nothing, nothing, nothing, shape, code)


def _part_of(shape: tuple[int, ...], counts: list[int] | None, group: Group) -> tuple[tuple[int, ...], int]:
    """The shape of this rank's part of an array that is divided, and the element at which it begins."""
    counts = counts or [shape[0] // group.size] * group.size
    return (counts[group.rank], *shape[1:]), math.prod(shape[1:]) * sum(counts[: group.rank])


def _apart(function: str, given: arguments.Given, target: Array, group: Group) -> Any:
    """What is read of x: on a device, where parts come while others go, a copy of it if they come to the same place."""
    if isinstance(given.source, OnDevice) and np.may_share_memory(given.source, target):
        made, _ = arguments.new(function, given, given.shape)
        group.core.pack(made, [given.source], given.source.stream)
        return made
    return given.source


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
    arguments.known_op("all_reduce_many", op)
    given = [arguments.given("all_reduce_many", x, group, f"arrays[{i}]") for i, x in enumerate(arrays)]
    op_codes = [arguments.op_code("all_reduce_many", op, one, group) for one in given]
    if out is None:
        out = [None] * len(given)
    elif len(out) != len(given):
        raise ValueError(f"all_reduce_many: out has {len(out)} arrays, arrays has {len(given)}")
    targets = [
        arguments.result("all_reduce_many", one, y, one.shape, 0, f"out[{i}]")
        for i, (one, y) in enumerate(zip(given, out, strict=True))
    ]
    arguments.check_apart(
        [one.memory for one in given],
        [None if y is None else memory_anywhere(y, f"out[{i}]", "all_reduce_many") for i, y in enumerate(out)],
    )
    digest, parts = _fused(tuple((one.code, one.shape, one.on_device) for one in given))
    calls = [
        _fused_call(given[part[0]], [given[i].source for i in part], [targets[i][0] for i in part]) for part in parts
    ]
    seconds = group.seconds(timeout)

    def call(fused: _FusedCall, i: int) -> Call:
        return Call(
            WHAT["all_reduce"],
            *fused.filled(group),
            function=FUNCTION["all_reduce_many"],
            dtype=given[i].code,
            op=op_codes[i],
            digest=digest,
        )

    def start(fused: _FusedCall, i: int) -> Pending:
        return group.start(call(fused, i), seconds)

    def result() -> list[Any]:
        for fused in calls:
            fused.spread(group)
        return [finished() for _, finished in targets]

    if not given:  # a call too: the others may have another list
        nothing = np.empty(0, np.uint8)
        empty_list = Call(WHAT["all_reduce"], nothing, nothing, function=FUNCTION["all_reduce_many"], digest=digest)
        return group.call(empty_list, timeout, async_op, list)
    with group.committed("all_reduce_many"):
        if async_op:
            starts = [functools.partial(start, fused, part[0]) for fused, part in zip(calls, parts, strict=True)]
            return group.watch((given, targets, calls), result, starts)
        number = group.reserve(len(parts))
        for fused, part in zip(calls, parts, strict=True):
            group.run(call(fused, part[0]), seconds, number)
            fused.spread(group)
            number += 1
    return result()


class _FusedCall:
    """Arrays that go in one call: side by side in a bucket in shared memory; one alone as it is."""

    def __init__(self, sources: list[Array], targets: list[Array]) -> None:
        self._sources = sources
        self._targets = targets
        self._bucket: tuple[Array, Array] | None = None  # the memory, what is filled

    def filled(self, group: Group) -> tuple[Array, Array]:
        """x and out of the call."""
        if len(self._sources) == 1:
            return self._sources[0], self._targets[0]
        try:
            room = group.buckets.pop()
        except IndexError:
            room = shared_empty((BUCKET_BYTES,), np.dtype(np.uint8))
        dtype = self._sources[0].dtype
        filled = sum(source.nbytes for source in self._sources)
        if filled > PAGE_BYTES:
            filled = -(-filled // PAGE_BYTES) * PAGE_BYTES
        bucket = room[:filled].view(dtype)
        at = 0
        for source in self._sources:
            bucket[at : at + source.size] = source.reshape(-1)
            at += source.size
        self._bucket = room, bucket
        return bucket, bucket

    def spread(self, group: Group) -> None:
        """The results to where they belong, once; the bucket can be filled again then."""
        if self._bucket is None:
            return
        room, bucket = self._bucket
        self._bucket = None
        at = 0
        for target in self._targets:
            target.reshape(-1)[...] = bucket[at : at + target.size]
            at += target.size
        group.buckets.append(room)


def _fused_call(model: arguments.Given, sources: list[Array], targets: list[Array]) -> _FusedCall:
    return _FusedOnDevice(sources, targets, model) if model.on_device else _FusedCall(sources, targets)


class _FusedOnDevice(_FusedCall):
    """The same of arrays on a device: side by side in a bucket of their library's memory."""

    def __init__(self, sources: list[Array], targets: list[Array], model: arguments.Given) -> None:
        super().__init__(sources, targets)
        self._made: OnDevice | None = None
        if len(sources) > 1:
            # Here, where what is wrong uses no number yet. It lives as long as this call.
            self._made, self._owner = arguments.new("all_reduce_many", model, (sum(source.size for source in sources),))

    def filled(self, group: Group) -> tuple[Array, Array]:
        if self._made is None:
            return self._sources[0], self._targets[0]
        group.core.pack(self._made, self._sources, self._made.stream)
        return self._made, self._made

    def spread(self, group: Group) -> None:
        """In the order of the stream that is the current one now."""
        if self._made is not None:
            bucket, self._made = self._made, None
            group.core.unpack(bucket, self._targets, bucket.current())


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
    """As empty, filled with zeros."""
    array = empty(shape, dtype)
    array[...] = 0
    return array


# -- results


def _with_counts(rows: Callable[[], Any], counts: list[int]) -> tuple[Any, list[int]]:
    return rows(), counts


def _nothing() -> None:
    """The result where there is none."""


def _digest(agreed: object) -> int:
    """Of what all ranks must have given alike, by its repr; never 0, which stands for nothing."""
    return int.from_bytes(hashlib.blake2b(repr(agreed).encode(), digest_size=8).digest(), "little") | 1
