"""The short way for plain device arrays: which calls take it, and that it changes no result. Over stand-ins."""

from __future__ import annotations

import importlib
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from devices import devices, each_backend, on_device, violations
from fakes import device_array, library
from fakes.device_array import DeviceArray, compute
from functions import DTYPES, bits
from ranks import everybody_is_here

import mscomm
from mscomm import _core, arrays
from mscomm.arrays.numpy import CODES, dtype_code
from mscomm.job import resolve

WHAT = {name: code for code, name in enumerate(_core.collectives)}
GENERAL = {"timeout": 60}  # with a timeout, a call goes the general way

# By name, the arguments of a call; each of these functions has a short way.
CALLS: dict[str, dict[str, Any]] = {
    "all_reduce": {"op": "max"},
    "all_gather": {},
    "reduce_scatter": {"op": "sum"},
    "broadcast": {"root": 1},
    "all_to_all": {},
}


class Sub(DeviceArray):
    pass


def known(*given: Any) -> None:
    """Make the types known, as the first call does, which goes the general way."""
    for x in given:
        arrays.library(x, "x", "test")
        dtype_code(x.dtype)


def reduced(x: Any, op: Any = "sum", out: Any = None) -> Any:
    return resolve(None).call_plain(WHAT["all_reduce"], x, op, -1, out)


def all_reduce(x: Any, op: Any, out: Any, **more: Any) -> Any:
    return mscomm.all_reduce(x, op, out=out, **more)


@contextmanager
def noted() -> Iterator[list[tuple[str, bool]]]:
    """Note which functions tried the short way, and whether it took the call."""
    group, taken = resolve(None), []
    call = group.call_plain

    def call_plain(what: int, *given: Any) -> Any:
        result = call(what, *given)
        taken.append((_core.collectives[what], result is not NotImplemented))
        return result

    group.call_plain = call_plain
    try:
        yield taken
    finally:
        group.call_plain = call


def outcome(call: Callable[[], Any]) -> tuple[Any, ...]:
    """What a call returns or raises, in a form that can be compared."""
    try:
        got = call()
    except (TypeError, ValueError) as error:
        return type(error), str(error)
    there = got.to_numpy()
    return type(got), there.dtype, there.shape, bits(there).tobytes()


def records() -> list[dict[str, Any]]:
    """The records of the last two calls, once the watching thread has reported their end."""
    core = resolve(None).core
    while any(call["state"] == "inside" for call in core.calls(core.where()[0] - 2)):
        time.sleep(0.0005)
    return core.calls(core.where()[0] - 2)


@each_backend
@devices(2)
def test_the_functions_take_it_unless_more_is_wanted(rank: int, group: None, backend: str) -> None:
    x = on_device(np.arange(12, dtype=np.float32).reshape(4, 3))
    known(x)
    stream = device_array.new_stream(rank)
    for name, options in CALLS.items():
        call = getattr(mscomm, name)
        with noted() as taken:
            made = call(x, **options)
            assert call(x, **options, out=made) is made
            if name in ("all_reduce", "broadcast"):
                assert call(x.copy(), **options, out=x) is x
            assert taken == [(name, True)] * len(taken)
            call(x, **options, out=made, timeout=60)
            call(x, **options, out=made, stream=stream)
            call(x, **options, async_op=True).wait(timeout=60)
        assert len(taken) == (3 if name in ("all_reduce", "broadcast") else 2)
        mscomm.barrier()  # forgets the async call
    with noted() as taken:
        mscomm.all_reduce_(x)
        mscomm.barrier()
    assert taken == [("all_reduce", True), ("barrier", True)]
    assert violations() == []


@each_backend
@devices(2)
def test_a_type_and_a_dtype_are_known_after_their_first_call(rank: int, group: None, backend: str) -> None:
    x = on_device(np.ones(3, np.float32))
    with noted() as taken:
        for _ in range(3):
            mscomm.all_reduce(x)
    assert [short for _, short in taken][1:] == [True, True]


