"""Many jobs in a row, each with one fault at a random moment: `python tests/soak.py --faults 1000 --seed 7`.

Every job has 2 to 8 ranks, a random transport and a random loop of collectives whose results are checked. Then one rank
is killed, is stopped for a while, raises, exits, gets Ctrl-C, makes a different call from the others, is slow, or does
not come. The checks are: the job ends; no result was wrong; every other rank names the right first cause and raises it
again at its next call; each process has the right exit code; nothing is left behind. In some jobs, a rank tries to use
a group of which it is no member. Some jobs have a second job beside them, which must not notice the fault. Others train
instead: with uneven data, or from checkpoints after those of one rank were damaged.

A failure prints the job and how to run it alone: `--only INDEX`. To save time, the ranks are forked from a process that
has only imported numpy and mscomm; they join the job after the fork.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import random
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import soak_training
from soak_training import WrongResult

import mscomm
from mscomm.cluster import hub, security

ENDS_WITHIN_S = 60  # a generous bound on a busy machine; a job takes less than two seconds
FAULTS = ("kill", "stop", "raise", "exit", "os-exit", "interrupt", "mismatch", "slow", "timeout", "uneven", "damage")
TRANSPORTS = ("", "all_reduce=arena", "direct", "ring", "tree", "all_to_all=pairwise")
SIZES = (1, 7, 1000, 5000, 100_000)
ITERATIONS = 25  # in a job that does not fail
BOOM = "the 7th file is empty"


# -- the plan of a job: a pure function of seed and index


def plan(seed: int, index: int) -> dict[str, Any]:
    draw = random.Random(f"{seed}:{index}")
    size = draw.randint(2, 8)
    split = draw.choice(("one", "one", "halves", "turns"))
    algo = draw.choice(TRANSPORTS)
    if "arena" in algo:
        split = "one"
    fault, victim = draw.choice(FAULTS), draw.randrange(size)
    steps = [draw.randint(rank == victim, soak_training.MOST_STEPS) for rank in range(size)]
    works = {"uneven": "train", "damage": "resume"}
    if fault in ("kill", "raise", "os-exit") and draw.random() < 0.25:
        works[fault] = "train"
    return {
        "seed": f"{seed}:{index}",
        "work": works.get(fault, "calls"),
        "steps": steps,  # by rank, for jobs that train
        "size": size,
        "algo": algo,
        "hosts": [{"one": 0, "halves": int(2 * rank >= size), "turns": rank % 2}[split] for rank in range(size)],
        "fault": fault,
        "victim": victim,
        "at": draw.randrange(ITERATIONS),  # the iteration, or ...
        "after_s": draw.random() * 0.2,  # ... the time after the start
        "pause_s": 0.1 + draw.random() * 0.5,
        # Besides the world, groups of the even and of the odd ranks. Every rank creates both or splits off its own.
        "groups": draw.choice(("none", "none", "none", "created", "split")),
        "beside": draw.random() < 0.2,  # a second job, which does not fail, runs at the same time
    }


def neighbour(job: dict[str, Any]) -> dict[str, Any]:
    """The second job: two ranks on the same host or hosts, with the same transport and no fault but a pause."""
    calm = {"fault": "slow", "victim": 0, "work": "calls"}
    return {**job, **calm, "seed": f"{job['seed']}:beside", "size": 2, "hosts": job["hosts"][:2]}


# -- a rank


def be_a_rank(job: dict[str, Any]) -> None:
    """Join, loop until the fault, record what this rank saw, leave."""
    for variable, value in job["env"].items():
        os.environ[variable] = value
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit SIGINT as ignored
    mscomm.init()
    rank, seen = mscomm.get_rank(), Path(job["folder"], f"saw.{mscomm.get_rank()}")
    victim, fault = job["victim"], job["fault"]
    groups, foreign = made_groups(job["groups"], rank)
    last = ITERATIONS if fault in ("stop", "slow") else 1 << 30
    group = None
    try:
        mscomm.barrier()  # the fault may hit another rank that is still in this barrier
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
                    mscomm.barrier()  # so that only the victim is late
                if i == job["at"] and rank == victim:
                    misbehave(job)
                if i == job["at"] and fault == "timeout":
                    mscomm.all_reduce(np.ones(3), timeout=1)
                one_call(draw, group, i, list(CALLS) if i == job["at"] else [*CALLS, "message"])
    except mscomm.Error as error:
        again = ""
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
        seen.write_text(json.dumps({**words, "again": again}))
    else:
        seen.write_text(json.dumps({"kind": "none"}))


def made_groups(how: str, rank: int) -> tuple[list[Any], list[Any]]:
    """The groups of this rank, with the world first, and the groups of which it is no member."""
    if how == "none":
        return [None], []
    if how == "split":
        return [None, mscomm.split(rank % 2)], []
    size = mscomm.get_group_size()
    made = [mscomm.create_group(f"from {first}", list(range(first, size, 2))) for first in (0, 1)]
    return [None, *filter(None, made)], [group for group in made if not group]


def refused(group: Any) -> None:
    """This rank is no member: the call must neither reach another group nor wait."""
    try:
        got = mscomm.all_reduce(np.ones(3), group=group)
    except RuntimeError as error:
        if isinstance(error, mscomm.Error) or "is no member of" not in str(error):
            raise
    else:
        raise WrongResult(f"a rank that is no member of {group} got {got}")


def misbehave(job: dict[str, Any]) -> None:
    """The victim's part in the faults that come at an iteration."""
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


