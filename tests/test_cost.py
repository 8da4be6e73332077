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
from sessions import shared_library

BENCH = Path(__file__).parents[1] / "bench"
HEADER = Path("/usr/include/valgrind/callgrind.h")  # a part of Debian's package valgrind

# Functions that tell callgrind when to count. When it does not count, torch is imported in seconds, not in a minute.
COUNTING = """
#include <valgrind/callgrind.h>
extern "C" void begin() { CALLGRIND_START_INSTRUMENTATION; }
extern "C" void end() { CALLGRIND_STOP_INSTRUMENTATION; }
"""
CALLS = 5000
PROGRAM = """
import ctypes, sys
import numpy as np, mscomm
{}
counting = ctypes.CDLL(sys.argv[1])

def calls(count):
    for _ in range(count):
        {}

calls(1000)  # the first calls cost more
counting.begin()
calls(int(sys.argv[2]))
counting.end()
"""
ON_THE_CPU = "mscomm.init(); x = np.ones(2, np.float32)"
ON_A_DEVICE = "import idle; idle.register(); mscomm.init('nccl'); x = idle.IdleArray((2,), np.dtype(np.float32))"
STRIDED = "mscomm.init(); x = np.ones(200, np.float32)[::2]"
TENSOR = "import torch; mscomm.init(); x = torch.ones(2)"
# For each case: the preparation, the call, and the largest number of instructions that one call may take. This limit is
# 10 % above what CPython 3.11 needs, because other builds of Python may need more.
CASES = {
    "numpy": (ON_THE_CPU, "mscomm.all_reduce(x, out=x)", 4_400),
    "numpy, timeout": (ON_THE_CPU, "mscomm.all_reduce(x, out=x, timeout=60)", 4_600),
    "numpy, async_op": (ON_THE_CPU, "mscomm.all_reduce(x, out=x, async_op=True).wait()", 11_600),
    "numpy, strided": (STRIDED, "mscomm.all_reduce(x)", 7_500),
    # About 1,100 of these instructions ask PyTorch for the storage's offset (lacks_storage in src/dlpack.cc). Valgrind
    # gives out low addresses, at which the core asks; usually it does not.
    "torch": (TENSOR, "mscomm.all_reduce(x, out=x)", 11_400),
    "device": (ON_A_DEVICE, "mscomm.all_reduce(x, out=x)", 9_100),
}


def idle_library() -> str:
    command = [sys.executable, str(BENCH / "idle.py")]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def instructions(script: Path, counting: Path) -> int:
    """Return the number of instructions of CALLS calls in a Python process that is a job of its own."""
    tool = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={script.parent / 'out'}"]
    done = subprocess.run(
        [*tool, sys.executable, str(script), str(counting), str(CALLS)],
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
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    counted = re.search(r"Collected : (\d+)", done.stderr)
    assert counted, done.stderr
    return int(counted[1])


@pytest.mark.long
@pytest.mark.timeout(700)
@pytest.mark.skipif(shutil.which("valgrind") is None or not HEADER.exists(), reason="valgrind is not installed")
@pytest.mark.parametrize("case", CASES)
def test_a_small_all_reduce_takes_few_instructions(tmp_path, case):
    ready, call, most = CASES[case]
    if case == "torch":
        pytest.importorskip("torch")
    source, counting, script = (tmp_path / name for name in ("counting.cc", "counting.so", "script.py"))
    source.write_text(COUNTING)
    shared_library(source, counting)
    script.write_text(PROGRAM.format(ready, call))
    each = instructions(script, counting) / CALLS
    if each >= most:  # on a busy machine, a thread that watches the calls looks more often
        each = min(each, instructions(script, counting) / CALLS)
    print(f"{case}: {each:.0f} instructions")
    assert 1000 < each < most
