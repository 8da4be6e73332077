"""A row for each collective function in mscomm: how to call it, and its expected result, computed with NumPy.

The rows are the functions of mscomm._core, except OTHERS; a test checks that none is missing. The expected result of a
reduction is a left-to-right fold of the ranks' arrays in the accumulator type (float32 for float16 and bfloat16),
rounded once. With several hosts, the arrays of each host are folded first, and then the results of the hosts in pairs
(csrc/algo/order.h describes the tree). A scan ignores the hosts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import mscomm
from mscomm import _core

Array = np.ndarray[Any, Any]

DTYPES = [np.dtype(getattr(ml_dtypes, name, name)) for name in _core.dtypes()]


SCANS = ("scan", "exscan")


def ops_of(dtype: np.dtype[Any], collective: str = "") -> list[str]:
    """Return the ops that the dtype supports, without "avg" if the collective is a scan."""
    found = [op for code, op in enumerate(_core.ops) if _core.supports(DTYPES.index(dtype), code)]
    return [op for op in found if op != "avg" or collective not in SCANS]


REDUCED = [dtype for dtype in DTYPES if ops_of(dtype)]  # all except float8, which is only moved


IDENTITY: dict[str, Callable[[np.dtype[Any]], Any]] = {
    "sum": lambda dtype: 0,
    "prod": lambda dtype: 1,
    "min": lambda dtype: True if dtype.kind == "b" else np.iinfo(dtype).max if dtype.kind in "iu" else np.inf,
    "max": lambda dtype: False if dtype.kind == "b" else np.iinfo(dtype).min if dtype.kind in "iu" else -np.inf,
    "band": lambda dtype: ~np.zeros((), dtype),
    "bor": lambda dtype: 0,
    "bxor": lambda dtype: 0,
}


def algorithms_of(collective: str) -> list[str]:
    return [name for what, name, *_ in _core.algorithms() if what == collective]


# --- reductions -----------------------------------------------------------------------------------------------------


def real(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of the real part if the given dtype is complex, otherwise the given dtype."""
    return np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype


def times(a: Array, b: Array) -> Array:
    if a.dtype.kind != "c":
        return np.multiply(a, b)
    product = np.empty_like(a)  # not np.multiply, which may round differently: it may use fused multiply-adds
    product.real = a.real * b.real - a.imag * b.imag
    product.imag = a.real * b.imag + a.imag * b.real
    return product


FOLD: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "avg": np.add,
    "prod": times,
    "min": lambda a, b: np.where((a < b) | (a != a), a, b),
    "max": lambda a, b: np.where((a > b) | (a != a), a, b),
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def folded(op: str, inputs: list[Array], hosts: list[int] | None = None) -> Array:
    """Fold the ranks' arrays as described at the top of this file. Rank r is on hosts[r], by default on one host."""
    hosts = hosts or [0] * len(inputs)
    dtype = inputs[0].dtype
    accumulator = np.dtype(np.float32) if dtype.itemsize == 2 and dtype.kind not in "iu" else dtype
    with np.errstate(all="ignore"):
        wide = [x.astype(accumulator) for x in inputs]
        by_host = [[x for x, host in zip(wide, hosts, strict=True) if host == h] for h in sorted(set(hosts))]
        leaves = [functools.reduce(FOLD[op], host) for host in by_host]
        pairs = len(leaves) - (1 << len(leaves).bit_length() - 1)
        leaves[: 2 * pairs] = [FOLD[op](*leaves[2 * i : 2 * i + 2]) for i in range(pairs)]
        while len(leaves) > 1:
            leaves = [FOLD[op](*leaves[i : i + 2]) for i in range(0, len(leaves), 2)]
        (total,) = leaves
        if op == "avg":
            parts = np.ascontiguousarray(total).view(real(accumulator))
            total = (parts / real(accumulator).type(len(inputs))).view(accumulator).reshape(total.shape)
        return np.asarray(total).astype(dtype)


def bits(x: Array) -> Array:
    """Return the bits of x as integers; a complex number becomes two integers, one for each part."""
    return np.ascontiguousarray(x).reshape(-1).view(f"u{real(x.dtype).itemsize}")


