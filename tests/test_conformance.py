"""Every algorithm of the registry gives the right bits: a job for each collective, algorithm and number of ranks, and
in it every dtype x op x size, with all kinds of memory.

What exists is asked of mscomm._core. The expected value of a reduction is a left-to-right fold of the ranks' arrays
with NumPy in the accumulator type (float32 for float16 and bfloat16), rounded once; over more than one host, of each
host's ranks first and then of the hosts. The `ring` all_reduce alone may take another order: see check_in_any_order.
"""

from __future__ import annotations

import functools
import itertools
import os
import select
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from ranks import ranks

import mscomm
from mscomm import _core

Array = np.ndarray[Any, Any]

RANKS = (1, 2, 3, 4, 5, 8)
LARGE_BYTES = (1 << 20) + 4
DTYPES = [np.dtype(getattr(ml_dtypes, name, name)) for name in _core.dtypes()]
OWN_ORDER = {"ring"}  # the all_reduce whose order depends on the position in the message: section 4 of the design


def ops_of(dtype: np.dtype[Any]) -> list[str]:
    return [op for code, op in enumerate(_core.ops) if _core.supports(DTYPES.index(dtype), code)]


def algorithms_of(collective: str) -> list[str]:
    return [name for what, name, _ in _core.algorithms() if what == collective]


