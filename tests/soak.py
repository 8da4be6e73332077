"""Many jobs in a row, each with one fault at a random moment: `python tests/soak.py --faults 1000 --seed 7`.

Each job has 2 to 8 ranks, a random transport and a random loop of collectives whose results are checked. At a random
moment, the fault happens: one rank is killed, is stopped for a while, is slow, raises an exception, exits, gets Ctrl-C,
makes a different call from the others, arrives after the others have timed out, or has no file descriptors or hardly
any memory left. In other kinds of job, the hub ends, mpirun is killed, or two hosts lose each other while the hub still
reaches both. These hosts are network namespaces, which only root can create.

Every job must end. No result may be wrong. Every rank except the failed one must name the right first cause, and raise
the same error again at its next call. Each process must have the right exit code, and nothing may be left behind.

In some jobs, a rank tries to use a group of which it is not a member, or the ranks create and destroy groups all the
time, or the surviving ranks continue in a group made by shrink. Some jobs run at the same time as a second job, which
must not notice the fault. Some jobs train with uneven data, or resume training from checkpoints that were damaged on
one rank.

If a job fails, soak.py prints the job and how to run it alone: `--only INDEX`. To run only some kinds of fault, name
them after `--kinds`. To save time, the ranks are forked from a process that has imported this file (interpreter.py).
They join the job after the fork.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soak_training
from hosts import Hosts
from interpreter import Forked, Interpreter
from ranks import ranks
from soak_mpirun import MPIRUN, UnderMpirun
from soak_training import WrongResult

import mscomm
from mscomm.cluster import hub, security

ENDS_WITHIN_S = 240  # ends a hang; an idle machine runs a job in a few seconds
FAULTS = ("kill", "stop", "raise", "exit", "os-exit", "interrupt", "mismatch", "slow", "timeout", "uneven", "damage")
FAULTS += ("hub", "descriptors", "memory", "mpirun", "parted")
TRANSPORTS = ("", "all_reduce=arena", "direct", "ring", "bruck", "doubling", "halving")
SIZES = (1, 7, 1000, 5000, 100_000)
SHORTAGES = ("descriptors", "memory")  # faults that happen at an iteration, and leave the victim short of something
ITERATIONS = 25  # the number of iterations of a job that does not fail
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
BOOM = "the 7th file is empty"
CLONE_NEWNET = 0x40000000  # from <sched.h>
SILENCE_S = 3  # MS_NODE_TIMEOUT of jobs whose hosts lose each other
# What a rank's error says if the system gave the rank no memory, or no thread (a thread's stack needs memory).
NO_MEMORY = "MemoryError|Cannot allocate memory|out of memory|start new thread|start a thread"
ROOMS = (1 << 20, 4 << 20, 16 << 20, 64 << 20)  # how many more bytes a rank with limited memory may allocate
# A thread needs memory for a library's thread-local variables when it first uses the library. If there is no memory
# left, glibc prints this and ends the process with exit code 127.
NO_THREAD_LOCALS = "cannot allocate memory for thread-local data: ABORT"


# -- the plan of a job: a pure function of seed, index and the kinds of fault


def plan(seed: int, index: int, kinds: Sequence[str] = FAULTS) -> dict[str, Any]:
    draw = random.Random(f"{seed}:{index}")
    size = draw.randint(2, 8)
    split = draw.choice(("one", "one", "halves", "turns"))
    algo = draw.choice(TRANSPORTS)
    if "arena" in algo:
        split = "one"
    fault, victim = draw.choice(kinds), draw.randrange(size)
    if fault == "parted" and "arena" in algo:  # the arena needs all ranks on one host
        algo = ""
    steps = [draw.randint(rank == victim, soak_training.MOST_STEPS) for rank in range(size)]
    works = {"uneven": "train", "damage": "resume"}
    if fault in ("kill", "raise", "os-exit") and draw.random() < 0.25:
        works[fault] = "train"
    return {
        "seed": f"{seed}:{index}",
        "work": works.get(fault, "calls"),
        "steps": steps,  # each rank's number of steps, for jobs that train
        "size": size,
        "algo": algo,
        "hosts": [{"one": 0, "halves": int(2 * rank >= size), "turns": rank % 2}[split] for rank in range(size)],
        "fault": fault,
        "victim": victim,
        "at": draw.randrange(ITERATIONS),  # for faults that happen at an iteration
        "after_s": draw.random() * 0.2,  # for faults that happen after a delay
        "pause_s": 0.1 + draw.random() * 0.5,
        # For faults that limit the victim's memory: which limit, and how many more bytes the victim may allocate.
        "limit": draw.choice(("RLIMIT_AS", "RLIMIT_DATA")),
        "room": draw.choice(ROOMS),
        # The groups besides the world. "created" and "split": a group with all even ranks and a group with all odd
        # ranks, made by create_group or split. "moving": the ranks create and destroy groups between their calls.
        "groups": draw.choice(("none", "none", "none", "created", "split", "moving", "moving")),
        # Whether the surviving ranks continue after PeerLost. They do so only in jobs without groups besides the world:
        # otherwise, rank A in shrink could wait for rank B, while rank B waits for rank A in a group that still works.
        "shrinks": draw.random() < 0.7,
        "beside": draw.random() < 0.2,  # whether a second job, which does not fail, runs at the same time
        "in_a_script": draw.random() < 0.5,  # whether mpirun starts a shell script that starts the ranks
        "three_hosts": draw.random() < 0.5,  # whether there is a third host besides the two that lose each other
    }


def neighbour(job: dict[str, Any]) -> dict[str, Any]:
    """Return the second job: two ranks on the same hosts, with the same transport. Rank 0 is slow. No rank fails."""
    calm = {"fault": "slow", "victim": 0, "work": "calls"}
    return {**job, **calm, "seed": f"{job['seed']}:beside", "size": 2, "hosts": job["hosts"][:2]}


# -- what each rank of a job does


@ranks("size", init=None)
def one_rank(rank: int, job: dict[str, Any]) -> None:
    """Act as one rank: join, make calls until the fault happens, write down what this rank saw, and leave."""
    faulthandler.register(signal.SIGUSR1)
    if job["fault"] == "parted":
        enter_network(job["spaces"][job["hosts"][rank]])
    seen = Path(job["folder"], f"saw.{rank}")
    victim, fault = job["victim"], job["fault"]
    mscomm.init()
    groups, foreign = made_groups(job["groups"], rank)
    last = ITERATIONS if fault in ("stop", "slow", *SHORTAGES) else 1 << 30
    group, in_new_group = None, False
    try:
        mscomm.barrier()  # inside `try`, because the fault may happen while ranks are still in this barrier
        Path(job["folder"], f"up.{rank}").touch()
        if job["work"] == "train":
            soak_training.train_unevenly(job, lambda: misbehave(job))
        elif job["work"] == "resume":
            soak_training.go_on_from_damaged(job)
        else:
            if rank == victim and fault in ("kill", "interrupt"):
                number = signal.SIGKILL if fault == "kill" else signal.SIGINT
                threading.Timer(job["after_s"], os.kill, (os.getpid(), number)).start()
            for i in range(last):
                draw = random.Random(f"{job['seed']}:{i}")
                group = groups[draw.randrange(len(groups))]
                for other in foreign:
                    refused(other)
                if i == job["at"] and fault in ("mismatch", "timeout"):
                    group = None
                    mscomm.barrier()  # without this barrier, ranks other than the victim could be late
                if i == job["at"] and fault in SHORTAGES:
                    mscomm.barrier()
                if i == job["at"] and rank == victim:
                    misbehave(job)
                if (fault in SHORTAGES) if i == job["at"] else (job["groups"] == "moving" and i % 3 == 0):
                    in_new_group = True
                    use_new_group(job, i)
                    in_new_group = False
                if i == job["at"] and fault == "timeout":
                    mscomm.all_reduce(np.ones(3), timeout=1)
                one_call(draw, group, i, list(CALLS) if i == job["at"] else [*CALLS, "message"])
    except mscomm.Error as error:
        if fault in SHORTAGES and rank == victim:
            raise
        if in_new_group:  # the next call is on the world instead of the new group: wait until the world has failed, too
            group, until = None, time.monotonic() + 3
            while time.monotonic() < until and not is_broken():
                time.sleep(0.01)
        again = ""
        # If hosts are parted, the world fails only when a rank uses its link between these hosts. If no rank does, a
        # call here would raise a Mismatch, because another rank is still in a different call.
        if not (in_new_group and fault == "parted"):
            try:
                mscomm.all_reduce(np.ones(2), group=group)
            except mscomm.Error as later:
                again = f"{type(later).__name__}: {later}"
        words = {
            "kind": type(error).__name__,
            "ranks": error.ranks,
            "waiting_for": error.waiting_for,
            "text": str(error),
        }
        if (
            job["shrinks"]
            and job["groups"] == "none"
            and isinstance(error, mscomm.PeerLost)
            and fault in ("kill", "os-exit")
        ):
            left = mscomm.shrink(None, "left")
            if left.ranks != [one for one in range(job["size"]) if one != victim]:
                raise WrongResult(f"rank {rank} is left with {left.ranks}") from error
            for i in range(5):
                one_call(random.Random(f"{job['seed']}:left {i}"), left, i, list(CALLS))
        seen.write_text(json.dumps({**words, "again": again, "in_new_group": in_new_group}))
    else:
        seen.write_text(json.dumps({"kind": "none"}))


def enter_network(space: str) -> None:
    """Move this process into the network namespace with this name."""
    fd = os.open(f"/run/netns/{space}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(fd, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")
    os.close(fd)


def made_groups(how: str, rank: int) -> tuple[list[Any], list[Any]]:
    """Return the groups of this rank, with the world first, and the groups of which it is not a member."""
    if how in ("none", "moving"):
        return [None], []
    if how == "split":
        return [None, mscomm.split(rank % 2)], []
    size = mscomm.get_group_size()
    made = [mscomm.create_group(f"from {first}", list(range(first, size, 2))) for first in (0, 1)]
    return [None, *filter(None, made)], [group for group in made if not group]


def is_broken() -> bool:
    """Return whether the world has failed."""
    return mscomm.job.default().world.core.failure() is not None


def use_new_group(job: dict[str, Any], i: int) -> None:
    """Create a group with the lower ranks and a group with the upper ranks, or one group with all ranks. Use this
    rank's group once and destroy it.
    """
    size, rank, draw = job["size"], mscomm.get_rank(), random.Random(f"{job['seed']}:new {i}")
    at = draw.randrange(size)
    own = list(range(at)) if rank < at else list(range(at, size))
    made = mscomm.create_group(f"new {i}", own)
    one_call(draw, made, i, ["all_reduce"])
    mscomm.destroy_group(made)


def refused(group: Any) -> None:
    """Make a call in a group of which this rank is not a member. Check that the call is refused on this rank."""
    try:
        got = mscomm.all_reduce(np.ones(3), group=group)
    except RuntimeError as error:
        if isinstance(error, mscomm.Error) or "is no member of" not in str(error):
            raise
    else:
        raise WrongResult(f"a rank that is no member of {group} got {got}")


def misbehave(job: dict[str, Any]) -> None:
    """Cause the job's fault on the victim, unless the fault happens after a delay: other code causes those faults."""
    match job["fault"]:
        case "kill" if job["work"] == "train":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise ValueError(BOOM)
        case "exit":
            sys.exit(0 if job["pause_s"] < 0.35 else 5)
        case "os-exit":
            os._exit(7)
        case "mismatch":
            mscomm.all_gather(np.ones(17, np.uint8))
        case "slow":
            time.sleep(job["pause_s"])
        case "timeout":
            time.sleep(2.5)
        case "descriptors":
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), most))
        case "memory":
            limit_memory(job)


