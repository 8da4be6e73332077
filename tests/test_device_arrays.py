"""Calls on the stand-ins' device arrays. Their type has a row in plain_types, which makes calls faster. The row must
change nothing else.
"""

from __future__ import annotations

import importlib
import random
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
from fakes import device_array
from fakes.device_array import DeviceArray, compute
from functions import DTYPES, bits
from ranks import everybody_is_here
from rotated import seed

import mscomm
from mscomm import _core, arrays
from mscomm.arrays.numpy import CODES, known_code
from mscomm.collectives import FUNCTION
from mscomm.job import resolve

# For each function, the arguments of its call besides x.
CALLS: dict[str, dict[str, Any]] = {
    "all_reduce": {"op": "max"},
    "all_gather": {},
    "reduce_scatter": {"op": "sum"},
    "broadcast": {"root": 1},
    "all_to_all": {},
}


class Sub(DeviceArray):
    pass


@contextmanager
def row(**changed: Any) -> Iterator[None]:
    """Change the given fields of DeviceArray's row in plain_types, inside a with block."""
    before = arrays.plain_types[DeviceArray]
    arrays.plain_types[DeviceArray] = before._replace(**changed)
    try:
        yield
    finally:
        arrays.plain_types[DeviceArray] = before


@contextmanager
def no_row() -> Iterator[None]:
    """Act as if plain_types had no row for DeviceArray, as it has none for subclasses and for PyTorch before 2.10. For
    types without a row, calls use the slower function `memory`.
    """
    with row(plain=lambda x: None):
        yield


def known() -> None:
    """Let mscomm cache what it knows about the array type and the dtypes, as the first calls of a program do."""
    arrays.library(on_device(np.ones(1)), "x", "test")
    for dtype in DTYPES:
        known_code(np.dtype(dtype))


def all_reduce(x: Any, op: Any, out: Any) -> Any:
    return mscomm.all_reduce(x, op, out=out)


def outcome(call: Callable[[], Any]) -> tuple[Any, ...]:
    """Return what a call returns or raises, in a form that can be compared."""
    try:
        got = call()
    except (TypeError, ValueError) as error:
        return type(error), str(error)
    there = got.to_numpy()
    return type(got), there.dtype, there.shape, bits(there).tobytes()


def records() -> list[dict[str, Any]]:
    """Wait until the watching thread has reported that the last two calls have ended. Return their records."""
    core = resolve(None).core
    while any(call["state"] == "inside" for call in core.calls(core.where()[0] - 2)):
        time.sleep(0.0005)
    return core.calls(core.where()[0] - 2)


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.long)], ids=["few", "whole"])
@each_backend
@devices(2)
def test_a_row_changes_no_result_and_no_record(rank: int, group: None, backend: str, whole: bool) -> None:
    shapes = [(), (1,), (4, 3), (2, 1, 5), (0, 3), (1,) * 12, (4096, 5)]
    dice = random.Random(seed())
    for dtype in DTYPES:
        code = DTYPES.index(dtype)
        for name, options in CALLS.items():
            sums = "op" in options
            if sums and (
                not _core.supports(code, _core.ops.index(options["op"]))
                or resolve(None).refuses(code, _core.ops.index(options["op"]))
            ):
                continue
            divides = name in ("reduce_scatter", "all_to_all")
            fit = [shape for shape in shapes if not divides or (shape and shape[0] % 2 == 0)]
            for shape in fit if whole else dice.sample(fit, 2):
                x = on_device((np.random.default_rng(rank).integers(0, 2, shape)).astype(dtype))
                known()
                call = getattr(mscomm, name)
                with no_row():
                    general = outcome(lambda call=call, x=x, options=options: call(x, **options))
                short = outcome(lambda call=call, x=x, options=options: call(x, **options))
                case = (name, dtype, shape)
                assert short == general and general[0] is DeviceArray, case
                one, other = records()
                assert one["call"].replace(f"#{one['number']}", "") == other["call"].replace(f"#{other['number']}", "")
                assert one["call"].endswith("on the device)") and (one["state"], other["state"]) == ("done", "done")
    assert violations() == []


