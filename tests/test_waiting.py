"""Long waits cost almost no CPU time, whichever call the ranks wait in and however they are linked."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest
from ranks import everybody_is_here, ranks, tell, until_told

import mscomm
from mscomm.cluster.cpus import cpu_quota
from mscomm.job import resolve

WAIT_S = 5
SHARE = 0.01  # the largest share of one core's time that a wait may use

WAYS = {  # for each name, the value of MSCOMM_ALGO, and the value of MSCOMM_HOST_ID for each rank
    "arena": ("all_reduce=arena", ["a"] * 8),
    "direct": ("direct", ["a"] * 8),
    "ring": ("ring", ["a"] * 8),
    "bruck": ("bruck", ["a"] * 8),
    "two hosts": ("", ["a", "b"] * 4),
}


def cpu_s(pid):
    """Return the CPU seconds of all threads of this process, by the clock that clock_getcpuclockid(3) returns."""
    return time.clock_gettime(~pid << 3 | 2)


@pytest.mark.parametrize(
    ("algo", "host"),
    [pytest.param(*way, id=name, marks=[] if name == "arena" else [pytest.mark.long]) for name, way in WAYS.items()],
)
@ranks(8, env={"MSCOMM_ALGO": "{algo}", "MSCOMM_HOST_ID": "{host}"})
def test_seven_ranks_wait_for_the_eighth(rank, group, algo, host):
    """They wait for it in a call, in a call that runs beside them, and in create_group, all at the same time. Rank 7
    measures how much CPU time they use.
    """
    everybody, x = list(range(8)), np.ones(5000)
    pids = [int(pid) for pid in mscomm.all_gather(np.array([os.getpid()]))]
    other = mscomm.create_group("other", everybody)
    mscomm.all_reduce(x)
    mscomm.all_reduce(x, group=other, async_op=True).wait()
    everybody_is_here()
    if rank == 7:
        until_told(*(f"rank {one} waits" for one in range(7)))
        time.sleep(0.5)  # by then, the ranks have probably begun to wait
        before, began = [cpu_s(pid) for pid in pids], time.monotonic()
        time.sleep(WAIT_S)
        used = [now - at for now, at in zip(map(cpu_s, pids), before, strict=True)][:7]
        waited = time.monotonic() - began
    began_to_wait = time.monotonic()
    tell(f"rank {rank} waits")
    founding = threading.Thread(target=mscomm.create_group, args=("all", everybody))
    founding.start()
    work = mscomm.all_reduce(x, group=other, async_op=True)
    mscomm.all_reduce(x)
    work.wait()
    founding.join()
    if rank == 7:
        assert 0 < max(used) < 3 * SHARE * waited, f"CPU seconds of ranks 0 to 6 in {waited:.1f} s: {used}"
    else:
        assert time.monotonic() - began_to_wait > WAIT_S


@pytest.mark.long
@pytest.mark.parametrize("host", [["a", "b"]], ids=["two hosts"])
@ranks(2, env={"MSCOMM_HOST_ID": "{host}", "MS_NODE_TIMEOUT": "1"})
def test_a_rank_that_reads_later_than_the_node_timeout_is_not_lost(rank, group, host):
    x = np.full(8 << 20, rank, np.float32)  # larger than the socket buffers: the TCP window closes until rank 1 reads
    if rank == 1:
        # The kernel of rank 0 asks whether the window is open again, at 0.2, 0.6, 1.4, 3.0, 6.2 and 12.6 s. In between,
        # there is nothing to acknowledge. With this node timeout, a host that acknowledges nothing for 4 s is lost.
        time.sleep(12)
    assert (mscomm.broadcast(x) == 0).all()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is only one CPU")
@ranks(2)
def test_ranks_on_one_cpu_part_and_keep_their_affinity(rank, group):
    """Both ranks start on the same CPU, but are allowed to use others. In the next calls, rank 1 must move to another
    CPU, unless the CPU quota is below 2. The set of allowed CPUs must stay the same.
    """
    core = resolve(None).core
    mask = os.sched_getaffinity(0)
    x = np.ones(2, np.float32)
    for _ in range(50):
        os.sched_setaffinity(0, {min(mask)})
        mscomm.barrier()
        os.sched_setaffinity(0, mask)
        for _ in range(200):
            assert mscomm.all_reduce(x)[0] == 2
        assert os.sched_getaffinity(0) == mask
    assert (core.partings() > 0) == (rank == 1 and cpu_quota() >= 2)
