"""The cost of a call in instructions, which callgrind counts. Unlike a time, it is the same on a busy machine.

On a device, the test measures what it costs to enqueue a call. The driver and NCCL are replaced by stand-ins that do
nothing (bench/idle.py).
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
# For each case: the preparation, the call, and the largest number of instructions that one call may take. This limit is
# 10 % above what CPython 3.11 needs, because other builds of Python may need more.
CASES = {
    "numpy": (ON_THE_CPU, "mscomm.all_reduce(x, out=x)", 4_000),
    "numpy, timeout": (ON_THE_CPU, "mscomm.all_reduce(x, out=x, timeout=60)", 4_300),
    "numpy, async_op": (ON_THE_CPU, "mscomm.all_reduce(x, out=x, async_op=True).wait()", 12_100),
    "numpy, strided": (STRIDED, "mscomm.all_reduce(x)", 7_100),
    # About 1,100 of these instructions ask PyTorch for the storage's offset (lacks_storage in src/dlpack.cc). Valgrind
    # gives out low addresses, at which the core asks; usually it does not.
    "torch": (TENSOR, "mscomm.all_reduce(x, out=x)", 10_400),
    "device": (ON_A_DEVICE, "mscomm.all_reduce(x, out=x)", 20_000),
}


def idle_library() -> str:
    command = [sys.executable, str(BENCH / "idle.py")]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def instructions(script: Path, calls: int) -> int:
    """Return the number of instructions of a Python process that is a job of its own and makes this many calls."""
    tool = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={script.parent / 'callgrind.out'}"]
    done = subprocess.run(
        [*tool, sys.executable, str(script), str(calls)],
        # Each start must execute the same instructions. So the hash seed is fixed, and OpenBLAS starts no threads,
        # which would spin while they wait.
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
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
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
