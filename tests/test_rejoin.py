"""Ranks that die under `mscomm run --max-restarts` are restarted and continue with the survivors in a new epoch."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import fallbacks
import pytest
from patched_run import patched_run
from rotated import rotated, sometimes
from sessions import run

# A loop of collective calls that continues when ranks are lost. After each rejoin, the ranks continue at the first
# step that at least one survivor has not completed. Environment variables say which ranks die:
# VICTIMS="step:rank": the rank dies in its first life, at most 20 ms after that step begins.
# IN_INIT="rank:seconds": the rank dies in its second life, this many seconds after it has called init.
# IN_REJOIN="rank:seconds": the surviving rank dies this many seconds after it has called rejoin.
LOOP = """
import json, os, random, signal, sys, threading, time
import numpy as np
import mscomm
rank, life = int(os.environ["MSCOMM_RANK"]), int(os.environ["MSCOMM_RESTART_COUNT"])
steps = 50

def planned(name):
    return [tuple(map(float, one.split(":"))) for one in os.environ.get(name, "").split()]

def die_in(seconds):
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()
    return timer

def say(**words):
    print(json.dumps({"rank": rank, "life": life, "pid": os.getpid(), **words}))

death, last = None, -1  # the timer that ends this process, and the step before which it must have done so
began = time.monotonic()
for victim, seconds in planned("IN_INIT"):
    if (victim, life) == (rank, 1):
        death = die_in(seconds)
mscomm.init()
pair = mscomm.create_group("pair", [1, 3])  # a falsy Group on the other ranks
halves = mscomm.split(rank % 2 if rank else None)  # rank 0 is in neither half
step, agreed = 0, life == 0
while True:
    try:
        if not agreed:
            mine = np.array([steps if life and not step else step])
            step = int(mscomm.all_reduce(mine, "min")[0])
            agreed = True
            if life and began:
                say(back_after=time.monotonic() - began)
                began = None
        shared = mscomm.empty(50_000, np.float32)
        while step < steps:
            if life == 0 and (step, rank) in planned("VICTIMS"):
                death, last = die_in(random.random() * 0.02), step + 9
            if death is not None and step == last:  # on a fast machine, the next victim could otherwise die first
                death.join()
            shared[:] = rank + step
            assert (mscomm.all_reduce(shared) == 6 + 4 * step).all()
            if pair:
                assert (mscomm.all_reduce(np.full(3, rank), group=pair) == 4).all()
            if halves:
                assert (mscomm.all_reduce(np.full(3, rank), group=halves) == (4 if rank % 2 else 2)).all()
            step += 1
        if death is not None:
            death.join()
        mscomm.barrier()  # no rank leaves before all have finished
        break
    except mscomm.PeerLost as lost:
        for victim, seconds in planned("IN_REJOIN"):
            if (victim, life) == (rank, 0):
                death = die_in(seconds)
        at = time.monotonic()
        epoch = mscomm.rejoin(60)
        agreed = False
        say(epoch=epoch, lost=lost.ranks, took=time.monotonic() - at)
