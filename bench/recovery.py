"""Shows what a training does when a worker and the scheduler are killed and started again.

    python bench/recovery.py --plot docs/images/recovery.svg

A scheduler and 4 workers train a small network on this machine. First, worker 1 is killed and started again at once.
Then, the scheduler is killed and started again 20 s later. Each worker writes a line to a log for each step. From the
logs, the script prints how long the recovery took and how long a step took with and without the scheduler. `--plot`
draws both as time lines.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

WORKERS = 4
SETTLE_S = 3.0

TRAINING = """
import time
started = time.time()
import json, os
import numpy as np
import mscomm

log = open(os.path.join(os.environ["LOGS"], os.environ["MS_NODE_ID"] + ".jsonl"), "a", buffering=1)

def write(what, at=None, **more):
    log.write(json.dumps({"what": what, "at": at or time.time(), **more}) + "\\n")

write("started", started)
write("imported")
mscomm.init()
write("joined")
mscomm.set_auto_parallel_context(parallel_mode=mscomm.ParallelMode.DATA_PARALLEL, gradients_mean=True)

class Line:
    def __init__(self):
        self.parameters = {"a": np.zeros(100_000, np.float32)}

    def loss_and_gradients(self, x):
        time.sleep(0.01)
        return x.mean(), {"a": 1e-3 * self.parameters["a"] + x.mean()}

class Steps(mscomm.Callback):
    def step_end(self, run_context):
        now = run_context.original_args()
        write("step", number=now.cur_step_num)
        stop = np.array([int(os.path.exists(os.environ["LOGS"] + "/stop"))])
        if mscomm.all_reduce(stop, "max")[0]:
            run_context.request_stop()

