"""What a job writes to stderr: by default only warnings; at INFO, how it was set up; at TRACE, each call."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from ranks import Job

from mscomm.bootstrap import launcher

BODY = """
import numpy as np, mscomm
from mscomm.subgroups import create_group
mscomm.init()
mscomm.all_reduce(np.ones(1000, np.float32))
mscomm.barrier()
mscomm.all_reduce_many([np.ones(3), np.ones(4)])
pair = create_group("pair", [1, 0])
if pair:
    mscomm.broadcast(np.ones((2, 3), np.int32), root=1, group=pair)
mscomm.release()
"""
LINE = re.compile(r"mscomm [\w-]+:\d+ \[(\d+|-)\] (VERSION|WARN|INFO|TRACE) (.*)")


def lines_of(folder: Path, ranks: int = 2, body: str = BODY, **env: str) -> list[list[str]]:
    """Return the lines of each rank as "LEVEL text". Check that every line is in the log's format."""
    env = {"MSCOMM_DEBUG": "", "MSCOMM_DEBUG_FILE": "", "MSCOMM_ALGO": "", **env}
    job = Job(ranks, [sys.executable, "-c", body], folder, env)
    codes = job.wait(60)
    assert codes == [0] * ranks, job.logs()
    told = []
    for rank in range(ranks):
        lines = []
        for line in job.output(rank).splitlines():
            found = LINE.fullmatch(line)
            assert found, line
            # Whether the line was written before the rank was known.
            early = found[2] == "VERSION" or found[3].startswith("launcher: ")
            assert found[1] == ("-" if early else str(rank)), line
            lines.append(f"{found[2]} {found[3]}")
        told.append(lines)
    return told


def levels(lines: list[str]) -> set[str]:
    return {line.partition(" ")[0] for line in lines}


def has(lines: list[str], pattern: str) -> bool:
    return any(re.fullmatch(pattern, line) for line in lines)


def test_nothing_is_said_by_default(tmp_path: Path) -> None:
    assert lines_of(tmp_path) == [[], []]


def test_version_is_one_line(tmp_path: Path) -> None:
    for (line,) in lines_of(tmp_path, MSCOMM_DEBUG="VERSION"):
        assert re.fullmatch(r"VERSION mscomm \S+, Python 3\.\S+, NumPy \S+", line)


def test_info_tells_how_the_job_was_put_together(tmp_path: Path) -> None:
    for rank, lines in enumerate(lines_of(tmp_path, MSCOMM_DEBUG="INFO")):
        assert levels(lines) == {"VERSION", "INFO"}
        assert has(lines, rf"INFO launcher: mscomm run, known by MSCOMM_RANK={rank} MSCOMM_WORLD_SIZE=2 .*")
        assert has(lines, r"INFO hosts: 1; \S+ is number 0 and has the ranks 0, 1")
        assert has(lines, r"INFO shared memory: room for \d+ MiB of arrays a rank; .*")
        assert has(lines, rf"INFO group world \(0:world\): rank {rank} of 2, ranks 0, 1")
        assert has(lines, r"INFO group world: by arena: all_reduce arena, .*, scan arena, exscan arena")
        assert has(lines, r"INFO group world: waits (spin|yield): 2 ranks on this host, [\d.]+ CPUs for them")
        assert has(lines, rf"INFO joined as rank {rank} of 2 in \d+\.\d+ s")
        assert has(lines, rf"INFO group pair \(0:pair:\w+:1\): rank {1 - rank} of 2, ranks 1, 0")
        assert has(lines, r"INFO group pair \(0:pair:\w+:1\): ended on this rank, after 1 calls")
        assert has(lines, r"INFO group world \(0:world\): ended on this rank, after 3 calls")


def test_trace_has_one_line_for_each_call(tmp_path: Path) -> None:
    for lines in lines_of(tmp_path, MSCOMM_DEBUG="TRACE"):
        assert levels(lines) == {"VERSION", "INFO", "TRACE"}
        calls = [re.sub(r"\d+\.\d us$", "T", line) for line in lines if line.startswith("TRACE ")]
        assert re.sub(r"digest \w+", "digest D", "\n".join(calls)).splitlines() == [
            "TRACE group world: all_reduce #1 (float32[1000], sum) done in T",
            "TRACE group world: barrier #2 done in T",
            "TRACE group world: all_reduce_many #3 (float64[7], sum, digest D) done in T",
            "TRACE group pair: broadcast #1 (int32[2, 3], root 1) done in T",
        ]


