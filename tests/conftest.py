"""Fixtures that several test files use."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import numpy as np
import pytest

import mscomm
from mscomm.job import resolve


@pytest.fixture(scope="module", autouse=True)
def no_driver():
    """Check that no test has opened the stand-in of a driver in pytest's own process. It would stay there, and init()
    of another test would use it.
    """
    yield
    opened = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/mscomm-fakes-" in line}
    drivers = [path for path in opened if Path(path).name.startswith(("libcuda.", "libascendcl."))]
    assert not drivers, f"a test of this file, or of one before it, has opened {drivers}: use a new process"


@pytest.fixture
def tmpdir_env(tmp_path, monkeypatch):
    """Make tmp_path the folder for temporary files in this process and its children."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


@pytest.fixture
def port() -> int:
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


@pytest.fixture
def alone():
    """Join a job with one rank. Yield its world group."""
    mscomm.init()
    yield resolve(None)
    mscomm.release()


@pytest.fixture
def unharmed(alone):
    """Join a job with one rank. Yield its world group. After the test, check that the test used up no call number and
    that a call still works.
    """
    before = alone.core.where()
    yield alone
    assert alone.core.where() == before
    assert mscomm.all_reduce(np.float32([3])) == 3
    assert alone.core.where()[0] == before[0] + 1
