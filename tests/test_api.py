"""What the public functions accept and refuse. If one rank is enough, the job has one and no launcher."""

from __future__ import annotations

import gc
import http
import importlib
import inspect
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ranks import everybody_is_here, ranks

import mscomm
from mscomm import _core, collectives
from mscomm.group import Call
from mscomm.job import CPU_NAMES, WORLD_NAMES, resolve


def many(x: Any, *, out: Any = None, **options: Any) -> Any:
    """all_reduce_many with one array."""
    return mscomm.all_reduce_many([x], out=None if out is None else [out], **options)[0]


REDUCTIONS = {"all_reduce": mscomm.all_reduce, "all_reduce_many": many, "scan": mscomm.scan}
WITH_ARRAY = {**REDUCTIONS, "all_gather": mscomm.all_gather, "broadcast": mscomm.broadcast}
COLLECTIVES = {**WITH_ARRAY, "barrier": lambda _, **options: mscomm.barrier(**options)}


def each(table: dict[str, Any]) -> Any:
    return pytest.mark.parametrize("function", table.values(), ids=table)


@pytest.fixture
def alone():
    """A job of one."""
    mscomm.init()
    yield resolve(None)
    mscomm.release()


@pytest.fixture
def unharmed(alone):
    """A job of one in which the test's calls must send nothing: they use no call number, and the next call works."""
    before = alone.core.where()
    yield alone
    assert alone.core.where() == before
    assert mscomm.all_reduce(np.float32([3])) == 3
    assert alone.core.where()[0] == before[0] + 1


# --- arguments that are not arrays ----------------------------------------------------------------------------------


@each(WITH_ARRAY)
@pytest.mark.parametrize("x", [[1, 2], (1.0,), None, "text", b"bytes", range(3), http.HTTPStatus.OK], ids=repr)
def test_what_is_no_array_is_refused_with_the_way_out(unharmed, function, x):
    with pytest.raises(TypeError, match=r"np\.asarray"):
        function(x)


@each(WITH_ARRAY)
def test_an_int_beyond_64_bits_and_a_scalar_of_text_are_refused(unharmed, function):
    for x in (1 << 63, -(1 << 63) - 1):
        with pytest.raises(OverflowError, match=r"(x|arrays\[0\]) is an int of 64 bits, the largest dtype is int64"):
            function(x)
    with pytest.raises(TypeError, match="float32"):
        function(np.str_("text"))


@each(REDUCTIONS)
def test_a_number_is_no_out(unharmed, function):
    with pytest.raises(TypeError, match=r"out(\[0\])? is read-only"):
        function(np.float64(1), out=2.0)


@each(WITH_ARRAY)
def test_a_masked_array_is_refused(unharmed, function):
    with pytest.raises(TypeError, match="MaskedArray"):
        function(np.ma.masked_array([1.0, 2.0], mask=[True, False]))


@each(WITH_ARRAY)
@pytest.mark.parametrize(
    "dtype",
    ["O", "S3", "U3", "M8[s]", "m8[s]", "g", "G", "V4", "f4,i4", ml_dtypes.float8_e5m2, ml_dtypes.int4],
    ids=str,
)
def test_a_dtype_that_the_core_does_not_have_is_refused_by_name(unharmed, function, dtype):
    x = np.empty(2, dtype)
    with pytest.raises(TypeError, match="float32"):  # the message lists the valid dtypes
        function(x)


@each(WITH_ARRAY)
@pytest.mark.parametrize("dtype", [">f4", ">i2", ">c16"])
def test_big_endian_elements_are_refused_with_the_way_out(unharmed, function, dtype):
    with pytest.raises(TypeError, match=r"big-endian.*np\.asarray"):
        function(np.ones(2, dtype))


def test_a_list_of_arrays_with_a_wrong_one_is_refused_by_its_place(unharmed):
    with pytest.raises(TypeError, match=r"arrays\[1\]"):
        mscomm.all_reduce_many([np.ones(2), [5]])


@pytest.mark.parametrize("kind", [np.matrix, np.recarray, np.memmap])
def test_subclasses_of_ndarray_are_arrays(alone, tmp_path, kind):
    plain = np.arange(6.0).reshape(2, 3)
    if kind is np.memmap:
        x: Any = np.memmap(tmp_path / "x", dtype=float, mode="w+", shape=plain.shape)
        x[...] = plain
    else:
        x = plain.view(kind)
    assert np.array_equal(mscomm.all_reduce(x), plain)


# --- out ------------------------------------------------------------------------------------------------------------