say(done=step)
"""


def job(
    folder: Path,
    body: str,
    *options: object,
    ranks: int = 4,
    arguments: Sequence[object] = (),
    timeout_s: float = 120,
    **env: object,
):
    """Run a job without fallbacks: survivors, new ranks and the launcher learn what they wait for by events."""
    script = folder / "script.py"
    script.write_text(fallbacks.IN_SCRIPT + body)
    own = {"OMP_NUM_THREADS": "1", **fallbacks.IN_ENV, **env}
    variables = {**os.environ, **{name: str(value) for name, value in own.items()}}
    command = [*patched_run(**fallbacks.IN_LAUNCHER), "-n", ranks, *options, script, *arguments]
    return run(list(map(str, command)), timeout_s, variables, kill_rest=False)


def said(done) -> dict[int, list[dict]]:
    """Return, for each rank, the JSON objects that it has printed, in order."""
    words = defaultdict(list)
    for line in done.stdout.splitlines():
        prefix, _, text = line.partition(" ")
        if text.startswith("{"):
            words[int(prefix.strip("[]"))].append(json.loads(text))
    return words


def assert_went_on(done, lost: set[int]):
    """Check that all ranks did all steps, that survivors kept their processes, and that lost ranks have new ones."""
    assert done.returncode == 0, done.stderr + done.stdout
    words = said(done)
    for rank in range(4):
        assert words[rank][-1]["done"], done.stdout
        assert bool(words[rank][-1]["life"]) == (rank in lost), done.stdout
        if rank not in lost:
            assert len({word["pid"] for word in words[rank]}) == 1
    for rank in lost:
        back_s = [word["back_after"] for word in words[rank] if "back_after" in word][-1]
        print(f"rank {rank} was back in the group {back_s:.3f} s after it called init")
        assert back_s < 60  # on an idle machine less than 1 s; a fallback would take longer than 60 s
    return words


@pytest.mark.parametrize("victim", rotated(range(4), few=1))
def test_a_killed_rank_comes_back_and_the_others_stay(tmp_path, victim):
    done = job(tmp_path, LOOP, "--max-restarts", 3, VICTIMS=f"10:{victim}")
    words = assert_went_on(done, {victim})
    assert f"rank {victim} is started again (restart 1 of 3): killed by SIGKILL" in done.stderr
    for rank in set(range(4)) - {victim}:
        assert [word["lost"] for word in words[rank] if "lost" in word] == [[victim]]
        assert [word["epoch"] for word in words[rank] if "epoch" in word] == [1]


@sometimes
def test_a_rank_that_is_late_in_a_failed_set_up_joins_the_next_epoch(tmp_path):
    """Rank 1 is killed while all set up epoch 0. Rank 2 connects to rank 0 only when rank 0 waits in rejoin()."""
    body = """
import os, signal, time
import mscomm
from mscomm.cluster import assemble
rank, life, share = int(os.environ["MSCOMM_RANK"]), int(os.environ["MSCOMM_RESTART_COUNT"]), assemble.share
def in_epoch_0(*arguments):
    assemble.share = share
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(2)
    return share(*arguments)
if life == 0 and rank in (1, 2):
    assemble.share = in_epoch_0
mscomm.init()
mscomm.barrier()
"""
    done = job(tmp_path, body, "--max-restarts", 1, MS_TOPO_TIMEOUT=20)
    assert done.returncode == 0, done.stderr


@sometimes
def test_a_group_that_a_rank_leaves_to_rejoin_names_the_lost_rank(tmp_path):
    """Rank 0 is lost. Rank 1 learns of the loss in the world, and calls rejoin(). Rank 3 waits for rank 1 in a group
    without rank 0, and its error must name rank 0.
    """
    body = """
import os, signal
import numpy as np, mscomm
mscomm.init()
rank, life = mscomm.get_rank(), int(os.environ["MSCOMM_RESTART_COUNT"])
pair = mscomm.create_group("pair", [1, 3])
if life == 0:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        mscomm.barrier(group=pair if rank == 3 else None)
    except mscomm.PeerLost as lost:
        print(rank, lost.ranks, lost)
        mscomm.rejoin()
