"""Determines how many CPUs the ranks of a host may use."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def cpu_quota(root: str = "/sys/fs/cgroup") -> float:
    """Return how many CPUs the processes of this cgroup may use; inf if there is no limit.

    Read the CPU quota from the files of cgroup v2 or, if there are none, of cgroup v1.
    """
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError):
            quota, period = " ".join(Path(root, name).read_text() for name in names).split()
            return float(quota) / float(period) if quota not in ("max", "-1") else float("inf")
    return float("inf")


def can_spin(members: Sequence[dict[str, Any]]) -> bool:
    """Return whether each of these ranks can have its own CPU. `members`: the facts of all ranks on one host."""
    return len(members) <= cpus_of(members)


def cpus_of(members: Sequence[dict[str, Any]]) -> float:
    """Return how many CPUs these ranks on one host share.

    The result is the number of different CPUs in their affinity masks, or the smallest quota if that is less.
    """
    cpus = {cpu for member in members for cpu in member["cpus"]}
    return float(min(len(cpus), *(member["quota"] for member in members)))
