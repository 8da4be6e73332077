"""Trainings of PyTorch over mscomm that each lose a rank: `python tests/soak_torch.py --ddp 50 --fsdp 20 --seed 7`.

Each trial has 2 to 4 ranks, which find each other through MASTER_ADDR, RANK and so on, without a launcher. They train
with DistributedDataParallel, or with FSDP2 (fully_shard). One rank kills itself with SIGKILL at a random moment of the
forward pass, the backward pass or the optimizer's step. If rank 0 is killed, torch's store ends with it.

Every other rank must raise mscomm.PeerLost, a RuntimeError that names the killed rank and its process id. (In the
backward pass of DistributedDataParallel, PyTorch makes a plain RuntimeError with the text of it.) Then the rank must
end by itself, with the right exit code, in one of three ways: the script catches the error and destroys the process
group; it catches the error and ends without that; or it does not catch the error, so that the process ends with a
traceback. Nothing may be left behind.

At the end, soak_torch.py prints how long it took from the kill until a rank raised the error. If a trial fails, it
prints the trial, its logs, and how to run it alone: `--only KIND:INDEX`. To save time, the ranks are forked from a
process that has imported PyTorch (interpreter.py).
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # otherwise, each rank imports it, in DistributedDataParallel
import torch.distributed as dist
from interpreter import Interpreter
from ranks import ranks
from sessions import MARK, clean_environment, free_port, marked
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

ENDS_WITHIN_S = 120  # a generous bound, even on a busy machine; an idle machine runs a trial in a few seconds
RAISES_WITHIN_S = 10  # from the kill; also generous: an idle machine needs a few milliseconds
KINDS = ("ddp", "fsdp")
PHASES = ("forward", "backward", "step")
ENDINGS = ("destroys", "ends", "raises")
ENVIRONMENT = clean_environment(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")


# -- the plan of a trial: a pure function of seed, kind and index


def plan(seed: int, kind: str, index: int) -> dict[str, Any]:
    draw = random.Random(f"{seed} {kind} {index}")
    size = draw.randint(2, 4)
    return {
        "kind": kind,
        "size": size,
        "victim": draw.randrange(size),
        "step": draw.randint(1, 10),
        "phase": draw.choice(PHASES),
        "share": draw.random(),  # when in the phase, as a share of its time in the step before
        "ending": draw.choice(ENDINGS),
    }


# -- what each rank of a trial does


@ranks("size", init=None)
def one_rank(rank: int, trial: dict[str, Any]) -> None:
    """Train until an error is raised, write down what this rank saw, and end."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    folder = Path(trial["folder"])
    dist.init_process_group("mscomm")
    try:
        train(trial["kind"], Killer(trial, folder).enter if rank == trial["victim"] else lambda name, step: None)
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        saw = {"at": time.monotonic(), "kinds": kinds, "text": str(error)}
        (folder / f"saw.{rank}").write_text(json.dumps(saw))
        if trial["ending"] == "raises":
            raise
    if trial["ending"] == "destroys":
        dist.destroy_process_group()


