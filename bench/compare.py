"""mscomm beside Open MPI, MPICH and gloo in one run, each in its best setting, and beside what the memory allows.

    python bench/compare.py -n 2,4,8 --openmpi-prefix OPENMPI --mpich-prefix MPICH results
    python bench/compare.py --read results

Runs `mscomm bench` for each collective and number of ranks, which measures all contenders in turn, in five rounds, and
checks every result; keeps all samples in the folder; and prints a table in Markdown: the times, how many times as fast
mscomm is as the better setting of the better MPI and of gloo, with arrays of mscomm.empty ("arena") and ordinary ones
("foreign"), with 95 % intervals, and what share of the memory's limit it reaches. Cells that mscomm loses are in bold,
those that miss a goal are listed. Pictures of ratios and shares over size: ratio.svg and share.svg in the folder.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

MPI = ("openmpi", "openmpi-single", "mpich", "mpich-single")
GLOO = ("torch-gloo", "torch-gloo-4")
MEMORIES = {"arena": "mscomm", "foreign": "private"}
LIMIT = "memory"
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
SIZES = (8, *(4 << 10 << shift for shift in range(0, 15, 2)))  # 8 B, then 4 KiB to 64 MiB


class Goal(NamedTuple):
    """At least so many times as fast, over the sizes from `smallest` to `largest`: the geometric mean, and each one."""

    collectives: tuple[str, ...]
    ranks: tuple[int, ...]
    memory: str
    peers: tuple[str, ...]
    smallest: int
    largest: int
    mean: float
    each: float


OTHERS = COLLECTIVES[1:]
GOALS = (
    Goal(("all_reduce",), (2,), "arena", MPI, 4 << 10, 64 << 20, 5, 1.5),
    Goal(("all_reduce",), (4,), "arena", MPI, 4 << 10, 64 << 20, 5, 1.5),
    Goal(("all_reduce",), (8,), "arena", MPI, 4 << 10, 64 << 20, 3, 1.5),
    Goal(("all_reduce",), (2,), "foreign", MPI, 4 << 10, 64 << 20, 1.5, 1),
    Goal(("all_reduce",), (4,), "foreign", MPI, 4 << 10, 64 << 20, 1.6, 1),
    Goal(("all_reduce",), (8,), "foreign", MPI, 4 << 10, 64 << 20, 2, 1),
    Goal(("all_reduce",), (2,), "foreign", MPI, 8, 8, 1, 1),
    Goal(("all_reduce",), (8,), "foreign", MPI, 8, 8, 1.5, 1.5),
    Goal(OTHERS, (2, 4, 8), "arena", MPI, 64 << 10, 64 << 20, 2, 1),
    Goal(("all_reduce",), (2, 4, 8), "arena", GLOO, 8, 64 << 20, 20, 4),
    Goal(("all_reduce",), (2, 4, 8), "foreign", GLOO, 8, 64 << 20, 20, 3),
    Goal(OTHERS, (2, 4, 8), "arena", GLOO, 8, 64 << 20, 20, 1.5),
)


class Ratio(NamedTuple):
    value: float
    low: float  # of the 95 % interval
    high: float


class Cell:
    """All contenders' times for one size."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.size: int = row["size"]
        self._rounds = {}
        for name, modes in row["results"].items():
            (mode,) = modes.values()
            self._rounds[name] = [np.asarray(one) for one in mode["rounds_us"]]

    def us(self, name: str) -> float:
        return float(np.median(np.concatenate(self._rounds[name])))

    def best(self, names: Iterable[str]) -> str | None:
        """The fastest of those that were measured."""
        there = [name for name in names if name in self._rounds]
        return min(there, key=self.us, default=None)

    def ratio(self, theirs: str, ours: str) -> Ratio:
        """Their time over ours; the interval is a bootstrap over the rounds, which both took in turn."""
        rounds = np.array([[np.median(one) for one in self._rounds[name]] for name in (theirs, ours)])
        draw = np.random.default_rng(0).integers(0, rounds.shape[1], (2000, rounds.shape[1]))
        medians = np.median(rounds[:, draw], axis=2)
        low, high = np.quantile(medians[0] / medians[1], [0.025, 0.975])
        return Ratio(self.us(theirs) / self.us(ours), float(low), float(high))


class Series:
    """One collective on so many ranks."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.collective: str = document["plan"]["collective"]
        self.ranks: int = document["environment"]["ranks"]
        self.environment: dict[str, Any] = document["environment"]
        self.cells = [Cell(row) for row in document["rows"]]
        found = [cell for row in document["rows"] for modes in row["results"].values() for cell in modes.values()]
        self.wrong: int = sum(cell["wrong"] or 0 for cell in found)

    def ratios(self, peers: tuple[str, ...], memory: str) -> list[tuple[Cell, str, Ratio]]:
        """For each size the best of the peers, and its time over mscomm's in that memory."""
        found = []
        for cell in self.cells:
            best = cell.best(peers)
            if best is not None:
                found.append((cell, best, cell.ratio(best, MEMORIES[memory])))
        return found


