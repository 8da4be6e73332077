"""The short way for plain arrays into the collectives: which calls take it, and that it changes no result."""

from __future__ import annotations

import gc
import signal
import threading
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ranks import everybody_is_here, ranks, tell, until_told, when_inside

import mscomm
from mscomm import _core
from mscomm.group import Group
from mscomm.job import resolve

WHAT = {name: code for code, name in enumerate(_core.collectives)}


def reduced(group: Group, x: Any, op: Any, out: Any) -> Any:
    return group.call_plain(WHAT["all_reduce"], x, op, -1, out)


class Sub(np.ndarray):
    pass


def misaligned(count: int) -> Any:
    return np.zeros(count * 4 + 1, np.uint8)[1:].view(np.float32)


def read_only(x: Any) -> Any:
    x.flags.writeable = False
    return x


whole = np.ones(8, np.float32)
OTHERS = {
    "a list": ([1.0], "sum", None),
    "a subclass": (np.ones(2).view(Sub), "sum", None),
    "a masked array": (np.ma.masked_array([1.0, 2.0], [True, False]), "sum", None),
    "other byte order": (np.ones(2, ">f4"), "sum", None),
    "fields": (np.ones(2, [("a", "f4")]), "sum", None),
    "strided": (whole[::2], "sum", None),
    "Fortran order": (np.asfortranarray(np.ones((2, 2))), "sum", None),
    "misaligned": (misaligned(2), "sum", None),
    "out read-only": (np.ones(2), "sum", read_only(np.ones(2))),
    "out overlaps": (whole[:4], "sum", whole[2:6]),
    "out of another shape": (np.ones(4), "sum", np.ones((2, 2))),
    "out of another type": (np.ones(4), "sum", np.ones(4, np.float32)),
    "out is no array": (np.ones(4), "sum", [1.0] * 4),
    "13 dimensions": (np.ones((1,) * 13), "sum", None),
    "longdouble": (np.ones(2, np.longdouble), "sum", None),
    "dates": (np.zeros(2, "M8[s]"), "sum", None),
    "objects": (np.array([1, None]), "sum", None),
    "texts": (np.array(["a"]), "sum", None),
    "bfloat16": (np.ones(2, ml_dtypes.bfloat16), "sum", None),
    "avg of integers": (np.ones(2, np.int32), "avg", None),
    "max of complex": (np.ones(2, np.complex64), "max", None),
    "no operation": (np.ones(2), "summ", None),
    "no text": (np.ones(2), 0, None),
    "a text that is none": (np.ones(2), "\ud800", None),
}
PLAIN = {
    "0-d": np.array(2.0),
    "no elements": np.ones((0, 3)),
    "bool": np.array([True, False]),
    "float16": np.ones(3, np.float16),
    "complex128": np.ones(3, np.complex128),
    "longlong": np.ones(3, np.longlong),
    "ulonglong": np.ones(3, np.ulonglong),
    "12 dimensions": np.ones((1,) * 12),
    "a view": whole[2:5],
    "read-only": read_only(np.ones(3)),
}


@pytest.fixture
def alone():
    mscomm.init()
    yield resolve(None)
    mscomm.release()


@pytest.mark.parametrize("case", OTHERS.values(), ids=OTHERS)
def test_what_is_not_plain_is_left_to_the_general_way(alone, case):
    before = alone.core.where()
    assert reduced(alone, *case) is NotImplemented
    assert alone.core.where() == before


@pytest.mark.parametrize("x", PLAIN.values(), ids=PLAIN)
def test_plain_arrays_are_taken(alone, x):
    number = alone.core.where()[0]
    result = reduced(alone, x, "sum", None)
    assert type(result) is np.ndarray and (result.dtype, result.shape) == (x.dtype, x.shape)
    assert result is not x and np.array_equal(result, x)
    out = np.zeros_like(x)
    assert reduced(alone, x, "sum", out) is out and np.array_equal(out, x)
    if x.flags.writeable:
        assert reduced(alone, x, "sum", x) is x
    assert alone.core.where()[0] == number + 2 + x.flags.writeable