def limit_memory(job: dict[str, Any]) -> None:
    """Let this process allocate at most job["room"] more bytes, of address space or of private memory."""
    field = {"RLIMIT_AS": "VmSize", "RLIMIT_DATA": "VmData"}[job["limit"]]
    used = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert used
    number = getattr(resource, job["limit"])
    _, most = resource.getrlimit(number)
    resource.setrlimit(number, ((int(used[1]) << 10) + job["room"], most))


def one_call(draw: random.Random, group: Any, i: int, functions: list[str]) -> None:
    """Make one random call, the same on all ranks of the group. Compare its result with what NumPy computes."""
    n, me = mscomm.get_group_size(group), mscomm.get_rank(group)
    function = draw.choice(functions)
    each, root = draw.choice(SIZES), draw.randrange(n)
    count = each * n if function in ("reduce_scatter", "scatter", "all_to_all") else each
    dtype = draw.choice(("int64", "int32", "float64"))  # the values are whole numbers, so sums are exact in any order
    shared, beside = draw.random() < 0.4, draw.random() < 0.2
    x = [(np.arange(count) % 1009 * (rank + 1) + i).astype(dtype) for rank in range(n)]
    given = mscomm.empty(count, dtype) if shared else np.empty(count, dtype)
    given[...] = x[me]
    if function == "message":
        got, wanted = message(given, group, i), x[me - 1]
    else:
        call, expected = CALLS[function]
        got = call(given, root, me, {"group": group, "async_op": True} if beside else {"group": group})
        got, wanted = got.wait() if beside else got, expected(x, root, me)
    if not (got is None and wanted is None) and not np.array_equal(got, wanted):
        raise WrongResult(f"{function} of {count} {dtype}, root {root}, on rank {me} of {n}, iteration {i}")


