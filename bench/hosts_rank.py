"""Runs as each rank of bench/hosts.py: joins, creates the contenders and measures them. Rank 0 writes RESULT.

    mscomm run ... hosts_rank.py PLAN RESULT

PLAN is a JSON file with these keys: hosts (the names of the hosts, in order), interface, sizes, rounds, and iters (the
number of timed calls in a round, or null to choose it by size).
"""

from __future__ import annotations

import json
import os
import select
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import mscomm
from mscomm.bench import report
from mscomm.bench.contenders import Contender, Local, ourselves
from mscomm.bench.peers import GLOO_INTERFACES, PEERS
from mscomm.bench.plan import Plan
from mscomm.bench.table import Buffers, Case, times_ns
from mscomm.job import resolve

WIRE = "wire"
GLOO_PORT, WIRE_PORT = 29500, 29501  # the hosts are new, so the ports are free
WARMUP = 2
START_S = 60.0
STUCK_S = 60.0


def main(plan_file: str, result_file: str) -> None:
    given = json.loads(Path(plan_file).read_text())
    mscomm.init()
    rank, ranks = mscomm.get_rank(), mscomm.get_group_size()
    plan = Plan(
        "all_reduce",
        tuple(given["sizes"]),
        "float32",
        "sum",
        root=0,
        iterations=given["iters"],
        warmup=WARMUP,
        rounds=given["rounds"],
        check=True,
        shared=False,
        peers=(*GLOO_INTERFACES, WIRE),
        prefixes={},
        json=Path(result_file),
        plot=None,
    )
    environment = report.environment(ranks)
    case = plan.case(rank, ranks)
    job = Job(case, given["hosts"], given["interface"])
    started = [ourselves(case, shared=False), *_gloos(case, given), _wire(job)]
    contenders = [one for one in started if isinstance(one, Local)]
    assert len(contenders) == len(started)  # all contenders run in the ranks' own processes
    rows = [_of_size(plan, job, contenders, count) for count in plan.counts(case)]
    carried = resolve(None).core.carried()
    by = {what: [int(one) for one in mscomm.all_gather(np.array([carried[what]]))] for what in ("arena", "mesh")}
    environment["congestion_control"] = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    environment["contenders"] = {contender.name: contender.about for contender in contenders}
    for contender in contenders:
        contender.close()
    if rank == 0:
        report.write(Path(result_file), {"plan": given, "environment": environment, "rows": rows, "carried": by})


