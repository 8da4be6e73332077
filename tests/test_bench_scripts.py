"""The scripts and the pytest-benchmark suite in the bench folder."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from benches import installed, matplotlib
from sessions import clean_environment, invoke, run

from mscomm.bench import plot

BENCH = str(Path(__file__).parents[1] / "bench")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the test import modules from the bench folder."""
    monkeypatch.syspath_prepend(BENCH)


with_scripts = pytest.mark.usefixtures("scripts")
TIMES = {"mscomm": 10.0, "private": 40.0, "memory": 8.0, "openmpi": 90.0, "openmpi-single": 95.0, "mpich": 70.0}
TIMES |= {"mpich-single": 60.0, "torch-gloo": 500.0, "torch-gloo-4": 510.0}


def samples(us: float, spread: float = 0.0, wrong: int | None = 0) -> dict[str, Any]:
    """Return what compare.py writes for one contender: eleven rounds, whose medians are spread around `us`."""
    rounds = [us * (1 + spread * (turn - 5) / 5) for turn in (3, 7, 0, 9, 5, 1, 10, 4, 8, 2, 6)]
    return {"in_place": {"us": us, "wrong": wrong, "rounds_us": [[one, one * 1.1, one * 0.9] for one in rounds]}}


def measured(folder: Path, rows: dict[int, dict[str, Any]], collective: str = "all_reduce", **facts: Any) -> None:
    """Write a file like those that compare.py writes, for two ranks."""
    names = next(iter(rows.values()))
    environment = {"ranks": 2, "cpus": 2, "cpu": "one", "kernel": "6", "began": "now"}
    environment |= {"mscomm": "1", "python": "3", "numpy": "2", "contenders": {name: f"{name} 1" for name in names}}
    document = {
        "plan": {"collective": collective, "shared": True, "peers": list(names)[1:]},
        "environment": environment | facts,
        "rows": [{"size": size, "results": results} for size, results in rows.items()],
    }
    (folder / f"{collective}-2.json").write_text(json.dumps(document))


def compared(folder: Path) -> str:
    import compare

    return "\n".join(compare.report(compare.read_all(folder))) + "\n"


def all_sizes(**spreads: float) -> dict[int, dict[str, Any]]:
    import compare

    return {size: {name: samples(us, spreads.get(name, 0)) for name, us in TIMES.items()} for size in compare.SIZES}


@with_scripts
def test_compare_reports_times_goals_and_cells_that_miss_them(tmp_path: Path) -> None:
    rows = all_sizes()
    rows[16384]["private"] = samples(80.0)
    measured(tmp_path, rows)
    text = compared(tmp_path)
    line = "10.0 | 40.0 | 60.0 mpich-single | 500.0 torch-gloo | 6.00 (6.00 to 6.00) | 1.50 (1.50 to 1.50) | 50.00"
    assert f"| 4 KiB | {line}" in text and f"| 64 KiB | {line}" in text
    assert re.search(r"^\| 4 KiB .* - \|$", text, re.M) and re.search(r"^\| 64 KiB .* 80% \|$", text, re.M)
    arena = "met: all_reduce, 2 ranks, arena, 4 KiB to 64 MiB: MPI takes 6.00 times as long (goal 5); smallest 6.00"
    assert f"* {arena} (goal 1.5)\n" in text
    foreign = "MISSED: all_reduce, 2 ranks, foreign, 4 KiB to 64 MiB: MPI takes 1.38 times as long (goal 1.5);"
    assert f"* {foreign} smallest 0.75 (goal 1)\n  * 16 KiB: mpich-single **0.75 (0.75 to 0.75)**\n" in text
    assert "* not measured: arena, MPI: all_reduce, 4 ranks\n" in text
    assert "* wrong elements: none\n" in text and "not checked" not in text
    assert "* in brackets: 95 %, by a bootstrap over 11 rounds\n" in text


