"""The argument `out` of the public functions: which arrays they accept and write to."""

from __future__ import annotations

import time

import numpy as np
import pytest
from api import WITH_ARRAY, each
from ranks import ranks

import mscomm


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
    with pytest.raises(
        TypeError, match=r"out(\[0\])? is a list, not an array; give an array that the result can be written to"
    ):
        function(np.ones(4), out=[0.0] * 4)


@each(WITH_ARRAY)
def test_an_out_whose_elements_share_memory_is_refused(unharmed, function):
    for shape, strides in (((4,), (0,)), ((3, 4), (8, 8)), ((3, 4), (-8, 8)), ((2, 5), (16, 8))):
        out = np.lib.stride_tricks.as_strided(np.zeros(12)[6:], shape, strides)
        with pytest.raises(ValueError, match=r"elements of out(\[0\])? share memory"):
            function(np.ones(shape), out=out)
    with pytest.raises(ValueError, match="recv: elements of out share memory"):
        mscomm.recv(out, 0)


@each(WITH_ARRAY)
def test_an_out_whose_elements_are_apart_is_written(alone, function):
    for out in (np.zeros((4, 6, 2))[::-2, 1::2, 1].T, np.zeros((0, 3))[:, ::2], np.zeros((1, 4))[:, ::-1]):
        assert (function(np.ones(out.shape), out=out) == 1).all()


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


def test_all_reduce_many_takes_a_generator_and_still_sees_an_overlap(alone):
    x = np.arange(6.0)
    assert [one.tolist() for one in mscomm.all_reduce_many(part for part in (x[:2], x[2:]))] == [[0, 1], [2, 3, 4, 5]]
    with pytest.raises(ValueError, match=r"arrays\[0\] and out\[1\] share memory"):
        mscomm.all_reduce_many((x[i : i + 3] for i in (0, 3)), out=[x[3:], x[:3]])


def test_all_reduce_many_wants_one_out_for_each_array(unharmed):
    with pytest.raises(ValueError, match="1 arrays, arrays has 2"):
        mscomm.all_reduce_many([np.ones(2), np.ones(2)], out=[np.ones(2)])


def test_short_forms_work_in_place(alone):
    x = np.arange(3.0)
    assert mscomm.all_reduce_(x) is x
    assert mscomm.broadcast_(x) is x


def test_a_job_of_one_whose_out_is_too_large_is_told_so_at_each_call(alone):
    with pytest.raises(mscomm.Mismatch, match="out has shape"):
        mscomm.all_gather_v(np.ones(3), out=np.empty(5))
    began = time.monotonic()
    with pytest.raises(mscomm.Mismatch, match="out has shape"):
        mscomm.barrier(timeout=600)
    assert time.monotonic() - began < 60
