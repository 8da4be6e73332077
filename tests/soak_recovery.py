"""Many trainings in a row, each of which loses processes: `python tests/soak_recovery.py --trials 200 --seed 7`.

Each trial starts a scheduler and 4 workers, which train a small network with Model.train and write checkpoints. At a
random moment, a worker (70 % of the trials), two workers (10 %) or the scheduler (20 %) is killed with SIGKILL. Soon
after that, the same command starts it again. The moment is in the training, while a checkpoint is written, while the
job recovers from another loss, in init(), or in release(). In some trials, a worker is stopped (SIGSTOP) until the
others wait for it in rejoin(). In others, a host is unplugged and plugged in again. This host is a network namespace,
which only root can create.

Every trial must end. All workers must end with the bits of a training that nobody disturbed. A process that was not
killed must not end before it has finished. Nothing may be left behind.

At the end, soak_recovery.py prints how long the recoveries took: from the first line of a worker that was started again
(after its imports) to the next step that any worker finished. If a trial fails, it prints the trial, its logs, and how
to run it alone: `--only INDEX`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from hosts import Host, Hosts
from sessions import clean_environment, free_port

WORKERS = 4
ENDS_WITHIN_S = 240  # ends a hang; an idle machine runs a trial in a few seconds
LIMIT_S = 300  # the time limits of the job, so that no trial ends only because a limit has passed
NODE_TIMEOUT_S = 3
MOMENTS = ("training", "training", "training", "file", "recovery", "init", "release")

TRAINING = """
import os, signal, sys, time
import numpy as np
import mscomm
from mscomm.train import Momentum

started, name, folder = time.monotonic(), os.environ["MS_NODE_ID"], os.environ["FOLDER"]
marks = open(f"{folder}/{name}.marks", "a", buffering=1)

def mark(word):
    marks.write(f"{word} {os.getpid()} {time.monotonic()}\\n")

marks.write(f"started {os.getpid()} {started}\\n")
mscomm.init()
rank = mscomm.get_rank()
mscomm.set_auto_parallel_context(parallel_mode=mscomm.ParallelMode.DATA_PARALLEL, gradients_mean=True)

class Line:
    def __init__(self):
        self.parameters = {"a": np.zeros(3000, np.float32), "b": np.zeros((3, 5), np.float32)}

    def loss_and_gradients(self, x, y):
        off = x @ self.parameters["a"] - y
        return (off**2).mean(), {"a": 2 * off @ x / len(x), "b": np.full((3, 5), off.mean(), np.float32)}

x = np.random.default_rng(1).normal(size=(160, 3000)).astype(np.float32) / 60
rows = list(zip(x, x[:, 0].copy()))
data = mscomm.dataset.GeneratorDataset(rows, ["x", "y"], num_shards=4, shard_id=rank).shuffle(10).batch(4)
net = Line()

class Marks(mscomm.Callback):
    def step_begin(self, run_context):
        time.sleep(0.01)
        step = run_context.original_args().cur_step_num
        if f"file:{step}" == os.environ.get("DIES") and not os.path.exists(f"{folder}/died"):
            open(f"{folder}/died", "w").close()
            os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)

    def step_end(self, run_context):
        mark(f"step:{run_context.original_args().cur_step_num}")

