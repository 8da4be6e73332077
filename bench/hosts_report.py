"""Reads the files of bench/hosts.py, and makes its tables and the verdicts on its goals."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from compare import GLOO, MPI, Cell, geometric_mean, ratio_text, size_text
from ratio import Ratio, interval

from mscomm.bench.table import COLLECTIVES as ROWS
from mscomm.bench.table import Case

BARE, WIRE, LATENCY = "bare", "wire", "latency"
PEERS = (*MPI, *GLOO, BARE, WIRE)
BARE_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")  # in the order of bare.cc
MOVING = (*BARE_COLLECTIVES, "reduce", "gather", "scatter")
COLLECTIVES = (*MOVING, LATENCY)
LINKS = {"1gbit": "1gbit", "unshaped": ""}  # the rate limit of each host, in tc's notation; "" means no limit
SIZES = (8, 4 << 10, 64 << 10, 1 << 20, 16 << 20)
LAYOUTS = ("2x1", "4x1", "2x2", "2x4", "4x4")
MOVED_FROM = 4 << 10  # bytes; with smaller messages, most of the moved bytes are headers


class Goal(NamedTuple):
    """A goal for each of the links and layouts, over the sizes from `smallest` to `largest` of all collectives.

    Compares with MPI (the fastest), "bare" or "wire". mscomm must be at least `mean` times as fast in the geometric
    mean, if this is not None, and at least `each` times as fast in each cell.
    """

    peer: str
    links: tuple[str, ...]
    layouts: tuple[str, ...]
    smallest: int
    largest: int
    mean: float | None
    each: float


ONE_RANK, MORE_RANKS, BOTH = ("2x1", "4x1"), ("2x2", "2x4", "4x4"), tuple(LINKS)
GOALS = (
    Goal(BARE, BOTH, ONE_RANK, 8, 64 << 10, None, 1 / 1.25),
    Goal(BARE, BOTH, ONE_RANK, 1 << 20, 16 << 20, None, 1 / 1.15),
    Goal("MPI", BOTH, ONE_RANK, 8, 16 << 20, 1.2, 0.95),
    Goal("MPI", BOTH, MORE_RANKS, 8, 16 << 20, 1.5, 0.9),
    Goal(WIRE, ("1gbit",), LAYOUTS, 1 << 20, 16 << 20, None, 0.95),
)


class Series:
    """Holds the measurements of one collective with one link and layout."""

    def __init__(self, path: Path) -> None:
        document = json.loads(path.read_text())
        plan, self.environment = document.get("plan", {}), document.get("environment", {})
        if plan.get("link") not in LINKS or plan.get("layout") not in LAYOUTS:
            raise click.ClickException(f"{path}: not written by hosts.py; move it to another folder")
        self.path = path
        self.link: str = plan["link"]
        self.layout: str = plan["layout"]
        self.collective: str = plan["collective"]
        self.variables: dict[str, str] = plan["variables"]
        self.carried: dict[str, list[int]] = document["carried"]
        self.cells = [Cell(row) for row in document["rows"]]
        self.rows = {row["size"]: row for row in document["rows"]}
        self.wrong = {
            name: count
            for name in self.environment["contenders"]
            if (count := sum(_only_mode(row, name)["wrong"] for row in document["rows"]))
        }

    @property
    def where(self) -> tuple[str, str]:
        return self.link, self.layout

    def __str__(self) -> str:
        return f"{self.collective}, {where_text(*self.where)}"

    def setting(self) -> dict[str, Any]:
        """Return the machine, the versions and the settings. All must be equal in all series of a report."""
        names = ("cpu", "cpus", "kernel", "congestion_control", "mscomm", "python", "numpy")
        about = self.environment["contenders"]
        facts = {"variables": self.variables, **{name: self.environment[name] for name in names}}
        return {**facts, **{name: about[name] for name in PEERS if name in about}}

    def moved(self, name: str, size: int) -> float:
        """Return the bytes that the busiest host moved with contender `name`, divided by those that it must move."""
        return float(_only_mode(self.rows[size], name)["moved_bytes"] / self.rows[size]["least_bytes"])

    def beside_the_wire(self) -> Iterator[str]:
        """Yield a line for each case in which a contender moved bytes without the hosts' interfaces."""
        for size in self.rows:
            for name in self.environment["contenders"]:
                if (moved := self.moved(name, size)) < 1:
                    yield f"{self}, {size_text(size)}: {name} moved {moved:.2f} of what it must"
        if self.layout.endswith("x1") and any(self.carried["arena"]):
            yield f"{self}: mscomm carried {max(self.carried['arena'])} bytes by shared memory"


