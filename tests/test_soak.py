"""Runs jobs of tests/soak.py and trials of tests/soak_recovery.py in a row, and more of both in `make test-all`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def soak(program: str, option: str, number: int) -> None:
    seed = os.environ.get("MSCOMM_SOAK_SEED", str(int.from_bytes(os.urandom(3), "little")))
    command = [sys.executable, str(HERE / program), option, str(number), "--seed", seed]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)


@pytest.mark.timeout(1500)
@pytest.mark.long
def test_a_hundred_faults_in_a_row() -> None:
    soak("soak.py", "--faults", 100)


def test_a_few_faults_in_a_row() -> None:
    soak("soak.py", "--faults", 3)


@pytest.mark.timeout(900)
@pytest.mark.long
def test_twenty_trainings_that_lose_processes() -> None:
    soak("soak_recovery.py", "--trials", 20)


def test_a_training_that_loses_processes() -> None:
    soak("soak_recovery.py", "--trials", 1)