def one_call(draw: random.Random, group: Any, i: int, functions: list[str]) -> None:
    """Make one random call, the same on all ranks of the group, and compare its result with NumPy."""
    n, me = mscomm.get_group_size(group), mscomm.get_rank(group)
    function = draw.choice(functions)
    each, root = draw.choice(SIZES), draw.randrange(n)
    count = each * n if function in ("reduce_scatter", "scatter", "all_to_all") else each
    dtype = draw.choice(("int64", "int32", "float64"))  # whole numbers: sums are exact in any order
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
    """Send a message from each rank to the next."""
    n, me, got = mscomm.get_group_size(group), mscomm.get_rank(group), np.empty_like(x)
    if n == 1:
        return x
    sending = mscomm.send(x, (me + 1) % n, tag=i, group=group, async_op=True)
    mscomm.recv(got, (me - 1) % n, tag=i, group=group)
    sending.wait()
    return got


def part(x: np.ndarray[Any, Any], n: int, me: int) -> np.ndarray[Any, Any]:
    return x.reshape(n, -1)[me]


# name: the call, and the same with NumPy
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


# -- the process from which ranks are forked


def serve_forks(orders: socket.socket) -> dict[str, Any] | None:
    """Fork a process for each order. Returns the job in the child, and None here at the end."""
    children: dict[int, int] = {}  # pidfd: pid
    with selectors.DefaultSelector() as selector:
        selector.register(orders, selectors.EVENT_READ)
        while True:
            for ready, _ in selector.select():
                if ready.fd != orders.fileno():
                    selector.unregister(ready.fd)
                    pid = children.pop(ready.fd)
                    os.close(ready.fd)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    orders.sendall(json.dumps({"pid": pid, "code": code}).encode())
                    continue
                data, fds, _, _ = socket.recv_fds(orders, 1 << 16, 1)
                if not data:
                    return None
                job = json.loads(data)
                pid = os.fork()
                if pid == 0:
                    orders.close()
                    for fd in children:
                        os.close(fd)
                    job["env"]["MSCOMM_CONTROL_FD"] = str(fds[0])
                    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                    os.dup2(log, 1)
                    os.dup2(log, 2)
                    os.close(log)
                    return job
                os.close(fds[0])
                pidfd = os.pidfd_open(pid)
                children[pidfd] = pid
                selector.register(pidfd, selectors.EVENT_READ)
                orders.sendall(json.dumps({"pid": pid}).encode())


