"""run(): a command with all that it starts, which for a shell script or mpirun is more than one process."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil


def run(
    command: Sequence[str | Path], timeout_s: float, env: Mapping[str, str], cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """As subprocess.run(), in a session of its own; what is left of that at the end or after timeout_s is killed."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        cwd=cwd,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        finally:
            kill(process.pid)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def members(leader: int) -> list[psutil.Process]:
    """The living processes of a session, of all its process groups: mpirun gives each rank one of its own."""
    return [process for process in psutil.process_iter() if _session(process) == leader and _lives(process)]


def kill(leader: int) -> None:
    for process in members(leader):
        process.kill()


def _session(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return -1


def _lives(process: psutil.Process) -> bool:
    """Whether it has not ended; init may take its time to hear of that."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
