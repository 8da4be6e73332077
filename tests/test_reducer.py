"""GradientReducer: its buckets, and its results for reduce(arrays) and for gradients from PyTorch's backward pass."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from functions import bits
from hypothesis import given, settings
from hypothesis import strategies as some
from ranks import ranks

import mscomm
from mscomm.train import GradientReducer, broadcast_parameters
from mscomm.train.buckets import LARGEST, largest, layouts

needs_torch = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16), BFLOAT16]


# --- layout ---------------------------------------------------------------------------------------------------------


@given(
    kinds=some.lists(some.tuples(some.sampled_from(DTYPES), some.integers(0, 3000)), min_size=1, max_size=30),
    bucket_bytes=some.integers(1, 20_000),
    first_bytes=some.integers(1, 20_000),
    data=some.data(),
)
@settings(deadline=None)
def test_every_gradient_has_one_place_of_its_own(kinds, bucket_bytes, first_bytes, data):
    order = data.draw(some.permutations(range(len(kinds))))
    made = layouts(kinds, order, bucket_bytes, first_bytes)
    assert sorted(place.number for one in made for place in one.places) == list(range(len(kinds)))
    for one in made:
        at = 0
        for place in one.places:
            assert kinds[place.number] == (one.dtype, place.size)
            assert place.begin >= at and place.begin * one.dtype.itemsize % 64 == 0
            at = place.begin + place.size
        assert at <= one.marks and one.size == one.marks + len(one.places) + 1
        whole = sum(place.size for place in one.places) * one.dtype.itemsize
        assert whole <= max(bucket_bytes, first_bytes) or len(one.places) == 1
    last_ready = [max(order.index(place.number) for place in one.places) for one in made]
    assert last_ready == sorted(last_ready)


# --- arrays passed to reduce() --------------------------------------------------------------------------------------


def gradients(rank: int, step: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(100 * step + rank)
    shapes = {"a": (300, 7), "b": (5000,), "c": (), "d": (0, 3), "e": (64, 64), "f": (11,)}
    kinds = dict(zip(shapes, ["f4", "f8", "f4", "f4", BFLOAT16, "f2"], strict=True))
    return {name: np.asarray(rng.normal(size=shape)).astype(kinds[name]) for name, shape in shapes.items()}


def is_shared(address: int) -> bool:
    """Return whether the address is in a mapping that the ranks of the host share."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(text, 16) for text in line.split()[0].split("-"))
        if begin <= address < end:
            return "mscomm-heap" in line and "s" in line.split()[1]
    raise AssertionError(f"nothing is mapped at {address:#x}")


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("bucket_mb", [None, 0.001])
@ranks(3)
def test_reduce_has_the_bits_of_all_reduce(rank, group, mean, bucket_mb):
    reducer = GradientReducer(gradients(0, 0), mean=mean, bucket_mb=bucket_mb)
    for step in range(3):
        mine = gradients(rank, step)
        expected = {name: mscomm.all_reduce(x, "avg" if mean else "sum") for name, x in mine.items()}
        reducer.carry(rank + step)
        got = reducer.reduce(mine)
        assert list(got) == list(mine)
        for name, x in got.items():
            assert x.dtype == mine[name].dtype and x.shape == mine[name].shape
            assert (bits(x) == bits(expected[name])).all(), (name, step)
        assert reducer.carried == 1 + step


@ranks(2)
def test_gradients_may_lie_in_the_buffers(rank, group):
    reducer = GradientReducer([np.zeros((20, 30)), np.zeros(7), np.zeros(7)])
    first, second, third = reducer.buffers
    assert all(is_shared(buffer.ctypes.data) for buffer in reducer.buffers)
    for buffer in reducer.buffers:
        buffer[...] = rank
    got = reducer.reduce(reducer.buffers)
    assert all(np.shares_memory(one, buffer) for one, buffer in zip(got, reducer.buffers, strict=True))
    assert all((one == 0.5).all() for one in got)
    first[...], second[...], third[...] = 1, 2, 3
    # The second gradient is passed in the buffer of the third, and the third in the buffer of the second.
    got = reducer.reduce([first, third, second])
    assert (got[0] == 1).all() and (got[1] == 3).all() and (got[2] == 2).all()