def _only_mode(row: dict[str, Any], name: str) -> dict[str, Any]:
    (mode,) = row["results"][name].values()
    found: dict[str, Any] = mode
    return found


def where_text(link: str, layout: str) -> str:
    hosts, ranks = layout.split("x")
    return f"{link}, {hosts} hosts, {ranks} {'rank' if ranks == '1' else 'ranks'} each"


def read_all(folder: Path) -> list[Series]:
    """Return all series in the folder, sorted. Raise ClickException if their settings differ."""
    found = [Series(path) for path in sorted(folder.glob("*-*-*.json"))]
    if not found:
        raise click.ClickException(f"{folder} has no measurements")
    seen: dict[str, tuple[Any, Path]] = {}
    for series in found:
        for what, value in series.setting().items():
            first, path = seen.setdefault(what, (value, series.path))
            if first != value:
                raise click.ClickException(
                    f"{what} is {value!r} in {series.path} and {first!r} in {path}: keep what was not measured alike in"
                    " folders of its own"
                )
    found.sort(key=lambda one: COLLECTIVES.index(one.collective))
    return sorted(found, key=lambda one: (list(LINKS).index(one.link), LAYOUTS.index(one.layout)))


# -- the report


def report(all_series: list[Series]) -> Iterator[str]:
    setting: dict[str, Any] = {}
    for series in all_series:
        setting.update(series.setting())
    yield f"{setting['cpus']} CPUs for all hosts ({setting['cpu']}), Linux {setting['kernel']},"
    yield f"TCP by {setting['congestion_control']}, Python {setting['python']}, NumPy {setting['numpy']}"
    if setting["variables"]:
        yield "* " + " ".join(f"{name}={value}" for name, value in setting["variables"].items())
    yield from (f"* {name}: {setting[name]}" for name in PEERS if name in setting)
    rounds = min(cell.rounds for series in all_series for cell in series.cells)
    yield f"* in brackets: {interval(rounds)}, by a bootstrap over {rounds} rounds"
    wrong = [f"{series}: {count} of {name}" for series in all_series for name, count in series.wrong.items()]
    yield f"* wrong elements: {'; '.join(wrong) or 'none'}"
    beside = [line for series in all_series for line in series.beside_the_wire()]
    yield f"* went between hosts by another way than the wire: {'; '.join(beside) or 'nothing'}"
    for series in all_series:
        table = latencies if series.collective == LATENCY else times
        yield from ("", f"### {series}", "", *about(series), "", *table(series))
    yield from ("", "### Goals", "", *goals(all_series))


def about(series: Series) -> Iterator[str]:
    arena, mesh = (sum(series.carried[what]) for what in ("arena", "mesh"))
    yield f"Began {series.environment['began']}. mscomm: {series.environment['contenders']['mscomm']}."
    yield f"Of mscomm's calls {arena} bytes went by shared memory, {mesh} by links."


def times(series: Series) -> Iterator[str]:
    columns = ("size", "mscomm, us", "MPI, us", "gloo, us", "bare, us", "wire, us", "MPI/mscomm", "gloo/mscomm")
    yield _line(*columns, "mscomm/bare", "share", "moved: mscomm", "MPI")
    yield "|" + "---|" * (len(columns) + 4)
    for cell in series.cells:
        mpi, gloo = cell.best(MPI), cell.best(GLOO)
        bare, wire = (cell.best([name]) for name in (BARE, WIRE))
        line = [size_text(cell.size), f"{cell.us('mscomm'):.1f}"]
        line += [f"{cell.us(name):.1f} {name}" if name else "-" for name in (mpi, gloo)]
        line += [f"{cell.us(name):.1f}" if name else "-" for name in (bare, wire)]
        line.append(ratio_text(cell.ratio(mpi, "mscomm")) if mpi else "-")
        line.append(str(cell.ratio(gloo, "mscomm")) if gloo else "-")
        line.append(str(cell.ratio("mscomm", bare)) if bare else "-")
        line.append(_share_text(cell.ratio(wire, "mscomm")) if wire else "-")
        shown = cell.size >= MOVED_FROM
        line += [f"{series.moved(name, cell.size):.2f}" if shown and name else "-" for name in ("mscomm", mpi)]
        yield _line(*line)


