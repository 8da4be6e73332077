"""Measures a data-parallel MindSpore step on CPUs, with mscomm.Model and with MindSpore's own communication.

    python bench/mindspore_step.py -n 2 --network mlp

A kind of step is a mode (graph or PyNative) and a way to exchange gradients. MindSpore's own communication uses
parallel_mode=DATA_PARALLEL, in processes that are started as a dynamic cluster (MS_ROLE and so on). mscomm is
compared with MindSpore's communication in graph mode, because MindSpore users usually train in that mode. Some kinds
exchange nothing, in n processes at once or in only one process. The difference between their times and the times of the
other kinds shows what PyNative mode and the exchange cost.

All processes of all kinds are started once. In every round, each kind takes a few steps while the others wait. All
kinds have the same network, initial weights, batches and number of threads. A step ends when its loss is a Python
number. After the warm-up, all kinds that exchange gradients must have the same weights. A time is the median over
rounds of the slowest process's time. The interval of a ratio comes from a paired bootstrap over rounds.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import click
from ratio import interval, ratio

STEPS = 8  # how many steps of one kind are taken in a row
WARM_UP = 5
PATIENCE_S = 300  # the longest wait for a process's answer; before its first answer, the process may compile a graph

# The values of Kind.carrier: who exchanges the gradients of the ranks.
NOBODY, MINDSPORE, MSCOMM = "nobody", "MindSpore", "mscomm"


class Kind(NamedTuple):
    mode: str
    carrier: str
    alone: bool = False  # whether only one process takes steps while the others wait

    def __str__(self) -> str:
        what = {NOBODY: "nothing exchanged"}.get(self.carrier, f"by {self.carrier}")
        return f"{self.mode}, {'one process' if self.alone else what}"


MODES = ("graph", "pynative")
KINDS = (
    *(Kind(mode, NOBODY, alone=True) for mode in MODES),
    *(Kind(mode, carrier) for carrier in (NOBODY, MINDSPORE, MSCOMM) for mode in MODES),
)
THEIRS = Kind("graph", MINDSPORE)


# -- the code of one process -------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Tells a process its kind, its rank among the processes of that kind, and the settings."""

    kind: Kind
    rank: int  # -1 for MindSpore's scheduler
    size: int
    port: int
    network: str
    threads: int
    bucket_mb: float | None


def network(name: str) -> tuple[Any, tuple[int, ...]]:
    """Return the network `name` as a MindSpore cell, and the shape of a batch for it."""
    from mindspore import nn

    if name == "mlp":  # much data to exchange, little to compute
        cells = [nn.Dense(512, 1024), nn.ReLU(), nn.Dense(1024, 1024), nn.ReLU(), nn.Dense(1024, 10)]
        return nn.SequentialCell(cells), (64, 512)
    if name == "deep":  # many small gradients
        cells = [cell for _ in range(40) for cell in (nn.Dense(128, 128), nn.LayerNorm((128,)), nn.ReLU())]
        return nn.SequentialCell(*cells, nn.Dense(128, 10)), (64, 128)
    # "cnn" is small, because MindSpore's convolutions on CPUs use oneDNN's reference code, which is slow.
    cells = []
    for before, after in ((3, 8), (8, 16)):
        cells += [nn.Conv2d(before, after, 3, stride=2, has_bias=True), nn.ReLU()]
    return nn.SequentialCell(*cells, nn.Flatten(), nn.Dense(16 * 8 * 8, 10)), (16, 3, 32, 32)


NETWORKS = ("mlp", "deep", "cnn")


