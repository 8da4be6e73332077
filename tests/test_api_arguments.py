"""What the public functions accept and refuse. If a test needs only one rank, its job has no launcher."""

from __future__ import annotations

import http
from datetime import timedelta
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from api import COLLECTIVES, REDUCTIONS, WITH_ARRAY, each
from ranks import ranks

import mscomm
from mscomm import _core
from mscomm.job import WORLD_NAMES, resolve


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
    with pytest.raises(TypeError, match=r"a MaskedArray, not an array; give its data and its mask as two arrays: "):
        function(np.ma.masked_array([1.0, 2.0], mask=[True, False]))


@each(WITH_ARRAY)
@pytest.mark.parametrize(
    "dtype",
    ["O", "S3", "U3", "M8[s]", "m8[s]", "g", "G", "V4", "f4,i4", ml_dtypes.float8_e4m3, ml_dtypes.int4],
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
    with pytest.raises(
        ValueError, match=f"{function.__name__}: op avg would divide by a different number on each rank"
    ):
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


@pytest.mark.parametrize("name", ["reduce_scatter", "scatter", "all_to_all"])
@ranks(2)
def test_rows_that_do_not_divide_are_refused_before_anything_is_sent(rank, group, name):
    for x in (np.ones(3), np.ones((5, 2)), np.ones(())):
        with pytest.raises(ValueError, match=rf"{name}: .* cannot be divided into 2 equal parts.*{name}_v"):
            getattr(mscomm, name)(x)
    assert mscomm.all_reduce(np.ones(1))[0] == 2


@pytest.mark.parametrize("name", ["reduce_scatter_v", "scatter_v", "all_to_all_v"])
@ranks(2)
def test_counts_that_are_wrong_are_refused_before_anything_is_sent(rank, group, name):
    function = getattr(mscomm, name)
    for counts, error, words in (
        ([3], ValueError, "it needs 2 row counts"),
        ([4, -1], ValueError, "it needs 2 row counts"),
        ([2, 2], ValueError, "adds up to 4 rows, but x of shape \\(3,\\) has 3"),
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


@pytest.mark.parametrize("size", [10, 1 << 20])
def test_arrays_of_a_list_that_share_memory_are_refused(alone, size):
    a, b = np.ones(size), np.ones(size)
    whole, half = np.ones((size, 2)), size // 2
    for arrays, out in (
        ([a, b], [b, a]),
        ([a, a], [a, a]),
        ([a, b], [a, a]),
        ([a[:half], b], [a[:half], a]),
        ([a[:half], b[:half]], [a[:half], a[half // 2 : half // 2 + half][::-1]]),
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


@ranks(2)
def test_an_error_about_an_argument_names_the_function_and_the_argument(rank, group):
    x, records = np.ones(2), np.zeros(2, "O")
    collectives = {
        "all_reduce": mscomm.all_reduce,
        "all_gather": mscomm.all_gather,
        "reduce": mscomm.reduce,
        "scan": mscomm.scan,
        "all_to_all": mscomm.all_to_all,
        "all_gather_v": mscomm.all_gather_v,
        "reduce_scatter_v": lambda x, **options: mscomm.reduce_scatter_v(x, [1, 1], **options),
        "all_reduce_many": lambda x, **options: mscomm.all_reduce_many([x], **options),
        "send": lambda x, **options: mscomm.send(x, 1 - rank, **options),
        "recv": lambda x, **options: mscomm.recv(x, 1 - rank, **options),
        "sendrecv": lambda x, **options: mscomm.sendrecv(x, 1 - rank, np.zeros(2), 1 - rank, **options),
    }
    for function, call in collectives.items():
        argument = {"recv": "out", "all_reduce_many": r"arrays\[0\]"}.get(function, "x")
        for wrong in (records, np.zeros(2, ">f8")):
            with pytest.raises(TypeError, match=rf"^{function}: {argument} has dtype .*(object|>f8)"):
                call(wrong)
        for wrong in ("3", True, b"3", [3]):
            with pytest.raises(TypeError, match=rf"^{function}: timeout .* is neither a number of seconds nor a timed"):
                call(x, timeout=wrong)
        with pytest.raises(ValueError, match=rf"^{function}: timeout 0 is not more than 0 seconds"):
            call(x, timeout=0)
        with pytest.raises(ValueError, match=rf"^{function}: timeout 1000.*0 is too large \(inf means none\)$"):
            call(x, timeout=10**400)
    for text, call in {
        "barrier: timeout '3' is neither": lambda: mscomm.barrier(timeout="3"),
        "broadcast_object: timeout '3' is neither": lambda: mscomm.broadcast_object(1, timeout="3"),
        "send_object: timeout '3' is neither": lambda: mscomm.send_object(1, 1 - rank, timeout="3"),
        "split: timeout '3' is neither": lambda: mscomm.split(1, timeout="3"),
        "create_group: timeout '3' is neither": lambda: mscomm.create_group("a", [0], timeout="3"),
        "split: color 'a' is not an integer": lambda: mscomm.split("a"),
        "split: key None is not an integer": lambda: mscomm.split(1, None),
        "empty: shape 'a' is not an integer": lambda: mscomm.empty("a"),
        "zeros: shape 2.5 is not an integer": lambda: mscomm.zeros((1, 2.5)),
        "zeros: dtype 'no': data type 'no' not understood": lambda: mscomm.zeros(2, "no"),
        "empty: the array has dtype object": lambda: mscomm.empty(2, object),
        "all_reduce: x is a list, .* call all_reduce_many": lambda: mscomm.all_reduce([x, x]),
    }.items():
        with pytest.raises(TypeError, match=f"^{text}"):
            call()
    with pytest.raises(MemoryError, match=r"empty: an array of float32 with shape \(1099511627776, 1099511627776\) is"):
        mscomm.empty((1 << 40, 1 << 40))
    assert mscomm.all_reduce(x).tolist() == [2, 2]


@pytest.mark.parametrize("name", ["timeout", "join_timeout"])
def test_a_timeout_of_init_is_a_number(name):
    for wrong, kind in (("3", TypeError), (True, TypeError), (10**400, ValueError), (-1, ValueError)):
        with pytest.raises(kind, match=f"^init: {name} "):
            mscomm.init(**{name: wrong})
