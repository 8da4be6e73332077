"""Every algorithm of the registry gives the right bits: collective x algorithm x ranks, and in each job dtype x op x size x kind of memory.

What exists is asked of mscomm._core. The expected value of a reduction is a left-to-right fold of the ranks' arrays with NumPy, in the
accumulator type (float32 for float16 and bfloat16), rounded once; over more than one host, of each host's ranks first and then of the hosts.
The `ring` all_reduce alone may add in another order: exact on whole numbers, else within the bound of `check_in_any_order`.
"""

from __future__ import annotations

import functools
import itertools
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
DTYPES = [np.dtype(getattr(np, "bool_" if name == "bool" else name, None) or getattr(ml_dtypes, name)) for name in _core.dtypes()]
ONE_OF_EACH_WIDTH = list({dtype.itemsize: dtype for dtype in DTYPES}.values())
HAS_OWN_ORDER = {("all_reduce", "ring")}  # docs/design: bits that depend on the position in the message


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


class Pool:
    """Fixed values, the same on every rank: those of rank r for a size, without keeping n arrays of each."""

    def __init__(self, values: Array) -> None:
        self.values = values

    def of(self, rank: int, size: int) -> Array:
        return self.values[rank * STRIDE : rank * STRIDE + size]


def pool(make: Callable[[np.dtype[Any], int], Array], dtype: np.dtype[Any], n: int) -> Pool:
    return Pool(make(dtype, max(sizes(dtype, n)) + STRIDE * n))


def raw_bits(dtype: np.dtype[Any], count: int) -> Array:
    """Any bits at all, NaNs of every payload included: for what moves elements and does not look at them."""
    bits = np.random.default_rng(1).integers(0, 256, count * dtype.itemsize, np.uint8)
    return bits % 2 == 1 if dtype == bool else bits.view(dtype)


def wild(dtype: np.dtype[Any], count: int) -> Array:
    """All of the integers; floats of random exponents from 2^-20 to 2^20, with subnormals, both zeros, infinities and NaN."""
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
    return values % 2 == 1 if dtype == bool else values.astype(dtype)


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
    """got is the reduction in some order: exactly, or for sums and products of floats within the bound.

    n-1 roundings in the accumulator type, each of at most half an epsilon of the magnitude that any order can reach, then one to the element type.
    """
    dtype, n = got.dtype, len(inputs)
    expected = folded(op, inputs, [0] * n)
    if dtype.kind in "biu" or op in ("min", "max"):
        assert (bits(got) == bits(expected)).all(), f"{case}: differs"
        return
    element = ml_dtypes.finfo(real(dtype))
    accumulator = ml_dtypes.finfo(np.float32 if dtype.itemsize == 2 else real(dtype))
    magnitude = functools.reduce(np.multiply if op == "prod" else np.add, [np.abs(x.astype(np.result_type(x, np.float32))) for x in inputs])
    if dtype.kind == "c":
        magnitude = np.repeat(2 * magnitude, 2)  # a part of a product has two terms
    bound = magnitude * (2 * n * float(accumulator.eps) + 2 * float(element.eps) * (dtype.itemsize == 2)) + float(element.smallest_subnormal)
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
    return values.reshape(next((k for k in (7, 5, 3, 2) if values.size % k == 0), 1), -1) if values.size else values.reshape(3, 0)


