"""Functions that run commands. run() also kills processes that a command leaves behind. mscomm_run() starts a job with
`mscomm run`. invoke() runs a click command in this process. shared_library() compiles a library that a test loads.
marked() finds all processes of a job.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

import click
import psutil
import pytest
from click.testing import CliRunner, Result

MSCOMM = [sys.executable, "-m", "mscomm"]
MARK = "MSCOMM_SOAK_JOB"  # all processes of a job of a soak inherit this variable, whose value is the job's folder


def run(
    command: Sequence[str | Path],
    timeout_s: float = 120,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    *,
    stdin: TextIO | None = None,
    kill_rest: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Like subprocess.run(), but in a new session, which contains all processes that a shell script or mpirun starts.

    After timeout_s, run() kills all processes of the session. With kill_rest, it also kills them when the command ends.
    """
    with subprocess.Popen(
        command,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        cwd=cwd,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            kill(process.pid)
            raise
        if kill_rest:
            kill(process.pid)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def mscomm_run(
    *words: object, timeout_s: float = 120, env: Mapping[str, str] | None = None, stdin: TextIO | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `mscomm run WORDS` with one thread per rank. env: variables in addition to those of this process.

    mscomm_run() does not kill processes that a job leaves behind, because tests look for such processes.
    """
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    return run([*MSCOMM, "run", *map(str, words)], timeout_s, variables, stdin=stdin, kill_rest=False)


def invoke(command: click.Command, *words: object) -> Result:
    """Run a click command in this process. Return its output and exit code."""
    return CliRunner().invoke(command, [str(word) for word in words])


def shared_library(source: Path, made: Path, *flags: str) -> Path:
    """Compile a C++ file to the shared library `made`, and return `made`. Skip the test if there is no compiler."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler is installed")
    command = [compiler, "-std=c++17", "-D_GNU_SOURCE", *flags, "-shared", "-fPIC", source, "-o", made, "-ldl"]
    subprocess.run(command, check=True, timeout=300)
    return made


def clean_environment(**more: str) -> dict[str, str]:
    """Return this process's environment without the variables that launchers set or the examples read."""
    theirs = r"(MS|MSCOMM|OMPI|PMIX|PMI|PRTE|SLURM|PET|TORCHELASTIC)_(?!TEST|MCA_prte_tmpdir_base)"
    theirs += r"|(RANK|RANK_\w+|WORLD_SIZE|LOCAL_(RANK|WORLD_SIZE)|MASTER_\w+)$"
    theirs += "|(DATA_PATH|DEVICE_ID|MINDSPORE_HCCL_CONFIG_PATH)$"
    return {k: v for k, v in os.environ.items() if not re.match(theirs, k)} | more


def members(leader: int) -> list[psutil.Process]:
    """Return a session's running processes, in all its process groups: mpirun gives each rank its own process group."""
    return [process for process in psutil.process_iter() if _session(process) == leader and _lives(process)]


def kill(leader: int) -> None:
    for process in members(leader):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def marked(folder: Path) -> Iterator[int]:
    """Yield the process ids of a job's ranks, its hub, and its launcher, which have this folder as their MARK."""
    mark = f"{MARK}={folder}".encode()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                environ = Path(entry.path, "environ").read_bytes()
            except OSError:  # the process has ended, or belongs to another user
                continue
            if mark in environ.split(b"\0"):
                yield int(entry.name)


def free_port() -> int:
    """Return a free port for a process that binds it seconds later, after its imports.

    If possible, the port is outside the ephemeral range, because the kernel could give a port in that range to another
    test before the process binds it.
    """
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    every = range(10000, 65536)
    numbers = [number for number in every if not low <= number <= high] or every
    for number in random.SystemRandom().sample(numbers, len(numbers)):
        with socket.socket() as sock:
            try:
                sock.bind(("", number))
            except OSError:
                continue
            return number
    raise RuntimeError(f"none of {len(numbers)} ports is free; net.ipv4.ip_local_port_range is {low} to {high}")


def _session(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return -1


def _lives(process: psutil.Process) -> bool:
    """Return whether the process is still running. A zombie is not: it has ended, but has not been reaped yet."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
