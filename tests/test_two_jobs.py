"""Two jobs that use the same port: their ranks never form one job, and each process says what is wrong."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from control import KEY, Job, eventually, greeted, raised, soon

from mscomm import errors
from mscomm.bootstrap import rendezvous
from mscomm.cluster.frames import Frames
from mscomm.cluster.hello import LAUNCHER
from mscomm.cluster.protection import Protection

NAMES = """
import os, sys, time, mscomm
mscomm.init()
while not os.path.exists(os.environ["GO"]):
    time.sleep(0.01)
print(mscomm.all_gather_object(sys.argv[1]))
"""


class Jobs:
    """start(job, role, **env) starts one process of an MS_* job with two workers. All jobs use one loopback port."""

    def __init__(self, port: int, folder: Path) -> None:
        self._env = {"MS_WORKER_NUM": "2", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": str(port)}
        self._env |= {"TMPDIR": str(folder), "MS_TOPO_TIMEOUT": "60", "OMP_NUM_THREADS": "1"}
        # After init(), a worker waits until the path GO exists. "/" always exists, so by default no worker waits.
        self._env["GO"] = "/"
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, job: str, role: str, *command: str, **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *(command or ("-c", NAMES, job))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **self._env, "MS_ROLE": f"MS_{role}", **env},
        )
        self.processes.append(process)
        return process


@pytest.fixture
def jobs(port: int, tmp_path: Path) -> Iterator[Jobs]:
    jobs = Jobs(port, tmp_path)
    yield jobs
    for process in jobs.processes:
        process.kill()
        process.communicate()


def test_workers_of_two_jobs_never_make_one(jobs: Jobs, tmp_path: Path) -> None:
    """The workers that arrive first fill the job of the first scheduler. The second scheduler finds the port taken."""
    first = jobs.start("A", "SCHED")
    assert first.stdout and "waiting" in first.stdout.readline()
    workers = [jobs.start(job, "WORKER", GO=str(tmp_path / "go")) for job in "ABAB"]
    second = jobs.start("B", "SCHED")
    _, refusal = second.communicate(timeout=60)
    (tmp_path / "go").touch()
    assert second.returncode == 1
    assert f"the port is taken by pid {first.pid} (" in refusal and "another MS_SCHED_PORT" in refusal
    why = f"by pid {second.pid} ("
    for worker in workers:
        out, err = worker.communicate(timeout=60)
        assert (worker.returncode, out) == (1, "")
        assert (why in err and "its own port or MSCOMM_JOB_ID" in err) or "already has its 2 workers" in err, err
    out, _ = first.communicate(timeout=60)
    assert first.returncode == 1 and "two jobs were started at 127.0.0.1:" in out and why in out


def test_a_scheduler_at_a_wildcard_address_learns_of_another_one(jobs: Jobs) -> None:
    """A connection to 0.0.0.0 has the peer address 127.0.0.1. The second scheduler must still use the key of 0.0.0.0,
    because both schedulers were given this address.
    """
    command = ("-m", "mscomm", "sched", "--permit-plain")
    first = jobs.start("A", "SCHED", *command, MS_SCHED_HOST="0.0.0.0")
    assert first.stdout and "waiting" in first.stdout.readline()
    worker = jobs.start("A", "WORKER")
    second = jobs.start("B", "SCHED", *command, MS_SCHED_HOST="0.0.0.0")
    _, refusal = second.communicate(timeout=60)
    assert second.returncode == 1 and f"the port is taken by pid {first.pid} (" in refusal
    out, _ = first.communicate(timeout=60)
    assert "two jobs were started at 0.0.0.0:" in out and f"by pid {second.pid} (" in out, out
    assert worker.wait(60) == 1


def test_a_job_with_an_id_takes_no_worker_of_another(jobs: Jobs) -> None:
    first = jobs.start("A", "SCHED", MSCOMM_JOB_ID="A")
    assert first.stdout and "waiting" in first.stdout.readline()
    others = [jobs.start("B", role, MSCOMM_JOB_ID="B") for role in ("SCHED", "WORKER")]
    nameless = jobs.start("C", "WORKER")
    for process in (*others, nameless):
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert ("the port is taken by" in err) == (process is others[0])
        assert ("it serves another job. MSCOMM_JOB_ID must have the same text" in err) == (process is not others[0])
    mine = [jobs.start("A", "WORKER", MSCOMM_JOB_ID="A") for _ in range(2)]
    for process in mine:
        assert process.communicate(timeout=60)[0] == "['A', 'A']\n"
    first.communicate(timeout=60)
    assert first.returncode == 0


def test_a_job_that_has_begun_is_not_disturbed_by_a_later_scheduler() -> None:
    with Job(2, ranks_known=False, tcp=True) as job:
        (one, _), (other, _) = job.joined(["0", "1"])
        assert job.listener
        with contextlib.closing(greeted(job.listener.getsockname(), purpose=LAUNCHER)) as stream:
            Frames(stream).send({"t": "rival", "who": "pid 7", "seconds": 0.0}, soon())
        for member in (one, other):
            member.leave(0)
        assert job.settled().ok
        assert any("pid 7 wanted to serve another job at this port" in line for line in job.log)


@pytest.mark.parametrize(("age_s", "waited_s", "goes_on"), [(0.5, 0.0, True), (900.0, 0.0, True), (900.0, 60.0, False)])
def test_a_process_that_is_older_than_the_job_does_not_end_it(
    age_s: float, waited_s: float, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook, for example, was started long ago, and its workers were started just before its scheduler. The job
    has begun 10 s ago. If the process has waited for the port for longer than that, its workers may have joined the
    job.
    """
    with Job(2, ranks_known=False, tcp=True) as job:
        members = job.joined(["0", "1"])
        for link in job.hub._roster:
            link.since -= 10.0
        assert job.listener
        host, port = job.listener.getsockname()
        monkeypatch.setattr(psutil.Process, "create_time", lambda self: time.time() - age_s)
        rendezvous.contend(host, port, lambda _: KEY, {}, Protection(permit_plain=True), waited_s)
        if goes_on:
            for member, _ in members:
                member.leave(0)
            assert job.settled().ok
        else:
            eventually(lambda: all("two jobs were started" in str(group.aborts[:1]) for _, group in members))
        assert any("wanted to serve another job at this port" in line for line in job.log)


def test_a_surplus_worker_reads_that_another_job_may_have_the_port() -> None:
    with Job(1, ranks_known=False, tcp=True) as job:
        job.joined(["0"])
        error = raised(errors.Error, job.member().join, {"size": 1}, soon())
        assert "already has its 1 workers" in str(error) and "Give each job a port of its own" in str(error)


def test_a_process_is_named_in_one_line() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time\n\ntime.sleep(60)"]) as process:
        try:
            eventually(psutil.Process(process.pid).cmdline)  # the command line is empty for a moment after exec
            assert rendezvous._words_of(psutil.Process(process.pid)).endswith("-c import time time.sleep(60))")
        finally:
            process.kill()
