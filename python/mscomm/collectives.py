"""The collective operations. All ranks of the group must make the same calls in the same order.

`root` is a rank in the group, whereas torch.distributed expects a rank in the world. `group` is a Group, the name of a
group, or None for all ranks. `timeout` is a number of seconds or a timedelta; None means the timeout passed to init. A
strided x is read in C order.

`out` receives the result, and must have x's dtype. If the result has x's shape, out may be x itself. Otherwise, the
smaller of x and out may be this rank's part of the larger one, as with NCCL: in all_gather, x may be this rank's rows
of out; in reduce_scatter, out may be this rank's rows of x. Any other overlap raises ValueError.

With `async_op=True`, a function returns a Work immediately, and Work.wait() returns the result. Until wait() has
returned or done() is True, do not change x, and neither read nor change out. The calls of a group run in the order in
which they were made.

If x is on this rank's device (see init), the accelerator runs the call. The function returns as soon as the call is
enqueued on `stream`, a stream handle of the vendor's library. The default is the current stream of the array's library.
Operations that are enqueued on that stream afterwards see the complete result in out. Either all ranks must pass x and
out on their devices, or all ranks must pass them on the CPU. scatter and the functions that end in _v, except
reduce_scatter_v, first exchange lengths or shapes on the CPU, so they may block until other ranks make the same call.
barrier always runs on the CPU.

All functions raise TypeError or ValueError for invalid arguments, before anything is sent. If a call fails, it raises
PeerLost, CollectiveTimeout, Mismatch or Aborted (see mscomm.errors). The group is then broken, and the contents of out
are undefined.
"""

from __future__ import annotations

import functools
import hashlib
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from mscomm import _core, arguments
from mscomm.arrays import memory_anywhere, new
from mscomm.arrays.device import OnDevice
from mscomm.arrays.numpy import checked_code, dtype_named
from mscomm.errors import Mismatch
from mscomm.group import Group
from mscomm.job import resolve, shared_empty
from mscomm.works import Timeout

Array = np.ndarray[Any, Any]
F = TypeVar("F", bound=Callable[..., Any])

FUNCTION = {name: number for number, name in enumerate(_core.functions)}

# all_reduce_many reduces each array of at least ALONE_BYTES in a separate call. Smaller arrays share buckets of
# BUCKET_BYTES.
ALONE_BYTES = 1 << 20
BUCKET_BYTES = 4 << 20
# The largest page size of any Linux kernel. If the filled part of a bucket is larger than a page, it is rounded up to
# whole pages, because other ranks may access only whole pages directly (see empty). The bytes that the rounding adds
# have no meaning.
PAGE_BYTES = 64 << 10


