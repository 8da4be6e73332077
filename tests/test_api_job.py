"""init() and release(): what works before, between and after them, and what get_rank() and similar functions return."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
from api import WITH_ARRAY, each
from ranks import ranks

import mscomm
from mscomm.job import CPU_NAMES, resolve

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
    assert time.monotonic() - began < 60  # and not MS_TOPO_TIMEOUT, 600 s
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
