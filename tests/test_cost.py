"""The cost of a call in instructions, counted by callgrind: without a clock, it is the same on a busy machine.

On a device, it is the cost to enqueue a call, with a driver and an NCCL that do nothing (bench/idle.py).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"

CALLS = (1000, 6000)
PROGRAM = """
import sys
import numpy as np, mscomm
{}

def calls():
    for _ in range(int(sys.argv[1])):
        {}

calls()
"""
ON_THE_CPU = "mscomm.init(); x = np.ones(2, np.float32)"
ON_A_DEVICE = "import idle; idle.register(); mscomm.init('nccl'); x = idle.IdleArray((2,), np.dtype(np.float32))"
STRIDED = "mscomm.init(); x = np.ones(200, np.float32)[::2]"
TENSOR = "import torch; mscomm.init(); x = torch.ones(2)"
# What is made ready, the call, and how many instructions one call may take: a tenth more than CPython 3.11 takes with
# the present core, because other builds of Python take more or less.
CASES = {
    "numpy": (ON_THE_CPU, "mscomm.all_reduce(x, out=x)", 6_000),
    "numpy, timeout": (ON_THE_CPU, "mscomm.all_reduce(x, out=x, timeout=60)", 6_100),
    "numpy, async_op": (ON_THE_CPU, "mscomm.all_reduce(x, out=x, async_op=True).wait()", 12_900),
    "numpy, strided": (STRIDED, "mscomm.all_reduce(x)", 9_200),
    "torch": (TENSOR, "mscomm.all_reduce(x, out=x)", 9_900),
    "device": (ON_A_DEVICE, "mscomm.all_reduce(x, out=x)", 20_000),
}


def idle_library() -> str:
    command = [sys.executable, str(BENCH / "idle.py")]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def instructions(script: Path, calls: int) -> int:
    """The instructions of a job of one that makes so many calls, from the start of Python to its end."""
    tool = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={script.parent / 'callgrind.out'}"]
    done = subprocess.run(
        [*tool, sys.executable, str(script), str(calls)],
        # Make two starts alike: OpenBLAS's threads would add instructions while they wait for work.
        env={
            **os.environ,
            "PYTHONHASHSEED": "0",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONPATH": str(BENCH),
            **dict.fromkeys(("MSCOMM_CUDA_LIBRARY", "MSCOMM_NCCL_LIBRARY"), idle_library()),
        },
        capture_output=True,
        text=True,
        timeout=600,  # PyTorch takes a minute to start under valgrind
    )
    assert done.returncode == 0, done.stderr
    counted = re.search(r"Collected : (\d+)", done.stderr)
    assert counted, done.stderr
    return int(counted[1])


@pytest.mark.long
@pytest.mark.timeout(1300)
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not here")
@pytest.mark.parametrize("case", CASES)
def test_a_small_all_reduce_takes_few_instructions(tmp_path, case):
    ready, call, most = CASES[case]
    if case == "torch":
        pytest.importorskip("torch")
    script = tmp_path / "script.py"
    script.write_text(PROGRAM.format(ready, call))
    few, many = (instructions(script, calls) for calls in CALLS)
    each = (many - few) / (CALLS[1] - CALLS[0])
    print(f"{case}: {each:.0f} instructions")
    assert 1000 < each < most
