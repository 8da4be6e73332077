"""The arguments of a call: which kinds of arrays it accepts, what it refuses, and what its errors say."""

from __future__ import annotations

import gc
import importlib.util
import signal
import threading
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ranks import everybody_is_here, ranks, tell, until_told, when_inside

import mscomm
from mscomm import arrays
from mscomm.collectives import FUNCTION
from mscomm.job import resolve

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


class Sub(np.ndarray):
    pass


def misaligned(count: int) -> Any:
    return np.ones(count * 4 + 1, np.uint8)[1:].view(np.float32)


def read_only(x: Any) -> Any:
    x.flags.writeable = False
    return x


whole = np.arange(1, 9, dtype=np.float32)
KINDS = {
    "0-d": np.array(2.0),
    "no elements": np.ones((0, 3)),
    "no rows of a strided array": np.ones((4, 3))[::2, :0],
    "bool": np.array([True, False]),
    "float16": np.ones(3, np.float16),
    "bfloat16": np.ones(3, ml_dtypes.bfloat16),
    "bfloat16, strided": np.ones(6, ml_dtypes.bfloat16)[::2],
    "complex128": np.ones(3, np.complex128),
    "longlong": np.ones(3, np.longlong),
    "ulonglong": np.ones(3, np.ulonglong),
    "12 dimensions": np.ones((1,) * 12),
    "a view": whole[2:5],
    "read-only": read_only(np.ones(3)),
    "a subclass": np.arange(2.0).view(Sub),
    "strided": whole[::2],
    "backwards": whole[::-1],
    "Fortran order": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "misaligned": misaligned(2),
    "repeated": np.broadcast_to(np.float32(3), (4,)),
    "a scalar": whole.mean(),
    "a scalar of bfloat16": ml_dtypes.bfloat16(2),
    "an int": 3,
    "a bool": True,
    "a complex": 2j,
}