@each_backend
@devices(2)
def test_both_ways_give_the_same_and_leave_the_same_records(rank: int, group: None, backend: str) -> None:
    shapes = [(), (1,), (4, 3), (2, 1, 5), (0, 3), (1,) * 12, (4096, 5)]
    for dtype in DTYPES:
        code = DTYPES.index(dtype)
        for name, options in CALLS.items():
            sums = "op" in options
            if sums and (
                not _core.supports(code, _core.ops.index(options["op"]))
                or resolve(None).refuses(code, _core.ops.index(options["op"]))
            ):
                continue
            for shape in shapes:
                if name in ("reduce_scatter", "all_to_all") and (not shape or shape[0] % 2):
                    continue
                x = on_device((np.random.default_rng(rank).integers(0, 2, shape)).astype(dtype))
                known(x)
                call = getattr(mscomm, name)
                general = outcome(lambda call=call, x=x, options=options: call(x, **options, **GENERAL))
                with noted() as taken:
                    short = outcome(lambda call=call, x=x, options=options: call(x, **options))
                case = (name, dtype, shape)
                assert taken == [(name, True)] and short == general and general[0] is DeviceArray, case
                one, other = records()
                assert one["call"].replace(f"#{one['number']}", "") == other["call"].replace(f"#{other['number']}", "")
                assert one["call"].endswith("on the device)") and (one["state"], other["state"]) == ("done", "done")
    assert violations() == []


def wrong() -> dict[str, tuple[Any, ...]]:
    """Cases of x, op and out in which something is not plain, or is wrong."""
    x = on_device(np.ones((4, 2), np.float32))
    whole = on_device(np.ones(8, np.float32))
    elsewhere = DeviceArray.from_numpy(np.ones((4, 2), np.float32), device=3)
    y = on_device(np.ones((4, 2), np.float32))
    sub = Sub(y._memory, 0, y.shape, y.strides, y.dtype)
    return {
        "a list": ([1.0], "sum", None),
        "a subclass": (sub, "sum", None),
        "strided": (whole[::2], "sum", None),
        "transposed": (x.T, "sum", None),
        "of another device": (elsewhere, "sum", None),
        "float8": (on_device(np.ones(2, ml_dtypes.float8_e4m3fn)), "sum", None),
        "13 dimensions": (on_device(np.ones((1,) * 13, np.float32)), "sum", None),
        "out strided": (whole[:4], "sum", whole[::2]),
        "out on the CPU": (x, "sum", np.ones((4, 2), np.float32)),
        "x on the CPU": (np.ones((4, 2), np.float32), "sum", x),
        "out of another device": (x, "sum", elsewhere),
        "out of another shape": (x, "sum", whole),
        "out of another dtype": (x, "sum", on_device(np.ones((4, 2), np.int32))),
        "out a subclass": (x, "sum", sub),
        "out is no array": (x, "sum", [1.0]),
        "overlaps": (whole[:4], "sum", whole[2:6]),
        "the same memory": (whole[:4], "sum", whole[:4]),
        "avg of integers": (on_device(np.ones(2, np.int32)), "avg", None),
        "max of complex": (on_device(np.ones(2, np.complex64)), "max", None),
        "what the vendor refuses": (on_device(np.ones(2, np.int32)), "band", None),
        "a dtype that it refuses": (on_device(np.ones(2, np.uint16)), "sum", None),
        "no operation": (x, "summ", None),
        "no text": (x, 0, None),
    }


@each_backend
@devices(2)
def test_what_is_not_plain_goes_the_general_way_with_its_results_and_errors(
    rank: int, group: None, backend: str
) -> None:
    known(on_device(np.ones(1, np.float32)), on_device(np.ones(1, np.int32)), on_device(np.ones(1, np.complex64)))
    known(on_device(np.ones(1, np.uint16)))
    for name, case in wrong().items():
        before = resolve(None).core.where()[0]
        assert reduced(*case) is NotImplemented, name
        assert resolve(None).core.where()[0] == before, name
        outcomes = [outcome(lambda case=case, more=more: all_reduce(*case, **more)) for more in ({}, GENERAL)]
        if name in ("out strided", "the same memory"):  # the first call has changed x
            assert outcomes[0][:3] == outcomes[1][:3], name
        else:
            assert outcomes[0] == outcomes[1], name
    assert violations() == []


@each_backend
@devices(2)
def test_parts_that_do_not_divide_or_come_where_others_go(rank: int, group: None, backend: str) -> None:
    call = resolve(None).call_plain
    x = on_device(np.arange(6, dtype=np.float32))
    known(x)
    for case in (
        ("reduce_scatter", x[:3], "sum", -1, None),
        ("reduce_scatter", x, "sum", -1, x[3 * rank : 3 * rank + 3]),  # in place
        ("reduce_scatter", x, "sum", -1, x),
        ("all_gather", x[3 * rank : 3 * rank + 3], None, -1, x),  # in place
        ("all_to_all", x[:3], None, -1, None),
        ("all_to_all", x, None, -1, x),  # a copy of x is sent
        ("broadcast", x, None, 2, None),
        ("broadcast", x, None, -1, None),
        ("reduce", x, "sum", 0, None),
        ("gather", x, None, 0, None),
        ("scatter", x, None, 0, None),
    ):
        what, *given = case
        assert call(WHAT[what], *given) is NotImplemented, case
    assert resolve(None).core.where()[0] == 0
    y = on_device(np.arange(2) + 10 * rank)
    assert (mscomm.all_to_all(y, out=y).to_numpy() == [rank, 10 + rank]).all()
    nothing = on_device(np.zeros((0, 3), np.float32))
    assert call(WHAT["all_to_all"], nothing, None, -1, nothing) is nothing
    assert violations() == []