def message(x: np.ndarray[Any, Any], group: Any, i: int) -> np.ndarray[Any, Any]:
    """Send x to the next rank. Return what the previous rank sent."""
    n, me, got = mscomm.get_group_size(group), mscomm.get_rank(group), np.empty_like(x)
    if n == 1:
        return x
    sending = mscomm.send(x, (me + 1) % n, tag=i, group=group, async_op=True)
    mscomm.recv(got, (me - 1) % n, tag=i, group=group)
    sending.wait()
    return got


def part(x: np.ndarray[Any, Any], n: int, me: int) -> np.ndarray[Any, Any]:
    return x.reshape(n, -1)[me]


# For each name, the call and a function that computes its result with NumPy.
CALLS: dict[str, tuple[Any, Any]] = {
    "all_reduce": (lambda x, root, me, o: mscomm.all_reduce(x, **o), lambda x, root, me: sum(x)),
    "all_reduce in place": (lambda x, root, me, o: mscomm.all_reduce(x, out=x, **o), lambda x, root, me: sum(x)),
    "all_gather": (lambda x, root, me, o: mscomm.all_gather(x, **o), lambda x, root, me: np.concatenate(x)),
    "reduce_scatter": (
        lambda x, root, me, o: mscomm.reduce_scatter(x, **o),
        lambda x, root, me: part(sum(x), len(x), me),
    ),
    "broadcast": (lambda x, root, me, o: mscomm.broadcast(x, root, **o), lambda x, root, me: x[root]),
    "reduce": (lambda x, root, me, o: mscomm.reduce(x, root, **o), lambda x, root, me: sum(x) if me == root else None),
    "gather": (
        lambda x, root, me, o: mscomm.gather(x, root, **o),
        lambda x, root, me: np.concatenate(x) if me == root else None,
    ),
    "scatter": (
        lambda x, root, me, o: mscomm.scatter(x if me == root else None, root, **o),
        lambda x, root, me: part(x[root], len(x), me),
    ),
    "all_to_all": (
        lambda x, root, me, o: mscomm.all_to_all(x, **o),
        lambda x, root, me: np.concatenate([part(one, len(x), me) for one in x]),
    ),
    "barrier": (lambda x, root, me, o: mscomm.barrier(**o), lambda x, root, me: None),
}


