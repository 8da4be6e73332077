"""Measures small calls with a root that follow one another, as in a loop of a program.

    python bench/loops.py -n 2,4,8

`mscomm bench` measures single calls, whose median does not show a rank that waits now and then because it is ahead of
the others. This script divides the time of a loop, up to a barrier at its end, by the number of calls. mscomm and Open
MPI take turns. The script prints a Markdown table with the medians of the rounds, in microseconds per call.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

from mscomm.bench.peers import FLAVOURS, environment_for_mpirun, find_mpi

CALLS, LOOPS = 2000, 7
COLLECTIVES = ("broadcast", "gather", "reduce")
SIZES = (8, 64, 512, 4096)


def measure(barrier: Any, call: Any) -> float:
    """Return the median of the microseconds per call over several loops."""
    results = []
    for _ in range(1 + LOOPS):  # the first loop warms up
        barrier()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        barrier()
        results.append((time.perf_counter() - begin) / CALLS * 1e6)
    return statistics.median(results[1:])


def be_a_rank(library: str, collective: str, size: int) -> None:
    """Run the loops on this rank. On rank 0, print the result."""
    x = np.ones(size // 4, np.float32)
    if library == "mscomm":
        import mscomm

        mscomm.init()
        rank, ranks, barrier = mscomm.get_rank(), mscomm.get_group_size(), mscomm.barrier
        out = np.empty(x.size * ranks if collective == "gather" else x.size, np.float32)
        calls = {
            "broadcast": lambda: mscomm.broadcast(x, out=x),
            "gather": lambda: mscomm.gather(x, out=out),
            "reduce": lambda: mscomm.reduce(x, out=out),
        }
    else:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        rank, barrier = world.rank, world.Barrier
        out = np.empty(x.size * world.size if collective == "gather" else x.size, np.float32) if rank == 0 else None
        calls = {
            "broadcast": lambda: world.Bcast(x),
            "gather": lambda: world.Gather(x, out),
            "reduce": lambda: world.Reduce(x, out),
        }
    result = measure(barrier, calls[collective])
    if rank == 0:
        print("us", result)


def run(launcher: list[str], library: str, collective: str, size: int) -> float:
    command = [*launcher, __file__, "--rank", f"{library},{collective},{size}"]
    env = environment_for_mpirun(os.environ) | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env, timeout=120, check=True)
    return float(done.stdout.split("us ")[1])


@click.command(help=__doc__)
@click.option("-n", "ranks", default="2,4,8", show_default=True, help="Numbers of ranks.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--openmpi-prefix", type=click.Path(path_type=Path), help="Where Open MPI is installed.")
@click.option("--rank", hidden=True)
def main(ranks: str, rounds: int, openmpi_prefix: Path | None, rank: str | None) -> None:
    if rank is not None:
        library, collective, size = rank.split(",")
        return be_a_rank(library, collective, int(size))
    mpi = find_mpi("openmpi", openmpi_prefix)
    cpus = len(os.sched_getaffinity(0))
    print("| collective | ranks | bytes | mscomm | Open MPI | Open MPI/mscomm |\n|---|---|---|---|---|---|")
    for collective in COLLECTIVES:
        for n in map(int, ranks.split(",")):
            # Ranks that spin while others wait for their CPU would make Open MPI slower.
            yields = ["--mca", "mpi_yield_when_idle", "1"] if n > cpus else []
            launchers = {
                "mscomm": [sys.executable, "-m", "mscomm", "run", "-n", str(n)],
                "mpi": [str(mpi.mpirun), *FLAVOURS["openmpi"].flags, *yields, "-n", str(n), str(mpi.python)],
            }
            for size in SIZES:
                times: dict[str, list[float]] = {library: [] for library in launchers}
                for _ in range(rounds):
                    for library, launcher in launchers.items():
                        times[library].append(run(launcher, library, collective, size))
                ours, theirs = (statistics.median(times[library]) for library in ("mscomm", "mpi"))
                print(f"| {collective} | {n} | {size} | {ours:.2f} | {theirs:.2f} | {theirs / ours:.2f} |", flush=True)


if __name__ == "__main__":
    main()