def _collective(function: F) -> F:
    """Replace a Python function with the core's function of the same name, signature and docstring.

    See src/functions.cc.
    """
    return _core.collective(FUNCTION[function.__name__], function, arguments.signature_text(function))


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
    """Reduce x elementwise over all ranks. Every rank gets the same bits.

    op: sum, prod, min, max, avg (not for integers), band, bor or bxor (these three only for integers and bool). float16
    and bfloat16 values are combined in float32, and the result is rounded once. Integers wrap around on overflow. min
    and max propagate NaN as np.minimum does. For bool, sum is a logical or, and prod is a logical and.

    Return out, or a new array like x. The shape and dtype of x must be the same on all ranks.

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
    """Run all_reduce in place: short for `all_reduce(x, op, out=x)`."""
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

    On n ranks, an x of shape (a, ...) gives a result of shape (n * a, ...). A scalar x, which has shape (), gives a
    result of shape (n,). The shape and dtype of x must be the same on all ranks. Return out, or a new array of x's
    type.

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
    """Reduce x elementwise over all ranks, and give each rank its part of the result along axis 0.

    On n ranks, an x of shape (n * a, ...) gives each rank a result of shape (a, ...): rank r gets rows r * a to r * a +
    a - 1 of the result of all_reduce, with the same bits. op: see all_reduce. Raise ValueError if the number of rows of
    x is not divisible by n. The shape and dtype of x must be the same on all ranks. Return out, or a new array of x's
    type.

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
    """Send the root's x to every rank.

    x must have the same shape and dtype on all ranks, but only the root's x is read. Return out, or a new array like x.
    On the root, this new array is a copy of x.

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
    """Run broadcast in place: short for `broadcast(x, root, out=x)`."""
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
    """Reduce x elementwise over all ranks, and give the result to the root.

    The root gets out, or a new array like x. The result has the same bits as with all_reduce. The other ranks get None,
    and their out is ignored.

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
    """Compute an inclusive prefix reduction: rank r gets the elementwise reduction of x over ranks 0 to r.

    op: sum, prod, min, max, band, bor or bxor, as in all_reduce. Elements are combined in rank order, so the bits are
    the same in every run and with every algorithm. float16 and bfloat16 values are combined in float32, and each rank's
    result is rounded once. If each host has one rank, or one host has all ranks, the result of the highest rank has
    the same bits as with all_reduce.

    Return out, or a new array like x. The shape and dtype of x must be the same on all ranks. Raise ValueError for avg,
    and TypeError for an array on a device, which must first be copied to the CPU. This function corresponds to
    MPI_Scan.

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
    """Compute an exclusive prefix reduction: rank r gets the elementwise reduction of x over ranks 0 to r - 1.

    Rank 0 gets the identity of the operation: 0 for sum, bor and bxor, 1 for prod, and all bits set for band. For min,
    the identity is the largest value of the dtype (infinity, if the dtype has it); for max, it is the smallest. For
    bool, the identity is False for sum, max, bor and bxor, and True for prod, min and band. (MPI_Exscan leaves rank 0's
    result undefined, and mpi4py's `exscan` returns None.) In all other respects, exscan is like scan.

    >>> rows = np.array([len(mine)])
    >>> begin = mscomm.exscan(rows)                                        # the number of rows on all lower ranks
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
    """Concatenate every rank's x along axis 0, in rank order, and give the result to the root.

    The root gets the result of all_gather, in out or in a new array of x's type. The other ranks get None, and their
    out is ignored. The shape and dtype of x must be the same on all ranks.

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
    """Divide the root's x along axis 0, and send each rank its part.

    On n ranks, an x of shape (n * a, ...) at the root gives each rank a result of shape (a, ...): rank r gets rows r *
    a to r * a + a - 1. Only the root's x is read. A rank that is not the root may pass None: it learns the shape and
    dtype from the root. If it passes an array, the array must have the shape and dtype of the root's x. Return out, or
    a new array of x's type (a NumPy array if x is None). Raise ValueError if the number of rows of x is not divisible
    by n. If any rank's x or out does not match the root's x, all ranks raise Mismatch.

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

    x is divided along axis 0 into n equal parts, one for each rank. The result has x's shape. Raise ValueError if the
    number of rows of x is not divisible by n. The shape and dtype of x must be the same on all ranks. Return out, or a
    new array of x's type.

    >>> mscomm.all_to_all(np.array([0, 1]) + 10 * mscomm.get_rank())       # on 2 ranks: rank 0, rank 1
    array([ 0, 10])
    array([ 1, 11])
    """


@_collective
def barrier(*, group: Group | str | None = None, timeout: Timeout = None, async_op: bool = False) -> Any:
    """Wait until every rank of the group has called barrier. With async_op=True, return a Work instead of waiting."""


# -- uneven calls: the ranks' parts may differ in length


def all_gather_v(
    x: Any,
    *,
    out: Any = None,
    group: Group | str | None = None,
    timeout: Timeout = None,
    async_op: bool = False,
    stream: int | None = None,
) -> Any:
    """Run all_gather on arrays that may differ in the length of axis 0. Return (rows, counts).

    x has shape (a, ...), where a may differ between ranks and may be 0. The rest of the shape and the dtype must be the
    same on all ranks. `rows` is out, or a new array of x's type. Its shape is (sum of all a, ...), and it holds the
    rows of all ranks in rank order. `counts` is the list of all ranks' a. If any rank's out has the wrong shape,
    all ranks raise Mismatch.

    >>> mscomm.all_gather_v(np.full(mscomm.get_rank() + 1, mscomm.get_rank()))   # on 2 ranks
    (array([0, 1, 1]), [1, 2])
    """
    return _gather_rows("all_gather_v", x, None, out, resolve(group), timeout, async_op, stream)


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
    """Run all_gather_v, but only the root gets the result (rows, counts). The other ranks get None."""
    group = resolve(group)
    root = arguments.checked_rank("gather_v", "root", root, group)
    return _gather_rows("gather_v", x, root, out, group, timeout, async_op, stream)


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
    """Run scatter with parts of different lengths: rank r gets counts[r] rows of the root's x.

    counts: a list with the number of rows for each rank. It must be the same on all ranks, and at the root it must add
    up to x.shape[0]. In all other respects, scatter_v is like scatter.

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
    """Run reduce_scatter with parts of different lengths: rank r gets counts[r] rows.

    counts: a list with the number of rows for each rank. It must be the same on all ranks, and must add up to
    x.shape[0]. The shape and dtype of x must be the same on all ranks. Return out, or a new array of shape
    (counts[rank], ...).

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
        digest=digest_of(rows),
    )
    seconds = group.seconds(timeout, "reduce_scatter_v")
    if async_op:
        return group.start(call, seconds)
    group.run(call, seconds)
    return call.result()


def all_to_all_v(
    x: Any,
    send_counts: Sequence[int],
    *,
    recv_counts: Sequence[int] | None = None,
    out: Any = None,
    group: Group | str | None = None,
    timeout: Timeout = None,
    async_op: bool = False,
    stream: int | None = None,
) -> Any:
    """Exchange parts of different lengths. Return (rows, recv_counts).

    The first send_counts[0] rows of x go to rank 0, the next send_counts[1] rows go to rank 1, and so on. send_counts
    must add up to x.shape[0]. `rows` is out, or a new array of x's type. It holds the received rows in rank order:
    recv_counts[s] rows from rank s. x.shape[1:] and the dtype must be the same on all ranks.

    If each rank knows how many rows it will receive from every rank, pass recv_counts. The call then exchanges no
    counts before the data, so it takes less time. Either all ranks must pass recv_counts, or none. If a rank expects
    more or fewer rows than another rank sends to it, both ranks raise Mismatch, as the other ranks do in this call or
    in their next one. Without recv_counts, all ranks raise Mismatch if any rank's out has the wrong shape.

    >>> mscomm.all_to_all_v(np.arange(3), [1, 2])                          # on 2 ranks: rank 0, rank 1
    (array([0, 0]), [1, 1])
    (array([1, 2, 1, 2]), [2, 2])
    """
    group = resolve(group)
    function = FUNCTION["all_to_all_v"]
    given = group.core.array(function, x, stream=stream)
    sent = arguments.checked_counts("all_to_all_v", "send_counts", send_counts, group, given.shape)
    received = None
    if recv_counts is not None:
        received = arguments.checked_counts("all_to_all_v", "recv_counts", recv_counts, group, None)
        me = group.rank
        if sent[me] != received[me]:
            raise ValueError(
                f"all_to_all_v: send_counts[{me}] is {sent[me]} and recv_counts[{me}] is {received[me]} on rank {me} "
                "itself; both are the rows that the rank keeps"
            )
        if not given.on_device:
            call = group.core.prepare(function, given, out, what=FUNCTION["all_to_all"], rows=sent, recv_rows=received)
            seconds = group.seconds(timeout, "all_to_all_v")
            if async_op:
                fills = "all_to_all_v" if call.result_fills_out else ""
                work = group.start(call, seconds, part=True)
                return group.together([work], lambda: (call.result(), received), fills)
            group.run(call, seconds)
            return call.result(), received
    n = group.size
    table = np.empty((n, n), np.int64)  # table[s, d]: how many rows rank s sends to rank d
    head = group.core.prepare(
        function, np.array(sent, np.int64), table.reshape(-1), what=FUNCTION["all_gather"], head=True
    )

    def data() -> tuple[_core.Call, Callable[[], Any]]:
        coming = table[:, group.rank].tolist()
        if received is not None and received != coming:
            rank = group.ranks[group.rank]
            raise Mismatch(f"all_to_all_v: rank {rank} has recv_counts {received}, but the ranks send {coming}", [rank])
        call = _late(
            group,
            lambda: group.core.prepare(
                function, given, out, what=FUNCTION["all_to_all"], rows=table.reshape(-1).tolist()
            ),
        )
        return call, lambda: (call.result(), coming)

    return group.call_after(head, data, timeout, async_op, given.on_device)


def _gather_rows(
    function: str,
    x: Any,
    root: int | None,
    out: Any,
    group: Group,
    timeout: Timeout,
    async_op: bool,
    stream: int | None = None,
) -> Any:
    """Run all_gather_v, or gather_v if root is not None."""
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
    """Run scatter, or scatter_v if counts is not None. The root first broadcasts x's dtype and shape."""
    number, core = FUNCTION[function], group.core
    given = None if x is None else core.array(number, x, stream=stream)
    root = arguments.checked_rank(function, "root", root, group)
    at_root = group.rank == root
    rows = None
    if counts is not None:
        rows = arguments.checked_counts(function, "counts", counts, group, None if given is None else given.shape)
    if at_root and given is None:
        raise TypeError(f"{function}: x is None at the root, whose array is divided; other ranks may pass None")
    digest = 0 if rows is None else digest_of(rows)

    def parts(x: _core.Array | None, told: tuple[tuple[int, ...], int] | None = None) -> _core.Call:
        return core.prepare(
            number, x, out, what=FUNCTION["scatter"], root=root, rows=rows, digest=digest, told=told, stream=stream
        )

    # If this rank is the root and the user passed `out` but no stream, prepare the call now, so that an invalid `out`
    # raises an error before anything is sent. Otherwise, prepare the call after the head, which broadcasts x's dtype
    # and shape. The other ranks are then already waiting for this rank, so an error must fail the call on all ranks
    # (see _late).
    mine = parts(given) if at_root and out is not None and stream is None else None
    if given is not None and rows is None:
        core.part(number, given.shape)
    if given is None:
        on_device = out is not None and isinstance(memory_anywhere(out, "out", function), OnDevice)
    else:
        on_device = given.on_device
    # describes the root's x: whether it is on a device, its dtype, its number of dimensions, and its shape
    told = np.zeros(3 + _core.max_dims, np.int64)
    if given is not None and at_root:
        told[: 3 + len(given.shape)] = (given.on_device, given.dtype, len(given.shape), *given.shape)
    head = core.prepare(number, told, told, what=FUNCTION["broadcast"], root=root, digest=digest, head=True)

    def data() -> tuple[_core.Call, Callable[[], Any]]:
        at_the_device, dtype, dims, *extents = told.tolist()
        shape = tuple(extents[:dims])
        rank = group.ranks[group.rank]
        if bool(at_the_device) != on_device:
            here = "x or out is on a device" if on_device else "x or out is on the CPU"
            if x is None and out is None:
                here = "no array was given"
            root_has = (
                "on its device; pass x or out on the device"
                if at_the_device
                else "on the CPU; pass None, or arrays on the CPU"
            )
            raise Mismatch(f"{function}: {here} on rank {rank}, and at the root x is {root_has}", [rank])
        if given is not None and (given.dtype, given.shape) != (dtype, shape):
            here, there = (f"{_core.dtypes()[d]}{list(s)}" for d, s in ((given.dtype, given.shape), (dtype, shape)))
            raise Mismatch(f"{function}: x is {here} on rank {rank}, and {there} at the root")
        call = mine or _late(group, lambda: parts(given, (shape, dtype)))
        return call, call.result

    return group.call_after(head, data, timeout, async_op, on_device)


def _late(group: Group, prepare: Callable[[], _core.Call]) -> _core.Call:
    """Prepare the call that follows a head.

    The other ranks are already in the call. Therefore, if `out` does not fit, raise Mismatch, which fails the call on
    all ranks.
    """
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
    """Run all_reduce on a list of arrays. Small arrays of one dtype are fused: one call reduces them together.

    Return the list `[all_reduce(x, op) for x in arrays]`, with the same bits. out: a list of arrays, which may be
    `arrays` itself. The number of arrays, their shapes and their dtypes must be the same on all ranks.

    >>> mscomm.all_reduce_many([np.ones(2), np.ones(1, np.int32)])         # on 2 ranks
    [array([2., 2.]), array([2], dtype=int32)]
    """
    group = resolve(group)
    core, number = group.core, FUNCTION["all_reduce_many"]
    core.op(number, op)
    arrays = list(arrays)  # it may be a generator
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
    seconds = group.seconds(timeout, "all_reduce_many")

    def result() -> list[Any]:
        for one in fused:
            one.spread(group)
        return [one.result() for one in alone]

    if not given:  # an empty list also needs a call, because the call detects whether another rank's list is not empty
        nothing = np.empty(0, np.uint8)
        empty = core.prepare(number, nothing, nothing, what=FUNCTION["all_reduce"], op="sum", digest=digest)
        fused = [_FusedCall([empty])]
    if async_op:
        with group.committed("all_reduce_many"):
            fills = any(
                out[i] is not None and (len(part) > 1 or alone[i].result_fills_out) for part in parts for i in part
            )
            works = [group.start(one.filled(group, prepared), seconds, part=True) for one in fused]
            return group.together(works, result, "all_reduce_many" if fills else "")
    with group.core.reserve(len(fused)) as numbers, group.committed("all_reduce_many"):
        for one in fused:
            group.run(one.filled(group, prepared), seconds, numbers)
            one.spread(group)
    return result()


class _FusedCall:
    """The arrays that one call reduces: one array, or several that are copied into a bucket in shared memory."""

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
        count = sum(source.size for source in sources)
        np.concatenate([source.reshape(-1) for source in sources], out=bucket[:count])
        self._bucket = room, bucket
        return prepared(bucket, bucket)

    def spread(self, group: Group) -> None:
        """Copy the results to their arrays, and return the bucket to the group. A second call does nothing."""
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
    """A _FusedCall for arrays on a device. The bucket is an array of the same library."""

    def __init__(self, alone: list[_core.Call], model: _core.Array) -> None:
        super().__init__(alone)
        self._made: Any = None
        if len(alone) > 1:
            # Create the bucket in the constructor, not in filled(), because an error in the constructor does not use up
            # a call number. The bucket lives as long as this object.
            size = sum(math.prod(one.source.shape) for one in alone)
            self._made, self._owner = new("all_reduce_many", model.given, (size,))

    def filled(self, group: Group, prepared: Callable[[Any, Any], _core.Call]) -> _core.Call:
        if self._made is None:
            return self._alone[0]
        group.core.pack(self._made, [one.source for one in self._alone], self._made.stream)
        return prepared(self._made, self._made)

    def spread(self, group: Group) -> None:
        """Do the same as _FusedCall.spread. The copies are enqueued on the array library's current stream."""
        if self._made is not None:
            bucket, self._made = self._made, None
            group.core.unpack(bucket, [one.target for one in self._alone], bucket.current())


@functools.lru_cache(64)
def _fused(kinds: tuple[tuple[int, tuple[int, ...], bool], ...]) -> tuple[int, list[list[int]]]:
    """Divide a list of arrays into calls. Return a digest of the list, and for each call the indices of its arrays.

    kinds: the dtype and shape of each array, and whether it is on the device. The digest is part of each call's
    signature, so ranks with different lists raise Mismatch even if their buckets have the same size.
    """
    parts: list[list[int]] = []
    # for each (dtype, on_device): the bucket that is being filled (a list of array indices), and its size in bytes
    filling: dict[tuple[int, bool], tuple[list[int], int]] = {}
    for i, (code, shape, on_device) in enumerate(kinds):
        size = math.prod(shape) * _core.itemsize(code)
        if size >= ALONE_BYTES:
            parts.append([i])
            continue
        bucket, filled = filling.get((code, on_device), ([], 0))
        if not bucket or filled + size > BUCKET_BYTES:
            bucket, filled = [], 0
            parts.append(bucket)
        bucket.append(i)
        filling[code, on_device] = bucket, filled + size
    return digest_of(kinds), parts


# -- memory


def empty(shape: int | Sequence[int], dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    """Return a new, uninitialised array in memory that the ranks of this host share.

    If x and out are in such memory on every rank, a collective call on more than 16 KiB (4 KiB for all_reduce and
    reduce) accesses them directly, and does not copy them through internal buffers. This also applies to slices and
    views of such an array, and to tensors that torch.from_numpy creates from it, if their memory pages hold no other
    data. A slice must therefore begin at a page boundary, and end at a page boundary or at the end of the whole array.
    With other arrays, the call copies the data and gives the same result.

    The memory is freed when no array refers to it any more. Before init(), and if this rank is alone on its host, the
    memory is private. A forked child and its parent use the same shared memory, so each sees what the other writes.
    Raise MemoryError if the host does not have enough memory.
    """
    return _new("empty", shape, dtype)


def zeros(shape: int | Sequence[int], dtype: Any = np.float32) -> Array:
    """Return the same kind of array as empty(), but filled with zeros."""
    array = _new("zeros", shape, dtype)
    array[...] = 0
    return array


def _new(function: str, shape: Any, dtype: Any) -> np.ndarray[Any, Any]:
    try:
        kind = dtype_named(dtype)
    except TypeError as error:
        raise TypeError(f"{function}: dtype {dtype!r}: {error}") from None
    checked_code(function, "the array", kind)
    extents = shape if isinstance(shape, Sequence) and not isinstance(shape, (str, bytes)) else (shape,)
    extents = tuple(arguments.checked_int(function, "shape", extent) for extent in extents)
    if any(extent < 0 for extent in extents):
        raise ValueError(f"{function}: negative dimensions in {extents}")
    if math.prod(extents) * kind.itemsize > sys.maxsize:
        raise MemoryError(f"{function}: an array of {kind} with shape {extents} is larger than any memory")
    return shared_empty(extents, kind)


# -- the digest of arguments


def digest_of(agreed: object) -> int:
    """Return a hash of the repr of arguments that must be equal on all ranks.

    The hash is never 0, because a digest of 0 means "no digest".
    """
    return int.from_bytes(hashlib.blake2b(repr(agreed).encode(), digest_size=8).digest(), "little") | 1
