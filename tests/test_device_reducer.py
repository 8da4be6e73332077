"""GradientReducer on device arrays: like test_reducer.py, but with the stand-ins of tests/fakes."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from devices import (
    BACKENDS,
    devices,
    each_backend,
    handles,
    kernel_variables,
    launches,
    load_kernels,
    on_device,
    variables,
    violations,
)
from fakes import device_array, library
from fakes.device_array import DeviceArray, compute
from functions import bits
from ranks import everybody_is_here, ranks
from rotated import rotated

import mscomm
from mscomm.train import GradientReducer, broadcast_parameters

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
WIRES = {"bf16": BFLOAT16, "fp16": np.dtype(np.float16)}
Array = np.ndarray[Any, Any]
NUMBERS = [1, 2, 3, 4]  # of ranks
# NCCL with kernels and without them, and HCCL, for which there are no kernels.
WAYS = [("nccl", "library"), ("nccl", "refused"), ("hccl", "refused")]
each_way = pytest.mark.parametrize(("backend", "how"), WAYS)


def joined(n: int | str = 2, **options: Any) -> Any:
    """Decorate a test whose ranks join with join(backend, how)."""

    def env(rank: int, how: str = "refused", backend: str = "nccl", **_: Any) -> dict[str, str]:
        return {**variables(backend), **kernel_variables(rank, how)}

    return ranks(n, init=None, env=env, **options)


def join(backend: str, how: str) -> None:
    if backend == "nccl":
        load_kernels(how)
    mscomm.init(backend)


def given(arrays: dict[str, Array]) -> dict[str, DeviceArray]:
    return {name: on_device(x) for name, x in arrays.items()}


def gradients(rank: int, step: int, backend: str) -> dict[str, Array]:
    rng = np.random.default_rng(100 * step + rank)
    shapes = {"a": (300, 7), "b": (5000,), "c": (), "d": (0, 3), "e": (64, 64), "f": (11,), "g": (2, 40)}
    kinds = ["f4", "f8" if backend == "nccl" else "f4", "f4", "f4", BFLOAT16, "f2", "f4"]
    return {
        name: np.asarray(rng.normal(size=shape)).astype(kind)
        for (name, shape), kind in zip(shapes.items(), kinds, strict=True)
    }


def mean_of_all(x: DeviceArray, backend: str, n: int) -> Array:
    """Return the mean over the ranks. With HCCL, which has no "avg", it is the sum times 1/n. The same holds for
    bfloat16 with NCCL, whose "avg" is not exact for that dtype.
    """
    if backend == "nccl" and x.dtype != BFLOAT16:
        return mscomm.all_reduce(x, "avg").to_numpy()
    total = mscomm.all_reduce(x).to_numpy()
    wide = np.promote_types(total.dtype, np.float32) if total.dtype != BFLOAT16 else np.dtype(np.float32)
    return np.asarray((total.astype(wide) * wide.type(1 / n)).astype(total.dtype))


@pytest.mark.parametrize(
    ("backend", "n", "mean", "bucket_mb"),
    rotated(
        itertools.product(BACKENDS, NUMBERS, [True, False], [None, 0.001]),
        few=3,
        always=[("nccl", 3, True, 0.001), ("hccl", 3, True, None), ("nccl", 2, False, None), ("hccl", 1, False, 0.001)],
    ),
)
@devices("n")
def test_reduce_has_the_bits_of_all_reduce(
    rank: int, group: None, backend: str, n: int, mean: bool, bucket_mb: float | None
) -> None:
    reducer = GradientReducer(given(gradients(0, 0, backend)), mean=mean, bucket_mb=bucket_mb)
    for step in range(3):
        mine = gradients(rank, step, backend)
        expected = {
            name: mean_of_all(on_device(x), backend, n) if mean else mscomm.all_reduce(on_device(x)).to_numpy()
            for name, x in mine.items()
        }
        reducer.carry(rank + step)
        got = reducer.reduce(given(mine))
        assert list(got) == list(mine)
        for name, x in got.items():
            assert x.dtype == mine[name].dtype and x.shape == mine[name].shape
            assert (bits(x.to_numpy()) == bits(expected[name])).all(), (name, step)
        assert reducer.carried == (n - 1) / 2 + step
    assert violations() == []


@each_backend
@devices(2)
def test_gradients_may_lie_in_the_buffers(rank: int, group: None, backend: str) -> None:
    reducer = GradientReducer([on_device(np.zeros(shape, np.float32)) for shape in ((20, 30), (7,), (7,))])
    assert all((one.to_numpy() == 0).all() for one in reducer.buffers)
    for buffer in reducer.buffers:
        buffer[...] = on_device(np.full(buffer.shape, rank, np.float32))
    got = reducer.reduce(reducer.buffers)
    assert [one.ptr for one in got] == [one.ptr for one in reducer.buffers]
    assert all((one.to_numpy() == 0.5).all() for one in got)
    first, second, third = reducer.buffers
    for value, buffer in enumerate(reducer.buffers, 1):
        buffer[...] = on_device(np.full(buffer.shape, value, np.float32))
    # The second gradient is passed in the buffer of the third, and the third in the buffer of the second.
    got = reducer.reduce([first, third, second])
    assert [float(one.to_numpy().reshape(-1)[0]) for one in got] == [1, 3, 2]
    turned = on_device(np.arange(600, dtype=np.float32).reshape(30, 20)).T
    assert (reducer.reduce([turned, second, third])[0].to_numpy() == turned.to_numpy()).all()
    assert violations() == []


@each_backend
@devices(2)
def test_a_step_comes_after_what_the_stream_has_and_before_what_follows(rank: int, group: None, backend: str) -> None:
    with device_array.stream(device_array.new_stream(rank)):
        x = [on_device(np.zeros(1000, np.float32)) for _ in range(4)]
        # Each gradient has a bucket of its own. The first three buckets are sent asynchronously.
        reducer = GradientReducer(x, bucket_mb=0.004)
        for one in x:
            compute.add(one, rank + 1, delay=0.02)
        got = reducer.reduce(x)
        for one in x:
            compute.add(one, 100, delay=0.02)
        assert all((one.to_numpy() == 1.5).all() for one in got)
    assert violations() == []


@each_backend
@devices(2)
def test_gradients_without_elements(rank: int, group: None, backend: str) -> None:
    for compression in (None, "bf16"):
        reducer = GradientReducer([on_device(np.zeros((0, 3), np.float32))], compression=compression)
        reducer.carry(rank)
        (got,) = reducer.reduce([on_device(np.zeros((0, 3), np.float32))])
        assert got.shape == (0, 3) and reducer.carried == 0.5
    assert violations() == []


@devices(1)
def test_the_library_is_told_once_of_memory_that_another_stream_uses(rank: int, group: None) -> None:
    x = [on_device(np.ones(100, np.float32))]
    reducer = GradientReducer(x, compression="bf16")
    reducer.reduce(x)
    here, streams = len(library.users), [device_array.new_stream(rank) for _ in range(2)]
    for stream in (*streams, *streams):
        with device_array.stream(stream):
            assert (reducer.reduce(x)[0].to_numpy() == 1).all()
    told = library.users[here:]
    assert [stream for _, stream in told] == [one for one in streams for _ in range(3)]
    # The reducer uses three arrays: the gradients, the compressed bucket, and the residual.
    assert len({address for address, _ in told}) == 3
    assert violations() == []


# -- compression


def narrowed(rank: int, step: int, owed: Array, wire: np.dtype[Any], limit: float) -> tuple[Array, Array, Array]:
    """Return a gradient, what the reducer must send for this gradient, and the residual that must remain."""
    mine = np.random.default_rng((rank, step)).normal(size=owed.size).astype(np.float32) * np.float32(0.01)
    if step == 0:
        mine[5::100] = 1.5 * np.float32(65504)  # more than the largest float16
    whole = mine + owed
    sent = np.clip(whole, -limit, limit).astype(wire)
    return mine, sent, whole - sent.astype(np.float32)


@pytest.mark.parametrize(
    ("backend", "how", "n", "compression"),
    rotated(
        [(*way, n, wire) for way in WAYS for n in NUMBERS for wire in WIRES],
        few=3,
        always=[("nccl", "library", 3, "bf16"), ("nccl", "refused", 2, "fp16"), ("hccl", "refused", 3, "bf16")],
    ),
)
@joined("n")
def test_what_compression_takes_away_is_added_later(
    rank: int, backend: str, how: str, n: int, compression: str
) -> None:
    join(backend, how)
    wire = WIRES[compression]
    sizes = {"a": (40, 50), "b": (3,), "c": (0,), "d": (700,)}
    total = sum(int(np.prod(shape)) for shape in sizes.values())
    reducer = GradientReducer(given({name: np.zeros(shape, np.float32) for name, shape in sizes.items()}),
                              compression=compression, mean=False)  # fmt: skip
    limit = {"fp16": 65504.0, "bf16": float.fromhex("0x1.fep127")}[compression] / n
    exact = np.array(limit).astype(wire)
    limit = float(exact if float(exact) <= limit else np.nextafter(exact, exact.dtype.type(0)))
    owed = np.zeros(total, np.float32)
    for step in range(5):
        mine, sent, owed = narrowed(rank, step, owed, wire, limit)
        expected = mscomm.all_reduce(on_device(sent)).to_numpy().astype(np.float32)
        cuts = np.cumsum([int(np.prod(shape)) for shape in sizes.values()])[:-1]
        parts = [part.reshape(shape) for part, shape in zip(np.split(mine, cuts), sizes.values(), strict=True)]
        got = reducer.reduce(given(dict(zip(sizes, parts, strict=True))))
        whole = np.concatenate([x.to_numpy().reshape(-1) for x in got.values()])
        assert np.isfinite(whole).all() and (bits(whole) == bits(expected)).all(), step
        residual = reducer.state_dict()["residual"]
        assert {name: x.shape for name, x in residual.items()} == sizes
        assert (bits(np.concatenate([x.reshape(-1) for x in residual.values()])) == bits(owed)).all(), step
    assert violations() == []


@each_way
@joined(3)
def test_a_mean_in_few_bits(rank: int, backend: str, how: str) -> None:
    join(backend, how)
    for compression in WIRES:
        reducer = GradientReducer([on_device(np.zeros(100, np.float32))], compression=compression)
        odd = np.full(100, 1 + 2.0**-12 + rank, np.float32)
        got = sum(reducer.reduce([on_device(odd)])[0].to_numpy().astype(np.float64) for _ in range(64))
        # The residual still holds at most one unit in the last place of a bfloat16 between 2 and 4. If the factor 1/3
        # were rounded to bfloat16, each step would add an error.
        assert np.abs(got - 64 * (2 + 2.0**-12)).max() < 2.0**-6
    assert violations() == []


@each_way
@joined(2)
def test_what_is_not_finite_arrives_and_leaves_nothing_behind(rank: int, backend: str, how: str) -> None:
    join(backend, how)
    for compression in WIRES:
        reducer = GradientReducer([on_device(np.zeros(4, np.float32))], compression=compression)
        for bad in (np.inf, np.nan):
            mine = np.array([1, bad if rank else 0, 2, 3], np.float32)
            got = reducer.reduce([on_device(mine)])[0].to_numpy()
            assert not np.isfinite(got[1]) and (got[[0, 2, 3]] == [1, 2, 3]).all()
        assert (reducer.reduce([on_device(np.full(4, rank, np.float32))])[0].to_numpy() == 0.5).all()
    assert violations() == []


@each_way
@joined(2)
def test_a_reducer_goes_on_where_another_was(rank: int, backend: str, how: str) -> None:
    join(backend, how)

    def steps(reducer: GradientReducer, first: int, end: int) -> list[Array]:
        rows = [np.random.default_rng((rank, step)).normal(size=(2, 500)) for step in range(first, end)]
        return [
            one.to_numpy() for row in rows for one in reducer.reduce([on_device(x.astype(np.float32)) for x in row])
        ]

    parameters = given({"a": np.zeros(500, np.float32), "b": np.zeros(500, np.float32)})
    whole, begun, going_on = (GradientReducer(parameters, compression="bf16") for _ in range(3))
    expected = steps(whole, 0, 6)
    steps(begun, 0, 3)
    state = begun.state_dict()
    assert all(type(x) is np.ndarray and np.abs(x).max() > 0 for x in state["residual"].values())
    going_on.load_state_dict(state)
    got = steps(going_on, 3, 6)
    assert all((bits(x) == bits(y)).all() for x, y in zip(got, expected[6:], strict=True))
    assert violations() == []


@pytest.mark.parametrize("how", ["library"])
@joined(2)
def test_a_step_is_few_launches(rank: int, how: str) -> None:
    join("nccl", how)
    parameters = [on_device(np.zeros(30, np.float32)) for _ in range(200)]
    plain, narrow = GradientReducer(parameters), GradientReducer(parameters, compression="bf16")
    mine = [on_device(np.full(30, rank + 1, np.float32)) for _ in range(200)]
    for reducer, expected in ((plain, 1), (narrow, 2)):
        before = launches()
        got = reducer.reduce(mine)
        assert launches() - before == expected
        assert all((x.to_numpy() == 1.5).all() for x in got)
    before = launches()
    plain.reduce(plain.buffers)
    assert launches() == before
    assert violations() == []


# -- steps, errors


@each_backend
@devices(3)
def test_ranks_that_run_out_of_steps_do_not_stop_the_others(rank: int, group: None, backend: str) -> None:
    reducer = GradientReducer([on_device(np.zeros(3, np.float32))])
    seen = []
    with reducer.join():
        for _ in range(2 * rank):
            reducer.carry(rank)
            got = reducer.reduce([on_device(np.full(3, 10.0 * rank, np.float32))])[0]
            seen.append((float(got.to_numpy()[0]), reducer.carried))
    both, alone = (15.0, 1.5), (20.0, 2.0)  # the means over ranks 1 and 2, and over rank 2 alone
    assert seen == [[], [both] * 2, [both] * 2 + [alone] * 2][rank]
    assert (mscomm.all_reduce(np.ones(1)) == 3).all()
    assert violations() == []


@each_backend
@devices(2)
def test_everybody_gets_the_roots_parameters(rank: int, group: None, backend: str) -> None:
    model = given({"w": np.full((3, 4), rank, np.float32), "b": np.full(2, rank, np.int32)})
    got = broadcast_parameters(model, root=1)
    assert got["w"] is model["w"] and all((x.to_numpy() == 1).all() for x in got.values())
    assert violations() == []


class Foreign:
    """An array of an unknown library. It offers only the CUDA array interface."""

    def __init__(self, array: DeviceArray) -> None:
        self.array = array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.array.__cuda_array_interface__


@devices(2)
def test_what_cannot_be_reduced_is_told_before_anything_is_sent(rank: int, group: None) -> None:
    here, there = np.zeros(2, np.float32), on_device(np.zeros(2, np.float32))
    with pytest.raises(TypeError, match=r"parameters of more than one array library: a of numpy, b of library"):
        GradientReducer({"a": here, "b": there})
    told = "parameter 0: mscomm knows Foreign only by its protocol; use arrays of PyTorch or CuPy, on rank 0"
    with pytest.raises(TypeError, match=told):
        GradientReducer([Foreign(there)])
    with pytest.raises(TypeError, match="a is on device 3 of nccl; this rank has joined with device"):
        GradientReducer({"a": DeviceArray.from_numpy(here, device=3)})
    with pytest.raises(ValueError, match=r"library is 'numpy' on rank 1 of the group, 'library' on rank 0"):
        GradientReducer([here if rank else there])
    reducer = GradientReducer({"a": there})
    with pytest.raises(TypeError, match="the gradient of a is on the CPU, but the parameter is on a device"):
        reducer.reduce({"a": here})
    with pytest.raises(TypeError, match="the gradient of a is on a device, but the parameter is on the CPU"):
        GradientReducer({"a": here}).reduce({"a": there})
    with pytest.raises(ValueError, match=r"the gradient of a is float32\[3\], the parameter float32\[2\]"):
        reducer.reduce({"a": on_device(np.zeros(3, np.float32))})
    assert (reducer.reduce({"a": on_device(np.full(2, rank, np.float32))})["a"].to_numpy() == 0.5).all()
    assert violations() == []


@pytest.mark.parametrize("backend", ["hccl"])
@devices(2)
def test_a_dtype_that_the_library_does_not_add_up_is_told(rank: int, group: None, backend: str) -> None:
    with pytest.raises(TypeError, match=r"GradientReducer: parameter 0: HCCL .*float64"):
        GradientReducer([on_device(np.zeros(2))])
    assert (GradientReducer([np.zeros(2)]).reduce([np.full(2, float(rank))])[0] == 0.5).all()


@pytest.mark.parametrize("why", ["no kernels", "no memory"])
@devices(2)
def test_what_one_rank_alone_cannot_do_is_told_to_all(rank: int, group: None, why: str) -> None:
    if why == "no kernels":  # on rank 1, the array library has no bfloat16 either
        if rank == 1:
            del device_array.namespace.bfloat16
        with pytest.raises(TypeError, match=r"DeviceArray has no bfloat16, and mscomm has no kernels .*, on rank 1 of"):
            GradientReducer([on_device(np.zeros(3, np.float32))], compression="bf16")
        assert (mscomm.all_reduce(np.ones(1)) == 2).all()
        return

    def none_left(*_: Any) -> Any:
        raise MemoryError("none left")

    x = on_device(np.zeros(3, np.float32))
    if rank == 1:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError, match="none left"):
            patch.setattr(library, "new", none_left)
            GradientReducer([x])
    with pytest.raises(mscomm.Aborted, match="rank 1: GradientReducer: MemoryError: none left"):
        reducer = GradientReducer([x])
        reducer.reduce([x])


@each_backend
@devices(3, expect={1: -signal.SIGKILL})
def test_a_killed_rank_ends_the_step_on_all(rank: int, group: None, backend: str) -> None:
    x = [on_device(np.ones(1000, np.float32)) for _ in range(3)]
    reducer = GradientReducer(x, bucket_mb=0.004)
    reducer.reduce(x)[0].to_numpy()
    everybody_is_here()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(mscomm.PeerLost) as error:
        for _ in range(1000):
            reducer.reduce(x)
    assert error.value.ranks == (1,)
    with pytest.raises(RuntimeError, match="a step of this reducer has failed; make a new one on every rank"):
        reducer.reduce(x)


@each_backend
@devices(1)
def test_it_gives_its_memory_back(rank: int, group: None, backend: str) -> None:
    x = [on_device(np.ones(1000, np.float32)) for _ in range(3)]
    mscomm.all_reduce(x[0]).to_numpy()
    gc.collect()
    before = handles()["allocations"]
    reducer = GradientReducer(x, bucket_mb=0.004, compression="bf16")
    reducer.reduce(x)[0].to_numpy()
    assert handles()["allocations"] > before
    del reducer
    gc.collect()
    until = time.monotonic() + 60
    while handles()["allocations"] > before and time.monotonic() < until:
        mscomm.all_reduce(np.ones(1))  # each call frees the memory of calls that have ended
    assert handles()["allocations"] <= before  # less, if the first call still had memory then
    assert violations() == []
