"""Compares the speed of two builds of mscomm, to show what a change costs or saves.

    python bench/builds.py OLD/bin/mscomm NEW/bin/mscomm -n 2,4,8

In each round, `mscomm bench` runs with one build and then with the other, so that a temporary slowdown of the machine
affects both builds. The script prints a Markdown table with the time of each build in microseconds: the median over all
rounds of the median time in a round. The table also shows the ratio of the old time to the new time, with an interval
from a paired bootstrap over the rounds (see ratio.py). A row says "slower" if the whole interval is below 1, and
"faster" if the whole interval is above 1.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import numpy as np
from ratio import interval, ratio

COLLECTIVES = "all_reduce,all_gather,reduce_scatter,broadcast,all_to_all"
Cell = tuple[str, int, str, int]  # collective, number of ranks, kind of memory, bytes


def measure(mscomm: str, collective: str, ranks: int, memory: str, sizes: tuple[str, str, int]) -> dict[Cell, float]:
    """Run `mscomm bench`. Return the median time of a call for each size, in microseconds.

    The calls are out of place if the collective has an out-of-place form.
    """
    smallest, largest, factor = sizes
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder, "samples.json")
        command = [mscomm, "bench", collective, "-n", str(ranks), "-b", smallest, "-e", largest, "-f", str(factor)]
        command += ["--json", str(kept), *(["--shared"] if memory == "arena" else [])]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise click.ClickException(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        rows = json.loads(kept.read_text())["rows"]
    found = {}
    for row in rows:
        mode = row["results"]["mscomm"].get("out_of_place") or next(iter(row["results"]["mscomm"].values()))
        found[collective, ranks, memory, row["size"]] = float(np.median(mode["rounds_us"][0]))
    return found


def verdict(low: float, high: float) -> str:
    return "slower" if high < 1 else "faster" if low > 1 else ""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("old", type=click.Path(exists=True, dir_okay=False))
@click.argument("new", type=click.Path(exists=True, dir_okay=False))
@click.option("-n", "ranks", default="2,4,8", show_default=True, help="Numbers of ranks.")
@click.option("-c", "collectives", default=COLLECTIVES, show_default=True)
@click.option(
    "-m", "memories", default="arena,foreign", show_default=True, help="Arrays of mscomm.empty, ordinary ones."
)
@click.option("-b", "smallest", default="8", show_default=True)
@click.option("-e", "largest", default="16M", show_default=True)
@click.option("-f", "factor", default=8, show_default=True)
@click.option("--rounds", default=7, show_default=True)
def main(
    old: str,
    new: str,
    ranks: str,
    collectives: str,
    memories: str,
    smallest: str,
    largest: str,
    factor: int,
    rounds: int,
) -> None:
    samples: dict[Cell, tuple[list[float], list[float]]] = {}
    for one in range(rounds):
        for n in map(int, ranks.split(",")):
            for collective in collectives.split(","):
                for memory in memories.split(","):
                    builds = (0, 1) if one % 2 == 0 else (1, 0)
                    for build in builds:
                        times = measure((old, new)[build], collective, n, memory, (smallest, largest, factor))
                        for cell, us in times.items():
                            samples.setdefault(cell, ([], []))[build].append(us)
        print(f"round {one + 1} of {rounds}", file=sys.stderr, flush=True)
    print(f"| collective | ranks | memory | bytes | old us | new us | old/new ({interval(rounds)}) | |")
    print("|---" * 8 + "|")
    counts = {"slower": 0, "faster": 0, "": 0}
    for (collective, n, memory, size), (before, now) in samples.items():
        one_ratio = ratio(before, now)
        word = verdict(one_ratio.low, one_ratio.high)
        counts[word] += 1
        numbers = f"{np.median(before):.1f} | {np.median(now):.1f}"
        print(f"| {collective} | {n} | {memory} | {size} | {numbers} | {one_ratio} | {word} |")
    mean = np.exp(np.mean([np.log(np.median(before) / np.median(now)) for before, now in samples.values()]))
    print(f"\n{counts['slower']} slower, {counts['faster']} faster, {counts['']} within noise; mean ratio {mean:.3f}")


if __name__ == "__main__":
    main()
