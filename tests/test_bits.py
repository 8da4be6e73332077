"""Reductions are bit-identical on every rank, in every run, with every algorithm, and however they are called."""

from __future__ import annotations

import itertools
import random
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from functions import REDUCED, Array, algorithms_of, bits, folded, ops_of
from ranks import ranks
from rotated import rotated, seed
from test_conformance import OWN_ORDER, check_bits, shared, strided, values_of, wild, with_gaps

import mscomm
from mscomm import _core, collectives

CANONICAL = [name for name in algorithms_of("all_reduce") if name not in OWN_ORDER]
FLOATS = [dtype for dtype in REDUCED if dtype.kind not in "biu"]
# The host of each rank. test_conformance.py compares the bits of each algorithm with the fold of one host.
LAYOUTS = [[0, 0, 1, 1], [0, 1, 0, 1, 1], [0, 1, 2, 3, 4], [0, 1, 2, 3, 3, 0]]
SIZES = [1, 7, 1029, 70_001]


def some(algorithms: list[str], whole: bool) -> list[str]:
    """Return all of them, or two to compare with each other. Which two depends on the run's seed."""
    return algorithms if whole else random.Random(seed()).sample(algorithms, 2)


def plainly(x: Array, dice: random.Random) -> Array:
    return mscomm.all_reduce(x)


def in_shared_memory(x: Array, dice: random.Random) -> Array:
    return mscomm.all_reduce(shared(x), out=mscomm.empty(x.shape, x.dtype))


def in_place(x: Array, dice: random.Random) -> Array:
    return mscomm.all_reduce_(x.copy())


def beside(x: Array, dice: random.Random) -> Array:
    first = mscomm.all_reduce(np.ones(dice.choice([1, 100_000])), async_op=True)
    second = mscomm.all_reduce(x, async_op=True)
    first.wait()
    return second.wait()


def fused(x: Array, dice: random.Random) -> Array:
    others = [
        np.ones(dice.choice([0, 1, 1001, 60_000]), dice.choice([x.dtype, np.int8])) for _ in range(dice.randrange(9))
    ]
    at = dice.randint(0, len(others))
    return mscomm.all_reduce_many([*others[:at], x, *others[at:]])[at]


def fused_beside(x: Array, dice: random.Random) -> Array:
    before = np.ones(dice.choice([1, 777, 300_001]), x.dtype)
    return mscomm.all_reduce_many([before, x], async_op=True).wait()[1]


def in_pieces(x: Array, dice: random.Random) -> Array:
    """Reduce the message in random pieces, so that the algorithms split its elements among the ranks differently."""
    cuts = sorted(dice.randint(0, x.size) for _ in range(3))
    return np.concatenate([mscomm.all_reduce(piece) for piece in np.split(x, cuts)])


def inside_a_longer_one(x: Array, dice: random.Random) -> Array:
    before = dice.choice([1, 63, 4096, 262_145])
    longer = np.concatenate([np.ones(before, x.dtype), x, np.ones(dice.randrange(5000), x.dtype)])
    return mscomm.all_reduce(longer)[before : before + x.size]


def by_reduce_scatter(x: Array, dice: random.Random) -> Array:
    cuts = sorted(dice.randint(0, x.size) for _ in range(mscomm.get_group_size() - 1))
    counts = np.diff([0, *cuts, x.size]).tolist()
    return mscomm.all_gather_v(mscomm.reduce_scatter_v(x, counts))[0]


def by_reduce(x: Array, dice: random.Random) -> Array:
    root = dice.randrange(mscomm.get_group_size())
    result = mscomm.reduce(x, root)
    return mscomm.broadcast(x if result is None else result, root)


WAYS = [
    plainly, in_shared_memory, in_place, beside, fused, fused_beside, in_pieces, inside_a_longer_one,
    by_reduce_scatter, by_reduce,
]  # fmt: skip


