"""Several jobs of one process, one after the other or at once: join(), Job, and init() after release()."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hosts import Hosts
from ranks import everybody_is_here, ranks
from sessions import clean_environment, mscomm_run
from test_launchers import Environment, Start, finished, intel_mpi, mpi, mpich, openmpi, start  # noqa: F401

import mscomm
from mscomm.bootstrap import again, torchrun
from mscomm.bootstrap.invitation import Invitation, Seat

ONE = np.ones(1)

# -- at once


@ranks(3)
def test_two_jobs_beside_the_default_one(rank: int, group: mscomm.Group) -> None:
    jobs = [mscomm.join(), mscomm.join()]
    for job in jobs:
        assert (job.rank, job.size, job.local_rank, job.launcher) == (rank, 3, rank, "mscomm run")
        assert mscomm.all_reduce(np.float32([rank]), group=job.world) == 3
        assert mscomm.get_rank(job.world) == mscomm.get_local_rank(job.world) == rank
        assert mscomm.get_local_rank_size(job.world) == 3 and mscomm.get_backend(job.world) == "cpu"
        assert mscomm.get_group_rank_from_world_rank(rank, job.world) == rank
    # Ranks may use their jobs in different orders from different threads, and asynchronously.
    works = [mscomm.all_reduce(ONE, group=job.world, async_op=True) for job in (jobs if rank else jobs[::-1])]
    assert [work.wait().tolist() for work in works] == [[3], [3]]
    assert mscomm.all_reduce(ONE) == 3
    for job in jobs:
        job.release()
    assert mscomm.all_reduce(ONE) == 3


@ranks(3)
def test_groups_belong_to_their_jobs(rank: int, group: mscomm.Group) -> None:
    with mscomm.join() as job:
        mine, theirs = mscomm.create_group("pair", [0, 1]), mscomm.create_group("pair", [1, 2], job=job)
        parts = mscomm.split(rank % 2, group=job.world)
        assert mscomm.get_process_group_ranks(parts) == ([0, 2], [1])[rank % 2]
        if theirs:
            assert mscomm.all_reduce(np.float32([rank]), group=theirs) == 3
        if mine:
            assert mscomm.all_reduce(np.float32([rank]), group="pair") == 1
        mscomm.destroy_group(theirs)
        assert "pair" not in job.groups
        if mine:
            assert mscomm.all_reduce(np.float32([rank]), group="pair") == 1
        if rank == 1:
            mscomm.send_object({"from": rank}, 2, group=job.world)
        elif rank == 2:
            assert mscomm.recv_object(1, group=job.world) == {"from": 1}


@ranks(3)
def test_the_end_of_one_job_leaves_the_others(rank: int, group: mscomm.Group) -> None:
    jobs = [mscomm.join(), mscomm.join()]
    if rank == 1:
        jobs[0].abort("one is enough")
    with pytest.raises(mscomm.Aborted, match="one is enough"):
        while True:
            mscomm.barrier(group=jobs[0].world)
    assert mscomm.all_reduce(ONE, group=jobs[1].world) == 3
    assert mscomm.all_reduce(ONE) == 3
    for job in jobs:
        job.release()


@ranks(2)
def test_an_exception_in_the_with_block_ends_the_job_on_all_ranks(rank: int, group: mscomm.Group) -> None:
    if rank == 0:
        with pytest.raises(ZeroDivisionError), mscomm.join():
            1 / 0  # noqa: B018
    else:
        with pytest.raises(mscomm.Aborted, match="rank 0: ZeroDivisionError: division by zero"), mscomm.join() as job:
            mscomm.recv(np.empty(1), 0, group=job.world)
    assert mscomm.all_reduce(ONE) == 2


@ranks(2)
def test_one_group_can_be_aborted_and_made_again(rank: int, group: mscomm.Group) -> None:
    pair = mscomm.create_group("pair", [0, 1])
    if rank == 0:
        mscomm.abort("enough", pair)
    with pytest.raises(mscomm.Aborted, match="rank 0 called abort: enough"):
        while True:
            mscomm.barrier(group=pair)
    assert mscomm.all_reduce(ONE) == 2  # the world still works
    mscomm.destroy_group(pair)
    again = mscomm.create_group("pair", [0, 1])
    assert mscomm.all_reduce(ONE, group=again) == 2
    everybody_is_here()


@ranks(2)
def test_a_group_has_a_time_limit_of_its_own(rank: int, group: mscomm.Group) -> None:
    short = mscomm.create_group("short", [0, 1], timeout=0.2)
    child = mscomm.split(0, group=short)
    assert (short.timeout_s, child.timeout_s, mscomm.split(0, timeout=3, group=short).timeout_s) == (0.2, 0.2, 3)
    if rank == 0:
        with pytest.raises(mscomm.CollectiveTimeout, match=r"after 0\.2 s|0\.2 s"):
            mscomm.recv(np.empty(1), 1, group=short)
    everybody_is_here()
    assert mscomm.all_reduce(ONE) == 2


@pytest.mark.parametrize("limit", [0, -1, "soon"], ids=repr)
def test_an_invalid_time_limit_is_refused(alone: mscomm.Group, limit: object) -> None:
    for call in (
        lambda: mscomm.join(join_timeout=limit),
        lambda: mscomm.create_group("new", [0], timeout=limit),
        lambda: mscomm.split(0, timeout=limit),
    ):
        with pytest.raises((TypeError, ValueError), match="timeout"):
            call()


def test_the_job_argument_is_checked(alone: mscomm.Group) -> None:
    with pytest.raises(TypeError, match="job is a int; expected a Job that join"):
        mscomm.create_group("new", [0], job=3)
    job = mscomm.join()
    job.release()
    job.release()  # does nothing
    with pytest.raises(ValueError, match="a job that this process has left"):
        mscomm.create_group("new", [0], job=job)
    with pytest.raises(ValueError, match="a job that this process has left"):
        mscomm.all_reduce(ONE, group=job.world)
    assert mscomm.all_reduce(ONE) == 1


@ranks(2)
def test_a_forked_child_is_in_none_of_the_jobs(rank: int, group: mscomm.Group) -> None:
    job = mscomm.join()
    pid = os.fork()
    if pid == 0:
        try:
            for one in (None, job.world):
                with pytest.raises(RuntimeError, match="was forked from a rank"):
                    mscomm.all_reduce(ONE, group=one)
            with pytest.raises(mscomm.BackendUnavailable, match=f"started by pid {os.getppid()}"):  # it is not a rank
                mscomm.init()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert mscomm.all_reduce(ONE, group=job.world) == mscomm.all_reduce(ONE) == 2


@ranks(2)
def test_a_rank_that_does_not_join_again_is_waited_for_until_the_limit(rank: int, group: mscomm.Group) -> None:
    if rank == 1:
        with pytest.raises(
            mscomm.BackendUnavailable, match=r"finds no hub of rank 0.*This would be job 1 that this process"
        ):
            mscomm.join(join_timeout=0.5)
    everybody_is_here()
    with mscomm.join() as job:  # the failed join does not count
        assert mscomm.all_reduce(ONE, group=job.world) == 2
    assert mscomm.all_reduce(ONE) == 2


@ranks(2)
def test_jobs_of_different_names_never_meet(rank: int, group: mscomm.Group) -> None:
    jobs = {}

    def join(name: str) -> None:
        jobs[name] = mscomm.join(name=name)

    names = ["a", "b"] if rank else ["b", "a"]
    threads = [threading.Thread(target=join, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in ("a", "b"):
        assert jobs[name].name == name
        assert mscomm.all_gather_object(name, group=jobs[name].world) == [name, name]
        jobs[name].release()
    with pytest.raises(TypeError, match="name is a int"):
        mscomm.join(name=3)


@ranks(2)
def test_an_error_of_another_job_ends_the_with_block_at_once(rank: int, group: mscomm.Group) -> None:
    if rank == 0:
        with pytest.raises(mscomm.Aborted, match="stop"), mscomm.join() as job:
            mscomm.all_reduce(ONE, group=job.world, async_op=True)
            while True:
                mscomm.barrier()
    else:
        job = mscomm.join()
        mscomm.abort("stop")
        with pytest.raises(mscomm.Aborted, match=r"rank 0: Aborted: .*stop"):
            mscomm.recv(np.empty(1), 0, group=job.world)
        job.release()


@ranks(2)
def test_sys_exit_with_success_leaves_the_job_well(rank: int, group: mscomm.Group) -> None:
    if rank == 0:
        with pytest.raises(SystemExit), mscomm.join():
            sys.exit(0)
    else:
        with mscomm.join():
            time.sleep(0.3)  # if the other rank aborted the job meanwhile, release() would raise the error
    assert mscomm.all_reduce(ONE) == 2


@ranks(2)
def test_a_released_job_is_freed_at_once(rank: int, group: mscomm.Group) -> None:
    gc.collect()
    gc.disable()
    job = mscomm.join()
    one, other = mscomm.create_group("one", [0], job=job), mscomm.create_group("other", [1], job=job)
    mscomm.split(0, group=job.world)
    there = weakref.ref(job)
    job.abort("file \udcff")  # can be encoded
    with pytest.raises((mscomm.Aborted, mscomm.PeerLost)):
        mscomm.barrier(group=job.world)
    job.release()
    with pytest.raises(ValueError, match="this process has left"):
        job.abort("again")
    with pytest.raises(ValueError, match="this process has left"):
        job.rejoin()
    mscomm.destroy_group(other if rank == 0 else one)  # of a job that has ended
    del job, one, other
    assert there() is None
    gc.enable()


def test_each_job_has_records_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
import mscomm
mscomm.init()
with mscomm.join(name="mine") as job:
    if job.rank == 0: job.abort("stop")
    for group in (job.world, None):
        try:
            mscomm.barrier(group=group)
        except mscomm.Aborted: pass
mscomm.barrier()
mscomm.abort("all")
try: mscomm.barrier()
except mscomm.Aborted: pass
""")
    done = mscomm_run("-n", 2, script, env={"MSCOMM_RECORD": str(tmp_path / "record")})
    kept = {path.name: json.loads(path.read_text())["job"] for path in (tmp_path / "record").iterdir()}
    assert kept == {f"rank_{r}{job}.json": job[1:] for r in (0, 1) for job in ("", ".mine")}, done.stderr