# --- functions ------------------------------------------------------------------------------------------------------


class How(NamedTuple):
    """The arguments of a call besides x.

    rows[sender][receiver] is the number of rows that the sender sends to the receiver. If all parts have the same size,
    that size is rows[0][0].
    """

    op: str
    root: int
    rows: list[list[int]]


class Function(NamedTuple):
    what: str  # the core's collective that moves the data
    has_op: bool
    has_root: bool
    # Returns the number of rows of this rank's x.
    given: Callable[[How, int], int]
    # Returns this rank's expected result, or None if this rank gets no result. The counts that some functions also
    # return are not included.
    model: Callable[[How, list[Array], int, list[int] | None], Array | None]
    # Calls the function with `x` (None if this rank may omit it), `how`, this rank, and options.
    call: Callable[..., Any]
    # In an in-place call, x is a part of out, or out is a part of x. Returns the row at which this part begins in the
    # larger array, or None if the call cannot work in place.
    place: Callable[[How, int], int | None] = lambda how, rank: 0
    # Returns the counts that the function returns along with the result.
    counts: Callable[[How, int], list[int]] | None = None
    sparing: bool = False  # whether only the root's x is read


def one_part(how: How, rank: int) -> int:
    return how.rows[0][0]


def all_parts(how: How, rank: int) -> int:
    return len(how.rows) * how.rows[0][0]


def part_of(how: How, rank: int) -> slice:
    return slice(rank * how.rows[0][0], (rank + 1) * how.rows[0][0])


def uneven_part(how: How, rank: int) -> slice:
    begin = sum(how.rows[0][:rank])
    return slice(begin, begin + how.rows[0][rank])


def received(how: How, rank: int) -> list[int]:
    return [row[rank] for row in how.rows]


def exchange(x: Any, how: How, rank: int, **options: Any) -> Any:
    """Make an all_to_all_v. In about half of all cases, the ranks say how many rows they expect."""
    known = received(how, rank) if sum(map(sum, how.rows)) % 2 else None
    return mscomm.all_to_all_v(x, how.rows[rank], recv_counts=known, **options)


def exchanged(how: How, inputs: list[Array], rank: int) -> Array:
    parts = []
    for x, row in zip(inputs, how.rows, strict=True):
        begin = sum(row[:rank])
        parts.append(x[begin : begin + row[rank]])
    return np.concatenate(parts)


def alike(how: How) -> How:
    n = len(how.rows)
    return how._replace(rows=[[how.rows[0][0]] * n] * n)


def at_root(how: How, rank: int, result: Callable[[], Array]) -> Array | None:
    return result() if rank == how.root else None


def gathered(inputs: list[Array]) -> Array:
    return np.concatenate([np.atleast_1d(x) for x in inputs])


def exscanned(how: How, inputs: list[Array], rank: int) -> Array:
    return folded(how.op, inputs[:rank]) if rank else np.full_like(inputs[0], IDENTITY[how.op](inputs[0].dtype))