def _line(*words: str) -> str:
    return f"| {' | '.join(words)} |"


def _share_text(one: Ratio) -> str:
    return f"{one.value:.1%} ({one.low:.1%} to {one.high:.1%})"


def latencies(series: Series) -> Iterator[str]:
    yield _line("contender", "p50, us", "p99, us", "p50 / mscomm's", "calls")
    yield "|" + "---|" * 5
    for cell, row in zip(series.cells, series.rows.values(), strict=True):
        for name in row["results"]:
            calls = np.concatenate(_only_mode(row, name)["rounds_us"])
            middle, high = np.percentile(calls, [50, 99])
            yield _line(name, f"{middle:.1f}", f"{high:.1f}", str(cell.ratio(name, "mscomm")), str(len(calls)))


# -- the goals


class Compared(NamedTuple):
    """One cell, compared with the peer of a goal."""

    collective: str
    size: int
    peer: str
    ratio: Ratio  # the peer's time divided by mscomm's


def goals(all_series: list[Series]) -> Iterator[str]:
    """Yield lines that say whether each goal is met for each link and layout, and which cells miss it."""
    for goal in GOALS:
        for link in goal.links:
            for layout in goal.layouts:
                chosen = [one for one in all_series if one.where == (link, layout) and one.collective != LATENCY]
                yield from _goal(goal, link, layout, list(_compared(goal, chosen)))


def _compared(goal: Goal, all_series: Iterable[Series]) -> Iterator[Compared]:
    for series in all_series:
        for cell in series.cells:
            best = cell.best(MPI if goal.peer == "MPI" else (goal.peer,))
            if best and goal.smallest <= cell.size <= goal.largest:
                yield Compared(series.collective, cell.size, best, cell.ratio(best, "mscomm"))


def _wanted(goal: Goal, layout: str) -> Iterator[tuple[str, int]]:
    """Yield the cells of a goal. The smallest message of some collectives is one element for each rank."""
    hosts, ranks = map(int, layout.split("x"))
    for collective in BARE_COLLECTIVES if goal.peer == BARE else MOVING:
        case = Case(ROWS[collective], np.dtype(np.float32), "sum", 0, hosts * ranks, 0)
        yield from (
            (collective, case.size(case.count(size))) for size in SIZES if goal.smallest <= size <= goal.largest
        )


def _goal(goal: Goal, link: str, layout: str, found: list[Compared]) -> Iterator[str]:
    reach = " to ".join(map(size_text, (goal.smallest, goal.largest)))
    head = f"{where_text(link, layout)}, {reach}: {goal.peer}'s time / mscomm's"
    if not found:
        yield f"* not measured: {head}"
        return
    wanted = set(_wanted(goal, layout))
    lacking = len(wanted - {(one.collective, one.size) for one in found})
    mean = geometric_mean(one.ratio.value for one in found)
    missed = [one for one in found if one.ratio.value < goal.each]
    unsure = sum(one.ratio.low < goal.each <= one.ratio.value for one in found)
    verdict = "MISSED" if missed else "not measured" if lacking else "met"
    if verdict == "met" and goal.mean is not None and mean < goal.mean:
        verdict = "MISSED"
    yield (
        f"* {verdict}: {head}: mean {mean:.2f}"
        + (f" (goal {goal.mean:g})" if goal.mean is not None else "")
        + f"; smallest {min(one.ratio.value for one in found):.2f} (goal {goal.each:.2f})"
        + (f"; {unsure} cells within noise" if unsure else "")
        + (f"; {lacking} of {len(wanted)} cells missing" if lacking else "")
    )
    for one in missed:
        yield f"  * {one.collective}, {size_text(one.size)}: {one.peer} {one.ratio}"
