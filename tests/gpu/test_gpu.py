"""Calls on a real GPU, with the real NCCL and driver, on CuPy's and PyTorch's arrays. Several ranks share one GPU.

NCCL normally refuses two ranks of one host that share a GPU. But it treats processes with different values of
NCCL_HOSTID as processes on different hosts, and connects them with sockets. So one GPU is enough. The tests do not
measure speed. Without a GPU, the tests are skipped with a reason.
"""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from functions import FUNCTIONS, SCANS, How, bits
from ranks import everybody_is_here, ranks

import mscomm
from mscomm import accelerators, arrays

pytestmark = pytest.mark.gpu
BOUND_S = 60  # a generous bound on the time until a fault is reported


def why_not() -> str:
    try:
        accelerators.opened("nccl")
        return ""
    except mscomm.Error as error:
        return str(error)


def has(library: str) -> bool:
    return importlib.util.find_spec(library) is not None


needs_gpu = pytest.mark.skipif(bool(why_not()), reason=f"no GPU here: {why_not()[:300]}")
each_library = pytest.mark.parametrize(
    "library",
    [pytest.param(one, marks=pytest.mark.skipif(not has(one), reason=f"needs {one}")) for one in ("cupy", "torch")],
)


def shared(rank: int, **_: Any) -> dict[str, str]:
    """Return variables for ranks on one GPU. NVIDIA documents all of them except NCCL_HOSTID (see NCCL's source)."""
    told = "NET=Socket IB_DISABLE=1 NVLS_ENABLE=0 MNNVL_ENABLE=0 CUMEM_HOST_ENABLE=0 RAS_ENABLE=0 MAX_CTAS=2"
    own = {f"NCCL_{name}": text for name, text in (one.split("=") for one in told.split())}
    return {
        **own,
        "NCCL_HOSTID": f"mscomm-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_ALGO": "Ring",
        "NCCL_PROTO": "Simple",
    }


def on_gpu(n: int | str, **options: Any) -> Callable[..., Any]:
    wanted = {"env": shared, "init": {"backend_name": "nccl", "device": 0}, "timeout_s": 280, **options}

    def decorate(body: Callable[..., None]) -> Any:
        return needs_gpu(ranks(n, **wanted)(body))

    return decorate


def give(library: str, x: Any) -> Any:
    x = np.asarray(x)
    if library == "cupy":
        return importlib.import_module("cupy").asarray(x)
    torch = importlib.import_module("torch")
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16).cuda()
    return torch.from_numpy(x.copy()).cuda()


def take(x: Any) -> np.ndarray[Any, Any]:
    if hasattr(x, "get"):
        return np.asarray(x.get())
    torch = importlib.import_module("torch")
    if x.dtype is torch.bfloat16:
        return x.cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return np.asarray(x.cpu().numpy())


@each_library
@pytest.mark.parametrize("n", [1, 2, 3])
@on_gpu("n")
def test_every_function_gives_the_right_elements(rank: int, group: None, library: str, n: int) -> None:
    rng = np.random.default_rng(3)
    for name, row in FUNCTIONS.items():
        if name in SCANS:
            continue  # NCCL has none
        for turn, dtype in enumerate(("float32", "float64", "int64", "uint8", "float16", "bool")):
            rows = [[5] * n] * n if not name.endswith("_v") else [[(r % 3) * 4 for r in range(n)]] * n
            how = How("sum" if dtype != "bool" else "max", n - 1, rows)
            whole = [rng.integers(0, 2, (row.given(how, r), 3)).astype(dtype) for r in range(n)]
            expected = row.model(how, whole, rank, None)
            got = row.call(give(library, whole[rank]), how, rank, async_op=bool(turn % 2))
            got = got.wait() if turn % 2 else got
            if row.counts is not None and expected is not None:
                got, counts = got
                assert counts == row.counts(how, rank)
            assert (got is None) == (expected is None), (name, dtype)
            if expected is not None:
                assert (bits(take(got)) == bits(expected)).all(), (name, dtype)


@each_library
@on_gpu(2)
def test_in_place_out_and_strides(rank: int, group: None, library: str) -> None:
    whole = np.arange(24, dtype=np.float32).reshape(4, 6) + rank
    expected = 2 * (whole - rank) + 1
    x = give(library, whole)
    assert mscomm.all_reduce_(x) is x and (take(x) == expected).all()
    x, out = give(library, whole), give(library, np.zeros((6, 8), np.float32))
    assert (take(mscomm.all_reduce(x.T)) == expected.T).all()
    target = out[:4, 1:7]
    assert mscomm.all_reduce(x, out=target) is target and (take(out[:4, 1:7]) == expected).all()
    many = [give(library, np.full(s, rank, np.float32)) for s in (3, 1000, 2_000_000, 7)]
    for y in mscomm.all_reduce_many(many):
        assert (take(y) == 1).all()


