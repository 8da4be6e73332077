"""Many device arrays are packed into a bucket and unpacked from it, by the kernels of csrc/cuda or by copies.

A stand-in for the CUDA driver runs the kernels on the CPU (tests/fakes/kernels.h). tests/core/pack_test.cc checks that
each kernel is correct at every alignment.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from devices import LOADED, WITHOUT, devices, kernel_variables, launches, load_kernels, on_device, violations
from fakes import device_array, library
from fakes.device_array import DeviceArray, compute
from fakes.kernels import CSRC
from functions import DTYPES, bits

import mscomm
from mscomm import _core, accelerators
from mscomm.job import resolve

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
EMBEDDED, ARCHITECTURES = _core.embedded_image()
LARGEST = {"bfloat16": float.fromhex("0x1.fep127"), "float16": 65504.0}

every_way = pytest.mark.parametrize("how", [*LOADED, *WITHOUT])
either_way = pytest.mark.parametrize("how", ["library", "refused"])
with_kernels = pytest.mark.parametrize("how", ["library"])
without_kernels = pytest.mark.parametrize("how", ["refused"])


def packing(n: int = 1) -> Any:
    """Return a decorator for a test of n ranks, each of which must call join(how)."""
    return devices(n, init=None, env=kernel_variables)


def join(how: str) -> _core.Group:
    load_kernels(how)
    mscomm.init("nccl")
    return resolve(None).core


def kernels() -> str:
    return accelerators.opened("nccl").runtime.kernels(int(os.environ["MSCOMM_RANK"]))


def pack(
    core: _core.Group,
    bucket: DeviceArray,
    parts: Sequence[DeviceArray],
    residual: DeviceArray | None = None,
    **options: Any,
) -> None:
    if residual is not None:
        options["residual"] = library.memory(residual)
    core.pack(library.memory(bucket), [library.memory(x) for x in parts], device_array.current_stream(), **options)


def unpack(core: _core.Group, bucket: DeviceArray, parts: Sequence[DeviceArray], **options: Any) -> None:
    core.unpack(library.memory(bucket), [library.memory(x) for x in parts], device_array.current_stream(), **options)


def drawn(dtype: np.dtype[Any], sizes: Sequence[int]) -> list[np.ndarray[Any, Any]]:
    """Return arrays of these sizes with random bits."""
    rng = np.random.default_rng(sum(sizes))
    return [rng.integers(0, 256, size * dtype.itemsize, np.uint8).view(dtype) for size in sizes]


def floats(sizes: Sequence[int]) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(sum(sizes))
    special = np.float32([0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 65504, 65520, 3.4e38, 1e-7])
    return [
        np.where(rng.random(size) < 0.1, rng.choice(special, size), rng.normal(size=size)).astype(np.float32)
        for size in sizes
    ]


def same(got: Any, expected: np.ndarray[Any, Any]) -> bool:
    """Return whether the bits are the same. All NaNs count as equal."""
    got = got.to_numpy()
    a, b = (x.astype(np.float64) for x in (got, expected))
    equal = got.view(np.uint8).reshape(-1, expected.itemsize) == expected.view(np.uint8).reshape(-1, expected.itemsize)
    return bool((equal.all(axis=1) | (np.isnan(a) & np.isnan(b))).all())


# -- with kernels and without


@every_way
@packing()
def test_it_is_told_what_kernels_there_are_or_why_there_are_none(rank: int, how: str) -> None:
    core = join(how)
    if how in LOADED:
        assert re.match(r"14 loaded, of .+", kernels())
    else:
        assert kernels().startswith(WITHOUT[how])
    names = ("float32", "float32"), ("float32", "bfloat16"), ("float16", "float16"), ("int32", "int32")
    codes = [tuple(_core.dtypes().index(name) for name in pair) for pair in names]
    assert [core.packs(*pair) for pair in codes] == ([True, True, True, False] if how in LOADED else [False] * 4)
    assert violations() == []


@either_way
@packing()
def test_copies_keep_all_bits_of_every_dtype(rank: int, how: str) -> None:
    core = join(how)
    for dtype in DTYPES:
        sizes = [3, 0, 1, 17, 2000, 5]
        parts = drawn(dtype, sizes)
        whole = np.concatenate(parts)
        sources, bucket = [on_device(x) for x in parts], on_device(np.zeros(whole.size, dtype))
        before = launches()
        pack(core, bucket, sources)
        assert (bits(bucket.to_numpy()) == bits(whole)).all(), dtype
        targets = [on_device(np.zeros_like(x)) for x in parts]
        unpack(core, bucket, targets)
        for target, part in zip(targets, parts, strict=True):
            assert (bits(target.to_numpy()) == bits(part)).all(), dtype
        assert launches() - before == (2 if how in LOADED else 0)
    assert violations() == []


@either_way
@packing()
def test_parts_begin_where_they_are_told_to(rank: int, how: str) -> None:
    core = join(how)
    parts = [np.full(n, n, np.float32) for n in (3, 16, 17, 1)]
    begins = [2, 16, 33, 900]
    bucket = on_device(np.full(1000, -1, np.float32))
    pack(core, bucket, [on_device(x) for x in parts], begins=begins)
    expected = np.full(1000, -1, np.float32)
    for begin, part in zip(begins, parts, strict=True):
        expected[begin : begin + part.size] = part
    assert (bucket.to_numpy() == expected).all()
    targets = [on_device(np.zeros_like(x)) for x in parts]
    unpack(core, bucket, targets, begins=begins)
    assert all((x.to_numpy() == part).all() for x, part in zip(targets, parts, strict=True))
    assert violations() == []


@either_way
@packing()
def test_cleared_memory_is_zero(rank: int, how: str) -> None:
    core = join(how)
    x = on_device(np.arange(1, 11, dtype=np.float32))
    core.clear(library.memory(x)[2:7], device_array.current_stream())
    core.clear(library.memory(x)[:0], device_array.current_stream())
    assert x.to_numpy().tolist() == [1, 2, 0, 0, 0, 0, 0, 8, 9, 10]
    assert violations() == []


@either_way
@packing(2)
def test_many_arrays_are_reduced_in_one_call(rank: int, how: str) -> None:
    join(how)
    arrays = [np.arange(n, dtype=dtype) for dtype in ("float32", "int8") for n in (1, 300, 5, 4097)]
    totals = mscomm.all_reduce_many([on_device((x * (rank + 1)).astype(x.dtype)) for x in arrays])
    for x, total in zip(arrays, totals, strict=True):
        assert (bits(total.to_numpy()) == bits((x * 3).astype(x.dtype))).all()
    assert launches() == (4 if how in LOADED else 0)
    assert violations() == []


@without_kernels
@packing()
def test_what_copies_cannot_do_is_refused_with_the_reason(rank: int, how: str) -> None:
    core = join(how)
    x = on_device(np.ones(5, np.float32))
    for bucket, options in (
        (np.zeros(5, np.float32), {"scale": 0.5}),
        (np.zeros(5, BFLOAT16), {}),
        (np.zeros(5, np.float16), {"residual": on_device(np.zeros(5, np.float32))}),
    ):
        there = on_device(bucket)
        with pytest.raises(
            RuntimeError, match=re.escape(f"copies cannot do that. Check Group.packs first. Kernels: {WITHOUT[how]}")
        ):
            pack(core, there, [x], **options)
        if "residual" not in options:
            with pytest.raises(
                RuntimeError, match="unpack: no kernel on device 0 scales or casts between float32 parts"
            ):
                unpack(core, there, [x], **options)
    pack(core, on_device(np.zeros(5, np.float32)), [x])  # the group still works
    assert violations() == []


# -- what kernels do and copies cannot do


@with_kernels
@packing()
def test_scale_and_cast_are_those_of_numpy(rank: int, how: str) -> None:
    core = join(how)
    sizes = [5, 1, 700, 0, 33]
    for dtype, into, scale in (
        (np.float32, np.float32, 1 / 3),
        (np.float32, BFLOAT16, 1.0),
        (np.float32, BFLOAT16, 1 / 3),
        (np.float32, np.float16, 1.0),
        (np.float32, np.float16, 1 / 3),
        (np.float16, np.float16, 0.3),
        (BFLOAT16, BFLOAT16, 0.3),
        (np.float64, np.float64, 1 / 3),
    ):
        with np.errstate(over="ignore"):
            parts = [x.astype(dtype) for x in floats(sizes)]
            whole, wide = np.concatenate(parts), np.float64 if dtype is np.float64 else np.float32
            expected = (whole.astype(wide) * wide(scale)).astype(into)
            back = (expected.astype(wide) * wide(scale)).astype(dtype)
        bucket = on_device(np.zeros(whole.size, into))
        pack(core, bucket, [on_device(x) for x in parts], scale=scale)
        assert same(bucket, expected), (dtype, into, scale)
        targets = [on_device(np.zeros_like(x)) for x in parts]
        unpack(core, bucket, targets, scale=scale)
        for target, begin in zip(targets, np.cumsum([0, *sizes]), strict=False):
            assert same(target, back[begin : begin + target.size]), (dtype, into, scale)
    assert violations() == []


@with_kernels
@packing()
def test_error_feedback_keeps_what_rounding_takes(rank: int, how: str) -> None:
    core = join(how)
    for into in (BFLOAT16, np.dtype(np.float16)):
        largest = LARGEST[into.name] / 4
        parts = [np.where(np.isfinite(x), x, 1).astype(np.float32) for x in floats([40, 3, 900])]
        whole = np.concatenate(parts)
        owed = np.random.default_rng(1).normal(size=whole.size).astype(np.float32) * np.float32(1e-3)
        bucket, residual = on_device(np.zeros(whole.size, into)), on_device(owed)
        pack(core, bucket, [on_device(x) for x in parts], residual, scale=0.5, largest=largest)
        total = whole * np.float32(0.5) + owed
        expected = np.clip(total, -largest, largest).astype(into)
        # If a total is at or beyond the limit, the kernel rounds towards zero, unlike NumPy. So only the elements whose
        # totals are below the limit must equal NumPy's.
        near = np.abs(total) >= largest
        assert same(DeviceArray.from_numpy(bucket.to_numpy()[~near]), expected[~near])
        sent = bucket.to_numpy().astype(np.float32)
        assert (np.abs(sent.astype(np.float64)) <= largest).all()
        assert (bits(residual.to_numpy()) == bits(total - sent)).all()
    assert violations() == []


@with_kernels
@packing()
def test_a_thousand_parts_take_few_launches(rank: int, how: str) -> None:
    core = join(how)
    sizes = [1 + i % 40 for i in range(1000)]
    parts = floats(sizes)
    whole = np.concatenate(parts)
    source = on_device(whole)  # all parts are in one allocation
    places = np.cumsum([0, *sizes])
    bucket, before = on_device(np.zeros(whole.size, BFLOAT16)), launches()
    with np.errstate(over="ignore"):
        expected = whole.astype(BFLOAT16)
    pack(core, bucket, [source[begin : begin + size] for begin, size in zip(places, sizes, strict=False)])
    assert same(bucket, expected)
    assert launches() - before == 4
    assert violations() == []


@with_kernels
@packing()
def test_a_kernel_comes_after_what_the_stream_has(rank: int, how: str) -> None:
    core = join(how)
    with device_array.stream(device_array.new_stream(rank)):
        x, bucket = on_device(np.zeros(1000, np.float32)), on_device(np.zeros(1000, BFLOAT16))
        compute.add(x, 3, delay=0.1)
        pack(core, bucket, [x], scale=2.0)
        compute.add(x, 1, delay=0.1)
        assert (bucket.to_numpy() == 6).all()
    assert violations() == []


@with_kernels
@packing()
def test_arguments_that_do_not_fit_are_refused(rank: int, how: str) -> None:
    core = join(how)
    x, y = on_device(np.zeros(5, np.float32)), on_device(np.zeros(5, np.int32))
    with pytest.raises(ValueError, match="the parts do not fit into the bucket"):
        pack(core, on_device(np.zeros(9, np.float32)), [x, x])
    with pytest.raises(ValueError, match="the parts do not fit into the bucket"):
        pack(core, on_device(np.zeros(12, np.float32)), [x, x], begins=[0, 8])
    with pytest.raises(ValueError, match="the parts do not fit into the bucket"):
        pack(core, on_device(np.zeros(12, np.float32)), [x], begins=[1 << 63])
    with pytest.raises(TypeError, match="all parts of a bucket must have the same dtype"):
        pack(core, on_device(np.zeros(10, np.float32)), [x, y])
    with pytest.raises(TypeError, match="the residual must be float32"):
        pack(core, on_device(np.zeros(5, BFLOAT16)), [x], y)
    with pytest.raises(ValueError, match="the residual is shorter than the bucket"):
        pack(core, on_device(np.zeros(5, BFLOAT16)), [x], x[:4])
    with pytest.raises(ValueError, match="largest must be a positive number"):
        pack(core, on_device(np.zeros(5, BFLOAT16)), [x], x, largest=0.0)
    with pytest.raises(ValueError, match="the parts must be in the order of the bucket, and must not overlap"):
        pack(core, on_device(np.zeros(12, np.float32)), [x, x], begins=[0, 4])
    with pytest.raises(ValueError, match="begins must have one number for each part"):
        pack(core, x, [x], begins=[])
    with pytest.raises(
        RuntimeError, match=r"casts between int32 parts and a float32 bucket like these.*Kernels: 14 loaded"
    ):
        pack(core, x, [y])
    assert violations() == []


# -- the code that nvcc generates


NVCC = shutil.which("nvcc")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")


def contents(fatbin: bytes) -> set[str]:
    """Return the architectures in an uncompressed fatbin. A fatbin has a header and several entries. Each entry has its
    own header, which contains the kind of the entry: 1 is PTX, 2 is machine code.
    """
    magic, _, header, size = struct.unpack_from("<IHHQ", fatbin)
    assert (magic, header + size) == (0xBA55ED50, len(fatbin))
    found, at = set(), header
    while at < len(fatbin):
        kind, _, own, payload, *_ = struct.unpack_from("<HHIQ", fatbin, at)
        architecture, flags = struct.unpack_from("<I", fatbin, at + 28)[0], struct.unpack_from("<Q", fatbin, at + 40)[0]
        assert not flags & 0x2000, "compressed: old drivers cannot read all ways of that"
        found.add(f"{'compute' if kind == 1 else 'sm'}_{architecture}")
        at += own + payload
    return found


@pytest.mark.skipif(not EMBEDDED, reason="mscomm was built without nvcc")
def test_the_embedded_image_has_what_it_is_said_to_have() -> None:
    assert contents(EMBEDDED) == set(ARCHITECTURES.split())
    assert {"sm_80", "sm_90"} <= contents(EMBEDDED)
    assert len(EMBEDDED) < 3 << 20


@needs_nvcc
def test_each_operation_rounds_once_and_accesses_are_wide(tmp_path: Path) -> None:
    """Check nvcc's PTX: it has no fused multiply-add and no approximate operation, and it keeps subnormal numbers. It
    uses no local memory, and has loads and stores of 16 bytes.
    """
    flags = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "--fmad=false", f"-I{CSRC}", "-arch=compute_75"]
    made = tmp_path / "pack.ptx"
    subprocess.run([NVCC, *flags, "-ptx", "-o", str(made), str(CSRC / "cuda/pack.cu")], check=True)
    operations = set(re.findall(r"^\s+(?:@!?%p\d+ )?((?:fma|mad|mul|add|sub|ld|st)\.[\w.]+)", made.read_text(), re.M))
    floating = {one for one in operations if re.search(r"\.f(32|64)$", one) and not one.startswith(("ld", "st"))}
    assert {"mul.rn.f32", "add.rn.f32", "mul.rn.f64"} <= floating
    assert {one for one in floating if not re.fullmatch(r"(mul|add|sub)\.(rn\.)?f(32|64)", one)} == set()
    assert not any("local" in one for one in operations)
    assert {"ld.v4.u32", "st.v4.u32"} <= operations


HEADER = next(
    (
        path
        for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda")
        if (path := Path(f"{home}/include/cuda.h")).exists()
    ),
    None,
)


@pytest.mark.skipif(HEADER is None, reason="cuda.h is not installed")
def test_our_declarations_of_the_driver_are_those_of_its_header() -> None:
    """Compile static_asserts that compare the declarations in csrc/device/cuda.cc with cuda.h."""
    compiler = os.environ.get("CXX", "c++").split()
    command = [
        *compiler,
        "-std=c++20",
        "-fsyntax-only",
        f"-I{HEADER.parent}",
        str(CSRC.parent / "tests/core/cuda_abi.cc"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@needs_nvcc
def test_no_kernel_spills_its_registers(tmp_path: Path) -> None:
    """Each kernel must also use so few registers that four blocks of 256 threads fit on a multiprocessor."""
    listed = subprocess.run([NVCC, "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout
    architectures = sorted({int(n) for n in re.findall(r"compute_(\d+)", listed) if int(n) >= 75})
    targets = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in architectures]
    flags = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "--fmad=false", f"-I{CSRC}", "-Xptxas", "-v", "-Werror"]
    command = [
        NVCC,
        *flags,
        "all-warnings",
        *targets,
        "-fatbin",
        "-o",
        str(tmp_path / "it"),
        str(CSRC / "cuda/pack.cu"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    used = [int(n) for n in re.findall(r"Used (\d+) registers", said)]
    assert len(used) == 14 * len(architectures)
    assert max(used) <= 64, said
    stacks = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert set(stacks) == {("0", "0", "0")}, said
