"""Every function gives the right bits with every algorithm. There is one job for each algorithm and number of ranks.
Each job tries every function x dtype x op. In `make test`, a job tries one size with each of these, another one in each
run, and all kinds of memory. In `make test-all`, it tries every size with each. Further jobs try shapes, counts and
strides that hypothesis draws, others in each run.

mscomm._core says which functions exist, and functions.py says which results they must have. Only the `ring` reductions
may reduce in a different order than functions.py: see check_in_any_order.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import random
import select
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from functions import DTYPES, FUNCTIONS, OTHERS, REDUCED, Array, Function, How, algorithms_of, bits, ops_of, real
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as begins_with
from hypothesis import strategies as some
from ranks import ranks
from rotated import rotated, seed

import mscomm
from mscomm import _core
from mscomm.job import resolve

RANKS = (1, 2, 3, 5, 8)
LARGE_BYTES = (1 << 20) + 4
# Algorithms whose order of reduction depends on the element's position in the message: see "Same bits" in
# docs/guide.md.
OWN_ORDER = {"ring"}
ALGORITHMS = sorted({name for what, name, *_ in _core.algorithms() if what != "barrier"})


def test_every_function_of_the_core_is_here():
    assert set(FUNCTIONS) | OTHERS == set(_core.functions)
    assert {row.what for row in FUNCTIONS.values()} | {"barrier"} == set(_core.collectives)
    assert all(callable(getattr(mscomm, name)) for name in _core.functions)


# --- data -----------------------------------------------------------------------------------------------------------

# All ranks have the same array of values. Rank r's values are a slice of this array that begins at index r * STRIDE.
STRIDE = 61


@functools.cache
def pool(make: Callable[[np.dtype[Any], int], Array], dtype: np.dtype[Any]) -> Array:
    values = make(dtype, 3 * LARGE_BYTES // dtype.itemsize)
    values.flags.writeable = False
    return values


def values_of(
    make: Callable[[np.dtype[Any], int], Array], dtype: np.dtype[Any], rank: int, shape: tuple[int, ...]
) -> Array:
    """Return the values of the given rank. Each rank calls this function for all ranks, to compute what to expect."""
    return pool(make, dtype)[rank * STRIDE :][: math.prod(shape)].reshape(shape)


def raw_bits(dtype: np.dtype[Any], count: int) -> Array:
    """Return random bits, including NaNs with any payload, for functions that only move elements."""
    drawn = np.random.default_rng(1).integers(0, 256, count * dtype.itemsize, np.uint8)
    return drawn % 2 == 1 if dtype.kind == "b" else drawn.view(dtype)


def wild(dtype: np.dtype[Any], count: int) -> Array:
    """Return random integers, or floats of both signs whose magnitudes are from about 2^-20 to 2^19 (float16: to 2^14).
    Some floats are subnormals, zeros of both signs, infinities or NaN.
    """
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


def tame(dtype: np.dtype[Any], count: int) -> Array:
    """Like wild(), but the magnitude of every float is from 0.25 to 1, so the product of any eight neither overflows
    nor vanishes.
    """
    if dtype.kind in "biu":
        return raw_bits(dtype, count)
    if dtype.kind == "c":
        return tame(real(dtype), 2 * count).view(dtype)
    rng = np.random.default_rng(4)
    return (rng.uniform(0.5, 1, count) * rng.choice([-1, 1], count) * 2.0 ** rng.integers(-1, 1, count)).astype(dtype)


# --- checks ---------------------------------------------------------------------------------------------------------


def parts_of(x: Array) -> Array:
    return np.ascontiguousarray(x).reshape(-1).view(real(x.dtype))


def check_bits(got: Array, expected: Array, case: object, *, arithmetic: bool) -> None:
    """Check that the bits are the same. With `arithmetic`, all NaNs count as equal."""
    differ = bits(got) != bits(expected)
    if arithmetic and expected.dtype.kind not in "biu":
        differ &= ~((parts_of(got) != parts_of(got)) & (parts_of(expected) != parts_of(expected)))
    if differ.any():
        at = int(np.flatnonzero(differ)[0])
        raise AssertionError(
            f"{case}: {differ.sum()} of {differ.size} differ, the first at {at}: "
            f"{parts_of(got)[at]!r}, expected {parts_of(expected)[at]!r}"
        )


def check_in_any_order(op: str, got: Array, expected: Array, inputs: list[Array], case: object) -> None:
    """Check that got is the reduction in some order. If the order does not matter, got must be exact. Otherwise, its
    error must be within a bound.

    The error comes from n-1 roundings in the accumulator type (more for complex products), each of at most half an
    epsilon of the largest intermediate magnitude, and from one rounding to the element type. The expected value has
    such an error, too. The bound exceeds the sum of both errors.
    """
    dtype, n = got.dtype, len(inputs)
    if dtype.kind in "biu" or op in ("min", "max"):
        assert (bits(got) == bits(expected)).all(), f"{case}: differs"
        return
    element, accumulator = ml_dtypes.finfo(real(dtype)), ml_dtypes.finfo(np.result_type(real(dtype), np.float32))
    # The magnitude of a value from tame() is at most 1, or at most sqrt(2) if it is complex.
    largest = (math.sqrt(2) if dtype.kind == "c" else 1.0) ** n if op == "prod" else n
    roundings = 2 * n * float(accumulator.eps) + (float(element.eps) if element.bits < accumulator.bits else 0)
    bound = 2 * largest * roundings + float(element.smallest_subnormal)
    error = np.abs(parts_of(got).astype(np.float64) - parts_of(expected).astype(np.float64))
    assert (error <= bound).all(), f"{case}: off by up to {error.max()}, the bound is {bound}"


# --- kinds of memory ------------------------------------------------------------------------------------------------


def shared(values: Array) -> Array:
    array = mscomm.empty(values.shape, values.dtype)
    array[...] = values
    return array


def read_only(values: Array) -> Array:
    array = values.copy()
    array.flags.writeable = False
    return array


def with_gaps(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    return np.zeros((*shape, 2), dtype)[..., 1]


def strided(values: Array) -> Array:
    array = with_gaps(values.shape, values.dtype)
    array[...] = values
    return array


def unaligned(values: Array) -> Array:
    memory = np.zeros(values.nbytes + 1, np.uint8)
    array: Array = np.ndarray(values.shape, values.dtype, memory, 1)
    array[...] = values
    return array


# How to make x in each kind of memory; OUT does the same for out. With "mixed", neighbouring ranks use different kinds.
X: dict[str, Callable[[Array, int], Array]] = {
    "private": lambda values, rank: values.copy(),
    "shared": lambda values, rank: shared(values),
    "mixed": lambda values, rank: shared(values) if rank % 2 else values.copy(),
    "read-only": lambda values, rank: read_only(values),
    "Fortran": lambda values, rank: values.copy(order="F"),
    "strided": lambda values, rank: strided(values),
    "backwards": lambda values, rank: values[::-1].copy()[::-1] if values.ndim else values.copy(),
    "unaligned": lambda values, rank: unaligned(values),
}
OUT: dict[str, Callable[[tuple[int, ...], np.dtype[Any], int], Array | None]] = {
    "new": lambda shape, dtype, rank: None,
    "private": lambda shape, dtype, rank: np.zeros(shape, dtype),
    "shared": lambda shape, dtype, rank: mscomm.zeros(shape, dtype),
    "mixed": lambda shape, dtype, rank: (np if rank % 2 else mscomm).zeros(shape, dtype),
    "strided": lambda shape, dtype, rank: with_gaps(shape, dtype),
    "in place": lambda shape, dtype, rank: None,  # in_place() makes both x and out
}


class Kind(NamedTuple):
    x: str
    out: str


KINDS = [Kind(x, out) for x, out in itertools.product(X, OUT)]
TAILS = [(), (3,), (2, 2)]  # the lengths of the axes after axis 0


class Case(NamedTuple):
    """One call. Its str() identifies it in failure messages."""

    name: str
    how: How
    dtype: np.dtype[Any]
    tail: tuple[int, ...]
    kind: Kind
    turn: int

    @property
    def row(self) -> Function:
        return FUNCTIONS[self.name]

    def __str__(self) -> str:
        return (
            f"{self.name}, {self.how.op}, root {self.how.root}, rows {self.how.rows} of {self.tail} x {self.dtype},"
            f" x {self.kind.x}, out {self.kind.out}"
        )

    def inputs(self, make: Callable[[np.dtype[Any], int], Array], n: int) -> list[Array]:
        shapes = [(self.row.given(self.how, rank), *self.tail) for rank in range(n)]
        scalar = self.turn % 2 == 0 and self.row.counts is None and shapes == [(1,)] * n
        arrays = [values_of(make, self.dtype, rank, shape) for rank, shape in enumerate(shapes)]
        if scalar and self.row.given(self.how, 0) == self.how.rows[0][0] and self.row.what in SCALARS:
            return [x.reshape(()) for x in arrays]
        return arrays


SCALARS = ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scan", "exscan")


def in_place(case: Case, values: Array, expected: Array, rank: int) -> tuple[Array, Array] | None:
    """Put x and out into one array. Return (x, out), or None if this rank's call cannot work in place."""
    place = case.row.place(case.how, rank)
    if place is None or not values.ndim:
        return None
    longer = max(len(values), len(expected))
    memory = (
        shared(np.zeros((longer, *case.tail), case.dtype))
        if case.turn % 2
        else np.zeros((longer, *case.tail), case.dtype)
    )
    if len(values) <= len(expected):
        out = memory
        x = out if len(values) == len(expected) else out[place : place + len(values)]
    else:
        x = memory
        out = x[place : place + len(expected)]
    x[...] = values
    return x, out