mscomm.barrier()
"""
    done = job(tmp_path, body, "--max-restarts", 1)
    assert done.returncode == 0, done.stderr
    said = re.search(r"3 \(0,\) (rank 0 .* killed by SIGKILL.*)", done.stdout)
    assert said and "rank 1" in said[1] and said[1].endswith("therefore left this group for the next epoch"), (
        done.stdout
    )


@sometimes
def test_two_ranks_lost_at_once_come_back_together(tmp_path):
    done = job(tmp_path, LOOP, "--max-restarts", 3, VICTIMS="10:1 10:2")
    assert_went_on(done, {1, 2})
    assert "restart 2 of 3" in done.stderr and "restart 3" not in done.stderr


@pytest.mark.parametrize("seconds", rotated([0, 0.1, 0.2], few=1))
def test_a_new_rank_that_dies_on_its_way_back_is_started_once_more(tmp_path, seconds):
    done = job(tmp_path, LOOP, "--max-restarts", 3, VICTIMS="10:1", IN_INIT=f"1:{seconds}")
    words = assert_went_on(done, {1})
    assert words[1][-1]["life"] == 2


@pytest.mark.parametrize("seconds", rotated([0, 0.2], few=1))
def test_a_survivor_that_dies_in_rejoin_comes_back_too(tmp_path, seconds):
    done = job(tmp_path, LOOP, "--max-restarts", 3, VICTIMS="10:1", IN_REJOIN=f"2:{seconds}")
    assert_went_on(done, {1, 2})


@sometimes
def test_one_after_the_other(tmp_path):
    done = job(tmp_path, LOOP, "--max-restarts", 4, VICTIMS="5:3 15:0 25:1 35:2")
    words = assert_went_on(done, {0, 1, 2, 3})
    assert max(word.get("epoch", 0) for word in words[2]) <= 4


def test_when_the_budget_is_spent_the_next_failure_ends_the_job(tmp_path):
    done = job(tmp_path, LOOP, "--max-restarts", 1, VICTIMS="10:1 30:2")
    assert done.returncode == 128 + signal.SIGKILL
    assert "rank 1 is started again (restart 1 of 1)" in done.stderr
    assert "rank 2 failed first: killed by SIGKILL" in done.stderr
    assert re.search(r"PeerLost: rejoin: rank 2 \(pid .*killed by SIGKILL", done.stderr), done.stderr


def test_the_status_is_that_of_the_first_failure_that_nobody_made_good(tmp_path):
    body = """
import os
import numpy as np, mscomm
rank, life = int(os.environ["MSCOMM_RANK"]), int(os.environ["MSCOMM_RESTART_COUNT"])
mscomm.init()
if life == 0:
    if rank == 1:
        os._exit(5)
    try:
        mscomm.barrier()
    except mscomm.PeerLost:
        mscomm.rejoin()
mscomm.barrier()
if rank == 2:
    os._exit(7)
mscomm.barrier()
"""
    done = job(tmp_path, body, "--max-restarts", 1)
    assert done.returncode == 7, done.stderr
    assert "rank 1 is started again (restart 1 of 1): exit code 5" in done.stderr
    assert "rank 2 failed first: exit code 7" in done.stderr


def test_a_rank_that_raises_is_started_again_too(tmp_path):
    """The rank reports its exception, calls release() at exit, and ends with status 1. On the other ranks, barrier()
    raises Aborted, and they call rejoin().
    """
    body = """
import os
import numpy as np, mscomm
rank, life = int(os.environ["MSCOMM_RANK"]), int(os.environ["MSCOMM_RESTART_COUNT"])
mscomm.init()
if life == 0:
    try:
        mscomm.barrier()
        if rank == 1:
            raise KeyError("no such column")
        mscomm.barrier()
    except mscomm.Aborted as error:
        print("aborted:", "no such column" in str(error))
        mscomm.rejoin()
assert mscomm.all_reduce(np.ones(1))[0] == 3
print("through")
"""
    done = job(tmp_path, body, "--max-restarts", 3, ranks=3)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("aborted: True") == 2 and done.stdout.count("through") == 3, done.stdout


def test_without_restarts_rejoin_says_what_to_do(tmp_path):
    body = """
import os, signal
import numpy as np, mscomm
mscomm.init()
if mscomm.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    mscomm.barrier()
except mscomm.PeerLost:
    mscomm.rejoin()
"""
    done = job(tmp_path, body, ranks=2)
    assert done.returncode == 128 + signal.SIGKILL
    assert "PeerLost: rejoin: nothing restarts lost ranks in this job; use `mscomm run --max-restarts N`" in done.stderr


@sometimes
def test_a_rank_that_left_well_makes_rejoin_fail(tmp_path):
    body = """
import os, signal, sys, time
import numpy as np, mscomm
mscomm.init()
rank = mscomm.get_rank()
try:
    pids = mscomm.all_gather(np.array([os.getpid()]))
    if rank == 0:
        sys.exit(0)
    if rank == 1:
        stat = f"/proc/{pids[0]}/stat"
        while os.path.exists(stat) and " Z " not in open(stat).read():
            time.sleep(0.01)
        time.sleep(1)  # by then, the launcher has noticed that rank 0 ended
        os.kill(os.getpid(), signal.SIGKILL)
    mscomm.all_reduce(np.ones(1), group=mscomm.create_group("rest", [1, 2]))
