"""Ranks with devices name a failed rank in time. The stand-ins hang where the vendor libraries would hang."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import time
import weakref
from collections.abc import Callable
from typing import Any

import fallbacks
import numpy as np
import pytest
from devices import BACKENDS, devices, each_backend, handles, on_device, violations
from fakes.device_array import DeviceArray, compute
from ranks import before_joining, everybody_is_here, tell, until_told
from rotated import rotated

import mscomm

# How long a rank may take to raise its error after a fault or a passed deadline. It ends a hang: without fallbacks,
# only an event can come so soon.
BOUND_S = 60
SHORT_S = 0.3  # the timeout of calls that must fail

pytestmark = pytest.mark.usefixtures("no_fallbacks")
before_joining.append(fallbacks.give_no_fallbacks)


def ends(call: Callable[[], Any], within_s: float = BOUND_S) -> mscomm.Error:
    """Repeat the call until it raises the error that ends the group. Return that error."""
    began = time.monotonic()
    while time.monotonic() - began < within_s:
        try:
            call()
        except mscomm.Error as error:
            return error
        time.sleep(0.01)
    raise AssertionError(f"no error within {within_s} s")


def goes_on(x: DeviceArray) -> Callable[[], Any]:
    """Return a function that makes a call and then waits for the device, as programs do."""

    def call() -> None:
        mscomm.all_reduce(x, out=x)
        x.to_numpy()

    return call


@pytest.mark.parametrize(
    ("n", "backend"), rotated(itertools.product([2, 4], BACKENDS), few=0, always=[(2, "nccl"), (4, "hccl")])
)
@devices("n", expect={1: -signal.SIGKILL})
def test_a_killed_rank_ends_the_calls_of_all_others(rank: int, group: None, backend: str, n: int) -> None:
    x = on_device(np.ones(1000, np.float32))
    goes_on(x)()
    everybody_is_here()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    error = ends(goes_on(x))
    assert type(error) is mscomm.PeerLost and error.ranks == (1,), error
    with pytest.raises(mscomm.PeerLost, match="rank 1"):
        mscomm.all_reduce(np.ones(3))
    assert violations() == []


@each_backend
@devices(3, env=lambda rank: {"FAKE_DIE": "all_reduce:3:1"} if rank == 2 else {}, expect={2: -signal.SIGKILL})
def test_a_rank_that_dies_inside_a_collective_is_named(rank: int, group: None, backend: str) -> None:
    error = ends(goes_on(on_device(np.ones(1000, np.float32))))
    assert type(error) is mscomm.PeerLost and error.ranks == (2,), error
    assert violations() == []


ERRORS = {"nccl": "ncclAllReduce: unhandled cuda error", "hccl": "code 1: wrong parameter"}
LATER = {"nccl": "nccl: unhandled system error", "hccl": "code 2: a pointer is missing"}


@pytest.mark.usefixtures("judge_decides")
@each_backend
@devices(3, env=lambda rank: {"FAKE_FAIL": "all_reduce:3:1"} if rank == 1 else {})
def test_an_error_of_a_call_is_everybodys(rank: int, group: None, backend: str) -> None:
    error = ends(goes_on(on_device(np.ones(10, np.float32))))
    assert type(error) is mscomm.Error and ERRORS[backend] in str(error), error
    assert "rank 1 (pid " in str(error) and ": all_reduce #3 (40 B): " in str(error), error
    assert violations() == []


@pytest.mark.usefixtures("judge_decides")
@each_backend
@devices(3, env=lambda rank: {"FAKE_ASYNC_FAIL": "all_reduce:3:2"} if rank == 1 else {})
def test_an_error_that_comes_later_is_everybodys(rank: int, group: None, backend: str) -> None:
    error = ends(goes_on(on_device(np.ones(10, np.float32))))
    assert type(error) is mscomm.Error and LATER[backend] in str(error), error
    assert "rank 1 (pid " in str(error) and ": all_reduce #3 (40 B): " in str(error), error
    assert violations() == []


@each_backend
@devices(2, expect={1: -signal.SIGKILL})
def test_a_call_that_blocks_the_driver_is_aborted(rank: int, group: None, backend: str) -> None:
    """A call of another thread holds the driver's lock until the device has done its work, which needs the lost rank.
    So the thread that watches the group blocks, and the abort must come from elsewhere.
    """
    x = on_device(np.ones(1000, np.float32))
    goes_on(x)()
    everybody_is_here()
    if rank == 1:
        until_told("blocked")
        os.kill(os.getpid(), signal.SIGKILL)
    mscomm.all_reduce(x, out=x)
    compute.block_driver(device=rank)
    tell("blocked")
    error = ends(lambda: mscomm.all_reduce(x))
    assert type(error) is mscomm.PeerLost and error.ranks == (1,), error
    assert violations() == []


@devices(3, env={"FAKE_REMOTE_ERROR": "1"}, expect={1: -signal.SIGKILL})
def test_nccls_word_of_a_remote_error_waits_for_the_reason(rank: int, group: None) -> None:
    x = on_device(np.ones(1000, np.float32))
    goes_on(x)()
    everybody_is_here()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    error = ends(goes_on(x))
    assert type(error) is mscomm.PeerLost and error.ranks == (1,), error


@each_backend
@devices(3, env=lambda rank: {"FAKE_HANG": "all_reduce:2"} if rank == 1 else {})
def test_a_device_that_hangs_ends_at_the_deadline(rank: int, group: None, backend: str) -> None:
    x = on_device(np.ones(10, np.float32))
    mscomm.all_reduce(x).to_numpy()
    began = time.monotonic()
    mscomm.all_reduce(x, out=x, timeout=SHORT_S)
    x.to_numpy()  # returns when the abort has ended the call
    error = ends(lambda: mscomm.all_reduce(x, out=x))
    assert type(error) is mscomm.CollectiveTimeout, error
    assert "all_reduce #2 (40 B): it was enqueued, but did not end on the device within 0.3 s" in str(error)
    assert time.monotonic() - began < SHORT_S + BOUND_S
    assert violations() == []


@each_backend
@devices(3)
def test_a_rank_that_does_not_come_is_named_at_the_deadline(rank: int, group: None, backend: str) -> None:
    x = on_device(np.ones(10, np.float32))
    mscomm.all_reduce(x).to_numpy()
    if rank == 1:
        until_told("raised 0", "raised 2")
    else:
        mscomm.all_reduce(x, out=x, timeout=SHORT_S)
        error = ends(lambda: mscomm.barrier(timeout=300))
        assert type(error) is mscomm.CollectiveTimeout and error.waiting_for == (1,), error
        tell(f"raised {rank}")
    error = ends(lambda: mscomm.all_reduce(x))  # a call that is enqueued after the failure also raises the error
    assert type(error) is mscomm.CollectiveTimeout and "Waiting for: rank 1" in str(error), error


@each_backend
@devices(2)
def test_the_error_of_a_work_is_raised_by_wait_and_by_the_next_call(rank: int, group: None, backend: str) -> None:
    x = on_device(np.ones(10, np.float32))
    if rank == 0:
        work = mscomm.all_reduce(x, async_op=True, timeout=SHORT_S)
        with pytest.raises(mscomm.CollectiveTimeout):
            work.wait(timeout=BOUND_S)
        assert isinstance(work.exception(), mscomm.CollectiveTimeout)
        tell("raised")
    until_told("raised")
    assert type(ends(lambda: mscomm.all_reduce(x))) is mscomm.CollectiveTimeout


@each_backend
@devices(2)
def test_different_calls_under_one_number_are_a_mismatch(rank: int, group: None, backend: str) -> None:
    x = on_device(np.ones(10, np.float32))
    (mscomm.all_reduce if rank == 0 else mscomm.all_gather)(x, timeout=300)
    error = ends(lambda: mscomm.barrier(timeout=300))
    assert type(error) is mscomm.Mismatch, error
    assert "rank 0 called all_reduce #1" in str(error) and "rank 1 called all_gather #1" in str(error), error


@each_backend
@devices(2)
def test_a_device_call_beside_a_cpu_call_is_a_mismatch(rank: int, group: None, backend: str) -> None:
    x = np.ones(10, np.float32)
    error = ends(lambda: mscomm.all_reduce(on_device(x) if rank == 0 else x, timeout=300))
    assert type(error) is mscomm.Mismatch, error
    assert "rank 0 called all_reduce #1 (float32[10], sum, on the device); rank 1 called all_reduce #1" in str(error), (
        error
    )


@each_backend
@devices(3)
def test_abort_ends_what_is_on_the_device(rank: int, group: None, backend: str) -> None:
    x = on_device(np.ones(10, np.float32))
    goes_on(x)()
    everybody_is_here()
    if rank == 1:
        mscomm.abort("enough")
    error = ends(goes_on(x))
    assert type(error) is mscomm.Aborted and "enough" in str(error), error


@each_backend
@devices(2)
def test_groups_without_the_lost_rank_go_on(rank: int, group: None, backend: str) -> None:
    alone = mscomm.split(rank)
    x = on_device(np.ones(10, np.float32))
    if rank == 0:
        mscomm.all_reduce(x, out=x, timeout=SHORT_S)
        assert type(ends(lambda: mscomm.all_reduce(x))) is mscomm.CollectiveTimeout
        tell("raised")
    until_told("raised")
    x = on_device(np.ones(10, np.float32))
    for _ in range(3):
        assert (mscomm.all_reduce(x, group=alone).to_numpy() == 1).all()


@devices(2, env={"FAKE_IN_PROGRESS_POLLS": "1000000"}, init=None)
def test_init_does_not_hang_where_nccls_does(rank: int) -> None:
    os.environ["MS_TOPO_TIMEOUT"] = "3"
    began = time.monotonic()
    with pytest.raises(mscomm.CollectiveTimeout, match="did not connect their devices within"):
        mscomm.init("nccl")
    assert time.monotonic() - began < 3 + BOUND_S
    assert not mscomm.is_initialized()


@pytest.mark.usefixtures("judge_decides")
@devices(2, env=lambda rank: {"FAKE_FAIL": "init:1:2"} if rank == 1 else {}, init=None)
def test_an_error_of_nccls_init_is_everybodys(rank: int) -> None:
    with pytest.raises(mscomm.Error, match="ncclCommInitRankConfig: unhandled system error"):
        mscomm.init("nccl")


@each_backend
@devices(2)
def test_release_after_a_failure_leaves_nothing_of_the_device(rank: int, group: None, backend: str) -> None:
    x = on_device(np.ones(10, np.float32))
    if rank == 0:
        mscomm.all_reduce(x, out=x, timeout=SHORT_S)
        x.to_numpy()
    error = ends(lambda: mscomm.barrier(timeout=300))
    assert isinstance(error, mscomm.Error)
    mscomm.release()
    until = time.monotonic() + BOUND_S
    # Some communicators, streams and events are freed shortly after release() has returned.
    while any((left := handles())[kind] for kind in ("comms", "streams", "events")):
        assert time.monotonic() < until, left
        time.sleep(0.01)
    assert violations() == []


@each_backend
@devices(2, expect={1: -signal.SIGKILL})
def test_arrays_of_a_failed_call_stay_alive_until_the_group_has_ended(rank: int, group: None, backend: str) -> None:
    x = on_device(np.ones(10, np.float32))
    mscomm.all_reduce(x).to_numpy()
    if rank == 1:
        until_told("started")
        os.kill(os.getpid(), signal.SIGKILL)
    mscomm.all_reduce(x, async_op=True)
    tell("started")
    alive = weakref.ref(x)
    del x
    for _ in range(2):  # the first barrier finds the calls that have ended, the second forgets them
        assert isinstance(ends(mscomm.barrier), mscomm.PeerLost)
    assert alive() is not None
    mscomm.release()
    gc.collect()
    assert alive() is None


@each_backend
@devices(2)
def test_a_forked_child_leaves_the_device_to_its_parent(rank: int, group: None, backend: str) -> None:
    x = compute.add(on_device(np.ones(10, np.float32)), 1, delay=0.3)
    work = mscomm.all_reduce(x, async_op=True)
    child = os.fork()
    if child == 0:
        try:
            mscomm.barrier()
        except RuntimeError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert (work.wait().to_numpy() == 4).all()


@each_backend
@devices(2, expect={1: -signal.SIGKILL})
def test_release_waits_for_the_device_and_hears_of_a_lost_rank(rank: int, group: None, backend: str) -> None:
    x = on_device(np.ones(10, np.float32))
    mscomm.all_reduce(x).to_numpy()
    everybody_is_here()
    if rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    mscomm.all_reduce(x, out=x)  # nothing before release() waits for this call
    began = time.monotonic()
    with pytest.raises(mscomm.PeerLost, match="rank 1"):
        mscomm.release()
    assert time.monotonic() - began < BOUND_S


@devices(2, timeout_s=120)
def test_a_program_far_ahead_of_its_device_is_not_stuck(rank: int, group: None) -> None:
    """The timeout counts the time during which no call has completed, not the time since a call was enqueued."""
    x = on_device(np.zeros(10, np.float32))
    for _ in range(30):
        compute.add(x, 1, delay=0.1)
        mscomm.all_reduce(x, out=x, timeout=2)
    assert np.isfinite(x.to_numpy()).all()
    mscomm.all_reduce(x).to_numpy()


@devices(2)
def test_a_rank_that_comes_later_with_another_call_is_found_too(rank: int, group: None) -> None:
    if rank == 0:
        mscomm.all_reduce(on_device(np.ones(10, np.float32)), timeout=300)
        error = ends(lambda: mscomm.barrier(timeout=300))
    else:
        time.sleep(2)  # by then, rank 0 has told its call, which has not completed for a second
        error = ends(lambda: mscomm.barrier(timeout=300))
    assert type(error) is mscomm.Mismatch and "rank 1 called barrier #1" in str(error), error