class Forks:
    """That process, as seen from outside. Its socket preserves message boundaries."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-u", __file__, "--fork-from", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
            )
        self.codes: dict[int, int] = {}

    def start(self, job: dict[str, Any], fd: int) -> int:
        socket.send_fds(self._ours, [json.dumps(job).encode()], [fd])
        while "code" in (answer := self._answer(30)):
            self.codes[answer["pid"]] = answer["code"]
        return int(answer["pid"])

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        self._ours.settimeout(timeout_s)
        data = self._ours.recv(1 << 16)
        if not data:
            raise RuntimeError("the process that forks ranks has ended")
        return dict(json.loads(data))

    def ended(self, within_s: float) -> int | None:
        """The pid of the next process that ends, if one does in time."""
        try:
            answer = self._answer(within_s)
        except TimeoutError:
            return None
        self.codes[answer["pid"]] = answer["code"]
        return int(answer["pid"])

    def close(self) -> None:
        self._ours.close()
        self.process.wait(30)


# -- one job, as seen from outside


class Running:
    """A job's processes and its hub, until all have ended."""

    def __init__(self, forks: Forks, job: dict[str, Any], folder: Path) -> None:
        self.job = job
        self.folder = folder
        self.faults: list[str] = []
        self._forks = forks
        size = job["size"]
        self._hub = hub.Hub(size, key=security.new_key(), topo_timeout_s=60, ranks_known=True, watched=True)
        self._pids: list[int] = []
        self._told: set[int] = set()  # ranks whose end the hub was told
        folder.mkdir()
        for rank in range(size):
            ours, theirs = socket.socketpair()
            self._hub.adopt(ours, rank)
            env = {
                "MSCOMM_RANK": str(rank),
                "MSCOMM_WORLD_SIZE": str(size),
                "MSCOMM_LOCAL_RANK": str(rank),
                "MSCOMM_LOCAL_WORLD_SIZE": str(size),
                "MSCOMM_ALGO": job["algo"],
            }
            if any(job["hosts"]):
                env["MSCOMM_HOST_ID"] = f"host {job['hosts'][rank]}"
            order = {**job, "env": env, "folder": str(folder), "log": str(folder / f"log.{rank}")}
            with theirs:
                self._pids.append(forks.start(order, theirs.fileno()))
        self._serving = threading.Thread(target=self._hub.serve)
        self._serving.start()
        self._began = time.monotonic()
        self._stop_at = self._began + 0.3 + job["after_s"] if job["fault"] == "stop" else float("inf")

    def look(self) -> bool:
        """Do what is due now. Returns whether processes are left."""
        for rank, pid in enumerate(self._pids):
            if pid in self._forks.codes and rank not in self._told:
                self._told.add(rank)
                code = self._forks.codes[pid]
                self._hub.process_ended(rank, how(code), badly=code != 0)
        if len(self._told) == len(self._pids):
            return False
        if time.monotonic() > self._stop_at:
            self._stop_at = float("inf")
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[self.job["victim"]], signal.SIGSTOP)
                time.sleep(self.job["pause_s"])
                os.kill(self._pids[self.job["victim"]], signal.SIGCONT)
        if time.monotonic() - self._began > ENDS_WITHIN_S:
            self._end()
        return True

    def _end(self) -> None:
        hanging = [rank for rank in range(len(self._pids)) if rank not in self._told]
        self.faults.append(f"ranks {hanging} did not end within {ENDS_WITHIN_S} s")
        for number, pause_s in ((signal.SIGUSR1, 1.0), (signal.SIGKILL, 0.0)):  # first their stacks
            for rank in hanging:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pids[rank], number)
            time.sleep(pause_s)
        self._began = float("inf")

    def wrong(self) -> list[str]:
        """When all processes have ended: what went wrong; empty if nothing did."""
        self._serving.join(10)
        if self._serving.is_alive():
            self.faults.append("the hub goes on though all ranks have ended")
            self._hub.stop()
            self._serving.join(10)
        codes = [self._forks.codes.pop(pid) for pid in self._pids]
        return [*self.faults, *judged(self.job, codes, self.folder)]


def run_job(forks: Forks, job: dict[str, Any], folder: Path) -> list[str]:
    """Run the job, and the one beside it. Returns what went wrong; empty if nothing did."""
    jobs = [Running(forks, job, folder / "job")]
    if job["beside"]:
        jobs.append(Running(forks, neighbour(job), folder / "beside"))
    while [one for one in jobs if one.look()]:
        forks.ended(0.05)
    return [f"{one.folder.name}: {words}" for one in jobs for words in one.wrong()]