def test_init_in_a_job_checks_its_arguments(alone: mscomm.Group) -> None:
    mscomm.init(rank=0, world_size=1)
    for wrong in ({"rank": 1}, {"world_size": 2}):
        with pytest.raises(RuntimeError, match="this process has joined as rank 0 of 1"):
            mscomm.init(**wrong)
    with pytest.raises(TypeError, match="device"):
        mscomm.init(device="gpu")


# -- through each launcher, again and again

THRICE = """
import json, os, sys, numpy as np, mscomm
if "ALONE" in os.environ: os.environ["MSCOMM_HOST_ID"] = os.environ["MSCOMM_RANK"]
sums = []
for turn in range(3):
    mscomm.init()
    sums.append(float(mscomm.all_reduce(np.float32([mscomm.get_rank() + turn]))[0]))
    if turn < 2: mscomm.release()
with mscomm.join() as job:
    sums.append(float(mscomm.all_reduce(np.ones(1), group=job.world)[0]))
    ranks = (mscomm.get_rank(), job.rank, job.local_rank - mscomm.get_local_rank())
sys.stdout.write(json.dumps([mscomm.get_launcher(), *ranks, *sums]) + "\\n")
"""


@pytest.fixture
def thrice(tmp_path: Path) -> Path:
    script = tmp_path / "thrice.py"
    script.write_text(THRICE)
    return script


