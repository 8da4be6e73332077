"""Starts the ranks of a scenario as processes, for the tests of the stand-ins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
HANDLES = ("streams", "events", "graphs", "allocations", "comms", "devices_set")


def launch(
    module: str,
    scenario: str,
    size: int,
    arguments: dict,
    folder: Path,
    *,
    env: dict | None = None,
    per_rank=lambda rank: {},
    only=None,
    codes: dict | None = None,
    clean: bool = True,
) -> dict:
    """Run the ranks. Return a dict with the value of each rank.

    codes: the expected exit status of each rank that should not end with 0. The value of such a rank is None.

    clean: whether to check that no handle, violation or file is left. If false, return pairs of value and counters.
    """
    started, values = {}, {}
    try:
        for rank in only if only is not None else range(size):
            environ = {k: v for k, v in os.environ.items() if not k.startswith(("FAKE_", "NCCL_", "HCCL_"))}
            environ |= {"FAKE_DIR": str(folder), "PYTHONPATH": str(TESTS), "OPENBLAS_NUM_THREADS": "1"}
            environ |= (env or {}) | per_rank(rank)
            command = [sys.executable, "-m", module, scenario, str(rank), str(size), json.dumps(arguments)]
            started[rank] = subprocess.Popen(
                command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        for rank, process in started.items():
            out, err = process.communicate(timeout=100)
            expected = (codes or {}).get(rank, 0)
            assert process.returncode == expected, f"rank {rank} ended with {process.returncode}\n{err[-3000:]}"
            if expected:
                values[rank] = None
                continue
            result = json.loads(out.splitlines()[-1])
            counters = result["counters"]
            left = {name: n for name, n in counters.items() if name in HANDLES and n}
            if clean:
                assert not left and not counters["violations"], f"rank {rank}: {counters}"
            values[rank] = result["value"] if clean else (result["value"], counters)
    finally:
        for process in started.values():
            process.kill()
            process.communicate()
    if clean:
        assert not list(folder.glob("mscomm-fake-*"))
    return values