net = Line()
data = [(np.full(8, step, np.float32),) for step in range(100)]
model = mscomm.Model(net, None, mscomm.train.Momentum(net.parameters, 0.05, 0.9))
model.train(int(os.environ["EPOCHS"]), data, [Steps()])
"""


class Job:
    """A scheduler and its workers. `events`: what was done to them, as (what, name, time)."""

    def __init__(self, folder: Path, epochs: int) -> None:
        self._folder = folder
        (folder / "train.py").write_text(TRAINING)
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        job = {"MS_WORKER_NUM": str(WORKERS), "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": str(port)}
        job |= {"MS_ENABLE_RECOVERY": "1", "MS_RECOVERY_PATH": str(folder / "recovery"), "LOGS": str(folder)}
        self._env = {**os.environ, **job, "EPOCHS": str(epochs), "OMP_NUM_THREADS": "1"}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.events: list[tuple[str, str, float]] = []
        self.start("scheduler")
        for number in range(WORKERS):
            self.start(f"worker_{number}")

    def start(self, name: str) -> None:
        self.events.append(("start", name, time.time()))
        role = {"MS_ROLE": "MS_SCHED" if name == "scheduler" else "MS_WORKER", "MS_NODE_ID": name}
        with open(self._folder / f"{name}.log", "ab") as log:
            command = [sys.executable, str(self._folder / "train.py")]
            self._processes[name] = subprocess.Popen(command, env={**self._env, **role}, stdout=log, stderr=log)

    def kill(self, name: str) -> None:
        self._processes[name].kill()
        self.events.append(("kill", name, time.time()))
        self._processes[name].wait()

    def end(self) -> dict[str, list[dict[str, Any]]]:
        """Wait until the training ends. Return the log of each worker."""
        codes = {name: process.wait() for name, process in self._processes.items()}
        if any(codes.values()):
            logs = "\n".join(path.read_text() for path in sorted(self._folder.glob("*.log")))
            raise click.ClickException(f"the job failed: {codes}\n{logs}")
        files = {name: self._folder / f"{name}.jsonl" for name in self._processes if name != "scheduler"}
        return {name: [json.loads(line) for line in file.read_text().splitlines()] for name, file in files.items()}


def steps_between(log: list[dict[str, Any]], begin: float, end: float) -> list[float]:
    """Return the seconds from each step to the next in this time."""
    at = [entry["at"] for entry in log if entry["what"] == "step" and begin <= entry["at"] <= end]
    return [after - before for before, after in itertools.pairwise(at)]


def report(events: list[tuple[str, str, float]], logs: dict[str, list[dict[str, Any]]]) -> None:
    when = {(what, name): at for what, name, at in events}
    killed, away, back = when["kill", "worker_1"], when["kill", "scheduler"], when["start", "scheduler"]
    at = {entry["what"]: entry["at"] for entry in logs["worker_1"] if entry["what"] != "step" and entry["at"] > killed}
    step = next(entry["at"] for entry in logs["worker_1"] if entry["what"] == "step" and entry["at"] > at["joined"])
    click.echo(
        f"worker 1: killed, and started again at once; the new process ran its first line after"
        f" {at['started'] - killed:.2f} s, had imported after {at['imported'] - killed:.2f} s, had joined after"
        f" {at['joined'] - killed:.2f} s, and finished its first step after {step - killed:.2f} s"
    )
    click.echo(f"from the imports to the first step: {step - at['imported']:.2f} s")
    for name, begin, end in (("before", step, away), ("while the scheduler is away", away, back)):
        times = [one for log in logs.values() for one in steps_between(log, begin, end)]
        click.echo(
            f"time of a step, {name} ({len(times)} steps): median {1e3 * statistics.median(times):.2f} ms,"
            f" longest {1e3 * max(times):.1f} ms"
        )
    numbers = [entry["number"] for entry in logs["worker_0"] if entry["what"] == "step"]
    again = sum(after <= before for before, after in itertools.pairwise(numbers))
    click.echo(f"steps of worker 0: {len(numbers)}, of which it made {again} twice")


def plot(events: list[tuple[str, str, float]], logs: dict[str, list[dict[str, Any]]], file: str) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "mscomm"  # the same picture has the same bytes
    from matplotlib import pyplot

    when = {(what, name): at for what, name, at in events}
    killed, away, back = when["kill", "worker_1"], when["kill", "scheduler"], when["start", "scheduler"]
    at = {entry["what"]: entry["at"] for entry in logs["worker_1"] if entry["what"] != "step" and entry["at"] > killed}
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 2.6), gridspec_kw={"width_ratios": [3, 2]})
    rows = ["scheduler", *sorted(logs)]
    first = axes[0], killed, -0.2, at["joined"] - killed + 0.4
    for axis, zero, low, high in (first, (axes[1], away, -SETTLE_S, back - away + SETTLE_S)):
        axis.set_yticks(range(len(rows)), [row.replace("_", " ") for row in rows])
        axis.set_ylim(len(rows) - 0.4, -0.6)
        axis.set_xlim(low, high)
        axis.set_xlabel("seconds")
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        gone = [(low, away - zero), (back - zero, high)]
        axis.hlines([0, 0], [begin for begin, _ in gone], [end for _, end in gone], color="#666666", lw=8)
        for number, name in enumerate(sorted(logs), 1):
            ticks = [entry["at"] - zero for entry in logs[name] if entry["what"] == "step"]
            ticks = [tick for tick in ticks if low <= tick <= high]
            axis.vlines(ticks, number - 0.3, number + 0.3, color="#08519c", lw=0.8, rasterized=len(ticks) > 100)
    axes[0].set_title("worker 1 is killed and started again", fontsize=10)
    axes[1].set_title("the scheduler is away for 20 s", fontsize=10)
    place = rows.index("worker_1")
    parts = (("started", "imported", "imports", "#fdae6b"), ("imported", "joined", "joins", "#d95f02"))
    for begin, end, label, colour in parts:
        axes[0].hlines(place, at[begin] - killed, at[end] - killed, color=colour, lw=8, label=label)
    axes[0].vlines([], 0, 0, color="#08519c", label="a step")
    axes[0].legend(ncols=3, fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.25))
    figure.tight_layout()
    figure.savefig(file, dpi=200, metadata={"Date": None} if file.endswith(".svg") else None)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--away", default=20.0, show_default=True, help="For how many seconds the scheduler is away.")
@click.option("--plot", "file", help="The picture to write (.svg, .png or .pdf). Needs matplotlib (the extra `plot`).")
def main(away: float, file: str | None) -> None:
    """Shows what a training does when a worker and the scheduler are killed and started again."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), epochs=10_000)
        time.sleep(2 * SETTLE_S)
        job.kill("worker_1")
        job.start("worker_1")
        time.sleep(2 * SETTLE_S)
        job.kill("scheduler")
        time.sleep(away)
        job.start("scheduler")
        time.sleep(SETTLE_S)
        (Path(folder) / "stop").touch()
        logs = job.end()
    report(job.events, logs)
    if file:
        plot(job.events, logs, file)
        click.echo(f"wrote {file}")


if __name__ == "__main__":
    main()
