"""The collectives that can be measured: each rank's input and output, the bandwidth factor, and the correct result.

This module needs only NumPy, because MPI ranks use it too. Sizes are defined as in nccl-tests: the size of a message is
the number of bytes that one rank sends or receives in a call, whichever is larger.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

PERIOD = 127  # a prime number, so that the check notices data that is misplaced by a power of two
# The value in `out` before a call, by which the check finds elements that the call has not written. A correct result
# can contain this value only if the call reduces or the dtype is bool.
POISON = 127


class Collective(NamedTuple):
    """A row of COLLECTIVES. An array "in parts" has `count` elements per rank; any other array has `count` elements."""

    name: str
    bus: Callable[[int], float]  # for n ranks, the ratio of bus bandwidth to algorithm bandwidth
    x_in_parts: bool
    out_in_parts: bool
    reduces: bool = False
    rooted: bool = False
    out_at_root: bool = False  # whether only the root gets a result
    in_place: bool = False  # whether there is a form with out=x


class Case(NamedTuple):
    """A collective with its settings, and the rank that measures it."""

    row: Collective
    dtype: np.dtype[Any]
    op: str
    root: int
    ranks: int
    rank: int

    def count(self, size: int) -> int:
        """Return the number of elements in a part of a message of `size` bytes: at least 1, or 0 if no data moves."""
        if not moves_data(self.row):
            return 0
        return max(1, size // (self.dtype.itemsize * self._parts))

    def size(self, count: int) -> int:
        """Return the size in bytes of a message whose parts have `count` elements."""
        return count * self.dtype.itemsize * self._parts

    @property
    def _parts(self) -> int:
        return self.ranks if self.row.x_in_parts or self.row.out_in_parts else 1

    @property
    def gets(self) -> bool:
        """Whether this rank gets a result."""
        return moves_data(self.row) and (not self.row.out_at_root or self.rank == self.root)


class Contents:
    """What the ranks' arrays contain: each rank repeats its own pattern of PERIOD elements.

    The results are exact in every dtype. With up to 128 ranks, no sum is above 256. Even bfloat16 can represent all
    integers up to 256 exactly, so the order of additions does not matter.
    """

    def __init__(self, case: Case) -> None:
        self._dtype = case.dtype
        self.ranks, self.root = case.ranks, case.root
        self._op = case.op if case.row.reduces else ""

    def of(self, rank: int, start: int, count: int) -> Array:
        """Return `count` elements of the array x of `rank`, from index `start`."""
        return _repeated(self._pattern(rank).astype(self._dtype), start, count)

    def reduced(self, start: int, count: int, ranks: int | None = None) -> Array:
        """Return `count` elements, from index `start`, of the reduction over all ranks or the first `ranks` ranks."""
        ranks = self.ranks if ranks is None else ranks
        if ranks == 0 and self._op in ("min", "max"):
            return np.full(count, _limit(self._dtype, self._op), self._dtype)
        kind = _wide(self._dtype)
        stack: Array = np.empty((ranks, PERIOD), kind)
        for rank in range(ranks):
            stack[rank] = self._pattern(rank)
        combined = stack.mean(axis=0) if self._op == "avg" else _REDUCE[self._op](stack)
        return _repeated(combined.astype(self._dtype), start, count)

    def _pattern(self, rank: int) -> Array:
        i = np.arange(PERIOD)
        moved: Array = (31 * i + 17 * rank) % PERIOD  # differs from rank to rank and from element to element
        mine = i % self.ranks == rank
        patterns: dict[str, Array] = {
            "sum": moved % max(2, min(8, 256 // self.ranks)),
            "prod": 1 + mine,
            "avg": i % 4 + self.ranks * mine,
        }
        return moved % 2 if self._dtype == np.bool_ else patterns.get(self._op, moved)


_REDUCE: dict[str, Callable[[Array], Any]] = {
    "sum": lambda stack: stack.any(axis=0) if stack.dtype == np.bool_ else stack.sum(axis=0),
    "prod": lambda stack: stack.all(axis=0) if stack.dtype == np.bool_ else stack.prod(axis=0),
    "min": lambda stack: stack.min(axis=0),
    "max": lambda stack: stack.max(axis=0),
    "band": np.bitwise_and.reduce,
    "bor": np.bitwise_or.reduce,
    "bxor": np.bitwise_xor.reduce,
}
OPS = (*_REDUCE, "avg")


def _wide(dtype: np.dtype[Any]) -> type:
    """Return the type in which to compute the correct result.

    Arithmetic in this type is exact. A conversion to `dtype` wraps around, as arithmetic in `dtype` does.
    """
    for kind, wide in ((np.bool_, np.bool_), (np.integer, np.int64), (np.complexfloating, np.complex128)):
        if np.issubdtype(dtype, kind):
            return wide
    return np.float64


def _limit(dtype: np.dtype[Any], op: str) -> Any:
    """Return the result of min or max over no ranks."""
    if np.issubdtype(dtype, np.integer):
        return np.iinfo(dtype).max if op == "min" else np.iinfo(dtype).min
    return op == "min" if dtype == np.bool_ else np.inf if op == "min" else -np.inf


def _repeated(pattern: Array, start: int, count: int) -> Array:
    return np.tile(np.roll(pattern, -(start % PERIOD)), -(-count // PERIOD))[:count]


class Buffers:
    """One rank's x and out for messages of one size. `make(count, dtype)` allocates them."""

    def __init__(self, case: Case, count: int, in_place: bool, make: Callable[..., Array]) -> None:
        self.case, self.count, self.in_place = case, count, in_place
        self._contents = Contents(case)
        row, n = case.row, case.ranks
        self.x: Array = make(count * (n if row.x_in_parts else 1), case.dtype)
        self.out: Array | None = None
        if case.gets:
            self.out = self.x if in_place else make(count * (n if row.out_in_parts else 1), case.dtype)

    def fill(self) -> None:
        """Fill x with the values that the other ranks expect, and out with POISON."""
        if self.out is not None:
            self.out[...] = POISON
        self.x[...] = self._contents.of(self.case.rank, 0, self.x.size)

    def fill_for_repetition(self) -> None:
        """Fill the arrays so that each repeated call gets the same values. Without this, in-place sums would grow."""
        if self.in_place and self.case.row.reduces:
            self.x[...] = 0
        else:
            self.fill()

    def wrong(self) -> int:
        """Return the number of wrong elements in out after one call on filled buffers."""
        if self.out is None:
            return 0
        return int((self.out != _EXPECTED[self.case.row.name](self._contents, self.case.rank, self.count)).sum())


