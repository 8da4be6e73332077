"""Starts real ranks for pytest-benchmark. This process is rank 0, and the other ranks make the same calls.

For each number of ranks, the other ranks are started only once, as workers of a scheduler, and this process joins them.
When the number of ranks changes, this process ends the job. Before each measurement, rank 0 broadcasts which call the
other ranks must make, and how many times (see follower.py).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from follower import ROWS, STOP, buffers_of, case_of

import mscomm
from mscomm.bench.contenders import mscomm_call

FOLLOWER = Path(__file__).with_name("follower.py")


class Ranks:
    """Runs a job of `size` ranks, in which this process is rank 0."""

    def __init__(self, size: int, log: Path) -> None:
        self.size = size
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        self._job = {"MS_WORKER_NUM": str(size), "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": port}
        with open(log, "wb") as self._log:
            self._processes = [self._start("-m", "mscomm", "sched")]
            self._processes += [self._start(str(FOLLOWER), rank=rank) for rank in range(1, size)]
        try:
            with pytest.MonkeyPatch.context() as patch:
                for name, value in {**self._job, "MS_ROLE": "MS_WORKER", "MS_NODE_ID": "0"}.items():
                    patch.setenv(name, value)
                mscomm.init()
        except BaseException:
            self.kill()
            raise

    def _start(self, *words: str, rank: int | None = None) -> subprocess.Popen[bytes]:
        role = {} if rank is None else {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(rank)}
        env = {**os.environ, "OMP_NUM_THREADS": "1", **self._job, **role}
        return subprocess.Popen([sys.executable, *words], env=env, stdout=self._log, stderr=self._log)

    def measure(self, benchmark: Any, name: str, size: int, shared: bool) -> None:
        """Time one collective of one size, and check the result of the last call."""
        case = case_of(name)
        rounds, iterations = (50, 20) if size <= 64 << 10 else (20, 1)
        # All ranks must make the same number of calls. pytest-benchmark's pedantic mode makes one warm-up round and
        # then `rounds` rounds. If a round has several calls, pytest-benchmark makes one more call at the end, to get a
        # result. If timing is disabled (--benchmark-disable), it makes only one call.
        calls = (1 + rounds) * iterations + (iterations > 1) if benchmark.enabled else 1
        mscomm.broadcast(np.array([ROWS.index(name), size, shared, calls]))
        buffers = buffers_of(case, size, shared)
        call = mscomm_call(case, buffers)
        mscomm.barrier()
        benchmark.extra_info.update(ranks=self.size, bytes=size, memory="shared" if shared else "private")
        benchmark.pedantic(call, rounds=rounds, iterations=iterations, warmup_rounds=1)
        assert mscomm.all_reduce(np.array([buffers.wrong()]))[0] == 0

    def end(self) -> None:
        mscomm.broadcast(np.array([STOP, 0, 0, 0]))
        mscomm.release()
        assert [process.wait(30) for process in self._processes] == [0] * len(self._processes)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


_now: Ranks | None = None


@pytest.fixture
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Return a job of `n` ranks, where `n` is a parameter of the test. Reuse the running job if it has `n` ranks."""
    global _now
    n = request.getfixturevalue("n")
    if _now is not None and _now.size != n:
        _now.end()
        _now = None
    if _now is None:
        log = tmp_path_factory.mktemp("ranks") / f"{n}.log"
        _now = Ranks(n, log)
    return _now


@pytest.fixture(scope="session", autouse=True)
def _end_of_ranks() -> Iterator[None]:
    yield
    if _now is not None:
        try:
            _now.end()
        finally:
            _now.kill()
