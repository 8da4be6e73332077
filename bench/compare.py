"""mscomm against torch.distributed's gloo: the same processes, the same buffers, in turn, one run.

    mscomm run -n 4 bench/compare.py [--json FILE] [--rounds 5] [--max 64M]

Each cell is the median over interleaved rounds of the slowest rank's time for one call, in microseconds. "arena":
arrays of mscomm.empty; "private": ordinary NumPy arrays. gloo runs over loopback with one thread a rank, on the same
private arrays. Results are checked in every cell.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

import mscomm

SIZES = [8, 64, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]


def calls_for(size: int) -> int:
    """How many calls one measurement averages over; the same on all ranks."""
    return max(1, min(30, (8 << 20) // size))


def time_of(call: Callable[[], None], calls: int) -> float:
    """Microseconds for one call, of the slowest rank."""
    mscomm.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    spent = np.array([(time.perf_counter() - start) / calls * 1e6])
    return float(mscomm.all_reduce(spent, "max")[0])


def cases(size: int) -> dict[str, dict[str, tuple[Callable[[], None], Callable[[], bool]]]]:
    """For each collective and each contender: the call, and whether its result is right."""
    n, rank, count = mscomm.get_group_size(), mscomm.get_rank(), size // 4
    table: dict[str, dict[str, tuple[Callable[[], None], Callable[[], bool]]]] = {
        "all_reduce": {},
        "all_gather": {},
        "broadcast": {},
    }
    for memory, make in (("arena", mscomm.empty), ("private", np.empty)):
        # all_reduce and broadcast in place, as torch has them. Repeated sums of zeros stay finite; the check sums
        # something else.
        x, y, z, many = (
            make(count, np.float32),
            make(count, np.float32),
            make(count, np.float32),
            make(n * count, np.float32),
        )
        x[...], y[...], z[...], many[...] = 0, rank, rank, 0

        def reduce_(x=x):
            mscomm.all_reduce_(x)

        def gather(z=z, many=many):
            mscomm.all_gather(z, out=many)

        def send(y=y):
            mscomm.broadcast_(y, root=n - 1)

        table["all_reduce"][memory] = reduce_, lambda z=z: bool((mscomm.all_reduce(z) == n * (n - 1) / 2).all())
        table["all_gather"][memory] = (
            gather,
            lambda many=many: bool((many.reshape(n, -1) == np.arange(n)[:, None]).all()),
        )
        table["broadcast"][memory] = send, lambda y=y: bool((y == n - 1).all())
    zeros, full, block, wide = (
        torch.zeros(count),
        torch.full((count,), float(rank)),
        torch.full((count,), float(rank)),
        torch.zeros(n * count),
    )
    table["all_reduce"]["gloo"] = (lambda: dist.all_reduce(zeros)), lambda: bool((zeros == 0).all())
    table["all_gather"]["gloo"] = (
        (lambda: dist.all_gather_into_tensor(wide, block)),
        lambda: bool((wide.view(n, -1) == torch.arange(n)[:, None]).all()),
    )
    table["broadcast"]["gloo"] = (lambda: dist.broadcast(full, src=n - 1)), lambda: bool((full == n - 1).all())
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the cells to this file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max", type=int, default=SIZES[-1], help="largest size in bytes")
    options = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)  # torch's own, of all_gather_into_tensor

    mscomm.init()
    torch.set_num_threads(1)
    rank, n = mscomm.get_rank(), mscomm.get_group_size()
    folder = np.zeros(256, np.uint8)
    if rank == 0:
        path = tempfile.mkdtemp().encode()
        folder[: len(path)] = list(path)
    path = bytes(mscomm.broadcast(folder)).rstrip(b"\0").decode()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{path}/store", rank=rank, world_size=n, timeout=timedelta(seconds=300)
    )

    cells = []
    if rank == 0:
        print(f"n = {n}, {os.cpu_count()} CPUs, {platform.machine()}, torch {torch.__version__}; microseconds a call")
        print(
            f"{'collective':<11} {'bytes':>9} {'arena':>10} {'private':>10} {'gloo':>10}"
            f" {'gloo/arena':>11} {'gloo/private':>13}"
        )
    for size in SIZES:
        if size > options.max:
            continue
        for what, contenders in cases(size).items():
            calls, times = calls_for(size), {name: [] for name in contenders}
            for call, _ in contenders.values():
                call()
            for _ in range(options.rounds):
                for name, (call, _) in contenders.items():
                    times[name].append(time_of(call, calls))
            wrong = [name for name, (_, right) in contenders.items() if not right()]
            if wrong:
                raise SystemExit(f"{what} of {size} bytes: wrong result from {', '.join(wrong)}")
            median = {name: statistics.median(values) for name, values in times.items()}
            cells.append({"collective": what, "bytes": size, "ranks": n, "us": median, "rounds": times})
            if rank == 0:
                ratios = median["gloo"] / median["arena"], median["gloo"] / median["private"]
                print(
                    f"{what:<11} {size:>9} {median['arena']:>10.1f} {median['private']:>10.1f} {median['gloo']:>10.1f}"
                    f" {ratios[0]:>11.1f} {ratios[1]:>13.1f}",
                    flush=True,
                )
    if rank == 0:
        slower = [c for c in cells for name in ("arena", "private") if c["us"][name] >= c["us"]["gloo"]]
        print(f"{len(cells)} cells, {len(slower)} in which gloo is faster", file=sys.stdout)
        if options.json:
            with open(options.json, "w") as file:
                json.dump(cells, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