@each(WITH_ARRAY)
def test_out_receives_the_result_and_is_returned(alone, function):
    x, out = np.arange(4.0), np.zeros(4)
    assert function(x, out=out) is out
    assert (out == x).all()


@each(WITH_ARRAY)
def test_out_may_be_x(alone, function):
    x = np.arange(4.0)
    assert function(x, out=x) is x
    assert (x == np.arange(4.0)).all()


@each(WITH_ARRAY)
def test_out_may_be_another_view_of_all_of_x(alone, function):
    x = np.arange(4.0)
    function(x, out=x[:])
    assert (x == np.arange(4.0)).all()


@each(WITH_ARRAY)
def test_without_out_the_result_is_a_new_array(alone, function):
    x = np.arange(4.0)
    assert not np.shares_memory(function(x), x)


@each(WITH_ARRAY)
def test_a_read_only_out_is_refused(unharmed, function):
    out = np.zeros(4)
    out.flags.writeable = False
    with pytest.raises(TypeError, match="read-only"):
        function(np.ones(4), out=out)


@each(WITH_ARRAY)
@pytest.mark.parametrize("shape", [(3,), (5,), (), (4, 1), (1, 4), (2, 2), (0,)], ids=str)
def test_an_out_of_another_shape_is_refused(unharmed, function, shape):
    with pytest.raises(ValueError, match="shape"):
        function(np.ones(4), out=np.zeros(shape))


@each(WITH_ARRAY)
@pytest.mark.parametrize("dtype", ["f4", "i8", "c16"])
def test_an_out_of_another_dtype_is_refused(unharmed, function, dtype):
    with pytest.raises(TypeError, match="dtype"):
        function(np.ones(4), out=np.zeros(4, dtype))


@each(WITH_ARRAY)
def test_an_out_that_is_no_array_is_refused(unharmed, function):
    with pytest.raises(TypeError, match="out"):
        function(np.ones(4), out=[0.0] * 4)


@each(WITH_ARRAY)
@pytest.mark.parametrize(
    ("x", "out"), [(np.s_[0:4], np.s_[1:5]), (np.s_[0:4], np.s_[3::-1]), (np.s_[0:8:2], np.s_[0:4])], ids=repr
)
def test_an_out_that_overlaps_x_in_part_is_refused(unharmed, function, x, out):
    memory = np.ones(8)
    with pytest.raises(ValueError, match="overlap"):
        function(memory[x], out=memory[out])


@each(WITH_ARRAY)
def test_interleaved_arrays_do_not_overlap(alone, function):
    memory = np.arange(8.0)
    function(memory[::2], out=memory[1::2])
    assert memory.tolist() == [0, 0, 2, 2, 4, 4, 6, 6]


@ranks(2)
def test_all_gather_wants_an_out_n_times_as_long(rank, group):
    for shape in ((4,), (2, 4), (9,)):
        with pytest.raises(ValueError, match=r"\(8,\)"):
            mscomm.all_gather(np.ones(4), out=np.zeros(shape))
    mscomm.barrier()


@ranks(2)
def test_all_gather_refuses_an_out_that_contains_x(rank, group):
    memory = np.zeros(8)
    with pytest.raises(ValueError, match="overlap"):
        mscomm.all_gather(memory[4 * rank :][1:4], out=memory[:6])
    mscomm.barrier()


def test_all_reduce_many_wants_one_out_for_each_array(unharmed):
    with pytest.raises(ValueError, match="1 arrays, arrays has 2"):
        mscomm.all_reduce_many([np.ones(2), np.ones(2)], out=[np.ones(2)])


def test_short_forms_work_in_place(alone):
    x = np.arange(3.0)
    assert mscomm.all_reduce_(x) is x
    assert mscomm.broadcast_(x) is x


# --- op, root, group, timeout, shape --------------------------------------------------------------------------------


@each(REDUCTIONS)
@pytest.mark.parametrize("op", ["add", "SUM", "", None, 0, np.add, ["sum"]], ids=repr)
def test_an_unknown_op_is_refused_with_those_that_there_are(unharmed, function, op):
    with pytest.raises((ValueError, TypeError), match=", ".join(_core.ops)):
        function(np.ones(2), op=op)


@each(REDUCTIONS)
@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        (dtype, op)
        for place, dtype in enumerate(_core.dtypes())
        for code, op in enumerate(_core.ops)
        if not _core.supports(place, code)
    ],
)
def test_an_op_that_a_dtype_has_not_is_refused(unharmed, function, dtype, op):
    x = np.ones(2, getattr(ml_dtypes, dtype, dtype))
    with pytest.raises(TypeError, match=f"{op} .*{dtype}"):
        function(x, op=op)


