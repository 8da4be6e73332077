"""Measures all_reduce between hosts. Compares mscomm with two settings of gloo, and with the speed of the wire.

    sudo python bench/hosts.py results
    python bench/hosts.py --read results

The hosts are network namespaces of this machine (tests/hosts.py), so they share its CPUs and its memory bus. A link of
1 Gbit/s is limited to this rate in both directions, after a burst of 256 KiB. An unshaped link is as fast as the kernel
can make it. There is one job for each link and layout (2x4 means 2 hosts with 4 ranks each). In a job, all contenders
take turns in rounds, and the results of mscomm and gloo are checked once at each size. The calls are in-place
float32 sums on ordinary arrays. The script writes all samples to the given folder, and prints tables in Markdown. A
call's time is the mean over the ranks. A time in the tables is the median over rounds of the median time in a round.
The interval of a ratio of two times comes from a paired bootstrap over rounds.

In an all_reduce of S bytes over H hosts, every host must send and receive at least 2 (H-1)/H S bytes. "wire" is the
time to move just these bytes: one rank of each host sends them to the next host, and receives from the previous host at
the same time. "share" is the wire's time divided by mscomm's time. "sent" is the number of bytes that the busiest host
has sent through its interface, divided by the number of bytes that it must send. If "sent" is below 1, some bytes took
another route, and the command fails. Ratios to gloo below 1 are in bold. The goals, and the sizes at which a goal is
missed, follow the tables.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
from compare import GLOO, Cell, ratio_text, size_text, words_of
from hosts_rank import WIRE
from ratio import Ratio, interval

from mscomm.bench.plan import ROUNDS_WITH_PEERS, size_of
from mscomm.cli.bench import check_peers

HOSTS = Path(__file__).parents[1] / "tests/hosts.py"
LINKS = {"1gbit": "1gbit", "unshaped": ""}  # the rate limit of each host, in tc's notation; "" means no limit
SIZES = {"1gbit": (64 << 10, 1 << 20, 16 << 20), "unshaped": (8, 64 << 10, 1 << 20, 16 << 20)}
LAYOUTS = ("2x1", "4x1", "2x4")
INTERFACE = "net0"
PASSED_ON = ("MSCOMM_ALGO",)  # environment variables that are passed on to the ranks
SENT_FROM = 4 << 10  # bytes; with smaller messages, most of the sent bytes are headers
SERIES_S = 900.0
LAST_LINES = 30


class Goal(NamedTuple):
    """A goal for mscomm at each size from `smallest` on.

    mscomm must reach at least `share` of the wire's speed, and be at least `speed` times as fast as gloo with its
    better setting. A condition whose number is None does not apply.
    """

    link: str
    layouts: tuple[str, ...]
    smallest: int
    share: float | None
    speed: float | None


GOALS = (
    Goal("1gbit", ("2x1", "4x1"), 16 << 20, share=0.97, speed=1),
    Goal("1gbit", ("2x4",), 16 << 20, share=0.95, speed=None),
    Goal("unshaped", ("2x1", "4x1"), 1 << 20, share=None, speed=1.5),
)


class Series:
    """Holds the measurements of one link and layout."""

    def __init__(self, path: Path) -> None:
        document = json.loads(path.read_text())
        plan, self.environment = document.get("plan", {}), document.get("environment", {})
        if plan.get("link") not in LINKS or plan.get("layout") not in LAYOUTS:
            raise click.ClickException(f"{path}: not written by hosts.py; move it to another folder")
        self.path = path
        self.link: str = plan["link"]
        self.layout: str = plan["layout"]
        self.variables: dict[str, str] = plan["variables"]
        self.carried: dict[str, list[int]] = document["carried"]
        self.cells = [Cell(row) for row in document["rows"]]
        self._rows = {row["size"]: row for row in document["rows"]}
        self.wrong = {
            name: count
            for name in self.environment["contenders"]
            if (count := sum(row["results"][name]["in_place"]["wrong"] for row in document["rows"]))
        }

    def __str__(self) -> str:
        hosts, ranks = self.layout.split("x")
        return f"{self.link}, {hosts} hosts, {ranks} {'rank' if ranks == '1' else 'ranks'} each"

    def setting(self) -> dict[str, Any]:
        """Return the machine, the versions and the settings. All must be equal in all series of a report."""
        names = ("cpu", "cpus", "kernel", "congestion_control", "mscomm", "python", "numpy")
        about = self.environment["contenders"]
        facts = {"variables": self.variables, **{name: self.environment[name] for name in names}}
        return {**facts, **{name: about[name] for name in (*GLOO, WIRE)}}

    def sent(self, name: str, size: int) -> float:
        """Return the bytes that the busiest host sent with contender `name`, divided by the bytes that it must send."""
        row = self._rows[size]
        return float(row["results"][name]["in_place"]["sent_bytes"] / row["least_bytes"])

    def beside_the_wire(self) -> Iterator[str]:
        """Yield a line for each case in which a contender moved bytes without the hosts' interfaces."""
        for size in self._rows:
            for name in self.environment["contenders"]:
                if (sent := self.sent(name, size)) < 1:
                    yield f"{self}, {size_text(size)}: {name} sent {sent:.2f} of what it must"
        if self.layout.endswith("x1") and any(self.carried["arena"]):
            yield f"{self}: mscomm carried {max(self.carried['arena'])} bytes by shared memory"