mark("begins")
model = mscomm.Model(net, None, Momentum(net.parameters, 0.05, 0.9))
config = mscomm.CheckpointConfig(save_checkpoint_steps=4, keep_checkpoint_max=2)
model.train(6, data, [Marks(), mscomm.ModelCheckpoint("t", f"{folder}/files/{rank}", config)])
mark("learned")
np.savez(f"{folder}/{name}.draft.npz", **net.parameters)
os.replace(f"{folder}/{name}.draft.npz", f"{folder}/{name}.npz")
mark("trained")
mscomm.release()
mark("released")
"""


class Failed(Exception):
    pass


class Trial:
    """A scheduler and its workers. hosts: two hosts for the workers, if a host is unplugged."""

    def __init__(self, folder: Path, *, timeout_s: float = LIMIT_S, hosts: Hosts | None = None, dies: str = "") -> None:
        self.folder = folder
        self.hosts = hosts
        self.names = [f"worker_{number}" for number in range(WORKERS)]
        self.killed: set[int] = set()  # the pids of the processes that the trial has killed
        self.took: list[float] = []
        self._started_again: list[str] = []
        self._ends_at = time.monotonic() + ENDS_WITHIN_S
        (folder / "train.py").write_text(TRAINING)
        address = hosts[0].address if hosts else "127.0.0.1"
        key = folder / "job.key"
        key.write_bytes(os.urandom(32))
        key.chmod(0o600)
        job = {"MS_WORKER_NUM": str(WORKERS), "MS_SCHED_HOST": address, "MS_SCHED_PORT": str(free_port())}
        job |= {"MS_ENABLE_RECOVERY": "1", "MS_RECOVERY_PATH": str(folder / "recovery"), "TMPDIR": str(folder)}
        job |= {"MS_NODE_TIMEOUT": str(NODE_TIMEOUT_S), "MS_TOPO_TIMEOUT": str(LIMIT_S)}
        job |= {"MSCOMM_TIMEOUT": str(timeout_s)}
        job |= {"FOLDER": str(folder), "OMP_NUM_THREADS": "1", **({"MSCOMM_JOB_KEY_FILE": str(key)} if hosts else {})}
        self.env = clean_environment(**job)
        self.dies = dies  # "name:step": this worker dies while it writes the checkpoint of this step
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("sched", *self.names):
            self.start(name)

    def host_of(self, name: str) -> Host | None:
        return self.hosts[int(name in self.names[2:])] if self.hosts else None

    def start(self, name: str) -> None:
        env = {**self.env, "MS_ROLE": "MS_SCHED" if name == "sched" else "MS_WORKER", "MS_NODE_ID": name}
        victim, _, step = self.dies.partition(":")
        env |= {"DIES": f"file:{step}"} if victim == name else {}
        command: list[str | Path] = [sys.executable, self.folder / "train.py"]
        if (host := self.host_of(name)) is not None:
            command, env = list(host.command(command)), {**env, "MSCOMM_HOST_ID": host.name}
        with open(self.folder / f"{name}.log", "ab") as log:
            self.running[name] = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def kill(self, name: str) -> None:
        """Kill the process if it is still running. watch() starts it again."""
        process = self.running[name]
        if process.poll() is None:
            self.killed.add(process.pid)
            process.kill()
            process.wait()

    def marks(self, name: str) -> list[tuple[str, int, float]]:
        with contextlib.suppress(FileNotFoundError):
            lines = (self.folder / f"{name}.marks").read_text().splitlines(keepends=True)
            parts = [line.split() for line in lines if line.endswith("\n")]
            return [(word, int(pid), float(at)) for word, pid, at in parts]
        return []

    def has(self, name: str, word: str) -> bool:
        return any(one == word for one, _, _ in self.marks(name))

    def watch(self, until: Callable[[], bool]) -> None:
        """Start processes that were killed again, until the condition is true. Raise Failed if any other fails."""
        while not until():
            if time.monotonic() > self._ends_at:
                raise Failed(f"it did not end within {ENDS_WITHIN_S} s")
            for name, process in list(self.running.items()):
                code = process.poll()
                if code in (None, 0):
                    continue
                died = name == self.dies.partition(":")[0] and (self.folder / "died").exists()
                if code != -signal.SIGKILL or not (process.pid in self.killed or died):
                    if not (name == "sched" and self.over):
                        raise Failed(f"{name} ended with {code}, and was not killed")
                elif not (self.over if name == "sched" else self.has(name, "trained")):
                    time.sleep(random.random() * 0.2)
                    self._started_again.append(name)
                    self.start(name)
            time.sleep(0.002)

    @property
    def over(self) -> bool:
        """Whether all workers have ended, or will."""
        return all(
            process.poll() is not None and self.has(name, "trained")
            for name, process in self.running.items()
            if name != "sched"
        )

    def finish(self, expected: str) -> None:
        self.watch(lambda: self.over)
        self.watch(lambda: self.running["sched"].poll() is not None)
        for name in self.names:
            found = _sum(self.folder / f"{name}.npz")
            if found != expected:
                raise Failed(f"{name} ended with other bits")
        if self.dies and not (self.folder / "died").exists():
            raise Failed(f"{self.dies} did not die while it wrote a checkpoint")
        was_killed = any(process.pid in self.killed for process in self.running.values())
        if not was_killed and (self.running["sched"].returncode or os.listdir(self.folder / "recovery")):
            raise Failed(f"the scheduler ended with {self.running['sched'].returncode}, or left its files behind")
        self._measure()

    def _measure(self) -> None:
        steps = sorted(at for name in self.names for word, _, at in self.marks(name) if word.startswith("step:"))
        for name in set(self._started_again) - {"sched"}:
            for word, pid, at in self.marks(name):
                joined = any(other == pid and one.startswith("step:") for one, other, _ in self.marks(name))
                first = next((step for step in steps if step > at), None)
                if word == "started" and joined and first and pid != self.marks(name)[0][1]:
                    self.took.append(first - at)

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))

    def end(self) -> None:
        for process in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


def _sum(path: Path) -> str:
    import numpy as np

    with np.load(path) as arrays:
        return hashlib.sha256(b"".join(arrays[name].tobytes() for name in sorted(arrays))).hexdigest()


def _kill_at(trial: Trial, victims: list[str], moment: str, rng: random.Random) -> None:
    """Wait for the moment, and kill the victims. In the moment "file", the victim kills itself."""
    first = victims[0] if victims[0] != "sched" else rng.choice(trial.names)
    if moment == "file":
        return
    if moment == "init":
        trial.watch(lambda: trial.has(first, "started"))
        delay = rng.random() * 0.4
    elif moment == "release":
        trial.watch(lambda: trial.has(first, "trained"))
        delay = rng.random() * 0.03
    else:
        trial.watch(lambda: trial.has(first, "begins"))
        delay = rng.random() * 0.6
    until = time.monotonic() + delay
    trial.watch(lambda: time.monotonic() >= until)
    for victim in victims:
        trial.kill(victim)
    if moment == "recovery":  # and once more, while the job recovers
        until = time.monotonic() + rng.random() * 1.5
        trial.watch(lambda: time.monotonic() >= until)
        again = rng.choice([*trial.names, "sched"])
        # A worker that is killed after train() is not replaced. train() ends on all workers at once.
        trial.running[again].send_signal(signal.SIGSTOP)
        if any(trial.has(name, "learned") for name in trial.names):
            trial.running[again].send_signal(signal.SIGCONT)
        else:
            trial.kill(again)


def _stop(trial: Trial, rng: random.Random) -> None:
    """Stop a worker until the others have timed out and wait for it in rejoin()."""
    victim = rng.choice(trial.names)
    trial.watch(lambda: trial.has(victim, "begins"))
    until = time.monotonic() + rng.random() * 0.5
    trial.watch(lambda: time.monotonic() >= until)
    trial.running[victim].send_signal(signal.SIGSTOP)
    until = time.monotonic() + 4
    trial.watch(lambda: time.monotonic() >= until)
    trial.running[victim].send_signal(signal.SIGCONT)


def _unplug(trial: Trial, rng: random.Random) -> None:
    """Unplug the second host, until the other host has given up its workers, or for a short while."""
    assert trial.hosts
    trial.watch(lambda: trial.has(trial.names[-1], "begins"))
    until = time.monotonic() + rng.random() * 0.5
    trial.watch(lambda: time.monotonic() >= until)
    trial.hosts[1].unplug()
    until = time.monotonic() + rng.choice((1, NODE_TIMEOUT_S + 4))
    trial.watch(lambda: time.monotonic() >= until)
    trial.hosts[1].plug_in()


def _plan(seed: int, index: int, kinds: list[str]) -> tuple[str, list[str], str, random.Random]:
    """Return the kind of trial, its victims, and the moment."""
    rng = random.Random(f"{seed} {index}")
    kind = rng.choice(kinds)
    names = [f"worker_{number}" for number in range(WORKERS)]
    who = rng.random()
    victims = [rng.choice(names)] if who < 0.7 else rng.sample(names, 2) if who < 0.8 else ["sched"]
    moment = rng.choice(MOMENTS)
    if moment == "file" and victims[0] == "sched":
        moment = "training"
    return kind, victims, moment, rng


def run(seed: int, index: int, kinds: list[str], folder: Path) -> tuple[str, bool, list[float]]:
    """Run one trial. Return what happened, whether it was in time, and how long the recoveries took. Raise Failed."""
    kind, victims, moment, rng = _plan(seed, index, kinds)
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(Hosts(2, folder)) if kind == "unplug" else None
        dies = f"{victims[0]}:{rng.randrange(1, 15) * 4}" if moment == "file" and kind == "kill" else ""
        trial = Trial(folder, timeout_s=1 if kind == "stop" else LIMIT_S, hosts=hosts, dies=dies)
        stack.callback(trial.end)
        what = f"{' and '.join(victims)} killed, moment: {moment}" if kind == "kill" else kind
        try:
            if kind == "kill":
                _kill_at(trial, victims, moment, rng)
            elif kind == "stop":
                _stop(trial, rng)
            else:
                _unplug(trial, rng)
            trial.finish(undisturbed(bool(hosts)))
        except Failed as error:
            raise Failed(f"trial {index} ({what}): {error}\n{trial.logs()}") from None
        return what, bool(kind != "kill" or dies or trial.killed), trial.took


@functools.cache
def undisturbed(on_hosts: bool) -> str:
    """Return the checksum of the weights after a training that nobody disturbs.

    On two hosts, it differs from that on one host, because the ranks add the gradients in another order.
    """
    with _folder() as folder, contextlib.ExitStack() as stack:
        trial = Trial(folder, hosts=stack.enter_context(Hosts(2, folder)) if on_hosts else None)
        stack.callback(trial.end)
        trial.watch(lambda: trial.over)
        trial.watch(lambda: trial.running["sched"].poll() is not None)
        return _sum(folder / "worker_0.npz")


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="mscomm-recovery-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 24))
    parser.add_argument("--only", type=int)
    args = parser.parse_args()
    has_hosts = os.getuid() == 0 and shutil.which("ip") is not None
    kinds = ["kill"] * 18 + ["stop"] + (["unplug"] if has_hosts else [])
    began, failed, seen = time.monotonic(), 0, Counter[str]()
    took: list[float] = []
    too_late = 0  # in how many trials all victims had ended before they could be killed
    indices = range(args.trials) if args.only is None else [args.only]
    for index in indices:
        with _folder() as folder:
            try:
                what, killed, times = run(args.seed, index, kinds, folder)
                seen[what.partition(", moment: ")[2] or what] += 1
                too_late += not killed
                took += times
            except Failed as error:
                failed += 1
                print(f"{error}\nalone: python tests/soak_recovery.py --seed {args.seed} --only {index}", flush=True)
    words = ", ".join(f"{count} {what}" for what, count in sorted(seen.items()))
    head = f"{len(indices)} trials in {time.monotonic() - began:.0f} s, seed {args.seed}"
    print(f"{head}: {words}; {too_late} too late; {failed} failed")
    if took:
        print(f"{len(took)} recoveries: median {statistics.median(took):.2f} s, longest {max(took):.2f} s")
    return 1 if failed or too_late > max(1, len(indices) // 10) else 0


if __name__ == "__main__":
    sys.exit(main())