@with_scripts
def test_compare_calls_no_goal_met_of_which_something_is_missing(tmp_path: Path) -> None:
    rows = all_sizes()
    del rows[65536], rows[4096]["mpich"]
    measured(tmp_path, rows)
    text = compared(tmp_path)
    assert re.search(r"\* not measured: all_reduce, 2 ranks, arena, .*; missing: 64 KiB, mpich$", text, re.M)
    assert re.search(r"\* not measured: all_reduce, 2 ranks, arena, 8 B .* gloo .*; missing: 64 KiB$", text, re.M)


@with_scripts
def test_compare_says_which_cells_of_a_goal_are_within_noise(tmp_path: Path) -> None:
    rows = all_sizes()
    # The ratio 60 / 39 meets the goal of 1.5, but the ratio's interval begins below 1.5.
    rows[4096]["mscomm"] = samples(39.0, spread=0.5)
    measured(tmp_path, rows)
    found = re.search(r"all_reduce, 2 ranks, arena, 4 KiB.*MPI.*smallest 1.54 \(goal 1.5\)(.*)", compared(tmp_path))
    assert found and found[1] == "; 1 cells within noise"


@with_scripts
def test_a_ratio_is_that_of_the_medians_of_rounds_and_its_interval_holds_it() -> None:
    from ratio import interval, ratio

    ours = np.array([1.0, 1, 1, 1, 1, 9, 9, 9, 9, 9, 2])
    found = ratio(ours * 3, ours)
    assert found == (3.0, 3.0, 3.0)  # no spread, because a bootstrap draws the same rounds for both contenders
    found = ratio(np.full(11, 6.0), ours)
    assert found.low < found.value == 3.0 < found.high
    assert (interval(11), interval(5)) == ("95 %", "range")


@with_scripts
def test_compare_tells_wrong_and_unchecked_results(tmp_path: Path) -> None:
    rows = all_sizes()
    rows[8]["mpich"] = samples(1.0, wrong=3)
    rows[4096]["mpich"] = samples(1.0, wrong=4)
    measured(tmp_path, rows)
    measured(tmp_path, {8: {"mscomm": samples(1.0, wrong=None), "private": samples(1.0)}}, "broadcast")
    text = compared(tmp_path)
    assert "* wrong elements: all_reduce, 2 ranks: 7 of mpich\n* not checked: broadcast, 2 ranks\n" in text


@with_scripts
@pytest.mark.parametrize(
    "facts",
    [{"cpu": "two"}, {"cpus": 4}, {"kernel": "7"}, {"mscomm": "2"}, {"contenders": {"mpich": "MPICH 5"}}],
)
def test_compare_makes_no_report_of_two_settings(facts: dict[str, Any], tmp_path: Path) -> None:
    import click

    measured(tmp_path, all_sizes())
    measured(tmp_path, all_sizes(), "broadcast", **facts)
    said = r"is .* in .*broadcast-2.json and .* in .*all_reduce-2.json: move measurements"
    with pytest.raises(click.ClickException, match=said):
        compared(tmp_path)


@with_scripts
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--collectives", "all_reduce,reduce"], "'reduce' is not one of all_reduce"),
        (["--vs", "torch-gloo,gloo2"], "'gloo2' is not one of openmpi"),
        (["--rounds", "3"], "3 is not in the range x>=5"),
    ],
)
def test_compare_checks_its_words_before_anything_is_measured(words: list[str], said: str, tmp_path: Path) -> None:
    import compare

    done = invoke(compare.main, *words, tmp_path / "none")
    assert done.exit_code == 2 and said in done.output
    assert not (tmp_path / "none").exists()


@with_scripts
def test_compare_checks_for_matplotlib_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import compare

    monkeypatch.setattr(plot, "missing", lambda: True)
    done = invoke(compare.main, tmp_path)
    assert done.exit_code == 1 and plot.MISSING in done.output