@ranks(2)
def test_a_dict_goes_by_its_names(rank, group):
    reducer = GradientReducer({"w": np.zeros(2), "v": np.zeros(2), "own": np.zeros(1)}, exclude=["own"])
    mine = {"v": np.full(2, 1.0), "w": np.full(2, 10.0 + rank), "own": np.full(1, rank)}
    got = reducer.reduce(mine if rank == 0 else dict(reversed(mine.items())))
    assert (got["v"] == 1).all() and (got["w"] == 10.5).all() and (got["own"] == rank).all()
    assert list(got) == list(mine if rank == 0 else reversed(mine))
    with pytest.raises(ValueError, match="there is no gradient of 'w'; the parameters are w, v"):
        reducer.reduce({"v": np.ones(2)})
    with pytest.raises(ValueError, match="there is a gradient of 'x'"):
        reducer.reduce({**mine, "x": np.ones(2)})


@ranks(3)
def test_what_goes_wrong_in_a_step_reaches_the_others_and_ends_the_reducer(rank, group):
    reducer = GradientReducer([np.zeros(3)])
    expected = KeyError if rank == 1 else mscomm.Aborted
    with pytest.raises(expected, match="a batch is broken") as caught, reducer.join():
        for step in range(5):
            if (rank, step) == (1, 2):
                raise KeyError("a batch is broken")
            reducer.reduce([np.ones(3)])
    assert rank == 1 or "rank 1: a step of GradientReducer: KeyError" in str(caught.value)
    with pytest.raises(RuntimeError, match="a step of this reducer has failed; make a new one on every rank"):
        reducer.reduce([np.ones(3)])


@ranks(2)
def test_a_mean_of_large_float16_does_not_overflow(rank, group):
    reducer = GradientReducer([np.zeros(5, np.float16)])
    assert (reducer.reduce([np.full(5, 60_000, np.float16)])[0] == 60_000).all()