def make_step(place: Place) -> tuple[Callable[[], float], list[Any]]:
    """Return a step function and the list of weights.

    The step function trains one step on this process's batch, and returns the loss.
    """
    import mindspore
    import numpy as np
    from mindspore import nn

    cell, shape = network(place.network)
    draw = np.random.default_rng(0)
    for p in cell.get_parameters():
        if p.ndim > 1:  # not a bias, which begins at 0, and not the scale of a layer norm, which begins at 1
            weights = draw.normal(0, (2 / np.prod(p.shape[1:])) ** 0.5, p.shape)
            p.set_data(mindspore.Tensor(weights.astype(np.float32)))
        elif p.name.endswith("bias"):
            p.set_data(mindspore.Tensor(np.zeros(p.shape, np.float32)))
    draw = np.random.default_rng(1 + place.rank)
    images = mindspore.Tensor(draw.normal(size=shape).astype(np.float32))
    labels = mindspore.Tensor(draw.integers(0, 10, shape[0]).astype(np.int32))
    loss_fn = nn.CrossEntropyLoss()
    parameters = cell.trainable_params()
    optimizer = nn.Momentum(parameters, 0.01, 0.9)
    cell.set_train(True)

    if place.kind.carrier != MSCOMM:
        # MindSpore's Model builds the same cells. In data-parallel mode TrainOneStepCell adds a DistributedGradReducer.
        train = nn.TrainOneStepCell(nn.WithLossCell(cell, loss_fn), optimizer)
        train.set_train(True)
        return lambda: float(train(images, labels).asnumpy()), parameters

    from mscomm.train import GradientReducer
    from mscomm.train.networks.mindspore import Network

    ours = Network(cell, loss_fn, optimizer)  # what mscomm.Model uses internally
    ours.begin()
    reducer = GradientReducer(ours.trained(), bucket_mb=place.bucket_mb)
    return lambda: float(ours.step((images, labels), reducer)), parameters