def times_ns(call: Callable[[], object], iterations: int) -> Array:
    """Return the time in ns that each of `iterations` calls took on this rank."""
    clock = time.perf_counter_ns
    spent = np.empty(iterations)
    for i in range(iterations):
        began = clock()
        call()
        spent[i] = clock() - began
    return spent


def _from_each(contents: Contents, start: int, count: int) -> Array:
    return np.concatenate([contents.of(peer, start, count) for peer in range(contents.ranks)])


# For each collective that moves data, the correct `out` of a rank that gets a result.
_EXPECTED: dict[str, Callable[[Contents, int, int], Array]] = {
    "all_reduce": lambda contents, rank, count: contents.reduced(0, count),
    "all_gather": lambda contents, rank, count: _from_each(contents, 0, count),
    "reduce_scatter": lambda contents, rank, count: contents.reduced(rank * count, count),
    "broadcast": lambda contents, rank, count: contents.of(contents.root, 0, count),
    "reduce": lambda contents, rank, count: contents.reduced(0, count),
    "gather": lambda contents, rank, count: _from_each(contents, 0, count),
    "scatter": lambda contents, rank, count: contents.of(contents.root, rank * count, count),
    "all_to_all": lambda contents, rank, count: _from_each(contents, rank * count, count),
    "scan": lambda contents, rank, count: contents.reduced(0, count, rank + 1),
    "exscan": lambda contents, rank, count: contents.reduced(0, count, rank),
    "send_recv": lambda contents, rank, count: contents.of((rank - 1) % contents.ranks, 0, count),
}


def _others(n: int) -> float:
    return (n - 1) / n


def _all(n: int) -> float:
    return 1.0


COLLECTIVES = {
    row.name: row
    for row in (
        Collective("all_reduce", lambda n: 2 * (n - 1) / n, False, False, reduces=True, in_place=True),
        Collective("all_gather", _others, False, True),
        Collective("reduce_scatter", _others, True, False, reduces=True),
        Collective("broadcast", _all, False, False, rooted=True, in_place=True),
        Collective("reduce", _all, False, False, reduces=True, rooted=True, out_at_root=True, in_place=True),
        Collective("gather", _others, False, True, rooted=True, out_at_root=True),
        Collective("scatter", _others, True, False, rooted=True),
        Collective("all_to_all", _others, True, True),
        Collective("scan", _all, False, False, reduces=True, in_place=True),
        Collective("exscan", _all, False, False, reduces=True, in_place=True),
        Collective("send_recv", _all, False, False),
        Collective("barrier", lambda n: 0.0, False, False),
    )
}


def moves_data(row: Collective) -> bool:
    return row.name != "barrier"


def ring(send: Callable[[int], object], recv: Callable[[int], object], rank: int, ranks: int) -> None:
    """Make one call of send_recv: send to the next rank, and receive from the previous rank. Even ranks send first, and
    odd ranks receive first. If all ranks sent first, they could wait for each other forever.
    """
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    if rank % 2 == 0:
        send(right)
        recv(left)
    else:
        recv(left)
        send(right)
