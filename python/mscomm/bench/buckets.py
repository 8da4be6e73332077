"""`mscomm bench buckets`: all_reduce_many over the gradients of a network, against one all_reduce for each of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

import mscomm
from mscomm.bench import report
from mscomm.bench.plan import ROUNDS_WITH_PEERS, Plan, dtype_of
from mscomm.bench.table import COLLECTIVES, Array, Case, Contents, times_ns

_SMALL = 64 << 10


def gradients() -> list[int]:
    """Elements of each gradient of a ResNet-50, in the order of its layers: 161 arrays, 25 557 032 elements."""
    sizes = [64 * 3 * 7 * 7, 64, 64]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            outputs = 4 * width
            for source, target, kernel in ((inputs, width, 1), (width, width, 9), (width, outputs, 1)):
                sizes += [source * target * kernel, target, target]
            if block == 0:  # the shortcut changes the number of channels
                sizes += [inputs * outputs, outputs, outputs]
            inputs = outputs
    return [*sizes, inputs * 1000, 1000]


def lists(dtype: np.dtype[Any]) -> dict[str, list[int]]:
    """The lists that are measured, by name."""
    whole = gradients()
    return {
        f"up to {_SMALL >> 10} KiB": [count for count in whole if count * dtype.itemsize <= _SMALL],
        "all": whole,
    }


def measure(plan: Plan, rank: int, ranks: int) -> dict[str, Any]:
    """Both ways in turn, in place."""
    dtype = dtype_of(plan.dtype)
    case = Case(COLLECTIVES["all_reduce"], dtype, plan.op, 0, ranks, rank)
    contents = Contents(case)
    make = mscomm.empty if plan.shared else np.empty
    result: dict[str, Any] = {"environment": report.environment(plan, ranks), "rows": []}
    memory = "arrays of mscomm.empty" if plan.shared else "private arrays"
    result["environment"]["contenders"] = {"mscomm": f"mscomm {mscomm.__version__}, {memory}"}
    if rank == 0:
        report.buckets_head(plan, ranks, result["environment"])
    for name, counts in lists(dtype).items():
        arrays: list[Array] = [make(count, dtype) for count in counts]
        ways = {"fused": _fused(arrays, plan.op), "each": _each(arrays, plan.op)}
        found: dict[str, Any] = {}
        rounds: dict[str, list[list[float]]] = {way: [] for way in ways}
        for _ in range(max(plan.rounds, ROUNDS_WITH_PEERS)):
            for way, call in ways.items():
                for array in arrays:
                    array[...] = 0  # stays as it is, however often it is summed
                for _ in range(plan.warmup):
                    call()
                mscomm.barrier()
                slowest = mscomm.all_reduce(times_ns(call, plan.iterations or 5), "max")
                rounds[way].append([float(ns) / 1e3 for ns in slowest])
        for way, call in ways.items():
            wrong = None
            if plan.check:
                for array in arrays:
                    array[...] = contents.of(rank, 0, array.size)
                mscomm.barrier()
                call()
                mine = sum(int((array != contents.reduced(0, array.size)).sum()) for array in arrays)
                wrong = int(mscomm.all_reduce(np.array([mine]))[0])
            us = statistics.median(us for one in rounds[way] for us in one)
            found[way] = {"in_place": {"us": us, "wrong": wrong, "rounds_us": rounds[way]}}
        row = {"name": name, "arrays": len(counts), "count": sum(counts), "size": sum(counts) * dtype.itemsize}
        result["rows"].append({**row, "results": found})
        if rank == 0:
            report.buckets_row(plan, result["rows"][-1])
    return result


def _fused(arrays: list[Array], op: str) -> Callable[[], object]:
    return lambda: mscomm.all_reduce_many(arrays, op, out=arrays)


def _each(arrays: list[Array], op: str) -> Callable[[], object]:
    def call() -> None:
        for array in arrays:
            mscomm.all_reduce(array, op, out=array)

    return call
