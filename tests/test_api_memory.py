"""mscomm.empty() and zeros(): shared memory."""

from __future__ import annotations

import gc

import ml_dtypes
import numpy as np
import pytest
from ranks import ranks

import mscomm
from mscomm import _core
from mscomm.job import resolve


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
    mscomm.empty(1000)[...] = -1  # overwrites x's memory if that memory was freed too early
    assert part[0, 0] == rank + 1
    assert mscomm.all_reduce(part)[0, 0] == 1 + 2


@ranks(2)
def test_shared_memory_is_given_back_with_the_last_array(rank, group):
    heap = resolve(None).epoch.heap
    before = heap.in_use()  # the memory that the world group uses for itself
    arrays = [mscomm.empty(size) for size in (0, 1, 1000, 1 << 20)]
    assert heap.in_use() >= before + 4 * (1001 + (1 << 20))
    mscomm.all_reduce_many(arrays)
    results = [mscomm.all_reduce(x, out=mscomm.empty(x.shape)) for x in arrays]
    del arrays, results
    resolve(None).buckets.clear()  # all_reduce_many keeps a bucket for its next call
    gc.collect()
    assert heap.in_use() == before


@ranks(2)
def test_the_memory_of_large_arrays_is_reused(rank, group):
    heap = resolve(None).epoch.heap
    mscomm.barrier()
    before = heap.kept()
    x = mscomm.empty(1 << 20)
    x[...] = rank
    address = x.ctypes.data
    del x
    assert heap.kept() == before + (4 << 20)
    for _ in range(3):
        x = mscomm.zeros((1 << 20) - 1)
        assert x.ctypes.data == address and heap.kept() == before and not x.any()
        assert (mscomm.all_reduce(x + rank + 1, out=x) == 3).all()
        del x


@ranks(2)
def test_shared_memory_outlives_the_job(rank, group):
    x = mscomm.zeros(1000)
    mscomm.release()
    x += rank
    assert (x == rank).all()
