"""Determines how many CPUs the ranks of a host may use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any


def cpu_quota(mounted: str = "/sys/fs/cgroup", mine: str = "/proc/self/cgroup") -> float:
    """Return how many CPUs the processes of this process's cgroup may use; inf if there is no limit.

    The quotas of the cgroups around it count, too. `mounted`: where the cgroup file systems are mounted. `mine`: the
    file that names the cgroups of this process. Both are described in cgroups(7).
    """
    return min((_quota(*files) for files in _quota_files(Path(mounted), Path(mine))), default=float("inf"))


def _quota_files(mounted: Path, mine: Path) -> Iterator[list[Path]]:
    """Yield the files with the quota and the period of each cgroup that may limit this process."""
    try:
        lines = os.fsdecode(mine.read_bytes()).splitlines()
    except OSError:  # there is no /proc
        lines = ["0::/", "1:cpu:/"]
    for controllers, _, path in (line.partition(":")[2].partition(":") for line in lines):
        if controllers and "cpu" not in controllers.split(","):
            continue
        roots = [mounted / "cpu", mounted / controllers] if controllers else [mounted, mounted / "unified"]
        names = ["cpu.cfs_quota_us", "cpu.cfs_period_us"] if controllers else ["cpu.max"]
        # In a container, the path may be that of the host, which is not mounted here. What is mounted at the root is
        # then the container's own cgroup.
        inside = PurePosixPath("/", *(part for part in PurePosixPath(path).parts[1:] if part != ".."))
        for folder in (inside, *inside.parents):
            for root in roots:
                yield [root / str(folder).lstrip("/") / name for name in names]


def _quota(*files: Path) -> float:
    with contextlib.suppress(OSError, ValueError):  # there is no such cgroup, or it is one without a quota
        quota, period = " ".join(file.read_text() for file in files).split()
        if quota not in ("max", "-1"):
            return float(quota) / float(period)
    return float("inf")


def usable_cpus() -> int:
    """Return how many CPUs this process and its children can keep busy: at least 1."""
    return max(1, int(min(len(os.sched_getaffinity(0)), cpu_quota())))


def can_spin(members: Sequence[dict[str, Any]]) -> bool:
    """Return whether each of these ranks can have its own CPU. `members`: the facts of all ranks on one host."""
    return len(members) <= cpus_of(members)


def cpus_of(members: Sequence[dict[str, Any]]) -> float:
    """Return how many CPUs these ranks on one host share.

    The result is the number of different CPUs in their affinity masks, or the smallest quota if that is less.
    """
    cpus = {cpu for member in members for cpu in member["cpus"]}
    return float(min(len(cpus), *(member["quota"] for member in members)))