@each_backend
@devices(3)
def test_ranks_that_go_different_ways_meet(rank: int, group: None, backend: str) -> None:
    for turn in range(6):
        x = on_device(np.full(100, rank + 1, np.float32))
        out = None if turn % 2 else x
        got = mscomm.all_reduce(x, out=out, timeout=60 if rank == turn % 3 else None)
        assert (got.to_numpy() == 6).all()
    assert violations() == []


@each_backend
@devices(2)
def test_it_comes_after_what_the_stream_has_and_before_what_comes(rank: int, group: None, backend: str) -> None:
    with device_array.stream(device_array.new_stream(rank)):
        x = on_device(np.zeros(1000, np.float32))
        known(x)
        with noted() as taken:
            for turn in range(3):
                compute.add(x, rank + 1, delay=0.05)
                assert (mscomm.all_reduce(x).to_numpy() == 3 * (turn + 1)).all()
        assert all(short for _, short in taken)
    assert violations() == []


@each_backend
@devices(2)
def test_the_threads_device_stays_what_it_was(rank: int, group: None, backend: str) -> None:
    runtime, current = device_array.runtime(), device_array.c_int()
    x = on_device(np.full(4, rank + 1, np.float32))
    known(x)
    for device in (rank, 3):
        with runtime.on(device):
            got = mscomm.all_reduce(x)
            runtime.call("cuCtxGetDevice" if backend == "nccl" else "aclrtGetDevice", device_array.byref(current))
        assert (current.value, got.device) == (device, rank) and (got.to_numpy() == 3).all()
    assert violations() == []


@devices(2)
def test_a_call_after_those_beside_it_goes_the_general_way_once(rank: int, group: None) -> None:
    x = on_device(np.ones(4, np.float32))
    known(x)
    work = mscomm.all_reduce(x, async_op=True)
    with noted() as taken:
        mscomm.all_reduce(x)
        assert taken == [("all_reduce", False)]
        assert (work.wait(timeout=60).to_numpy() == 2).all()
        mscomm.all_reduce(x)
        mscomm.all_reduce(x)
    assert taken[-1] == ("all_reduce", True)


@devices(1, env={"MSCOMM_RECORD": "."})
def test_lines_that_are_to_be_noted_are_noted(rank: int, group: None) -> None:
    x = on_device(np.ones(4, np.float32))
    known(x)
    assert reduced(x) is NotImplemented
    mscomm.all_reduce(x)
    assert resolve(None)._lines == {1: f"{__file__}:{sys._getframe().f_lineno - 1}"}


@devices(1, init={"backend_name": "gloo"})
def test_a_job_of_the_cpu_has_no_device_for_it(rank: int, group: None) -> None:
    x = on_device(np.ones(4, np.float32))
    known(x)
    assert reduced(x) is NotImplemented


@each_backend
@devices(2)
def test_a_broken_group_and_a_released_one_say_the_same(rank: int, group: None, backend: str) -> None:
    x = on_device(np.ones(4, np.float32))
    known(x)
    mscomm.all_reduce(x)
    everybody_is_here()
    call = resolve(None).call_plain
    mscomm.abort("enough")
    for options in ({}, GENERAL):
        with pytest.raises(mscomm.Aborted, match="enough"):
            mscomm.all_reduce(x, **options)
    mscomm.release()
    with pytest.raises((RuntimeError, mscomm.Aborted)):
        call(WHAT["all_reduce"], x, "sum", -1, None)


@devices(2, env={"FAKE_FAIL": "all_reduce:2:2@1"})
def test_what_the_library_refuses_names_the_call(rank: int, group: None) -> None:
    x = on_device(np.ones(4, np.float32))
    known(x)
    mscomm.all_reduce(x)
    with noted() as taken, pytest.raises(mscomm.Error, match=r"rank 1 .*all_reduce #2 \(16 B\): ncclAllReduce"):
        for _ in range(1000):
            mscomm.all_reduce(x).to_numpy()
    assert all(short for _, short in taken)


@contextmanager
def row(**changed: Any) -> Iterator[None]:
    """Change the row for the tests' arrays."""
    table = arrays.plain_types("nccl")
    before = table[DeviceArray]
    table[DeviceArray] = before._replace(**changed)
    try:
        yield
    finally:
        table[DeviceArray] = before