def be_a_process(pipe: Connection, place: Place) -> None:
    """Join the other processes of this process's kind (place.kind).

    Take as many steps as the pipe requests, and send back the seconds per step.
    """
    if place.kind.carrier == MINDSPORE:
        cluster = {"MS_WORKER_NUM": place.size, "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": place.port}
        role = {"MS_ROLE": "MS_SCHED"} if place.rank < 0 else {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": place.rank}
        os.environ.update({name: str(value) for name, value in {**cluster, **role}.items()})

    import time

    import mindspore
    import numpy as np

    mode = mindspore.GRAPH_MODE if place.kind.mode == "graph" else mindspore.PYNATIVE_MODE
    mindspore.set_context(mode=mode, device_target="CPU")
    mindspore.device_context.cpu.op_tuning.threads_num(place.threads)
    if place.kind.carrier == MINDSPORE:
        mindspore.communication.init()
        if place.rank < 0:
            pipe.recv()
            return
        assert mindspore.communication.get_rank() == place.rank
        parallel = mindspore.ParallelMode.DATA_PARALLEL
        mindspore.set_auto_parallel_context(parallel_mode=parallel, gradients_mean=True)
    elif place.kind.carrier == MSCOMM:
        import mscomm

        mscomm.init("gloo", init_method=f"tcp://127.0.0.1:{place.port}", rank=place.rank, world_size=place.size)

    step, weights = make_step(place)
    for _ in range(WARM_UP):
        step()
    pipe.send([p.asnumpy().copy() for p in weights])
    while (steps := pipe.recv()) is not None:
        began = time.perf_counter()
        for _ in range(steps):
            step()
        pipe.send((time.perf_counter() - began) / steps)
    assert all(np.isfinite(p.asnumpy()).all() for p in weights)


# -- the main process: the processes of one kind -----------------------------------------------------------------------


class Job:
    """Starts the processes of one kind, and makes them take steps."""

    def __init__(self, kind: Kind, size: int, network: str, threads: int, bucket_mb: float | None) -> None:
        self.kind = kind
        self._members: list[tuple[BaseProcess, Connection]] = []
        self._scheduler: tuple[BaseProcess, Connection] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        try:
            if kind.carrier == MINDSPORE:
                self._scheduler = _start(Place(kind, -1, size, port, network, threads, bucket_mb))
            for rank in range(size):
                self._members.append(_start(Place(kind, rank, size, port, network, threads, bucket_mb)))
            self.weights = [self._answer(rank) for rank in range(size)]
        except BaseException:
            self.kill()
            raise

    def seconds(self, alone: bool) -> float:
        """Take STEPS steps, in all processes or only in the first one. Return the slowest process's time per step."""
        chosen = range(1 if alone else len(self._members))
        for rank in chosen:
            self._members[rank][1].send(STEPS)
        return max(self._answer(rank) for rank in chosen)

    def _answer(self, rank: int) -> Any:
        _, pipe = self._members[rank]
        if not pipe.poll(PATIENCE_S):
            raise click.ClickException(f"{self.kind}: rank {rank} has not answered for {PATIENCE_S} s")
        try:
            return pipe.recv()
        except EOFError as error:
            raise click.ClickException(f"{self.kind}: rank {rank} has ended; its words are above") from error

    def end(self) -> None:
        everybody = [*self._members, *([self._scheduler] if self._scheduler else [])]
        for _, pipe in everybody:
            pipe.send(None)
        for process, _ in everybody:
            process.join(30)
            if process.exitcode != 0:
                raise click.ClickException(f"{self.kind}: {process.name} ended with {process.exitcode}")

    def kill(self) -> None:
        for process, _ in [*self._members, *([self._scheduler] if self._scheduler else [])]:
            process.kill()
            process.join()


def _start(place: Place) -> tuple[BaseProcess, Connection]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    name = f"rank {place.rank}" if place.rank >= 0 else "the scheduler"
    process = spawn.Process(target=be_a_process, args=(theirs, place), name=name, daemon=True)
    process.start()
    theirs.close()
    return process, ours


# -- the main process: all kinds ---------------------------------------------------------------------------------------


def check_weights(jobs: dict[Kind, Job]) -> None:
    """Check that all kinds that exchange gradients have trained the same model.

    The weights must be exactly equal on all ranks of a kind, and equal up to rounding between kinds.
    """
    import numpy as np

    exchanging = {kind: job for kind, job in jobs.items() if kind.carrier != NOBODY}
    first = next(iter(exchanging))
    for kind, job in exchanging.items():
        for rank, theirs in enumerate(job.weights):
            if any((x != y).any() for x, y in zip(theirs, job.weights[0], strict=True)):
                raise click.ClickException(f"{kind}: the weights of rank {rank} are not those of rank 0")
        for x, y in zip(job.weights[0], exchanging[first].weights[0], strict=True):
            if not np.allclose(x, y, rtol=1e-3, atol=1e-5):
                raise click.ClickException(f"{kind}: other weights than {first}, by up to {np.abs(x - y).max()}")


def report(times: dict[Kind, Any], about: str) -> None:
    import numpy as np

    ms = {kind: float(np.median(one)) * 1e3 for kind, one in times.items()}
    print(f"# {about}")
    print(f"{'':32}{'ms a step':>12}{'steps/s':>12}{'exchange, ms':>14}")
    for kind, median in ms.items():
        line = f"{kind!s:32}{median:12.2f}{1e3 / median:12.1f}"
        without = ms.get(Kind(kind.mode, NOBODY))
        print(line + (f"{median - without:14.2f}" if kind.carrier != NOBODY and without else ""))
    for ours in (Kind(mode, MSCOMM) for mode in MODES):
        if ours in times and THEIRS in times:
            middle, low, high = ratio(times[THEIRS], times[ours])
            print(f"{ours}: {middle:.2f} times as fast as {THEIRS}", end=" ")
            print(f"({interval(len(times[ours]))}: {low:.2f} to {high:.2f})")


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-n", "size", type=click.IntRange(2), default=2, show_default=True, help="Processes.")
@click.option("--network", "name", type=click.Choice(NETWORKS), default="mlp", show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=30, show_default=True)
@click.option("--threads", type=click.IntRange(1), help="Of a process, for its kernels.  [CPUs over processes]")
@click.option("--bucket-mb", type=float, help="Of GradientReducer.  [its default]")
@click.option("--without", multiple=True, type=click.Choice(MODES), help="Leave a mode out.")
def main(size: int, name: str, rounds: int, threads: int | None, bucket_mb: float | None, without: tuple[str]) -> None:
    threads = threads or max(1, len(os.sched_getaffinity(0)) // size)
    os.environ.update(OMP_NUM_THREADS=str(threads), GLOG_v="3")  # for all processes; GLOG_v=3 shows only errors

    import numpy as np

    chosen = [kind for kind in KINDS if kind.mode not in without]
    jobs: dict[Kind, Job] = {}
    times: dict[Kind, list[float]] = {kind: [] for kind in chosen}
    try:
        for kind in chosen:
            if not kind.alone:
                jobs[kind] = Job(kind, size, name, threads, bucket_mb)
        check_weights(jobs)
        for turn in range(-1, rounds):
            for kind in chosen:
                seconds = jobs[kind._replace(alone=False)].seconds(kind.alone)
                if turn >= 0:
                    times[kind].append(seconds)
        weights = next(iter(jobs.values())).weights[0]
        for job in jobs.values():
            job.end()
    finally:
        for job in jobs.values():
            job.kill()
    mib = sum(x.nbytes for x in weights) / (1 << 20)
    about = f"{name}: {size} processes of {threads} thread(s), {len(weights)} gradients of {mib:.2f} MiB together"
    report(
        {kind: np.array(one) for kind, one in times.items()}, f"{about}; medians of {rounds} rounds of {STEPS} steps"
    )


if __name__ == "__main__":
    main()
