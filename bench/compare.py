"""Compares mscomm with Open MPI, MPICH, gloo and memory bandwidth. Open MPI, MPICH and gloo each run with two settings.

    python bench/compare.py -n 2,4,8 --openmpi-prefix OPENMPI --mpich-prefix MPICH results
    python bench/compare.py --read results

For each collective and number of ranks, `mscomm bench` runs twice: first for 8 bytes, then for 4 KiB to 64 MiB. In each
run, all contenders take turns in rounds, and the results of each contender are checked once at each size. Only one
run is active at a time. The script writes all samples, and the pictures ratio.svg and share.svg, to the given folder,
and prints the tables in Markdown.

The tables show the times, and the times of MPI and of gloo divided by the time of mscomm. MPI means the better MPI with
its better setting, and gloo means gloo with its better setting. mscomm is measured with arrays of mscomm.empty
("arena") and with ordinary arrays ("foreign"). From 64 KiB on, the tables also show "memory" as a share of mscomm's
time: the time in which NumPy reads and writes as many bytes as the collective must read and write. A time is the median
over rounds of the median time in a round. The interval of a ratio of two times comes from a paired bootstrap over
rounds. Ratios below 1 are in bold. The goals, and the sizes at which a goal is missed, follow the tables.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from ratio import Ratio, interval, ratio

from mscomm.bench import plot
from mscomm.bench.plan import ROUNDS_WITH_PEERS
from mscomm.bench.table import COLLECTIVES as ROWS
from mscomm.bench.table import Case
from mscomm.cli.bench import check_peers

MPI = ("openmpi", "openmpi-single", "mpich", "mpich-single")
GLOO = ("torch-gloo", "torch-gloo-4")
MEMORIES = {"arena": "mscomm", "foreign": "private"}
MEMORY = "memory"
MEMORY_FROM = 64 << 10  # bytes; for smaller messages, a call's fixed costs dominate
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
SIZES = (8, *(4 << 10 << shift for shift in range(0, 15, 2)))  # 8 B, then 4 KiB to 64 MiB


class Goal(NamedTuple):
    """A goal for the sizes from `smallest` to `largest`. It compares mscomm with the fastest of `peers`.

    mscomm must be at least `mean` times as fast as this peer in the geometric mean over the sizes, and at least `each`
    times as fast at each size.
    """

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


class Cell:
    """Holds the times of all contenders for one size."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.size: int = row["size"]
        self._rounds = {}
        for name, modes in row["results"].items():
            (mode,) = modes.values()
            self._rounds[name] = [float(np.median(one)) for one in mode["rounds_us"]]

    @property
    def rounds(self) -> int:
        return min(map(len, self._rounds.values()))

    def has(self, name: str) -> bool:
        return name in self._rounds

    def us(self, name: str) -> float:
        return float(np.median(self._rounds[name]))

    def best(self, names: Iterable[str]) -> str | None:
        """Return the fastest of the contenders `names`, or None if none of them was measured."""
        return min(filter(self.has, names), key=self.us, default=None)

    def ratio(self, theirs: str, ours: str) -> Ratio:
        """Return the time of `theirs` divided by the time of `ours`."""
        return ratio(self._rounds[theirs], self._rounds[ours])

    def share(self, ours: str) -> float | None:
        """Return NumPy's time to read and write the same bytes, divided by the time of `ours`.

        Return None for small sizes, or if NumPy was not measured.
        """
        return self.us(MEMORY) / self.us(ours) if self.has(MEMORY) and self.size >= MEMORY_FROM else None