def read_all(folder: Path) -> list[Series]:
    """Return all series in the folder, sorted by link and layout. Raise ClickException if their settings differ."""
    found = [Series(path) for path in folder.glob("*-*.json")]
    if not found:
        raise click.ClickException(f"{folder} has no measurements")
    found.sort(key=lambda one: (list(LINKS).index(one.link), LAYOUTS.index(one.layout)))
    for series in found:
        for what, value in series.setting().items():
            if (first := found[0].setting().get(what)) != value:
                raise click.ClickException(
                    f"{what} is {value!r} in {series.path} and {first!r} in {found[0].path}: keep what was not measured"
                    " alike in folders of its own"
                )
    return found


# -- the report


def report(all_series: list[Series]) -> Iterator[str]:
    setting = all_series[0].setting()
    yield f"{setting['cpus']} CPUs for all hosts ({setting['cpu']}), Linux {setting['kernel']},"
    yield f"TCP by {setting['congestion_control']}, Python {setting['python']}, NumPy {setting['numpy']}"
    if setting["variables"]:
        yield "* " + " ".join(f"{name}={value}" for name, value in setting["variables"].items())
    yield from (f"* {name}: {setting[name]}" for name in (*GLOO, WIRE))
    rounds = min(cell.rounds for series in all_series for cell in series.cells)
    yield f"* in brackets: {interval(rounds)}, by a bootstrap over {rounds} rounds"
    wrong = [f"{series}: {count} of {name}" for series in all_series for name, count in series.wrong.items()]
    yield f"* wrong elements: {'; '.join(wrong) or 'none'}"
    beside = [line for series in all_series for line in series.beside_the_wire()]
    yield f"* went between hosts by another way than the wire: {'; '.join(beside) or 'nothing'}"
    for series in all_series:
        yield from ("", f"### {series}", "", *about(series), "", *times(series))
    yield from ("", "### Goals", "", *goals(all_series))


def about(series: Series) -> Iterator[str]:
    arena, mesh = (sum(series.carried[what]) for what in ("arena", "mesh"))
    yield f"Began {series.environment['began']}. mscomm: {series.environment['contenders']['mscomm']}."
    yield f"Of mscomm's calls {arena} bytes went by shared memory, {mesh} by links."


def times(series: Series) -> Iterator[str]:
    columns = ("size", "mscomm, us", "better gloo, us", "wire, us", "gloo/mscomm", "share", "sent: mscomm", "gloo")
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
    for cell in series.cells:
        gloo = _better_gloo(cell)
        line = [size_text(cell.size), f"{cell.us('mscomm'):.1f}", f"{cell.us(gloo):.1f} {gloo}"]
        line += [f"{cell.us(WIRE):.1f}", ratio_text(speed(cell)), _share_text(share(cell))]
        line += [f"{series.sent(name, cell.size):.2f}" if cell.size >= SENT_FROM else "-" for name in ("mscomm", gloo)]
        yield f"| {' | '.join(line)} |"


def speed(cell: Cell) -> Ratio:
    """Return the time of gloo with its better setting, divided by mscomm's time."""
    return cell.ratio(_better_gloo(cell), "mscomm")


def share(cell: Cell) -> Ratio:
    """Return the ratio of the wire's time to mscomm's time."""
    return cell.ratio(WIRE, "mscomm")


def _better_gloo(cell: Cell) -> str:
    return min(GLOO, key=cell.us)


def _share_text(one: Ratio) -> str:
    return f"{one.value:.1%} ({one.low:.1%} to {one.high:.1%})"


def goals(all_series: list[Series]) -> Iterator[str]:
    """Yield lines that say whether each goal is met for each layout, which cells miss it, and what was not measured."""
    for goal in GOALS:
        for layout in goal.layouts:
            for series in all_series:
                if (series.link, series.layout) == (goal.link, layout):
                    yield from _goal(goal, series)
                    break
            else:
                yield f"* not measured: {goal.link}, {layout}"


def _goal(goal: Goal, series: Series) -> Iterator[str]:
    wanted = [size for size in SIZES[goal.link] if size >= goal.smallest]
    cells = [cell for cell in series.cells if cell.size >= goal.smallest]
    gaps = [size_text(size) for size in wanted if size not in {cell.size for cell in cells}]
    if goal.share is not None:
        yield from _part_of_goal(series, goal.share, "of the wire", share, _share_text, "{:.1%}".format, cells, gaps)
    if goal.speed is not None:
        words = "times as fast as gloo"
        yield from _part_of_goal(series, goal.speed, words, speed, ratio_text, "{:.2f}".format, cells, gaps)


