"""Measures how much time mscomm adds on the host when it enqueues an NCCL call, and compares one fused call with many
single calls.

    python bench/gpu.py [--calls 10000] [--json FILE]

The job has one rank, so its collectives are just copies; this is enough to measure the time on the host. NCCL itself is
called through CuPy, which the script needs. NCCL and mscomm take turns in rounds, and the results are medians over all
calls.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
from cupy.cuda import nccl

import mscomm
from mscomm import accelerators
from mscomm.train import GradientReducer

ROUNDS = 10
PARAMETERS = [3 * 3 * 64 * 64] * 20 + [1 << 20] * 4 + [64] * 100  # the gradients of a small network


def times(call: Callable[[], Any], calls: int) -> list[float]:
    """Return the host's time for each of `calls` calls, in microseconds. The device must be idle at the beginning."""
    taken = []
    for turn in range(calls):
        began = time.perf_counter_ns()
        call()
        taken.append((time.perf_counter_ns() - began) / 1e3)
        if turn % 100 == 99:  # empty the stream's queue: if it filled up, calls would block
            cupy.cuda.get_current_stream().synchronize()
    cupy.cuda.get_current_stream().synchronize()
    return taken


def in_turn(contenders: dict[str, Callable[[], Any]], calls: int) -> dict[str, float]:
    """Return the median time of each contender in microseconds. The contenders take turns in rounds."""
    seen: dict[str, list[float]] = {name: [] for name in contenders}
    for call in contenders.values():
        times(call, 200)
    for _ in range(ROUNDS):
        for name, call in contenders.items():
            seen[name] += times(call, calls // ROUNDS)
    return {name: statistics.median(taken) for name, taken in seen.items()}


def step_ms(step: Callable[[], Any], steps: int = 50) -> float:
    """Return the device's median time for a step in milliseconds, measured with the device's events."""
    taken = []
    for _ in range(steps):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        step()
        end.record()
        end.synchronize()
        taken.append(cupy.cuda.get_elapsed_time(begin, end))
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    mscomm.init("nccl")
    vendor, runtime = accelerators.opened("nccl")
    print(f"NCCL {vendor.version()} ({vendor.path()}), CuPy {cupy.__version__}")
    print(f"{runtime.version()}, {runtime.device_name(0)}")

    raw = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    found: dict[str, Any] = {}
    for count in (2, 1 << 18):
        x = cupy.ones(count, np.float32)
        stream = cupy.cuda.get_current_stream()
        medians = in_turn(
            {
                "raw": lambda x=x, stream=stream: raw.allReduce(
                    x.data.ptr, x.data.ptr, x.size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream.ptr
                ),
                "mscomm": lambda x=x: mscomm.all_reduce(x, out=x),
            },
            options.calls,
        )
        added = medians["mscomm"] - medians["raw"]
        both = f"raw {medians['raw']:.2f} us, mscomm {medians['mscomm']:.2f} us, +{added:.2f} us"
        print(f"enqueue all_reduce of {4 * count} B: {both}")
        found[f"enqueue {4 * count} B"] = medians

    gradients = [cupy.ones(size, np.float32) for size in PARAMETERS]

    def single() -> None:
        for gradient in gradients:
            mscomm.all_reduce(gradient, out=gradient)

    plain, narrow = (GradientReducer(gradients, compression=how) for how in (None, "bf16"))
    steps = {
        "single": step_ms(single),
        "fused": step_ms(lambda: mscomm.all_reduce_many(gradients, out=gradients)),
        "GradientReducer": step_ms(lambda: plain.reduce(gradients)),
        "GradientReducer, bf16": step_ms(lambda: narrow.reduce(gradients)),
    }
    print(f"a step of {len(PARAMETERS)} gradients, in ms: {', '.join(f'{k} {v:.3f}' for k, v in steps.items())}")
    found["step"] = steps
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
