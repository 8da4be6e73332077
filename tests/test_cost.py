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

# CPython 3.11 with the present core takes 5,500 instructions, 1,500 of them in the core; the general way, for arrays
# that are not plain, takes 40,000. On a device, the short way takes 9,300, including the watching thread's, and the
# general way takes 112,000. Other builds of Python take more or less.
CALLS = (1000, 11_000)
BODIES = {
    "cpu": (
        12_000,
        """
import sys
import numpy as np, mscomm
mscomm.init()
x = np.ones(2, np.float32)
for _ in range(int(sys.argv[1])):
    mscomm.all_reduce(x, out=x)
""",
    ),
    "device": (
        20_000,
        """
import sys
import numpy as np, mscomm
import idle
idle.register()
mscomm.init("nccl")
x = idle.IdleArray((2,), np.dtype(np.float32))
for _ in range(int(sys.argv[1])):
    mscomm.all_reduce(x, out=x)
""",
    ),
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
        timeout=140,
    )
    assert done.returncode == 0, done.stderr
    counted = re.search(r"Collected : (\d+)", done.stderr)
    assert counted, done.stderr
    return int(counted[1])


@pytest.mark.long
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not here")
@pytest.mark.parametrize("where", BODIES)
def test_a_small_all_reduce_takes_few_instructions(tmp_path, where):
    most, body = BODIES[where]
    script = tmp_path / "script.py"
    script.write_text(body)
    few, many = (instructions(script, calls) for calls in CALLS)
    each = (many - few) / (CALLS[1] - CALLS[0])
    assert 1000 < each < most
