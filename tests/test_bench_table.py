"""The table of collectives in mscomm bench, compared with plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from benches import each_moving

from mscomm import _core
from mscomm.bench import buckets, plan, report, table


def cases(row: table.Collective, ranks: int, dtype: str = "float32", op: str = "sum", root: int = 0) -> list[Any]:
    return [table.Case(row, plan.dtype_of(dtype), op, root, ranks, rank) for rank in range(ranks)]


def result_by_hand(name: str, x: list[np.ndarray[Any, Any]], rank: int, root: int) -> np.ndarray[Any, Any]:
    """Return what a rank gets from this collective with op sum, by a definition that does not use the table."""
    n = len(x)
    parts = [array.reshape(n, -1) if name in ("reduce_scatter", "scatter", "all_to_all") else array for array in x]
    return {
        "all_reduce": lambda: sum(x),
        "reduce": lambda: sum(x),
        "all_gather": lambda: np.concatenate(x),
        "gather": lambda: np.concatenate(x),
        "broadcast": lambda: x[root],
        "send_recv": lambda: x[rank - 1],
        "reduce_scatter": lambda: sum(part[rank] for part in parts),
        "scatter": lambda: parts[root][rank],
        "all_to_all": lambda: np.concatenate([part[rank] for part in parts]),
        "scan": lambda: sum(x[: rank + 1]),
        "exscan": lambda: sum(x[:rank], np.zeros_like(x[0])),
    }[name]()


@each_moving
@pytest.mark.parametrize(("ranks", "root", "count"), [(1, 0, 5), (2, 1, 7), (3, 0, 1), (5, 4, 300)])
def test_the_right_result_has_no_wrong_elements(row: table.Collective, ranks: int, root: int, count: int) -> None:
    buffers = [table.Buffers(case, count, False, np.empty) for case in cases(row, ranks, root=root)]
    for one in buffers:
        one.fill()
    x = [one.x.copy() for one in buffers]
    for rank, one in enumerate(buffers):
        if one.out is not None:
            assert one.wrong() > 0  # out still holds POISON, because nothing was received
            one.out[...] = result_by_hand(row.name, x, rank, root)
            assert one.wrong() == 0
            one.out[-1] += 1
            assert one.wrong() == 1
        else:
            assert row.out_at_root and rank != root


@each_moving
def test_a_part_in_the_wrong_place_is_wrong(row: table.Collective) -> None:
    count, ranks = 4096, 4
    buffers = [table.Buffers(case, count, False, np.empty) for case in cases(row, ranks)]
    for one in buffers:
        one.fill()
    x = [one.x.copy() for one in buffers]
    rank = 0 if row.out_at_root else ranks - 1  # rank 0 of a scan combines nothing, so test the last rank
    right, last = result_by_hand(row.name, x, rank, 0), buffers[rank]
    assert last.out is not None
    for shift in (1, 64, 1024):
        last.out[...] = np.roll(right, shift)
        assert last.wrong() > count / 2


DEFINED = [
    (dtype, op)
    for code, dtype in enumerate(_core.dtypes())
    for op in table.OPS
    if _core.supports(code, _core.ops.index(op))
]


@pytest.mark.parametrize(("dtype", "op"), DEFINED)
@pytest.mark.parametrize("ranks", [1, 3, 8, 64])
def test_the_expected_reduction_is_exact_in_the_type_itself(dtype: str, op: str, ranks: int) -> None:
    """Combine the ranks' arrays one by one in dtype, from the first rank to the last, and then from the last rank to
    the first. Both orders must give the result that the table expects.
    """
    kind = plan.dtype_of(dtype)
    contents = [table.Contents(case) for case in cases(table.COLLECTIVES["all_reduce"], ranks, dtype, op)]
    x = [one.of(rank, 3, 500) for rank, one in enumerate(contents)]
    step = {
        "sum": np.add,
        "avg": np.add,
        "prod": np.multiply,
        "min": np.minimum,
        "max": np.maximum,
        "band": np.bitwise_and,
        "bor": np.bitwise_or,
        "bxor": np.bitwise_xor,
    }[op]
    for order in (x, x[::-1]):
        total = order[0]
        for other in order[1:]:
            total = step(total, other).astype(kind)
        if op == "avg":
            total = (total / ranks).astype(kind)
        assert (contents[0].reduced(3, 500) == total).all()


def test_repeated_calls_in_place_leave_sums_as_they_are() -> None:
    one = table.Buffers(cases(table.COLLECTIVES["all_reduce"], 2)[0], 4, True, np.empty)
    one.fill_for_repetition()
    assert one.out is one.x and (one.x == 0).all()


def test_sizes_are_those_of_nccl_tests() -> None:
    """The size of an all_gather or reduce_scatter counts all n parts. A part has at least one element."""
    gather = cases(table.COLLECTIVES["all_gather"], 4)[0]
    assert [gather.count(size) for size in (8, 16, 64)] == [1, 1, 4]
    assert gather.size(4) == 64
    reduce = cases(table.COLLECTIVES["all_reduce"], 4)[0]
    assert (reduce.count(64), reduce.size(16)) == (16, 64)


@pytest.mark.parametrize(("name", "factor"), [("all_reduce", 1.5), ("all_gather", 0.75), ("broadcast", 1.0)])
def test_bus_bandwidth_is_that_of_nccl_tests(name: str, factor: float) -> None:
    algbw, busbw = report.bandwidths(cases(table.COLLECTIVES[name], 4)[0], 1 << 20, 1000.0)
    assert (algbw, busbw) == pytest.approx((1.048576, 1.048576 * factor))


def test_the_gradients_are_those_of_resnet_50() -> None:
    assert (len(buckets.gradients()), sum(buckets.gradients())) == (161, 25_557_032)