def check(out: str, launcher: str, size: int = 2) -> None:
    total = size * (size - 1) / 2
    assert sorted(map(json.loads, out.splitlines())) == [
        [launcher, rank, rank, 0, total, total + size, total + 2 * size, float(size)] for rank in range(size)
    ]


@pytest.mark.parametrize("env", [{}, {"ALONE": "1"}], ids=["one host", "tcp"])
def test_mscomm_run(thrice: Path, env: dict[str, str]) -> None:
    done = mscomm_run("-n", 2, thrice, env=env)
    assert done.returncode == 0, done.stderr
    out = "".join(line.partition("] ")[2] + "\n" for line in done.stdout.splitlines())
    check(out, "mscomm run")


def test_a_scheduler_and_workers(start: Start, thrice: Path) -> None:  # noqa: F811
    scheduler = start("MS_SCHED", thrice)
    ends = [finished(worker) for worker in [start("MS_WORKER", thrice) for _ in range(2)]]
    assert [code for code, _, _ in ends] == [0, 0], ends
    check("".join(out for _, out, _ in ends), "MS_* cluster")
    assert finished(scheduler)[0] == 0


def test_mpirun(mpi: Environment, thrice: Path) -> None:  # noqa: F811
    done = mpi.start(2, thrice)
    assert done.returncode == 0, done.stderr
    launcher = json.loads(done.stdout.splitlines()[0])[0]
    assert launcher in ("PMI", "PMIx")
    check(done.stdout, launcher)


