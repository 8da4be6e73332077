"""In each of these environments, a job runs, or fails soon with one line that says why.

The environments are those of batch systems, containers and careless administrators: small limits, folders that are
full or missing, system calls that are refused, and networks without the usual addresses.
"""

from __future__ import annotations

import os
import platform
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import rotated
from sessions import clean_environment, free_port

HERE = Path(__file__).parent
LONGEST_S = 60
JOIN_S = 20  # how long a rank waits for one that has failed before it could join
NO_MEMORY = "Cannot allocate memory|[Uu]nable to allocate|can't start new thread|MemoryError"

SCRIPT = """
import os, sys, time, numpy as np, mscomm
mscomm.init()
rank, size = mscomm.get_rank(), mscomm.get_group_size()
for empty in (np.empty, mscomm.empty):
    x = empty(1 << 20, np.float32)
    x[:] = rank + 1
    assert mscomm.all_reduce(x)[0] == size * (size + 1) / 2
pair = mscomm.create_group("pair", list(range(size)))
mscomm.sendrecv(np.ones(1 << 18), (rank + 1) % size, np.empty(1 << 18), (rank - 1) % size, group=pair)
until = time.monotonic() + float(os.environ.get("LASTS_S", 0))
while mscomm.all_reduce(np.array([time.monotonic() < until]), "max")[0]:
    pass
mscomm.release()
sys.stdout.write("fine\\n")
"""

# Starts both ranks with the variables that torchrun sets.
BY_VARIABLES = 'RANK=1 "$0" "$1" & RANK=0 "$0" "$1"; code=$?; wait $! && exit $code'


@dataclass
class Place:
    """before: shell commands that change the environment. within: the program that runs the shell. fails: what the
    output says if the job cannot run here; None if the job runs."""

    before: str = ":"
    within: tuple[str, ...] = ()
    fails: str | None = None
    launchers: tuple[str, ...] = ("mscomm run", "variables")


MOUNTS, NETWORK = ("unshare", "--mount"), ("unshare", "--net")
REFUSING = (sys.executable, str(HERE / "refusing.py"))

PLACES = {
    # resource limits
    "no descriptors": Place("ulimit -n 16", fails="Too many open files", launchers=("mscomm run",)),
    "few descriptors": Place("ulimit -n 32"),
    "little address space": Place("ulimit -v 600000", fails=NO_MEMORY),
    "some address space": Place("ulimit -v 1500000"),
    "little data": Place("ulimit -d 300000"),
    "a small stack": Place("ulimit -s 128"),
    "small files": Place("ulimit -f 100000"),
    "no locked memory": Place("ulimit -l 0"),
    "core dumps": Place("ulimit -c unlimited"),
    # folders
    "a full /dev/shm": Place("mount -t tmpfs -o size=4k x /dev/shm; head -c 4k /dev/zero >/dev/shm/x", MOUNTS),
    "a read-only /dev/shm": Place("mount -t tmpfs -o ro x /dev/shm", MOUNTS),
    "no /dev/shm": Place(
        "mount -t tmpfs x /mnt; cp -a /dev/null /dev/zero /dev/random /dev/urandom /mnt; mount --move /mnt /dev", MOUNTS
    ),
    "no /proc/sys": Place("mount -t tmpfs x /proc/sys", MOUNTS),
    "no /sys": Place("mount -t tmpfs x /sys", MOUNTS),
    "no HOME": Place("unset HOME"),
    # users, processes, clocks
    "a user without a name": Place(within=("unshare", "--user", "--map-user=12345")),
    "process 1 of a container": Place(within=("unshare", "--pid", "--fork", "--mount-proc")),
    "another monotonic clock": Place(within=("unshare", "--time", "--monotonic", "1000000")),
    # system calls: the numbers are those of x86-64
    "no process_vm_readv": Place(within=(*REFUSING, "310")),
    "no memfd_create": Place(within=(*REFUSING, "319")),
    "no userfaultfd": Place(within=(*REFUSING, "323")),
    "no pidfds": Place(within=(*REFUSING, "424,434,438")),
    "no new mounts": Place(within=(*REFUSING, "430,431,432,433")),
    # the network
    "no loopback interface": Place(within=NETWORK),
    "no IPv4": Place("ip link set lo up; ip address del 127.0.0.1/8 dev lo", NETWORK),
    "an unknown host name": Place("hostname nowhere.invalid", ("unshare", "--uts")),
}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    made = tmp_path / "script.py"
    made.write_text(SCRIPT)
    return made


def _command(
    launcher: str, script: Path, before: str, within: tuple[str, ...] = ()
) -> tuple[list[str], dict[str, str]]:
    """Return a command that starts two ranks after the shell commands `before`, and its environment."""
    if launcher == "mscomm run":
        rest, words, more = 'exec "$0" "$@"', [sys.executable, "-m", "mscomm", "run", "-n", "2", str(script)], {}
    else:
        rest, words = BY_VARIABLES, [sys.executable, str(script)]
        more = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    # A NumPy whose OpenBLAS starts many threads needs more memory than some of the places have.
    env = clean_environment(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MS_TOPO_TIMEOUT=str(JOIN_S), **more)
    return [*within, "sh", "-c", f"{before}; {rest}", *words], env


