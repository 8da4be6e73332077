"""Measures the steps of DistributedDataParallel and FSDP2 (fully_shard) over mscomm and over gloo.

    python bench/torch_train.py results.json
    python bench/torch_train.py results.json --read

Every rank has three copies of a network: one over mscomm, one over gloo, and one without communication. In every round,
the ranks take a few steps with each copy. The exposed communication is the part of the communication that the
computation does not hide: the time of a step minus that of the step without communication in the same round. A time is
the median over rounds of the slowest rank's time. The intervals of the ratios come from a paired bootstrap over rounds.

Without communication, the hook of DistributedDataParallel returns each bucket at once, and FSDP2 runs over torch's
backend "fake". Its collectives are copies within the rank: all_gather writes the rank's own shard to each place of the
result, so the memory of the result is touched, and the weights are numbers. No rank waits for another one. Each rank
has one thread, apart from those of the backends.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from networks import network
from ratio import interval, ratio
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import mscomm.torch

KINDS = ("mscomm", "gloo", "none")
NETWORKS = ("mlp", "cnn", "resnet50", "transformer")
UNIT = 10_000  # from this number of parameters on, FSDP2 gathers a layer on its own
ROUND_S = 0.5  # about how long the steps of one kind take in a round
GOALS = {2: 0.5, 4: 0.4}  # ranks -> the goal for the exposed communication, as a share of gloo's
EXPOSED = 0.1  # the goal counts if gloo's exposed communication is at least this share of its step


def ddp(model: Any, kind: str, groups: dict[str, Any]) -> Any:
    if kind != "none":
        return DistributedDataParallel(model, process_group=groups[kind], gradient_as_bucket_view=True)
    # forward_sync_buffers: whether each step sends the statistics of BatchNorm from rank 0, as it does in the others.
    model = DistributedDataParallel(model, gradient_as_bucket_view=True, forward_sync_buffers=False)
    model.register_comm_hook(None, nothing)
    return model


def ddp_shared(model: Any, kind: str, groups: dict[str, Any]) -> Any:
    """Let mscomm put the buckets into shared memory. gloo has none, so its buckets are those of `ddp`."""
    model = ddp(model, kind, groups)
    if kind == "mscomm":
        model.register_comm_hook(*mscomm.torch.ddp_hook(model))
    return model


def nothing(state, bucket):  # type: ignore[no-untyped-def]  # torch checks annotations, but not strings
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def fsdp2(model: Any, kind: str, groups: dict[str, Any]) -> Any:
    mesh = DeviceMesh.from_group(groups["fake" if kind == "none" else kind], "cpu")
    for layer in model:
        if sum(map(torch.numel, layer.parameters())) >= UNIT:
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp2_shared(model: Any, kind: str, groups: dict[str, Any]) -> Any:
    """Let FSDP2 ask the process group for the memory of its buffers. gloo has none, so torch allocates it as before."""
    model = fsdp2(model, kind, groups)
    for layer in (model, *model):
        if isinstance(layer, FSDPModule):
            layer.set_allocate_memory_from_process_group_for_comm(True)
    return model


WRAPPERS: dict[str, Callable[[Any, str, dict[str, Any]], Any]] = {
    "ddp": ddp,
    "ddp-shared": ddp_shared,
    "fsdp2": fsdp2,
    "fsdp2-shared": fsdp2_shared,
}


# -- in a rank


def be_a_rank(options: argparse.Namespace) -> None:
    import torch.testing._internal.distributed.fake_pg

    torch.set_num_threads(1)
    dist.init_process_group("mscomm")
    groups = {"mscomm": dist.group.WORLD, **{name: dist.new_group(backend=name) for name in ("gloo", "fake")}}
    cells = [(name, wrapper) for name in options.networks for wrapper in options.wrappers]
    ends = time.perf_counter() + options.seconds
    rows = []
    for done, (name, wrapper) in enumerate(cells):
        times = measured(name, wrapper, groups, (ends - time.perf_counter()) / (len(cells) - done))
        rows.append({"network": name, "wrapper": wrapper, "ranks": dist.get_world_size(), "rounds_ms": times})
    if dist.get_rank() == 0:
        options.file.write_text(json.dumps(rows))
    dist.destroy_process_group()


def measured(name: str, wrapper: str, groups: dict[str, Any], seconds: float) -> dict[str, list[float]]:
    """Return the slowest rank's time of a step in each round, in milliseconds. seconds: how long the rounds take."""
    steps = {kind: step_of(name, wrapper, kind, groups) for kind in KINDS}

    def times(turns: int, count: int) -> Any:
        took = torch.empty(turns, len(KINDS), dtype=torch.float64)
        for turn in range(turns):
            for i in range(len(KINDS)):
                kind = (turn + i) % len(KINDS)
                dist.barrier()
                began = time.perf_counter()
                for _ in range(count):
                    steps[KINDS[kind]]()
                took[turn, kind] = (time.perf_counter() - began) / count
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return took

    until = time.perf_counter() + seconds
    times(1, 2)  # the first step of FSDP2 and the buckets of DistributedDataParallel take longer
    first = times(1, 1)
    count = min(max(int(ROUND_S / first.mean()), 1), 50)
    left = torch.tensor(until - time.perf_counter())
    dist.broadcast(left, 0)
    took = times(max(int(left / (count * first.sum())), 5), count)
    return {kind: (took[:, i] * 1e3).tolist() for i, kind in enumerate(KINDS)}