@each_library
@on_gpu(2)
def test_a_type_of_array_is_known_after_its_first_call(rank: int, group: None, library: str) -> None:
    x = give(library, np.full((2, 3), rank + 1, np.float32))
    first = mscomm.all_reduce(x)
    assert type(x) in arrays.plain_types
    for out in (None, give(library, np.zeros((2, 3), np.float32)), x):
        got = mscomm.all_reduce(x, out=out)
        assert type(got) is type(first) and (out is None or got is out)
        assert (take(got) == 3).all()


@pytest.mark.skipif(not has("torch"), reason="torch is not installed")
@on_gpu(2)
def test_bfloat16_of_torch(rank: int, group: None) -> None:
    x = np.array([1, 2, 3], ml_dtypes.bfloat16)
    assert (take(mscomm.all_reduce(give("torch", x))) == 2 * x).all()


@pytest.mark.skipif(not has("torch"), reason="torch is not installed")
@on_gpu(2)
def test_calls_keep_the_order_of_streams(rank: int, group: None) -> None:
    import torch

    side = torch.cuda.Stream()
    x = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for turn in range(5):
            torch.cuda._sleep(20_000_000)  # a kernel that is still running when the call is made
            x += rank + 1
            y = mscomm.all_reduce(x)
            assert (y == 3 * (turn + 1)).all().item()
        work = mscomm.all_reduce(x, async_op=True)
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        assert (work.wait() == 15).all().item()


@pytest.mark.skipif(not has("torch"), reason="torch is not installed")
@pytest.mark.parametrize("n", [1, 2])
@on_gpu("n")
def test_a_graph_with_a_collective(rank: int, group: None, n: int) -> None:
    import torch

    x, y = torch.ones(1000, device="cuda"), torch.zeros(1000, device="cuda")
    mscomm.all_reduce(x, out=y)  # the first call connects the ranks, so do it before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mscomm.all_reduce(x, out=y)
        x.add_(y)
    for turn in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert (y == n * (n + 1) ** turn).all().item()
    assert (mscomm.all_reduce(torch.ones(3, device="cuda")) == n).all().item()


@pytest.mark.skipif(not has("numba"), reason="numba is not installed")
@on_gpu(2)
def test_an_array_with_the_cuda_array_interface_alone(rank: int, group: None) -> None:
    from numba import cuda

    x, out = cuda.to_device(np.full(5, rank + 1, np.float32)), cuda.to_device(np.zeros(5, np.float32))
    assert mscomm.all_reduce(x, out=out) is out
    cuda.synchronize()
    assert (out.copy_to_host() == 3).all()
    with pytest.raises(TypeError, match="give out="):
        mscomm.all_reduce(x)


@on_gpu(2)
def test_groups_and_the_cpu_beside_the_gpu(rank: int, group: None) -> None:
    library = "cupy" if has("cupy") else "torch"
    alone = mscomm.split(rank)
    assert (take(mscomm.all_reduce(give(library, np.ones(3)), group=alone)) == 1).all()
    for turn in range(5):
        assert (mscomm.all_reduce(np.full(3, turn)) == 2 * turn).all()
        assert (take(mscomm.all_reduce(give(library, np.full(3, turn)))) == 2 * turn).all()


def ends(call: Callable[[], Any]) -> mscomm.Error:
    until = time.monotonic() + BOUND_S
    while time.monotonic() < until:
        try:
            call()
        except mscomm.Error as error:
            return error
    raise AssertionError(f"no error within {BOUND_S} s")


@on_gpu(2, expect={1: -signal.SIGKILL})
def test_a_killed_rank_is_named(rank: int, group: None) -> None:
    x = give("cupy" if has("cupy") else "torch", np.ones(1000, np.float32))
    take(mscomm.all_reduce(x))
    everybody_is_here()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    error = ends(lambda: take(mscomm.all_reduce(x)))
    assert type(error) is mscomm.PeerLost and error.ranks == (1,), error


@on_gpu(2)
def test_a_rank_that_does_not_come_is_named_at_the_deadline(rank: int, group: None) -> None:
    x = give("cupy" if has("cupy") else "torch", np.ones(1000, np.float32))
    take(mscomm.all_reduce(x))
    if rank == 0:
        y = mscomm.all_reduce(x, timeout=3)
        take(y)  # returns when the abort has ended the call on the device
    error = ends(lambda: mscomm.barrier(timeout=120))
    assert isinstance(error, (mscomm.CollectiveTimeout, mscomm.Mismatch)), error