@pytest.mark.parametrize("launcher", ["mscomm run", "variables"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.long
def test_a_job_runs_or_says_why_not(script: Path, place: str, launcher: str) -> None:
    there = PLACES[place]
    if launcher not in there.launchers:
        pytest.skip(f"{launcher} needs no more there than elsewhere")
    if there.within == REFUSING and platform.machine() != "x86_64":
        pytest.skip("the numbers of the system calls are those of x86-64")
    if there.within[:1] == ("unshare",):
        probe = shutil.which("unshare") and subprocess.run(
            [*there.within, "sh", "-c", there.before], capture_output=True
        )
        if not probe or probe.returncode:
            pytest.skip(f"this process cannot make the place: {probe and probe.stderr.decode()}")
    command, env = _command(launcher, script, there.before, there.within)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LONGEST_S)
    if there.fails is None:
        assert (done.returncode, done.stdout.count("fine")) == (0, 2), done.stderr
    else:
        assert done.returncode != 0
        assert re.search(there.fails, done.stderr), done.stderr


@pytest.mark.parametrize("turn", range(6))
@pytest.mark.parametrize("launcher", ["mscomm run", "variables"])
@pytest.mark.long
def test_any_limit_of_the_address_space(script: Path, launcher: str, turn: int) -> None:
    """Each limit makes another allocation the first one to fail: of a stack, a thread's first objects, a ring, ..."""
    kib = random.Random(f"{rotated.seed()} {launcher} {turn}").randrange(400_000, 900_000)
    command, env = _command(launcher, script, f"ulimit -v {kib}")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LONGEST_S)
    if done.returncode or done.stdout.count("fine") != 2:
        assert done.returncode and re.search(NO_MEMORY, done.stderr), f"ulimit -v {kib}: {done.stderr}"


# -- control groups


@pytest.fixture
def cgroup(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A new cgroup with the controller that the test names."""
    controller = request.param
    first, second = Path("/sys/fs/cgroup", controller), Path("/sys/fs/cgroup")
    parent = first if first.is_dir() else second  # version 1 has a hierarchy for each controller
    made = parent / f"mscomm-test-{os.getpid()}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"this process cannot make a cgroup: {error}")
    try:
        if parent == second and controller not in (made / "cgroup.controllers").read_text().split():
            pytest.skip(f"the cgroups of this machine have no controller {controller}")
        yield made
    finally:
        for _ in range(500):  # until the processes in it have ended
            try:
                made.rmdir()
                break
            except OSError:
                time.sleep(0.02)


def _in(cgroup: Path, values: dict[str, str], script: Path, then: Callable[[], None] | None = None, **env: str) -> str:
    """Run a job in the cgroup. Return its output if it fails, and "" if it runs."""
    for name, value in values.items():
        if (cgroup / name).exists():
            (cgroup / name).write_text(value)
    command, variables = _command("mscomm run", script, f"echo $$ > {cgroup}/cgroup.procs")
    thread = threading.Thread(target=then) if then else None
    if thread:
        thread.start()
    done = subprocess.run(command, env=variables | env, capture_output=True, text=True, timeout=LONGEST_S)
    if thread:
        thread.join()
    fine = (done.returncode, done.stdout.count("fine")) == (0, 2)
    return "" if fine else done.stderr or "nothing"


@pytest.mark.parametrize("cgroup", ["cpu"], indirect=True)
@pytest.mark.long
def test_a_tenth_of_a_cpu(cgroup: Path, script: Path) -> None:
    quota = {"cpu.cfs_quota_us": "10000", "cpu.cfs_period_us": "100000", "cpu.max": "10000 100000"}
    assert not _in(cgroup, quota, script)


@pytest.mark.parametrize("cgroup", ["memory"], indirect=True)
@pytest.mark.long
def test_little_memory(cgroup: Path, script: Path) -> None:
    output = _in(cgroup, {"memory.limit_in_bytes": "60M", "memory.max": "60M", "memory.swap.max": "0"}, script)
    assert re.search("memory", output), output


@pytest.mark.parametrize("cgroup", ["pids"], indirect=True)
@pytest.mark.parametrize("most", [3, 5, 8])
@pytest.mark.long
def test_few_processes(cgroup: Path, script: Path, most: int) -> None:
    output = _in(cgroup, {"pids.max": str(most)}, script)
    assert not output or re.search("Resource temporarily unavailable|can't start new thread|fork", output), output


@pytest.mark.parametrize("cgroup", ["freezer"], indirect=True)
@pytest.mark.long
def test_frozen_and_thawed(cgroup: Path, script: Path) -> None:
    """A frozen job is as a job that is stopped: no rank is lost, because nobody can say so."""
    state = cgroup / "freezer.state"
    frozen, thawed = ("FROZEN", "THAWED") if state.exists() else ("1", "0")
    state = state if state.exists() else cgroup / "cgroup.freeze"

    def freeze() -> None:
        time.sleep(2)
        state.write_text(frozen)
        time.sleep(20)
        state.write_text(thawed)

    assert not _in(cgroup, {}, script, freeze, LASTS_S="25", MS_NODE_TIMEOUT="5")
