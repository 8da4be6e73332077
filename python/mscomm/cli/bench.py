"""`mscomm bench`: measures a collective, alone or against gloo and MPI, with nccl-tests' flags and columns."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from mscomm import bootstrap

# Import mscomm.bench only in the functions that need it. It imports NumPy, which would slow down `mscomm bench --help`.

_HELP = """Benchmark COLLECTIVE, which is one of: all_reduce, all_gather, reduce_scatter, broadcast, reduce, gather,
scatter, all_to_all, scan, exscan, send_recv, barrier.

COLLECTIVE can also be `buckets` or `tune`. `buckets` compares all_reduce_many on the gradients of a network with one
call per gradient. It then measures training steps with several bucket sizes, and shows how much of the communication
overlaps with computation and which bucket size is fastest. `tune` measures each collective with each algorithm that
these ranks and hosts allow, and prints the algorithms that init() chooses.

Starts the ranks itself. Under mpirun or another launcher, it uses the ranks that the launcher has started. Options,
columns and bandwidths are those of nccl-tests, except that -n is the number of ranks (in nccl-tests, --iters). A size
is the total number of bytes that one rank sends or receives, whichever is larger: for all_gather, n times the size of
its array.

\b
    mscomm bench all_reduce -n 4 -b 8 -e 64M -f 4
    mscomm bench all_reduce -n 4 -e 16M --vs torch-gloo,openmpi --json all_reduce-4.json --plot all_reduce-4.svg
    mpirun -n 4 mscomm bench broadcast -r 3