except mscomm.PeerLost:
    mscomm.rejoin()
"""
    done = job(tmp_path, body, "--max-restarts", 5, ranks=3)
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    assert "started again" not in done.stderr
    assert re.search("rejoin: rank 0 .* has left the job|rejoin: rank 1 .*killed by SIGKILL", done.stderr), done.stderr


def test_a_time_out_of_rejoin_names_who_is_missing_and_it_can_be_called_again(tmp_path):
    body = """
import os, signal, sys, time
import numpy as np, mscomm
rank, life = int(os.environ["MSCOMM_RANK"]), int(os.environ["MSCOMM_RESTART_COUNT"])
if life:
    while not os.path.exists(sys.argv[0] + ".go"):
        time.sleep(0.01)
mscomm.init()
if life == 0:
    pair = mscomm.create_group("pair", [0, 1])
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        mscomm.barrier()
    except mscomm.PeerLost:
        pass
    if rank == 0:
        try:
            mscomm.rejoin(0.5)
        except mscomm.CollectiveTimeout as error:
            print("waiting for", error.waiting_for, str(error))
        open(sys.argv[0] + ".go", "w").close()
    else:
        while not os.path.exists(sys.argv[0] + ".go"):
            time.sleep(0.01)
    print("epoch", mscomm.rejoin())
    if rank < 2:
        assert mscomm.all_reduce(np.ones(1), group=pair)[0] == 2
assert mscomm.all_reduce(np.ones(1))[0] == 3
"""
    done = job(tmp_path, body, "--max-restarts", 1, ranks=3)
    assert done.returncode == 0, done.stderr
    assert "[0] waiting for (1, 2) rejoin: rank 0 (pid" in done.stdout
    assert re.search(r"waited 0.5 s for rank 1 \(.*which has not called rejoin\(\), rank 2", done.stdout), done.stdout
    assert done.stdout.count("epoch 1") == 2


def test_a_long_wait_in_rejoin_says_once_whom_it_waits_for(tmp_path):
    body = """
import os, signal, sys, time
import mscomm
from mscomm import log
from mscomm.cluster import member
rank, life = int(os.environ["MSCOMM_RANK"]), int(os.environ["MSCOMM_RESTART_COUNT"])
mscomm.init()
if life == 0:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        mscomm.barrier()
    except mscomm.PeerLost:
        member.NOTICES_S = (0.5, 60, 300)  # say soon that it waits, and not again in this test
        notice, told = log.notice, sys.argv[0] + ".told"
        def tell(text):
            notice(text)
            open(told, "w").close()
        if rank == 0:
            log.notice = tell
        while rank == 2 and not os.path.exists(told):
            time.sleep(0.01)
        mscomm.rejoin()
mscomm.barrier()
"""
    done = job(tmp_path, body, "--max-restarts", 1, ranks=3)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "rejoin has waited" in line]
    missing = r"(rank 1 .*, )?rank 2 \(pid .*\), which has not called rejoin\(\)"  # rank 1 may not be back yet
    words = r"\[0\] mscomm: rank 0: rejoin has waited \d+ s for " + missing
    assert len(lines) == 1 and re.fullmatch(words, lines[0]), done.stderr


def test_a_program_that_knows_no_rejoin_is_started_anew_as_a_whole(tmp_path):
    """As under torchrun, all ranks end, are started again, and join again, and this counts as one restart."""
    body = """
import os, signal
import numpy as np, mscomm
rank, life = int(os.environ["MSCOMM_RANK"]), int(os.environ["MSCOMM_RESTART_COUNT"])
mscomm.init()
for _ in range(20):
    mscomm.barrier()
if (rank, life) == (1, 0):
    os.kill(os.getpid(), signal.SIGKILL)
print("life", life, mscomm.all_reduce(np.ones(1)))
"""
    done = job(tmp_path, body, "--max-restarts", 1, ranks=3)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("life 1 [3.]") == 3
    assert "rank 0 is started again (not counted, because rank 1 had failed before): exit code 1" in done.stderr


@pytest.mark.long
def test_the_rank_that_fails_in_each_life_is_named_and_not_those_that_failed_with_it(tmp_path):
    body = """
