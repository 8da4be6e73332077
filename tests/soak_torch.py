"""Trainings of PyTorch over mscomm that each lose a rank: `python tests/soak_torch.py --ddp 50 --fsdp 20 --seed 7`.

Each trial starts 2 to 4 ranks as plain processes, as a user does who sets MASTER_ADDR, RANK and so on. They train with
DistributedDataParallel, or with FSDP2 (fully_shard). One rank kills itself with SIGKILL at a random moment of the
forward pass, the backward pass or the optimizer's step. If rank 0 is killed, torch's store ends with it.

Every other rank must raise mscomm.PeerLost, a RuntimeError that names the killed rank and its process id. (In the
backward pass of DistributedDataParallel, PyTorch makes a plain RuntimeError with the text of it.) Then the rank must
end by itself, with the right exit code, in one of three ways: the script catches the error and destroys the process
group; it catches the error and ends without that; or it does not catch the error, so that the process ends with a
traceback. Nothing may be left behind.

At the end, soak_torch.py prints how long it took from the kill until a rank raised the error. If a trial fails, it
prints the trial, its logs, and how to run it alone: `--only KIND:INDEX`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from sessions import MARK, clean_environment, free_port, marked

ENDS_WITHIN_S = 60  # a generous bound, even on a busy machine; an idle machine runs a trial in a few seconds
RAISES_WITHIN_S = 10  # from the kill; also generous: an idle machine needs a few milliseconds
KINDS = ("ddp", "fsdp")
PHASES = ("forward", "backward", "step")
ENDINGS = ("destroys", "ends", "raises")

TRAINING = """
import faulthandler, json, os, random, signal, sys, threading, time
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

faulthandler.enable()
faulthandler.register(signal.SIGUSR1)
trial, rank = json.loads(sys.argv[1]), int(os.environ["RANK"])
torch.set_num_threads(1)
torch.manual_seed(1)
dist.init_process_group("mscomm")
layers = [torch.nn.Linear(300, 300) for _ in range(4)]
model = torch.nn.Sequential(*layers)
if trial["kind"] == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.3)  # one bucket for each layer
else:
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (*layers, model):
        fully_shard(layer, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), 1e-4)
took = {}


def write(name, words):
    with open(f"{name}.{rank}.draft", "w") as file:
        json.dump(words, file)
    os.replace(f"{name}.{rank}.draft", f"{name}.{rank}")


def die():
    write("killed", {"at": time.monotonic(), "pid": os.getpid(), "phase": phase})
    os.kill(os.getpid(), signal.SIGKILL)


def enter(name, step):
    global phase
    phase = name
    began[name] = time.monotonic()
    if rank == trial["victim"] and step == trial["step"] and name == trial["phase"]:
        threading.Timer(took[name] * trial["share"], die).start()


try:
    for step in range(1 << 30):
        began = {}
        optimizer.zero_grad()
        enter("forward", step)
        loss = model(torch.randn(32, 300)).square().mean()
        enter("backward", step)
        loss.backward()
        enter("step", step)
        optimizer.step()
        times = [*began.values(), time.monotonic()]
        took = {name: after - before for name, before, after in zip(began, times, times[1:])}
except Exception as error:
    kinds = [kind.__name__ for kind in type(error).__mro__]
    write("saw", {"at": time.monotonic(), "kinds": kinds, "text": str(error)})
    if trial["ending"] == "raises":
        raise
if trial["ending"] == "destroys":
    dist.destroy_process_group()