@with_scripts
def test_compare_keeps_what_is_wrong_and_goes_on_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both runs of `mscomm bench` end with status 1, but the run for 8 bytes has written its file. compare must keep
    that file, and report only the other run as failed.
    """
    import compare

    def bench(command: list[str], **options: Any) -> Any:
        if command[command.index("-b") + 1] == "8":
            Path(command[-1]).write_text(json.dumps({"rows": [8]}))
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(compare.subprocess, "run", bench)
    (failed,) = compare._measure(["all_reduce", "-n", "2"], tmp_path / "all_reduce-2.json")
    assert re.fullmatch(r"mscomm bench all_reduce -n 2 -b 4096 .*: status 1", failed)
    assert json.loads((tmp_path / "all_reduce-2.json").read_text()) == {"rows": [8]}


@matplotlib
def test_compare_measures_and_reports(tmp_path: Path) -> None:
    installed("torch-gloo")
    small = "import compare; compare.SIZES = (8, 4096, 65536); compare.main()"
    words = ["-n", "2", "--collectives", "broadcast", "--vs", "torch-gloo", "--iters", "1", "--rounds", "5"]
    env = {**clean_environment(), "PYTHONPATH": os.pathsep.join([BENCH, os.environ.get("PYTHONPATH", "")])}
    done = run([sys.executable, "-c", small, *words, tmp_path], 240, env)
    assert done.returncode == 0, done.stderr
    assert "### broadcast, 2 ranks\n\nBegan " in done.stdout
    assert [line.split(" | ")[0] for line in done.stdout.splitlines() if re.match(r"\| \d", line)] == [
        "| 8 B",
        "| 4 KiB",
        "| 16 KiB",
        "| 64 KiB",
    ]
    assert "* in brackets: range, by a bootstrap over 5 rounds\n" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "broadcast-2.json",
        "ratio.svg",
        "report.md",
        "share.svg",
    ]


# -- hosts.py

BETWEEN = {"mscomm": 10.0, "openmpi": 16.0, "mpich": 17.0, "torch-gloo": 50.0, "bare": 9.0, "wire": 4.0}


def between_hosts(folder: Path, collective: str = "all_reduce", moved: float = 1.25, **us: float) -> None:
    """Write a file like those that hosts.py writes, for two hosts of one rank on an unshaped link."""
    import hosts_report

    rows = []
    for size in hosts_report.SIZES:
        results = {name: samples(one) for name, one in (BETWEEN | us).items()}
        for modes in results.values():
            modes["in_place"]["moved_bytes"] = moved * size
        rows.append({"size": size, "least_bytes": size, "results": results})
    environment = {"cpus": 2, "cpu": "one", "kernel": "6", "began": "now", "congestion_control": "cubic"}
    environment |= {"mscomm": "1", "python": "3", "numpy": "2", "contenders": {name: f"{name} 1" for name in results}}
    plan = {"link": "unshaped", "layout": "2x1", "collective": collective, "variables": {}}
    document = {"plan": plan, "environment": environment, "rows": rows, "carried": {"arena": [0, 0], "mesh": [7, 7]}}
    (folder / f"unshaped-2x1-{collective}.json").write_text(json.dumps(document))


def hosts_reported(folder: Path) -> str:
    import hosts_report

    return "\n".join(hosts_report.report(hosts_report.read_all(folder))) + "\n"


@with_scripts
def test_hosts_reports_times_and_the_cells_that_miss_goals(tmp_path: Path) -> None:
    between_hosts(tmp_path)
    between_hosts(tmp_path, "broadcast", openmpi=9.0, bare=5.0)
    text = hosts_reported(tmp_path)
    gloo = "5.00 (5.00 to 5.00)"
    assert (
        f"| 4 KiB | 10.0 | 9.0 openmpi | 50.0 torch-gloo | 5.0 | 4.0 | **0.90 (0.90 to 0.90)** | {gloo}"
        " | 2.00 (2.00 to 2.00) | 40.0% (40.0% to 40.0%) | 1.25 | 1.25 |\n" in text
    )
    head = "unshaped, 2 hosts, 1 rank each, 1 MiB to 16 MiB: bare's time / mscomm's"
    figures = f"mean {(0.9 * 0.5) ** 0.5:.2f}; smallest 0.50 (goal 0.87); 6 of 10 cells missing"
    cells = "".join(f"  * broadcast, {size} MiB: bare 0.50 (0.50 to 0.50)\n" for size in (1, 16))
    assert f"* MISSED: {head}: {figures}\n{cells}* " in text
    assert "* not measured: 1gbit, 2 hosts, 1 rank each, 1 MiB to 16 MiB: wire's time / mscomm's\n" in text
    assert "* went between hosts by another way than the wire: nothing\n" in text


@with_scripts
def test_hosts_calls_a_goal_met_only_if_all_cells_were_measured_and_their_mean_is_high(tmp_path: Path) -> None:
    import hosts_report

    verdict = r"^\* (\w[\w ]*): unshaped, 2 hosts, 1 rank each, 8 B to 16 MiB: MPI's time / mscomm's: (.*)$"
    for collective in hosts_report.MOVING:
        between_hosts(tmp_path, collective)
    assert re.findall(verdict, hosts_reported(tmp_path), re.M) == [
        ("met", "mean 1.60 (goal 1.2); smallest 1.60 (goal 0.95)")
    ]
    (tmp_path / "unshaped-2x1-gather.json").unlink()
    ((first, words),) = re.findall(verdict, hosts_reported(tmp_path), re.M)
    assert first == "not measured" and words.endswith("; 5 of 40 cells missing")
    for collective in hosts_report.MOVING:
        between_hosts(tmp_path, collective, openmpi=11.0)
    ((first, words),) = re.findall(verdict, hosts_reported(tmp_path), re.M)
    assert (first, words) == ("MISSED", "mean 1.10 (goal 1.2); smallest 1.10 (goal 0.95)")


@with_scripts
def test_hosts_reports_the_latency_and_bytes_that_went_another_way(tmp_path: Path) -> None:
    between_hosts(tmp_path, "latency", moved=0.5)
    text = hosts_reported(tmp_path)
    assert "| mpich | 17.0 | 18.7 | 1.70 (1.70 to 1.70) | 33 |\n" in text  # samples() has calls of 0.9, 1 and 1.1 times
    assert "latency, unshaped, 2 hosts, 1 rank each, 8 B: mpich moved 0.50 of what it must" in text


def test_hosts_needs_a_compiler_for_bare_before_anything_is_measured(tmp_path: Path) -> None:
    env = {**clean_environment(), "CXX": str(tmp_path / "none")}
    done = run([sys.executable, Path(BENCH, "hosts.py"), "--contenders", "bare", tmp_path / "results"], 60, env)
    assert done.returncode == 1 and "Set CXX to a C++20 compiler, or leave bare out of --contenders" in done.stderr


@pytest.mark.long
def test_hosts_measures_and_reports(tmp_path: Path) -> None:
    """Run bench/hosts.py as a process. The test cannot import it, because tests/hosts.py has the same module name."""
    contenders = ["torch-gloo", "bare", "wire"]
    mpis = []
    for name in ("openmpi", "mpich"):
        with contextlib.suppress(pytest.skip.Exception):
            mpis += installed(name)
            contenders.append(name)
    installed("torch-gloo")
    if os.getuid() != 0 or shutil.which("tc") is None:
        pytest.skip("shaped links need root and iproute2")
    words = ["--links", "1gbit", "--layouts", "2x1", "--sizes", "8,64K", "--iters", "1", "--rounds", "5"]
    command = [sys.executable, Path(BENCH, "hosts.py"), *words, "--contenders", ",".join(contenders), *mpis, tmp_path]
    env = {**clean_environment(), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    done = run(command, 480, env)
    assert done.returncode == 0, done.stderr
    assert "* wrong elements: none\n* went between hosts by another way than the wire: nothing\n" in done.stdout
    assert "### all_to_all, 1gbit, 2 hosts, 1 rank each\n\nBegan " in done.stdout
    calls = re.findall(r"^Of mscomm's calls 0 bytes went by shared memory, [1-9]\d* by links\.$", done.stdout, re.M)
    assert len(calls) == 9
    assert re.findall(r"^\| (\d+ \w+) ", done.stdout, re.M) == ["8 B", "64 KiB"] * 8
    assert re.search(r"^\| mscomm-bfloat16 \| .* \| 5 \|$", done.stdout, re.M)
    assert len(list(tmp_path.glob("1gbit-2x1-*.json"))) == 9 and (tmp_path / "report.md").exists()
    (row, _) = json.loads((tmp_path / "1gbit-2x1-all_reduce.json").read_text())["rows"]
    assert set(row["results"]) == {"mscomm", *contenders}
    assert all(len(modes["in_place"]["rounds_us"]) == 5 for modes in row["results"].values())


@with_scripts
def test_the_first_kind_that_exchanges_is_the_reference_for_the_weights() -> None:
    """check_weights() must report that jobs of two kinds ended with different weights, even if no job ran in graph
    mode.
    """
    import click
    from mindspore_step import MINDSPORE, MSCOMM, NOBODY, Kind, check_weights

    def job(value: float) -> Any:
        return SimpleNamespace(weights=[[np.full(3, value)]] * 2)

    jobs = {
        Kind("pynative", carrier): job(value) for carrier, value in ((NOBODY, 5.0), (MINDSPORE, 1.0), (MSCOMM, 1.0))
    }
    check_weights(jobs)
    jobs[Kind("pynative", MSCOMM)] = job(2.0)
    with pytest.raises(
        click.ClickException, match="pynative, by mscomm: other weights than pynative, by MindSpore, by"
    ):
        check_weights(jobs)


# -- workers.py


def test_workers_runs_a_whole_job() -> None:
    done = subprocess.run(
        [sys.executable, Path(BENCH, "workers.py"), "-n", "3,20"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    head, _, *rows = done.stdout.splitlines()
    assert head.startswith("| workers | hello | join | world | ready | group | leave | peak MiB")
    assert [row.split("|")[1].strip() for row in rows] == ["3", "20"]


# -- loops.py


@pytest.mark.long
def test_loops_measures_calls_in_a_row() -> None:
    installed("openmpi")
    small = "import loops; loops.COLLECTIVES, loops.SIZES, loops.CALLS = ('gather',), (64,), 20; loops.main()"
    env = {**clean_environment(), "PYTHONPATH": os.pathsep.join([BENCH, os.environ.get("PYTHONPATH", "")])}
    done = run([sys.executable, "-c", small, "-n", "2", "--rounds", "1"], 240, env)
    assert done.returncode == 0, done.stderr
    _, _, *rows = done.stdout.splitlines()
    assert len(rows) == 1 and rows[0].startswith("| gather | 2 | 64 | ")


# -- scaling.py


@pytest.mark.parametrize("picture", ["no picture", pytest.param("scaling.svg", marks=matplotlib)])
def test_scaling_shows_the_model_beside_what_was_measured(tmp_path: Path, picture: str) -> None:
    prices = {"latency_us": 10, "message_us": 5, "byte_ns": 1, "crowded_byte_ns": 0, "copied_byte_ns": 0.1}
    files = []
    for ranks in (4, 2):
        rows = [
            {
                "collective": what,
                "message": size,
                "best": "direct",
                "results": {"direct": {"in_place": {"us": 7.0 * ranks}}},
            }
            for what in ("all_reduce", "all_gather")
            for size in (8, 4096, 32768, 262144, 1 << 20)
        ]
        files.append(tmp_path / f"{ranks}.json")
        files[-1].write_text(json.dumps({"environment": {"ranks": ranks}, "rows": rows, "prices": prices}))
    plot_words = [] if picture == "no picture" else ["--plot", tmp_path / picture]
    done = run([sys.executable, Path(BENCH, "scaling.py"), *files, *plot_words], 120, clean_environment())
    assert done.returncode == 0, done.stderr
    assert "| all_reduce | 8 B | 14, 15 | 28, 25 |" in done.stdout.splitlines()
    (far,) = (line for line in done.stdout.splitlines() if re.match(r"\| all_gather \| 8 B \| \d+ direct", line))
    # 12 messages follow one another: 12 * (10 + 5) us for them, 33 us for their bytes, and 3 us for copies.
    assert far.endswith(" 216 bruck |")
    assert [path.name for path in tmp_path.glob("*.svg")] == [name for name in [picture] if name != "no picture"]


# -- torch_inference.py


def test_torch_inference_measures_without_deepspeed(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = Path(BENCH, "torch_inference.py")
    done = run([sys.executable, script, "-n", "2", "--rounds", "1"], 240, clean_environment())
    assert done.returncode == 0, done.stderr
    assert "DeepSpeed was not measured: give its unpacked source package with --deepspeed" in done.stderr
    title, _, head, _, *rows = done.stdout.strip().splitlines()
    assert (
        title == "2 ranks, in brackets: range" and head == "| KiB | torch | mscomm | gloo | gloo/torch | gloo/mscomm |"
    )
    assert [row.split(" | ")[0] for row in rows] == [f"| {4 << shift}" for shift in range(9)]
    done = run([sys.executable, script, "--deepspeed", tmp_path], 60, clean_environment())
    assert done.returncode == 2 and f"{tmp_path} has no csrc/cpu/comm/shm.cpp" in done.stderr


# -- builds.py

BUILD = """#!{python}
import json, sys
words = dict(zip(sys.argv[3::2], sys.argv[4::2]))
modes = {{"out_of_place": {{"rounds_us": [[{us}, {us}, 900.0]]}}}}
json.dump({{"rows": [{{"size": 8, "results": {{"mscomm": modes}}}}]}}, open(words["--json"], "w"))
sys.exit({status})
"""


def builds(folder: Path, *us: float, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run builds.py on stand-ins for `mscomm`. Each number in `us` is the time, in µs, that one stand-in reports."""
    paths = []
    for number, one in enumerate(us):
        paths.append(folder / f"mscomm-{number}")
        paths[-1].write_text(BUILD.format(python=sys.executable, us=one, status=status))
        paths[-1].chmod(0o755)
    command = [sys.executable, Path(BENCH, "builds.py"), *paths, "-n", "2", "-c", "all_reduce", "--rounds", "3"]
    return run([*command, "-m", "foreign"])