@ranks(3)
def test_parameters_that_differ_are_an_error_on_all_ranks(rank, group):
    with pytest.raises(
        ValueError, match=r"parameter 1 is w, float32\[4\] on rank 2 of the group, w, float32\[3\] on rank 0"
    ):
        GradientReducer({"v": np.ones(2), "w": np.ones(3 + rank // 2, np.float32)})
    with pytest.raises(ValueError, match="rank 1 of the group has 2 parameters, rank 0 has 1"):
        GradientReducer([np.ones(2)] * (2 if rank == 1 else 1))
    with pytest.raises(ValueError, match="compression is 'bf16' on rank 1 of the group, None on rank 0"):
        GradientReducer([np.ones(2, np.float32)], compression="bf16" if rank == 1 else None)
    with pytest.raises(ValueError, match="there are no parameters"):
        GradientReducer([])
    with pytest.raises(TypeError, match="steps has dtype int64, which has no gradient; exclude it"):
        GradientReducer({"w": np.ones(2), "steps": np.ones(1, np.int64)})
    with pytest.raises(ValueError, match="exclude names 'x', which is not one of v, w"):
        GradientReducer({"v": np.ones(2), "w": np.ones(2)}, exclude=["x"])
    reducer = GradientReducer({"v": np.ones(2), "w": np.ones(2), "own": np.ones(1)}, exclude=["own"])
    with pytest.raises(ValueError, match="3 gradients, there are 2 parameters"):
        reducer.reduce([np.ones(2)] * 3)
    with pytest.raises(ValueError, match=r"the gradient of w is float64\[3\], the parameter float64\[2\]"):
        reducer.reduce([np.ones(2), np.ones(3)])
    with pytest.raises(RuntimeError, match=r"wait is for PyTorch; use reduce\(gradients\)"):
        reducer.wait()
    assert (reducer.reduce([np.ones(2), np.ones(2)])[1] == 1).all()


@pytest.mark.parametrize("compression", ["bf16", "fp16"])
@ranks(2)
def test_what_compression_takes_away_is_added_later(rank, group, compression):
    reducer = GradientReducer([np.zeros(1000, np.float32)], compression=compression)
    # This number lies a quarter of the way from one 16-bit number to the next.
    odd = np.full(1000, 1 + 2.0 ** (-9 if compression == "bf16" else -12), np.float32)
    got = sum(reducer.reduce([odd])[0].astype(np.float64) for _ in range(64))
    # Without the residual, each step would lose a quarter of a unit. With the residual, all 64 steps together lose at
    # most one unit.
    unit = 2.0**-7 if compression == "bf16" else 2.0**-10
    assert np.abs(got - 64 * odd.astype(np.float64)).max() <= unit
    assert mscomm.all_gather(got[None]).std(axis=0).max() == 0


@needs_torch
@ranks(2)
def test_what_is_owed_to_a_gradient_that_nobody_has_waits(rank, group):
    import torch

    a, b = (torch.nn.Parameter(torch.zeros(8)) for _ in range(2))
    reducer = GradientReducer({"a": a, "b": b}, compression="bf16")
    odd = 1 + 2.0**-9
    for used in (True, False, False, True):
        a.grad = b.grad = None
        ((odd * a).sum() + ((odd * b).sum() if used else 0)).backward()
        reducer.wait()
        assert (b.grad is not None and bool((b.grad == 1).all())) == used
    owed = reducer.state_dict()["residual"]
    # Each step adds a residual of 2^-9, and four of them make one unit of bfloat16, 2^-7. In the third step, the sum of
    # the residuals is more than half a unit, so the gradient is rounded up. The fourth step's residual pays this back.
    assert (a.grad == 1).all() and (owed["a"] == 0).all()
    assert (owed["b"] == 2 * 2.0**-9).all()  # two residuals, one for each step in which b had a gradient


@ranks(2)
def test_a_reducer_goes_on_where_another_was(rank, group):
    def steps(reducer: GradientReducer, first: int, end: int) -> list[Any]:
        rows = [
            np.random.default_rng((rank, step)).normal(size=(2, 500)).astype(np.float32) for step in range(first, end)
        ]
        return [one.copy() for row in rows for one in reducer.reduce(list(row))]

    parameters = {"a": np.zeros(500, np.float32), "b": np.zeros(500, np.float32)}
    whole, begun, going_on = (GradientReducer(parameters, compression="bf16") for _ in range(3))
    expected = steps(whole, 0, 6)
    steps(begun, 0, 3)
    state = begun.state_dict()
    assert set(state["residual"]) == set(parameters) and np.abs(state["residual"]["b"]).max() > 0
    going_on.load_state_dict(state)
    got = steps(going_on, 3, 6)
    assert all((bits(x) == bits(y)).all() for x, y in zip(got, expected[6:], strict=True))
    assert GradientReducer(parameters).state_dict() == {"order": None, "residual": {}}
    with pytest.raises(ValueError, match=r"b is \[3\] in the state, the parameter is \[500\]"):
        going_on.load_state_dict({"order": None, "residual": {"b": np.zeros(3)}})
    with pytest.raises(ValueError, match="the states of ranks 0 and 1 of the group belong to two different trainings"):
        going_on.load_state_dict({"order": [rank, 1 - rank], "residual": {}})
    with pytest.raises(ValueError, match="the state does not belong to these 2 parameters"):
        going_on.load_state_dict({"order": [0, 1, 2], "residual": {}})


@pytest.mark.parametrize("ranks", range(1, 40))
@pytest.mark.parametrize("dtype", LARGEST)
def test_a_sum_of_the_largest_that_ranks_may_give_is_in_range(dtype: str, ranks: int) -> None:
    """The limit cannot simply be LARGEST / ranks. For example, 65504 / 3 rounds up in float16, and three times the
    rounded value is infinite.
    """
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    limit = largest(kind, ranks)
    assert float(np.array(limit, kind)) == limit > 0.99 * LARGEST[dtype] / ranks
    assert limit * ranks <= LARGEST[dtype]


@pytest.mark.parametrize("mean", [True, False])
@ranks(2)
def test_what_is_beyond_the_range_of_float16_comes_later(rank, group, mean):
    reducer = GradientReducer([np.zeros(3, np.float32)], compression="fp16", mean=mean)
    large = 100_000 if mean else 40_000  # the mean or the sum over the two ranks is too large for float16
    got = [
        reducer.reduce([np.full(3, large if step == 0 else 0, np.float32)])[0].astype(np.float64) for step in range(6)
    ]
    assert np.isfinite(got).all() and np.abs(sum(got) - (large if mean else 2 * large)).max() < 1


@pytest.mark.parametrize("compression", ["bf16", "fp16"])
@ranks(2)
def test_what_is_not_finite_arrives_and_leaves_nothing_behind(rank, group, compression):
    reducer = GradientReducer([np.zeros(4, np.float32)], compression=compression)
    for bad in (np.inf, np.nan):
        got = reducer.reduce([np.array([1, bad if rank else 0, 2, 3], np.float32)])[0]
        assert not np.isfinite(got[1]) and (got[[0, 2, 3]] == [1, 2, 3]).all()
    assert (reducer.reduce([np.full(4, rank, np.float32)])[0] == 0.5).all()
    odd = 1 + 2.0**-13  # must leave a residual, although another element is infinite
    reducer.reduce([np.array([odd, np.inf, odd, odd], np.float32)])
    assert (next(iter(reducer.state_dict()["residual"].values())) == [2.0**-13, 0, 2.0**-13, 2.0**-13]).all()


@ranks(3)
def test_ranks_that_run_out_of_steps_do_not_stop_the_others(rank, group):
    reducer = GradientReducer([np.zeros(3)])
    seen = []
    with reducer.join():
        for _ in range(2 * rank):
            reducer.carry(rank)
            seen.append((reducer.reduce([np.full(3, 10.0 * rank)])[0][0], reducer.carried))
    both, alone = (15.0, 1.5), (20.0, 2.0)  # the means over ranks 1 and 2, and over rank 2 alone
    assert seen == [[], [both] * 2, [both] * 2 + [alone] * 2][rank]
    with reducer.join():
        for _ in range(min(rank, 1)):
            reducer.reduce([np.ones(3)])
    assert reducer.last_rank == 2  # ranks 1 and 2 left last
    assert (mscomm.all_reduce(np.ones(1)) == 3).all()


@ranks(3)
def test_after_a_join_all_have_the_weights_of_the_rank_that_left_last(rank, group):
    told: list[str] = []
    mscomm.log.warn = told.append
    weights = [np.zeros(3)]
    reducer = GradientReducer(weights)
    with reducer.join():
        for _ in range(1 + rank):
            weights[0] -= reducer.reduce([np.full(3, 1.0 + rank)])[0]
    assert reducer.last_rank == 2 and (weights[0] == -(2 + 2.5 + 3)).all()
    optimizer = mscomm.train.Momentum(weights, 1.0, 0.5)
    with reducer.join(sync=[optimizer]):
        for _ in range(3 - rank):
            optimizer.step(reducer.reduce([np.full(3, 1.0 + rank)]))
    assert reducer.last_rank == 0 and (weights[0] == -7.5 - 2 - (1 + 1.5) - (1.25 + 1)).all()
    assert (optimizer.state_dict()["velocities"][0] == 2.25).all()
    assert not told
    with reducer.join():  # without sync, a rank that ran out early has other velocities from now on
        for _ in range(1 + rank):
            optimizer.step(reducer.reduce([np.ones(3)]))
    assert len(told) == (rank == 2) and all("keep their old state of Momentum" in text for text in told)
    told.clear()
    new = weights
    expected = weights[0] - 2
    with reducer.join():
        for _ in range(rank):
            new = [new[0] - reducer.reduce([np.ones(3)])[0]]
    assert len(told) == (rank == 2) and all("weights = broadcast_parameters(weights" in text for text in told)
    (whole,) = broadcast_parameters(new, root=reducer.last_rank)
    assert (whole == expected).all()
    with pytest.raises(TypeError, match=r"join: sync has a ndarray; expected .* state_dict\(\) and load_state_dict"):
        reducer.join(sync=weights)
    with (
        pytest.raises(ValueError, match=r"sync differs by rank: \['Momentum'\] on rank 0 of the group, \[\] on rank 2"),
        reducer.join(sync=[optimizer] if rank < 2 else []),
    ):
        pass


@ranks(3)
def test_ranks_that_begin_with_different_weights_are_told(rank, group):
    told: list[str] = []
    mscomm.log.warn = told.append
    weights = {"same": np.zeros(3), "w": np.full(3, np.float32(rank // 2))}
    GradientReducer(weights, exclude=["w"])
    assert not told
    GradientReducer(weights)  # a warning, not an error, because the arrays need not be weights
    assert len(told) == (rank == 0)
    assert all("ranks 0 and 2 of the group begin with different weights, of w; use one seed" in one for one in told)
    frozen = {**weights, "same": np.zeros(3)}
    frozen["same"].flags.writeable = False
    with pytest.raises(TypeError, match=r"same cannot be written; weights = broadcast_parameters\(weights\)"):
        GradientReducer(frozen, parameter_broadcast=True)
    GradientReducer(weights, parameter_broadcast=True)
    assert (weights["w"] == 0).all()


@ranks(2)
def test_everybody_gets_the_roots_parameters(rank, group):
    model = {"w": np.full((3, 4), float(rank)), "b": np.full(2, rank, np.float32)}
    got = broadcast_parameters(model, root=1)
    assert got["w"] is model["w"] and (model["w"] == 1).all() and (model["b"] == 1).all()


# --- PyTorch --------------------------------------------------------------------------------------------------------


def network(seed: int = 0) -> Any:
    import torch

    torch.manual_seed(seed)
    torch.set_num_threads(1)
    layers = [torch.nn.Linear(20, 300), torch.nn.GroupNorm(4, 300), torch.nn.ReLU(), torch.nn.Linear(300, 300)]
    return torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(300, 10)).double()


def batch(step: int, rows: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(step)
    images = torch.randn(rows, 20, generator=generator, dtype=torch.double)
    return images, torch.randint(0, 10, (rows,), generator=generator)


def loss_of(model: Any, images: Any, labels: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(model(images), labels)


def trained_alone(steps: int, rows: int) -> Any:
    import torch

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, *batch(step, rows)).backward()
        optimizer.step()
    return model


def assert_same_weights(model: Any, expected: Any, relative: float) -> None:
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert ((mine - theirs).norm() <= relative * theirs.norm()).all()


@needs_torch
@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.parametrize("n", [1, 2, 4])
@ranks("n")
def test_the_weights_are_those_of_one_process_with_the_whole_batch(rank, group, n, micro):
    import torch

    steps, rows = 20, 16 * micro
    model = network(seed=rank)
    broadcast_parameters(model.state_dict())
    reducer = GradientReducer(model.named_parameters(), bucket_mb=0.1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(steps):
        reducer.zero_grad() if step % 2 else optimizer.zero_grad()
        images, labels = (part.chunk(n)[rank].chunk(micro) for part in batch(step, rows))
        for i in range(micro - 1):
            with reducer.no_sync():
                (loss_of(model, images[i], labels[i]) / micro).backward()
        (loss_of(model, images[-1], labels[-1]) / micro).backward()
        reducer.wait()
        optimizer.step()
    assert_same_weights(model, trained_alone(steps, rows), 1e-9)
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    everybodys = mscomm.all_gather(flat[None])
    assert (everybodys == flat).all()  # all ranks have the same weights, to the bit


def convolutions() -> Any:
    import torch

    torch.manual_seed(1)
    torch.set_num_threads(1)
    layers: list[Any] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 32)):
        layers += [torch.nn.Conv2d(inputs, outputs, 3, 2, bias=False), torch.nn.BatchNorm2d(outputs), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(288, 10))


def trained_on_shards(wrap: Any, rank: int, n: int) -> Any:
    """Train for 20 steps on this rank's part of each batch. Return the trained model. wrap(model) returns three
    functions: the forward function, a function to call before backward(), and a function to call after backward().
    """
    import torch

    model = convolutions()
    computed_by, before, after = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    for step in range(20):
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(32, 3, 31, 31, generator=generator).chunk(n)[rank]
        labels = torch.randint(0, 10, (32,), generator=generator).chunk(n)[rank]
        before(optimizer)
        loss_of(computed_by, images, labels).backward()
        after()
        optimizer.step()
    return model


def by_mscomm(model: Any) -> Any:
    reducer = GradientReducer(model.named_parameters(), bucket_mb=0.02)
    return model, lambda optimizer: reducer.zero_grad(), reducer.wait


def by_ddp(model: Any) -> Any:
    import torch

    return torch.nn.parallel.DistributedDataParallel(model), lambda optimizer: optimizer.zero_grad(), lambda: None


@needs_torch
@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.long)])
@ranks("n", timeout_s=120)
def test_batch_norm_gives_what_distributed_data_parallel_gives(rank, group, n):
    import torch

    folder = mscomm.broadcast_object(tempfile.mkdtemp() if rank == 0 else None)
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=n)
    ours = trained_on_shards(by_mscomm, rank, n)
    theirs = trained_on_shards(by_ddp, rank, n)
    torch.distributed.destroy_process_group()
    if n == 2:  # exactly equal, because a sum of two numbers has only one order, and halving is exact
        assert all(torch.equal(mine, its) for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert_same_weights(ours, theirs, 1e-3)
    if rank == 0:  # on the other ranks, DistributedDataParallel overwrites the running means with rank 0's
        for mine, its in zip(ours.buffers(), theirs.buffers(), strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-4)
        shutil.rmtree(folder)


@needs_torch
@ranks(2, timeout_s=120)
def test_two_runs_have_the_same_bits(rank, group):
    def with_delays(model: Any) -> Any:
        random = np.random.default_rng(rank)
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: time.sleep(random.uniform(0, 0.002)))
        return by_mscomm(model)

    first, second = (trained_on_shards(wrap, rank, 2) for wrap in (by_mscomm, with_delays))
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert (bits(one.detach().numpy()) == bits(other.detach().numpy())).all()


@needs_torch
@ranks(2)
def test_gradients_lie_in_the_arena_before_and_after_the_backward_pass(rank, group):
    model = network()
    reducer = GradientReducer(model.parameters())
    addresses = []
    for step in range(4):
        reducer.zero_grad()
        if step > 1:
            assert all(is_shared(p.grad.data_ptr()) and not p.grad.any() for p in model.parameters())
        loss_of(model, *batch(step, 8)).backward()
        reducer.wait()
        assert all(is_shared(p.grad.data_ptr()) for p in model.parameters())
        addresses.append([p.grad.data_ptr() for p in model.parameters()])
    assert addresses[1] == addresses[2] == addresses[3]  # the buckets adopt the order of the first step and keep it
    order = reducer.state_dict()["order"]
    assert sorted(order) == list(range(len(addresses[0])))
    reducer.close()
    for _ in range(2):  # if the reducer were still open, the second pass would raise an error
        loss_of(model, *batch(rank, 8)).backward()
    again = GradientReducer(model.parameters())
    again.load_state_dict({"order": order, "residual": {}})
    again.zero_grad()
    loss_of(model, *batch(0, 8)).backward()
    before = [p.grad.data_ptr() for p in model.parameters()]
    again.wait()
    # The buckets have the right order from the beginning, so no gradient moves.
    assert before == [p.grad.data_ptr() for p in model.parameters()]


class Branches:
    """A module whose forward pass uses different parts on each rank and in each step."""

    def __new__(cls) -> Any:
        import torch

        class Module(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.always, self.sometimes, self.never = (torch.nn.Linear(4, 4, dtype=torch.double) for _ in range(3))

            def forward(self, x: Any, also: bool) -> Any:
                return self.sometimes(self.always(x)) if also else self.always(x)

        torch.manual_seed(0)
        return Module()


@needs_torch
@ranks(2)
def test_parameters_without_a_gradient(rank, group):
    import torch

    model = Branches()
    reducer = GradientReducer(model.named_parameters(), bucket_mb=1e-4)
    for step in range(4):
        model.zero_grad()
        also = (step + rank) % 2 == 0 if step < 3 else False
        model(torch.ones(2, 4, dtype=torch.double), also).sum().backward()
        reducer.wait()
        assert model.never.weight.grad is None
        assert (model.sometimes.weight.grad is None) == (step == 3)
        expected = mscomm.all_reduce(model.always.bias.grad.clone(), "avg")
        assert (model.always.bias.grad == expected).all()
    model.zero_grad()
    with reducer.no_sync():  # wait() must reduce this pass's gradients of model.sometimes; the next pass has none
        model(torch.ones(2, 4, dtype=torch.double), True).sum().backward()
    model(torch.ones(2, 4, dtype=torch.double), False).sum().backward()
    reducer.wait()
    assert (model.sometimes.bias.grad == 2).all()


@needs_torch
@ranks(2)
def test_misuse_is_told(rank, group):
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    reducer = GradientReducer(model.named_parameters())
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match=r"the gradient of (weight|bias) came twice in one step: call wait"):
        model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match=r"the gradient of \w+ was changed between backward\(\) and wait\(\)"):
        reducer.wait()
    reducer = GradientReducer(model.named_parameters())
    with pytest.raises(RuntimeError, match=r"inside no_sync\(\) gradients stay"), reducer.no_sync():
        reducer.wait()
    with pytest.raises(RuntimeError, match=r"PyTorch's gradients are reduced by backward\(\) and wait"):
        reducer.reduce([])
    with pytest.raises(TypeError, match="more than one array library: weight of torch, other of numpy"):
        GradientReducer({"weight": model.weight, "other": np.ones(2)})
    reducer.carry(1)
    model(torch.ones(1, 3)).sum().backward()
    words = r"no_sync: gradients of a backward pass are still being reduced; call wait\(\)"
    with pytest.raises(RuntimeError, match=words), reducer.no_sync():
        pass
    with pytest.raises(RuntimeError, match="zero_grad: gradients of a backward pass are still being reduced"):
        reducer.zero_grad()
    reducer.wait()
    assert reducer.carried == 1
    last, first = (torch.nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.half, torch.float))
    # Each parameter has its own bucket. The float32 bucket is sent first, together with the number passed to carry().
    reducer = GradientReducer([last, first])
    first.sum().backward()
    with pytest.raises(RuntimeError, match=r"carry: too late for this step; call it before backward\(\)"):
        reducer.carry(2)
    last.sum().backward()
    reducer.wait()
    assert (last.grad == 1).all() and (first.grad == 1).all()
    model.bias.requires_grad_(False)
    reducer = GradientReducer(model.named_parameters())  # the earlier reducers are gone, and their hooks do nothing
    assert len(reducer.buffers) == 1
    model(torch.ones(1, 3)).sum().backward()
    reducer.wait()
    table = torch.nn.Embedding(5, 2, sparse=True)
    reducer = GradientReducer(table.parameters())
    with pytest.raises(TypeError, match=r"a gradient of layout torch\.sparse_coo; use dense gradients"):
        table(torch.tensor([1])).sum().backward()