def with_gaps(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    return np.zeros((*shape, 2), dtype)[..., 1]


def strided(values: Array) -> Array:
    array = with_gaps(values.shape, values.dtype)
    array[...] = values
    return array


# How x lies in memory, and how out does; `rank % 2` makes it differ between the ranks.
X: dict[str, Callable[[Array, int], Array]] = {
    "private": lambda values, rank: values.copy(),
    "shared": lambda values, rank: shared(values),
    "mixed": lambda values, rank: shared(values) if rank % 2 else values.copy(),
    "read-only": lambda values, rank: read_only(values),
    "2-d": lambda values, rank: in_rows(values).copy(),
    "Fortran": lambda values, rank: np.asfortranarray(in_rows(values)),
    "strided": lambda values, rank: strided(values),
    "backwards": lambda values, rank: values[::-1].copy()[::-1],
    "0-d or shared 2-d": lambda values, rank: values.copy().reshape(()) if values.size == 1 else shared(in_rows(values)),
}
OUT: dict[str, Callable[[tuple[int, ...], Array, int], Array | None]] = {
    "new": lambda shape, x, rank: None,
    "private": lambda shape, x, rank: np.zeros(shape, x.dtype),
    "shared": lambda shape, x, rank: mscomm.zeros(shape, x.dtype),
    "mixed": lambda shape, x, rank: mscomm.zeros(shape, x.dtype) if rank % 2 == 0 else np.zeros(shape, x.dtype),
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
    what: str  # op or root

    def __str__(self) -> str:
        return f"{self.what} of {self.size} x {self.dtype}, x {self.kind.x}, out {self.kind.out}"


def called(function: Callable[..., Array], case: Case, values: Array, shape: Callable[[Array], tuple[int, ...]]) -> Array:
    """The result of function(x, out=...) with x and out as the kind says, in C order; x, if it is not out, is as it was."""
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
    """Every dtype x what x size; the kinds of memory in turn."""
    turn = itertools.cycle(kinds)
    for dtype in DTYPES:
        for what, size in itertools.product(whats(dtype), sizes(dtype, n)):
            yield Case(dtype, size, next(turn), what)


# --- the matrix -----------------------------------------------------------------------------------------------------


@each_algorithm("all_reduce")
@ranks("n", env={"MSCOMM_ALGO": "all_reduce={algorithm}"}, timeout_s=120)
def test_all_reduce_is_the_fold_of_the_ranks_arrays(rank, group, n, algorithm):
    own_order = ("all_reduce", algorithm) in HAS_OWN_ORDER
    ledger = Ledger()
    for make in (whole, tame) if own_order else (wild,):
        pool_of = functools.lru_cache(1)(functools.partial(pool, make, n=n))
        for turn, case in enumerate(cases(n, KINDS, ops_of)):
            inputs = [pool_of(case.dtype).of(r, case.size) for r in range(n)]
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
    kinds = KINDS if n == 1 else KINDS_NOT_IN_PLACE
    for case in cases(n, kinds, lambda dtype: ["all_gather"]):
        if case.size == 0:
            values = pool(raw_bits, case.dtype, n)
        inputs = [values.of(r, case.size) for r in range(n)]
        result = called(mscomm.all_gather, case, inputs[rank], gathered_shape)
        assert (bits(result) == bits(np.concatenate(inputs))).all(), str(case)


@each_algorithm("broadcast")
@ranks("n", env={"MSCOMM_ALGO": "broadcast={algorithm}"}, timeout_s=120)
def test_broadcast_gives_every_rank_the_bits_of_the_root(rank, group, n, algorithm):
    roots = list(range(n)) if n <= 4 else [n - 1]
    for case in cases(n, KINDS, lambda dtype: roots):
        if case.size == 0 and case.what == roots[0]:
            values = pool(raw_bits, case.dtype, n)
        result = called(functools.partial(mscomm.broadcast, root=case.what), case, values.of(rank, case.size), same_shape)
        assert (bits(result) == bits(values.of(case.what, case.size))).all(), f"root {case}"


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


# --- every kind of memory with every size ---------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", algorithms_of("all_reduce"))
@ranks(3, env={"MSCOMM_ALGO": "all_reduce={algorithm}"})
def test_all_reduce_takes_every_kind_of_memory(rank, group, algorithm):
    turn = itertools.cycle(ONE_OF_EACH_WIDTH)
    pool_of = functools.cache(functools.partial(pool, whole, n=3))
    for kind, nth in itertools.product(KINDS, range(len(sizes(DTYPES[0], 3)))):
        dtype = next(turn) if nth % 2 else DTYPES[0]
        raise NotImplementedError
