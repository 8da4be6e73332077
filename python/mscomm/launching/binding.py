"""Binds ranks to CPUs: `mscomm run --bind-to`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

POLICIES = ("none", "core", "numa")
Cpus = frozenset[int]


def bound(policy: str, ranks: int, allowed: Iterable[int] | None = None, system: Path | None = None) -> list[Cpus]:
    """Return for each rank of this host the CPUs that it may use; an empty list if the policy is "none".

    core: each rank gets cores of its own, with all their hardware threads. numa: each rank gets the CPUs of one NUMA
    node, or of several nodes if there are more nodes than ranks. Cores and nodes are divided as evenly as possible, in
    their order.

    allowed: the CPUs to divide, by default those of this process. system: the folder /sys/devices/system, described in
    the kernel's Documentation/admin-guide/cputopology.rst and Documentation/ABI/stable/sysfs-devices-node. Raise
    ValueError if there are fewer cores than ranks.
    """
    if policy == "none":
        return []
    here = frozenset(os.sched_getaffinity(0) if allowed is None else allowed)
    system = system or Path("/sys/devices/system")
    nodes = list(_nodes(here, system))
    if policy == "numa":
        return [frozenset().union(*part) for part in _divided(nodes, ranks)]
    cores = [core for node in nodes for core in _cores(node, system)]
    if len(cores) < ranks:
        have = f"{len(cores)} cores" if len(cores) > 1 else "1 core"
        raise ValueError(f"core: {ranks} ranks cannot have cores of their own, because this process may use {have}")
    return [frozenset().union(*part) for part in _divided(cores, ranks)]


def _divided(places: Sequence[Cpus], ranks: int) -> Iterator[Sequence[Cpus]]:
    """Yield each rank's part of the places: consecutive ones, or one that several ranks share."""
    for rank in range(ranks):
        begin = rank * len(places) // ranks
        yield places[begin : max(begin + 1, (rank + 1) * len(places) // ranks)]


def _nodes(cpus: Cpus, system: Path) -> Iterator[Cpus]:
    """Yield the CPUs of each NUMA node, without the CPUs that are not in `cpus`."""
    left = cpus
    for folder in sorted((system / "node").glob("node[0-9]*"), key=lambda folder: int(folder.name[4:])):
        node = _listed(folder / "cpulist") & left
        left -= node
        if node:
            yield node
    if left:  # the kernel has no NUMA nodes
        yield left


def _cores(cpus: Cpus, system: Path) -> Iterator[Cpus]:
    """Yield the CPUs of each core, without the CPUs that are not in `cpus`."""
    left = cpus
    while left:
        first = min(left)
        core = (_listed(system / f"cpu/cpu{first}/topology/thread_siblings_list") | {first}) & left
        left -= core
        yield core


def _listed(file: Path) -> Cpus:
    """Return the CPUs in a file such as "0-3,8"; none if there is no such file."""
    try:
        text = file.read_text().strip()
    except FileNotFoundError:
        return frozenset()
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
