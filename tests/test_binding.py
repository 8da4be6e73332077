"""`mscomm run --bind-to`: which CPUs each rank gets."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from sessions import mscomm_run

from mscomm.launching.binding import bound


def machine(folder: Path, nodes: list[list[tuple[int, ...]]]) -> Path:
    """Write the files of a machine to the folder: for each NUMA node its cores, and for each core its CPUs."""
    for number, cores in enumerate(nodes):
        node = folder / f"node/node{number}"
        node.mkdir(parents=True)
        node.joinpath("cpulist").write_text(",".join(str(cpu) for core in cores for cpu in core) + "\n")
        for core in cores:
            for cpu in core:
                topology = folder / f"cpu/cpu{cpu}/topology"
                topology.mkdir(parents=True)
                topology.joinpath("thread_siblings_list").write_text(",".join(map(str, core)) + "\n")
    return folder


def two_nodes(folder: Path) -> Path:
    """Node 0 has the cores 0 to 2, node 1 the cores 3 to 5. The second thread of core c is CPU c + 6."""
    return machine(folder, [[(core, core + 6) for core in range(3)], [(core, core + 6) for core in range(3, 6)]])


def test_cores_are_divided_in_the_order_of_the_nodes(tmp_path: Path) -> None:
    system = two_nodes(tmp_path)
    assert bound("core", 6, range(12), system) == [{core, core + 6} for core in range(6)]
    assert bound("core", 2, range(12), system) == [{0, 1, 2, 6, 7, 8}, {3, 4, 5, 9, 10, 11}]
    shares = bound("core", 4, range(12), system)
    assert shares == [{0, 6}, {1, 2, 7, 8}, {3, 9}, {4, 5, 10, 11}]


def test_ranks_are_divided_among_the_nodes(tmp_path: Path) -> None:
    system = two_nodes(tmp_path)
    first, second = {0, 1, 2, 6, 7, 8}, {3, 4, 5, 9, 10, 11}
    assert bound("numa", 1, range(12), system) == [first | second]
    assert bound("numa", 3, range(12), system) == [first, first, second]
    assert bound("numa", 4, range(12), system) == [first, first, second, second]


def test_only_the_allowed_cpus_are_divided(tmp_path: Path) -> None:
    system = two_nodes(tmp_path)
    allowed = {0, 7, 3, 9}  # one thread of the cores 0 and 1, and both threads of core 3
    assert bound("core", 3, allowed, system) == [{0}, {7}, {3, 9}]
    assert bound("numa", 2, allowed, system) == [{0, 7}, {3, 9}]
    assert bound("numa", 2, {0, 7}, system) == [{0, 7}, {0, 7}]  # the other node does not count
    with pytest.raises(ValueError, match=r"^core: 4 ranks cannot have cores of their own, .* may use 3 cores$"):
        bound("core", 4, allowed, system)


def test_a_kernel_that_tells_nothing_has_one_node_and_a_core_for_each_cpu(tmp_path: Path) -> None:
    assert bound("core", 2, {4, 5, 6}, tmp_path) == [{4}, {5, 6}]
    assert bound("numa", 2, {4, 5}, tmp_path) == [{4, 5}, {4, 5}]
    (tmp_path / "node/node0").mkdir(parents=True)
    (tmp_path / "node/node0/cpulist").write_text("0-2,5\n")
    assert bound("numa", 2, {1, 2, 5, 9}, tmp_path) == [{1, 2, 5}, {9}]


def test_ranks_run_on_their_cpus(tmp_path: Path) -> None:
    shown = tmp_path / "shown.py"
    shown.write_text(
        "import os, numpy as np, mscomm\n"
        "mscomm.init()\n"
        "assert (mscomm.all_reduce(np.ones(4)) == mscomm.get_group_size()).all()\n"
        "print('cpus', mscomm.get_rank(), sorted(os.sched_getaffinity(0)))\n"
    )
    for policy in ("core", "numa"):
        n = min(2, len(os.sched_getaffinity(0))) if policy == "numa" else cores()
        done = mscomm_run("-n", n, "--bind-to", policy, shown)
        assert done.returncode == 0, done.stdout + done.stderr
        for rank, cpus in enumerate(bound(policy, n)):
            assert f"cpus {rank} {sorted(cpus)}" in done.stdout, done.stdout
    done = mscomm_run("-n", len(os.sched_getaffinity(0)) + 1, "--bind-to", "core", shown)
    assert done.returncode == 1 and re.search(r"^Error: --bind-to core: \d+ ranks cannot have cores", done.stderr, re.M)


def cores() -> int:
    """Return how many cores this process may use, at most 4."""
    for ranks in range(2, 5):
        try:
            bound("core", ranks)
        except ValueError:
            return ranks - 1
    return 4