FUNCTIONS: dict[str, Function] = {
    "scan": Function(
        "scan",
        True,
        False,
        one_part,
        lambda how, inputs, rank, hosts: folded(how.op, inputs[: rank + 1]),
        lambda x, how, rank, **options: mscomm.scan(x, how.op, **options),
    ),
    "exscan": Function(
        "exscan",
        True,
        False,
        one_part,
        lambda how, inputs, rank, hosts: exscanned(how, inputs, rank),
        lambda x, how, rank, **options: mscomm.exscan(x, how.op, **options),
    ),
    "all_reduce": Function(
        "all_reduce",
        True,
        False,
        one_part,
        lambda how, inputs, rank, hosts: folded(how.op, inputs, hosts),
        lambda x, how, rank, **options: mscomm.all_reduce(x, how.op, **options),
    ),
    "reduce": Function(
        "reduce",
        True,
        True,
        one_part,
        lambda how, inputs, rank, hosts: at_root(how, rank, lambda: folded(how.op, inputs, hosts)),
        lambda x, how, rank, **options: mscomm.reduce(x, how.root, how.op, **options),
    ),
    "reduce_scatter": Function(
        "reduce_scatter",
        True,
        False,
        all_parts,
        lambda how, inputs, rank, hosts: folded(how.op, [x[part_of(how, rank)] for x in inputs], hosts),
        lambda x, how, rank, **options: mscomm.reduce_scatter(x, how.op, **options),
        lambda how, rank: part_of(how, rank).start,
    ),
    "reduce_scatter_v": Function(
        "reduce_scatter",
        True,
        False,
        lambda how, rank: sum(how.rows[0]),
        lambda how, inputs, rank, hosts: folded(how.op, [x[uneven_part(how, rank)] for x in inputs], hosts),
        lambda x, how, rank, **options: mscomm.reduce_scatter_v(x, how.rows[0], how.op, **options),
        lambda how, rank: uneven_part(how, rank).start,
    ),
    "broadcast": Function(
        "broadcast",
        False,
        True,
        one_part,
        lambda how, inputs, rank, hosts: inputs[how.root],
        lambda x, how, rank, **options: mscomm.broadcast(x, how.root, **options),
    ),
    "all_gather": Function(
        "all_gather",
        False,
        False,
        one_part,
        lambda how, inputs, rank, hosts: gathered(inputs),
        lambda x, how, rank, **options: mscomm.all_gather(x, **options),
        lambda how, rank: part_of(how, rank).start,
    ),
    "all_gather_v": Function(
        "all_gather",
        False,
        False,
        lambda how, rank: how.rows[0][rank],
        lambda how, inputs, rank, hosts: gathered(inputs),
        lambda x, how, rank, **options: mscomm.all_gather_v(x, **options),
        lambda how, rank: uneven_part(how, rank).start,
        counts=lambda how, rank: how.rows[0],
    ),
    "gather": Function(
        "gather",
        False,
        True,
        one_part,
        lambda how, inputs, rank, hosts: at_root(how, rank, lambda: gathered(inputs)),
        lambda x, how, rank, **options: mscomm.gather(x, how.root, **options),
        lambda how, rank: part_of(how, rank).start,
    ),
    "gather_v": Function(
        "gather",
        False,
        True,
        lambda how, rank: how.rows[0][rank],
        lambda how, inputs, rank, hosts: at_root(how, rank, lambda: gathered(inputs)),
        lambda x, how, rank, **options: mscomm.gather_v(x, how.root, **options),
        lambda how, rank: uneven_part(how, rank).start,
        counts=lambda how, rank: how.rows[0],
    ),
    "scatter": Function(
        "scatter",
        False,
        True,
        all_parts,
        lambda how, inputs, rank, hosts: inputs[how.root][part_of(how, rank)],
        lambda x, how, rank, **options: mscomm.scatter(x, how.root, **options),
        lambda how, rank: part_of(how, rank).start if rank == how.root else None,
        sparing=True,
    ),
    "scatter_v": Function(
        "scatter",
        False,
        True,
        lambda how, rank: sum(how.rows[0]),
        lambda how, inputs, rank, hosts: inputs[how.root][uneven_part(how, rank)],
        lambda x, how, rank, **options: mscomm.scatter_v(x, how.rows[0], how.root, **options),
        lambda how, rank: uneven_part(how, rank).start if rank == how.root else None,
        sparing=True,
    ),
    "all_to_all": Function(
        "all_to_all",
        False,
        False,
        all_parts,
        lambda how, inputs, rank, hosts: exchanged(alike(how), inputs, rank),
        lambda x, how, rank, **options: mscomm.all_to_all(x, **options),
    ),
    "all_to_all_v": Function(
        "all_to_all",
        False,
        False,
        lambda how, rank: sum(how.rows[rank]),
        lambda how, inputs, rank, hosts: exchanged(how, inputs, rank),
        exchange,
        lambda how, rank: 0 if sum(how.rows[rank]) == sum(received(how, rank)) else None,
        counts=received,
    ),
}
# The core's functions that have tests of their own, because they take no array, several arrays, or objects.
OTHERS = {"barrier", "all_reduce_many", "all_gather_object", "broadcast_object", "gather_object", "scatter_object"}