def geometric_mean(values: Iterable[float]) -> float:
    return math.exp(np.mean([math.log(value) for value in values]))


def size_text(size: int) -> str:
    for unit, bytes_ in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= bytes_:
            return f"{size / bytes_:g} {unit}"
    return f"{size} B"


# -- what is printed


def report(all_series: list[Series]) -> Iterator[str]:
    environment = all_series[0].environment
    yield f"{environment['cpus']} CPUs ({environment['cpu']}), Linux {environment['kernel']}, {environment['began']}"
    for name, about in environment["contenders"].items():
        yield f"* {name}: {about}"
    wrong = sum(series.wrong for series in all_series)
    yield f"* wrong elements in all results: {wrong}"
    for series in all_series:
        yield from ("", f"### {series.collective}, {series.ranks} ranks", "", *times(series))
    yield from ("", "### Goals", "", *goals(all_series))


def times(series: Series) -> Iterator[str]:
    columns = (
        "size",
        "arena",
        "foreign",
        "better MPI",
        "gloo",
        "MPI/arena",
        "MPI/foreign",
        "gloo/arena",
        "gloo/foreign",
    )
    yield f"| {' | '.join(columns)} | share of the limit |"
    yield "|" + "---|" * (len(columns) + 1)
    for cell in series.cells:
        mpi, gloo = cell.best(MPI), cell.best(GLOO)
        line = [size_text(cell.size), *(f"{cell.us(name):.1f}" for name in MEMORIES.values())]
        line += [f"{cell.us(best):.1f} {best}" if best else "-" for best in (mpi, gloo)]
        for best in (mpi, gloo):
            line += [_ratio_text(cell.ratio(best, ours)) if best else "-" for ours in MEMORIES.values()]
        line.append(f"{cell.us(LIMIT) / cell.us('mscomm'):.0%}" if cell.best([LIMIT]) else "-")
        yield f"| {' | '.join(line)} |"


def _ratio_text(ratio: Ratio) -> str:
    text = f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
    return f"**{text}**" if ratio.value < 1 else text


def goals(all_series: list[Series]) -> Iterator[str]:
    """One line a goal, and below it the cells that miss it."""
    for goal in GOALS:
        for ranks in goal.ranks:
            for collective in goal.collectives:
                chosen = [one for one in all_series if (one.collective, one.ranks) == (collective, ranks)]
                cells = [
                    found
                    for series in chosen
                    for found in series.ratios(goal.peers, goal.memory)
                    if goal.smallest <= found[0].size <= goal.largest
                ]
                if cells:
                    yield from _goal(goal, collective, ranks, cells)


def _goal(goal: Goal, collective: str, ranks: int, cells: list[tuple[Cell, str, Ratio]]) -> Iterator[str]:
    mean = geometric_mean(ratio.value for *_, ratio in cells)
    missed = [(cell, best, ratio) for cell, best, ratio in cells if ratio.value < goal.each]
    who = "MPI" if goal.peers is MPI else "gloo"
    sizes = " to ".join(dict.fromkeys(size_text(cell.size) for cell in (cells[0][0], cells[-1][0])))
    verdict = "met" if mean >= goal.mean and not missed else "MISSED"
    yield (
        f"* {verdict}: {collective}, {ranks} ranks, {goal.memory}, {sizes}: {who} takes {mean:.2f} times as long"
        f" (goal {goal.mean:g}); smallest {min(ratio.value for *_, ratio in cells):.2f} (goal {goal.each:g})"
    )
    for cell, best, ratio in missed:
        yield f"  * {size_text(cell.size)}: {best} {_ratio_text(ratio)}"


# -- pictures