def sizes(dtype: np.dtype[Any], n: int) -> list[int]:
    """Elements: none, one, a few, a number that no part of the message divides evenly, and a little more than 1 MiB."""
    return [0, 1, 7, 257 * n + 1, -(-LARGE_BYTES // dtype.itemsize)]


def each_algorithm(collective: str) -> Any:
    """Parameters: every number of ranks with every algorithm of the collective, forced."""
    return pytest.mark.parametrize(("n", "algorithm"), [(n, name) for name in algorithms_of(collective) for n in RANKS])


# --- data -----------------------------------------------------------------------------------------------------------

STRIDE = 61  # between the values of two ranks in a pool


@functools.cache
def pool(make: Callable[[np.dtype[Any], int], Array], dtype: np.dtype[Any], n: int) -> Array:
    values = make(dtype, max(sizes(dtype, n)) + STRIDE * n)
    values.flags.writeable = False
    return values


def inputs_of(make: Callable[[np.dtype[Any], int], Array], case: Case, n: int) -> list[Array]:
    """Each rank's values for a case, the same wherever they are asked for."""
    values = pool(make, case.dtype, n)
    return [values[rank * STRIDE : rank * STRIDE + case.size] for rank in range(n)]


def raw_bits(dtype: np.dtype[Any], count: int) -> Array:
    """Any bits at all, NaNs of every payload included: for what moves elements and does not look at them."""
    bits = np.random.default_rng(1).integers(0, 256, count * dtype.itemsize, np.uint8)
    return bits % 2 == 1 if dtype.kind == "b" else bits.view(dtype)


def wild(dtype: np.dtype[Any], count: int) -> Array:
    """Any integers; floats of exponents from 2^-20 to 2^20, with subnormals, both zeros, infinities and NaN."""
    if dtype.kind in "biu":
        return raw_bits(dtype, count)
    if dtype.kind == "c":
        return wild(real(dtype), 2 * count).view(dtype)
    rng = np.random.default_rng(2)
    info = ml_dtypes.finfo(dtype)
    values = np.ldexp(rng.uniform(-1, 1, count), rng.integers(-20, min(20, info.maxexp - 1), count)).astype(dtype)
    tiny = float(info.smallest_subnormal)
    for special in (0.0, -0.0, np.inf, -np.inf, np.nan, tiny, -3 * tiny, float(info.smallest_normal) - tiny):
        values[rng.integers(0, count, max(count // 200, 1))] = special
    return values


def whole(dtype: np.dtype[Any], count: int) -> Array:
    """1 and 2: sums and products of eight are exact in every type."""
    values = np.random.default_rng(3).integers(1, 3, count)
    return values % 2 == 1 if dtype.kind == "b" else values.astype(dtype)


def tame(dtype: np.dtype[Any], count: int) -> Array:
    """As wild, but eight of them neither overflow nor vanish in a product."""
    if dtype.kind in "biu":
        return raw_bits(dtype, count)
    if dtype.kind == "c":
        return tame(real(dtype), 2 * count).view(dtype)
    rng = np.random.default_rng(4)
    return (rng.uniform(0.5, 1, count) * rng.choice([-1, 1], count) * 2.0 ** rng.integers(-1, 1, count)).astype(dtype)


def real(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type of the real part."""
    return np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype


# --- expected values ------------------------------------------------------------------------------------------------


def times(a: Array, b: Array) -> Array:
    if a.dtype.kind != "c":
        return np.multiply(a, b)
    product = np.empty_like(a)  # NumPy's own may use fused multiply-adds
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


def folded(op: str, inputs: list[Array], hosts: list[int]) -> Array:
    """The canonical reduction of the ranks' arrays, where rank r lives on hosts[r]."""
    dtype = inputs[0].dtype
    accumulator = np.dtype(np.float32) if dtype.itemsize == 2 and dtype.kind not in "iu" else dtype
    with np.errstate(all="ignore"):
        wide = [x.astype(accumulator) for x in inputs]
        by_host = [[x for x, host in zip(wide, hosts, strict=True) if host == h] for h in sorted(set(hosts))]
        total = functools.reduce(FOLD[op], [functools.reduce(FOLD[op], host) for host in by_host])
        if op == "avg":
            parts = total.view(real(accumulator))
            total = (parts / real(accumulator).type(len(inputs))).view(accumulator)
        return total.astype(dtype)


def bits(x: Array) -> Array:
    """The bits of x, as integers; of a complex number, of its two parts."""
    return np.ascontiguousarray(x).reshape(-1).view(f"u{real(x.dtype).itemsize}")


def check_bits(op: str, got: Array, inputs: list[Array], hosts: list[int], case: object) -> None:
    """got is the fold, to the bit; where arithmetic made a NaN its payload does not count."""
    expected = folded(op, inputs, hosts)
    differ = bits(got) != bits(expected)
    if op in ("sum", "prod", "avg") and expected.dtype.kind not in "biu":
        differ &= ~((parts_of(got) != parts_of(got)) & (parts_of(expected) != parts_of(expected)))
    if differ.any():
        at = int(np.flatnonzero(differ)[0])
        raise AssertionError(
            f"{case}: {differ.sum()} of {differ.size} differ, the first at {at}: "
            f"{parts_of(got)[at]!r}, expected {parts_of(expected)[at]!r} of {[parts_of(x)[at] for x in inputs]}"
        )


def parts_of(x: Array) -> Array:
    return np.ascontiguousarray(x).reshape(-1).view(real(x.dtype))


def check_in_any_order(op: str, got: Array, inputs: list[Array], case: object) -> None:
    """got is the reduction in some order: to the bit where the order does not matter, else within a bound.

    n-1 roundings in the accumulator type, each of at most half an epsilon of the largest magnitude on the way, and one
    to the element type; twice that, because the expected value has them too.
    """
    dtype, n = got.dtype, len(inputs)
    expected = folded(op, inputs, [0] * n)
    if dtype.kind in "biu" or op in ("min", "max"):
        assert (bits(got) == bits(expected)).all(), f"{case}: differs"
        return
    element, accumulator = ml_dtypes.finfo(real(dtype)), ml_dtypes.finfo(np.result_type(real(dtype), np.float32))
    sizes_of = [np.abs(x.astype(np.result_type(x, np.float32))) for x in inputs]
    magnitude = functools.reduce(np.multiply if op == "prod" else np.add, sizes_of)
    if dtype.kind == "c":
        magnitude = np.repeat(2 * magnitude, 2)  # each part of a product has two terms
    roundings = n * float(accumulator.eps) + (float(element.eps) if element.bits < accumulator.bits else 0)
    bound = magnitude * roundings + float(element.smallest_subnormal)
    error = np.abs(parts_of(got).astype(np.float64) - parts_of(expected).astype(np.float64))
    assert (error <= bound).all(), f"{case}: off by up to {error.max()}, the bound there is {bound[error.argmax()]}"


# --- kinds of memory ------------------------------------------------------------------------------------------------


def shared(values: Array) -> Array:
    array = mscomm.empty(values.shape, values.dtype)
    array[...] = values
    return array


def read_only(values: Array) -> Array:
    array = values.copy()
    array.flags.writeable = False
    return array


def in_rows(values: Array) -> Array:
    if values.size == 0:
        return values.reshape(3, 0)
    return values.reshape(next(rows for rows in (7, 5, 3, 2, 1) if values.size % rows == 0), -1)


def with_gaps(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    return np.zeros((*shape, 2), dtype)[..., 1]


def strided(values: Array) -> Array:
    array = with_gaps(values.shape, values.dtype)
    array[...] = values
    return array


# How x lies in memory, and how out does. "mixed": not as on the next rank.
X: dict[str, Callable[[Array, int], Array]] = {
    "private": lambda values, rank: values.copy(),
    "shared": lambda values, rank: shared(values),
    "mixed": lambda values, rank: shared(values) if rank % 2 else values.copy(),
    "read-only": lambda values, rank: read_only(values),
    "2-d": lambda values, rank: in_rows(values).copy(),
    "Fortran": lambda values, rank: in_rows(values).copy(order="F"),
    "strided": lambda values, rank: strided(values),
    "backwards": lambda values, rank: values[::-1].copy()[::-1],
    "0-d or shared 2-d": lambda values, rank: (
        values.copy().reshape(()) if values.size == 1 else shared(in_rows(values))
    ),
}
OUT: dict[str, Callable[[tuple[int, ...], Array, int], Array | None]] = {
    "new": lambda shape, x, rank: None,
    "private": lambda shape, x, rank: np.zeros(shape, x.dtype),
    "shared": lambda shape, x, rank: mscomm.zeros(shape, x.dtype),
    "mixed": lambda shape, x, rank: (np if rank % 2 else mscomm).zeros(shape, x.dtype),
    "strided": lambda shape, x, rank: with_gaps(shape, x.dtype),
    "in place": lambda shape, x, rank: x,
}


class Kind(NamedTuple):
    x: str
    out: str


KINDS = [Kind(x, out) for x, out in itertools.product(X, OUT) if (x, out) != ("read-only", "in place")]
KINDS_NOT_IN_PLACE = [kind for kind in KINDS if kind.out != "in place"]


class Case(NamedTuple):
    """One call; its text names it in a failure."""

    dtype: np.dtype[Any]
    size: int
    kind: Kind
    what: Any  # op or root

    def __str__(self) -> str:
        return f"{self.what} of {self.size} x {self.dtype}, x {self.kind.x}, out {self.kind.out}"


def called(
    function: Callable[..., Array], case: Case, values: Array, shape: Callable[[Array], tuple[int, ...]]
) -> Array:
    """The result of function(x, out=...), in C order, with x and out as the kind says; nothing but out was written."""
    rank = mscomm.get_rank()
    x = X[case.kind.x](values, rank)
    out = OUT[case.kind.out](shape(x), x, rank)
    result = function(x, out=out)
    assert out is None or result is out, f"{case}: returns something else than out"
    assert result.shape == shape(x) and result.dtype == x.dtype, f"{case}: gives {result.dtype}{result.shape}"
    assert out is x or (bits(x) == bits(values)).all(), f"{case}: has changed x"
    if case.kind.out == "strided" and result.base is not None:
        assert not bits(result.base[..., 0]).any(), f"{case}: has written between the elements of out"
    return result.reshape(-1)


def same_shape(x: Array) -> tuple[int, ...]:
    return x.shape


def gathered_shape(x: Array) -> tuple[int, ...]:
    n = mscomm.get_group_size()
    return (n * x.shape[0], *x.shape[1:]) if x.shape else (n,)


class Ledger:
    """The checksums of this rank's results, to be compared with those of all ranks."""

    def __init__(self) -> None:
        self.cases: list[Case] = []
        self.sums: list[int] = []

    def add(self, case: Case, result: Array) -> None:
        self.cases.append(case)
        self.sums.append(zlib.crc32(bits(result).data))

    def close(self) -> None:
        everybody = mscomm.all_gather(np.array([self.sums], np.int64))
        for case, sums in zip(self.cases, everybody.T, strict=True):
            assert (sums == sums[0]).all(), f"{case}: the ranks' results differ: checksums {sums}"


def cases(n: int, kinds: list[Kind], whats: Callable[[np.dtype[Any]], list[Any]]) -> Iterator[Case]:
    """Every dtype x what x size, with the kinds of memory in turn.

    For three ranks also every kind of memory x size, with the dtypes in turn.
    """
    turn = itertools.cycle(kinds)
    for dtype in DTYPES:
        for what, size in itertools.product(whats(dtype), sizes(dtype, n)):
            yield Case(dtype, size, next(turn), what)
    if n == 3:
        for kind, dtype in zip(kinds, itertools.cycle(DTYPES), strict=False):
            for size in sizes(dtype, n):
                yield Case(dtype, size, kind, whats(dtype)[0])


# --- the matrix -----------------------------------------------------------------------------------------------------


@each_algorithm("all_reduce")
@ranks("n", env={"MSCOMM_ALGO": "all_reduce={algorithm}"}, timeout_s=120)
def test_all_reduce_is_the_fold_of_the_ranks_arrays(rank, group, n, algorithm):
    ledger = Ledger()
    for make in (whole, tame) if algorithm in OWN_ORDER else (wild,):
        for turn, case in enumerate(cases(n, KINDS, ops_of)):
            if make is tame and case.dtype.kind in "biu":
                continue  # was exact with whole
            inputs = inputs_of(make, case, n)
            result = called(functools.partial(mscomm.all_reduce, op=case.what), case, inputs[rank], same_shape)
            ledger.add(case, result)
            if turn % n != rank:
                continue  # one rank does the arithmetic; the others have the same bits, or the ledger tells
            if make is tame:
                check_in_any_order(case.what, result, inputs, case)
            else:
                check_bits(case.what, result, inputs, [0] * n, case)
    ledger.close()


@each_algorithm("all_gather")
@ranks("n", env={"MSCOMM_ALGO": "all_gather={algorithm}"}, timeout_s=120)
def test_all_gather_concatenates_in_rank_order(rank, group, n, algorithm):
    for case in cases(n, KINDS_NOT_IN_PLACE, lambda dtype: ["all_gather"]):
        inputs = inputs_of(raw_bits, case, n)
        result = called(mscomm.all_gather, case, inputs[rank], gathered_shape)
        assert (bits(result) == bits(np.concatenate(inputs))).all(), str(case)


@each_algorithm("broadcast")
@ranks("n", env={"MSCOMM_ALGO": "broadcast={algorithm}"}, timeout_s=120)
def test_broadcast_gives_every_rank_the_bits_of_the_root(rank, group, n, algorithm):
    roots = list(range(n)) if n <= 4 else [n - 1]
    for case in cases(n, KINDS, lambda dtype: roots):
        inputs = inputs_of(raw_bits, case, n)
        result = called(functools.partial(mscomm.broadcast, root=case.what), case, inputs[rank], same_shape)
        assert (bits(result) == bits(inputs[case.what])).all(), f"root {case}"


@pytest.mark.parametrize(
    "algorithm", [name for what, name, by in _core.algorithms() if (what, by) == ("broadcast", "mesh")]
)
@ranks(2, env={"MSCOMM_ALGO": "broadcast={algorithm}"})
def test_a_root_that_has_sent_everything_may_leave(rank, group, algorithm):
    pids = mscomm.all_gather(np.array([os.getpid()]))
    root = os.pidfd_open(int(pids[0])) if rank == 1 else -1
    mscomm.barrier()
    if rank == 1:
        select.select([root], [], [])  # until it is gone
    for value in range(5):
        assert mscomm.broadcast(np.full(1000, value if rank == 0 else -1))[0] == value


@each_algorithm("barrier")
@ranks("n", env={"MSCOMM_ALGO": "barrier={algorithm}"})
def test_barrier_lets_nobody_leave_before_everybody_has_come(rank, group, n, algorithm):
    for turn in range(3 * n):
        if turn % n == rank:
            time.sleep(0.002)  # the others would be gone
        came = time.monotonic_ns()  # one clock for all processes of a host
        mscomm.barrier()
        left = time.monotonic_ns()
        everybody = mscomm.all_gather(np.array([[came, left]]))
        assert everybody[:, 0].max() <= everybody[:, 1].min(), f"turn {turn}: came, left: {everybody.tolist()}"


# --- the same bits --------------------------------------------------------------------------------------------------

LAYOUTS = [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1, 1]]  # the host of each rank


@ranks("n", env={"MSCOMM_ALGO": "all_reduce={algorithm}", "MSCOMM_HOST_ID": "{hosts}"})
def write_checksums(rank, group, n, algorithm, hosts, folder):
    """To folder/algorithm: a line for each case with the checksum of its result, which is the fold for these hosts."""
    lines = []
    for turn, case in enumerate(cases(n, [Kind("private", "new")], ops_of)):
        inputs = inputs_of(wild, case, n)
        result = mscomm.all_reduce(inputs[rank], case.what)
        if turn % n == rank:
            check_bits(case.what, result, inputs, hosts, case)
        lines.append(f"{case}: {zlib.crc32(bits(result).data):08x}")
    Path(folder, f"{algorithm}.{rank}").write_text("\n".join(lines))


@pytest.mark.parametrize("hosts", LAYOUTS, ids=str)
def test_all_reduce_has_the_same_bits_by_every_algorithm(tmp_path, hosts):
    one_host = len(set(hosts)) == 1
    for what, algorithm, carrier in _core.algorithms():
        if what != "all_reduce" or algorithm in OWN_ORDER or (carrier == "arena" and not one_host):
            continue
        write_checksums(tmp_path=tmp_path, n=len(hosts), algorithm=algorithm, hosts=hosts, folder=str(tmp_path))
    first, *others = sorted(tmp_path.glob("*.[0-9]"))
    for other in others:
        assert other.read_text().splitlines() == first.read_text().splitlines(), f"{other.name} and {first.name} differ"


@pytest.mark.parametrize("algorithm", algorithms_of("all_reduce"))
@ranks(4, env={"MSCOMM_ALGO": "all_reduce={algorithm}"})
def test_all_reduce_has_the_same_bits_when_it_is_called_again(rank, group, algorithm):
    for case in cases(4, [Kind("private", "new")], ops_of):
        x = inputs_of(wild, case, 4)[rank]
        once, again = mscomm.all_reduce(x, case.what), mscomm.all_reduce(x, case.what)
        assert (bits(once) == bits(again)).all(), str(case)


# --- all_reduce_many ------------------------------------------------------------------------------------------------


def mixed_list(rank: int, op: str) -> list[Array]:
    """Arrays of every dtype that has op, of several shapes and kinds of memory, empty and 0-d ones among them."""
    arrays = []
    for dtype in DTYPES:
        if op not in ops_of(dtype):
            continue
        values = wild(dtype, 4000 + rank)[rank:]
        shapes = (values[:3000], values[3000:3001].reshape(()), values[:0], strided(values[:77]))
        arrays += [*shapes, np.asfortranarray(values[:210].reshape(14, 15)), shared(values[:500].reshape(2, 5, 50))]
    return arrays


@pytest.mark.parametrize("algorithm", [name for name in algorithms_of("all_reduce") if name not in OWN_ORDER])
@ranks(3, env={"MSCOMM_ALGO": "all_reduce={algorithm}"})
def test_all_reduce_many_has_the_bits_of_one_all_reduce_after_the_other(rank, group, algorithm):
    for op in _core.ops:
        arrays = mixed_list(rank, op)
        for x, y in zip(arrays, mscomm.all_reduce_many(arrays, op), strict=True):
            assert y.shape == x.shape and y.dtype == x.dtype
            assert (bits(y) == bits(mscomm.all_reduce(x, op))).all(), f"{op} of {x.dtype}{x.shape}"


@ranks(3)
def test_all_reduce_many_writes_to_out(rank, group):
    arrays = mixed_list(rank, "sum")
    out = [with_gaps(x.shape, x.dtype) for x in arrays]
    expected = [mscomm.all_reduce(x) for x in arrays]
    result = mscomm.all_reduce_many(arrays, out=out)
    assert all(y is given for y, given in zip(result, out, strict=True))
    assert all((bits(y) == bits(z)).all() for y, z in zip(out, expected, strict=True))


@ranks(3)
def test_all_reduce_many_works_in_place(rank, group):
    arrays = [x.copy(order="K") for x in mixed_list(rank, "sum")]
    expected = [mscomm.all_reduce(x) for x in arrays]
    mscomm.all_reduce_many(arrays, out=arrays)
    assert all((bits(y) == bits(z)).all() for y, z in zip(arrays, expected, strict=True))


@ranks(2)
def test_all_reduce_many_of_nothing_is_nothing(rank, group):
    assert mscomm.all_reduce_many([]) == []