# -- one job, as seen from outside


class Running:
    """A running job: its processes and its hub. hosts: the hosts on which the ranks run, if the fault is "parted"."""

    def __init__(self, interpreter: Interpreter, job: dict[str, Any], folder: Path, hosts: Hosts | None = None) -> None:
        if hosts:
            in_turn = [rank % len(hosts) for rank in range(job["size"])]
            job = {**job, "hosts": in_turn, "spaces": [host.space for host in hosts]}
        self.job = job
        self.folder = folder
        self._parting = hosts
        self.faults: list[str] = []
        size = job["size"]
        self._hub = hub.Hub(size, key=security.new_key(), topo_timeout_s=60, ranks_known=True, watched=True)
        self._ranks: list[Forked] = []
        self._told: set[int] = set()  # ranks whose end was reported to the hub
        folder.mkdir()
        for rank in range(size):
            ours, theirs = socket.socketpair()
            self._hub.adopt(ours, rank)
            env = {
                **ENVIRONMENT,
                "MSCOMM_RANK": str(rank),
                "MSCOMM_WORLD_SIZE": str(size),
                "MSCOMM_LOCAL_RANK": str(rank),
                "MSCOMM_LOCAL_WORLD_SIZE": str(size),
                "MSCOMM_ALGO": job["algo"],
            }
            if hosts:
                env |= {"MS_NODE_TIMEOUT": str(SILENCE_S), "MSCOMM_SOCKET_IFNAME": "net0"}
            if any(job["hosts"]):
                env["MSCOMM_HOST_ID"] = f"host {job['hosts'][rank]}"
            order = {"name": one_rank.__name__, "parameters": {"job": {**job, "folder": str(folder)}}, "init": None}
            with theirs:
                self._ranks.append(interpreter.start(order, env, folder / f"log.{rank}", theirs))
        self._serving = threading.Thread(target=self._hub.serve)
        self._serving.start()
        self._began = time.monotonic()
        self._stop_at = self._began + 0.3 + job["after_s"] if job["fault"] == "stop" else float("inf")

    def look(self) -> bool:
        """Tell the hub which ranks have ended, and cause the fault if it is due. Return whether processes are left."""
        for rank, process in enumerate(self._ranks):
            if rank not in self._told and (code := process.poll()) is not None:
                self._told.add(rank)
                self._hub.process_ended(rank, how(code), badly=code != 0)
        if len(self._told) == len(self._ranks):
            return False
        if self.job["fault"] == "hub" and len(list(self.folder.glob("up.*"))) == len(self._ranks):
            time.sleep(self.job["after_s"])
            self._hub.stop()  # closes the hub's links without a message, as if its process had been killed
        if self._parting and len(list(self.folder.glob("up.*"))) == len(self._ranks):
            time.sleep(self.job["after_s"])
            self._parting[0].lose(self._parting[1])
            self._parting[1].lose(self._parting[0])
            self._parting = None
        if time.monotonic() > self._stop_at:
            self._stop_at = float("inf")
            victim = self._ranks[self.job["victim"]]
            victim.send_signal(signal.SIGSTOP)
            time.sleep(self.job["pause_s"])
            victim.send_signal(signal.SIGCONT)
        if time.monotonic() - self._began > ENDS_WITHIN_S:
            self._end()
        return True

    def _end(self) -> None:
        hanging = [rank for rank in range(len(self._ranks)) if rank not in self._told]
        self.faults.append(f"ranks {hanging} did not end within {ENDS_WITHIN_S} s")
        for number, pause_s in ((signal.SIGUSR1, 1.0), (signal.SIGKILL, 0.0)):  # SIGUSR1 makes a rank print its stacks
            for rank in hanging:
                self._ranks[rank].send_signal(number)
            time.sleep(pause_s)
        self._began = float("inf")

    def wrong(self) -> list[str]:
        """Check the job after all processes have ended. Return what went wrong, or an empty list if nothing did."""
        self._serving.join(60)
        if self._serving.is_alive():
            self.faults.append("the hub goes on though all ranks have ended")
            self._hub.stop()
            self._serving.join(60)
        codes = [process.wait() for process in self._ranks]
        job = self.job
        if job["fault"] == "memory":
            victims_log = (self.folder / f"log.{job['victim']}").read_text(errors="replace")
            if NO_THREAD_LOCALS in victims_log:
                job = {**job, "fault": "thread-locals"}
        return [*self.faults, *judged(job, codes, self.folder)]

    def kill(self) -> None:
        for process in self._ranks:
            process.kill()
            process.wait()