def test_two_hosts_and_an_encrypted_link(thrice: Path, tmp_path: Path) -> None:
    """Only the first job needs the key file."""
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_bytes(os.urandom(32))
    code = thrice.read_text().replace(
        "    mscomm.init()", "    mscomm.init(); os.environ.pop('MSCOMM_JOB_KEY_FILE', 0)"
    )
    thrice.write_text(code)
    with Hosts(2, tmp_path) as hosts:
        where = ["--nnodes", "2", "--master-addr", hosts[0].address, "-n", "1", "--node-rank"]
        nodes = [
            host.start(
                [sys.executable, "-m", "mscomm", "run", *where, str(node), thrice], {"MSCOMM_JOB_KEY_FILE": str(key)}
            )
            for node, host in enumerate(hosts)
        ]
        ends = [finished(node) for node in nodes]
    assert [code for code, _, _ in ends] == [0, 0], ends
    out = "".join(line.partition("] ")[2] + "\n" for _, out, _ in ends for line in out.splitlines())
    check(out, "mscomm run")


def test_ranks_that_are_started_again_join_only_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import mscomm\nmscomm.init()\nmscomm.release()\nmscomm.init()")
    done = mscomm_run("-n", 2, "--max-restarts", 1, script)
    assert done.returncode != 0
    assert "lost ranks of this job are restarted, so a process can join it only once" in done.stderr, done.stderr


def test_another_environment_describes_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    class Epoch:
        rank, size, restarts, hosts, facts, run = 0, 2, False, [0, 0], [{}, {}], b"run"

    first = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "1"}
    invitation = Invitation("torchrun", Seat(0, 2, 0, True), None, b"k" * 32, "the hub")
    monkeypatch.setattr(again, "_first", None)
    assert again.found(torchrun, first, "") is torchrun
    again.remember(torchrun, invitation, Epoch(), first)
    for same in (first, {**first, "MSCOMM_RANK": "7", "DEVICE_ID": "1"}):  # which torchrun.py does not read
        assert isinstance(again.found(torchrun, same, ""), again.Again)
    for other in ({**first, "TORCHELASTIC_RUN_ID": "2"}, {**first, "WORLD_SIZE": "3"}):
        assert again.found(torchrun, other, "") is torchrun


# -- through a store of torch.distributed

STORED = """
import sys, datetime, numpy as np, mscomm
from torch.distributed import {store} as Store, PrefixStore
host, port, rank, size, turns = sys.argv[1], *map(int, sys.argv[2:])
store = {make}
for turn in range(turns):
    mscomm.init(init_method=store, rank=rank, world_size=size)
    with mscomm.join(init_method=PrefixStore("other", store), rank=rank, world_size=size) as job:
        both = mscomm.all_reduce(np.ones(1)), mscomm.all_reduce(np.ones(1), group=job.world)
        assert both == (size, size), both
        assert mscomm.get_launcher() == job.launcher == "store"
    place = mscomm.get_local_rank()
    mscomm.release()
sys.stdout.write(f"rank {{rank}}, here {{place}}\\n")
store.add("done", 1)
if rank == 0:
    import time
    while store.add("done", 0) < size: time.sleep(0.01)  # rank 0 has the server
"""
TCP = "Store(host, port, is_master=rank == 0, timeout=datetime.timedelta(seconds=40))"
FILE = "Store(host + '.store', size)"