def train(kind: str, enter: Callable[[str, int], None]) -> None:
    """Train without end. Call enter() when a phase of a step begins."""
    torch.manual_seed(1)
    layers = [torch.nn.Linear(300, 300) for _ in range(4)]
    model: Any = torch.nn.Sequential(*layers)
    if kind == "ddp":
        model = DistributedDataParallel(model, bucket_cap_mb=0.3)  # one bucket for each layer
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (*layers, model):
            fully_shard(module, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    for step in range(1 << 30):
        optimizer.zero_grad()
        enter("forward", step)
        loss = model(torch.randn(32, 300)).square().mean()
        enter("backward", step)
        loss.backward()
        enter("step", step)
        optimizer.step()


class Killer:
    """Kills this process while it is in the phase that the trial names."""

    def __init__(self, trial: dict[str, Any], folder: Path) -> None:
        self._trial = trial
        self._folder = folder
        self._phase = ""
        self._began = 0.0
        self._took: dict[str, float] = {}  # how long each phase took when it was entered last

    def enter(self, name: str, step: int) -> None:
        now = time.monotonic()
        self._took[self._phase] = now - self._began
        self._phase, self._began = name, now
        if step == self._trial["step"] and name == self._trial["phase"]:
            threading.Timer(self._took[name] * self._trial["share"], self._kill).start()

    def _kill(self) -> None:
        words = json.dumps({"at": time.monotonic(), "pid": os.getpid(), "phase": self._phase})
        (self._folder / "killed").write_text(words)
        os.kill(os.getpid(), signal.SIGKILL)


# -- one trial, as seen from outside


def run(interpreter: Interpreter, trial: dict[str, Any], folder: Path) -> tuple[list[str], str, list[float]]:
    """Run the trial. Return what went wrong, the phase of the kill, and how long each rank took from the kill until it
    raised the error.
    """
    size, victim = trial["size"], trial["victim"]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    order = {"name": one_rank.__name__, "parameters": {"trial": {**trial, "folder": str(folder)}}, "init": None}
    processes = []
    for rank in range(size):
        env = {**ENVIRONMENT, **job, "RANK": str(rank), "MSCOMM_RANK": str(rank), MARK: str(folder)}
        ours, theirs = socket.socketpair()  # the interpreter expects a control link, which these ranks do not use
        with ours, theirs:
            processes.append(interpreter.start(order, env, folder / f"log.{rank}", theirs))
    wrong = _ended(lambda: [one.pid for one in processes if one.poll() is None], "ranks")
    wrong += _ended(lambda: list(marked(folder)), "other processes")
    try:
        killed = json.loads((folder / "killed").read_text())
    except FileNotFoundError:
        return [*wrong, "the victim was not killed"], "no phase", []
    named, took = f"rank {victim} (pid {killed['pid']} ", []
    for rank, process in enumerate(processes):
        code, expected = process.wait(), -signal.SIGKILL if rank == victim else int(trial["ending"] == "raises")
        if code != expected:
            wrong.append(f"rank {rank} ended with {code}, expected {expected}")
        if rank == victim:
            continue
        try:
            saw = json.loads((folder / f"saw.{rank}").read_text())
        except FileNotFoundError:
            wrong.append(f"rank {rank} raised nothing")
            continue
        took.append(saw["at"] - killed["at"])
        lost = "PeerLost" in saw["kinds"] or (trial["kind"] == "ddp" and "PeerLost: " in saw["text"])
        if "RuntimeError" not in saw["kinds"] or not lost or named not in saw["text"]:
            wrong.append(f"rank {rank} raised {saw['kinds'][0]}: {saw['text']}")
        if took[-1] > RAISES_WITHIN_S:
            wrong.append(f"rank {rank} raised the error {took[-1]:.1f} s after the kill")
        log = (folder / f"log.{rank}").read_text()
        if (trial["ending"] == "raises") != ("Traceback" in log and named in log):
            wrong.append(f"rank {rank} printed a wrong traceback, or none")
    return wrong, killed["phase"], took


def _ended(left: Callable[[], list[int]], what: str) -> list[str]:
    """Wait until no process is left. After ENDS_WITHIN_S, kill those that are left, and return a line about them."""
    until = time.monotonic() + ENDS_WITHIN_S
    while (pids := left()) and time.monotonic() < until:
        time.sleep(0.05)
    for number in (signal.SIGUSR1, signal.SIGKILL):  # SIGUSR1 makes a rank print its stacks
        for pid in set(pids) & set(left()):
            os.kill(pid, number)
        time.sleep(1 if pids else 0)
    return [f"{what} {pids} did not end within {ENDS_WITHIN_S} s"] if pids else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ddp", type=int, default=50, help="how many trials with DistributedDataParallel (50)")
    parser.add_argument("--fsdp", type=int, default=20, help="how many trials with FSDP2 (20)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 24))
    parser.add_argument("--only", help="run this trial alone, such as ddp:7")
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    began, failed, phases = time.monotonic(), 0, Counter[str]()
    took: list[float] = []
    trials = [(kind, index) for kind in KINDS for index in range(getattr(args, kind))]
    if args.only:
        kind, _, number = args.only.partition(":")
        trials = [(kind, int(number))]
    interpreter = Interpreter(__file__, ENVIRONMENT)
    assert interpreter.suits(ENVIRONMENT), "the imports of soak_torch.py have started threads: it cannot fork the ranks"
    for kind, index in trials:
        trial = plan(args.seed, kind, index)
        with tempfile.TemporaryDirectory(prefix="mscomm-torch-") as folder:
            wrong, phase, times = run(interpreter, trial, Path(folder))
            phases[phase] += 1
            took += times
            if wrong:
                failed += 1
                print(f"FAILED {kind}:{index}: {json.dumps(trial)}\n  " + "\n  ".join(wrong))
                for log in sorted(Path(folder).glob("log.*")):
                    print(f"--- {log.name}\n{log.read_text()[-6000:]}")
                print(f"alone: python tests/soak_torch.py --seed {args.seed} --only {kind}:{index}", flush=True)
    interpreter.close()
    words = ", ".join(f"{count} in {phase}" for phase, count in sorted(phases.items()))
    head = f"{len(trials)} trials in {time.monotonic() - began:.0f} s, seed {args.seed}"
    print(f"{head}: killed {words}; {failed} failed")
    if took:
        median, longest = statistics.median(took), max(took)
        print(f"{len(took)} ranks raised: median {median:.3f} s after the kill, longest {longest:.3f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
