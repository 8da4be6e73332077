"""Helpers for the tests of `mscomm bench`: run it on real ranks, and find the installed peers (other libraries)."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from sessions import clean_environment, run

from mscomm.bench import peers, table

MOVING = tuple(row for row in table.COLLECTIVES.values() if table.moves_data(row))
each_moving = pytest.mark.parametrize("row", MOVING, ids=lambda row: row.name)
matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="no matplotlib: pip install matplotlib")


def measure(*words: object, launcher: tuple[object, ...] = (), **env: str) -> subprocess.CompletedProcess[str]:
    command = [str(word) for word in (*launcher, sys.executable, "-m", "mscomm", "bench", *words)]
    return run(command, 240, clean_environment() | env)


def rows_of(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


def mpich_prefix() -> list[str]:
    folder = os.environ.get("MSCOMM_TEST_MPICH")
    return ["--mpich-prefix", folder] if folder else []


def installed(peer: str) -> list[str]:
    """Return the `mscomm bench` options that this peer needs. Skip the test if the peer is not installed."""
    peer = peer.removesuffix(peers.SINGLE)
    if peer in ("private", "memory"):
        return []
    if peer in peers.GLOO_INTERFACES:
        if find_spec("torch") is None:
            pytest.skip("no torch in this environment")
        return []
    if peer == "mpich" and not mpich_prefix():
        pytest.skip("MSCOMM_TEST_MPICH names no environment with the mpich wheel; make test-python does")
    try:
        prefix = mpich_prefix()[1:] if peer == "mpich" else []
        peers.find_mpi(peer, Path(prefix[0]) if prefix else None)
    except peers.Missing as error:
        pytest.skip(str(error))
    return mpich_prefix() if peer == "mpich" else []
