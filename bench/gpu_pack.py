"""Measures how fast gradients are copied into and out of a bucket, as a share of the rate of a plain device copy.

    python bench/gpu_pack.py [--json FILE]

Bucket sizes range from 1 MiB to 256 MiB. Each size is measured with few and with many parts. The plain copy is one
cudaMemcpyAsync of the same number of bytes. Several calls of one kind are captured into a CUDA graph, so that events
measure only the device's time. The graphs take turns, and the results are medians over the rounds. A rate counts all
bytes that are read and written. Data that fits into the GPU's cache stays there from call to call, in the plain copy
too. The last number in a line is the host's time for one call of pack. The script needs CuPy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import cupy
import ml_dtypes
import numpy as np

import mscomm
from mscomm import accelerators
from mscomm.arrays.cupy import memory
from mscomm.job import resolve

ROUNDS = 11
MIB = 1 << 20


def sizes_of(kind: str, count: int) -> list[int]:
    """Return the number of elements of each part. The parts have `count` elements in total."""
    if kind == "network":  # each part has about half of the elements that are left
        sizes = []
        while count > 3:
            sizes.append(count // 2 - (len(sizes) % 2))
            count -= sizes[-1]
        return [*sizes, *[1] * count]
    parts = min(int(kind), count)
    return [count // parts + (i < count % parts) for i in range(parts)]


def times_ms(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Return the device's median time for one call of each kind, in ms. The kinds take turns in rounds."""
    stream = cupy.cuda.get_current_stream()
    graphs = {}
    for name, call in calls.items():
        call()
        stream.synchronize()
        stream.begin_capture()
        for _ in range(repeats):
            call()
        graphs[name] = stream.end_capture()
    seen: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS + 1):
        for name, graph in graphs.items():
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record()
            graph.launch()
            end.record()
            end.synchronize()
            if turn:  # the first round is the warm-up
                seen[name].append(cupy.cuda.get_elapsed_time(begin, end) / repeats)
    return {name: statistics.median(taken) for name, taken in seen.items()}


def host_us(call: Callable[[], Any], calls: int = 50) -> float:
    """Return the host's median time to enqueue a call, in microseconds."""
    taken = []
    for _ in range(calls):
        began = time.perf_counter_ns()
        call()
        taken.append((time.perf_counter_ns() - began) / 1e3)
        cupy.cuda.get_current_stream().synchronize()
    return statistics.median(taken)


def measure(kind: str, total: int) -> dict[str, float]:
    """Return the rate of each kind of call in GB/s. The entry "host us" is the host's time for a pack in us."""
    core, stream = resolve(None).core, cupy.cuda.get_current_stream()
    count = total // 4
    arrays = [cupy.ones(size, np.float32) for size in sizes_of(kind, count)]
    parts = [memory(x) for x in arrays]
    line, begins, room = 16, [], 0  # line: the alignment of the parts of a gradient bucket, in elements
    for x in arrays:
        begins.append(room)
        room += -(-x.size // line) * line
    full, half, owed = cupy.zeros(room, np.float32), cupy.zeros(room, np.uint16), cupy.zeros(room, np.float32)
    whole, narrow, residual = memory(full), memory(half).view(ml_dtypes.bfloat16), memory(owed)
    one, other = cupy.ones(count, np.float32), cupy.empty(count, np.float32)
    to_device = cupy.cuda.runtime.memcpyDeviceToDevice
    calls: dict[str, tuple[Callable[[], Any], int]] = {  # the call, and how many bytes it reads and writes per element
        "copy": (lambda: cupy.cuda.runtime.memcpyAsync(other.data.ptr, one.data.ptr, total, to_device, stream.ptr), 8),
        "pack": (lambda: core.pack(whole, parts, stream.ptr, begins=begins), 8),
        "unpack": (lambda: core.unpack(whole, parts, stream.ptr, begins=begins), 8),
        "pack tight": (lambda: core.pack(whole, parts, stream.ptr), 8),
        "pack bf16": (lambda: core.pack(narrow, parts, stream.ptr, begins=begins, scale=0.5), 6),
        "unpack bf16": (lambda: core.unpack(narrow, parts, stream.ptr, begins=begins, scale=0.5), 6),
        "pack bf16 owing": (lambda: core.pack(narrow, parts, stream.ptr, begins=begins, residual=residual), 14),
    }
    taken = times_ms({name: call for name, (call, _) in calls.items()}, max(3, min(50, 512 * MIB // total)))
    rates = {name: bytes_each * count / taken[name] / 1e6 for name, (_, bytes_each) in calls.items()}
    return {**rates, "host us": host_us(calls["pack"][0])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    mscomm.init("nccl")
    runtime = accelerators.opened("nccl").runtime
    print(f"{runtime.version()}, {runtime.device_name(0)}; kernels: {runtime.kernels(0)}")
    found: dict[str, dict[str, float]] = {}
    stream = cupy.cuda.Stream(non_blocking=True)  # the default stream cannot be captured
    stream.use()
    for total in (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB):
        for kind in ("1", "16", "250", "1000", "network"):
            rates = found[f"{total // MIB} MiB, {kind} parts"] = measure(kind, total)
            copy, host = rates["copy"], rates["host us"]
            shares = ", ".join(f"{name} {rate / copy:.0%}" for name, rate in list(rates.items())[1:-1])
            print(
                f"{total // MIB:4d} MiB, {kind:>7} parts: copy {copy:.0f} GB/s; {shares}; host {host:.0f} us",
                flush=True,
            )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