def step_of(name: str, wrapper: str, kind: str, groups: dict[str, Any]) -> Callable[[], None]:
    model, (x, labels) = network(name)
    model = WRAPPERS[wrapper](model, kind, groups)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(x), labels).backward()
        optimizer.step()

    return step


# -- the report


def report(rows: list[Any]) -> Iterator[str]:
    columns = ("network", "ranks", "step, ms: mscomm / gloo / none", "gloo/mscomm")
    yield f"| {' | '.join(columns)} | exposed, ms: mscomm / gloo | share of gloo's |"
    yield "|---|---|---|---|---|---|"
    missed, fewest = [], min(len(row["rounds_ms"]["none"]) for row in rows)
    for row in rows:
        times = {kind: torch.tensor(row["rounds_ms"][kind]) for kind in KINDS}
        ours, gloo, none = (float(times[kind].median()) for kind in KINDS)
        exposed = {kind: times[kind] - times["none"] for kind in KINDS[:2]}
        our_share, gloo_share = (float(exposed[kind].median() / times[kind].median()) for kind in KINDS[:2])
        of_gloo = ratio(exposed["mscomm"], exposed["gloo"])
        where = f"{row['network']}, {row['wrapper']}"
        yield (
            f"| {where} | {row['ranks']} | {ours:.1f} / {gloo:.1f} / {none:.1f}"
            f" | {ratio(times['gloo'], times['mscomm'])}"
            f" | {exposed['mscomm'].median():.1f} ({our_share:.0%}) / {exposed['gloo'].median():.1f} ({gloo_share:.0%})"
            f" | {of_gloo} |"
        )
        if gloo_share >= EXPOSED and of_gloo.value > GOALS.get(row["ranks"], 1):
            missed.append(f"* {where}, {row['ranks']} ranks: {of_gloo}, goal {GOALS[row['ranks']]}")
    yield ""
    yield f"In brackets: {interval(fewest)}, and shares of the step. Goals missed: {len(missed) or 'none'}"
    yield from missed


def main() -> None:
    def words(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path, help="where the times are written")
    parser.add_argument("-n", dest="ranks", type=words, default=["2", "4"], help="numbers of ranks (2,4)")
    parser.add_argument("--networks", type=words, default=NETWORKS, help=",".join(NETWORKS))
    parser.add_argument("--wrappers", type=words, default=list(WRAPPERS), help=",".join(WRAPPERS))
    parser.add_argument("--seconds", type=float, default=480, help="how long all steps take (480)")
    parser.add_argument("--read", action="store_true", help="measure nothing: report on what the file has")
    options = parser.parse_args()
    if "RANK" in os.environ:
        be_a_rank(options)
        return
    if not options.read:
        options.file.write_text(json.dumps(measure(options)))
    print("\n".join(report(json.loads(options.file.read_text()))))


def measure(options: argparse.Namespace) -> list[Any]:
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for ranks in options.ranks:
            part = Path(scratch, f"{ranks}.json")
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
            words = ["--networks", ",".join(options.networks), "--wrappers", ",".join(options.wrappers)]
            words += ["--seconds", str(options.seconds / len(options.ranks))]
            environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **os.environ}
            subprocess.run([*torchrun, __file__, str(part), *words], check=True, env=environment)
            rows += json.loads(part.read_text())
    return rows


if __name__ == "__main__":
    main()