def called(case: Case, inputs: list[Array], expected: Array | None, rank: int, **options: Any) -> Array | None:
    """Make the call, with x and out in the kinds of memory that the case names. Check that the call wrote only to out.
    Return the result.
    """
    values = inputs[rank]
    x, out = X[case.kind.x](values, rank), None
    both = None
    if expected is not None:
        if case.kind.out == "in place":
            both = in_place(case, values, expected, rank)
            x, out = both or (x, None)
        else:
            out = OUT[case.kind.out](expected.shape, case.dtype, rank)
    given = None if case.row.sparing and rank != case.how.root and case.turn % 3 else x
    result = case.row.call(given, case.how, rank, out=out, **options)
    if options.get("async_op"):
        result = result.wait()
    if case.row.counts is not None and result is not None:
        result, counts = result
        assert counts == case.row.counts(case.how, rank), f"{case}: gives the counts {counts}"
    if expected is None:
        assert result is None, f"{case}: gives something where there is no result"
        return None
    assert out is None or result is out, f"{case}: returns something else than out"
    assert result.shape == expected.shape and result.dtype == case.dtype, f"{case}: gives {result.dtype}{result.shape}"
    assert both or (bits(x) == bits(values)).all(), f"{case}: has changed x"
    if case.kind.out == "strided" and result.base is not None:
        assert not bits(result.base[..., 0]).any(), f"{case}: has written between the elements of out"
    return result