def how(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def judged(job: dict[str, Any], codes: list[int], folder: Path) -> Iterator[str]:
    """Compare what the ranks saw with what the fault must cause."""
    fault, victim = job["fault"], job["victim"]
    exits = {"kill": -9, "raise": 1, "os-exit": 7, "interrupt": -2, "exit": 0 if job["pause_s"] < 0.35 else 5}
    kinds = {"raise": "Aborted", "interrupt": "Aborted", "mismatch": "Mismatch", "timeout": "CollectiveTimeout"}
    kinds |= dict.fromkeys(("kill", "exit", "os-exit"), "PeerLost") | dict.fromkeys(
        ("stop", "slow", "uneven", "damage"), "none"
    )
    words = {"raise": re.escape(BOOM), "os-exit": "exit code 7", "kill": "killed by SIGKILL", "exit": "left the job"}
    # If the hub asks before the exception has reached Python, it learns only in which call it came, not its name.
    words |= {"interrupt": "KeyboardInterrupt|interrupted in ", "mismatch": "all_gather"}
    for rank, code in enumerate(codes):
        expected = exits.get(fault, 0) if rank == victim else 0
        if code != expected:
            yield f"rank {rank}: {how(code)}, expected {how(expected)}"
        if rank == victim and fault in exits:
            continue
        try:
            saw = json.loads((folder / f"saw.{rank}").read_text())
        except FileNotFoundError:
            yield f"rank {rank} saw nothing"
            continue
        # A group may lose a rank that gave up because another of its groups had failed; the text then says so.
        gave_up = job["groups"] != "none" and "before that another group of that rank failed" in saw.get("text", "")
        if saw["kind"] != ("PeerLost" if gave_up else kinds[fault]):
            yield f"rank {rank} raised {saw['kind']}, expected {kinds[fault]}: {saw.get('text')}"
            continue
        if kinds[fault] == "none":
            continue
        named = saw["waiting_for"] if fault == "timeout" else saw["ranks"]
        if fault == "mismatch":
            right = bool(re.search(rf"ranks? [\d, ]*\b{victim}\b[\d, ]* called all_gather", saw["text"]))
        else:
            right = (named == [victim] or gave_up) and f"rank {victim}" in saw["text"]
        if not right or not re.search(words.get(fault, ""), saw["text"]):
            yield f"rank {rank} does not name rank {victim} as it should: {named}: {saw['text']}"
        if saw["again"] != f"{saw['kind']}: {saw['text']}":
            yield f"rank {rank}: the next call raised something else: {saw['again']} after {saw['text']}"


def shared_files() -> set[str]:
    """The files in /dev/shm, except those of MPIs that run beside us."""
    return {
        name for name in os.listdir("/dev/shm") if not re.match(r"mpich_shm|sm_segment|vader_segment|Intel_MPI", name)
    }


def soak(faults: int, seed: int, only: int | None = None, minutes: float = float("inf")) -> Counter[str]:
    """Run the jobs. Returns, by fault, how many went well; "failed" counts the others, which are printed."""
    done: Counter[str] = Counter()
    shared_before, until = shared_files(), time.monotonic() + 60 * minutes
    forks = Forks()
    opened: list[int] = []
    try:
        for index in range(faults) if only is None else [only]:
            if time.monotonic() > until:
                break
            with tempfile.TemporaryDirectory(prefix="mscomm-soak-") as folder:
                job = plan(seed, index)
                wrong = run_job(forks, job, Path(folder))
                opened.append(sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in ("self", forks.process.pid)))
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
                    print(f"  again: python tests/soak.py --seed {seed} --only {index}", flush=True)
    except KeyboardInterrupt:
        print("interrupted")
    finally:
        forks.close()
    return done


def main() -> dict[str, Any] | None:
    """Run the soak test. In a forked rank, returns its job, to run at the top level of the script so that it exits like
    a script.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--faults", type=int, default=1000, help="how many jobs (1000)")
    parser.add_argument("--seed", type=int, default=1, help="of all that is random but the machine (1)")
    parser.add_argument("--only", type=int, help="run that job alone")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--fork-from", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.fork_from is not None:
        return serve_forks(socket.socket(fileno=given.fork_from))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()
    done = soak(given.faults, given.seed, given.only, given.minutes)
    words = ", ".join(f"{done[fault]} {fault}" for fault in FAULTS if done[fault])
    print(
        f"{done.total()} jobs in {time.monotonic() - began:.0f} s, seed {given.seed}: {words}; {done['failed']} failed"
    )
    sys.exit(done["failed"] > 0)


if __name__ == "__main__":
    mine = main()
    if mine is not None:
        be_a_rank(mine)