class Job:
    """Holds the case to measure and the host of this rank, and measures the traffic of this host."""

    def __init__(self, case: Case, names: list[str], interface: str) -> None:
        self.case, self.names, self._interface = case, names, interface
        self.hosts = len(names)
        self.local_ranks = case.ranks // self.hosts
        self.host = case.rank // self.local_ranks
        self.first_of_host = case.rank % self.local_ranks == 0

    def least_bytes(self, size: int) -> int:
        """Return how many bytes each host must send, and must also receive, in an all_reduce of `size` bytes.

        The number of ranks on a host does not matter.
        """
        return 2 * (self.hosts - 1) * size // self.hosts

    def sent(self) -> int:
        """Return how many bytes this host has sent through its interface so far, headers included."""
        for line in Path("/proc/self/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == self._interface:
                return int(numbers.split()[8])
        raise RuntimeError(f"this host has no interface {self._interface}")


def _gloos(case: Case, given: dict[str, Any]) -> list[Contender]:
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = given["interface"]
    store = f"tcp://{given['hosts'][0]}:{GLOO_PORT}"
    dist.init_process_group("gloo", init_method=store, rank=case.rank, world_size=case.ranks)
    return [PEERS[name].start(case, None) for name in GLOO_INTERFACES]


# -- the contender "wire"


def _wire(job: Job) -> Local:
    ring = Ring(job) if job.first_of_host else None
    mscomm.barrier()

    def bind(case: Case, buffers: Buffers) -> Callable[[], object]:
        if ring is None:
            return lambda: None
        bytes_ = job.least_bytes(case.size(buffers.count))
        out, into = memoryview(bytearray(bytes_)), memoryview(bytearray(bytes_))
        return lambda: ring.exchange(out, into)

    about = "no collective: one rank of each host sends to the next host what it must, and receives from the one before"
    return Local(WIRE, about, job.case, np.empty, bind, ring.close if ring else lambda: None, has_result=False)


class Ring:
    """Connects the hosts in a ring. Each host has a byte stream to the host on the right and one from the left."""

    def __init__(self, job: Job) -> None:
        right = job.names[(job.host + 1) % job.hosts]
        with socket.create_server((job.names[job.host], WIRE_PORT)) as listener:
            listener.settimeout(START_S)
            self._right = _connected(right)
            self._left, _ = listener.accept()
        self._poll = select.poll()
        for sock in (self._right, self._left):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setblocking(False)

    def exchange(self, out: memoryview, into: memoryview) -> None:
        """Send all of `out` to the right and fill `into` from the left, at the same time."""
        sent = got = 0
        while sent < len(out) or got < len(into):
            came = _moved(self._left.recv_into, into[got:])
            went = _moved(self._right.send, out[sent:])
            if came == 0 and got < len(into):
                raise ConnectionError("the host on the left has ended")
            got += came or 0
            sent += went or 0
            if not came and not went:
                self._wait(sent < len(out), got < len(into))

    def _wait(self, sending: bool, receiving: bool) -> None:
        self._poll.register(self._right, select.POLLOUT if sending else 0)
        self._poll.register(self._left, select.POLLIN if receiving else 0)
        if not self._poll.poll(STUCK_S * 1e3):
            raise TimeoutError(f"nothing moved between the hosts for {STUCK_S:g} s")

    def close(self) -> None:
        self._right.close()
        self._left.close()


def _moved(move: Callable[[memoryview], int], bytes_: memoryview) -> int | None:
    """Call `move`, a socket's send or recv_into. Return the bytes moved, or None if the socket is not ready."""
    try:
        return move(bytes_) if bytes_ else 0
    except BlockingIOError:
        return None


def _connected(host: str) -> socket.socket:
    """Connect to the ring's listener on `host`. Try again until the host listens."""
    until = time.monotonic() + START_S
    while True:
        try:
            return socket.create_connection((host, WIRE_PORT), timeout=START_S)
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


# -- measuring


def _of_size(plan: Plan, job: Job, contenders: list[Local], count: int) -> dict[str, Any]:
    """Measure all contenders at one size. Return a row of the result file.

    In the row, `least_bytes` is how much each host must send in a call, and `sent_bytes` is how much the busiest host
    has sent per call.
    """
    size = job.case.size(count)
    buffers = Buffers(job.case, count, True, np.empty)  # all contenders use the same memory
    calls = {contender.name: contender.call(buffers) for contender in contenders}
    rounds: dict[str, list[list[float]]] = {name: [] for name in calls}
    sent = dict.fromkeys(calls, 0)
    for _ in range(plan.rounds):
        for name, call in calls.items():
            mscomm.barrier()
            before = job.sent()
            mscomm.barrier()
            rounds[name].append(_round(job, name, call, buffers, plan))
            mscomm.barrier()  # now all bytes of this round have arrived, so job.sent() counts them all
            sent[name] += job.sent() - before
    results = {}
    for name, call in calls.items():
        wrong = 0 if name == WIRE else _wrong(call, buffers)
        us = statistics.median(us for one in rounds[name] for us in one)
        busiest = int(mscomm.all_reduce(np.array([sent[name]]), "max")[0])
        calls_made = plan.rounds * (plan.warmup + iterations_of(plan, size))
        results[name] = {
            "in_place": {"us": us, "wrong": wrong, "rounds_us": rounds[name], "sent_bytes": busiest / calls_made}
        }
    return {"size": size, "count": count, "least_bytes": job.least_bytes(size), "results": results}


def iterations_of(plan: Plan, size: int) -> int:
    """Return the number of timed calls in a round. By default, it depends only on `size`."""
    if plan.iterations is not None:
        return plan.iterations
    return 100 if size <= 64 << 10 else 20 if size <= 1 << 20 else 4


def _round(job: Job, name: str, call: Callable[[], object], buffers: Buffers, plan: Plan) -> list[float]:
    """Make the calls of a round. Return the time of each call in us, averaged over the ranks that take part."""
    buffers.fill_for_repetition()
    for _ in range(plan.warmup):
        call()
    mscomm.barrier()
    mine = times_ns(call, iterations_of(plan, job.case.size(buffers.count)))
    spent = mscomm.all_gather(mine[np.newaxis])
    taking_part = spent[:: job.local_ranks] if name == WIRE else spent
    return [float(ns) / 1e3 for ns in np.mean(taking_part, axis=0)]


def _wrong(call: Callable[[], object], buffers: Buffers) -> int:
    """Make one call. Return the number of wrong elements in the results of all ranks."""
    buffers.fill()
    mscomm.barrier()
    call()
    return int(mscomm.all_reduce(np.array([buffers.wrong()]))[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
