"""What a small call costs, in instructions as callgrind counts them: no clock, so the same on a busy machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# CPython 3.11 and the core as they are take 5,500, of which the core has 1,500; the general way, of arrays that are not
# plain, takes 40,000. Other builds of Python take more or less.
MOST = 12_000
CALLS = (1000, 11_000)

BODY = """
import sys
import numpy as np, mscomm
mscomm.init()
x = np.ones(2, np.float32)
for _ in range(int(sys.argv[1])):
    mscomm.all_reduce(x, out=x)
"""


def instructions(script: Path, calls: int) -> int:
    """Of a job of one that makes so many calls, from the start of Python to its end."""
    tool = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={script.parent / 'callgrind.out'}"]
    done = subprocess.run(
        [*tool, sys.executable, str(script), str(calls)],
        # So that two starts are alike; the threads of OpenBLAS would count while they wait for work.
        env={**os.environ, "PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"},
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
def test_a_small_all_reduce_takes_few_instructions(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(BODY)
    few, many = (instructions(script, calls) for calls in CALLS)
    each = (many - few) / (CALLS[1] - CALLS[0])
    assert 1000 < each < MOST
