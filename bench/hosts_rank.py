"""Runs as each rank of bench/hosts.py: joins, creates the contenders and measures them. Rank 0 writes the results.

    mscomm run ... hosts_rank.py PLAN AGENT

PLAN is a JSON file, which hosts.py writes. AGENT is a program that replaces ssh.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from hosts_peers import Layout, bare, least_bytes, start_mpi, wire
from hosts_report import BARE, BARE_COLLECTIVES, LATENCY, WIRE

import mscomm
from mscomm.bench import report
from mscomm.bench.contenders import Cell, Contender, ourselves
from mscomm.bench.measuring import of_size, telling
from mscomm.bench.peers import GLOO_INTERFACES, PEERS
from mscomm.bench.plan import Plan, dtype_of
from mscomm.bench.table import Case
from mscomm.job import resolve

GLOO_PORT = 29500  # the hosts are new, so the port is free
_WARMUP_US = 20e3
_ROUND_US = 60e3
_LATENCY_BYTES, _LATENCY_CALLS = 16 << 10, 96


class RoundsOfHosts(Plan):
    """A plan whose rounds are short, because there are many cells, and some contenders are slow."""

    def calls(self, us: float) -> tuple[int, int]:
        warmup = min(200, max(2, int(_WARMUP_US / us)))
        return warmup, self.iterations or min(100, max(2, int(_ROUND_US / us)))


def plan_of(collective: str, given: dict[str, Any]) -> Plan:
    latency = collective == LATENCY
    return RoundsOfHosts(
        "all_reduce" if latency else collective,
        (_LATENCY_BYTES,) if latency else tuple(given["sizes"]),
        "float32",
        "sum",
        root=0,
        iterations=given["iters"] or (_LATENCY_CALLS if latency else None),
        warmup=None,
        rounds=given["rounds"],
        check=True,
        shared=False,
        peers=tuple(given["contenders"]),
        prefixes={},
        json=None,
        plot=None,
    )


def main(plan_file: str, agent: str) -> None:
    given = json.loads(Path(plan_file).read_text()) | {"agent": agent}
    mscomm.init()
    rank, ranks = mscomm.get_rank(), mscomm.get_group_size()
    layout = Layout(given["hosts"], given["interface"], ranks // len(given["hosts"]), rank)
    others: list[Contender] = []
    with telling(rank):
        others += _others(plan_of("all_reduce", given).case(rank, ranks), layout, given)
    for collective in given["collectives"]:
        plan = plan_of(collective, given)
        case = plan.case(rank, ranks)
        chosen = [ourselves(case, shared=False), *others]
        if collective == LATENCY:
            chosen = [chosen[0], Bfloat16(case), *(one for one in others if one.name != WIRE)]
        elif collective not in BARE_COLLECTIVES:
            chosen = [one for one in chosen if one.name != BARE]
        document = _measure(plan, case, layout, chosen)
        if rank == 0:
            document["plan"] = {**given, "collective": collective}
            report.write(Path(given["into"].format(collective)), document)
    for contender in others:
        contender.close()


def _others(case: Case, layout: Layout, given: dict[str, Any]) -> list[Contender]:
    found: list[Contender] = []
    for name in given["contenders"]:
        if name == WIRE:
            found.append(wire(case, layout))
        elif name == BARE:
            if layout.local_ranks == 1:
                found.append(bare(case, layout, Path(given["bare"])))
        elif name in GLOO_INTERFACES:
            found.append(_gloo(name, case, given))
        elif name != "mscomm":
            found.append(start_mpi(name, case, layout, given))
    return found


def _gloo(name: str, case: Case, given: dict[str, Any]) -> Contender:
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = given["interface"]
    if not dist.is_initialized():
        store = f"tcp://{given['hosts'][0]}:{GLOO_PORT}"
        dist.init_process_group("gloo", init_method=store, rank=case.rank, world_size=case.ranks)
    return PEERS[name].start(case, None)


class Bfloat16:
    """mscomm with bfloat16. Its messages have as many bytes as those of `case`, which is of float32."""

    def __init__(self, case: Case) -> None:
        self.name = "mscomm-bfloat16"
        self._inner = ourselves(_in_bfloat16(case), False, self.name)
        self.about, self.close = self._inner.about, self._inner.close

    def plan(self, case: Case) -> None:
        self._inner.plan(_in_bfloat16(case))

    def cell(self, count: int, in_place: bool) -> Cell:
        return self._inner.cell(2 * count, in_place)


def _in_bfloat16(case: Case) -> Case:
    return case._replace(dtype=dtype_of("bfloat16"))


def _measure(plan: Plan, case: Case, layout: Layout, chosen: list[Contender]) -> dict[str, Any]:
    """Measure one collective, or the latency. Return what goes to the result file.

    In each row, `least_bytes` is how much the busiest host must send or receive in a call, and `moved_bytes` is how
    much the busiest host has sent or received per call.
    """
    before = resolve(None).core.carried()
    contenders = [Metered(one, layout) for one in chosen]
    rows = []
    for count in plan.counts(case):
        for contender in contenders:
            contender.plan(case)
        size = case.size(count)
        results = of_size(plan, case, list(contenders), count)
        for contender in contenders:
            for mode in results[contender.name].values():
                mode["moved_bytes"] = contender.moved_per_call()
        least = least_bytes(case.row.name, size, layout)
        rows.append({"size": size, "count": count, "least_bytes": least, "results": results})
    after = resolve(None).core.carried()
    environment = report.environment(case.ranks)
    environment["congestion_control"] = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    environment["contenders"] = {contender.name: contender.about for contender in contenders}
    carried = {
        what: [int(one) for one in mscomm.all_gather(np.array([after[what] - before[what]]))]
        for what in ("arena", "mesh")
    }
    return {"environment": environment, "rows": rows, "carried": carried}


class Metered:
    """Wraps a contender, and counts the bytes that this host sends and receives in the measured rounds."""

    def __init__(self, inner: Contender, layout: Layout) -> None:
        self.name, self.about = inner.name, inner.about
        self._inner, self._layout = inner, layout
        self.close = inner.close

    def plan(self, case: Case) -> None:
        self._inner.plan(case)
        self._calls, self._moved = 0, np.zeros(2, np.int64)
        # In rooted collectives, a rank that only sends can return before the data has arrived.
        self._op = "max" if case.row.rooted else "avg"
        # In "wire", one rank of each host does something. The others return at once, and make the mean too small.
        self._factor = self._layout.local_ranks if self.name == WIRE and self._op == "avg" else 1

    def cell(self, count: int, in_place: bool) -> Cell:
        return _MeteredCell(self._inner.cell(count, in_place), self)

    def measured(self, cell: Cell, warmup: int, iterations: int) -> list[float]:
        mscomm.barrier()
        before = self._traffic()
        mscomm.barrier()
        times = cell.measure(warmup, iterations, self._op)
        mscomm.barrier()  # now all bytes of this round have arrived, so _traffic() counts them all
        self._moved += self._traffic() - before
        self._calls += warmup + iterations
        return [us * self._factor for us in times]

    def moved_per_call(self) -> float:
        """Return the most bytes that a host has sent, or has received, per call. Only rank 0 knows the calls of MPI."""
        return int(mscomm.all_reduce(np.array([self._moved.max()]), "max")[0]) / self._calls

    def _traffic(self) -> Any:
        """Return how many bytes this host has received and sent through its interface so far, headers included."""
        for line in Path("/proc/self/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == self._layout.interface:
                return np.array([int(numbers.split()[column]) for column in (0, 8)])
        raise RuntimeError(f"this host has no interface {self._layout.interface}")


class _MeteredCell:
    def __init__(self, inner: Cell, meter: Metered) -> None:
        self._inner, self._meter = inner, meter
        self.wrong, self.close = inner.wrong, inner.close

    def measure(self, warmup: int, iterations: int, op: str = "avg") -> list[float]:
        """Let the meter measure. It chooses `op` itself."""
        return self._meter.measured(self._inner, warmup, iterations)


if __name__ == "__main__":
    main(*sys.argv[1:])