@pytest.mark.parametrize("dtype", ["bool", "int32", "uint8"])
def test_an_average_of_integers_is_refused(unharmed, dtype):
    with pytest.raises(TypeError, match="avg"):
        mscomm.all_reduce(np.ones(2, dtype), "avg")


@pytest.mark.parametrize("function", [mscomm.scan, mscomm.exscan])
def test_a_running_average_is_refused(unharmed, function):
    with pytest.raises(ValueError, match=f"{function.__name__}: op avg would divide by another number on each rank"):
        function(np.ones(2), "avg")


def test_a_scan_of_one_rank(alone):
    x = np.float32([2, 3])
    assert mscomm.scan(x).tolist() == [2, 3] and mscomm.exscan(x, "prod").tolist() == [1, 1]
    assert mscomm.exscan(x, "min", out=x) is x and x.tolist() == [np.inf, np.inf]


@pytest.mark.parametrize("op", ["min", "max"])
def test_complex_numbers_have_no_order(unharmed, op):
    with pytest.raises(TypeError, match=op):
        mscomm.all_reduce(np.ones(2, complex), op)


@pytest.mark.parametrize("root", [1, -1, 1 << 40])
def test_a_root_outside_the_group_is_refused(unharmed, root):
    with pytest.raises(ValueError, match="root"):
        mscomm.broadcast(np.ones(2), root)


@pytest.mark.parametrize("root", ["0", 0.0, None, [0]], ids=repr)
def test_a_root_that_is_no_integer_is_refused(unharmed, root):
    with pytest.raises(TypeError):
        mscomm.broadcast(np.ones(2), root)


@each(COLLECTIVES)
def test_a_group_that_nobody_made_is_refused(unharmed, function):
    with pytest.raises(ValueError, match="nobody"):
        function(np.ones(2), group="nobody")


@each(COLLECTIVES)
@pytest.mark.parametrize("group", [0, ["world"], b"world", np.ones(1), np.ones(2)], ids=repr)
def test_what_is_no_group_is_refused(unharmed, function, group):
    with pytest.raises(TypeError, match="group"):
        function(np.ones(2), group=group)


@pytest.mark.parametrize("name", [None, *WORLD_NAMES])
def test_the_world_has_its_name_of_every_backend(alone, name):
    assert mscomm.get_group_size(name) == 1
    mscomm.barrier(group=name)


@each(COLLECTIVES)
@pytest.mark.parametrize(
    "timeout", [0, -0.5, float("nan"), -float("inf"), timedelta(0), -timedelta(seconds=1)], ids=repr
)
def test_a_timeout_that_is_not_more_than_zero_is_refused(unharmed, function, timeout):
    with pytest.raises(ValueError, match="timeout"):
        function(np.ones(2), timeout=timeout)


@each(COLLECTIVES)
@pytest.mark.parametrize("timeout", ["soon", [1], object], ids=repr)
def test_a_timeout_that_is_no_time_is_refused(unharmed, function, timeout):
    with pytest.raises(TypeError, match="timeout"):
        function(np.ones(2), timeout=timeout)


@each(COLLECTIVES)
@pytest.mark.parametrize("timeout", [1, 0.5, np.float32(1), timedelta(seconds=1), float("inf"), None], ids=repr)
def test_seconds_and_timedeltas_are_timeouts(alone, function, timeout):
    function(np.ones(2), timeout=timeout)


def test_more_dimensions_than_the_core_compares_are_refused(unharmed):
    with pytest.raises(ValueError, match="12 dimensions"):
        mscomm.all_reduce(np.ones((1,) * 13))


@pytest.mark.parametrize("function", [mscomm.empty, mscomm.zeros])
@pytest.mark.parametrize("shape", [-1, (2, -1), [-3]], ids=repr)
def test_a_negative_shape_is_refused(unharmed, function, shape):
    with pytest.raises(ValueError, match="negative"):
        function(shape)


@pytest.mark.parametrize("function", [mscomm.empty, mscomm.zeros])
@pytest.mark.parametrize("shape", [1.5, "3", (2.0,), None], ids=repr)
def test_a_shape_that_is_not_of_integers_is_refused(unharmed, function, shape):
    with pytest.raises(TypeError):
        function(shape)


@pytest.mark.parametrize("function", [mscomm.empty, mscomm.zeros])
@pytest.mark.parametrize("dtype", [object, ">f4", "U3", "g"])
def test_memory_for_elements_that_the_core_does_not_have_is_refused(unharmed, function, dtype):
    with pytest.raises(TypeError):
        function(2, dtype)


