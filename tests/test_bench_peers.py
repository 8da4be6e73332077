"""The peers of mscomm bench (other libraries): how it finds them, and what it measures with them."""

from __future__ import annotations

import functools
import json
import re
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from benches import each_moving, installed, measure, rows_of
from ranks import ranks
from rotated import rotated
from sessions import clean_environment, run

from mscomm.bench import contenders, peers, table


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


@each_moving
@pytest.mark.parametrize("n", [2, 5])
def test_memory_reads_each_x_once_and_writes_each_out_once(row: table.Collective, n: int) -> None:
    """Check the table _MOVES. It says how many parts each rank reads and writes if n ranks share the work evenly. A
    part is 1/n of the message.
    """
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


PEERS = ["torch-gloo", *peers.FLAVOURS]


TOGETHER = ["private,memory", "openmpi,openmpi-single", "mpich,mpich-single", "torch-gloo,torch-gloo-4"]


@pytest.mark.parametrize("names", rotated(TOGETHER, few=1, always=TOGETHER[:2]))
def test_peers_are_measured_in_turn_and_each_in_a_column_of_its_own(names: str, tmp_path: Path) -> None:
    words = ["-n", 2, "-b", 64, "-e", "64K", "-f", 32, "--iters", 2, "-w", 2, "--json", tmp_path / "j", "--vs", names]
    done = measure("all_reduce", *words, *installed(names.split(",")[0]))
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "j").read_text())
    assert [int(line[0]) for line in rows_of(done.stdout)] == [64, 2048, 65536]
    for peer in names.split(","):
        for row in document["rows"]:
            for name in ("mscomm", peer):
                (cell,) = row["results"][name].values()
                assert (cell["wrong"], [len(one) for one in cell["rounds_us"]]) == (0, [2] * 5)
        assert re.search(rf"^# {peer}/mscomm: geometric mean .* {peer} is faster in \d of 3 sizes$", done.stdout, re.M)
        about = document["environment"]["contenders"][peer]
        if peer.removesuffix(peers.SINGLE) in peers.FLAVOURS:
            assert about.endswith("MPI_THREAD_SINGLE" if peer.endswith(peers.SINGLE) else "MPI_THREAD_MULTIPLE")
        if peer in peers.GLOO_INTERFACES:
            assert about.endswith(",".join(["lo"] * peers.GLOO_INTERFACES[peer]))


def test_every_peer_is_measured() -> None:
    assert set(",".join(TOGETHER).split(",")) == set(peers.PEERS)


@pytest.mark.parametrize(
    ("peer", "words", "what"),
    rotated(
        [(peer, *rest) for peer in PEERS for rest in (("all_reduce -o avg", "avg"), ("exscan", "exscan"))],
        few=1,
        always=[("openmpi", "exscan", "exscan")],
    ),
)
def test_what_a_peer_cannot_do_is_told_before_anything_is_measured(peer: str, words: str, what: str) -> None:
    done = measure(*words.split(), "-n", 2, "-e", 64, "--vs", peer, *installed(peer))
    assert done.returncode == 1
    assert re.search(rf"mscomm bench: {peer}.* has no {what}|mscomm bench: {peer}: MPI has no {what}", done.stderr)
    assert rows_of(done.stdout) == [] and "Traceback" not in done.stderr


SLEEPS_S = 0.05


@ranks(2)
def test_the_time_of_a_call_is_that_of_the_slowest_rank_if_asked(rank: int) -> None:
    """Rank 0 returns at once, so the mean of both ranks is about half of what rank 1 sleeps."""
    case = table.Case(table.COLLECTIVES["broadcast"], np.dtype(np.float32), "sum", 0, 2, rank)
    call = functools.partial(time.sleep, SLEEPS_S * rank)
    cell = contenders.Local("sleeper", "", case, np.empty, lambda case, buffers: call).cell(1, True)
    assert min(cell.measure(0, 3, "max")) >= SLEEPS_S * 1e6


EVERY_ROW = """
import sys, time
from pathlib import Path
import numpy as np, psutil
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

def used():
    return sum(sum(p.cpu_times()[:2]) for p in psutil.Process().children(recursive=True))

before = used()
time.sleep(2)  # meanwhile the ranks of an MPI must not spin
spent = used() - before
mscomm.barrier()
peer.close()
if rank == 0:
    print("spent", spent)
"""


@functools.cache
def every_row(peer: str) -> tuple[list[list[str]], float]:
    """Run each collective of the table with the peer, in one job. Return pairs of its name and the number of wrong
    results, and the CPU time that the peer's processes then use in two seconds.
    """
    prefix = installed(peer)[1:]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "every_row.py")
        script.write_text(EVERY_ROW)
        command = [sys.executable, "-m", "mscomm", "run", "-n", "3", str(script), peer, *prefix]
        done = run(command, 280, clean_environment())
    assert done.returncode == 0, done.stderr
    *found, (_, spent) = (line.removeprefix("[0] ").split() for line in done.stdout.splitlines())
    return found, float(spent)


@pytest.mark.parametrize("peer", rotated(PEERS, few=1, always=["openmpi"]))
def test_every_row_of_the_table_is_right_on_a_peer(peer: str) -> None:
    found, _ = every_row(peer)
    assert {name for name, _ in found} == {name for name in table.COLLECTIVES if not peers.lacks(peer, name)}
    assert [line for line in found if line[1] != "0"] == []


@pytest.mark.parametrize("peer", rotated(list(peers.FLAVOURS), few=0, always=["openmpi"]))
def test_the_ranks_of_an_mpi_use_no_cpu_while_others_are_measured(peer: str) -> None:
    _, spent = every_row(peer)
    assert spent < 1.0  # on free CPUs, three spinning ranks would take 6 CPU seconds