@needs_torch
@ranks(2)
def test_gradients_that_the_program_changes_or_replaces(rank, group):
    import torch

    weight, own = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
    reducer = GradientReducer([("weight", weight), ("own", own)], exclude=["own"])

    def step() -> None:
        (weight * (rank + 1)).sum().backward()
        (own * (rank + 1)).sum().backward()
        reducer.wait()
        assert (weight.grad == 1.5).all() and (own.grad == rank + 1).all()

    step()
    weight.grad.data = weight.grad.data.clamp(-1, 1)
    reducer.zero_grad()
    step()
    with torch.no_grad():
        weight.grad = weight.grad.clone()
    reducer.zero_grad()
    step()
    weight.grad = None
    reducer.zero_grad()
    step()
    reducer.zero_grad()
    second = GradientReducer([("weight", weight)])  # the second reducer takes over the parameter from the first one
    (weight * (rank + 1)).sum().backward()
    assert not reducer._step.begun
    second.wait()
    assert (weight.grad == 1.5).all()
    second.zero_grad()
    (weight**2 * (rank + 1) + weight * (rank + 1)).sum().backward(create_graph=True)
    second.wait()
    assert (weight.grad == 1.5).all() and not weight.grad.requires_grad
    weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None) if rank == 1 else None)
    third = GradientReducer([("weight", weight)])
    third.zero_grad()
    (weight * 3).sum().backward()
    third.wait()
    assert (weight.grad == 1.5).all()  # the mean of 3 and 0, because the hook removes rank 1's gradient