import os
import mscomm
mscomm.init()
mscomm.barrier()
if mscomm.get_rank() == 1:
    os._exit(7)
mscomm.barrier()
"""
    done = job(tmp_path, body, "--max-restarts", 2)
    assert done.returncode == 7, done.stderr
    assert "rank 1 failed first: exit code 7" in done.stderr.splitlines()[-1]
    assert "rank 1 is started again (restart 2 of 2): exit code 7" in done.stderr


def test_the_cause_is_named_although_its_rank_was_started_again(tmp_path):
    """Rank 0 leaves the job after rank 1 has failed, so the job can never be complete again."""
    body = """
import os, sys
import mscomm
mscomm.init()
if mscomm.get_rank() == 1:
    mscomm.barrier()
    raise ValueError("no such column")
try:
    mscomm.barrier()  # rank 1 may fail before this rank has left this barrier
    mscomm.barrier()
except mscomm.Aborted:
    if mscomm.get_rank() == 0:
        mscomm.release()
        os._exit(0)
    mscomm.rejoin()
"""
    done = job(tmp_path, body, "--max-restarts", 1, ranks=3)
    assert done.returncode == 1
    assert "rank 1 failed first: ValueError: no such column" in done.stderr.splitlines()[-1]


@pytest.mark.long
def test_a_rank_that_fails_again_and_again_is_started_again_later_each_time(tmp_path):
    (tmp_path / "script.py").write_text("raise SystemExit(3)")
    done = run([*patched_run(LATEST_S=1.5), "-n", "1", "--max-restarts", "3", str(tmp_path / "script.py")])
    assert done.returncode == 3
    for number, later in (1, ""), (2, " in 1 s"), (3, " in 1.5 s"):
        assert f"rank 0 is started again{later} (restart {number} of 3): exit code 3" in done.stderr


@pytest.mark.parametrize("words", [["--max_restarts", 2], []])
def test_programs_that_know_nothing_of_mscomm_are_started_again(tmp_path, words):
    body = """
import os, sys
life = int(os.environ["MSCOMM_RESTART_COUNT"])
print("life", life)
sys.exit(life < 2)
"""
    env = {} if words else {"PET_MAX_RESTARTS": 2}  # torchrun's variable for --max-restarts
    done = job(tmp_path, body, *words, "--log_dir", tmp_path / "logs", ranks=1, **env)
    assert done.returncode == 0, done.stderr
    # The rank's three processes write to one log.
    assert (tmp_path / "logs/worker_0.log").read_text() == "life 0\nlife 1\nlife 2\n"


def test_what_a_lost_rank_started_does_not_stay_behind(tmp_path):
    body = """
import os, signal, subprocess, sys
if os.environ["MSCOMM_RESTART_COUNT"] == "0":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print(child.pid)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = job(tmp_path, body, "--max-restarts", 1, ranks=1, timeout_s=60)
    assert done.returncode == 0
    child, end = Path("/proc", done.stdout.split()[1], "stat"), time.monotonic() + 60
    while child.exists() and child.read_text().rsplit(")", 1)[1].split()[0] != "Z":
        assert time.monotonic() < end, "it lives on"
        time.sleep(0.01)


@sometimes
@pytest.mark.parametrize("restarts", [3, pytest.param(10, marks=pytest.mark.long)])
def test_survivors_keep_nothing_of_the_epochs_before(tmp_path, restarts):
    """The first epoch is no measure: later ones also keep the memory of `kept`."""
    body = """
import os, signal, sys
import numpy as np, mscomm
rank, life = int(os.environ["MSCOMM_RANK"]), int(os.environ["MSCOMM_RESTART_COUNT"])
restarts = int(sys.argv[1])
mscomm.init()
pair = mscomm.create_group("pair", [0, 1])
kept = mscomm.zeros(100_000)  # from the first epoch
sizes = []
while True:
    try:
        life = int(mscomm.all_reduce(np.array([life]), "max")[0])
        mscomm.all_reduce(mscomm.zeros(100_000), group=pair)
        mscomm.all_reduce(np.zeros(1), async_op=True).wait()
        maps = open("/proc/self/maps").read()
        sizes.append((len(os.listdir("/proc/self/fd")), maps.count("mscomm-heap"), len(os.listdir("/proc/self/task"))))
        if life == restarts:
            break
        mscomm.barrier()  # rank 1 must not die before rank 0 has measured, too
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        mscomm.barrier()
    except mscomm.PeerLost:
        mscomm.rejoin()
if rank == 0:
    assert not kept.any() and len(sizes) == 1 + restarts
    assert len(set(sizes[1:])) == 1, sizes
"""
    done = job(tmp_path, body, "--max-restarts", restarts, ranks=2, arguments=[restarts])
    assert done.returncode == 0, done.stderr + done.stdout


