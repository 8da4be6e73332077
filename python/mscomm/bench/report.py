"""The output of `mscomm bench`: nccl-tests' columns, a table with peers, and a file with all measurements."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import socket
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import mscomm
from mscomm import environment as variables
from mscomm.bench.plan import BUCKETS, TUNE, Plan
from mscomm.bench.table import COLLECTIVES, Case, moves_data
from mscomm.cluster.prices import Prices

SCHEMA = "mscomm-bench/1"
_MODES = ("out_of_place", "in_place")


def environment(ranks: int) -> dict[str, Any]:
    """Return the machine, the versions and the settings of a measurement."""
    return {
        "mscomm": mscomm.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "host": socket.gethostname(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "cpu": _cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "huge_pages": _read("/sys/kernel/mm/transparent_hugepage/enabled") or "unknown",
        "launcher": mscomm.get_launcher(),
        "ranks": ranks,
        "hosts": ranks // mscomm.get_local_rank_size(),
        "variables": variables.given(os.environ, variables.YOURS),
        "began": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _cpu_model() -> str:
    found = re.search(r"^(?:model name|cpu model)\s*:(.*)", _read("/proc/cpuinfo"), re.IGNORECASE | re.MULTILINE)
    return found[1].strip() if found else platform.processor() or "unknown"


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:  # some containers do not have this file
        return ""


# -- what is printed while the ranks measure ---------------------------------------------------------------------------


def say(text: str) -> None:
    print(text, flush=True)


def head(plan: Plan, case: Case, env: dict[str, Any]) -> None:
    """Print the lines above the rows: machine, versions, contenders, how times are computed, and column titles."""
    _head(plan, env)
    _how(plan)
    if plan.peers:
        say(f"# {'in place' if case.row.in_place else 'out of place'}; {plan.rounds} rounds, contenders in turn")
        names = ["mscomm", *plan.peers]
        ratios = "".join(f"{peer + '/mscomm':>{_width(peer)}}" for peer in plan.peers)
        say("#")
        say(f"#{_columns('size', 'count', 'type', 'redop', 'root')}{_times(names)}{ratios}  #wrong")
        say(f"#{_columns('(B)', '(elements)', '', '', '')}" + "".join(f"{'(us)':>12}" for _ in names))
        return
    say("#")
    say(f"#{'':53}{'out-of-place':>34}{'in-place':>36}")
    half = f"{'time':>10}{'algbw':>9}{'busbw':>9}{'#wrong':>8}"
    say(f"#{_columns('size', 'count', 'type', 'redop', 'root')}{half}{half}")
    half = f"{'(us)':>10}{'(GB/s)':>9}{'(GB/s)':>9}{'':>8}"
    say(f"#{_columns('(B)', '(elements)', '', '', '')}{half}{half}")


def _head(plan: Plan, env: dict[str, Any]) -> None:
    hosts = f"{env['hosts']} hosts" if env["hosts"] > 1 else env["host"]
    say(f"# mscomm bench {plan.collective}: {env['ranks']} ranks on {hosts}, started by {env['launcher']}")
    say(f"# {env['cpus']} CPUs for rank 0 ({env['cpu']}, {env['machine']}), load {env['load']:.1f}")
    say(f"# Linux {env['kernel']}, Python {env['python']}, NumPy {env['numpy']}")
    if env["variables"]:
        say("# " + " ".join(f"{name}={value}" for name, value in env["variables"].items()))
    for name, about in env["contenders"].items():
        say(f"# {name}: {about}")


def _how(plan: Plan) -> None:
    warmup = "50 ms" if plan.warmup is None else f"{plan.warmup} calls"
    say(f"# time of a call: the mean over ranks; the median of the medians of all rounds. Warm-up {warmup}")


def row(plan: Plan, case: Case, row: dict[str, Any]) -> None:
    op = plan.op if case.row.reduces else "none"
    root = str(plan.root) if case.row.rooted else "-1"
    dtype = case.dtype.name if moves_data(case.row) else "none"
    line = f" {_columns(str(row['size']), str(row['count']), dtype, op, root)}"
    if plan.peers:
        mode = _MODES[case.row.in_place]
        cells = {name: cell[mode] for name, cell in row["results"].items()}
        us = cells["mscomm"]["us"]
        line += "".join(f"{cell['us']:>12.1f}" for cell in cells.values())
        line += "".join(f"{cells[peer]['us'] / us:>{_width(peer)}.2f}" for peer in plan.peers)
        say(f"{line}{_wrong([cell['wrong'] for cell in cells.values()]):>8}")
        return
    for mode in _MODES:
        cell = row["results"]["mscomm"].get(mode)
        if cell is None:
            line += f"{'N/A':>10}{'N/A':>9}{'N/A':>9}{'N/A':>8}"
            continue
        algbw, busbw = bandwidths(case, row["size"], cell["us"])
        line += f"{cell['us']:>10.2f}{algbw:>9.2f}{busbw:>9.2f}{_wrong([cell['wrong']]):>8}"
    say(line)


def bandwidths(case: Case, size: int, us: float) -> tuple[float, float]:
    """Return the algorithm bandwidth and the bus bandwidth in GB/s, as nccl-tests defines them."""
    algbw = size / us / 1e3
    return algbw, algbw * case.row.bus(case.ranks)


def _columns(size: str, count: str, dtype: str, op: str, root: str) -> str:
    return f"{size:>12}{count:>14}{dtype:>12}{op:>8}{root:>7}"


def _times(names: list[str]) -> str:
    return "".join(f"{name:>12}" for name in names)


def _width(peer: str) -> int:
    return len(peer) + len("/mscomm") + 2


def _wrong(counts: list[int | None]) -> str:
    known = [count for count in counts if count is not None]
    return str(sum(known)) if known else "N/A"


def buckets_head(plan: Plan, env: dict[str, Any]) -> None:
    _head(plan, env)
    say(f"# time of a call: that of the slowest rank; the median over all calls. Warm-up {plan.least_warmup} calls")
    say("# the gradients of a ResNet-50, in place; fused: one all_reduce_many; each: an all_reduce for each array")
    say("#")
    say(
        f"# {'list':<14}{'arrays':>7}{'size':>12}{'type':>10}{'redop':>7}{'fused':>12}{'each':>12}{'each/fused':>12}"
        f"{'#wrong':>8}"
    )
    say(f"# {'':<14}{'':>7}{'(B)':>12}{'':>10}{'':>7}{'(us)':>12}{'(us)':>12}")


def buckets_row(plan: Plan, row: dict[str, Any]) -> None:
    fused, each = (row["results"][way]["in_place"] for way in ("fused", "each"))
    say(
        f"  {row['name']:<14}{row['arrays']:>7}{row['size']:>12}{plan.dtype:>10}{plan.op:>7}{fused['us']:>12.1f}"
        f"{each['us']:>12.1f}{each['us'] / fused['us']:>12.2f}{_wrong([fused['wrong'], each['wrong']]):>8}"
    )


def overlap(rows: list[dict[str, Any]]) -> None:
    """Print how much of the communication each bucket size hides, and then the bucket size with the shortest step."""
    say("#")
    say("# a step of training with that network: backward computes as long as the communication takes by itself")
    say(f"# {'bucket':>8}{'buckets':>9}{'backward':>14}{'communication':>16}{'step':>14}{'exposed':>14}{'hidden':>9}")
    say(f"# {'(MiB)':>8}{'':>9}{'(us)':>14}{'(us)':>16}{'(us)':>14}{'(us)':>14}{'':>9}")
    for row in rows:
        us = row["us"]
        exposed = us["step"] - us["backward"]
        hidden = min(max(1 - exposed / us["communication"], 0), 1)
        say(
            f"  {row['bucket_mb']:>8g}{row['buckets']:>9}{us['backward']:>14.1f}{us['communication']:>16.1f}"
            f"{us['step']:>14.1f}{exposed:>14.1f}{hidden:>9.0%}"
        )
    best = min(rows, key=lambda row: float(row["us"]["step"]))
    upper = statistics.quantiles(best["samples_us"]["step"], n=4)[2]
    alike = [f"{row['bucket_mb']:g}" for row in rows if row is not best and row["us"]["step"] <= upper]
    noise = f"; not measurably slower: {', '.join(alike)}" if alike else ""
    say(f"# Shortest step        : bucket_mb={best['bucket_mb']:g}{noise}")


def tune_head(plan: Plan, env: dict[str, Any]) -> None:
    _head(plan, env)
    _how(plan)
    memory = "arrays of mscomm.empty" if plan.shared else "private arrays"
    say("# a call with a root is measured together with a barrier behind it")
    say(f"# every algorithm for this layout, {memory}, {plan.dtype}; {plan.rounds} rounds, in turn; best: the fastest")


def tune_columns(what: str, names: tuple[str, ...]) -> None:
    say("#")
    say(f"# {what:<16}{'size':>12}{_times([*names])}{'chosen':>14}{'best':>14}{'chosen/best':>13}{'#wrong':>8}")
    say(f"# {'':<16}{'(B)':>12}" + "".join(f"{'(us)':>12}" for _ in names))


def tune_row(row: dict[str, Any]) -> None:
    cells = {name: cell for name, modes in row["results"].items() for cell in modes.values()}
    times = "".join(f"{cell['us']:>12.1f}" for cell in cells.values())
    ratio = cells[row["chosen"]]["us"] / cells[row["best"]]["us"]
    wrong = _wrong([cell["wrong"] for cell in cells.values()])
    say(
        f"  {row['collective']:<16}{row['size']:>12}{times}{row['chosen']:>14}{row['best']:>14}{ratio:>13.2f}{wrong:>8}"
    )


def tune_choices(
    choices: dict[str, list[tuple[str, int]]],
    faster: list[tuple[str, int, str, str, float]],
    regrets: list[tuple[float, str, int]],
) -> None:
    """Print which algorithms init() chooses for these ranks, and for which sizes another algorithm was faster."""
    say("#")
    say("# What init chooses for these ranks and hosts")
    _choices(choices)
    for what, size, chosen, best, share in faster:
        say(f"# {what}, {size} B: {best} took {share:.2f} of the time of {chosen}")
    if not faster:
        say("# No other algorithm that init may choose was faster by 10% or more in every round")
    _regret(regrets)


def tune_prices(
    prices: Prices,
    errors: list[float],
    choices: dict[str, list[tuple[str, int]]],
    regrets: list[tuple[float, str, int]],
) -> None:
    """Print the fitted prices, and what init() chooses with them. errors: modelled times divided by measured times."""
    say("#")
    say("# Prices that fit these times")
    for name, price in prices._asdict().items():
        what, _, unit = name.rpartition("_")
        say(f"#   {what.replace('_', ' '):<16}{price:.4g} {unit}")
    off = statistics.median(abs(error - 1) for error in errors)
    say(f"# The modelled times differ by {off:.0%} from the measured ones, in the median")
    say("# What init chooses with these prices, if MSCOMM_TUNED names the file of --json")
    _choices(choices)
    _regret(regrets)


def _choices(choices: dict[str, list[tuple[str, int]]]) -> None:
    for what, rows in choices.items():
        (first, _), *others = rows
        say(f"#   {what:<16}{first}" + "".join(f", {name} from {size} B" for name, size in others))


def _regret(regrets: list[tuple[float, str, int]]) -> None:
    mean = statistics.geometric_mean(one for one, _, _ in regrets)
    worst, what, size = regrets[0]
    say(f"# Regret, chosen/best  : {mean:.3f} in the geometric mean, at most {worst:.2f} ({what}, {size} B)")


# -- what is printed and written at the end ----------------------------------------------------------------------------


def finish(plan: Plan, result: dict[str, Any]) -> int:
    """Write the files and print the final lines. Return how many elements were wrong."""
    fields = {name: str(value) if isinstance(value, Path) else value for name, value in plan._asdict().items()}
    fields["prefixes"] = {name: str(path) for name, path in plan.prefixes.items()}
    document = {"schema": SCHEMA, "plan": fields, **result}
    if plan.json:
        write(plan.json, document)
    if plan.plot:
        from mscomm.bench import plot

        plot.draw([document], plan.plot)
    found = [cell for row in result["rows"] for modes in row["results"].values() for cell in modes.values()]
    wrong = sum(cell["wrong"] or 0 for cell in found)
    say(f"# Wrong elements       : {wrong} {'OK' if wrong == 0 else 'FAILED'}" if plan.check else "# Not checked")
    for line in _comparison(plan, result):
        say(line)
    if plan.collective != TUNE:
        say(f"# Avg bus bandwidth    : {_average_busbw(plan, result):g}")
    return wrong


def _comparison(plan: Plan, result: dict[str, Any]) -> Iterator[str]:
    """Yield lines that compare mscomm with each peer over all sizes."""
    for peer in plan.peers:
        ratios = []
        for row in result["rows"]:
            (ours,) = row["results"]["mscomm"].values()
            (theirs,) = row["results"][peer].values()
            ratios.append((theirs["us"] / ours["us"], row["size"]))
        mean = math.exp(sum(math.log(ratio) for ratio, _ in ratios) / len(ratios))
        smallest, at = min(ratios)
        losing = sum(ratio < 1 for ratio, _ in ratios)
        yield (
            f"# {peer}/mscomm: geometric mean {mean:.2f}, smallest {smallest:.2f} (at {at} B);"
            f" {peer} is faster in {losing} of {len(ratios)} sizes"
        )


def _average_busbw(plan: Plan, result: dict[str, Any]) -> float:
    """Return mscomm's mean bus bandwidth over all rows and modes, as in nccl-tests."""
    name, ours = ("all_reduce", "fused") if plan.collective == BUCKETS else (plan.collective, "mscomm")
    ranks = result["environment"]["ranks"]
    factor = COLLECTIVES[name].bus(ranks)
    rates = [row["size"] / cell["us"] / 1e3 for row in result["rows"] for cell in row["results"][ours].values()]
    return float(sum(rates)) / len(rates) * factor


def write(path: Path, document: dict[str, Any]) -> None:
    """Write the document to the file completely or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(path)