class Series:
    """Holds the measurements of one collective with one number of ranks."""

    def __init__(self, path: Path) -> None:
        document = json.loads(path.read_text())
        plan, self.environment = document.get("plan", {}), document.get("environment", {})
        if plan.get("collective") not in COLLECTIVES or not plan["shared"] or MEMORIES["foreign"] not in plan["peers"]:
            raise click.ClickException(f"{path}: not written by compare.py; move it to another folder")
        self.path = path
        self.collective: str = plan["collective"]
        self.ranks: int = self.environment["ranks"]
        self.cells = [Cell(row) for row in document["rows"]]
        self.wrong: dict[str, int] = {}  # the number of wrong elements, for each contender that has any
        self.checked = True
        for row in document["rows"]:
            for name, modes in row["results"].items():
                for cell in modes.values():
                    self.checked &= cell["wrong"] is not None
                    if cell["wrong"]:
                        self.wrong[name] = self.wrong.get(name, 0) + cell["wrong"]

    def __str__(self) -> str:
        return f"{self.collective}, {self.ranks} ranks"

    def setting(self) -> dict[str, Any]:
        """Return the machine, the versions, and the settings of MPI and gloo. All must be equal in all series."""
        facts = {name: self.environment[name] for name in ("cpu", "cpus", "kernel", "mscomm", "python", "numpy")}
        about = self.environment["contenders"]
        return {**facts, **{name: about[name] for name in (*MPI, *GLOO) if name in about}}

    def ratios(self, peers: tuple[str, ...], memory: str) -> list[tuple[Cell, str, Ratio]]:
        """Return a tuple for each size: the cell, the fastest of `peers`, and this peer's time divided by mscomm's.

        memory: the kind of arrays that mscomm uses, "arena" or "foreign".
        """
        found = []
        for cell in self.cells:
            best = cell.best(peers)
            if best is not None:
                found.append((cell, best, cell.ratio(best, MEMORIES[memory])))
        return found


def read_all(folder: Path) -> list[Series]:
    """Return all series in the folder, sorted by collective and number of ranks.

    Raise ClickException if the settings of two series differ.
    """
    found = [Series(path) for path in sorted(folder.glob("*-*.json"))]
    if not found:
        raise click.ClickException(f"{folder} has no measurements")
    seen: dict[str, tuple[Any, Path]] = {}
    for series in found:
        for what, value in {**series.setting(), str(series): series.path}.items():
            first, path = seen.setdefault(what, (value, series.path))
            if first != value:
                raise click.ClickException(
                    f"{what} is {value!r} in {series.path} and {first!r} in {path}: move measurements with"
                    " different settings to separate folders"
                )
    return sorted(found, key=lambda one: (COLLECTIVES.index(one.collective), one.ranks))


def geometric_mean(values: Iterable[float]) -> float:
    return math.exp(np.mean([math.log(value) for value in values]))


def size_text(size: int) -> str:
    for unit, bytes_ in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= bytes_:
            return f"{size / bytes_:g} {unit}"
    return f"{size} B"


# -- the report


def report(all_series: list[Series]) -> Iterator[str]:
    setting: dict[str, Any] = {}
    for series in all_series:
        setting.update(series.setting())
    yield f"{setting['cpus']} CPUs ({setting['cpu']}), Linux {setting['kernel']}, Python {setting['python']},"
    yield f"NumPy {setting['numpy']}, mscomm {setting['mscomm']}"
    for name in (*MPI, *GLOO):
        if name in setting:
            yield f"* {name}: {setting[name]}"
    rounds = min(cell.rounds for series in all_series for cell in series.cells)
    yield f"* in brackets: {interval(rounds)}, by a bootstrap over {rounds} rounds"
    yield from (f"* {line}" for line in correctness(all_series))
    for series in all_series:
        yield from ("", f"### {series}", "", *about(series), "", *times(series))
    yield from ("", "### Goals", "", *goals(all_series))


def correctness(all_series: list[Series]) -> Iterator[str]:
    wrong = [f"{series}: {count} of {name}" for series in all_series for name, count in series.wrong.items()]
    yield f"wrong elements: {'; '.join(wrong) or 'none'}"
    if unchecked := [str(series) for series in all_series if not series.checked]:
        yield f"not checked: {'; '.join(unchecked)}"


def about(series: Series) -> Iterator[str]:
    words = series.environment["contenders"]
    yield f"Began {series.environment['began']}."
    yield from (f"{name}: {words[name]}." for name in (*MEMORIES.values(), MEMORY) if name in words)


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
        "memory/arena",
    )
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
    for cell in series.cells:
        mpi, gloo = cell.best(MPI), cell.best(GLOO)
        line = [size_text(cell.size), *(f"{cell.us(name):.1f}" for name in MEMORIES.values())]
        line += [f"{cell.us(best):.1f} {best}" if best else "-" for best in (mpi, gloo)]
        for best in (mpi, gloo):
            line += [ratio_text(cell.ratio(best, ours)) if best else "-" for ours in MEMORIES.values()]
        share = cell.share(MEMORIES["arena"])
        line.append("-" if share is None else f"{share:.0%}")
        yield f"| {' | '.join(line)} |"


def ratio_text(one: Ratio) -> str:
    return f"**{one}**" if one.value < 1 else str(one)


