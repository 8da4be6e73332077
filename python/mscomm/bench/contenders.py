"""The interface of contenders, and a class for the contenders that run in mscomm's own ranks: mscomm and some peers.

A contender creates one cell for each size. All ranks of the job create the same cells, and call the same methods on
the cells in the same order. Only the results that a cell returns on rank 0 are reported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

import mscomm
from mscomm.bench.table import Array, Buffers, Case, ring, times_ns
from mscomm.cluster import assemble
from mscomm.group import Group
from mscomm.job import resolve


class Cell(Protocol):
    """Measures one contender at one size."""

    def measure(self, warmup: int, iterations: int, op: str = "avg") -> list[float]:
        """Make untimed calls, then timed calls. Return microseconds for each timed call.

        op: how to combine the times of the ranks, "avg" or "max".
        """

    def wrong(self) -> int:
        """Make one call. Return the number of wrong elements in the results of all ranks."""

    def close(self) -> None:
        """Free the memory."""


class Contender(Protocol):
    name: str
    about: str  # versions and settings, for the header of the output

    def plan(self, case: Case) -> None:
        """Set the case for all cells that are created from now on."""

    def cell(self, count: int, in_place: bool) -> Cell: ...

    def close(self) -> None: ...


class Local:
    """A contender that runs in the ranks of the mscomm job. `bind(case, buffers)` returns the call to measure.

    If has_result is False, only the time matters, because there are no results to check.
    """

    def __init__(
        self,
        name: str,
        about: str,
        case: Case,
        make: Callable[..., Array],
        bind: Callable[[Case, Buffers], Callable[[], object]],
        end: Callable[[], object] = lambda: None,
        has_result: bool = True,
    ) -> None:
        self.name, self.about = name, about
        self._case, self._make, self._bind, self._end, self._has_result = case, make, bind, end, has_result

    def plan(self, case: Case) -> None:
        self._case = case

    def cell(self, count: int, in_place: bool) -> Cell:
        buffers = Buffers(self._case, count, in_place, self._make)
        return _LocalCell(buffers, self.call(buffers), self._has_result)

    def call(self, buffers: Buffers) -> Callable[[], object]:
        """Return a function that makes one call on these buffers, for code that measures the time itself."""
        return self._bind(self._case, buffers)

    def close(self) -> None:
        self._end()


def times_us(call: Callable[[], object], warmup: int, iterations: int, op: str) -> list[float]:
    """Make untimed calls, then timed calls. Return microseconds for each timed call, reduced over ranks with `op`."""
    for _ in range(warmup):
        call()
    mscomm.barrier()
    combined: Array = mscomm.all_reduce(times_ns(call, iterations), op)
    return [float(ns) / 1e3 for ns in combined]


class _LocalCell:
    def __init__(self, buffers: Buffers, call: Callable[[], object], has_result: bool) -> None:
        self._buffers, self._call, self._has_result = buffers, call, has_result

    def measure(self, warmup: int, iterations: int, op: str = "avg") -> list[float]:
        self._buffers.fill_for_repetition()
        return times_us(self._call, warmup, iterations, op)

    def wrong(self) -> int:
        self._buffers.fill()
        mscomm.barrier()  # a call can write to a peer's memory, so all ranks must have filled their buffers
        self._call()
        wrong = self._buffers.wrong() if self._has_result else 0
        return int(mscomm.all_reduce(np.array([wrong]))[0])

    def close(self) -> None:
        del self._buffers, self._call


def mscomm_call(case: Case, buffers: Buffers, group: Group | None = None) -> Callable[[], object]:
    """Return a function that makes one mscomm call on these buffers. group: a group of all ranks, or None."""
    x, out = buffers.x, buffers.out
    if case.row.name == "send_recv":
        send, recv = mscomm.send, mscomm.recv
        return lambda: ring(lambda to: send(x, to), lambda source: recv(out, source), case.rank, case.ranks)
    function = getattr(mscomm, case.row.name)
    if case.row.name == "barrier":
        return functools.partial(function, group=group)
    arguments: dict[str, Any] = {"group": group} if group else {}
    if case.row.reduces:
        arguments["op"] = case.op
    if case.row.rooted:
        arguments["root"] = case.root
    if out is not None:
        arguments["out"] = out
    return lambda: function(x, **arguments)


def ourselves(
    case: Case,
    shared: bool,
    name: str = "mscomm",
    group: Group | None = None,
    bind: Callable[..., Callable[[], object]] = mscomm_call,
) -> Contender:
    """Return mscomm as a contender. If `shared`, arrays come from mscomm.empty; otherwise they are ordinary arrays.

    group: the group to make the calls on. It must contain all ranks. None means the world. bind: a function that
    returns the call to measure.
    """
    chosen = assemble.chosen(resolve(group).core.layout).get(case.row.name, "not known")
    memory = "arrays of mscomm.empty" if shared else "private arrays"
    about = f"mscomm {mscomm.__version__}, {memory}, algorithm {chosen}"
    return Local(name, about, case, mscomm.empty if shared else np.empty, functools.partial(bind, group=group))
