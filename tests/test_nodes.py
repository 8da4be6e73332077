"""`mscomm run --nnodes`: node 0 says which node it is waiting for, and reports immediately what went wrong on another
node.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from control import Job, eventually, greeted, key_file, soon
from patched_run import patched_run

from mscomm.cluster import waiting
from mscomm.cluster.bytestream import ByteStream
from mscomm.cluster.frames import Frames
from mscomm.cluster.hello import LAUNCHER
from mscomm.cluster.launchers import State
from mscomm.cluster.protection import Protection
from mscomm.launching.parts import OtherNode

MSCOMM = [sys.executable, "-m", "mscomm"]
HERE = f"node 1 on host {socket.gethostname()}"


class Nodes:
    """start(rank, *args, **env) starts `mscomm run` as node `rank` of two nodes on loopback."""

    def __init__(self, port: int, folder: Path) -> None:
        self._port = port
        self._env = {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
        self.script = folder / "script.py"
        self.script.write_text("import mscomm\nmscomm.init()\nmscomm.barrier()\n")
        self.processes: list[subprocess.Popen[str]] = []

    def start(
        self, rank: int, *args: object, mscomm_run: Sequence[str] = (*MSCOMM, "run"), **env: str
    ) -> subprocess.Popen[str]:
        words = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(self._port)]
        process = subprocess.Popen(
            [*mscomm_run, *words, "--node-rank", str(rank), *map(str, args)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **self._env, **env},
        )
        self.processes.append(process)
        return process


@pytest.fixture
def nodes(port: int, tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(port, tmp_path)
    yield nodes
    for process in nodes.processes:
        process.kill()
        process.communicate()


def line_with(process: subprocess.Popen[str], text: str) -> str:
    """Return the first line of the process's stderr with this text. If there is none, the test fails and shows the
    stderr.
    """
    assert process.stderr
    lines = []
    for line in process.stderr:
        lines.append(line)
        if text in line:
            return line
    pytest.fail("".join(lines))


@pytest.mark.parametrize("stopped", [0, 1])
def test_stopped_ranks_that_are_all_that_is_left_are_ended_on_each_node(nodes: Nodes, stopped: int) -> None:
    nodes.script.write_text(
        "import os, signal, mscomm\n"
        "mscomm.init()\n"
        f"if mscomm.get_rank() == {stopped}: os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    both = [nodes.start(node, "-n", 1, nodes.script, mscomm_run=patched_run(STOPPED_S=0.3)) for node in range(2)]
    line_with(both[stopped], f"killed rank {stopped}: stopped (SIGSTOP or SIGTSTP) though all other ranks had ended")
    assert both[stopped].wait(60) == 128 + signal.SIGKILL
    both[1 - stopped].wait(60)


@pytest.mark.parametrize("wrong", ["-n", "key", "script", "program"])
def test_node_0_shows_what_is_wrong_with_the_other_node(nodes: Nodes, tmp_path: Path, wrong: str) -> None:
    keys = [key_file(tmp_path / f"key{i}", os.urandom(32)) for i in range(2)]
    node_0 = nodes.start(0, "-n", 1, nodes.script, MSCOMM_JOB_KEY_FILE=keys[0])
    line_with(node_0, "mscomm run --nnodes 2 --node-rank 1")  # node 0 is listening now
    other = {"-n": 1, "key": keys[0], "script": nodes.script}
    if wrong == "-n":
        other["-n"] = 2
        why = f"{HERE} was refused: it was started with --nnodes 2 -n 2, and node 0 with --nnodes 2 -n 1"
        theirs = "refuses " + why.replace(" was refused", "")
    elif wrong == "key":
        other["key"] = keys[1]
        why, theirs = "a connection from 127.0.0.1:", "it does not have the key of this job"
    elif wrong == "script":
        other["script"] = "absent.py"
        why, theirs = f"{HERE} cannot start its ranks: there is no script absent.py", "there is no script absent.py"
    else:
        program = tmp_path / "program"
        program.write_text("#!/nowhere/sh\n")
        program.chmod(0o755)
        other["script"] = program
        why, theirs = f"{HERE} cannot start its ranks: cannot start {program}", f"cannot start {program}"
    node_1 = nodes.start(1, "-n", other["-n"], other["script"], MSCOMM_JOB_KEY_FILE=str(other["key"]))
    line = line_with(node_0, why)
    assert wrong != "key" or "could not prove that it knows the key of this job" in line
    _, err = node_1.communicate(timeout=60)
    assert node_1.returncode == 1 and theirs in err, err
    if wrong == "program":  # node 1 had already joined the job, so its failure ends the job
        line_with(node_0, "PeerLost: rank 1")
        assert node_0.wait(60) == 1
    else:
        assert node_0.poll() is None


def test_node_0_says_for_whom_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 0 names the missing ranks after 10 s, then every minute; in this test the pauses are short."""
    monkeypatch.setattr(waiting, "_TELL_AFTER_S", 0.05)
    monkeypatch.setattr(waiting, "_TELL_EVERY_S", 0.05)
    told: list[str] = []
    with Job(4, tcp=True, watched=True, nodes={"node 1": range(2, 4)}, tell=told.append) as job:
        assert job.listener
        absent = "waiting for node 1 (ranks 2, 3): nothing there has connected to 127.0"
        eventually(lambda: any(absent in text for text in told))
        frames = Frames(greeted(job.listener.getsockname(), purpose=LAUNCHER))
        job.links.append(frames)
        frames.send({"t": "attend", "first": 2, "end": 4, "name": "node 1", "layout": ""}, soon())
        assert frames.receive(soon()) == {"t": "state", **State()._asdict()}
        member = job.member(0)
        member._say({"t": "join", "rank": 0, "node_id": None, "facts": {"size": 4}}, soon())
        eventually(lambda: any("waiting for ranks 1 to 3 to call mscomm.init()" in text for text in told))


@pytest.mark.parametrize("left", [1, 0])
def test_a_link_to_node_0_that_fails_is_a_failure_only_while_ranks_are_left(left: int) -> None:
    ours, theirs = socket.socketpair()
    node = OtherNode(4, range(2, 4), HERE, "", "node-0", 1, Protection(), 5.0)
    node._link, node._where = Frames(ByteStream(ours), 1 << 16), "node-0:1"
    theirs.close()
    for rank in range(2, 4 - left):
        node.ended(rank, "exit code 0", badly=False, again=False)
    over = node.over()
    assert (over is None) if left == 0 else (over is not None and "the launcher of node 0 has ended" in str(over))