def clipped(model: Any) -> None:
    importlib.import_module("torch").nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def halved(model: Any) -> None:
    model.weight.grad = model.weight.grad / 2


@needs_torch
@ranks(2)
def test_gradients_that_are_used_before_they_are_reduced_are_told(rank, group):
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    for change in (clipped, halved):
        reducer = GradientReducer(model.named_parameters())
        for step in range(3):
            reducer.zero_grad() if step == 1 else model.zero_grad()
            model(torch.ones(1, 3) + rank).sum().backward()
            if step == 2:
                change(model)
                words = r"the gradient of weight was changed between backward\(\) and wait\(\)"
                with pytest.raises(RuntimeError, match=words):
                    reducer.wait()
            else:
                reducer.wait()
                change(model)
    reducer = GradientReducer(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    model.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match=r"SGD\.step: the gradients are not reduced yet: call GradientReducer\.wait"):
        optimizer.step()
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 1.0).step()  # an optimizer of another model may step
    reducer.wait()
    optimizer.step()


@needs_torch
@ranks(2)
def test_what_differs_at_the_start_or_is_unfrozen_later_is_told(rank, group):
    import torch

    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    torch.nn.init.zeros_(model[0].weight)
    words = r"GradientReducer: ranks 0 and 1 of the group begin with different weights, of 0\.bias; use one seed on all"
    with pytest.raises(ValueError, match=words):
        GradientReducer(model.named_parameters())
    GradientReducer(model.named_parameters(), exclude=["0.bias", model[1].weight, model[1].bias])
    model[1].requires_grad_(False)  # frozen weights are compared, too: those of model[1] differ
    GradientReducer(model[0].parameters(), parameter_broadcast=True)
    with pytest.raises(ValueError, match=r"ranks 0 and 1 of the group begin with different weights, of 1\.weight"):
        GradientReducer(model.named_parameters())
    GradientReducer(model.named_parameters(), exclude=list(model[1].parameters()))
    GradientReducer(model.named_parameters(), parameter_broadcast=True)
    assert (mscomm.all_gather(model[1].weight.detach()[None]) == model[1].weight).all()
    model[1].weight.requires_grad_(True)
    reducer = GradientReducer(model.named_parameters())
    model[1].bias.requires_grad_(True)
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match=r"1\.bias has a gradient, but needed none when the reducer was made"):
        reducer.wait()