@pytest.fixture
def torch_store() -> Iterator[None]:
    pytest.importorskip("torch.distributed")
    yield


@pytest.mark.parametrize(("kind", "make"), [("TCPStore", TCP), ("FileStore", FILE)])
def test_a_store_may_carry_the_address(torch_store: None, tmp_path: Path, port: int, kind: str, make: str) -> None:
    script = tmp_path / "stored.py"
    script.write_text(STORED.format(store=kind, make=make))
    host = "127.0.0.1" if kind == "TCPStore" else str(tmp_path / "file")
    words = [sys.executable, script, host, str(port)]
    pipe = subprocess.PIPE
    started = [
        subprocess.Popen([*words, str(rank), "3", "2"], stdout=pipe, stderr=pipe, text=True, env=clean_environment())
        for rank in range(3)
    ]
    ends = [finished(process) for process in started]
    assert [code for code, _, _ in ends] == [0, 0, 0], ends
    assert "".join(out for _, out, _ in ends) == "rank 0, here 0\nrank 1, here 1\nrank 2, here 2\n"


def test_a_store_on_two_hosts_carries_an_encrypted_key(torch_store: None, tmp_path: Path) -> None:
    script = tmp_path / "stored.py"
    script.write_text(STORED.format(store="TCPStore", make=TCP))
    with Hosts(2, tmp_path) as hosts:
        words = [sys.executable, script, hosts[0].address, "29000"]
        started = [hosts[rank // 2].start([*words, str(rank), "3", "2"]) for rank in range(3)]
        ends = [finished(process) for process in started]
    assert [code for code, _, _ in ends] == [0, 0, 0], ends
    assert "".join(out for _, out, _ in ends) == "rank 0, here 0\nrank 1, here 1\nrank 2, here 0\n"


class Dict:
    """The least that a store must have: set, get, add and wait."""

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.entries[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.entries[key]

    def add(self, key: str, amount: int) -> int:
        self.entries[key] = str(int(self.entries.get(key, b"0")) + amount).encode()
        return int(self.entries[key])

    def wait(self, keys: list[str], timeout: object) -> None:
        if not set(keys) <= self.entries.keys():
            raise TimeoutError


def test_what_a_store_lacks_is_told() -> None:
    for rank, size in ((None, None), (2, 2), (0, None)):
        with pytest.raises(ValueError, match="init_method=a store needs rank and world_size"):
            mscomm.init(init_method=Dict(), rank=rank, world_size=size)
    with pytest.raises(mscomm.CollectiveTimeout, match=r"rank 0 has put no answer into the Dict within 0\.3 s"):
        mscomm.init(init_method=Dict(), rank=1, world_size=2, join_timeout=0.3)
    with pytest.raises(mscomm.CollectiveTimeout, match=r"rank 1 has put nothing into the Dict within 0\.3 s"):
        mscomm.init(init_method=Dict(), rank=0, world_size=2, join_timeout=0.3)
    mscomm.init(init_method=Dict(), rank=0, world_size=1)
    assert mscomm.all_reduce(ONE) == 1
    mscomm.release()


def test_what_is_in_a_store_is_checked() -> None:
    class Answers(Dict):
        def set(self, key: str, value: str) -> None:
            token = value.partition(" ")[0]
            super().set(f"mscomm/hosts/{'0' * 16}/to/{token}", "garbage \N{SNOWMAN}")

    store = Answers()
    store.entries["mscomm/hosts/start"] = b"0" * 16
    with pytest.raises(mscomm.BackendUnavailable, match="rank 0 has put 'garbage"):
        mscomm.init(init_method=store, rank=1, world_size=2, join_timeout=60)
