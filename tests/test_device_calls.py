"""Calls on device arrays with the nccl and the hccl backend. mscomm's own loader loads the stand-ins of tests/fakes."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from devices import BACKENDS, devices, each_backend, handles, on_device, violations
from fakes import device_array, library
from fakes.device_array import DeviceArray, compute
from functions import DTYPES, FUNCTIONS, SCANS, Array, How, bits, ops_of
from rotated import rotated

import mscomm
from mscomm import _core
from mscomm.communication import comm_func
from mscomm.job import resolve

SIZES = [1, 2, 3, 4]


def reduces(dtype: np.dtype[Any], op: str) -> bool:
    return not resolve(None).refuses(DTYPES.index(dtype), list(_core.ops).index(op))


def values(dtype: np.dtype[Any], rank: int, shape: tuple[int, ...], op: str | None) -> Array:
    """Return random bits. If floats are to be reduced, return whole numbers instead: their sum, product or mean over at
    most four ranks is exact in any order.
    """
    count = math.prod(shape)
    rng = np.random.default_rng(rank)
    if dtype.kind == "b":
        return (rng.integers(0, 2, count) == 1).reshape(shape)
    if dtype.kind in "iu" or op is None:
        drawn = rng.integers(0, 256, count * dtype.itemsize, np.uint8)
        return drawn.view(dtype).reshape(shape)
    return (rng.integers(-3, 4, count) * (12 if op == "avg" else 1)).astype(dtype).reshape(shape)


def rows_of(n: int, size: int) -> list[list[list[int]]]:
    """Return two tables with the number of rows that each rank sends to each rank. In the first table, all numbers are
    equal. In the second table, they differ, and some are 0.
    """
    uneven = [[(3 * source + target) % 4 * size for target in range(n)] for source in range(n)]
    return [[[size] * n] * n, uneven]


def cases(name: str, n: int) -> list[tuple[np.dtype[Any], How]]:
    row, found = FUNCTIONS[name], []
    for dtype in DTYPES:
        for op in [op for op in ops_of(dtype) if reduces(dtype, op)] if row.has_op else ["sum"]:
            for size, root in itertools.product([0, 1, 67], range(n) if row.has_root else [0]):
                if size == 67 or (op in ("sum", "min") and root == n - 1):
                    found += [(dtype, How(op, root, rows)) for rows in rows_of(n, size)[: 1 if size == 0 else 2]]
    return found


def check(got: Any, expected: Array | None, case: object) -> None:
    assert (got is None) == (expected is None), case
    if expected is not None:
        assert isinstance(got, DeviceArray) and got.dtype == expected.dtype and got.shape == expected.shape, case
        assert (bits(got.to_numpy()) == bits(expected)).all(), case


@pytest.mark.parametrize(
    ("n", "backend"),
    rotated(itertools.product(SIZES, BACKENDS), few=1, always=[(3, "nccl"), (3, "hccl")]),
)
@devices("n", timeout_s=240)
def test_every_function_gives_the_right_elements_of_every_dtype(rank: int, group: None, backend: str, n: int) -> None:
    for name in FUNCTIONS:
        if name not in SCANS:
            try_function(name, rank, n)
            assert violations() == [], name


def try_function(name: str, rank: int, n: int) -> None:
    row = FUNCTIONS[name]
    for turn, (dtype, how) in enumerate(cases(name, n)):
        if row.counts is None and how.rows[0] != [how.rows[0][0]] * n:
            how = how._replace(rows=[how.rows[0]] * n)  # every rank sends the same parts
            if not name.endswith("_v"):
                continue
        if name in ("scatter_v", "reduce_scatter_v"):
            how = how._replace(rows=[how.rows[0]] * n)
        inputs = [values(dtype, r, (row.given(how, r), 3), how.op if row.has_op else None) for r in range(n)]
        expected = row.model(how, inputs, rank, None)
        case = (name, dtype, how)
        x = on_device(inputs[rank])
        options: dict[str, Any] = {"async_op": bool(turn % 2)}
        kind = turn % 3
        if kind == 1 and expected is not None:
            options["out"] = on_device(np.zeros(expected.shape, dtype))
        if kind == 2 and name in ("all_reduce", "broadcast", "all_to_all"):
            options["out"] = x
        got = row.call(x, how, rank, **options)
        if options["async_op"]:
            got = got.wait()
        if row.counts is not None and expected is not None:
            got, counts = got
            assert counts == row.counts(how, rank), case
        check(got, expected, case)
        if "out" in options:
            assert got is options["out"] or expected is None, case


@each_backend
@devices(2)
def test_strided_arrays_are_read_and_written_in_c_order(rank: int, group: None, backend: str) -> None:
    whole = np.arange(24, dtype=np.float32).reshape(4, 6) + rank
    expected = 2 * (whole - rank) + 1
    x, out = on_device(whole), on_device(np.zeros((6, 8), np.float32))
    check(mscomm.all_reduce(x.T), expected.T, "transposed")
    check(mscomm.all_reduce(x[::2, 1:]), expected[::2, 1:], "steps")
    target = out[:4, 1:7]
    assert mscomm.all_reduce(x, out=target) is target
    check(target, expected, "out")
    assert mscomm.all_reduce(x, out=target, async_op=True).wait() is target
    check(out[4:], np.zeros((2, 8), np.float32), "beside out")
    assert violations() == []


@each_backend
@devices(2)
def test_scalars_and_arrays_without_elements(rank: int, group: None, backend: str) -> None:
    check(mscomm.all_gather(on_device(np.int32(rank))), np.arange(2, dtype=np.int32), "a scalar")
    check(mscomm.all_reduce(on_device(np.float32(rank + 1))), np.array(3, np.float32), "a scalar")
    nothing = np.zeros((0, 3), np.float32)
    check(mscomm.all_reduce(on_device(nothing)), nothing, "nothing")
    check(mscomm.all_gather(on_device(nothing)), nothing, "nothing")


@each_backend
@devices(3)
def test_many_arrays_of_the_device_and_the_cpu_in_one_call(rank: int, group: None, backend: str) -> None:
    arrays = [np.full(shape, rank + 1, dtype) for dtype in ("float32", "int32") for shape in (3, (2, 5), 1, 300_000)]
    mixed = [on_device(x) if i % 2 else x for i, x in enumerate(arrays)]
    for options in ({}, {"async_op": True}, {"out": mixed}):
        got = mscomm.all_reduce_many(mixed, **options)
        got = got.wait() if "async_op" in options else got
        for i, (y, x) in enumerate(zip(got, arrays, strict=True)):
            expected = np.full(x.shape, 6, x.dtype)
            check(y, expected, i) if i % 2 else np.testing.assert_array_equal(y, expected)
    assert violations() == []


# -- streams


@each_backend
@devices(2)
def test_a_call_comes_after_what_the_stream_has_and_before_what_comes(rank: int, group: None, backend: str) -> None:
    stream = device_array.new_stream(rank)
    with device_array.stream(stream):
        x = on_device(np.zeros(1000, np.float32))
        for turn in range(3):
            compute.add(x, rank + 1, delay=0.05)  # the addition is still running when all_reduce is called
            y = mscomm.all_reduce(x)
            assert (y.to_numpy() == 3 * (turn + 1)).all()
    assert violations() == []


@each_backend
@devices(2)
def test_wait_orders_the_current_stream_after_the_call_and_does_not_wait(rank: int, group: None, backend: str) -> None:
    here, other = device_array.new_stream(rank), device_array.new_stream(rank)
    with contextlib.ExitStack() as held:
        with device_array.stream(here):
            x = on_device(np.ones(1000, np.float32))
            held.enter_context(compute.hold(rank))  # nothing after this runs on the stream until the block ends
            compute.add(x, 1)
            work = mscomm.all_reduce(x, async_op=True)
            assert not work.done()
        with device_array.stream(other):
            y = work.wait()
            assert not work.done()
            z = y.copy()
            time.sleep(0.05)  # if `other` did not wait for the call, it would copy y now
    with device_array.stream(other):
        assert (z.to_numpy() == 4).all()
        work = mscomm.all_reduce(x, async_op=True)
        assert (work.wait(timeout=60).to_numpy() == 4).all() and work.done() and work.exception() is None
    assert violations() == []


@each_backend
@devices(2)
def test_a_stream_of_the_users_own(rank: int, group: None, backend: str) -> None:
    stream = device_array.new_stream(rank)
    with device_array.stream(stream):
        x = compute.add(on_device(np.ones(1000, np.float32)), 1, delay=0.1)
        y = on_device(np.zeros(1000, np.float32))
    mscomm.all_reduce(x, out=y, stream=stream)
    with device_array.stream(stream):
        assert (y.to_numpy() == 4).all()
    with pytest.raises(ValueError, match="with stream= x must be in C order"):
        mscomm.all_reduce(x[::2], out=y[:500], stream=stream)
    for wrong in (
        lambda: mscomm.all_reduce(x, stream=stream),
        lambda: mscomm.all_reduce(x[:500], out=y[::2], stream=stream),
        lambda: mscomm.all_to_all(x, out=x, stream=stream),
    ):
        with pytest.raises(TypeError, match="with stream=, also pass out=, in C order and not overlapping x"):
            wrong()
    with pytest.raises(TypeError, match="stream is for arrays on a device, but x is on the CPU"):
        mscomm.all_reduce(np.ones(3), stream=stream)
    with pytest.raises(OverflowError):
        mscomm.all_reduce(x, out=y, stream=1 << 70)


@each_backend
@devices(2)
def test_scatter_uses_the_users_stream_on_all_ranks(rank: int, group: None, backend: str) -> None:
    stream = device_array.new_stream(rank)
    with device_array.stream(stream):
        x = compute.add(on_device(np.arange(4, dtype=np.float32)), 1, delay=0.1)
        out = on_device(np.zeros(2, np.float32))
    mscomm.scatter(x if rank == 0 else None, out=out, stream=stream)
    with device_array.stream(stream):
        check(out, np.float32([[1, 2], [3, 4]][rank]), "scatter")


@each_backend
@devices(2)
def test_calls_of_the_cpu_and_of_the_device_keep_their_order(rank: int, group: None, backend: str) -> None:
    for turn in range(20):
        works = [
            mscomm.all_reduce(np.full(5, turn), async_op=True),
            mscomm.all_reduce(on_device([turn]), async_op=True),
        ]
        assert (mscomm.all_reduce(np.full(3, turn)) == 2 * turn).all()
        assert (works[0].wait() == 2 * turn).all() and works[1].wait().to_numpy()[0] == 2 * turn
    assert violations() == []


@devices(2)
def test_a_captured_call_is_enqueued_where_it_is_and_not_watched(rank: int, group: None) -> None:
    stream = device_array.new_stream(rank)
    library = device_array.runtime().library
    with device_array.stream(stream):
        x = on_device(np.ones(10, np.float32))
        y = mscomm.all_reduce(x)
        library.fake_set_capturing(device_array.c_uint64(stream), 1)
        mscomm.all_reduce(x, out=y)
        work = mscomm.all_reduce(x, out=y, async_op=True)
        assert work.done()
        library.fake_set_capturing(device_array.c_uint64(stream), 0)
        assert (mscomm.all_reduce(x).to_numpy() == 2).all()
    assert violations() == []


@devices(2)
def test_what_is_watched_does_not_end_a_capture_of_another_stream(rank: int, group: None) -> None:
    """While torch.cuda.graph captures a stream, an event query from any thread ends the capture, unless that thread has
    chosen CUDA's relaxed capture mode. mscomm's watching thread queries events, so it must choose this mode.
    """
    library = device_array.runtime().library
    stream, graph = device_array.new_stream(rank), device_array.c_uint64()
    x = compute.add(on_device(np.ones(10, np.float32)), 1, delay=0.5)
    with device_array.runtime().on(rank):
        assert library.cuStreamBeginCapture_v2(device_array.c_uint64(stream), 0) == 0
        y = mscomm.all_reduce(x)  # this call uses another stream, and is still running during the capture
        time.sleep(0.2)
        assert library.cuStreamEndCapture(device_array.c_uint64(stream), device_array.byref(graph)) == 0
    assert (y.to_numpy() == 4).all()
    assert violations() == []


# -- groups, and release()


@each_backend
@devices(4)
def test_groups_have_communicators_of_their_own(rank: int, group: None, backend: str) -> None:
    halves = mscomm.split(rank % 2)
    trio = mscomm.create_group("trio", [3, 1, 0])
    x = on_device(np.full(3, rank, np.float32))
    check(mscomm.all_reduce(x, group=halves), np.full(3, 2 + 2 * (rank % 2), np.float32), "halves")
    if trio:
        check(mscomm.all_gather(x[:1], group=trio), np.float32([3, 1, 0]), "trio")
        mscomm.destroy_group(trio)
    check(mscomm.all_reduce(x), np.full(3, 6, np.float32), "world")
    assert violations() == []


@each_backend
@devices(2)
def test_nothing_is_left_of_the_device_after_release(rank: int, group: None, backend: str) -> None:
    x = on_device(np.ones(100, np.float32))
    before = handles()
    assert before["comms"] == 1
    mscomm.create_group("other", [0, 1])
    for _ in range(5):
        mscomm.all_reduce(x, group="other", out=x)
        mscomm.all_reduce(x, async_op=True).wait()
    compute.add(x, 1, delay=0.1)
    mscomm.all_reduce(x, out=x)  # release() waits for this call
    mscomm.release()
    left = handles()
    assert (left["comms"], left["streams"], left["events"]) == (0, 0, 0)
    assert violations() == []


# -- wrong arguments


@devices(2)
def test_what_nccl_cannot_do_is_refused_with_what_it_can(rank: int, group: None) -> None:
    for dtype in ("int16", "uint16"):
        with pytest.raises(TypeError, match=rf"NCCL cannot reduce {dtype} by sum; it supports int8, int32"):
            mscomm.all_reduce(on_device(np.ones(3, dtype)))
        check(mscomm.all_gather(on_device(np.full(1, rank, dtype))), np.arange(2, dtype=dtype), dtype)
    for op in ("band", "bor", "bxor"):
        with pytest.raises(
            TypeError, match=rf"NCCL cannot reduce int32 by {op}; it supports sum, prod, min, max and avg"
        ):
            mscomm.all_reduce(on_device(np.ones(3, np.int32)), op)
    with pytest.raises(TypeError, match="NCCL cannot reduce complex64 by prod"):
        mscomm.all_reduce(on_device(np.ones(3, np.complex64)), "prod")
    with pytest.raises(TypeError, match="avg is not defined on int32 arrays"):
        mscomm.all_reduce(on_device(np.ones(3, np.int32)), "avg")
    assert resolve(None).core.where()[0] == 2  # the refused calls used no call numbers


@devices(2)
def test_arrays_of_another_place_are_refused(rank: int, group: None) -> None:
    x = on_device(np.ones(3, np.float32))
    elsewhere = DeviceArray.from_numpy(np.ones(3, np.float32), device=3)
    with pytest.raises(TypeError, match=f"x is on device 3 of nccl; this rank has joined with device {rank} of nccl"):
        mscomm.all_reduce(elsewhere)
    with pytest.raises(
        TypeError, match=f"out is on the CPU, x is on device {rank} of nccl; both must be on the same device"
    ):
        mscomm.all_reduce(x, out=np.ones(3, np.float32))
    with pytest.raises(TypeError, match=f"out is on device {rank} of nccl, x is on the CPU"):
        mscomm.all_reduce(np.ones(3, np.float32), out=x)
    with pytest.raises(ValueError, match="overlap"):
        mscomm.all_reduce(x[:2], out=x[1:])
    with pytest.raises(ValueError, match=r"out has shape \(2,\), the result has \(3,\)"):
        mscomm.all_reduce(x, out=x[:2])


@each_backend
@devices(2)
def test_a_scan_is_the_cpus_and_says_so_on_every_rank(rank: int, group: None, backend: str) -> None:
    for function in (mscomm.scan, mscomm.exscan):
        with pytest.raises(TypeError, match=f"{function.__name__}: x is on a device, and neither NCCL nor HCCL has a"):
            function(on_device(np.ones(3, np.float32)))
    assert mscomm.scan(np.ones(1))[0] == rank + 1  # the refused calls used no call numbers


@devices(2, init={"backend_name": "gloo"})
def test_a_device_array_in_a_job_of_the_cpu_says_how_to_join(rank: int, group: None) -> None:
    with pytest.raises(TypeError, match=r'x is on a device, and the job\'s backend is cpu; join with init\("nccl"\)'):
        mscomm.all_reduce(on_device(np.ones(3, np.float32)))


@pytest.mark.parametrize("backend", ["hccl"])
@devices(2)
def test_what_hccl_cannot_do_is_refused_with_what_it_can(rank: int, group: None, backend: str) -> None:
    for dtype in ("uint8", "uint32", "float64"):
        with pytest.raises(TypeError, match=rf"HCCL cannot reduce {dtype} by sum on this device; it supports sum"):
            mscomm.all_reduce(on_device(np.ones(3, dtype)))
        check(mscomm.all_gather(on_device(np.full(1, rank, dtype))), np.arange(2, dtype=dtype), dtype)
    for dtype in ("int16", ml_dtypes.bfloat16):
        with pytest.raises(TypeError, match="both not by prod"):
            mscomm.all_reduce(on_device(np.ones(3, dtype)), "prod")
        check(mscomm.all_reduce(on_device(np.ones(3, dtype))), np.full(3, 2, dtype), dtype)
    with pytest.raises(
        TypeError, match="HCCL cannot reduce float32 by avg; use sum, and divide by the number of ranks"
    ):
        mscomm.all_reduce(on_device(np.ones(3, np.float32)), "avg")


@pytest.mark.parametrize("backend", ["hccl"])
@pytest.mark.parametrize("soc", ["Ascend910A", "Ascend910B", "Ascend910PremiumA"])
@devices(2, env={"FAKE_ASCEND": "910", "FAKE_SOC_NAME": "{soc}"})
def test_the_first_generation_of_ascend_lacks_two_types(rank: int, group: None, backend: str, soc: str) -> None:
    for dtype in ("int16", ml_dtypes.bfloat16):
        with pytest.raises(TypeError, match="prod, min and max of int8, int32, int64, float16 and float32"):
            mscomm.all_reduce(on_device(np.ones(3, dtype)))


@pytest.mark.parametrize("backend", ["hccl"])
@devices(2, env={"LIBRARY": "hccl-split"})
def test_hccl_is_found_in_two_libraries(rank: int, group: None, backend: str) -> None:
    check(mscomm.all_reduce(on_device(np.ones(3, np.float32))), np.full(3, 2, np.float32), "split")


@each_backend
@devices(2)
def test_bfloat16_is_known_by_its_name(rank: int, group: None, backend: str) -> None:
    x = np.array([1, 2, 3], ml_dtypes.bfloat16)
    check(mscomm.all_reduce(on_device(x)), 2 * x, "bfloat16")


@each_backend
@devices(2)
def test_messages_go_by_the_host(rank: int, group: None, backend: str) -> None:
    for dtype in (np.float32, ml_dtypes.bfloat16, np.int16):
        whole = np.arange(24).reshape(4, 6).astype(dtype)
        if rank == 0:
            with device_array.stream(device_array.new_stream(rank)):
                late = on_device(np.zeros(3, np.float32))
                compute.add(late, 7, delay=0.1)
                mscomm.send(late, 1)  # the data is sent after the stream has done the addition
            work = mscomm.send(on_device(whole), 1, tag=1, async_op=True)
            mscomm.send(whole, 1, tag=2)
            mscomm.send(on_device(whole).T, 1, tag=3)
            work.wait()
        else:
            out = on_device(np.zeros((4, 6), dtype))
            turned = on_device(np.zeros((4, 6), dtype)).T
            assert (mscomm.recv(np.zeros(3, np.float32), 0) == 7).all()
            work = mscomm.recv(out, 0, tag=1, async_op=True)
            assert work.wait() is out and (out.to_numpy() == whole).all()
            mscomm.recv(out[:, ::-1], 0, tag=2)
            assert (out.to_numpy() == whole[:, ::-1]).all()
            mscomm.recv(turned, 0, tag=3)
            assert (turned.to_numpy() == whole.T).all()
    other = comm_func.recv(on_device(np.zeros(2, np.float32)), src=1) if rank == 0 else None
    if rank == 1:
        comm_func.send(on_device(np.full(2, 5, np.float32)), dst=0)
    assert other is None or (other.to_numpy() == 5).all()
    assert violations() == []


@devices(2)
def test_objects_are_the_cpus(rank: int, group: None) -> None:
    with pytest.raises(TypeError, match=r'obj\["x"\]: a .*DeviceArray cannot be sent'):
        mscomm.all_gather_object({"x": on_device(np.ones(3, np.float32))})
    mscomm.barrier()


@devices(1)
def test_the_memory_of_a_device_is_no_array_to_read_or_write(rank: int, group: None) -> None:
    there = library.memory(on_device(np.ones((2, 3), np.float32)))
    assert str(there) == repr(there) == "<float32[2, 3] on device 0>" and there[1:].shape == (1, 3)
    for wrong in (
        lambda: there + 1,
        lambda: there[0],
        lambda: there[()],
        lambda: there.__setitem__(0, 1),
        lambda: np.concatenate([there, there]),
        lambda: np.add(there, 1),
    ):
        with pytest.raises(TypeError, match="this memory is on a device"):
            wrong()


class ByDlpack:
    """An array of an unknown library that offers only DLPack."""

    def __init__(self, array: DeviceArray) -> None:
        self.array = array

    on_cpu = False  # the class has arrays on the CPU, too

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0) if self.on_cpu else self.array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)


class ByInterface:
    """An array of an unknown library that offers only the CUDA array interface."""

    def __init__(self, array: DeviceArray) -> None:
        self.array = array
        self.device = array  # as in Numba, `device` is an object with an attribute `id`
        array.id = array.device

    on_cpu = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.on_cpu:
            raise AttributeError("this array is on the CPU")
        return self.array.__cuda_array_interface__


@pytest.mark.parametrize("kind", ["ByDlpack", "ByInterface"])
@devices(2)
def test_arrays_of_other_libraries_are_reached_by_what_they_have(rank: int, group: None, kind: str) -> None:
    made = globals()[kind]
    x, y = on_device(np.full((2, 3), rank + 1, np.float32)), on_device(np.zeros((2, 3), np.float32))
    out = made(y)
    device_array.synchronize(rank)
    here = made(x)
    here.on_cpu = True
    for one in (here, made(x), here):  # what is known about an array of one type does not hold for the next one
        if one is here:
            with pytest.raises(TypeError, match=r"all_reduce: x is a By\w+, not an array; "):
                mscomm.all_reduce(one)
        else:
            mscomm.all_reduce(one, out=out)
    assert mscomm.all_reduce(made(x), out=out) is out
    check(y, np.full((2, 3), 3, np.float32), kind)
    with pytest.raises(
        TypeError, match=r"all_reduce: .* cannot create such arrays: give out=, an array of shape \(2, 3\)"
    ):
        mscomm.all_reduce(made(x))
    with pytest.raises(TypeError, match=r"all_reduce: x: .* pass it in C order"):
        mscomm.all_reduce(made(x.T), out=made(on_device(np.zeros((3, 2), np.float32))))
    with pytest.raises(TypeError, match=r"all_reduce: x .*which mscomm does not move"):
        mscomm.all_reduce(made(on_device(np.zeros(3, ml_dtypes.float8_e4m3fn))), out=out)
    x.read_only = y.read_only = True
    with pytest.raises(TypeError, match="all_reduce: out is read-only"):
        mscomm.all_reduce(made(x), out=out)
    y.read_only = False
    assert mscomm.all_reduce(made(x), out=out) is out
    with pytest.raises(TypeError, match=r"send: x: .* only by its protocol"):
        mscomm.send(out, 1 - rank)
    with pytest.raises(
        TypeError, match=r"recv: out is a By.* knows only by its protocol: receive into an array on the CPU"
    ):
        mscomm.recv(out, 1 - rank)
    assert violations() == []