"""

_VS = """Also measure these contenders, taking turns with mscomm: torch-gloo, openmpi, mpich; torch-gloo-4 (with its
interface named four times); openmpi-single, mpich-single (MPI_THREAD_SINGLE); private (mscomm on ordinary arrays);
memory (NumPy moves the same bytes, without communication)."""


@click.command("bench", help=_HELP)
@click.argument("collective")
@click.option("-n", "ranks", type=click.IntRange(1), metavar="N", help="The number of ranks to start.  [2]")
@click.option("-b", "--minbytes", default="8", metavar="SIZE", help="The smallest size; may end in K, M or G.  [8]")
@click.option("-e", "--maxbytes", default="64M", metavar="SIZE", help="The largest size.  [64M]")
@click.option("-f", "--stepfactor", type=int, metavar="N", help="Each size is N times the previous one.  [4]")
@click.option("-i", "--stepbytes", metavar="SIZE", help="Each size is this much larger than the previous one.")
@click.option(
    "-d", "--datatype", "dtype", default="float32", metavar="DTYPE", help="As NumPy or nccl-tests names it.  [float32]"
)
@click.option("-o", "--op", default="sum", help="sum, prod, min, max, avg, band, bor or bxor.  [sum]")
@click.option("-r", "--root", type=click.IntRange(0), default=0, help="The root of collectives that have one.  [0]")
@click.option("--iters", "iterations", type=click.IntRange(1), help="Timed calls per size.  [5 to 1000, about 100 ms]")
@click.option("-w", "--warmup", type=click.IntRange(0), help="Untimed calls before them.  [50 ms, at least 5]")
@click.option("--rounds", type=click.IntRange(1), help="How often to repeat all this.  [1; 5 with --vs]")
@click.option("-c", "--check", type=click.IntRange(0, 1), default=1, help="1: check the results of each size.  [1]")
@click.option("--shared", is_flag=True, help="Use arrays from mscomm.empty instead of ordinary ones.")
@click.option("--vs", default="", metavar="PEERS", help=_VS)
@click.option("--openmpi-prefix", type=click.Path(exists=True, path_type=Path), help="Where Open MPI is installed.")
@click.option("--mpich-prefix", type=click.Path(exists=True, path_type=Path), help="Where MPICH is installed.")
@click.option("--json", type=click.Path(dir_okay=False, path_type=Path), help="Write all samples to this file.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw a chart: .svg, .png or .pdf.")
def command(ranks: int | None, vs: str, **options: Any) -> None:
    plan = _plan(vs, **options)
    if bootstrap.find(os.environ) is None:
        check_peers(plan.peers, plan.prefixes)
        sys.exit(_start(ranks or 2))

    from mscomm.bench.ranks import run

    run(plan, ranks)


def _plan(vs: str, **options: Any) -> Any:
    """Check the options before any rank is started, and return them as a Plan.

    Raise ClickException if an option is invalid.
    """
    from mscomm.bench import plan
    from mscomm.bench.peers import PEERS, SINGLE
    from mscomm.bench.table import COLLECTIVES, OPS

    collective: str = options["collective"]
    if collective not in (*COLLECTIVES, plan.BUCKETS, plan.TUNE):
        known = ", ".join((*COLLECTIVES, plan.BUCKETS, plan.TUNE))
        raise click.UsageError(f"{collective!r} is not one of {known}")
    if options["op"] not in OPS:
        raise click.UsageError(f"-o {options['op']} is not one of {', '.join(OPS)}")
    peers = tuple(dict.fromkeys(name.strip() for name in vs.split(",") if name.strip()))
    if strangers := [name for name in peers if name not in PEERS]:
        raise click.UsageError(f"--vs {strangers[0]} is not one of {', '.join(PEERS)}")
    if peers and collective == plan.BUCKETS:
        raise click.UsageError("buckets compares two ways of mscomm; leave out --vs")
    if collective == plan.TUNE and (peers or options["plot"]):
        raise click.UsageError("tune compares the algorithms of mscomm, in tables; leave out --vs and --plot")
    try:
        plan.dtype_of(options["dtype"])
        step = options["stepbytes"]
        sizes = plan.sizes(
            plan.size_of(options["minbytes"]),
            plan.size_of(options["maxbytes"]),
            options["stepfactor"] or 4,
            plan.size_of(step) if step else None,
        )
    except (ValueError, ImportError) as error:
        raise click.UsageError(str(error)) from error
    rounds = options["rounds"] or (plan.ROUNDS_WITH_PEERS if peers else 1)
    if peers and rounds < plan.ROUNDS_WITH_PEERS:
        raise click.UsageError(
            f"--rounds {rounds}: a comparison with peers needs at least {plan.ROUNDS_WITH_PEERS} rounds"
        )
    _check_files(options["json"], options["plot"])
    given = {"openmpi": options["openmpi_prefix"], "mpich": options["mpich_prefix"]}
    prefixes = {name + end: prefix.absolute() for name, prefix in given.items() if prefix for end in ("", SINGLE)}
    chosen = {"sizes": sizes, "rounds": rounds, "check": bool(options["check"]), "peers": peers, "prefixes": prefixes}
    return plan.Plan(**{name: value for name, value in options.items() if name in plan.Plan._fields} | chosen)


def _check_files(json_file: Path | None, picture: Path | None) -> None:
    from mscomm.bench import plot

    for path in (json_file, picture):
        if path and not os.access(path.parent, os.W_OK):
            raise click.ClickException(f"{path}: there is no folder {path.parent}, or files cannot be created in it")
    if picture and picture.suffix not in plot.SUFFIXES:
        raise click.UsageError(f"--plot {picture}: the name must end in {', '.join(plot.SUFFIXES)}")
    if picture and plot.missing():
        raise click.ClickException(plot.MISSING)


def check_peers(names: Iterable[str], prefixes: Mapping[str, Path]) -> None:
    """Raise ClickException if a peer is not installed. prefixes: the installation folders of MPI peers, by name."""
    from mscomm.bench.peers import PEERS, SINGLE, Missing

    for name in names:
        try:
            PEERS[name].check(prefixes.get(name.removesuffix(SINGLE)))
        except Missing as error:
            raise click.ClickException(str(error)) from error


def _start(ranks: int) -> int:
    """Run this command again under `mscomm run -n RANKS`, and return the exit status.

    Remove the rank prefix from the lines that rank 0 prints.
    """
    line = [sys.executable, "-m", "mscomm", "run", "-n", str(ranks), "-m", "mscomm", *sys.argv[1:]]
    launcher = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, errors="replace")
    assert launcher.stdout
    signal.signal(signal.SIGTERM, lambda number, frame: launcher.send_signal(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal also sends Ctrl-C to the launcher, which ends the ranks
    with launcher.stdout:
        for text in launcher.stdout:
            click.echo(text.removeprefix("[0] "), nl=False)
    status = launcher.wait()
    return status if status >= 0 else 128 - status