CALLS = {
    "all_reduce": lambda **given: mscomm.all_reduce(whole, **given),
    "all_gather": lambda **given: mscomm.all_gather(whole, **given),
    "reduce_scatter": lambda **given: mscomm.reduce_scatter(whole, **given),
    "broadcast": lambda **given: mscomm.broadcast(whole, **given),
    "all_to_all": lambda **given: mscomm.all_to_all(whole, **given),
    "barrier": lambda **given: mscomm.barrier(**given),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_functions_take_it_unless_a_timeout_or_a_work_is_wanted(alone, monkeypatch, name):
    taken, call = [], alone.call_plain

    def noted(what: int, *given: Any) -> Any:
        result = call(what, *given)
        taken.append((what, result is not NotImplemented))
        return result

    monkeypatch.setattr(alone, "call_plain", noted)
    result = CALLS[name]()
    assert result is None if name == "barrier" else np.array_equal(result, whole)
    assert taken == [(WHAT[name], True)]
    CALLS[name](timeout=5)
    CALLS[name](async_op=True).wait()
    assert len(taken) == 1


@ranks(3)
def test_what_the_general_way_refuses_or_knows_better(rank, group):
    there = resolve(None)
    x = np.arange(6.0)
    call = there.call_plain
    for case in (
        ("reduce_scatter", np.ones(4), "sum", -1, None),  # cannot be split into three parts
        ("reduce_scatter", np.array(1.0), "sum", -1, None),
        ("reduce_scatter", x, "sum", -1, np.ones(6)),
        ("reduce_scatter", x, "sum", -1, x[2 * rank : 2 * rank + 2]),  # in place
        ("reduce_scatter", x, "avg ", -1, None),
        ("all_to_all", np.ones(4), None, -1, None),
        ("all_to_all", np.array(1.0), None, -1, None),
        ("all_to_all", x, None, -1, x[::-1]),
        ("all_gather", x[2 * rank : 2 * rank + 2], None, -1, x),  # in place
        ("all_gather", x, None, -1, np.ones(6)),
        ("all_gather", np.empty((1 << 62, 0), np.uint8), None, -1, None),  # three times that overflows
        ("broadcast", x, None, 3, None),
        ("broadcast", x, None, -1, None),
        ("broadcast", x, None, 1 << 40, None),
        ("broadcast", x, None, -(1 << 80), None),
        ("broadcast", x, None, "0", None),
        ("broadcast", x, None, True, None),
        ("broadcast", read_only(np.ones(2)), None, 0, read_only(np.ones(2))),
        ("all_reduce", x, "sum", 0, None),
        ("reduce", x, "sum", 0, None),
        ("gather", x, None, 0, None),
        ("scatter", x, None, 0, None),
    ):
        name, *given = case
        assert call(WHAT[name], *given) is NotImplemented, case
    assert call(-1, x, "sum", -1, None) is call(9, x, "sum", -1, None) is NotImplemented
    assert call(1 << 70, x, "sum", -1, None) is call(None, x, "sum", -1, None) is NotImplemented
    assert there.core.where()[0] == 0
    same = np.full((3, 2), rank, np.int32)
    assert np.array_equal(call(WHAT["all_to_all"], same, None, -1, same), np.repeat(np.arange(3), 2).reshape(3, 2))
    assert np.array_equal(call(WHAT["all_gather"], np.array(rank), None, -1, None), np.arange(3))
    assert np.array_equal(call(WHAT["all_gather"], np.full((1, 2), rank), None, -1, None), same)
    assert np.array_equal(call(WHAT["reduce_scatter"], x, "sum", -1, None), 3 * x[2 * rank : 2 * rank + 2])
    assert np.array_equal(call(WHAT["broadcast"], x + rank, None, 2, None), x + 2)
    assert call(WHAT["barrier"], None, None, -1, None) is None
    assert there.core.where()[0] == 6


def test_what_errors_make_raises_passes_through(monkeypatch):
    """A failed call's exception is made in Python code, in which a signal handler may raise another exception."""

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
    call = alone.call_plain
    mscomm.release()
    with pytest.raises(RuntimeError, match="no job joined"):
        mscomm.all_reduce(whole)
    with pytest.raises(RuntimeError, match="group world was released"):
        call(WHAT["all_reduce"], whole, "sum", -1, None)
    assert reduced(alone, whole, "sum", None) is NotImplemented
    mscomm.init()


def test_a_released_group_is_let_go():
    mscomm.init()
    mscomm.all_reduce(whole)
    group = weakref.ref(resolve(None))
    mscomm.release()
    gc.collect()
    assert group() is None


@ranks(3)
def test_both_ways_meet(rank, group):
    """A rank with a strided array takes the general way, the others the short one: same calls, same bits."""
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
def test_a_mismatch_between_both_ways_names_both_calls(rank, group):
    x = np.ones(4)
    with pytest.raises(mscomm.Mismatch, match=r"rank 0 called all_reduce #1 \(float64\[4\], sum\); rank 1 called"):
        mscomm.all_reduce(x, "sum" if rank == 0 else "max", timeout=None if rank == 0 else 20)
    with pytest.raises(mscomm.Mismatch):  # every later call raises it too
        mscomm.all_reduce(x)


@ranks(2)
def test_a_signal_handler_that_raises_ends_it(rank, group):
    mscomm.all_reduce(np.ones(1))
    everybody_is_here()
    if rank == 1:
        until_told("stopped")
        with pytest.raises(mscomm.Aborted, match=r"rank 0 .* was interrupted in all_reduce #2 "):
            mscomm.all_reduce(np.ones(1))  # rank 0 had arrived: this rank may complete #2 before it hears of it
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