@ranks(4, env={"MSCOMM_ALGO": "{algorithm}"}, timeout_s=240)
def write_hashes(rank: int, group: Any, algorithm: str, folder: str, runs: int) -> None:
    """In so many runs, sum the same arrays of each dtype in random ways. Check that all sums of a dtype have the same
    bits. Write this rank's hash of each dtype's sum to folder/algorithm.rank.
    """
    inputs = {dtype: values_of(wild, dtype, rank, (20_011,)) for dtype in FLOATS}
    together, alone = random.Random(seed()), random.Random(f"{seed()} {rank}")
    hashes: dict[str, int] = {}
    ways = itertools.cycle(together.sample(WAYS, len(WAYS)))
    for run in range(runs):
        dtype, way = FLOATS[run % len(FLOATS)], next(ways) if run % 2 else together.choice(WAYS)
        time.sleep(alone.choice([0, 0, 0.0005, 0.003]))
        result = way(inputs[dtype], together)
        if dtype.name not in hashes:
            expected = folded("sum", [values_of(wild, dtype, r, (20_011,)) for r in range(4)])
            check_bits(result, expected, way.__name__, arithmetic=True)
        found = zlib.crc32(bits(result).data)
        assert hashes.setdefault(dtype.name, found) == found, f"run {run}: {way.__name__} of {dtype}: other bits"
    assert runs >= 2 * len(WAYS) and len(hashes) == len(FLOATS)  # so each way has been taken
    Path(folder, f"{algorithm}.{rank}").write_text("\n".join(f"{name} {value:08x}" for name, value in hashes.items()))


@pytest.mark.parametrize("runs", [30, pytest.param(200, marks=pytest.mark.long)])
def test_the_bits_are_the_same_in_every_run_by_every_way_and_algorithm(tmp_path, runs):
    algorithms = some(CANONICAL, whole=runs > 30)
    for algorithm in algorithms:
        write_hashes(tmp_path=tmp_path, algorithm=algorithm, folder=str(tmp_path), runs=runs)
    first, *others = sorted(path for path in tmp_path.iterdir() if path.suffix in (".0", ".1", ".2", ".3"))
    assert len(others) == 4 * len(algorithms) - 1
    for other in others:
        assert other.read_text() == first.read_text(), f"{other.name} and {first.name} differ"


@ranks("n", env={"MSCOMM_ALGO": "all_reduce={algorithm}", "MSCOMM_HOST_ID": "{hosts}"})
def write_checksums(rank: int, group: Any, n: int, algorithm: str, hosts: list[int], folder: str, whole: bool) -> None:
    """Write this rank's checksums to the file folder/algorithm.rank: a line for each dtype x op x size, or x one of the
    sizes if not `whole`. For each line, one of the ranks also compares the result with the expected fold for these
    hosts.
    """
    lines, dice = [], random.Random(seed())
    for dtype in REDUCED:
        for op in ops_of(dtype):
            for size in SIZES if whole else dice.choices(SIZES):
                inputs = [values_of(wild, dtype, r, (size,)) for r in range(n)]
                result = mscomm.all_reduce(inputs[rank], op)
                case = f"{op} of {size} x {dtype}"
                if len(lines) % n == rank:
                    check_bits(result, folded(op, inputs, hosts), case, arithmetic=True)
                lines.append(f"{case}: {zlib.crc32(bits(result).data):08x}")
    Path(folder, f"{algorithm}.{rank}").write_text("\n".join(lines))


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.long)], ids=["few", "whole"])
@pytest.mark.parametrize("hosts", rotated(LAYOUTS, few=1), ids=str)
def test_all_reduce_has_the_bits_of_the_host_layout_by_every_algorithm(tmp_path, hosts, whole):
    between = [
        algorithm
        for what, algorithm, carrier, _ in _core.algorithms()
        if what == "all_reduce" and algorithm not in OWN_ORDER and carrier != "arena"
    ]
    for algorithm in some(between, whole):
        write_checksums(
            tmp_path=tmp_path, n=len(hosts), algorithm=algorithm, hosts=hosts, folder=str(tmp_path), whole=whole
        )
    first, *others = sorted(tmp_path.glob("*.[0-9]"))
    for other in others:
        assert other.read_text().splitlines() == first.read_text().splitlines(), f"{other.name} and {first.name} differ"


