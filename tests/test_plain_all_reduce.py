"""The short way of plain arrays into all_reduce: what goes by it, and that nobody can tell."""

from __future__ import annotations

import signal
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ranks import everybody_is_here, ranks, tell, until_told, when_inside

import mscomm
from mscomm import groups
from mscomm.group import Group


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
    yield groups.resolve(None)
    mscomm.release()


@pytest.mark.parametrize("case", OTHERS.values(), ids=OTHERS)
def test_what_is_not_plain_is_left_to_the_general_way(alone, case):
    before = alone.core.where()
    assert alone.all_reduce_plain(*case) is NotImplemented
    assert alone.core.where() == before


@pytest.mark.parametrize("x", PLAIN.values(), ids=PLAIN)
def test_plain_arrays_are_taken(alone, x):
    number = alone.core.where()[0]
    result = alone.all_reduce_plain(x, "sum", None)
    assert type(result) is np.ndarray and (result.dtype, result.shape) == (x.dtype, x.shape)
    assert result is not x and np.array_equal(result, x)
    out = np.zeros_like(x)
    assert alone.all_reduce_plain(x, "sum", out) is out and np.array_equal(out, x)
    if x.flags.writeable:
        assert alone.all_reduce_plain(x, "sum", x) is x
    assert alone.core.where()[0] == number + 2 + x.flags.writeable


def test_all_reduce_takes_it_unless_a_timeout_or_a_work_is_wanted(alone, monkeypatch):
    taken = []
    monkeypatch.setattr(Group, "all_reduce_plain", lambda _, *given: taken.append(given) or NotImplemented)
    mscomm.all_reduce(whole, "max", out=whole)
    assert [(op, out is whole) for _, op, out in taken] == [("max", True)]
    mscomm.all_reduce(whole, timeout=5)
    mscomm.all_reduce(whole, async_op=True).wait()
    assert len(taken) == 1


def test_what_errors_make_raises_passes_through(monkeypatch):
    """The exception of a failed call is made in Python, where the handler of a signal may raise another one."""

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
    mscomm.release()
    with pytest.raises(RuntimeError, match="no job joined"):
        mscomm.all_reduce(whole)
    with pytest.raises(RuntimeError, match="group world was released"):
        alone.all_reduce_plain(whole, "sum", None)
    mscomm.init()


@ranks(3)
def test_both_ways_meet(rank, group):
    """A rank whose array is strided goes the general way, the others the short one: the same call, the same bits."""
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


@ranks(2)
def test_a_mismatch_between_both_ways_names_both_calls(rank, group):
    x = np.ones(4)
    with pytest.raises(mscomm.Mismatch, match=r"rank 0 called all_reduce #1 \(float64\[4\], sum\); rank 1 called"):
        mscomm.all_reduce(x, "sum" if rank == 0 else "max", timeout=None if rank == 0 else 20)
    with pytest.raises(mscomm.Mismatch):  # as every later call
        mscomm.all_reduce(x)


@ranks(2)
def test_a_signal_handler_that_raises_ends_it(rank, group):
    mscomm.all_reduce(np.ones(1))
    everybody_is_here()
    if rank == 1:
        until_told("stopped")
        with pytest.raises(mscomm.Aborted, match=r"rank 0 .* was interrupted in all_reduce #2 "):
            mscomm.all_reduce(np.ones(1))  # rank 0 had arrived there: this rank may be through before it hears of it
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
    assert groups.resolve(None).core.where()[0] == 5
