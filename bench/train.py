"""Measures a data-parallel PyTorch step with GradientReducer, and with DistributedDataParallel over gloo.

    python bench/train.py -n 2 --network mlp

Every rank has two copies of the network, one for each library. In every round, a rank takes a few steps with each copy,
first with an exchange of gradients and then without one (no_sync). The difference between these two times in a round is
the exposed communication: the part of the exchange that the backward pass did not hide. A time is the median over
rounds of the slowest rank's time. The intervals of the ratios come from a paired bootstrap over rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from ratio import interval, ratio

STEPS = 4  # how many steps of one kind are taken in a row


NETWORKS = ("mlp", "deep", "cnn")


def be_a_rank(options: argparse.Namespace) -> None:
    import numpy as np
    import torch
    import torch.distributed as dist
    from networks import network
    from torch.nn.functional import cross_entropy

    import mscomm
    from mscomm.train import GradientReducer

    torch.set_num_threads(1)
    mscomm.init()
    rank, size = mscomm.get_rank(), mscomm.get_group_size()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{options.port}", rank=rank, world_size=size)
    ours, (images, labels) = network(options.network)
    theirs = torch.nn.parallel.DistributedDataParallel(network(options.network)[0], gradient_as_bucket_view=True)
    reducer = GradientReducer(ours.parameters(), bucket_mb=options.bucket_mb)
    optimizers = {id(model): torch.optim.SGD(model.parameters(), 0.01) for model in (ours, theirs)}

    def step_by_mscomm(sync: bool) -> None:
        reducer.zero_grad()
        with contextlib.nullcontext() if sync else reducer.no_sync():
            cross_entropy(ours(images), labels).backward()
        if sync:
            reducer.wait()
        optimizers[id(ours)].step()

    def step_by_gloo(sync: bool) -> None:
        optimizers[id(theirs)].zero_grad(set_to_none=False)
        with contextlib.nullcontext() if sync else theirs.no_sync():
            cross_entropy(theirs(images), labels).backward()
        optimizers[id(theirs)].step()

    kinds: dict[str, Callable[[], None]] = {
        "mscomm": lambda: step_by_mscomm(True),
        "mscomm alone": lambda: step_by_mscomm(False),
        "gloo": lambda: step_by_gloo(True),
        "gloo alone": lambda: step_by_gloo(False),
    }
    times = np.empty((options.rounds, len(kinds)))
    for turn in range(-2, options.rounds):
        for kind, step in enumerate(kinds.values()):
            mscomm.barrier()
            began = time.perf_counter()
            for _ in range(STEPS):
                step()
            if turn >= 0:
                times[turn, kind] = (time.perf_counter() - began) / STEPS
    times = mscomm.all_reduce(times, "max")
    if rank == 0:
        report(options.network, size, dict(zip(kinds, times.T, strict=True)))
    dist.destroy_process_group()


def report(name: str, size: int, times: dict[str, Any]) -> None:
    import numpy as np

    def ms(times: Any) -> float:
        return float(np.median(times)) * 1e3

    ours, theirs = times["mscomm"], times["gloo"]
    times_as_fast, low, high = ratio(theirs, ours)
    print(f"{name}, {size} ranks: a step by mscomm {ms(ours):.2f} ms, by gloo {ms(theirs):.2f} ms:", end=" ")
    print(f"{times_as_fast:.2f} times as fast ({interval(len(ours))}: {low:.2f} to {high:.2f})")
    exposed, theirs_exposed = ours - times["mscomm alone"], theirs - times["gloo alone"]
    share, low, high = ratio(exposed, theirs_exposed)
    print(f"  exposed communication: mscomm {ms(exposed):.2f} ms, gloo {ms(theirs_exposed):.2f} ms", end=" ")
    print(f"({ms(theirs_exposed) / ms(theirs):.0%} of its step): {share:.2f} of gloo's ({low:.2f} to {high:.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-n", type=int, default=2, help="ranks (2)")
    parser.add_argument("--network", choices=NETWORKS, default="mlp")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--bucket-mb", type=float, default=None, help="of GradientReducer (its default)")
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if "MSCOMM_RANK" in os.environ:
        be_a_rank(options)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = [
        sys.executable,
        "-m",
        "mscomm",
        "run",
        "-n",
        str(options.n),
        __file__,
        *sys.argv[1:],
        "--port",
        str(port),
    ]
    sys.exit(subprocess.run(launcher, check=False).returncode)


if __name__ == "__main__":
    main()