@needs_torch
@ranks(3)
def test_after_a_join_all_have_one_model_and_the_states_that_were_named(rank, group):
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    model[2].bias.data.fill_(rank)
    reducer = GradientReducer(model.named_parameters(), exclude=["2.bias"])
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with reducer.join(sync=[model, optimizer, schedule]):
        for step in range(2 * rank):  # rank 0 makes no step, so it has no optimizer state before the sync
            optimizer.zero_grad()
            images = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * rank + step))
            model(images).square().sum().backward()
            reducer.wait()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    assert reducer.last_rank == 2 and schedule.last_epoch == 4 and optimizer.param_groups[0]["lr"] == 0.1 / 16
    state = optimizer.state_dict()["state"]
    assert state[0]["step"].item() == 4 and model[1].num_batches_tracked == 4
    moments = {f"{i} {name}": x for i, of_one in state.items() for name, x in of_one.items()}
    for name, x in {**model.state_dict(), **moments}.items():
        assert (mscomm.all_gather(x[None]) == x).all() != name.startswith("2.bias"), name


@needs_torch
@ranks(3)
def test_uneven_data_under_pytorch(rank, group):
    import torch

    weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.double))
    reducer = GradientReducer([weight])
    seen = []
    with reducer.join():
        for _ in range(rank + 1):
            reducer.zero_grad()
            (weight * (rank + 1)).sum().backward()
            reducer.wait()
            seen.append(weight.grad[0].item())
            with torch.no_grad():
                weight -= weight.grad
    assert seen == [2.0, 2.5, 3.0][: rank + 1] and (weight == -7.5).all()


@needs_torch
@ranks(2)
def test_dtypes_and_memory_formats(rank, group):
    import torch

    wide = torch.nn.Parameter(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last))
    narrow = torch.nn.Parameter(torch.ones(6, dtype=torch.bfloat16))
    reducer = GradientReducer([wide, narrow])
    for _ in range(3):
        reducer.zero_grad()
        ((wide * torch.arange(120.0).reshape(2, 3, 4, 5)).sum() * (rank + 1) + (narrow * (rank + 2)).sum()).backward()
        reducer.wait()
        assert (wide.grad == 1.5 * torch.arange(120.0).reshape(2, 3, 4, 5)).all()
        assert narrow.grad.dtype == torch.bfloat16 and (narrow.grad == 2.5).all()