def test_builds_compares_the_medians_of_two_builds(tmp_path: Path) -> None:
    done = builds(tmp_path, 20.0, 10.0)
    assert done.returncode == 0, done.stderr
    assert "| all_reduce | 2 | foreign | 8 | 20.0 | 10.0 | 2.00 (2.00 to 2.00) | faster |" in done.stdout
    assert "0 slower, 1 faster, 0 within noise; mean ratio 2.000" in done.stdout
    assert "| 0.50 (0.50 to 0.50) | slower |" in builds(tmp_path, 10.0, 20.0).stdout


def test_builds_stops_if_a_build_fails(tmp_path: Path) -> None:
    done = builds(tmp_path, 20.0, 10.0, status=3)
    assert done.returncode == 1 and "ended with 3" in done.stderr


def test_the_benchmark_suite_measures_over_real_ranks(tmp_path: Path) -> None:
    """Run one cell of the suite, as `pytest bench/ --benchmark-only` does."""
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", BENCH, "--benchmark-only"]
    # Leave out pytest-xdist's variables: with them, pytest-benchmark would measure nothing.
    env = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_XDIST_")}
    done = run([*command, f"--benchmark-json={report}", "-k", "all_reduce and n2 and 8B and shared"], env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    (cell,) = json.loads(report.read_text())["benchmarks"]
    assert cell["group"] == "all_reduce n=2 8 B" and cell["stats"]["median"] > 0
