"""Runs jobs of tests/soak.py in a row, each with one fault: 6 jobs, and 100 more in `make test-all`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parent / "soak.py"


def soak(faults: int) -> None:
    seed = os.environ.get("MSCOMM_SOAK_SEED", str(int.from_bytes(os.urandom(3), "little")))
    done = subprocess.run(
        [sys.executable, str(SOAK), "--faults", str(faults), "--seed", seed], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)


@pytest.mark.timeout(1500)
@pytest.mark.long
def test_a_hundred_faults_in_a_row() -> None:
    soak(100)


def test_a_few_faults_in_a_row() -> None:
    soak(6)