def _part_of_goal(
    series: Series,
    least: float,
    words: str,
    figure: Callable[[Cell], Ratio],
    text: Callable[[Ratio], str],
    number: Callable[[float], str],
    cells: list[Cell],
    gaps: list[str],
) -> Iterator[str]:
    found = [(cell, figure(cell)) for cell in cells]
    missed = [(cell, one) for cell, one in found if one.value < least]
    unsure = sum(one.low < least <= one.value for _, one in found)
    sizes = " to ".join(dict.fromkeys(size_text(cell.size) for cell in (*cells[:1], *cells[-1:])))
    lowest = f"{number(min(one.value for _, one in found))} {words}" if found else words
    verdict = "MISSED" if missed else "not measured" if gaps else "met"
    yield (
        f"* {verdict}: {series}{f', {sizes}' if sizes else ''}: {lowest} (goal {number(least)})"
        + (f"; {unsure} cells within noise" if unsure else "")
        + (f"; missing: {', '.join(gaps)}" if gaps else "")
    )
    for cell, one in missed:
        yield f"  * {size_text(cell.size)}: {text(one)}"


# -- the command line


def _sizes(context: click.Context, parameter: click.Parameter, value: str | None) -> list[int] | None:
    try:
        return [size_of(word) for word in value.split(",")] if value else None
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--links", default=",".join(LINKS), callback=words_of(LINKS), help="Which.  [both]")
@click.option("--layouts", default=",".join(LAYOUTS), callback=words_of(LAYOUTS), help="Hosts x ranks.  [all]")
@click.option("--sizes", callback=_sizes, help="As 64K,1M.  [64 KiB to 16 MiB; unshaped 8 bytes, too]")
@click.option("--iters", type=click.IntRange(1), help="Timed calls in a round.  [100 up to 64K, 20 up to 1M, then 4]")
@click.option(
    "--rounds", type=click.IntRange(ROUNDS_WITH_PEERS), default=11, show_default=True, help="How many rounds."
)
@click.option("--read", is_flag=True, help="Measure nothing: report on what the folder has.")
def main(
    folder: Path,
    links: list[str],
    layouts: list[str],
    sizes: list[int] | None,
    iters: int | None,
    rounds: int,
    read: bool,
) -> None:
    failed: list[str] = []
    if not read:
        check_peers(GLOO, {})
        folder.mkdir(parents=True, exist_ok=True)
        for link in links:
            for layout in layouts:
                plan = {"link": link, "layout": layout, "sizes": sizes or SIZES[link], "rounds": rounds, "iters": iters}
                plan["variables"] = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
                failed += _measure(plan, folder / f"{link}-{layout}.json")
    all_series = read_all(folder)
    text = "\n".join(report(all_series))
    (folder / "report.md").write_text(text + "\n")
    click.echo(text)
    if failed:
        raise click.ClickException("failed, and has no figures here:\n" + "\n".join(failed))
    if any(series.wrong or list(series.beside_the_wire()) for series in all_series):
        raise click.ClickException("some results are wrong, or came by another way: see the head of the report")


def _measure(plan: dict[str, Any], into: Path) -> list[str]:
    """Run one job on new hosts. The job writes its measurements to `into`.

    Return an empty list or, if the job failed, a list with one message.
    """
    into.unlink(missing_ok=True)  # removes the file of an earlier run
    began = time.monotonic()
    hosts_count, ranks = map(int, plan["layout"].split("x"))
    with tempfile.TemporaryDirectory(prefix="mscomm-hosts-") as scratch:
        key = Path(scratch, "job.key")
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(32))
        given = Path(scratch, "plan.json")
        names = [f"host-{number}" for number in range(hosts_count)]
        given.write_text(json.dumps({**plan, "hosts": names, "interface": INTERFACE}))
        variables = {**plan["variables"], "MSCOMM_JOB_KEY_FILE": str(key)}
        problem = _job(LINKS[plan["link"]], names, ranks, given, into, variables)
    what = f"{plan['link']}, {plan['layout']}"
    click.echo(f"{what}: {problem or f'{time.monotonic() - began:.0f} s'}", err=True)
    return [f"{what}: {problem}"] if problem else []


def _job(rate: str, hosts: list[str], ranks: int, plan: Path, into: Path, variables: dict[str, str]) -> str:
    """Run the job on new hosts, each of which is a node of `mscomm run`. Return what went wrong, or ""."""
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", ""), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, HOSTS, str(len(hosts)), "--rate", rate, "--"]
    command += [sys.executable, "-m", "mscomm", "run", "--nnodes", str(len(hosts)), "--master-addr", hosts[0]]
    command += ["-n", str(ranks), "--node-rank", "{host}"]
    command += [Path(__file__).with_name("hosts_rank.py"), plan, into.absolute()]
    log = plan.with_name("job.log")
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=env | variables,
            # tests/hosts.py runs in its own session, so that Ctrl-C ends only this process. Then terminate() below
            # sends SIGTERM to tests/hosts.py, which removes the hosts and ends.
            start_new_session=True,
        )
    try:
        status = process.wait(SERIES_S)
    except subprocess.TimeoutExpired:
        return f"it has not ended after {SERIES_S:g} s"
    finally:
        process.terminate()
        process.wait()
    last = "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])
    return f"the last lines of its log:\n{last}" if status else ""


if __name__ == "__main__":
    main()
