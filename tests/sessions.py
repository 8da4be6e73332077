"""run(): runs a command together with everything that it starts; a shell script or mpirun starts several processes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil


def run(
    command: Sequence[str | Path], timeout_s: float, env: Mapping[str, str], cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Like subprocess.run(), in a new session. Processes left in it at the end, or after timeout_s, are killed."""
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
    """The living processes of a session, from all its process groups: mpirun gives each rank its own group."""
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
    """Whether the process has not ended. A zombie has: init may take a while to reap it."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
