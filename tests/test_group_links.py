"""Links for collective calls between ranks that are not partners are set up when a call first needs them."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
from ranks import ranks
from rotated import rotated

import mscomm


def _two_hosts(rank: int, **_: object) -> dict[str, str]:
    return {"MSCOMM_HOST_ID": str(rank // 2)}


def _sockets() -> int:
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
        except OSError:  # the descriptor of the folder itself
            continue
    return count


def _come_to(sockets: int) -> None:
    """Wait until a thread that has set up a link has closed its listener, too."""
    for _ in range(1000):
        if _sockets() == sockets:
            return
        time.sleep(0.01)
    raise AssertionError(f"{_sockets()} sockets, not {sockets}")


@ranks(4, env=_two_hosts)
def test_a_rank_has_a_link_only_to_its_partner_until_a_call_needs_another(rank: int, group: None) -> None:
    x, whole = np.ones(1000), np.ones(4000)
    mscomm.barrier()
    begun = _sockets()
    for root in range(4):
        for size in (8, 4096, 1 << 20):
            mscomm.broadcast(np.ones(size // 8), root)
    mscomm.all_reduce(x), mscomm.all_gather(x), mscomm.reduce_scatter(whole), mscomm.all_to_all(whole)
    mscomm.barrier()
    assert _sockets() == begun  # most algorithms for several hosts use the partner only
    for _ in range(2):
        mscomm.scan(x)
        mscomm.barrier()
        # The chain 0 - 1 - 2 - 3: each link of it joins ranks that are not partners.
        _come_to(begun + (1 if rank in (0, 3) else 2))
    other = mscomm.create_group("other", [0, 1, 2, 3])
    mscomm.scan(x, group=other)
    mscomm.destroy_group(other)
    mscomm.barrier()
    _come_to(begun + (1 if rank in (0, 3) else 2))


@ranks(4, env=_two_hosts)
def test_a_root_returns_before_a_rank_that_needs_a_new_link_has_called(rank: int, group: None) -> None:
    """A broadcast of 6 KiB goes down a tree: from rank 0 to ranks 1 and 2, and from there to rank 3."""
    x, token = np.full(768, float(rank == 0)), np.zeros(1)
    if rank in (1, 3):
        mscomm.recv(token, 0)
    out = mscomm.broadcast(x, 0)
    if rank == 0:
        for late in (1, 3):
            mscomm.send(token, late)
    assert (out == 1).all()


@pytest.mark.parametrize("algorithm", rotated(["direct", "hierarchical", "tree"], few=1))
@ranks(4, env=lambda rank, algorithm, **_: _two_hosts(rank) | {"MSCOMM_ALGO": algorithm})
def test_started_calls_of_two_groups_may_be_crossed(rank: int, group: None, algorithm: str) -> None:
    """Setting up a link makes no rank wait that is not in the call."""
    pair = [mscomm.create_group(name, [0, 1, 2, 3]) for name in "ab"]
    order = pair if rank % 2 else pair[::-1]
    x = np.full(1000, rank + 1.0)
    works = {
        one.name: [mscomm.all_reduce(x, group=one, async_op=True), mscomm.scan(x, group=one, async_op=True)]
        for one in order
    }
    for one in order[::-1]:
        summed, scanned = (work.wait() for work in works[one.name])
        assert summed[0] == 10 and scanned[0] == (rank + 1) * (rank + 2) / 2


@ranks(4, env=_two_hosts)
def test_ranks_in_different_calls_that_need_a_new_link_learn_it(rank: int, group: None) -> None:
    with pytest.raises(mscomm.Mismatch, match=r"scan.*barrier|barrier.*scan"):
        mscomm.scan(np.ones(10)) if rank < 2 else mscomm.barrier()
        mscomm.barrier()


@ranks(4, env=_two_hosts, expect={1: -signal.SIGKILL})
def test_a_rank_that_is_killed_before_its_link_exists_is_named(rank: int, group: None) -> None:
    """Rank 0 waits for a link to a rank of its host, and rank 2 for one to another host."""
    mscomm.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(mscomm.PeerLost, match="rank 1 "):
        mscomm.scan(np.ones(10))
        mscomm.barrier()


@ranks(4, env=_two_hosts)
def test_a_rank_that_has_left_the_group_is_named(rank: int, group: None) -> None:
    pair = mscomm.create_group("few", [0, 1, 2, 3])
    if rank == 1:
        mscomm.destroy_group(pair)
    mscomm.barrier()
    if rank != 1:
        with pytest.raises(mscomm.PeerLost, match=r"rank 1 .*(destroyed the group|has left)"):
            mscomm.scan(np.ones(10), group=pair)
            mscomm.barrier(group=pair)
    mscomm.barrier()