def goals(all_series: list[Series]) -> Iterator[str]:
    """Yield lines about all goals: whether each goal is met, which cells miss it, and what was not measured."""
    for goal in GOALS:
        who = "MPI" if goal.peers is MPI else "gloo"
        lacking = []
        for what in ((collective, ranks) for ranks in goal.ranks for collective in goal.collectives):
            chosen = (series for series in all_series if (series.collective, series.ranks) == what)
            found = (one for series in chosen for one in series.ratios(goal.peers, goal.memory))
            if cells := [one for one in found if goal.smallest <= one[0].size <= goal.largest]:
                yield from _goal(goal, *what, who, cells)
            else:
                lacking.append("{}, {} ranks".format(*what))
        if lacking:
            yield f"* not measured: {goal.memory}, {who}: {'; '.join(lacking)}"


def _goal(goal: Goal, collective: str, ranks: int, who: str, cells: list[tuple[Cell, str, Ratio]]) -> Iterator[str]:
    gaps = _gaps(goal, collective, ranks, [cell for cell, *_ in cells])
    mean = geometric_mean(one.value for *_, one in cells)
    missed = [(cell, best, one) for cell, best, one in cells if one.value < goal.each]
    unsure = sum(one.low < goal.each <= one.value for *_, one in cells)
    if missed:  # one missed cell is enough to miss the goal, so unmeasured cells do not matter
        verdict = "MISSED"
    elif gaps:
        verdict = "not measured"
    else:
        verdict = "met" if mean >= goal.mean else "MISSED"
    sizes = " to ".join(dict.fromkeys(size_text(cell.size) for cell in (cells[0][0], cells[-1][0])))
    yield (
        f"* {verdict}: {collective}, {ranks} ranks, {goal.memory}, {sizes}: {who} takes {mean:.2f} times as long"
        f" (goal {goal.mean:g}); smallest {min(one.value for *_, one in cells):.2f} (goal {goal.each:g})"
        + (f"; {unsure} cells within noise" if unsure else "")
        + (f"; missing: {', '.join(gaps)}" if gaps else "")
    )
    for cell, best, one in missed:
        yield f"  * {size_text(cell.size)}: {best} {ratio_text(one)}"


def _gaps(goal: Goal, collective: str, ranks: int, cells: list[Cell]) -> list[str]:
    """Return what was not measured for the goal: the missing sizes, and the peers that lack any size in `cells`."""
    case = Case(ROWS[collective], np.dtype(np.float32), "sum", 0, ranks, 0)
    wanted = [case.size(case.count(size)) for size in SIZES if goal.smallest <= size <= goal.largest]
    there = {cell.size for cell in cells}
    lacking = [peer for peer in goal.peers if not all(cell.has(peer) for cell in cells)]
    return [*(size_text(size) for size in wanted if size not in there), *lacking]


# -- the pictures


def draw(all_series: list[Series], folder: Path) -> None:
    """Draw ratio.svg and share.svg, with a panel for each collective and number of ranks."""
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
            if picture == "ratio":
                for (memory, peers), (label, colour, marker) in lines.items():
                    found = series.ratios(peers, memory)
                    ys = [one.value for *_, one in found]
                    xs = [cell.size for cell, *_ in found]
                    (handles[label],) = ax.plot(xs, ys, label=label, color=colour, marker=marker, markersize=3.2)
                ax.axhline(1, color="#666666", linewidth=0.8)
                ax.set_yscale("log")
            else:
                for memory, name in MEMORIES.items():
                    _, colour, marker = lines[(memory, MPI)]
                    shares = [(cell.size, cell.share(name)) for cell in series.cells]
                    xs = [size for size, share in shares if share is not None]
                    ys = [share for _, share in shares if share is not None]
                    (handles[memory],) = ax.plot(xs, ys, label=memory, color=colour, marker=marker, markersize=3.2)
                ax.axhline(1, color="#666666", linewidth=0.8)
            ax.set_xscale("log", base=2)
            ax.set_title(f"{series.collective}, {series.ranks} ranks", fontsize=9.5, loc="left")
            ax.tick_params(labelsize=8)
        figure.legend(handles.values(), handles, loc="outside upper center", ncols=4, frameon=False, fontsize=9)
        figure.supxlabel("size of the message in bytes", fontsize=9)
        figure.supylabel(
            "their time over mscomm's" if picture == "ratio" else "memory's time over mscomm's", fontsize=9
        )
        with matplotlib.rc_context({"svg.hashsalt": "mscomm"}):
            figure.savefig(folder / f"{picture}.svg", metadata={"Date": None})
        plt.close(figure)