@pytest.mark.parametrize("function", [mscomm.all_reduce, mscomm.all_gather, mscomm.broadcast, mscomm.all_reduce_many])
def test_out_goes_by_name(unharmed, function):
    with pytest.raises(TypeError, match="positional"):
        function(np.ones(2), *[0] * (function is not mscomm.all_gather), np.ones(2))


def refused_calls() -> list[Any]:
    return [
        lambda: mscomm.all_reduce([1]),
        lambda: mscomm.all_reduce(np.ones(2), "add"),
        lambda: mscomm.barrier(timeout=0),
    ]


@ranks(2)
def test_wrong_arguments_on_one_rank_break_nothing(rank, group):
    world = resolve(None)
    if rank == 1:
        for wrong in refused_calls():
            with pytest.raises((TypeError, ValueError)):
                wrong()
    assert world.core.where()[0] == 0
    assert mscomm.all_reduce(np.float32([1]))[0] == 2


# --- init and release -----------------------------------------------------------------------------------------------

NEEDS_A_JOB = {
    **WITH_ARRAY,
    **{
        function.__name__: lambda _, function=function: function()
        for function in (
            mscomm.barrier,
            mscomm.get_backend,
            mscomm.get_group_size,
            mscomm.get_launcher,
            mscomm.get_local_rank,
            mscomm.get_local_rank_size,
            mscomm.get_rank,
        )
    },
    "abort": lambda _: mscomm.abort("because"),
}


@each(NEEDS_A_JOB)
def test_before_init_every_function_says_what_to_do(function):
    with pytest.raises(RuntimeError, match=r"mscomm\.init\(\)"):
        function(np.ones(2))


@each(NEEDS_A_JOB)
def test_after_release_every_function_says_what_to_do(function):
    mscomm.init()
    mscomm.release()
    with pytest.raises(RuntimeError, match=r"mscomm\.init\(\)"):
        function(np.ones(2))


def test_is_initialized_from_init_to_release():
    assert not mscomm.is_initialized()
    mscomm.init()
    assert mscomm.is_initialized()
    mscomm.release()
    assert not mscomm.is_initialized()


def test_release_without_a_job_does_nothing():
    mscomm.release()
    mscomm.release()


def test_init_again_with_the_same_backend_does_nothing(alone):
    for name in (None, *CPU_NAMES):
        mscomm.init(name)
    assert resolve(None) is alone


def test_init_again_with_another_backend_is_an_error(alone, monkeypatch):
    with pytest.raises(RuntimeError, match=r'init\("nccl"\): this process has joined with backend cpu; call release'):
        mscomm.init("nccl")


@pytest.mark.parametrize("name", ["nccl", "hccl"])
def test_a_backend_that_is_not_here_is_named_at_once(name):
    began = time.monotonic()
    with pytest.raises(mscomm.BackendUnavailable, match=name):
        mscomm.init(name)
    assert time.monotonic() - began < 1
    assert not mscomm.is_initialized()


@pytest.mark.parametrize("name", ["mpi", "", "NCCL", 5], ids=repr)
def test_an_unknown_backend_is_refused_with_those_that_there_are(name):
    with pytest.raises(ValueError, match="gloo"):
        mscomm.init(name)
    assert not mscomm.is_initialized()


@pytest.mark.parametrize("timeout", [0, -1, "soon"], ids=repr)
def test_init_refuses_a_timeout_that_is_none(timeout):
    with pytest.raises((TypeError, ValueError), match="timeout"):
        mscomm.init(timeout=timeout)
    assert not mscomm.is_initialized()


def test_after_release_one_can_init_again():
    for _ in range(3):
        mscomm.init()
        assert mscomm.all_reduce(np.float32([2])) == 2
        mscomm.release()


def test_memory_outlives_the_job():
    mscomm.init()
    x = mscomm.zeros(5)
    mscomm.release()
    x += 1
    assert x.tolist() == [1] * 5


def test_a_job_of_one_says_who_it_is(alone):
    assert (mscomm.get_rank(), mscomm.get_group_size(), mscomm.get_world_size()) == (0, 1, 1)
    assert (mscomm.get_local_rank(), mscomm.get_local_rank_size()) == (0, 1)
    assert (mscomm.get_backend(), mscomm.get_launcher()) == ("cpu", "none")


