"""Compares encrypted links with plain ones, between two processes over TCP on this machine.

    mscomm run -n 2 bench/tls.py

The rounds of the two groups, plain and encrypted, alternate, so that a temporary slowdown of the machine affects both.
Each rank pretends to be on a host of its own. The script prints the median throughput of each group in one direction,
and the ratio of the two times with an interval (see ratio.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np
from ratio import ratio

import mscomm
from mscomm import job

ROUNDS, CALLS, BYTES = 41, 4, 16 << 20


def linked(name: str, tls: bool) -> mscomm.Group:
    """Create a group whose links are encrypted or not, and its links for messages."""
    other = 1 - mscomm.get_rank()
    job.default().epoch.tls = "key" if tls else ""
    made = mscomm.create_group(name, [0, 1])
    mscomm.sendrecv(np.ones(1), other, np.empty(1), other, group=made)
    return made


def main() -> None:
    os.environ["MSCOMM_HOST_ID"] = os.environ["MSCOMM_RANK"]
    mscomm.init()
    rank = mscomm.get_rank()
    groups = [linked("plain", False), linked("encrypted", True)]
    x, out = np.ones(BYTES, np.uint8), np.empty(BYTES, np.uint8)

    def one_way(group: mscomm.Group) -> None:
        if rank == 0:
            mscomm.send(x, 1, group=group)
        else:
            mscomm.recv(out, 0, group=group)

    def both_ways(group: mscomm.Group) -> None:
        mscomm.sendrecv(x, 1 - rank, out, 1 - rank, group=group)

    def all_reduce(group: mscomm.Group) -> None:
        mscomm.all_reduce(x, out=out, group=group)

    calls: list[Callable[[mscomm.Group], None]] = [one_way, both_ways, all_reduce]
    for call in calls:
        times = np.empty((len(groups), ROUNDS))
        for turn in range(ROUNDS):
            for which, group in enumerate(groups):
                mscomm.barrier(group=group)
                began = time.perf_counter()
                for _ in range(CALLS):
                    call(group)
                mscomm.barrier(group=group)
                times[which, turn] = (time.perf_counter() - began) / CALLS
        if rank == 0:
            speeds = [BYTES / np.median(one) / 1e9 for one in times]
            print(
                f"{call.__name__}: plain {speeds[0]:.2f} GB/s, encrypted {speeds[1]:.2f} GB/s, "
                f"plain time / encrypted time {ratio(times[0], times[1])}"
            )


if __name__ == "__main__":
    main()