# The results of the other algorithms are always those of the fold.
@pytest.mark.parametrize("algorithm", sorted(OWN_ORDER))
@ranks(4, env={"MSCOMM_ALGO": "all_reduce={algorithm}"})
def test_all_reduce_has_the_same_bits_when_it_is_called_again(rank, group, algorithm):
    for dtype in REDUCED:
        for op in ops_of(dtype):
            x = values_of(wild, dtype, rank, (5001,))
            once, again = mscomm.all_reduce(x, op), mscomm.all_reduce(x, op)
            assert (bits(once) == bits(again)).all(), f"{op} of {dtype}"


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.long)], ids=["few", "whole"])
@pytest.mark.parametrize("algorithm", algorithms_of("scan"))
@ranks(4, env={"MSCOMM_ALGO": "scan={algorithm}"})
def test_the_last_scan_is_all_reduce_to_the_bit(rank, group, algorithm, whole):
    dice = random.Random(seed())
    for dtype in REDUCED:
        for op in ops_of(dtype, "scan"):
            for size in [7, 70_001] if whole else [dice.choice([7, 70_001])]:
                x = values_of(wild, dtype, rank, (size,))
                scan, total = mscomm.scan(x, op), mscomm.all_reduce(x, op)
                assert rank < 3 or (bits(scan) == bits(total)).all(), f"{op} of {size} x {dtype}"


# --- all_reduce_many ------------------------------------------------------------------------------------------------


def mixed_list(rank: int, op: str) -> list[Array]:
    """Return arrays of every dtype that supports op, in several shapes and kinds of memory. Some are empty, some
    0-dimensional.
    """
    arrays = []
    for dtype in REDUCED:
        if op not in ops_of(dtype):
            continue
        values = wild(dtype, 4000 + rank)[rank:]
        shapes = (values[:3000], values[3000:3001].reshape(()), values[:0], strided(values[:77]))
        arrays += [*shapes, np.asfortranarray(values[:210].reshape(14, 15)), shared(values[:500].reshape(2, 5, 50))]
    return arrays


@pytest.mark.parametrize("algorithm", rotated(CANONICAL, few=1, always=["arena"]))
@ranks(3, env={"MSCOMM_ALGO": "all_reduce={algorithm}"})
def test_all_reduce_many_has_the_bits_of_one_all_reduce_after_the_other(rank, group, algorithm):
    for op in _core.ops:
        arrays = mixed_list(rank, op)
        for x, y in zip(arrays, mscomm.all_reduce_many(arrays, op), strict=True):
            assert y.shape == x.shape and y.dtype == x.dtype
            assert (bits(y) == bits(mscomm.all_reduce(x, op))).all(), f"{op} of {x.dtype}{x.shape}"


@ranks(3)
def test_all_reduce_many_writes_to_out(rank, group):
    arrays = mixed_list(rank, "sum")
    out = [with_gaps(x.shape, x.dtype) for x in arrays]
    expected = [mscomm.all_reduce(x) for x in arrays]
    result = mscomm.all_reduce_many(arrays, out=out)
    assert all(y is given for y, given in zip(result, out, strict=True))
    assert all((bits(y) == bits(z)).all() for y, z in zip(out, expected, strict=True))


@ranks(3)
def test_all_reduce_many_works_in_place(rank, group):
    arrays = [x.copy(order="K") for x in mixed_list(rank, "sum")]
    expected = [mscomm.all_reduce(x) for x in arrays]
    mscomm.all_reduce_many(arrays, out=arrays)
    assert all((bits(y) == bits(z)).all() for y, z in zip(arrays, expected, strict=True))


@ranks(2)
def test_all_reduce_many_fills_several_buckets(rank, group):
    # This is the largest array that shares a bucket. No whole number of such arrays fills a bucket to the last byte.
    count = collectives.ALONE_BYTES // 4 - 1
    arrays = [np.full(count, i + rank, np.int32) for i in range(2 * collectives.BUCKET_BYTES // (4 * count) + 2)]
    assert all((y == 2 * i + 1).all() for i, y in enumerate(mscomm.all_reduce_many(arrays)))


@ranks(2)
def test_all_reduce_many_of_nothing_is_nothing(rank, group):
    assert mscomm.all_reduce_many([]) == []