"""


def plan(seed: int, kind: str, index: int) -> dict[str, Any]:
    draw = random.Random(f"{seed} {kind} {index}")
    size = draw.randint(2, 4)
    return {
        "kind": kind,
        "size": size,
        "victim": draw.randrange(size),
        "step": draw.randint(1, 10),
        "phase": draw.choice(PHASES),
        "share": draw.random(),  # of the time that the phase took in the step before
        "ending": draw.choice(ENDINGS),
    }


class Ranks:
    """The ranks of a trial."""

    def __init__(self, trial: dict[str, Any], folder: Path) -> None:
        self._trial = trial
        self._folder = folder
        (folder / "train.py").write_text(TRAINING)
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(trial["size"])}
        env = clean_environment(**job, OMP_NUM_THREADS="1", **{MARK: str(folder)})
        self._processes = []
        for rank in range(trial["size"]):
            with self._log(rank).open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "train.py", json.dumps(trial)],
                    cwd=folder,
                    env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            self._processes.append(process)

    def _log(self, rank: int) -> Path:
        return self._folder / f"log.{rank}"

    def wrong(self) -> tuple[list[str], str, list[float]]:
        """Wait for the end of all ranks. Return what went wrong, the phase of the kill, and how long each rank took
        from the kill until it raised the error.
        """
        wrong = self._hanging()
        try:
            killed = json.loads((self._folder / f"killed.{self._trial['victim']}").read_text())
        except FileNotFoundError:
            return [*wrong, "the victim was not killed"], "no", []
        took = []
        for rank, process in enumerate(self._processes):
            code, victim = process.returncode, rank == self._trial["victim"]
            expected = -signal.SIGKILL if victim else int(self._trial["ending"] == "raises")
            if code != expected:
                wrong.append(f"rank {rank} ended with {code}, expected {expected}")
            if victim:
                continue
            try:
                saw = json.loads((self._folder / f"saw.{rank}").read_text())
            except FileNotFoundError:
                wrong.append(f"rank {rank} raised nothing")
                continue
            took.append(saw["at"] - killed["at"])
            named = f"rank {self._trial['victim']} (pid {killed['pid']} "
            # DistributedDataParallel puts the name of the error that a future holds into the text of a RuntimeError.
            lost = "PeerLost" in saw["kinds"] or (self._trial["kind"] == "ddp" and "PeerLost: " in saw["text"])
            if "RuntimeError" not in saw["kinds"] or not lost or named not in saw["text"]:
                wrong.append(f"rank {rank} raised {saw['kinds'][0]}: {saw['text']}")
            if took[-1] > RAISES_WITHIN_S:
                wrong.append(f"rank {rank} raised the error {took[-1]:.1f} s after the kill")
            log = self._log(rank).read_text()
            if (self._trial["ending"] == "raises") != ("Traceback" in log and named in log):
                wrong.append(f"rank {rank} printed a wrong traceback, or none")
        return wrong, killed["phase"], took

    def _hanging(self) -> list[str]:
        """Wait until all processes of the trial have ended. End those that do not."""
        until = time.monotonic() + ENDS_WITHIN_S
        while (left := list(marked(self._folder))) and time.monotonic() < until:
            for process in self._processes:
                process.poll()
            time.sleep(0.02)
        for number in (signal.SIGUSR1, signal.SIGKILL):  # SIGUSR1 makes a rank print its stacks
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(1 if left else 0)
        for process in self._processes:
            process.wait()
        return [f"processes {left} did not end within {ENDS_WITHIN_S} s"] if left else []

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-6000:]}" for path in sorted(self._folder.glob("log.*")))


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
        kind, _, index = args.only.partition(":")
        trials = [(kind, int(index))]
    for kind, index in trials:
        trial = plan(args.seed, kind, index)
        with tempfile.TemporaryDirectory(prefix="mscomm-torch-") as folder:
            ranks = Ranks(trial, Path(folder))
            wrong, phase, times = ranks.wrong()
            phases[phase] += 1
            took += times
            if wrong:
                failed += 1
                print(f"FAILED {kind}:{index}: {json.dumps(trial)}\n  " + "\n  ".join(wrong))
                print(f"{ranks.logs()}\nalone: python tests/soak_torch.py --seed {args.seed} --only {kind}:{index}")
                sys.stdout.flush()
    words = ", ".join(f"{count} in {phase}" for phase, count in sorted(phases.items()))
    head = f"{len(trials)} trials in {time.monotonic() - began:.0f} s, seed {args.seed}"
    print(f"{head}: killed {words}; {failed} failed")
    if took:
        median, longest = statistics.median(took), max(took)
        print(f"{len(took)} ranks raised: median {median:.3f} s after the kill, longest {longest:.3f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
