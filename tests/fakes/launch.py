"""Starts the ranks of a scenario as processes, for the tests of the stand-ins.

The ranks are forked from a process that has already imported the scenarios: python -m fakes.launch MODULE.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
HANDLES = ("streams", "events", "graphs", "allocations", "comms", "devices_set")
LIMIT_S = 100  # only bounds a hang


class Warm:
    """The process that forks the ranks. It reads a JSON list of orders from a line of its stdin, and writes a line with
    the exit codes of the ranks. It kills ranks that run for LIMIT_S.
    """

    def __init__(self, module: str) -> None:
        environ = {**os.environ, "PYTHONPATH": str(TESTS), "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "fakes.launch", module]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1, env=environ)

    def run(self, orders: list[dict]) -> list[int]:
        """Let the ranks run. Return their exit codes."""
        self.process.stdin.write(json.dumps(orders) + "\n")
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


@contextlib.contextmanager
def warm(module: str) -> Iterator[Warm]:
    process = Warm(module)
    try:
        yield process
    finally:
        process.close()


def launch(
    warm: Warm,
    scenario: str,
    size: int,
    arguments: dict,
    folder: Path,
    *,
    env: dict | None = None,
    per_rank=lambda rank: {},
    arguments_of=lambda rank: {},
    only=None,
    codes: dict | None = None,
    clean: bool = True,
) -> dict:
    """Run the ranks. Return a dict with the value of each rank.

    per_rank, arguments_of: return the variables and the arguments of a rank, in addition to those of all ranks.

    codes: the expected exit status of each rank that should not end with 0. The value of such a rank is None.

    clean: whether to check that no handle, violation or file is left. If false, return pairs of value and counters.
    """
    ranks, orders, values = list(only if only is not None else range(size)), [], {}
    for rank in ranks:
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("FAKE_", "NCCL_", "HCCL_"))}
        environ |= {"FAKE_DIR": str(folder), **(env or {}), **per_rank(rank)}
        words = [scenario, str(rank), str(size), json.dumps({**arguments, **arguments_of(rank)})]
        orders.append({"env": environ, "words": words, "output": str(folder / f"rank_{rank}")})
    for rank, code in zip(ranks, warm.run(orders), strict=True):
        expected = (codes or {}).get(rank, 0)
        err = (folder / f"rank_{rank}.err").read_text(errors="replace")
        assert code == expected, f"rank {rank} ended with {code}\n{err[-3000:]}"
        if expected:
            values[rank] = None
            continue
        result = json.loads((folder / f"rank_{rank}.out").read_text().splitlines()[-1])
        counters = result["counters"]
        left = {name: n for name, n in counters.items() if name in HANDLES and n}
        if clean:
            assert not left and not counters["violations"], f"rank {rank}: {counters}"
        values[rank] = result["value"] if clean else (result["value"], counters)
    if clean:
        assert not list(folder.glob("mscomm-fake-*"))
    return values


def _fork(order: dict) -> int:
    """Return the id of the new process, and 0 in the new process."""
    pid = os.fork()
    if not pid:
        os.environ.clear()
        os.environ.update(order["env"])
        for descriptor, end in ((1, "out"), (2, "err")):
            file = os.open(f"{order['output']}.{end}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(file, descriptor)
            os.close(file)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.argv[1:] = order["words"]
    return pid


def _code(pid: int, until: float) -> int:
    """Wait for a child to end, and kill it if it still runs at this time. Return its exit code."""
    ended = os.pidfd_open(pid)
    if not select.select([ended], [], [], max(0.0, until - time.monotonic()))[0]:
        os.kill(pid, signal.SIGKILL)
    os.close(ended)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    module = importlib.import_module(sys.argv[1])
    for line in sys.stdin:
        pids = []
        for order in json.loads(line):
            pids.append(_fork(order))
            if not pids[-1]:
                return module.main()
        until = time.monotonic() + LIMIT_S
        print(json.dumps([_code(pid, until) for pid in pids]), flush=True)
    return None


if __name__ == "__main__":
    main()
