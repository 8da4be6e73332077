"""Measures how long mscomm itself takes on the host to enqueue a call on an accelerator. Needs no accelerator.

    python bench/enqueue.py [--calls 10000]

The job has one rank. Its CUDA driver and its NCCL do nothing (idle.py). An array of idle.py is just an address, a shape
and a dtype, and looking up the current stream costs nothing, so all the measured time is mscomm's own. The kinds of
calls take turns in rounds, and the result for each kind is the median over all calls. These times do not include NCCL,
the driver or an array library. The times of bench/gpu.py include them.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from typing import Any

import idle
import numpy as np
from idle import IdleArray

import mscomm
from mscomm.bench.table import times_ns

ROUNDS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000)
    options = parser.parse_args()
    os.environ |= dict.fromkeys(("MSCOMM_CUDA_LIBRARY", "MSCOMM_NCCL_LIBRARY"), idle.library())
    idle.register()
    mscomm.init("nccl")
    x, out = (IdleArray((4,), np.dtype(np.float32)) for _ in range(2))
    contenders: dict[str, Callable[[], Any]] = {
        "nothing": lambda: None,
        "all_reduce in place": lambda: mscomm.all_reduce(x, out=x),
        "all_reduce into out": lambda: mscomm.all_reduce(x, out=out),
        "all_reduce into a new array": lambda: mscomm.all_reduce(x),
        "all_gather into a new array": lambda: mscomm.all_gather(x),
        "all_reduce with a timeout": lambda: mscomm.all_reduce(x, out=x, timeout=60),
        "beside, in place": lambda: mscomm.all_reduce(x, out=x, async_op=True).wait(),
    }
    seen: dict[str, list[float]] = {name: [] for name in contenders}
    for call in contenders.values():
        times_ns(call, 200)
    for _ in range(ROUNDS):
        for name, call in contenders.items():
            seen[name] += times_ns(call, options.calls // ROUNDS).tolist()
    for name, taken in seen.items():
        print(f"{name:32} {statistics.median(taken) / 1e3:7.2f} us")
    mscomm.release()


if __name__ == "__main__":
    main()