def draw(all_series: list[Series], folder: Path) -> None:
    """ratio.svg and share.svg: a panel for each collective and number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = list(dict.fromkeys(series.collective for series in all_series))
    columns = sorted({series.ranks for series in all_series})
    lines = {
        ("arena", MPI): ("better MPI over arena", "#08519c", "o"),
        ("foreign", MPI): ("better MPI over foreign", "#6baed6", "s"),
        ("arena", GLOO): ("gloo over arena", "#d95f02", "^"),
        ("foreign", GLOO): ("gloo over foreign", "#fdae6b", "v"),
    }
    for picture in ("ratio", "share"):
        figure, axes = plt.subplots(
            len(rows), len(columns), sharex=True, sharey=True, squeeze=False, layout="constrained"
        )
        figure.set_size_inches(2.6 + 2.6 * len(columns), 1.6 + 1.9 * len(rows))
        handles: dict[str, Any] = {}
        for series in all_series:
            ax = axes[rows.index(series.collective), columns.index(series.ranks)]
            sizes = [cell.size for cell in series.cells]
            if picture == "ratio":
                for (memory, peers), (label, colour, marker) in lines.items():
                    found = series.ratios(peers, memory)
                    ys = [ratio.value for *_, ratio in found]
                    xs = [cell.size for cell, *_ in found]
                    (handles[label],) = ax.plot(xs, ys, label=label, color=colour, marker=marker, markersize=3.2)
                ax.axhline(1, color="#666666", linewidth=0.8)
                ax.set_yscale("log")
            elif all(cell.best([LIMIT]) for cell in series.cells):
                for memory, name in MEMORIES.items():
                    _, colour, marker = lines[(memory, MPI)]
                    ys = [cell.us(LIMIT) / cell.us(name) for cell in series.cells]
                    (handles[memory],) = ax.plot(sizes, ys, label=memory, color=colour, marker=marker, markersize=3.2)
                ax.axhline(1, color="#666666", linewidth=0.8)
            ax.set_xscale("log", base=2)
            ax.set_title(f"{series.collective}, {series.ranks} ranks", fontsize=9.5, loc="left")
            ax.tick_params(labelsize=8)
        figure.legend(handles.values(), handles, loc="outside upper center", ncols=4, frameon=False, fontsize=9)
        figure.supxlabel("size of the message in bytes", fontsize=9)
        figure.supylabel(
            "their time over mscomm's" if picture == "ratio" else "share of the memory's limit", fontsize=9
        )
        with matplotlib.rc_context({"svg.hashsalt": "mscomm"}):
            figure.savefig(folder / f"{picture}.svg", metadata={"Date": None})
        plt.close(figure)


# -- the command


def _numbers(context: click.Context, parameter: click.Parameter, value: str) -> list[int]:
    try:
        return [int(word) for word in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"{value!r} is no list of numbers, as 2,4,8") from None


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("-n", "ranks", default="2,4,8", callback=_numbers, help="Numbers of ranks.  [2,4,8]")
@click.option("--collectives", default=",".join(COLLECTIVES), help="Which.  [all five]")
@click.option("--vs", default=",".join((*MPI, *GLOO)), help="The peers.  [all]")
@click.option("--iters", type=int, help="Timed calls of a size in a round.  [200 up to 64K, then 20]")
@click.option("--openmpi-prefix", type=click.Path(exists=True, path_type=Path))
@click.option("--mpich-prefix", type=click.Path(exists=True, path_type=Path))
@click.option("--read", is_flag=True, help="Measure nothing: report on what the folder has.")
def main(folder: Path, ranks: list[int], collectives: str, vs: str, iters: int | None, read: bool, **mpi: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    prefixes = [word for name, path in mpi.items() if path for word in (f"--{name.replace('_', '-')}", str(path))]
    if not read:
        contenders = ",".join([MEMORIES["foreign"], LIMIT, *vs.split(",")])
        for collective in collectives.split(","):
            for n in ranks:
                words = [collective, "-n", str(n), "--shared", "--vs", contenders, *prefixes]
                words += ["--iters", str(iters)] if iters else []
                _measure(words, folder / f"{collective}-{n}")
    documents = [json.loads(path.read_text()) for path in sorted(folder.glob("*-*.json"))]
    all_series = sorted(map(Series, documents), key=lambda one: (COLLECTIVES.index(one.collective), one.ranks))
    if not all_series:
        raise click.ClickException(f"{folder} has no measurements")
    text = "\n".join(report(all_series))
    (folder / "report.md").write_text(text + "\n")
    click.echo(text)
    draw(all_series, folder)


def _measure(words: list[str], into: Path) -> None:
    """Two runs of `mscomm bench`: 8 bytes, and 4 KiB to 64 MiB; one file with the rows of both."""
    documents = []
    for part, (smallest, largest) in enumerate(((SIZES[0], SIZES[0]), (SIZES[1], SIZES[-1]))):
        file = into.with_name(f".{into.name}.{part}")
        command = [sys.executable, "-m", "mscomm", "bench", *words, "-b", str(smallest), "-e", str(largest), "-f", "4"]
        subprocess.run([*command, "--json", str(file)], check=True, stdout=sys.stderr)
        documents.append(json.loads(file.read_text()))
        file.unlink()
    whole = {**documents[1], "rows": documents[0]["rows"] + documents[1]["rows"]}
    into.with_suffix(".json").write_text(json.dumps(whole))


if __name__ == "__main__":
    main()