@devices(1)
def test_a_library_that_keeps_track_learns_what_was_written(rank: int, group: None) -> None:
    x, y = (on_device(np.ones(4, np.float32)) for _ in range(2))
    known(x)
    written: list[Any] = []
    with row(written=written.append):
        mscomm.all_reduce(x)
        assert written == []
        mscomm.all_reduce(x, out=y)
        mscomm.all_reduce(x, out=x)
    assert written[0] is y and written[1] is x and len(written) == 2


@devices(1)
def test_what_a_library_raises_passes_and_what_makes_no_sense_is_left(rank: int, group: None) -> None:
    x = on_device(np.ones(4, np.float32))
    known(x)

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    for changed in ({"plain": interrupted}, {"empty": interrupted}, {"written": interrupted}):
        number = resolve(None).core.where()[0]
        with row(**changed), pytest.raises(KeyboardInterrupt):
            mscomm.all_reduce(x, out=x if "written" in changed else None)
        assert resolve(None).core.where()[0] == number + ("written" in changed)
    told = library.plain(x)
    assert told is not None
    for i, other in (
        (0, 1.5),
        (0, None),
        (1, [4]),
        (1, (4.5,)),
        (2, 99),
        (2, -1),
        (2, 1 << 70),
        (4, ""),
    ):
        with row(plain=lambda _, i=i, other=other: (*told[:i], other, *told[i + 1 :])):
            assert reduced(x) is NotImplemented, (i, other)
    for nonsense in (None, told[:4], list(told), 7):
        with row(plain=lambda _, nonsense=nonsense: nonsense):
            assert reduced(x) is NotImplemented
    assert (mscomm.all_reduce(x).to_numpy() == 1).all()


# -- what the libraries report


def test_what_pytorch_tells() -> None:
    torch = pytest.importorskip("torch")
    from mscomm.arrays import torch as ours

    class Tensor:
        """A tensor on a GPU, with just the attributes that are used."""

        layout, dtype, shape, is_cuda = torch.strided, torch.bfloat16, torch.Size((2, 3)), True

        def __init__(self, **changed: Any) -> None:
            self.__dict__.update(changed)

        is_contiguous = lambda self: self.__dict__.get("contiguous", True)  # noqa: E731
        is_conj = lambda self: self.__dict__.get("conj", False)  # noqa: E731
        is_neg = lambda self: self.__dict__.get("neg", False)  # noqa: E731
        data_ptr = lambda self: 1 << 20  # noqa: E731
        get_device = lambda self: 3  # noqa: E731

    before = ours._current_stream
    try:
        ours._current_stream = lambda index: 100 + index
        assert ours.plain(Tensor()) == (1 << 20, (2, 3), _core.dtypes().index("bfloat16"), 3, 103)
    finally:
        ours._current_stream = before
    for changed in (
        {"is_cuda": False},
        {"layout": torch.sparse_coo},
        {"contiguous": False},
        {"conj": True},
        {"neg": True},
        {"dtype": torch.float8_e4m3fn},
    ):
        assert ours.plain(Tensor(**changed)) is None, changed
    assert ours.plain(torch.ones(3)) is None
    assert set(ours.PLAIN) == {torch.Tensor, torch.nn.Parameter}
    made = ours.empty(torch.nn.Parameter(torch.ones(3, dtype=torch.float16)), (2, 0))
    assert (type(made), made.dtype, tuple(made.shape), made.requires_grad) == (
        torch.Tensor,
        torch.float16,
        (2, 0),
        False,
    )


def test_what_cupy_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("cupy")
    space = types.SimpleNamespace
    fake.ndarray = type("ndarray", (), {})  # type: ignore[attr-defined]
    fake.cuda = space(get_current_stream=lambda index: space(ptr=100 + index))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.delitem(sys.modules, "mscomm.arrays.cupy", raising=False)
    ours = importlib.import_module("mscomm.arrays.cupy")
    try:
        x = space(
            data=space(ptr=1 << 20, device_id=2),
            shape=(2, 3),
            dtype=np.dtype(np.float16),
            flags=space(c_contiguous=True),
        )
        monkeypatch.setitem(CODES, x.dtype, 9)
        assert ours.plain(x) == (1 << 20, (2, 3), 9, 2, 102)
        x.flags.c_contiguous = False
        assert ours.plain(x) is None
        x.flags.c_contiguous, x.dtype = True, np.dtype("M8[s]")
        assert ours.plain(x) is None
    finally:
        sys.modules.pop("mscomm.arrays.cupy", None)