@ranks(3)
def test_ranks_know_their_places(rank, group):
    assert mscomm.get_rank() == int(os.environ["MSCOMM_RANK"])
    assert (mscomm.get_group_size(), mscomm.get_world_size()) == (3, 3)
    assert (mscomm.get_local_rank(), mscomm.get_local_rank_size()) == (rank, 3)
    assert (mscomm.get_backend(), mscomm.get_launcher()) == ("cpu", "mscomm run")


# --- shared memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [mscomm.empty, mscomm.zeros])
@pytest.mark.parametrize(
    ("shape", "full"), [(3, (3,)), ((), ()), ((2, 3), (2, 3)), ([4], (4,)), (0, (0,)), (np.int64(2), (2,))], ids=repr
)
@pytest.mark.parametrize("dtype", _core.dtypes())
def test_memory_has_the_shape_and_dtype_that_were_asked_for(function, shape, full, dtype):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    x = function(shape, dtype)
    assert (x.shape, x.dtype) == (full, dtype)
    assert x.flags.carray


@ranks(2)
def test_shared_memory_has_the_shape_and_dtype_that_were_asked_for(rank, group):
    for name in _core.dtypes():
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        for shape in ((), (0,), (3,), (2, 0, 2), (2, 3)):
            x = mscomm.empty(shape, dtype)
            assert (x.shape, x.dtype) == (shape, dtype)
            assert x.flags.carray and x.ctypes.data % 64 == 0


@ranks(2)
def test_zeros_clears_memory_that_was_used_before(rank, group):
    x = mscomm.empty(1000)
    x[...] = 7
    del x
    assert not mscomm.zeros(1000).any()


@ranks(2)
def test_a_view_keeps_shared_memory_alive(rank, group):
    heap = resolve(None).epoch.heap
    x = mscomm.zeros(1000)
    x[500] = rank + 1
    part = x[500:600].reshape(10, 10).T
    del x
    gc.collect()
    assert heap.in_use() >= 4000
    mscomm.empty(1000)[...] = -1  # would get x's memory if that had been freed
    assert part[0, 0] == rank + 1
    assert mscomm.all_reduce(part)[0, 0] == 1 + 2


@ranks(2)
def test_shared_memory_is_given_back_with_the_last_array(rank, group):
    heap = resolve(None).epoch.heap
    before = heap.in_use()  # the memory that the group of all ranks itself uses
    arrays = [mscomm.empty(size) for size in (0, 1, 1000, 1 << 20)]
    assert heap.in_use() >= before + 4 * (1001 + (1 << 20))
    mscomm.all_reduce_many(arrays)
    results = [mscomm.all_reduce(x, out=mscomm.empty(x.shape)) for x in arrays]
    del arrays, results
    resolve(None).buckets.clear()  # the fused call keeps a bucket for the next call
    gc.collect()
    assert heap.in_use() == before


@ranks(2)
def test_shared_memory_outlives_the_job(rank, group):
    x = mscomm.zeros(1000)
    mscomm.release()
    x += rank
    assert (x == rank).all()


# --- fork -----------------------------------------------------------------------------------------------------------


