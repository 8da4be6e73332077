"""A process that joins a job again and again holds no more than after the first joins.

Each turn joins, makes groups, calls, messages and failures, and leaves. What must not grow: descriptors, threads, child
processes, mappings, and files in the folders for shared memory, for temporary files and for keys.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sessions import mscomm_run
from test_launchers import Start, by_variables, finished, mpich, openmpi, start  # noqa: F401

TURNS, MANY = 6, 200
LONGEST_S = 280
WARM = 4  # so many turns may still add something, such as threads that serve all later jobs

SCRIPT = """
import gc, json, os, sys, tempfile, time, numpy as np, mscomm
from mscomm.cluster import security

def held():
    gc.collect()
    children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
    folders = [tempfile.gettempdir(), os.path.dirname(security.key_path("x"))]
    files = [name for folder in folders if os.path.isdir(folder) for name in os.listdir(folder)]
    # Other tests, such as those with MPI, have files in /dev/shm, too.
    files += [name for name in os.listdir("/dev/shm") if "mscomm" in name] if os.path.isdir("/dev/shm") else []
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "children": len(children),
        "mappings": len(open("/proc/self/maps").readlines()),
        "files": len(files),
    }

def fails(call):
    try:
        while True:
            call()
    except mscomm.Error:
        pass

def turn():
    mscomm.init()
    rank, size = mscomm.get_rank(), mscomm.get_group_size()
    x = mscomm.empty(1 << 18, np.float32)
    x[:] = 1
    assert mscomm.all_reduce(x)[0] == size
    pair = mscomm.create_group("pair", list(range(size)))
    assert mscomm.all_reduce(np.ones(3), group=pair, async_op=True).wait()[0] == size
    assert mscomm.all_gather_object({"rank": rank}, group=pair) == [{"rank": one} for one in range(size)]
    mscomm.sendrecv(np.ones(9), (rank + 1) % size, np.empty(9), (rank - 1) % size)
    mscomm.all_gather_v(np.ones(rank + 1), async_op=True).wait()
    mscomm.barrier(group=mscomm.split(0))
    if rank == 0:
        mscomm.abort("enough", pair)
    fails(lambda: mscomm.barrier(group=pair))
    mscomm.destroy_group(pair)
    job = mscomm.join()
    if rank == size - 1:
        job.abort("enough")
    fails(lambda: mscomm.barrier(group=job.world))
    job.release()
    mscomm.barrier()
    mscomm.release()

turns, warm = int(os.environ["TURNS"]), int(os.environ["WARM"])
for _ in range(warm):
    turn()
before = held()
for _ in range(turns - warm):
    turn()
after = held()
for _ in range(200):  # a thread of the last turn may still be ending
    if all(after[what] <= before[what] for what in before):
        break
    time.sleep(0.05)
    after = held()
sys.stdout.write(json.dumps([before, after]) + "\\n")
"""


@pytest.fixture(params=[TURNS, pytest.param(MANY, marks=pytest.mark.long)])
def script(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"  # so that the files of other tests do not count
    folder.mkdir()
    for name, value in (("TMPDIR", folder), ("TURNS", request.param), ("WARM", WARM)):
        monkeypatch.setenv(name, str(value))
    made = tmp_path / "script.py"
    made.write_text(SCRIPT)
    return made


def check(out: str) -> None:
    lines = [line[line.index("[{") :] for line in out.splitlines() if "[{" in line]
    assert len(lines) == 2, out
    for before, after in map(json.loads, lines):
        # The C library may map more memory for its own use.
        more = {what: after[what] - before[what] - 8 * (what == "mappings") for what in before}
        assert not {what for what, count in more.items() if count > 0}, (before, after)


def test_mscomm_run(script: Path) -> None:
    done = mscomm_run("-n", 2, script, timeout_s=LONGEST_S)
    assert done.returncode == 0, done.stderr
    check(done.stdout)


@pytest.mark.long
def test_a_scheduler_and_workers(start: Start, script: Path) -> None:  # noqa: F811
    scheduler = start("MS_SCHED", script)
    ends = [finished(worker, LONGEST_S) for worker in [start("MS_WORKER", script) for _ in range(2)]]
    assert [code for code, _, _ in ends] == [0, 0], ends
    check("".join(out for _, out, _ in ends))
    assert finished(scheduler)[0] == 0


@pytest.mark.long
@pytest.mark.parametrize("flavour", ["openmpi", "mpich"])
def test_mpirun(flavour: str, script: Path, request: pytest.FixtureRequest) -> None:
    done = request.getfixturevalue(flavour).start(2, script, timeout_s=LONGEST_S)
    assert done.returncode == 0, done.stderr
    check(done.stdout)


@pytest.mark.long
def test_the_variables_of_torchrun(script: Path, port: int) -> None:
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ends = by_variables(script, {"RANK": "%", **place}, timeout_s=LONGEST_S)
    assert [code for code, _, _ in ends] == [0, 0], ends
    check("".join(out for _, out, _ in ends))