ASYNC = """
import numpy as np, mscomm
mscomm.init()
works = [mscomm.all_reduce(np.ones(n + 1), async_op=True) for n in range(3)]
for work in works:
    work.wait()
mscomm.barrier()
mscomm.release()
"""


def test_trace_has_the_calls_that_ran_beside_the_caller(tmp_path: Path) -> None:
    for lines in lines_of(tmp_path, body=ASYNC, MSCOMM_DEBUG="TRACE"):
        names = [line.split()[3:5] for line in lines if line.startswith("TRACE ")]
        assert names == [["all_reduce", "#1"], ["all_reduce", "#2"], ["all_reduce", "#3"], ["barrier", "#4"]]


FAILING = """
import numpy as np, mscomm
mscomm.init()
try:
    mscomm.all_reduce(np.ones(1 + mscomm.get_rank()))
except mscomm.Mismatch:
    pass
"""


def test_a_failure_is_told_with_its_cause(tmp_path: Path) -> None:
    for lines in lines_of(tmp_path, body=FAILING, MSCOMM_DEBUG="TRACE"):
        assert has(lines, r"TRACE group world: all_reduce #1 \(float64\[\d\], sum\) failed in .*")
        assert has(lines, r"INFO group world is broken: Mismatch: the ranks of group world made different calls: .*")


def test_over_the_mesh_the_carrier_and_the_hosts_are_told(tmp_path: Path) -> None:
    def of_its_own_host(rank: int) -> dict[str, str]:
        return {"MSCOMM_DEBUG": "INFO", "MSCOMM_HOST_ID": f"h{rank}"}

    job = Job(2, [sys.executable, "-c", BODY], tmp_path, of_its_own_host)
    assert job.wait(60) == [0, 0], job.logs()
    assert "INFO hosts: 2; " in job.output(1)
    assert "INFO shared memory: none, no other rank is on this host" in job.output(1)
    assert "INFO group world: by mesh: all_reduce direct, " in job.output(1)
    assert "waits" not in job.output(1)


def test_the_links_listen_where_the_variable_says(tmp_path: Path) -> None:
    def of_its_own_host(rank: int) -> dict[str, str]:
        return {"MSCOMM_SOCKET_IFNAME": "nosuch0", "MSCOMM_HOST_ID": f"h{rank}"}

    job = Job(2, [sys.executable, "-c", BODY], tmp_path, of_its_own_host)
    assert job.wait(60) == [1, 1], job.logs()
    assert "MSCOMM_SOCKET_IFNAME='nosuch0' matches no interface of this host that is up" in job.logs()


def test_one_rank_warns_of_forced_algorithms(tmp_path: Path) -> None:
    first, second = lines_of(tmp_path, MSCOMM_ALGO="all_reduce=ring,broadcast=tree")
    assert first == ["WARN MSCOMM_ALGO forces all_reduce=ring, broadcast=tree; ring adds floats in an order of its own"]
    assert second == []


def test_one_rank_of_a_host_warns_of_too_many_threads(tmp_path: Path) -> None:
    first, second = lines_of(tmp_path, OMP_NUM_THREADS="5000")
    (line,) = first
    assert re.fullmatch(
        r"WARN OMP_NUM_THREADS=5000 on each of 2 ranks makes 10000 threads on [\d.]+ CPUs: slow; "
        r"OMP_NUM_THREADS=\d+ fits",
        line,
    )
    assert second == []


def test_a_number_of_threads_that_is_none_is_a_warning_and_no_error(tmp_path: Path) -> None:
    first, _ = lines_of(tmp_path, OMP_NUM_THREADS="many")
    assert first == ["WARN OMP_NUM_THREADS='many': expected a number of threads, 1 or more"]


@pytest.mark.parametrize("level", ["", "INFO"])
def test_a_job_of_one_tells_that_it_is_one(tmp_path: Path, level: str) -> None:
    body = "import mscomm; mscomm.init(); mscomm.barrier()"
    command = ["env", *(f"--unset={name}" for name in launcher.VARIABLES), sys.executable, "-c", body]
    job = Job(1, command, tmp_path, {"MSCOMM_DEBUG": level})
    assert job.wait(60) == [0], job.logs()
    lines = [LINE.fullmatch(line) for line in job.output(0).splitlines()]
    assert all(lines)
    texts = [found[3] for found in lines if found]
    assert ("launcher: none, a job of one" in texts) == bool(level)
    assert bool(texts) == bool(level)