@pytest.mark.parametrize("x", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("async_op", [False, True])
def test_arrays_of_every_kind_are_taken(alone, x, async_op):
    def call(**given: Any) -> Any:
        result = mscomm.all_reduce(x, async_op=async_op, **given)
        return result.wait() if async_op else result

    as_it_is = np.array(x)
    result = call()
    assert type(result) is np.ndarray and (result.dtype, result.shape) == (as_it_is.dtype, as_it_is.shape)
    assert result is not x and result.tobytes() == as_it_is.tobytes()
    out = np.zeros_like(as_it_is)
    assert call(out=out) is out and out.tobytes() == as_it_is.tobytes()
    if as_it_is.ndim == 1:
        strided = np.zeros(2 * len(as_it_is), as_it_is.dtype)[::2]
        assert call(out=strided) is strided and strided.tobytes() == as_it_is.tobytes()
    if isinstance(x, np.ndarray) and x.flags.writeable:
        assert call(out=x) is x and np.array(x).tobytes() == as_it_is.tobytes()


def test_an_argument_that_is_given_twice_is_an_error(alone):
    x = np.ones(3)
    for call in (mscomm.all_reduce, mscomm.broadcast, mscomm.all_gather, mscomm.scan):
        with pytest.raises(TypeError, match="multiple values for argument 'x'"):
            call(x, x=x)
    with pytest.raises(TypeError, match="multiple values for argument 'op'"):
        mscomm.all_reduce(x, "sum", op="max")


@pytest.mark.parametrize(
    ("x", "op", "out", "kind", "says"),
    [
        ([1.0], "sum", None, TypeError, "x is a list, not an array; give it as np.asarray"),
        (None, "sum", None, TypeError, "x is a NoneType, not an array"),
        (np.ma.masked_array([1.0, 2.0], [True, False]), "sum", None, TypeError, "x is a MaskedArray, not an array"),
        (np.ones(2, ">f4"), "sum", None, TypeError, "big-endian"),
        (np.ones(2, [("a", "f4")]), "sum", None, TypeError, "which mscomm does not move"),
        (np.ones(2, np.longdouble), "sum", None, TypeError, "which mscomm does not move"),
        (np.zeros(2, "M8[s]"), "sum", None, TypeError, "which mscomm does not move"),
        (np.array([1, None]), "sum", None, TypeError, "x has dtype object, which mscomm does not move"),
        (np.array(["a"]), "sum", None, TypeError, "x has dtype <U1, which mscomm does not move"),
        (1 << 64, "sum", None, OverflowError, "x is an int of 65 bits"),
        (
            np.ones((1,) * 13),
            "sum",
            None,
            ValueError,
            "x has 13 dimensions, arrays have at most 12 dimensions; reshape",
        ),
        (np.ones(2), "sum", read_only(np.ones(2)), TypeError, "out is read-only"),
        (np.ones(2), "sum", np.broadcast_to(1.0, (2,)), TypeError, "out is read-only"),
        (np.ones(4), "sum", np.ones((2, 2)), ValueError, r"out has shape \(2, 2\), the result has \(4,\)"),
        (np.ones(1), "sum", np.ones((1,) * 13), ValueError, r"out has shape \(1, 1,.*\), the result has \(1,\)"),
        (np.ones(4), "sum", np.ones(4, np.float32), TypeError, "out has dtype float32, x has float64"),
        (np.ones(4), "sum", np.ones(4, "M8[s]"), TypeError, r"out has dtype datetime64\[s\], x has float64"),
        (np.ones(4), "sum", [1.0] * 4, TypeError, "out is a list, not an array"),
        (
            whole[:4],
            "sum",
            whole[2:6],
            ValueError,
            "x and out overlap, but not as a call in place allows; pass out with",
        ),
        (whole[:4], "sum", whole[::2], ValueError, "x and out overlap"),
        (whole[::-1], "sum", whole, ValueError, "x and out overlap"),
        (np.ones(2, np.int32), "avg", None, TypeError, "avg is not defined on int32 arrays"),
        (np.ones(2, np.complex64), "max", None, TypeError, "max is not defined on complex64 arrays"),
        (np.ones(2), "summ", None, ValueError, "op 'summ' is not one of sum, prod, min, max, avg, band, bor, bxor"),
        (np.ones(2), 0, None, ValueError, "op 0 is not one of sum"),
        (np.ones(2), None, None, ValueError, "op None is not one of sum"),
        (np.ones(2), "\ud800", None, ValueError, r"op '\\ud800' is not one of sum"),
    ],
)
def test_what_is_wrong_is_refused_before_the_call(alone, x, op, out, kind, says):
    before = alone.core.where()
    for options in ({}, {"timeout": 60}, {"async_op": True}):
        with pytest.raises(kind, match=says):
            mscomm.all_reduce(x, op, out=out, **options)
    assert alone.core.where() == before
    assert mscomm.all_reduce(np.ones(1))[0] == 1


def test_interleaved_arrays_do_not_overlap(alone):
    x = np.arange(8.0)
    assert mscomm.all_reduce(x[::2], out=x[1::2]).tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize("timeout", [0, -1, -1.5, float("nan"), "soon", [1], False])
def test_a_timeout_is_a_number_of_seconds(alone, timeout):
    with pytest.raises((TypeError, ValueError), match="timeout"):
        mscomm.barrier(timeout=timeout)


@ranks(3)
def test_arguments_that_do_not_fit_the_group(rank, group):
    x = np.arange(6.0)
    before = resolve(None).core.where()[0]
    for call, kind, says in (
        (
            lambda: mscomm.reduce_scatter(np.ones(4)),
            ValueError,
            r"axis 0 of \(4,\) cannot be divided into 3 equal parts",
        ),
        (lambda: mscomm.reduce_scatter(np.array(1.0)), ValueError, "a scalar cannot be divided .*see reduce_scatter_v"),
        (lambda: mscomm.reduce_scatter(x, out=np.ones(6)), ValueError, r"the result has \(2,\)"),
        (lambda: mscomm.reduce_scatter(x, out=x[1:3]), ValueError, "overlap"),
        (lambda: mscomm.all_to_all(np.ones(4)), ValueError, "cannot be divided"),
        (lambda: mscomm.all_to_all(x, out=x[::-1]), ValueError, "overlap"),
        (lambda: mscomm.all_gather(x[1:3], out=x), ValueError, "overlap"),
        (lambda: mscomm.all_gather(np.empty((1 << 62, 0), np.uint8)), ValueError, "more rows than"),
        (lambda: mscomm.broadcast(x, 3), ValueError, "root 3 is not a rank of group world, which has the ranks 0 to 2"),
        (lambda: mscomm.broadcast(x, -1), ValueError, "root -1 is not a rank"),
        (lambda: mscomm.broadcast(x, 1 << 80), ValueError, f"root {1 << 80} is not a rank"),
        (lambda: mscomm.broadcast(x, "0"), TypeError, "root '0' is not an integer"),
        (lambda: mscomm.broadcast(x, None), TypeError, "root None is not an integer"),
        (lambda: mscomm.reduce(x, 1.0), TypeError, "root 1.0 is not an integer"),
        (lambda: mscomm.gather(x, 4), ValueError, "gather: root 4"),
        (lambda: mscomm.scan(x, "avg"), ValueError, "scan: op avg would divide"),
    ):
        with pytest.raises(kind, match=says):
            call()
    assert resolve(None).core.where()[0] == before
    assert mscomm.all_reduce(np.ones(1))[0] == 3


@ranks(3)
def test_work_in_place(rank, group):
    x = np.arange(6.0)
    mine = slice(2 * rank, 2 * rank + 2)
    part = x[mine]
    assert mscomm.reduce_scatter(x, out=part) is part and (x[mine] == 3 * np.arange(6.0)[mine]).all()
    x = np.full(6, -1.0)
    x[mine] = rank
    assert mscomm.all_gather(x[mine], out=x) is x and x.tolist() == [0, 0, 1, 1, 2, 2]
    same = np.full((3, 2), rank, np.int32)
    assert mscomm.all_to_all(same, out=same).tolist() == [[0, 0], [1, 1], [2, 2]]
    x = np.arange(6.0) + 10 * rank  # scatter reads it at the root alone, so on other ranks out may be any part of it
    out = x[mine if rank == 1 else slice(1, 3)]
    assert mscomm.scatter(x, 1, out=out) is out and out.tolist() == [10 + 2 * rank, 11 + 2 * rank]
    x = np.full(6, float(rank))
    assert mscomm.gather(x[mine], 1, out=x if rank == 1 else None) is (x if rank == 1 else None)
    assert rank != 1 or x.tolist() == [0, 0, 1, 1, 2, 2]
    every_other = np.full(8, float(rank))[::2]
    assert mscomm.all_reduce(every_other, out=every_other).tolist() == [3] * 4
    assert mscomm.broadcast(np.float32(rank), np.int64(2)) == 2  # x is a scalar, and root is a NumPy integer


def test_what_only_pytorch_knows_of_its_tensors(alone):
    torch = pytest.importorskip("torch")
    x = torch.ones(2)
    assert mscomm.all_reduce(x).equal(x)  # the first call with a tensor adds a row to plain_types
    assert torch.Tensor in arrays.plain_types
    conjugated = torch.tensor([1 + 2j]).conj()
    assert conjugated.is_conj() and mscomm.all_reduce(conjugated).tolist() == [1 - 2j]
    negated = torch.tensor([1 + 2j]).conj().imag  # contiguous for PyTorch, because it has one element
    assert negated.is_neg() and negated.is_contiguous() and mscomm.all_reduce(negated).tolist() == [-2]
    for view, kind, says in (
        (torch.ones(1).expand(4), TypeError, "out is read-only"),
        (negated, TypeError, "out is read-only"),
        (torch.ones(4, device="meta"), TypeError, "out is on meta"),
        (torch._efficientzerotensor(4), TypeError, "out is a Tensor without memory of its own"),
        (torch.ones(4).to_sparse(), TypeError, "out is a tensor of layout torch.sparse_coo"),
    ):
        with pytest.raises(kind, match=says):
            mscomm.all_reduce(torch.ones(view.shape), out=view)
    parameter = torch.nn.Parameter(torch.ones(3))
    made = mscomm.all_reduce(parameter)
    assert type(made) is torch.Tensor and not made.requires_grad and made.tolist() == [1, 1, 1]
    columns = torch.arange(6.0).reshape(2, 3).T
    assert mscomm.all_reduce(columns).equal(columns) and mscomm.all_reduce(columns, out=columns) is columns
    for dtype in (torch.bool, torch.int8, torch.uint16, torch.float16, torch.bfloat16, torch.complex128):
        assert mscomm.all_reduce(torch.ones(3, dtype=dtype)).equal(torch.ones(3, dtype=dtype))
    with pytest.raises(TypeError, match=r"sum is not defined on float8_e4m3fn arrays"):
        mscomm.all_reduce(torch.ones(3, dtype=torch.float8_e4m3fn))
    with torch.inference_mode():
        y = torch.ones(3)
        assert mscomm.all_reduce(y, out=y) is y
    needed = torch.ones(3, requires_grad=True) * 2
    loss = (needed * needed).sum()
    mscomm.all_reduce_(needed.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@needs_torch
@ranks(2)
def test_tensors_without_elements(rank, group):
    import torch

    mscomm.all_reduce(torch.ones(1))  # the first call with a tensor adds a row to plain_types
    for shape in ((0,), (1, 0), (2, 0), (0, 3), (1, 1, 0)):
        x = torch.ones(shape)
        assert mscomm.all_reduce(x).shape == shape
        assert mscomm.all_gather(x).shape == (2 * shape[0], *shape[1:])
        assert mscomm.all_gather_v(x)[0].shape == (2 * shape[0], *shape[1:])
        assert mscomm.all_gather(x, out=torch.ones((2 * shape[0], *shape[1:]))).numel() == 0
        assert (mscomm.gather(x, 1) is None) == (rank == 0)


@needs_torch
@ranks(2)
def test_a_started_call_uses_the_memory_that_a_tensor_had(rank, group):
    import torch

    calls = {
        "all_reduce": lambda x: mscomm.all_reduce(x, async_op=True),
        "reduce_scatter_v": lambda x: mscomm.reduce_scatter_v(x, [0, 1 << 20], async_op=True),
        "all_gather_v": lambda x: mscomm.all_gather_v(x, async_op=True),
        "all_reduce_many": lambda x: mscomm.all_reduce_many([x, torch.ones(1)], async_op=True),
    }
    for call in calls.values():
        x = torch.ones(1 << 20)
        if rank == 1:
            mscomm.recv(np.empty(1), 0)  # wait until rank 0 has started its call, which cannot end without rank 1
        work = call(x)
        if rank == 0:
            x.data = torch.zeros(1)
            gc.collect()
            # These arrays overwrite the memory that x had, if that memory was freed too early.
            others = [np.full(1 << 20, 7, np.float32) for _ in range(4)]
            mscomm.send(np.ones(1), 1)
            del others
        got = work.wait()
        got = got[0] if isinstance(got, (tuple, list)) else got
        assert set(got.tolist()) <= {1, 2}


def test_odd_calls_of_one_rank(alone):
    assert mscomm.all_reduce_many([], "avg") == []
    for call in (lambda: mscomm.gather_v(whole, None), lambda: mscomm.gather_object(1, None)):
        with pytest.raises(TypeError, match="root None is not an integer"):
            call()

    class WithABackend(np.ndarray):
        backend = "mine"

    assert mscomm.all_reduce(np.ones(2).view(WithABackend)).tolist() == [1, 1]


def test_what_errors_make_raises_passes_through(monkeypatch):
    """Python code creates the exception for a failed call. If a signal handler raises an exception while that code is
    running, the caller must get the handler's exception.
    """

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    mscomm.init()
    mscomm.abort("enough")
    with monkeypatch.context() as patched:
        patched.setattr("mscomm.errors.make", interrupted)
        with pytest.raises(KeyboardInterrupt):
            mscomm.all_reduce(whole)
    with pytest.raises(mscomm.Aborted, match="enough"):
        mscomm.all_reduce(whole)
    mscomm.release()


def test_a_released_group_is_told(alone):
    call = alone.core.prepare(FUNCTION["all_reduce"], whole, op="sum")
    mscomm.release()
    with pytest.raises(RuntimeError, match="no job joined"):
        mscomm.all_reduce(whole)
    with pytest.raises(RuntimeError, match="group world was released"):
        alone.run(call, 1.0)
    mscomm.init()


def test_a_released_group_is_let_go():
    mscomm.init()
    mscomm.all_reduce(whole)
    group = weakref.ref(resolve(None))
    mscomm.release()
    gc.collect()
    assert group() is None


@ranks(3)
def test_ranks_with_different_kinds_of_arrays_meet(rank, group):
    """In most calls, one rank passes a strided array and the others a plain one. The calls must match, and all results
    must have the same bits.
    """
    rng = np.random.default_rng(rank)
    for op in ("sum", "avg", "max", "prod"):
        for count in (1, 12, 13, 5000, 200_000):
            x = rng.standard_normal(2 * count).astype(np.float32)[::2]
            plain = np.ascontiguousarray(x)
            results = [
                mscomm.all_reduce(x if rank == turn else plain, op, out=None if rank % 2 else np.empty_like(plain))
                for turn in range(4)
            ]
            assert len({one.tobytes() for one in results}) == 1
    for name, given in (
        ("all_gather", {}),
        ("reduce_scatter", {"op": "max"}),
        ("broadcast", {"root": 1}),
        ("all_to_all", {}),
    ):
        x = rng.standard_normal(600)[::2]
        expected = getattr(mscomm, name)(x, timeout=60, **given)
        for turn in range(3):
            found = getattr(mscomm, name)(x if rank == turn else np.ascontiguousarray(x), **given)
            assert found.tobytes() == expected.tobytes()
    mscomm.barrier(timeout=60 if rank == 0 else None)


@ranks(2)
def test_a_mismatch_names_both_calls(rank, group):
    x = np.ones(4)
    with pytest.raises(mscomm.Mismatch, match=r"rank 0 called all_reduce #1 \(float64\[4\], sum\); rank 1 called"):
        mscomm.all_reduce(x, "sum" if rank == 0 else "max", timeout=None if rank == 0 else 60)
    with pytest.raises(mscomm.Mismatch):  # every later call also raises Mismatch
        mscomm.all_reduce(x)


@ranks(2)
def test_a_signal_handler_that_raises_ends_it(rank, group):
    mscomm.all_reduce(np.ones(1))
    everybody_is_here()
    if rank == 1:
        until_told("stopped")
        with pytest.raises(mscomm.Aborted, match=r"rank 0 .* was interrupted in all_reduce #2 "):
            mscomm.all_reduce(np.ones(1))  # may succeed, because rank 0 was interrupted after it had entered this call
            mscomm.all_reduce(np.ones(1))
        return

    def stop(*_: Any) -> None:
        raise TimeoutError("enough of this")

    signal.signal(signal.SIGUSR1, stop)
    main = threading.get_ident()
    when_inside(2, lambda: signal.pthread_kill(main, signal.SIGUSR1))
    with pytest.raises(TimeoutError, match="enough of this"):
        mscomm.all_reduce(np.ones(1))
    tell("stopped")


@ranks(2)
def test_a_call_after_those_beside_it(rank, group):
    works = [mscomm.all_reduce(np.full(100_000, k, np.float64), async_op=True) for k in range(4)]
    assert mscomm.all_reduce(np.ones(1))[0] == 2
    assert [work.wait()[0] for work in works] == [0, 2, 4, 6]
    assert resolve(None).core.where()[0] == 5
