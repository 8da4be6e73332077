"""The kernels of csrc/cuda on a real GPU: Group.pack and unpack in a job with one rank, compared with NumPy.

tests/core/pack_test.cc tests the same sources on the CPU, at more sizes. Without a GPU, the tests are skipped with a
reason.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ranks import ranks

import mscomm
from mscomm import _core, accelerators
from mscomm.arrays.device import OnDevice
from mscomm.job import resolve

pytestmark = pytest.mark.gpu
Array = np.ndarray[Any, Any]
BFLOAT16, FLOAT16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
LARGEST = {BFLOAT16: float.fromhex("0x1.fep127"), FLOAT16: 65504.0}
SIZES = [1, 7, 0, 64, 3, 100_003, 33, 1 << 20, 5]


def why_not() -> str:
    try:
        accelerators.opened("nccl")
        return ""
    except mscomm.Error as error:
        return str(error)


def library() -> str:
    """Return "cupy" or "torch", or "" if neither is installed. Either will do, because a kernel sees only memory."""
    return next((name for name in ("cupy", "torch") if importlib.util.find_spec(name)), "")


def on_gpu(body: Callable[..., None]) -> Any:
    reason = why_not() or ("" if library() else "neither CuPy nor PyTorch")
    skips = pytest.mark.skipif(bool(reason), reason=f"no GPU here: {reason[:300]}")
    return skips(ranks(1, init={"backend_name": "nccl", "device": 0}, timeout_s=280)(body))


class Given:
    """An array on the GPU that begins `offset` bytes after the start of its allocation."""

    def __init__(self, x: Array, offset: int = 0) -> None:
        self.dtype, self.offset = x.dtype, offset
        whole = np.concatenate([np.zeros(offset, np.uint8), np.ascontiguousarray(x).view(np.uint8)])
        frame = importlib.import_module(library())
        self.bytes = frame.asarray(whole) if library() == "cupy" else frame.from_numpy(whole).cuda()

    @property
    def memory(self) -> OnDevice:
        there = importlib.import_module(f"mscomm.arrays.{library()}").memory(self.bytes)
        return there[self.offset :].view(self.dtype)

    def take(self) -> Array:
        here = self.bytes.get() if library() == "cupy" else self.bytes.cpu().numpy()
        return here[self.offset :].copy().view(self.dtype)


def core() -> _core.Group:
    found = resolve(None).core
    assert accelerators.opened("nccl").runtime.kernels(0).startswith("14 loaded"), "this build has no kernels"
    return found


def pack(bucket: Given, parts: Sequence[Given], **options: Any) -> None:
    core().pack(bucket.memory, [part.memory for part in parts], bucket.memory.stream, **options)


def unpack(bucket: Given, parts: Sequence[Given], **options: Any) -> None:
    core().unpack(bucket.memory, [part.memory for part in parts], bucket.memory.stream, **options)


def floats(sizes: Sequence[int]) -> list[Array]:
    rng = np.random.default_rng(len(sizes))
    special = np.float32([0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 65504, 65519.9, 65520, 3.4e38, 2**-25, 1e-7])
    return [
        np.where(rng.random(n) < 0.05, rng.choice(special, n), rng.normal(size=n)).astype(np.float32) for n in sizes
    ]


def same(got: Array, expected: Array) -> bool:
    """Return whether the bits are the same. All NaNs count as equal."""
    a, b = (x.astype(np.float64) for x in (got, expected))
    bits = f"u{got.itemsize}"
    return bool(((got.view(bits) == expected.view(bits)) | (np.isnan(a) & np.isnan(b))).all())


def scaled(x: Array, scale: float, into: np.dtype[Any]) -> Array:
    """Scale x as a kernel does: it rounds each product once. float64 holds the exact product of two float32 numbers."""
    with np.errstate(over="ignore", invalid="ignore"):
        if x.dtype == np.float64:
            return x * scale
        return (x.astype(np.float64) * float(np.float32(scale))).astype(np.float32).astype(into)


@on_gpu
def test_copies_keep_all_bits_wherever_the_arrays_begin(rank: int, group: None) -> None:
    rng = np.random.default_rng(0)
    for dtype, offset in itertools.product((np.uint8, np.float16, np.float32, np.complex128), range(0, 17, 3)):
        parts = [rng.integers(0, 256, n * np.dtype(dtype).itemsize, np.uint8).view(dtype) for n in SIZES]
        whole = np.concatenate(parts)
        given = [Given(x, offset if i % 2 else 0) for i, x in enumerate(parts)]
        bucket = Given(np.zeros_like(whole), 16 - offset % 16)
        pack(bucket, given)
        assert (bucket.take().view(np.uint8) == whole.view(np.uint8)).all(), (dtype, offset)
        back = [Given(np.zeros_like(x), offset) for x in parts]
        unpack(bucket, back)
        for x, y in zip(parts, back, strict=True):
            assert (y.take().view(np.uint8) == x.view(np.uint8)).all(), (dtype, offset)


@on_gpu
def test_scale_and_cast(rank: int, group: None) -> None:
    float32, float64 = np.dtype(np.float32), np.dtype(np.float64)
    pairs = [(float32, into) for into in (float32, BFLOAT16, FLOAT16)]
    pairs += [(FLOAT16, FLOAT16), (BFLOAT16, BFLOAT16), (float64, float64)]
    for (dtype, into), scale, line in itertools.product(pairs, (1.0, 1 / 3, 1e-30), (1, 16)):
        with np.errstate(over="ignore"):
            parts = [x.astype(dtype) for x in floats(SIZES)]
        begins, end = [], 0
        for x in parts:
            begins.append(-(-end // line) * line)
            end = begins[-1] + x.size
        bucket = Given(np.zeros(end, into))
        pack(bucket, [Given(x) for x in parts], scale=scale, begins=begins)
        packed, back = bucket.take(), [Given(np.zeros_like(x)) for x in parts]
        unpack(bucket, back, scale=scale, begins=begins)
        for begin, x, y in zip(begins, parts, back, strict=True):
            case = (dtype, into, scale, line, x.size)
            assert same(packed[begin : begin + x.size], scaled(x, scale, into)), case
            assert same(y.take(), scaled(packed[begin : begin + x.size], scale, dtype)), case


@on_gpu
def test_error_feedback_adds_up(rank: int, group: None) -> None:
    for into in (BFLOAT16, FLOAT16):
        largest = LARGEST[into] / 4
        count = sum(SIZES)
        bucket, residual = Given(np.zeros(count, into)), Given(np.zeros(count, np.float32))
        given, sent, owed = np.zeros(count), np.zeros(count), np.zeros(count, np.float32)
        rng = np.random.default_rng(2)
        for step in range(20):
            whole = (rng.normal(size=count) * 0.01).astype(np.float32)
            if step == 0:
                whole[5::1000] = 3 * largest  # one step can send at most a third of each of these numbers
            parts = [Given(x) for x in np.split(whole, np.cumsum(SIZES)[:-1])]
            pack(bucket, parts, residual=residual.memory, largest=largest)
            total, here = whole + owed, bucket.take()
            near = np.abs(total) >= largest
            assert same(here[~near], total[~near].astype(into))
            assert (np.abs(here.astype(np.float64)) <= largest).all()
            owed = residual.take()
            assert same(owed, total - here.astype(np.float32))
            given, sent = given + whole, sent + here.astype(np.float64)
        usual = np.ones(count, bool)
        usual[5::1000] = False
        assert (np.abs(sent + owed - given)[usual] <= 20 * 2**-24).all()  # there are 20 steps, and each one rounds
        assert np.allclose((sent + owed)[~usual], given[~usual], rtol=1e-5)


@on_gpu
def test_a_thousand_parts_and_a_huge_one(rank: int, group: None) -> None:
    sizes = [1 + i % 50 for i in range(1000)]
    sizes[500] = 1 << 24
    parts = floats(sizes)
    bucket = Given(np.zeros(sum(sizes), BFLOAT16))
    pack(bucket, [Given(x) for x in parts], scale=0.25)
    assert same(bucket.take(), scaled(np.concatenate(parts), 0.25, BFLOAT16))


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
@on_gpu
def test_a_graph_with_kernels_runs_them_again(rank: int, group: None) -> None:
    import torch

    x, bucket = torch.ones(1000, device="cuda"), torch.zeros(2000, device="cuda", dtype=torch.bfloat16)
    memory = importlib.import_module("mscomm.arrays.torch").memory
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        core().pack(memory(bucket), [memory(x), memory(x)], stream, scale=2.0)
        x.add_(1)
    for turn in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert (bucket == 2 * (turn + 1)).all().item()
