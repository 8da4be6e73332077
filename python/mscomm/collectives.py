"""The collective operations: every rank of the group calls the same one, in the same order.

`root` is a rank in the group (torch.distributed counts it in the world). `group` is None for all ranks, or a Group.
`timeout` is in seconds or a timedelta; None takes init's. `out` receives the result; `out=x` works in place. Strided
input is read in C order.

All raise TypeError or ValueError for wrong arguments, before anything is sent, and PeerLost, CollectiveTimeout,
Mismatch or Aborted (see mscomm.errors) if the call fails; then the group is broken and the contents of out are
undefined.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from mscomm import _core
from mscomm.arrays import library
from mscomm.arrays.numpy import dtype_code
from mscomm.groups import Group, resolve, shared_empty

Timeout = float | timedelta | None

OPS = {name: code for code, name in enumerate(_core.ops)}
_ALL_REDUCE, _ALL_GATHER, _BROADCAST, _BARRIER = (
    _core.collectives.index(name) for name in ("all_reduce", "all_gather", "broadcast", "barrier")
)
_ALL_REDUCE_MANY = _core.functions.index("all_reduce_many")


def all_reduce(
    x: Any, op: str = "sum", *, out: Any = None, group: Group | str | None = None, timeout: Timeout = None
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
    arrays = library(x, "x", "all_reduce")
    source = arrays.view(x)
    code, op_code = dtype_code(source.dtype), _op_code("all_reduce", op, source.dtype)
    out = arrays.like(x, x.shape) if out is None else _checked_out("all_reduce", x, out, x.shape, in_place=True)
    target, finish = arrays.into(out)
    group.run(_ALL_REDUCE, _ALL_REDUCE, code, op_code, -1, source, target, timeout)
    if finish:
        finish()
    return out


def all_reduce_(x: Any, op: str = "sum", *, group: Group | str | None = None, timeout: Timeout = None) -> Any:
    """all_reduce in place: short for `all_reduce(x, op, out=x)`."""
    return all_reduce(x, op, out=x, group=group, timeout=timeout)


def all_gather(x: Any, *, out: Any = None, group: Group | str | None = None, timeout: Timeout = None) -> Any:
    """Concatenate every rank's x along axis 0, in rank order.

    x of shape (a, ...) gives (n * a, ...) on n ranks; a scalar (shape ()) gives (n,). Shape and dtype must be the
    same on all ranks. Returns out, or a new array of x's type.

    >>> mscomm.all_gather(np.array([[mscomm.get_rank()]], np.float32))     # on 2 ranks
    array([[0.],
           [1.]], dtype=float32)
    """
    group = resolve(group)
    arrays = library(x, "x", "all_gather")
    source = arrays.view(x)
    code = dtype_code(source.dtype)
    shape = (x.shape[0] * group.size, *x.shape[1:]) if x.shape else (group.size,)
    out = arrays.like(x, shape) if out is None else _checked_out("all_gather", x, out, shape, in_place=group.size == 1)
    target, finish = arrays.into(out)
    group.run(_ALL_GATHER, _ALL_GATHER, code, 0, -1, source, target, timeout)
    if finish:
        finish()
    return out


def broadcast(
    x: Any, root: int = 0, *, out: Any = None, group: Group | str | None = None, timeout: Timeout = None
) -> Any:
    """Give every rank the root's x.

    Each rank's x says shape and dtype, which must be the same; its contents count at the root alone. Returns out, or
    a new array like x; on the root a copy of x.
    """
    group = resolve(group)
    arrays = library(x, "x", "broadcast")
    source = arrays.view(x)
    code, root = dtype_code(source.dtype), _checked_root("broadcast", root, group)
    out = arrays.like(x, x.shape) if out is None else _checked_out("broadcast", x, out, x.shape, in_place=True)
    target, finish = arrays.into(out)
    group.run(_BROADCAST, _BROADCAST, code, 0, root, source, target, timeout)
    if finish:
        finish()
    return out


def broadcast_(x: Any, root: int = 0, *, group: Group | str | None = None, timeout: Timeout = None) -> Any:
    """broadcast in place: short for `broadcast(x, root, out=x)`."""
    return broadcast(x, root, out=x, group=group, timeout=timeout)


def barrier(*, group: Group | str | None = None, timeout: Timeout = None) -> None:
    """Return when every rank of the group has called it."""
    resolve(group).run(_BARRIER, _BARRIER, 0, 0, -1, None, None, timeout)


def all_reduce_many(
    arrays: Sequence[Any],
    op: str = "sum",
    *,
    out: Sequence[Any] | None = None,
    group: Group | str | None = None,
    timeout: Timeout = None,
) -> list[Any]:
    """all_reduce of a list of arrays, fused: one exchange for each dtype in the list instead of one for each array.

    The result is that of `[all_reduce(x, op) for x in arrays]`, to the bit. out: a list of arrays; it may be
    `arrays` itself. The list must have the same length, shapes and dtypes on all ranks.
    """
    group = resolve(group)
    _known_op("all_reduce_many", op)
    libraries = [library(x, f"arrays[{i}]", "all_reduce_many") for i, x in enumerate(arrays)]
    sources = [lib.view(x) for lib, x in zip(libraries, arrays, strict=True)]
    op_codes = [_op_code("all_reduce_many", op, source.dtype) for source in sources]
    if out is None:
        out = [lib.like(x, x.shape) for lib, x in zip(libraries, arrays, strict=True)]
    elif len(out) != len(arrays):
        raise ValueError(f"all_reduce_many: out has {len(out)} arrays, arrays has {len(arrays)}")
    else:
        for x, y in zip(arrays, out, strict=True):
            _checked_out("all_reduce_many", x, y, x.shape, in_place=True)
    targets = [lib.into(y) for lib, y in zip(libraries, out, strict=True)]

    # Lists that differ may still fill buckets of one size: the digest is compared with the rest of the call.
    kinds = repr([(source.shape, source.dtype.name) for source in sources]).encode()
    fused = int.from_bytes(hashlib.blake2b(kinds, digest_size=8).digest(), "little") | 1
    by_code: dict[int, list[int]] = {}
    for i, source in enumerate(sources):
        by_code.setdefault(dtype_code(source.dtype), []).append(i)
    for code, members in by_code.items():
        sizes = [sources[i].size for i in members]
        bucket = shared_empty((sum(sizes),), sources[members[0]].dtype)
        ends = np.cumsum(sizes)
        for i, size, end in zip(members, sizes, ends, strict=True):
            bucket[end - size : end] = sources[i].reshape(-1)
        group.run(
            _ALL_REDUCE, _ALL_REDUCE_MANY, code, op_codes[members[0]], -1, bucket, bucket, timeout, digest=fused
        )
        for i, size, end in zip(members, sizes, ends, strict=True):
            target, finish = targets[i]
            target.reshape(-1)[...] = bucket[end - size : end]
            if finish:
                finish()
    return list(out)


def empty(shape: int | Sequence[int], dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    """A new, uninitialised array in memory that the ranks of this host share.

    Where every rank's x and out lie in such memory, a collective of more than 16 KiB works on them in place and copies
    nothing through buffers of its own.
    Any array whose memory lies in it counts (slices, views, torch.from_numpy); the memory lives as long as an array
    refers to it. Before init(), in a job of one, or when ranks do not share a host, it is private memory. In a
    forked child it stays shared with the parent. MemoryError if the host has not that much memory.
    """
    kind = np.dtype(dtype)
    dtype_code(kind)
    shape = (operator.index(shape),) if not isinstance(shape, Sequence) else tuple(map(operator.index, shape))
    if any(extent < 0 for extent in shape):
        raise ValueError(f"empty: negative dimensions in {shape}")
    return shared_empty(shape, kind)


def zeros(shape: int | Sequence[int], dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    """As empty, filled with zeros."""
    array = empty(shape, dtype)
    array[...] = 0
    return array


def _op_code(function: str, op: str, dtype: np.dtype[Any]) -> int:
    code = _known_op(function, op)
    if not _core.supports(dtype_code(dtype), code):
        raise TypeError(f"{function}: {op} is not defined on {dtype} arrays")
    return code


def _known_op(function: str, op: str) -> int:
    code = OPS.get(op) if isinstance(op, str) else None
    if code is None:
        raise ValueError(f"{function}: op {op!r} is none of {', '.join(OPS)}")
    return code


def _checked_root(function: str, root: int, group: Group) -> int:
    try:
        root = operator.index(root)
    except TypeError:
        raise TypeError(f"{function}: root {root!r} is not an integer") from None
    if not 0 <= root < group.size:
        raise ValueError(
            f"{function}: root {root} is no rank of group {group.name}, which has the ranks 0 to {group.size - 1}"
        )
    return root


def _checked_out(function: str, x: Any, out: Any, shape: tuple[int, ...], *, in_place: bool) -> Any:
    """out, if the result can be written there."""
    library(out, "out", function)
    if tuple(out.shape) != tuple(shape):
        raise ValueError(f"{function}: out has shape {tuple(out.shape)}, the result has {tuple(shape)}")
    if out.dtype != x.dtype:
        raise TypeError(f"{function}: out has dtype {out.dtype}, x has {x.dtype}")
    if not out.flags.writeable:
        raise TypeError(f"{function}: out is read-only")
    if out is x and in_place:
        return out
    if np.may_share_memory(x, out) and np.shares_memory(x, out):
        same = (
            in_place
            and out.__array_interface__["data"][0] == x.__array_interface__["data"][0]
            and out.strides == x.strides
        )
        if not same:
            raise ValueError(f"{function}: x and out overlap in part; give out memory of its own, or out=x")
    return out