def in_a_forked_child(body: Any) -> str:
    """The text of the error that body raises in a forked child."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            body()
            text = "nothing was raised"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writable, text.encode())
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


@ranks(2)
def test_a_forked_child_is_no_rank_and_its_parent_goes_on(rank, group):
    x = mscomm.zeros(3)
    for call in (mscomm.barrier, mscomm.get_rank, lambda: mscomm.all_reduce(x)):
        assert in_a_forked_child(call).startswith("RuntimeError: mscomm: this process was forked from")
    core = resolve(None).core
    barrier = _core.collectives.index("barrier")
    call = Call(barrier).arguments(1.0, 0)
    assert in_a_forked_child(lambda: core.run(*call)).startswith("RuntimeError: mscomm:")
    assert mscomm.all_reduce(np.float32([rank]))[0] == 1


@ranks(2)
def test_a_forked_child_that_ends_takes_nobody_with_it(rank, group):
    child = os.fork()
    if child == 0:
        sys.exit(0)  # runs exit handlers, also mscomm's
    os.waitpid(child, 0)
    assert mscomm.all_reduce(np.float32([rank]))[0] == 1


@ranks(2)
def test_a_forked_child_ends_though_threads_of_the_parent_wait(rank, group):
    """The child must not wait for its copies of the parent's threads: the group's worker, and one in Work.wait."""
    x = np.float32([rank])
    assert mscomm.all_reduce(x, async_op=True).wait()[0] == 1
    if rank == 1:
        time.sleep(1)
    work = mscomm.all_reduce(x, async_op=True)
    waiter = threading.Thread(target=work.wait)
    waiter.start()
    for _ in range(5):
        time.sleep(0.01)
        child = os.fork()
        if child == 0:
            del work, waiter
            gc.collect()
            sys.exit(0)
        assert ends_within(10, child)
    waiter.join()
    assert work.wait()[0] == 1


def ends_within(seconds: float, child: int) -> bool:
    """Whether the process ends by itself with 0 within this time."""
    life = os.pidfd_open(child)
    ended = select.select([life], [], [], seconds)[0]
    os.close(life)
    if not ended:
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1] == 0 and bool(ended)


# --- threads --------------------------------------------------------------------------------------------------------


@ranks(2)
def test_two_threads_of_each_rank_may_call_at_once(rank, group):
    calls, wrong = 200, []

    def call() -> None:
        try:
            for _ in range(calls):
                assert (mscomm.all_reduce(np.full(1000, rank + 1.0)) == 1 + 2).all()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert resolve(None).core.where()[0] == 2 * calls


EXITS = """
import sys, threading, time
import numpy as np
import mscomm
mscomm.init()
beside = {
    "recv": lambda: mscomm.recv(np.ones(3), 0),
    "wait": lambda: mscomm.recv(np.ones(3), 0, timeout=0.5, async_op=True).wait(),
    "many": lambda: [mscomm.barrier() for _ in iter(int, 1)],
}[sys.argv[1]]
threading.Thread(target=beside, daemon=True).start()
time.sleep(0.1)
"""


@pytest.mark.parametrize("what", ["recv", "wait", "many"])
@pytest.mark.parametrize("run", range(3))
def test_the_process_ends_well_while_a_daemon_thread_is_in_a_call(what, run):
    done = subprocess.run([sys.executable, "-c", EXITS, what], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# --- the package ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", mscomm.__all__)
def test_a_public_name_is_there_and_listed(name):
    assert getattr(mscomm, name) is not None
    assert name in dir(mscomm)


def is_ours(name: str) -> bool:
    value = getattr(mscomm, name)
    return callable(value) and str(value.__module__).startswith("mscomm")


@pytest.mark.parametrize("name", [name for name in mscomm.__all__ if is_ours(name)])
def test_a_public_function_or_class_says_what_it_is(name):
    first = (inspect.getdoc(getattr(mscomm, name)) or "").splitlines()[:1]
    assert first and first[0].endswith((".", ":")) and len(first[0].split()) > 3, f"{name}: {first}"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="all_redcue"):
        _ = mscomm.all_redcue


def test_the_module_knows_where_every_name_lives():
    for module, names in mscomm._WHERE.items():
        assert set(names) - mscomm._NEEDS_TORCH <= set(vars(importlib.import_module(f"mscomm.{module}")))


def test_importing_mscomm_costs_little_over_numpy(capsys):
    line = "import time, numpy; t = time.process_time(); import mscomm; mscomm.init; print(time.process_time() - t)"
    seconds = [float(subprocess.check_output([sys.executable, "-c", line])) for _ in range(7)]
    with capsys.disabled():
        print(f"\nimport mscomm over numpy: {1000 * min(seconds):.0f} ms of CPU time (least of 7)")
    assert min(seconds) < 0.150  # 0.050 on a quiet machine


@pytest.mark.parametrize("module", ["click", "rich", "psutil", "ml_dtypes", "torch", "mpi4py"])
def test_importing_mscomm_does_not_import(module):
    line = f"import sys, mscomm; mscomm.init(); mscomm.barrier(); sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", line]).returncode == 0


def test_a_star_import_needs_no_pytorch():
    line = "import sys; sys.modules['torch'] = None; from mscomm import *; all_reduce"
    assert subprocess.run([sys.executable, "-c", line]).returncode == 0


# --- parts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["reduce_scatter", "scatter", "all_to_all"])
@ranks(2)
def test_rows_that_do_not_divide_are_refused_before_anything_is_sent(rank, group, name):
    for x in (np.ones(3), np.ones((5, 2)), np.ones(())):
        with pytest.raises(ValueError, match=rf"{name}: .* does not divide into 2 parts.*{name}_v"):
            getattr(mscomm, name)(x)
    assert mscomm.all_reduce(np.ones(1))[0] == 2


@pytest.mark.parametrize("name", ["reduce_scatter_v", "scatter_v", "all_to_all_v"])
@ranks(2)
def test_counts_that_are_wrong_are_refused_before_anything_is_sent(rank, group, name):
    function = getattr(mscomm, name)
    for counts, error, words in (
        ([3], ValueError, "it needs 2 numbers of rows"),
        ([4, -1], ValueError, "it needs 2 numbers of rows"),
        ([2, 2], ValueError, "adds up to 4 rows, x of shape \\(3,\\) has 3"),
        ([1.5, 1.5], TypeError, "must be a list of ints"),
        (3, TypeError, "must be a list of ints"),
    ):
        with pytest.raises(error, match=words):
            function(np.ones(3), counts)
    with pytest.raises(ValueError, match="x is a scalar"):
        function(np.ones(()), [1, 0])
    assert mscomm.all_reduce(np.ones(1))[0] == 2


@ranks(2)
def test_a_scalar_has_no_rows_to_gather(rank, group):
    for function in (mscomm.all_gather_v, mscomm.gather_v):
        with pytest.raises(ValueError, match="x is a scalar"):
            function(np.ones(()))
    mscomm.barrier()


@ranks(2)
def test_the_root_must_have_what_it_scatters(rank, group):
    for call in (lambda: mscomm.scatter(None, rank), lambda: mscomm.scatter_v(None, [1, 1], rank)):
        with pytest.raises(TypeError, match="x is None at the root"):
            call()
    mscomm.barrier()


@ranks(2)
def test_out_is_not_looked_at_where_there_is_no_result(rank, group):
    out = np.zeros(2) if rank == 0 else "not even an array"
    assert mscomm.reduce(np.ones(2), out=out) is (out if rank == 0 else None)
    out = np.zeros(4) if rank == 0 else "not even an array"
    assert mscomm.gather(np.ones(2), out=out) is (out if rank == 0 else None)


# --- async calls ----------------------------------------------------------------------------------------------------


@ranks(3)
def test_a_work_gives_the_result_as_often_as_it_is_asked(rank, group):
    work = mscomm.all_reduce(np.full(1000, rank), async_op=True)
    assert isinstance(work, mscomm.Work)
    assert (work.wait() == 3).all() and work.wait() is work.wait(timeout=1)
    assert work.done() and work.is_completed() and work.exception() is None


@ranks(3)
def test_calls_beside_the_caller_are_carried_out_in_order(rank, group):
    x, works = np.full(50_000, rank + 1.0), []
    for _ in range(20):
        works.append(mscomm.all_reduce(x, "max", out=x, async_op=True))  # in place, each on the result before
        works.append(mscomm.all_gather_v(np.full(rank, rank), async_op=True))
    assert mscomm.all_reduce(np.ones(1))[0] == 3  # it comes after all of them
    assert all((work.wait(timeout=10) == 3).all() for work in works[::2])
    rows, counts = works[-1].wait()
    assert rows.tolist() == [1, 2, 2] and counts == [0, 1, 2]


@ranks(2)
def test_a_work_that_is_waited_for_too_briefly_goes_on(rank, group):
    work = mscomm.barrier(async_op=True) if rank == 0 else None
    if work:
        with pytest.raises(TimeoutError, match="it goes on"):
            work.wait(timeout=0.05)
        assert not work.done() and work.exception() is None
    mscomm.all_gather(np.ones(1), group=mscomm.create_group("other", [0, 1]))
    if work:
        mscomm.barrier(group="other")
        work.wait()
    else:
        mscomm.barrier(group="other")
        mscomm.barrier()


@ranks(2)
def test_arrays_of_a_dropped_work_live_until_it_has_ended(rank, group):
    for size in (10, 100_000) * 20:
        mscomm.all_reduce(np.full(size, rank + 1.0), async_op=True)
        mscomm.all_gather_v(np.ones(rank + size), async_op=True)
        gc.collect()
        np.zeros(size)  # would get the memory if it were free
    mscomm.barrier()


@ranks(2, timeout_s=30)
def test_the_error_of_a_dropped_work_is_raised_by_the_next_call(rank, group):
    if rank == 0:
        mscomm.all_reduce(np.ones(3), async_op=True)
        with pytest.raises(mscomm.Mismatch, match=r"all_reduce #1.*barrier #1"):
            while True:
                mscomm.barrier()
    else:
        with pytest.raises(mscomm.Mismatch, match=r"all_reduce #1.*barrier #1"):
            mscomm.barrier()


@ranks(2, timeout_s=30)
def test_a_work_raises_what_ended_its_call_and_shows_it(rank, group):
    other = mscomm.create_group("other", [0, 1])
    with pytest.raises(mscomm.Aborted, match="rank 1 called abort: enough"):
        if rank == 0:
            work = mscomm.all_gather_v(np.ones(3), async_op=True)
            mscomm.barrier(group=other)
            try:
                work.wait()
            finally:
                assert isinstance(work.exception(), mscomm.Aborted)
        mscomm.barrier(group=other)
        mscomm.abort("enough")
        mscomm.barrier()


def test_a_job_of_one_whose_out_is_too_large_is_told_so_at_each_call(alone):
    with pytest.raises(mscomm.Mismatch, match="out has shape"):
        mscomm.all_gather_v(np.ones(3), out=np.empty(5))
    began = time.monotonic()
    with pytest.raises(mscomm.Mismatch, match="out has shape"):
        mscomm.barrier(timeout=20)
    assert time.monotonic() - began < 10


@ranks(2)
def test_arrays_that_were_started_live_though_a_later_one_could_not_be(rank, group):
    calls = []
    filled = collectives._FusedCall.filled

    def full(self: Any, group: Any) -> Any:
        calls.append(self)
        if len(calls) == 3:
            raise MemoryError("no more")
        return filled(self, group)

    collectives._FusedCall.filled = full
    big = [np.full(300_000, rank + 1.0) for _ in range(6)]  # each is sent alone
    with pytest.raises((MemoryError, mscomm.Aborted)):
        mscomm.all_reduce_many(big, async_op=True)
    del big
    gc.collect()
    [np.zeros(300_000) for _ in range(6)]  # would get the memory if it were free
    with pytest.raises(mscomm.Aborted, match="MemoryError: no more"):
        mscomm.barrier()


@ranks(2)
def test_a_work_that_was_waited_for_keeps_nothing(rank, group):
    x = np.ones(1000)
    held = sys.getrefcount(x)
    work = mscomm.all_reduce(x, async_op=True)
    result = weakref.ref(work.wait())
    assert sys.getrefcount(x) == held
    del work
    mscomm.barrier()
    assert result() is None


@ranks(2)
def test_a_work_is_of_the_process_that_made_the_call(rank, group):
    work = mscomm.all_reduce(np.ones(3), async_op=True)
    work.wait()
    for call in (work.wait, work.done, work.exception):
        assert in_a_forked_child(call).startswith("RuntimeError: mscomm: this call was made by the process that forked")


@pytest.mark.parametrize("size", [10, 1 << 20])
def test_arrays_of_a_list_that_share_memory_are_refused(alone, size):
    a, b = np.ones(size), np.ones(size)
    whole = np.ones((size, 2))
    for arrays, out in (
        ([a, b], [b, a]),
        ([a, a], [a, a]),
        ([a, b], [a, a]),
        ([a[: size // 2], b], [a[: size // 2], a]),
        ([whole[:, 0], whole[:, 1]], [whole[:, 1], whole[:, 0]]),
    ):
        with pytest.raises(ValueError, match="share memory"):
            mscomm.all_reduce_many(arrays, out=out)
    for arrays, out in (([a, a], None), ([a, b], [a, b]), ([a, a], [b, np.ones(size)])):
        assert all((y == 1).all() for y in mscomm.all_reduce_many(arrays, out=out))
    mscomm.all_reduce_many([whole[:, 0], whole[:, 1]], out=[whole[:, 0], whole[:, 1]])


def test_more_dimensions_are_refused_by_every_function(unharmed):
    x = np.ones((1,) * 13)
    for name in ("reduce", "all_gather_v", "all_to_all", "scatter"):
        with pytest.raises(ValueError, match="13 dimensions, arrays have at most 12"):
            getattr(mscomm, name)(x)


@ranks(2, env={"MSCOMM_RECORD": "{folder}"})
def record_lines(rank: int, group: Any, folder: str) -> None:
    for _ in range(3):
        with pytest.raises(ValueError, match="at most 12 dimensions"):
            mscomm.all_reduce(np.ones((1,) * 13))
    mscomm.all_gather_v(np.ones(rank))  # line 2
    mscomm.barrier(async_op=True).wait()  # line 3
    everybody_is_here()
    mscomm.abort("show the record")
    with pytest.raises(mscomm.Aborted):
        mscomm.barrier()


def test_the_record_has_the_line_of_each_call(tmp_path):
    record_lines(tmp_path=tmp_path, folder=str(tmp_path))
    calls = json.loads((tmp_path / "rank_0.json").read_text())["calls"]
    source = Path(__file__).read_text().splitlines()
    lines = [source[int(call["line"].rpartition(":")[2]) - 1] for call in calls]
    assert ["line 2" in line for line in lines[:2]] == [True, True] and "line 3" in lines[2]
