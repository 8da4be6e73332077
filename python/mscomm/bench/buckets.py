"""`mscomm bench buckets`: times the reduction of a network's gradients.

The first part compares one fused call with one call for each gradient. The second part runs training steps with several
sizes of the fusion bucket. In place of a backward pass, a step multiplies small matrices. The number of products for a
gradient is proportional to the number of its elements. All products of a step together take as long as the
communication alone. So without overlap, a step takes twice as long as the backward pass. If the computation hides all
communication, a step takes only as long as the backward pass.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

import mscomm
from mscomm.bench import report
from mscomm.bench.contenders import times_us
from mscomm.bench.plan import ROUNDS_WITH_PEERS, Plan, dtype_of
from mscomm.bench.table import COLLECTIVES, Array, Case, Contents, times_ns
from mscomm.job import resolve
from mscomm.train.buckets import HostBucket
from mscomm.train.step import Step

_SMALL = 64 << 10
BUCKETS_MB = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 128.0)  # in MiB
_MATRIX = np.full((48, 48), 1 / 48, np.float32)  # so small that BLAS uses only the calling thread


def gradients() -> list[int]:
    """Return the number of elements of each ResNet-50 gradient, in layer order: 161 arrays, 25 557 032 elements."""
    sizes = [64 * 3 * 7 * 7, 64, 64]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            outputs = 4 * width
            for source, target, kernel in ((inputs, width, 1), (width, width, 9), (width, outputs, 1)):
                sizes += [source * target * kernel, target, target]
            if block == 0:  # the first block's shortcut has a convolution, too
                sizes += [inputs * outputs, outputs, outputs]
            inputs = outputs
    return [*sizes, inputs * 1000, 1000]


def lists(dtype: np.dtype[Any]) -> dict[str, list[int]]:
    """Return {name: list} for the lists to measure. A list holds the number of elements of each gradient."""
    whole = gradients()
    return {
        f"up to {_SMALL >> 10} KiB": [count for count in whole if count * dtype.itemsize <= _SMALL],
        "all": whole,
    }


def measure(plan: Plan, rank: int, ranks: int) -> dict[str, Any]:
    """Measure fused and single calls in turn, all of them in place. Then measure the overlap with computation.

    Return all results.
    """
    dtype = dtype_of(plan.dtype)
    case = Case(COLLECTIVES["all_reduce"], dtype, plan.op, 0, ranks, rank)
    contents = Contents(case)
    make = mscomm.empty if plan.shared else np.empty
    result: dict[str, Any] = {"environment": report.environment(ranks), "rows": []}
    memory = "arrays of mscomm.empty" if plan.shared else "private arrays"
    result["environment"]["contenders"] = {"mscomm": f"mscomm {mscomm.__version__}, {memory}"}
    if rank == 0:
        report.buckets_head(plan, result["environment"])
    for name, counts in lists(dtype).items():
        arrays: list[Array] = [make(count, dtype) for count in counts]
        ways = {"fused": _fused(arrays, plan.op), "each": _each(arrays, plan.op)}
        found: dict[str, Any] = {}
        rounds: dict[str, list[list[float]]] = {way: [] for way in ways}
        for _ in range(max(plan.rounds, ROUNDS_WITH_PEERS)):
            for way, call in ways.items():
                for array in arrays:
                    array[...] = 0  # zeros stay zero, however often they are reduced
                rounds[way].append(times_us(call, plan.least_warmup, plan.iterations or 5, "max"))
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
    result["overlap"] = _overlap(plan, dtype)
    if rank == 0:
        report.overlap(result["overlap"])
    return result


def _fused(arrays: list[Array], op: str) -> Callable[[], object]:
    return lambda: mscomm.all_reduce_many(arrays, op, out=arrays)


def _each(arrays: list[Array], op: str) -> Callable[[], object]:
    def call() -> None:
        for array in arrays:
            mscomm.all_reduce(array, op, out=array)

    return call


# -- the second part: training steps


def _overlap(plan: Plan, dtype: np.dtype[Any]) -> list[dict[str, Any]]:
    """For each bucket size, time the backward pass alone, the communication alone, and a step, in microseconds."""
    counts = gradients()[::-1]  # in the order in which a backward pass computes them
    works = _works(counts, _step(counts, dtype, plan.op, max(BUCKETS_MB)))
    rows: list[dict[str, Any]] = [
        {"bucket_mb": megabytes, "samples_us": {"backward": [], "communication": [], "step": []}}
        for megabytes in BUCKETS_MB
    ]
    for _ in range(max(plan.rounds, ROUNDS_WITH_PEERS)):
        for row in rows:  # only one Step exists at a time, so each can reuse the memory of the previous one
            step = _step(counts, dtype, plan.op, row["bucket_mb"])
            row["buckets"] = step.bucket_count
            for way, call in _ways(works, step).items():
                row["samples_us"][way] += times_us(call, 1, plan.iterations or 3, "max")
            del step, call  # free the buckets
    for row in rows:
        row["us"] = {way: statistics.median(samples) for way, samples in row["samples_us"].items()}
    return rows


def _ways(works: list[int], step: Step) -> dict[str, Callable[[], None]]:
    idle = [0] * len(works)
    return {
        "backward": lambda: _backward(works, None),
        "communication": lambda: _reduce(idle, step),
        "step": lambda: _reduce(works, step),
    }


def _step(counts: list[int], dtype: np.dtype[Any], op: str, megabytes: float) -> Step:
    """Return a Step, which accepts gradients one by one. GradientReducer.reduce() would need all of them at once."""
    return Step(
        [f"gradient {i}" for i in range(len(counts))],
        [(dtype, count) for count in counts],
        [(count,) for count in counts],
        op=op,
        group=resolve(None),
        make=lambda layout: HostBucket(layout, op, None, resolve(None)),
        bucket_bytes=int(megabytes * (1 << 20)),
        in_order=True,
    )


def _works(counts: list[int], step: Step) -> list[int]:
    """Return the number of matrix products to run for each gradient.

    Each measured time is replaced by its maximum over the ranks, so all ranks get the same numbers.
    """
    product = times_ns(lambda: _compute(1000), 3).min() / 1000
    communication = times_ns(lambda: _reduce([0] * len(counts), step), 3).min()
    slowest = mscomm.all_reduce(np.array([product, communication]), "max")
    wanted = float(slowest[1] / slowest[0])
    return [round(wanted * count / sum(counts)) for count in counts]


def _compute(products: int) -> None:
    for _ in range(products):
        np.dot(_MATRIX, _MATRIX)


def _backward(works: list[int], step: Step | None) -> None:
    """Compute the matrix products for each gradient. If `step` is not None, report each finished gradient to it."""
    for index, products in enumerate(works):
        _compute(products)
        if step is not None:
            step.ready(index)


def _reduce(works: list[int], step: Step) -> None:
    _backward(works, step)
    step.finish()