def wrong() -> dict[str, tuple[Any, ...]]:
    """Return named cases: arguments (x, op, out), at least one of which is wrong or needs special treatment."""
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
def test_a_row_changes_no_error(rank: int, group: None, backend: str) -> None:
    known()
    for name, case in wrong().items():
        outcomes = [outcome(lambda case=case: all_reduce(*case))]
        with no_row():
            outcomes.append(outcome(lambda case=case: all_reduce(*case)))
        # In these cases x and out overlap, so the first of the two calls may have changed x.
        if name in ("out strided", "the same memory"):
            assert outcomes[0][:3] == outcomes[1][:3], name
        else:
            assert outcomes[0] == outcomes[1], name
    assert violations() == []


@each_backend
@devices(2)
def test_parts_that_come_where_others_go(rank: int, group: None, backend: str) -> None:
    y = on_device(np.arange(2) + 10 * rank)
    assert (mscomm.all_to_all(y, out=y).to_numpy() == [rank, 10 + rank]).all()
    nothing = on_device(np.zeros((0, 3), np.float32))
    assert mscomm.all_to_all(nothing, out=nothing) is nothing
    assert violations() == []


@each_backend
@devices(3)
def test_ranks_with_a_timeout_and_without_meet(rank: int, group: None, backend: str) -> None:
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
        for turn in range(3):
            compute.add(x, rank + 1, delay=0.05)
            assert (mscomm.all_reduce(x).to_numpy() == 3 * (turn + 1)).all()
    assert violations() == []


@each_backend
@devices(2)
def test_the_threads_device_stays_what_it_was(rank: int, group: None, backend: str) -> None:
    runtime, current = device_array.runtime(), device_array.c_int()
    x = on_device(np.full(4, rank + 1, np.float32))
    known()
    for device in (rank, 3):
        with runtime.on(device):
            got = mscomm.all_reduce(x)
            runtime.call("cuCtxGetDevice" if backend == "nccl" else "aclrtGetDevice", device_array.byref(current))
        assert (current.value, got.device) == (device, rank) and (got.to_numpy() == 3).all()
    assert violations() == []


@devices(1, env={"MSCOMM_RECORD": "."})
def test_lines_that_are_to_be_noted_are_noted(rank: int, group: None) -> None:
    x = on_device(np.ones(4, np.float32))
    mscomm.all_reduce(x)
    assert resolve(None)._lines == {1: f"{__file__}:{sys._getframe().f_lineno - 1}"}


@each_backend
@devices(2)
def test_a_broken_group_and_a_released_one_say_the_same(rank: int, group: None, backend: str) -> None:
    x = on_device(np.ones(4, np.float32))
    known()
    mscomm.all_reduce(x)
    everybody_is_here()
    group = resolve(None)
    call = group.core.prepare(FUNCTION["all_reduce"], x, op="sum")
    mscomm.abort("enough")
    for options in ({}, {"timeout": 60}):
        with pytest.raises(mscomm.Aborted, match="enough"):
            mscomm.all_reduce(x, **options)
    mscomm.release()
    with pytest.raises((RuntimeError, mscomm.Aborted)):
        group.run(call, 60.0)


@devices(2, env={"FAKE_FAIL": "all_reduce:2:2@1"})
def test_what_the_library_refuses_names_the_call(rank: int, group: None) -> None:
    x = on_device(np.ones(4, np.float32))
    known()
    mscomm.all_reduce(x)
    with pytest.raises(mscomm.Error, match=r"rank 1 .*all_reduce #2 \(16 B\): ncclAllReduce"):
        for _ in range(1000):
            mscomm.all_reduce(x).to_numpy()


@devices(1)
def test_a_library_that_keeps_track_learns_what_was_written(rank: int, group: None) -> None:
    x, y = (on_device(np.ones(4, np.float32)) for _ in range(2))
    known()
    written: list[Any] = []
    with row(written=written.append):
        mscomm.all_reduce(x)
        assert written == []
        mscomm.all_reduce(x, out=y)
        mscomm.all_reduce(x, out=x)
    assert written == [(y,), (x,)]


@devices(1)
def test_what_a_library_raises_passes(rank: int, group: None) -> None:
    x = on_device(np.ones(4, np.float32))
    known()

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    for changed in ({"plain": interrupted}, {"empty": interrupted}, {"written": interrupted}):
        number = resolve(None).core.where()[0]
        with row(**changed), pytest.raises(KeyboardInterrupt):
            mscomm.all_reduce(x, out=x if "written" in changed else None)
        assert resolve(None).core.where()[0] == number + ("written" in changed)
    with row(plain=lambda _: None):
        assert (mscomm.all_reduce(x).to_numpy() == 1).all()


# -- what mscomm reads from CuPy's arrays, tested with a stand-in for CuPy


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
