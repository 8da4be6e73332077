"""How many bytes and system calls the collectives cost between hosts: not more than docs/design/0005-hosts.md says.

The hosts are names (MSCOMM_HOST_ID), so their ranks are linked by TCP. A preloaded library counts the calls of send,
sendmsg and recv on TCP sockets. The hub and the launcher use them, too, but only a little.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import ranks
from sessions import shared_library

import mscomm

LAYOUTS = {"2x2": [2, 2], "2x4": [4, 4], "4x4": [4] * 4, "6+1+1": [6, 1, 1]}
COUNT = 1 << 17  # float32 elements of a part


def hosts_of(layout: str) -> list[str]:
    return [f"h{host}" for host, ranks in enumerate(LAYOUTS[layout]) for _ in range(ranks)]


# The bytes between hosts, divided by the bytes of a part (see docs/design/0005-hosts.md), for hosts with these numbers
# of ranks. The root is the last rank.
LEAST: dict[str, Callable[[list[int]], int]] = {
    "all_reduce": lambda hosts: 2 * (len(hosts) - 1) * sum(hosts),
    "reduce": lambda hosts: (len(hosts) - 1) * sum(hosts),
    "broadcast": lambda hosts: (len(hosts) - 1) * sum(hosts),
    "all_gather": lambda hosts: (len(hosts) - 1) * sum(hosts),
    "reduce_scatter": lambda hosts: (len(hosts) - 1) * sum(hosts),
    "all_to_all": lambda hosts: sum(here * (sum(hosts) - here) for here in hosts),
    "gather": lambda hosts: sum(hosts[:-1]),
    "scatter": lambda hosts: sum(hosts[:-1]),
}
ROOTED = ("reduce", "broadcast", "gather", "scatter")


def called(what: str, n: int) -> Any:
    whole = np.ones(n * COUNT, np.float32)
    x = whole[:COUNT] if what in ("all_gather", "gather") else whole
    return getattr(mscomm, what)(x, **({"root": n - 1} if what in ROOTED else {}))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("wire") / "wire.so"
    return str(shared_library(Path(__file__).with_name("wire.cc"), made, "-O1"))


@pytest.mark.parametrize(
    ("layout", "n", "host"),
    [
        pytest.param(name, sum(LAYOUTS[name]), hosts_of(name), id=name, marks=[pytest.mark.long] * (name != "2x2"))
        for name in LAYOUTS
    ],
)
@ranks("n", env={"LD_PRELOAD": "{library}", "MSCOMM_HOST_ID": "{host}"})
def test_each_byte_moves_to_a_host_only_once(rank, group, library, layout, n, host):
    wire, hosts = ctypes.CDLL(library), LAYOUTS[layout]
    for what, least in LEAST.items():
        mscomm.barrier()
        before = wire.wire_sent_bytes(), wire.wire_sent_bytes_on_a_host()
        called(what, n)
        own, near = wire.wire_sent_bytes() - before[0], wire.wire_sent_bytes_on_a_host() - before[1]
        total, in_all_near = map(int, mscomm.all_reduce(np.array([own, near])))
        must = least(hosts) * COUNT * 4
        assert must <= total <= 1.05 * must, (what, total / must)
        assert in_all_near < COUNT, (what, in_all_near)  # the ranks of a host move the data in shared memory
        by_host = Counter[str]()
        for place, bytes_ in zip(host, mscomm.all_gather(np.array([own])), strict=True):
            by_host[place] += int(bytes_)
        if len(set(hosts)) == 1 and what not in ROOTED:
            assert max(by_host.values()) <= 1.1 * must / len(hosts), (what, by_host)


@pytest.mark.parametrize(
    ("n", "host", "what", "counts"),
    [(2, ["a", "b"], "all_reduce", [1, 1000]), (4, hosts_of("2x2"), "all_to_all", [4])],
    ids=["all_reduce", "all_to_all"],
)
@ranks("n", env={"LD_PRELOAD": "{library}", "MSCOMM_HOST_ID": "{host}"})
def test_a_short_message_to_another_host_is_one_system_call(rank, group, library, n, host, what, counts):
    sends, call = ctypes.CDLL(library).wire_sends, getattr(mscomm, what)
    for count in counts:
        x = np.ones(count, np.float32)
        call(x)
        before = sends()
        for _ in range(100):
            call(x)
        assert 100 <= sends() - before <= 105


@pytest.mark.long
@pytest.mark.parametrize(("n", "host"), [(16, [str(rank) for rank in range(16)])])
@ranks("n", env={"LD_PRELOAD": "{library}", "MSCOMM_HOST_ID": "{host}"})
def test_a_leaf_of_a_tree_reads_only_from_its_parent(rank, group, library, n, host):
    receives = ctypes.CDLL(library).wire_receives
    x = np.ones(4, np.float32)
    mscomm.barrier()
    before, calls = receives(), 200
    for _ in range(calls):
        mscomm.broadcast(x, 0)
    assert rank % 2 == 0 or (receives() - before) / calls <= 4
    mscomm.barrier()