class Ledger:
    """The checksums of this rank's results, to compare with those of the other ranks."""

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


def sizes(dtype: np.dtype[Any], n: int) -> list[int]:
    """Return numbers of elements to test: 0, 1, a few, one not divisible by n, and enough for just over 1 MiB."""
    return [0, 1, 7, 257 * n + 1, -(-LARGE_BYTES // dtype.itemsize)]


def rows_of(name: str, n: int, size: int) -> list[list[int]]:
    """Return a table: rows_of(...)[s][d] is the number of rows that rank s sends to rank d. If the function sends the
    whole x to every rank, each number is `size`. Otherwise, a rank sends at most about `size` rows in total. If the
    function's name ends in _v, the numbers differ, and some are 0.
    """
    row = FUNCTIONS[name]
    if not name.endswith("_v"):
        whole = row.given(How("sum", 0, [[1] * n] * n), 0) == 1
        return [[size if whole else -(-size // n)] * n] * n
    each = -(-size // n)
    return [[each * ((s + 2 * d) % (n + 1)) // n + (d == 1) for d in range(n)] for s in range(n)]


def cases(names: list[str], n: int, few: random.Random | None = None) -> Iterator[Case]:
    """Yield a case for every function x dtype x op x size. The kinds of memory, the shapes and the roots change from
    case to case.

    For three ranks, there is also a case for every kind of memory x function x size. In these cases, the dtypes change
    from case to case.

    few: if given, it chooses one size, seldom the large one, for every function x dtype x op, and for every kind of
    memory x function.
    """
    turn = itertools.count()
    kinds, tails, roots, dtypes = map(itertools.cycle, (KINDS, TAILS, range(n), DTYPES))
    if few:
        for values in (kinds, tails, roots, dtypes):
            for _ in range(few.randrange(len(KINDS))):
                next(values)

    def case(name: str, dtype: np.dtype[Any], op: str, size: int, kind: Kind) -> Case:
        tail = next(tails)
        rows = rows_of(name, n, -(-size // math.prod(tail)))
        return Case(name, How(op, next(roots), rows), dtype, tail, kind, next(turn))

    def some_sizes(dtype: np.dtype[Any]) -> list[int]:
        return few.choices(sizes(dtype, n), (4, 4, 4, 4, 1)) if few else sizes(dtype, n)

    for name in names:
        for dtype in DTYPES:
            for op in ops_of(dtype, name) if FUNCTIONS[name].has_op else [""]:
                for size in some_sizes(dtype):
                    yield case(name, dtype, op, size, next(kinds))
        if n == 3:
            for kind, dtype in zip(KINDS, dtypes, strict=False):
                if FUNCTIONS[name].has_op and dtype not in REDUCED:
                    continue
                for size in some_sizes(dtype):
                    yield case(name, dtype, "max" if dtype.kind != "c" else "sum", size, kind)


# --- the tests ------------------------------------------------------------------------------------------------------


JOBS = list(itertools.product(ALGORITHMS, RANKS))
# The jobs that `make test` runs each time, with few cases. It runs a few of the other jobs, too.
ALWAYS = [(name, n) for name, n in JOBS if n <= 3 and name in ("arena", "direct")]


@pytest.mark.parametrize(("algorithm", "n"), rotated(JOBS, few=5, always=ALWAYS))
@ranks("n", env={"MSCOMM_ALGO": "{algorithm}"}, timeout_s=300)
def test_every_function_gives_what_numpy_gives_for_a_size(rank, group, n, algorithm):
    try_cases(rank, n, algorithm, lambda names, n: cases(names, n, random.Random(seed())))


@pytest.mark.long
@pytest.mark.parametrize(("algorithm", "n"), JOBS)
@ranks("n", env={"MSCOMM_ALGO": "{algorithm}"}, timeout_s=300)
def test_every_function_gives_what_numpy_gives(rank, group, n, algorithm):
    try_cases(rank, n, algorithm, cases)


def try_cases(rank: int, n: int, algorithm: str, cases_of: Callable[[list[str], int], Iterator[Case]]) -> None:
    names = [name for name, row in FUNCTIONS.items() if algorithm in algorithms_of(row.what)]
    hosts = resolve(None).hosts  # the host of each rank; test_hosts.py runs this test on several hosts
    ledger = Ledger()
    for case in cases_of(names, n):
        own_order = algorithm in OWN_ORDER and case.row.has_op
        make = tame if own_order else wild if case.row.has_op else raw_bits
        inputs = case.inputs(make, n)
        # All ranks get the same result from all_reduce, so only one rank compares it with NumPy. The ledger checks that
        # the other ranks have the same bits.
        alike = case.row.what == "all_reduce"
        mine = not alike or case.turn % n == rank
        expected = case.row.model(case.how, inputs, rank, hosts) if mine else inputs[rank]
        result = called(case, inputs, expected, rank)
        if result is None:
            continue
        if alike:
            ledger.add(case, result)
        if not mine:
            continue
        assert expected is not None
        if own_order:
            check_in_any_order(case.how.op, result, expected, inputs, case)
        else:
            check_bits(result, expected, case, arithmetic=case.row.has_op)
    ledger.close()


@some.composite
def drawn_cases(draw: Any, n: int) -> Case:
    name = draw(some.sampled_from(sorted(FUNCTIONS)))
    row = FUNCTIONS[name]
    dtype = draw(some.sampled_from(REDUCED if row.has_op else DTYPES))
    op = draw(some.sampled_from(ops_of(dtype, name))) if row.has_op else ""
    part = some.integers(0, 40) | some.sampled_from([1000, 5001])
    rows = [[draw(part) for _ in range(n)] for _ in range(n)] if name.endswith("_v") else [[draw(part)] * n] * n
    tail = tuple(draw(some.lists(some.integers(0, 5), max_size=3)))
    if sum(map(sum, rows)) * math.prod(tail) > 3 * LARGE_BYTES // 16 - n * STRIDE:  # more than pool() has
        tail = ()
    kind = Kind(draw(some.sampled_from(sorted(X))), draw(some.sampled_from(sorted(OUT))))
    return Case(name, How(op, draw(some.integers(0, n - 1)), rows), dtype, tail, kind, draw(some.integers(0, 5)))


@pytest.mark.parametrize("examples", [40, pytest.param(250, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "algorithm", rotated((name for name in ALGORITHMS if name not in OWN_ORDER), few=4, always=["arena"])
)
@ranks(3, env={"MSCOMM_ALGO": "{algorithm}"}, timeout_s=240)
def test_any_shape_counts_and_strides(rank, group, algorithm, examples):
    n = 3

    # All ranks draw the same examples, because they begin with the same seed, and retry nothing after a failure.
    @begins_with(int(seed()))
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=drawn_cases(n), beside=some.booleans())
    def try_case(case: Case, beside: bool) -> None:
        inputs = case.inputs(wild if case.row.has_op else raw_bits, n)
        expected = case.row.model(case.how, inputs, rank, None)
        result = called(case, inputs, expected, rank, async_op=beside)
        if result is not None:
            assert expected is not None
            check_bits(result, expected, case, arithmetic=case.row.has_op)

    try_case()
    mscomm.barrier()


@pytest.mark.parametrize(
    "algorithm", [name for what, name, by, _ in _core.algorithms() if (what, by) == ("broadcast", "mesh")]
)
@ranks(2, env={"MSCOMM_ALGO": "broadcast={algorithm}"})
def test_a_root_that_has_sent_everything_may_leave(rank, group, algorithm):
    pids = mscomm.all_gather(np.array([os.getpid()]))
    root = os.pidfd_open(int(pids[0])) if rank == 1 else -1
    mscomm.barrier()
    if rank == 1:
        select.select([root], [], [])  # wait until the root's process has ended
    for value in range(5):
        assert mscomm.broadcast(np.full(1000, value if rank == 0 else -1))[0] == value


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("algorithm", algorithms_of("barrier"))
@ranks("n", env={"MSCOMM_ALGO": "barrier={algorithm}"})
def test_barrier_lets_nobody_leave_before_everybody_has_come(rank, group, n, algorithm):
    for turn in range(3 * n):
        if turn % n == rank:
            time.sleep(0.002)  # long enough for the others to leave a barrier() that does not wait
        came = time.monotonic_ns()  # all processes of a host share one clock
        mscomm.barrier()
        left = time.monotonic_ns()
        everybody = mscomm.all_gather(np.array([[came, left]]))
        assert everybody[:, 0].max() <= everybody[:, 1].min(), f"turn {turn}: came, left: {everybody.tolist()}"