def run_job(interpreter: Interpreter, job: dict[str, Any], folder: Path) -> list[str]:
    """Run the job and its second job, if it has one. Return what went wrong, or an empty list if nothing did."""
    jobs: list[Running | UnderMpirun] = []
    with contextlib.ExitStack() as stack:
        if job["fault"] == "mpirun":
            jobs.append(UnderMpirun(job, folder / "job"))
        elif job["fault"] == "parted":
            hosts = stack.enter_context(Hosts(2 + (job["three_hosts"] and job["size"] > 2), folder))
            jobs.append(Running(interpreter, job, folder / "job", hosts))
        else:
            jobs.append(Running(interpreter, job, folder / "job"))
        try:
            if job["beside"]:
                jobs.append(Running(interpreter, neighbour(job), folder / "beside"))
            while [one for one in jobs if one.look()]:
                time.sleep(0.005)
        except KeyboardInterrupt:  # Ctrl-C does not reach the ranks, because they are in their own sessions
            for one in jobs:
                one.kill()
            raise
    return [f"{one.folder.name}: {words}" for one in jobs for words in one.wrong()]


def how(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def judged(job: dict[str, Any], codes: list[int], folder: Path) -> Iterator[str]:
    """Compare what the ranks saw with what the fault must cause. Yield a line for each difference."""
    fault, victim = job["fault"], job["victim"]
    exits = {"kill": -9, "raise": 1, "os-exit": 7, "interrupt": -2, "exit": 0 if job["pause_s"] < 0.35 else 5}
    exits |= {"thread-locals": 127}
    kinds = {"raise": "Aborted", "interrupt": "Aborted", "mismatch": "Mismatch", "timeout": "CollectiveTimeout"}
    kinds |= dict.fromkeys(("kill", "exit", "os-exit", "parted", "thread-locals"), "PeerLost")
    kinds |= dict.fromkeys(("stop", "slow", "uneven", "damage"), "none")
    kinds |= dict.fromkeys(("hub", *SHORTAGES), "Aborted")
    words = {"raise": re.escape(BOOM), "os-exit": "exit code 7", "kill": "killed by SIGKILL", "exit": "left the job"}
    # "interrupted in ": if the hub asks the victim where it is before Python has raised the exception, the victim's
    # answer names only the interrupted call, not the exception.
    words |= {"interrupt": "KeyboardInterrupt|interrupted in ", "mismatch": "all_gather"}
    words |= {"hub": "is gone", "descriptors": "Too many open files", "memory": NO_MEMORY}
    words |= {"thread-locals": "exit code 127"}
    for rank, code in enumerate(codes):
        expected = exits.get(fault, 0) if rank == victim else 0
        if fault in SHORTAGES and rank == victim and code == 1:
            log = (folder / f"log.{rank}").read_text(errors="replace")
            if not re.search(words[fault], log):  # the victim ended because of the shortage, so its log must say so
                yield f"rank {rank} does not say what it lacked"
            continue
        if code != expected:
            yield f"rank {rank}: {how(code)}, expected {how(expected)}"
        if rank == victim and fault in exits:
            continue
        try:
            saw = json.loads((folder / f"saw.{rank}").read_text())
        except FileNotFoundError:
            yield f"rank {rank} saw nothing"
            continue
        # The victim may have left the job because another of its groups had failed. In that case, the errors of the
        # other ranks contain one of the two phrases below. With a shortage, this may be the new group, see
        # use_new_group(): its first call needs descriptors and memory for links.
        gave_up = (job["groups"] != "none" or fault in SHORTAGES) and re.search(
            r"before that another group of that rank failed|before that, the job failed", saw.get("text", "")
        )
        if fault in (*SHORTAGES, "thread-locals") and saw["kind"] == "none":
            continue  # the victim did not need what it lacked, or ended after its last call
        if fault == "thread-locals" and saw["kind"] == "Aborted" and re.search(NO_MEMORY, saw["text"]):
            continue  # the victim had already raised MemoryError when glibc ended it
        if saw["kind"] != ("PeerLost" if gave_up else kinds[fault]):
            yield f"rank {rank} raised {saw['kind']}, expected {kinds[fault]}: {saw.get('text')}"
            continue
        if kinds[fault] == "none":
            continue
        named = saw["waiting_for"] if fault == "timeout" else saw["ranks"]
        if fault == "hub":
            right = named == []
        elif fault == "parted":  # a lost link does not show which of its two hosts is cut off: a rank may name either
            right = gave_up or (named and all(job["hosts"][one] < 2 for one in named))
        elif fault == "mismatch":
            right = bool(re.search(rf"ranks? [\d, ]*\b{victim}\b[\d, ]* called all_gather", saw["text"]))
        else:
            right = (named == [victim] or gave_up) and f"rank {victim}" in saw["text"]
        if not right or not re.search(words.get(fault, ""), saw["text"]):
            yield f"rank {rank} does not name rank {victim} as it should: {named}: {saw['text']}"
        if saw["in_new_group"]:  # the next call was on the world, whose error has a different text
            as_before = f"rank {victim}" in saw["again"] or fault in ("hub", "parted")
        else:
            as_before = saw["again"] == f"{saw['kind']}: {saw['text']}"
        if not as_before:
            yield f"rank {rank}: the next call raised something else: {saw['again']} after {saw['text']}"


def shared_files() -> set[str]:
    """Return the files in /dev/shm, except those of MPI libraries and stand-ins that run at the same time."""
    return {
        name
        for name in os.listdir("/dev/shm")
        if not re.match(r"mpich_shm|sm_segment|vader_segment|Intel_MPI|mscomm-fake", name)
    }


def soak(
    faults: int, seed: int, kinds: Sequence[str], only: int | None = None, minutes: float = float("inf")
) -> Counter[str]:
    """Run the jobs. Return the number of successful jobs for each fault and, under "failed", the number of failed jobs.
    Print the failed jobs.
    """
    done: Counter[str] = Counter()
    shared_before, until = shared_files(), time.monotonic() + 60 * minutes
    interpreter = Interpreter(__file__, ENVIRONMENT)
    assert interpreter.suits(ENVIRONMENT), "the imports of soak.py have started threads: its ranks cannot be forked"
    opened: list[int] = []
    try:
        for index in range(faults) if only is None else [only]:
            if time.monotonic() > until:
                break
            with tempfile.TemporaryDirectory(prefix="mscomm-soak-") as folder:
                job = plan(seed, index, kinds)
                wrong = run_job(interpreter, job, Path(folder))
                opened.append(sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in ("self", interpreter.pid)))
                if opened[-1] > opened[0]:
                    wrong.append(f"{opened[-1] - opened[0]} descriptors more are open than after the first job")
                    opened[0] = opened[-1]
                if left := shared_files() - shared_before:
                    wrong.append(f"left in /dev/shm: {', '.join(sorted(left))}")
                    shared_before |= left
                done[job["fault"] if not wrong else "failed"] += 1
                if wrong:
                    print(f"FAILED job {index}: {json.dumps(job)}\n  " + "\n  ".join(wrong))
                    for log in sorted(Path(folder).glob("*/log.*")):
                        if text := log.read_text(errors="replace").strip():
                            print(f"  --- {log.parent.name}/{log.name}\n{text[-6000:]}")
                    own = "" if tuple(kinds) == FAULTS else f" --kinds {','.join(kinds)}"
                    print(f"  again: python tests/soak.py --seed {seed}{own} --only {index}", flush=True)
    except KeyboardInterrupt:
        print("interrupted")
    finally:
        interpreter.close()
    return done


