"""Tensors and arrays of PyTorch, JAX and MindSpore in every function, for each library that is installed."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from functions import FUNCTIONS, How, bits
from ranks import ranks, tell, until_told

import mscomm
from mscomm import _core
from mscomm.arrays import LIBRARIES
from mscomm.arrays.numpy import OF_ML_DTYPES

N = 3
HOW = How("sum", 1, [[2] * N] * N)


class Library(NamedTuple):
    made: Callable[[np.ndarray[Any, Any]], Any]  # makes an array of the library with these values
    is_one: Callable[[Any], bool]
    dtypes: list[str]
    writable: bool = True


def torch() -> Library:
    import torch

    known = [name for name in _core.dtypes() if hasattr(torch, name)]

    def made(x: np.ndarray[Any, Any]) -> torch.Tensor:
        if x.dtype.name in OF_ML_DTYPES:
            return torch.from_numpy(x.view(f"u{x.itemsize}").copy()).view(getattr(torch, x.dtype.name))
        return torch.from_numpy(x.copy())

    return Library(made, lambda x: isinstance(x, torch.Tensor), known)


def jax() -> Library:
    import jax

    jax.config.update("jax_enable_x64", True)
    return Library(jax.numpy.asarray, lambda x: isinstance(x, jax.Array), list(_core.dtypes()), writable=False)


def mindspore() -> Library:
    import mindspore

    known = [name for name in _core.dtypes() if not name.startswith(("uint16", "uint32", "uint64", "float8"))]
    return Library(lambda x: mindspore.Tensor(x.copy()), lambda x: isinstance(x, mindspore.Tensor), known)


def numpy() -> Library:
    return Library(np.array, lambda x: isinstance(x, np.ndarray), list(_core.dtypes()))


MADE = {"numpy": numpy, "torch": torch, "jax": jax, "mindspore": mindspore}
each_library = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.skipif(not importlib.util.find_spec(name), reason=f"needs {name}"))
        for name in MADE
    ],
)


def values(dtype: str, rank: int) -> np.ndarray[Any, Any]:
    numbers = np.arange(2 * N * 5).reshape(2 * N, 5) + rank
    return (numbers % 2 == 1) if dtype == "bool" else numbers.astype(getattr(ml_dtypes, dtype, dtype))


def test_every_library_is_here():
    assert set(MADE) | {"cupy"} == set(LIBRARIES.values())  # CuPy's arrays need a GPU: see tests/gpu


@each_library
@ranks(N)
def test_every_function_takes_and_gives_its_arrays(rank, group, name):
    library = MADE[name]()
    for dtype in library.dtypes:
        inputs = [values(dtype, r) for r in range(N)]
        for function, row in FUNCTIONS.items():
            if row.has_op and not _core.supports(_core.dtypes().index(dtype), _core.ops.index("sum")):
                continue
            mine = [x[: row.given(HOW, r)] for r, x in enumerate(inputs)]
            expected = row.model(HOW, mine, rank, None)
            got = row.call(library.made(mine[rank]), HOW, rank)
            got = got[0] if isinstance(got, tuple) and row.counts else got
            if expected is None:
                assert got is None, (function, dtype)
                continue
            assert library.is_one(got), (function, dtype, type(got))
            there = mscomm.arrays.memory_anywhere(got, "got", function)
            assert there.dtype == expected.dtype and there.shape == expected.shape, (function, dtype)
            assert (bits(there) == bits(expected)).all(), (function, dtype)


@ranks(2)
def test_numbers_are_arrays_of_shape_nothing(rank, group):
    loss = np.linspace(0, 1, 5, dtype=np.float32) + rank
    numbers = [
        (True, False), (3, -(1 << 62)), (0.5, 2.0), (1 + 2j, 3j),
        (np.float32(0.5), np.float32(2)), (np.int8(3), np.int8(4)), (np.bool_(False), np.bool_(True)),
        (ml_dtypes.bfloat16(0.5), ml_dtypes.bfloat16(2)), (np.ones(2).mean(), np.zeros(2).mean()),
    ]  # fmt: skip
    how = How("sum", 1, [[1] * 2] * 2)
    for pair in numbers:
        arrays = [np.asarray(x) for x in pair]
        for function in ("all_reduce", "reduce", "broadcast", "all_gather", "gather"):
            expected = FUNCTIONS[function].model(how, arrays, rank, None)
            got = FUNCTIONS[function].call(pair[rank], how, rank)
            if expected is None:
                assert got is None
                continue
            assert type(got) is np.ndarray and got.shape == expected.shape and got.dtype == expected.dtype, function
            assert (got == expected).all(), (function, pair)
        many, _ = mscomm.all_reduce_many([pair[rank], loss])
        for got in (many, mscomm.all_reduce(pair[rank], async_op=True).wait()):
            assert got.shape == () and got == FUNCTIONS["all_reduce"].model(how, arrays, rank, None)
    mean = mscomm.all_reduce(loss.mean(), "avg")
    assert mean.shape == () and mean.dtype == np.float32 and mean == 1
    with pytest.raises(ValueError, match="a scalar cannot be divided into 2 equal parts"):
        mscomm.reduce_scatter(1.0)
    if rank == 0:
        mscomm.send(2.5, 1)
    else:
        assert mscomm.recv(np.empty(1), 0) == 2.5


@each_library
@ranks(2)
def test_tensors_in_objects_stay_of_their_library(rank, group, name):
    library = MADE[name]()
    for dtype in library.dtypes:
        sent = [values(dtype, 0).T, values(dtype, 0)[:0], values(dtype, 0)[0, :1].reshape(())]
        came = mscomm.broadcast_object({"w": [library.made(x) for x in sent]} if rank == 0 else None)["w"]
        for x, expected in zip(came, sent, strict=True):
            there = mscomm.arrays.memory_anywhere(x, "x", "test")
            assert library.is_one(x) and there.dtype == expected.dtype and there.shape == expected.shape, dtype
            assert (bits(there) == bits(expected)).all(), dtype
    if library.writable:
        assert mscomm.broadcast_(came[0]) is came[0]


@each_library
@ranks(2)
def test_what_can_be_written_is_written_in_place(rank, group, name):
    library = MADE[name]()
    x = library.made(np.full((3, 2), rank + 1, np.float32))
    if library.writable:
        assert mscomm.all_reduce_(x) is x
        assert mscomm.broadcast(library.made(np.ones((3, 2), np.float32)), out=x) is x
        assert (mscomm.arrays.memory_anywhere(x, "x", "test") == 1).all()
    else:
        with pytest.raises(TypeError, match="all_reduce: out is read-only"):
            mscomm.all_reduce_(x)
    if library.writable:  # with a view of a larger array as out, mscomm must write to the view or raise a TypeError
        whole = library.made(np.zeros((3, 4), np.float32))
        try:
            assert mscomm.all_reduce(library.made(np.ones(4, np.float32)), out=whole[1]) is not None
            assert (mscomm.arrays.memory_anywhere(whole, "x", "test")[1] == 2).all()
        except TypeError as error:
            assert name == "mindspore" and "all_reduce: out is read-only" in str(error)
    sums = mscomm.all_reduce_many([library.made(np.ones(2)), np.ones(1, np.float32)])
    assert library.is_one(sums[0]) and isinstance(sums[1], np.ndarray)
    mscomm.send(library.made(np.full(2, rank)), 1 - rank) if rank == 0 else None
    if rank == 1:
        got = mscomm.recv(np.empty(2, np.int64), 0)
        assert (got == 0).all()


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
@ranks(2)
def test_tensors_that_cannot_be_moved_are_refused_with_the_way_out(rank, group):
    import torch

    for x, words in (
        (torch.ones(3, device="meta"), "all_reduce: x is on meta; .* use x.cpu()"),
        (torch.ones(3).to_sparse(), "all_reduce: x is a tensor of layout torch.sparse_coo; use x.to_dense()"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "all_reduce: x is a nested tensor"),
        (torch.ones(2, dtype=torch.float8_e4m3fn), "all_reduce: sum is not defined on float8_e4m3fn arrays"),
        (torch.empty(2, dtype=torch.bits8), "all_reduce: x has dtype torch.bits8, which mscomm does not move"),
    ):
        with pytest.raises(TypeError, match=words):
            mscomm.all_reduce(x)
    turned = (torch.ones(2, dtype=torch.complex64) * (1 + 2j)).conj()
    assert (mscomm.all_reduce(turned) == 2 - 4j).all()
    with pytest.raises(TypeError, match="all_reduce: out is read-only"):
        mscomm.all_reduce_(turned)
    same = torch.ones(1).expand(3)
    assert (mscomm.all_reduce(same) == 2).all()
    with pytest.raises(TypeError, match="all_reduce: out is read-only"):
        mscomm.all_reduce(torch.ones(3), out=same)
    rolling = torch.arange(4.0).unfold(0, 3, 1)
    assert mscomm.all_reduce(rolling).tolist() == [[0, 2, 4], [2, 4, 6]]
    with pytest.raises(TypeError, match="all_reduce: out is read-only"):
        mscomm.all_reduce(torch.ones(2, 3), out=rolling)
    turned_views = torch.zeros(2, 3, 4).permute(2, 0, 1)[::2, :, 1:]
    assert mscomm.all_reduce(torch.ones(2, 2, 2), out=turned_views).sum() == 16
    nothing = torch.from_numpy(np.zeros((0, 4)))  # its strides are 0, as those of `same`, but it may be `out`
    assert mscomm.all_reduce_(nothing) is nothing and mscomm.all_gather(nothing).shape == (0, 4)
    with torch.device("meta"):
        assert mscomm.all_reduce(torch.ones(3, device="cpu")).tolist() == [2, 2, 2]
    with pytest.raises(TypeError, match="recv: tensor is on meta"):
        mscomm.communication.comm_func.recv(torch.ones(3, device="meta"), 0)
    weight = torch.nn.Parameter(torch.full((2, 3), float(rank)))
    total = mscomm.all_reduce(weight)
    assert not total.requires_grad and (total == 1).all()
    column = torch.arange(6.0).reshape(3, 2)[:, 1]
    assert mscomm.all_reduce_(column) is column and column.tolist() == [2, 6, 10]
    x = torch.ones(3, requires_grad=True) * 2
    square = x * x
    mscomm.all_reduce_(x)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        square.sum().backward()
    with torch.inference_mode():
        assert mscomm.all_reduce_(torch.ones(2)).tolist() == [2, 2]
    out = torch.zeros(2)
    seen = out._version
    mscomm.recv(out, 1 - rank) if rank else mscomm.send(torch.ones(2), 1 - rank)
    assert (out._version > seen) == bool(rank)


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
@ranks(N)
def test_the_storage_of_a_tensor_can_be_resized_after_a_call(rank, group):
    """FSDP resizes storages. PyTorch cannot resize a storage after `x.numpy()`, so a call must not use `x.numpy()`."""
    import torch

    right, left = (rank + 1) % N, (rank - 1) % N
    tensors: dict[str, torch.Tensor] = {}

    def made(name: str, rows: int = 2 * N, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        tensors[f"{name} {len(tensors)}"] = x = torch.ones(rows, 5, dtype=dtype)
        return x

    for name, row in FUNCTIONS.items():
        for dtype in (torch.float32, torch.bfloat16):
            got = row.call(made(name, row.given(HOW, rank), dtype), HOW, rank)
            got = got[0] if isinstance(got, tuple) and row.counts else got
            out = {} if got is None else {"out": made(f"out of {name}", len(got), dtype)}
            row.call(made(name, row.given(HOW, rank), dtype), HOW, rank, **out)
            if got is not None:
                tensors[f"result of {name}, {dtype}"] = got
        row.call(made(name, 2 * row.given(HOW, rank))[::2], HOW, rank)
        row.call(made(name, row.given(HOW, rank)), HOW, rank, async_op=True).wait()
    mscomm.all_reduce_(made("all_reduce_"))
    mscomm.broadcast_(made("broadcast_"))
    mscomm.all_reduce_(made("strided all_reduce_")[:, 1])
    mscomm.all_reduce_many([made("all_reduce_many"), made("all_reduce_many")], out=[made("out"), made("out")])
    sent = mscomm.send(made("send"), right, async_op=True)
    mscomm.recv(made("recv"), left)
    sent.wait()
    mscomm.sendrecv(made("sendrecv"), right, made("sendrecv"), left)
    mscomm.send_object(made("send_object"), rank)
    mscomm.recv_object(rank)
    mscomm.broadcast_object(made("broadcast_object"))
    mscomm.all_gather_object([made("all_gather_object")])
    mscomm.gather_object(made("gather_object"))
    mscomm.scatter_object([made("scatter_object") for _ in range(N)])
    mscomm.communication.comm_func.all_reduce(made("comm_func"))
    mscomm.ops.AllGather()(made("ops"))
    for name, tensor in tensors.items():
        assert tensor.untyped_storage().resizable(), name
        tensor.untyped_storage().resize_(0)


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
@ranks(2)
def test_the_storage_of_a_parameter_can_be_resized_after_a_training(rank, group):
    import torch

    def wrapped(net: torch.nn.Module) -> mscomm.DistributedDataParallel:
        return mscomm.DistributedDataParallel(net, gradient_as_bucket_view=True)

    for train in (wrapped, mscomm.DistributedDataParallel, None):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        reducer = None if train else mscomm.train.GradientReducer(net.parameters())
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        inputs = torch.ones(2, 4)
        (train(net) if train else net)(inputs).sum().backward()
        if reducer is not None:
            reducer.wait()
        optimizer.step()
        mscomm.train.broadcast_parameters(net.state_dict())
        with tempfile.TemporaryDirectory() as folder:
            mscomm.save_checkpoint(net, f"{folder}/net.safetensors")
            mscomm.load_param_into_net(net, mscomm.load_checkpoint(f"{folder}/net.safetensors"))
        momenta = {f"momentum of {i}": state["momentum_buffer"] for i, state in optimizer.state_dict()["state"].items()}
        for name, tensor in {"inputs": inputs, **net.state_dict(), **momenta}.items():
            assert tensor.untyped_storage().resizable(), (train, name)


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
@ranks(1)
def test_a_tensor_whose_storage_is_too_small_is_refused(rank, group):
    import torch

    words = "needs {} bytes of its storage, which was resized to {}; resize it back first"
    x = torch.ones(100)
    part, column = x[10:20], x.reshape(10, 10)[:, 1]
    x.untyped_storage().resize_(0)
    for tensor, needed in ((x, 400), (part, 80), (column, 368)):
        for call in (mscomm.all_reduce, mscomm.all_reduce_, mscomm.all_gather, lambda one: mscomm.send(one, 0)):
            with pytest.raises(TypeError, match=words.format(needed, 0)):
                call(tensor)
    assert mscomm.all_reduce(x[:0]).shape == (0,)
    x.untyped_storage().resize_(100)
    with pytest.raises(TypeError, match=words.format(368, 100)):
        mscomm.all_reduce(column)
    x.untyped_storage().resize_(400)
    assert (mscomm.all_reduce_(x.fill_(3)) == 3).all()
    large = torch.ones(1 << 15)
    part = large[1 << 14 :]
    large.untyped_storage().resize_(100 << 10)
    for tensor in (large, part):  # these are contiguous, so no Python code looks at them
        for call in (mscomm.all_reduce, mscomm.all_reduce_):
            with pytest.raises(TypeError, match=words.format(128 << 10, 100 << 10)):
                call(tensor)
    large.untyped_storage().resize_(128 << 10)
    assert (mscomm.all_reduce_(large.fill_(3)) == 3).all()


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
@ranks(1)
def test_integers_of_fewer_than_8_bits_are_refused(rank, group):
    import torch

    bits = torch.full((4,), 15, dtype=torch.uint8)
    for kind in (torch.uint4, torch.int4, torch.uint1, torch.int7):
        for x in (bits.view(kind), bits.view(kind)[::2]):
            for call in (mscomm.all_reduce, mscomm.all_reduce_, mscomm.all_gather, lambda one: mscomm.send(one, 0)):
                with pytest.raises(TypeError, match=f"has dtype {kind}, which mscomm does not move"):
                    call(x)
    assert mscomm.all_reduce(bits).tolist() == mscomm.all_reduce(bits.view(torch.int8)).tolist() == [15] * 4


def forget_ml_dtypes() -> None:
    """Make this rank behave as if ml-dtypes were not installed."""
    sys.modules["ml_dtypes"] = None  # type: ignore[assignment]  # an import then raises ImportError
    mscomm.arrays.numpy._of_ml_dtypes.cache_clear()


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
@ranks(N)
def test_tensors_of_bfloat16_and_float8_are_moved_without_ml_dtypes(rank, group):
    import torch

    made = MADE["torch"]().made

    def bits_of(x: torch.Tensor) -> np.ndarray[Any, Any]:
        unsigned = {1: torch.uint8, 2: torch.uint16}[x.itemsize]
        return x.contiguous().view(unsigned).numpy().reshape(-1)

    forget_ml_dtypes()
    for dtype in OF_ML_DTYPES:
        inputs = [values(dtype, r) for r in range(N)]
        for function, row in FUNCTIONS.items():
            if row.has_op and dtype != "bfloat16":
                with pytest.raises(TypeError, match=f"{function}: sum is not defined on {dtype} arrays"):
                    row.call(made(inputs[rank]), HOW, rank)
                continue
            mine = [x[: row.given(HOW, r)] for r, x in enumerate(inputs)]
            expected = row.model(HOW, mine, rank, None)
            column = made(np.stack([mine[rank], mine[rank]], axis=1))[:, 0]
            assert not column.is_contiguous() or not column.numel()
            for x in (made(mine[rank]), column):
                got = row.call(x, HOW, rank)
                got = got[0] if isinstance(got, tuple) and row.counts else got
                assert (got is None) == (expected is None), (function, dtype)
                if expected is None:
                    row.call(x, HOW, rank)
                    continue
                out = torch.zeros(*got.shape, 2).to(got.dtype)[..., 0]
                row.call(x, HOW, rank, out=out)
                for one in (got, out):
                    assert one.dtype is x.dtype and one.shape == expected.shape, (function, dtype)
                    assert (bits_of(one) == bits(expected)).all(), (function, dtype)
        out = made(np.zeros_like(inputs[0]))
        mscomm.sendrecv(made(inputs[rank]), (rank + 1) % N, out, (rank - 1) % N)
        assert (bits_of(out) == bits(inputs[rank - 1])).all()
        mine = mscomm.scatter(made(inputs[0][:N]) if rank == 0 else None, 0, out=made(np.zeros_like(inputs[0][:1])))
        assert (bits_of(mine) == bits(inputs[0][rank])).all()
    ones = torch.ones(5, dtype=torch.bfloat16)
    assert all((x == N).all() for x in mscomm.all_reduce_many([ones, ones]))
    assert (mscomm.train.broadcast_parameters([ones * rank], root=2)[0] == 2).all()


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
@ranks(1)
def test_what_reads_the_values_of_bfloat16_needs_ml_dtypes(rank, group):
    import torch

    forget_ml_dtypes()
    x = torch.ones(3, dtype=torch.bfloat16)
    net = torch.nn.Linear(2, 1).bfloat16()
    words = "has dtype bfloat16, whose values mscomm reads only with ml-dtypes: pip install ml-dtypes"
    for call in (
        lambda: mscomm.broadcast_object(x),
        lambda: mscomm.save_checkpoint({"x": x}, "unused"),
        lambda: mscomm.train.GradientReducer([torch.nn.Parameter(x)]),
        lambda: mscomm.load_param_into_net(net, {"bias": np.ones(1, np.float32)}),
    ):
        with pytest.raises(TypeError, match=words):
            call()
    with pytest.raises(TypeError, match="NumPy arrays of bfloat16 need ml-dtypes"):
        mscomm.empty(3, torch.bfloat16)


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
@pytest.mark.parametrize("other", ["uint8", "float8_e5m2"])
@pytest.mark.parametrize("function", ["broadcast", "sendrecv"])
@ranks(2)
def test_float8_is_a_dtype_of_its_own(rank, group, other, function):
    import torch

    kind = getattr(torch, other if rank else "float8_e4m3fn")
    x, out = torch.zeros(4, dtype=kind), torch.zeros(4, dtype=kind)
    with pytest.raises(mscomm.Mismatch, match=f"(?s)(?=.*float8_e4m3fn)(?=.*{other})"):
        mscomm.broadcast(x) if function == "broadcast" else mscomm.sendrecv(x, 1 - rank, out, 1 - rank)
        mscomm.barrier()  # the root of a small broadcast may return before the other rank arrives


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
@ranks(2)
def test_a_tensor_may_get_other_memory_while_a_call_runs(rank, group):
    """FSDP replaces a parameter's memory through `.data`. A running call must keep using the old memory."""
    import torch

    x, out = torch.nn.Parameter(torch.full((1 << 18,), 1.0)), torch.zeros(1 << 18)
    result = out.detach()
    if rank == 1:
        until_told("swapped")
    work = mscomm.all_reduce(x, out=out, async_op=True)
    if rank == 0:
        with torch.no_grad():
            x.data, out.data = torch.full((3,), 7.0), torch.zeros(3)
        tell("swapped")
    work.wait()
    assert (result == 2).all() and (out.numel() == 3) == (rank == 0)


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
@ranks(1)
def test_a_tensor_without_memory_is_refused(rank, group):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode, pytest.raises(TypeError, match="all_reduce: x is a FakeTensor without memory"):
        mscomm.all_reduce(mode.from_tensor(__import__("torch").ones(2)))


@pytest.mark.skipif(not importlib.util.find_spec("jax"), reason="jax is not installed")
@ranks(1)
def test_a_call_inside_jit_is_refused(rank, group):
    import jax

    with pytest.raises(TypeError, match=r"all_reduce: x is traced by jax\.jit"):
        jax.jit(mscomm.all_reduce)(jax.numpy.ones(2))
    with pytest.raises(TypeError, match=r"use jax\.random\.key_data"):
        mscomm.all_reduce(jax.random.key(0))
