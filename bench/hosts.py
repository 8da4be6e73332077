"""Measures collectives between hosts. Compares mscomm with MPI, gloo, plain sockets and the wire's speed.

    sudo python bench/hosts.py results
    sudo python bench/hosts.py --links unshaped --layouts 2x1 --collectives all_reduce --sizes 8,4K --rounds 5 quick
    python bench/hosts.py --read results

The hosts are network namespaces of this machine (tests/hosts.py), so they share its CPUs and its memory bus. A link of
1 Gbit/s is limited to this rate in both directions, after a burst of 256 KiB. An unshaped link is as fast as the kernel
can make it. Links are not encrypted. There is one job for each link and layout (2x4 means 2 hosts with 4 ranks each).
In a job, all contenders take turns in rounds, and their results are checked once at each size. The contenders that do
not have their turn sleep. The calls use float32 sums and ordinary arrays, in place if the collective has such a form.
The size of a call is the number of bytes that one rank sends or receives in total, whichever is more: for all_gather,
it is the size of the result. The script writes all samples to the given folder, and prints tables in Markdown. A call's
time is the mean over the ranks or, in collectives with a root, that of the slowest rank: there, a rank that only sends
can return before the data has arrived. Short calls with a root still overlap, so their times say little about a single
call, and their share of the wire nothing. A time in the tables is the median over rounds of the median time in a round.
The interval of a ratio of two times comes from a paired bootstrap over rounds.

"MPI" is the faster of Open MPI and MPICH, which use TCP between hosts and shared memory on a host, and "gloo" is gloo
with the better of its two settings. "bare" (bare.cc) makes the same exchange over plain TCP sockets, with the fewest
system calls and copies. It exists for hosts with one rank each, for some of the collectives, and is a bound for them.

For each collective, the busiest host must send or receive some least number of bytes. "wire" is the time to move just
these: one rank of each host sends to the next host, and receives from the previous host at the same time. "share" is
the wire's time divided by mscomm's time. "moved" is the number of bytes that the busiest host has sent or received
through its interface, divided by the least number. If it is below 1, some bytes took another route, and the command
fails. In an all_reduce of S bytes over H hosts, this least number is 2 (H-1)/H S. In an all_to_all over hosts of r
ranks, it is r (H-1)/H S. In a broadcast or reduce it is S, and for the other collectives it is (H-1)/H S. Ratios to MPI
below 1 are in bold.

"latency" in --collectives is a series of its own: an all_reduce of 16 KiB, 96 calls in a round, and the 50th and 99th
percentile of all calls. mscomm also makes it with bfloat16. MPI cannot sum bfloat16, so it sums 4096 elements of
float32, and so does "bare". The goals, and the cells in which a goal is missed, follow the tables.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
from compare import GLOO, MPI, words_of
from hosts_report import BARE, COLLECTIVES, LAYOUTS, LINKS, SIZES, WIRE, read_all, report

from mscomm.bench.plan import ROUNDS_WITH_PEERS, size_of
from mscomm.cli.bench import check_peers

ROOT = Path(__file__).parents[1]
HOSTS = ROOT / "tests/hosts.py"
MPICH_PREFIX = ROOT / ".venv-mpich"  # `make test` installs it
CONTENDERS = ("openmpi", "mpich", *GLOO, BARE, WIRE)
INTERFACE = "net0"
PASSED_ON = ("MSCOMM_ALGO", "MSCOMM_TUNED")  # environment variables that are passed on to the ranks
COLLECTIVE_S = 900.0  # how long a job may take for each collective
LAST_LINES = 30


def _sizes(context: click.Context, parameter: click.Parameter, value: str) -> list[int]:
    try:
        return [size_of(word) for word in value.split(",")]
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--links", default=",".join(LINKS), callback=words_of(LINKS), help="Which.  [both]")
@click.option("--layouts", default=",".join(LAYOUTS), callback=words_of(LAYOUTS), help="Hosts x ranks.  [all]")
@click.option("--collectives", default=",".join(COLLECTIVES), callback=words_of(COLLECTIVES), help="Which.  [all]")
@click.option("--sizes", default=",".join(map(str, SIZES)), callback=_sizes, help="As 64K,1M.  [8 bytes to 16 MiB]")
@click.option(
    "--contenders",
    default=",".join(CONTENDERS),
    callback=words_of(dict.fromkeys((*CONTENDERS, *MPI))),
    help="Besides mscomm.  [MPI, gloo, bare, wire]",
)
@click.option("--iters", type=click.IntRange(1), help="Timed calls in a round.  [2 to 100: 60 ms]")
@click.option(
    "--rounds", type=click.IntRange(ROUNDS_WITH_PEERS), default=11, show_default=True, help="How many rounds."
)
@click.option("--openmpi-prefix", type=click.Path(exists=True, path_type=Path))
@click.option("--mpich-prefix", type=click.Path(exists=True, path_type=Path), help="[.venv-mpich]")
@click.option("--read", is_flag=True, help="Measure nothing: report on what the folder has.")
def main(
    folder: Path,
    links: list[str],
    layouts: list[str],
    collectives: list[str],
    sizes: list[int],
    contenders: list[str],
    iters: int | None,
    rounds: int,
    openmpi_prefix: Path | None,
    mpich_prefix: Path | None,
    read: bool,
) -> None:
    failed: list[str] = []
    if not read:
        if mpich_prefix is None and MPICH_PREFIX.exists():
            mpich_prefix = MPICH_PREFIX
        prefixes = {"openmpi": openmpi_prefix, "mpich": mpich_prefix}
        found = {name: path.absolute() for name, path in prefixes.items() if path}
        check_peers([name for name in contenders if name not in (BARE, WIRE)], found)
        folder.mkdir(parents=True, exist_ok=True)
        common: dict[str, Any] = {"collectives": collectives, "sizes": sizes, "contenders": contenders}
        common |= {"rounds": rounds, "iters": iters}
        common["variables"] = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        common["prefixes"] = {name: str(path) for name, path in found.items()}
        with tempfile.TemporaryDirectory(prefix="mscomm-hosts-") as scratch:
            common["bare"] = str(_compiled(Path(scratch))) if BARE in contenders else ""
            for link in links:
                for layout in layouts:
                    failed += _measure({"link": link, "layout": layout, **common}, folder, Path(scratch))
    all_series = read_all(folder)
    text = "\n".join(report(all_series))
    (folder / "report.md").write_text(text + "\n")
    click.echo(text)
    if failed:
        raise click.ClickException("failed, and has no figures here:\n" + "\n".join(failed))
    if any(series.wrong or list(series.beside_the_wire()) for series in all_series):
        raise click.ClickException("some results are wrong, or came by another way: see the head of the report")


def _compiled(folder: Path) -> Path:
    """Compile bare.cc for this machine's CPU. Return the shared library."""
    library = folder / "bare.so"
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    options = ["-std=c++20", "-O3", "-march=native", "-shared", "-fPIC", "-o", library]
    try:
        subprocess.run([*compiler, *options, Path(__file__).with_name("bare.cc")], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        advice = "Set CXX to a C++20 compiler, or leave bare out of --contenders"
        raise click.ClickException(f"bare: {error}. {advice}") from error
    return library


def _measure(plan: dict[str, Any], folder: Path, scratch: Path) -> list[str]:
    """Run one job on new hosts. The job writes a file for each collective to `folder`.

    Return an empty list or, if the job failed, a list with one message.
    """
    name = f"{plan['link']}-{plan['layout']}"
    for collective in plan["collectives"]:
        Path(folder, f"{name}-{collective}.json").unlink(missing_ok=True)  # removes the file of an earlier run
    began = time.monotonic()
    hosts_count, ranks = map(int, plan["layout"].split("x"))
    given = scratch / "plan.json"
    names = [f"host-{number}" for number in range(hosts_count)]
    into = str(folder.absolute()).replace("{", "{{").replace("}", "}}") + f"/{name}-{{}}.json"
    given.write_text(json.dumps({**plan, "hosts": names, "interface": INTERFACE, "into": into}))
    limit_s = COLLECTIVE_S * len(plan["collectives"])
    problem = _job(LINKS[plan["link"]], names, ranks, given, plan["variables"], limit_s)
    what = f"{plan['link']}, {plan['layout']}"
    click.echo(f"{what}: {problem or f'{time.monotonic() - began:.0f} s'}", err=True)
    return [f"{what}: {problem}"] if problem else []


def _job(rate: str, hosts: list[str], ranks: int, plan: Path, variables: dict[str, str], limit_s: float) -> str:
    """Run the job on new hosts, each of which is a node of `mscomm run`. Return what went wrong, or ""."""
    names = ("PATH", "PYTHONPATH", "HOME")  # Open MPI does not start without HOME
    env = {"OMP_NUM_THREADS": "1", **{name: os.environ[name] for name in names if name in os.environ}}
    command = [sys.executable, HOSTS, str(len(hosts)), "--rate", rate, "--"]
    command += [sys.executable, "-m", "mscomm", "run", "--permit-plain", "--nnodes", str(len(hosts))]
    command += ["--master-addr", hosts[0], "-n", str(ranks), "--node-rank", "{host}"]
    command += [Path(__file__).with_name("hosts_rank.py"), plan, "{agent}"]
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
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"it has not ended after {limit_s:g} s"
    finally:
        process.terminate()
        process.wait()
    last = "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])
    return f"the last lines of its log:\n{last}" if status else ""


if __name__ == "__main__":
    main()