# -- a scheduler and workers


def test_a_worker_comes_back_to_its_scheduler(tmp_path, port):
    (tmp_path / "script.py").write_text(fallbacks.IN_SCRIPT + LOOP)
    job = {"MS_WORKER_NUM": "4", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": str(port), "MS_ENABLE_RECOVERY": "1"}
    env = {**os.environ, **job, **fallbacks.IN_ENV, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path), "VICTIMS": "10:2"}

    def start(rank, life=0):
        own = {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(rank), "MSCOMM_RANK": str(rank)}
        command = [sys.executable, tmp_path / "script.py"]
        return subprocess.Popen(command, env={**env, **own, "MSCOMM_RESTART_COUNT": str(life)})

    scheduler = subprocess.Popen([sys.executable, "-m", "mscomm", "sched"], env=env, stdout=subprocess.PIPE, text=True)
    workers = [start(rank) for rank in range(4)]
    try:
        assert workers[2].wait(60) == -signal.SIGKILL
        workers[2] = start(2, life=1)
        assert [worker.wait(60) for worker in workers] == [0] * 4
        out, _ = scheduler.communicate(timeout=60)
    finally:
        for process in (scheduler, *workers):
            process.kill()
            process.wait()
    assert scheduler.returncode == 0, out
    assert "epoch 1 begins" in out and "all 4 workers have left" in out


# -- several nodes, all on this host


@pytest.fixture
def two_nodes(tmp_path, port):
    """two_nodes(body, *options) runs the body on 2 nodes with 2 ranks each. It returns (status, stdout, stderr) for
    each node.
    """

    def run_both(body, *options, **env):
        (tmp_path / "script.py").write_text(fallbacks.IN_SCRIPT + body)
        words = ["-n", "2", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port), "--node-rank"]
        command = [*patched_run(**fallbacks.IN_LAUNCHER), *map(str, options), *words]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        env = {**os.environ, "OMP_NUM_THREADS": "1", **fallbacks.IN_ENV, **env}
        nodes = [subprocess.Popen([*command, str(node), tmp_path / "script.py"], env=env, **streams) for node in (0, 1)]
        try:
            said = [node.communicate(timeout=120) for node in nodes]
        finally:
            for node in nodes:
                node.kill()
                node.communicate()
        return [(node.returncode, *words) for node, words in zip(nodes, said, strict=True)]

    return run_both


@pytest.mark.parametrize("victim", rotated([1, 2], few=1))
def test_each_node_starts_its_own_ranks_again(two_nodes, victim):
    ends = two_nodes(LOOP, "--max-restarts", 1, VICTIMS=f"10:{victim}")
    for node, (code, out, err) in enumerate(ends):
        assert code == 0, err
        assert out.count('"done": 50') == 2
        assert (f"rank {victim} is started again" in err) == (node == victim // 2)
    # Node 0 prints the command that starts the other node.
    assert "--max-restarts 1 -n 2" in ends[0][2] or "-n 2 --max-restarts 1" in ends[0][2]


@sometimes
def test_a_rank_that_no_node_starts_again_ends_the_job_on_both(two_nodes):
    (code_0, _, err_0), (code_1, _, err_1) = two_nodes(LOOP, "--max-restarts", 1, VICTIMS="10:2 30:3")
    assert code_1 == 128 + signal.SIGKILL, err_1
    assert code_0 == 1, err_0
    assert "rank 2 is started again (restart 1 of 1)" in err_1
    assert "the job failed on another host: PeerLost: rank 3" in err_0