# -- the command line


def _numbers(context: click.Context, parameter: click.Parameter, value: str) -> list[int]:
    try:
        return [int(word) for word in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"{value!r} is no list of numbers, as 2,4,8") from None


def words_of(known: Iterable[str]) -> Any:
    def words(context: click.Context, parameter: click.Parameter, value: str) -> list[str]:
        found = value.split(",")
        if strangers := [word for word in found if word not in known]:
            raise click.BadParameter(f"{strangers[0]!r} is not one of {', '.join(known)}")
        return found

    return words


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("-n", "ranks", default="2,4,8", callback=_numbers, help="Numbers of ranks.  [2,4,8]")
@click.option("--collectives", default=",".join(COLLECTIVES), callback=words_of(COLLECTIVES), help="Which.  [all five]")
@click.option("--vs", default=",".join((*MPI, *GLOO)), callback=words_of((*MPI, *GLOO)), help="The peers.  [all]")
@click.option("--iters", type=click.IntRange(1), help="Timed calls of a size in a round.  [5 to 1000: 100 ms]")
@click.option(
    "--rounds", type=click.IntRange(ROUNDS_WITH_PEERS), default=11, show_default=True, help="How many rounds."
)
@click.option("--openmpi-prefix", type=click.Path(exists=True, path_type=Path))
@click.option("--mpich-prefix", type=click.Path(exists=True, path_type=Path))
@click.option("--read", is_flag=True, help="Measure nothing: report on what the folder has.")
def main(
    folder: Path,
    ranks: list[int],
    collectives: list[str],
    vs: list[str],
    iters: int | None,
    rounds: int,
    openmpi_prefix: Path | None,
    mpich_prefix: Path | None,
    read: bool,
) -> None:
    if plot.missing():
        raise click.ClickException(plot.MISSING)
    failed: list[str] = []
    if not read:
        prefixes = {name: path for name, path in (("openmpi", openmpi_prefix), ("mpich", mpich_prefix)) if path}
        check_peers(vs, prefixes)
        folder.mkdir(parents=True, exist_ok=True)
        common = ["--shared", "--vs", ",".join([MEMORIES["foreign"], MEMORY, *vs]), "--rounds", str(rounds)]
        common += ["--iters", str(iters)] if iters else []
        common += [word for name, path in prefixes.items() for word in (f"--{name}-prefix", str(path))]
        for collective in collectives:
            for n in ranks:
                failed += _measure([collective, "-n", str(n), *common], folder / f"{collective}-{n}.json")
    all_series = read_all(folder)
    text = "\n".join(report(all_series))
    (folder / "report.md").write_text(text + "\n")
    click.echo(text)
    draw(all_series, folder)
    if failed:
        raise click.ClickException("failed, and has no figures here:\n" + "\n".join(failed))
    if any(series.wrong for series in all_series):
        raise click.ClickException("some results are wrong: see the head of the report")


def _measure(words: list[str], into: Path) -> list[str]:
    """Run `mscomm bench` twice, for 8 bytes and for 4 KiB to 64 MiB, and write the rows of both runs to one file.

    Return a line for each failed run. A run has failed if it has written no file. The exit status does not say so,
    because a run with wrong results also exits with status 1, but writes its file.
    """
    into.unlink(missing_ok=True)  # removes the file of an earlier run
    documents, failed = [], []
    with tempfile.TemporaryDirectory(prefix="mscomm-compare-") as scratch:
        for smallest, largest in ((SIZES[0], SIZES[0]), (SIZES[1], SIZES[-1])):
            file = Path(scratch, f"{smallest}.json")
            command = [sys.executable, "-m", "mscomm", "bench", *words, "-b", str(smallest), "-e", str(largest)]
            status = subprocess.run(
                [*command, "-f", "4", "--json", str(file)], check=False, stdout=sys.stderr
            ).returncode
            if file.exists():
                documents.append(json.loads(file.read_text()))
            else:
                failed.append(f"{' '.join(command[2:])}: status {status}")
    if documents:
        whole = {**documents[-1], "rows": [row for document in documents for row in document["rows"]]}
        into.write_text(json.dumps(whole))
    return failed


if __name__ == "__main__":
    main()