def missing() -> dict[str, str]:
    """Return the kinds of fault that are impossible on this machine, and why."""
    found = {}
    if not MPIRUN.exists():
        found["mpirun"] = f"there is no {MPIRUN}"
    if os.getuid() != 0 or shutil.which("ip") is None:
        found["parted"] = "network namespaces need root and iproute2"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--faults", type=int, default=1000, help="how many jobs (1000)")
    parser.add_argument("--seed", type=int, default=1, help="of all that is random but the machine (1)")
    parser.add_argument("--kinds", default=",".join(FAULTS), help="the kinds of fault, separated by commas (all)")
    parser.add_argument("--only", type=int, help="run that job alone")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()
    kinds = given.kinds.split(",")
    if unknown := sorted(set(kinds) - set(FAULTS)):
        parser.error(f"--kinds: no fault is named {', '.join(unknown)}; there is {', '.join(FAULTS)}")
    if lacking := sorted(set(kinds) & set(missing())):
        print(f"left out on this machine: {', '.join(f'{kind} ({missing()[kind]})' for kind in lacking)}")
        kinds = [kind for kind in kinds if kind not in lacking]
        if not kinds:
            parser.error("no kind of fault is left")
    done = soak(given.faults, given.seed, kinds, given.only, given.minutes)
    words = ", ".join(f"{done[fault]} {fault}" for fault in FAULTS if done[fault])
    print(
        f"{done.total()} jobs in {time.monotonic() - began:.0f} s, seed {given.seed}: {words}; {done['failed']} failed"
    )
    sys.exit(done["failed"] > 0)


if __name__ == "__main__":
    main()
