"""`mscomm run --hosts` and `--hostfile`: a real sshd, here on loopback, starts the ranks of the other hosts."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from patched_run import patched_run
from sessions import invoke
from test_binding import cores
from test_run import alive, appears, ends

from mscomm.cli import remote, run
from mscomm.cluster.protection import Protection
from mscomm.launching.binding import bound

TWO = "127.0.0.1:2,127.0.0.2:2"
GATHER = """
import os, socket, mscomm
mscomm.init()
ranks = mscomm.all_gather_object((mscomm.get_rank(), mscomm.get_local_rank()))
stores = mscomm.all_gather_object((os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]))
assert len(set(stores)) == 1 and stores[0][0] == "127.0.0.1", stores
print(ranks, os.getcwd(), os.environ.get("MSCOMM_ALGO"))
"""


class Sshd:
    """An sshd at 127.0.0.2, with its own port, keys and configuration. It reads no user's configuration or keys."""

    def __init__(self, folder: Path, port: int) -> None:
        program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
        if not program or not shutil.which("ssh") or not shutil.which("ssh-keygen"):
            pytest.skip("no sshd or no ssh is installed: install openssh-server and openssh-client")
        folder.mkdir()
        self.folder = folder
        for name in ("host", "user", "stranger"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name]
            subprocess.run(words, check=True, timeout=30)
        shutil.copy(folder / "user.pub", folder / "authorized_keys")
        (folder / "known_hosts").write_text(f"[127.0.0.2]:{port} {(folder / 'host.pub').read_text()}")
        (folder / "config").write_text(
            f"Port {port}\nListenAddress 127.0.0.2\nHostKey {folder}/host\nPidFile none\nUsePAM no\nStrictModes no\n"
            f"AuthorizedKeysFile {folder}/authorized_keys\nPermitRootLogin yes\nPasswordAuthentication no\n"
        )
        if os.getuid() == 0:
            # sshd needs this folder. The system service makes it, but that service may never have run.
            Path("/run/sshd").mkdir(exist_ok=True)
        self._log = open(folder / "log", "wb")  # noqa: SIM115
        self.process = subprocess.Popen([program, "-D", "-e", "-f", folder / "config"], stderr=self._log)
        until = time.monotonic() + 60
        while b"Server listening" not in (folder / "log").read_bytes():
            assert self.process.poll() is None and time.monotonic() < until, (folder / "log").read_text()
            time.sleep(0.02)
        self.port = port

    def command(self, identity: str = "user") -> str:
        options = {"UserKnownHostsFile": f"{self.folder}/known_hosts", "IdentitiesOnly": "yes"}
        words = [f"-o{name}={value}" for name, value in options.items()]
        return f"ssh -F none -p {self.port} -i {self.folder}/{identity} {' '.join(words)}"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with socket.socket() as free:
        free.bind(("127.0.0.2", 0))
        port = free.getsockname()[1]
    sshd = Sshd(tmp_path_factory.mktemp("ssh") / "sshd", port)
    yield sshd
    sshd.close()


@pytest.fixture
def start(sshd: Sshd, tmp_path: Path) -> Iterator:
    """start(*args, **env) starts `mscomm run` in the test's folder, with an ssh that reaches this sshd.

    After the first failure, the ranks of this host have report_s to report.
    """
    processes: list[subprocess.Popen[str]] = []

    def begin(*args: object, report_s: float = 60.0, **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*patched_run(REPORT_S=report_s), *map(str, args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MSCOMM_SSH": sshd.command(), **env},
        )
        processes.append(process)
        return process

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def test_the_ranks_of_a_list_of_hosts_are_one_job(start, tmp_path):
    (tmp_path / "script.py").write_text(GATHER)
    process = start("--hosts", "127.0.0.1:1,127.0.0.2:2", "script.py", MSCOMM_ALGO="direct")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    ranks = "[(0, 0), (1, 0), (2, 1)]"  # ranks are in the order of the list; the second host has two ranks
    assert sorted(out.splitlines()) == [f"[{rank}] {ranks} {tmp_path} direct" for rank in range(3)]


def test_a_hostfile_a_program_its_variables_and_its_cpus(start, tmp_path):
    there = min(2, cores())
    (tmp_path / "hosts").write_text(f"# two hosts\nlocalhost slots=1  # this one\n\n127.0.0.2:{there}\n")
    shown = "print(*map(os.environ.get, ('MSCOMM_RANK', 'ONE', 'TWO')), *sorted(os.sched_getaffinity(0)))"
    options = ["--env", "ONE=1", "-x", "TWO", "--bind-to", "core", "--", sys.executable, "-c", f"import os; {shown}"]
    process = start("--hostfile", "hosts", *options, TWO="2")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    cpus = [" ".join(map(str, sorted(one))) for one in (*bound("core", 1), *bound("core", there))]
    assert sorted(out.splitlines()) == [f"[{rank}] {rank} 1 2 {one}" for rank, one in enumerate(cpus)]


def test_the_key_is_on_no_command_line_and_in_no_environment(start, tmp_path):
    body = (
        "import glob, mscomm\nfrom mscomm import job\nmscomm.init()\nkey = job.default().epoch.key\n"
        "for path in [*glob.glob('/proc/[0-9]*/cmdline'), *glob.glob('/proc/[0-9]*/environ')]:\n"
        "    try:\n        text = open(path, 'rb').read()\n    except OSError:\n        continue\n"
        "    assert key not in text and key.hex().encode() not in text, path\n"
        "mscomm.barrier()\nprint(len(key))\n"
    )
    (tmp_path / "script.py").write_text(body)
    process = start("--hosts", "127.0.0.1:1,127.0.0.2:1", "script.py")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, sorted(out.splitlines())) == (0, ["[0] 32", "[1] 32"]), err


@pytest.mark.parametrize("wrong", ["key", "port"])
def test_an_ssh_that_fails_is_shown_with_its_host(start, sshd, tmp_path, wrong):
    (tmp_path / "script.py").write_text(GATHER)
    ssh = sshd.command("stranger") if wrong == "key" else sshd.command().replace(f"-p {sshd.port}", "-p 1")
    process = start("--hosts", "127.0.0.1:1,127.0.0.2:1", "script.py", MSCOMM_SSH=ssh)
    _, err = process.communicate(timeout=60)
    text = "Permission denied" if wrong == "key" else "Connection refused"
    assert process.returncode == 1 and re.search(rf"^127\.0\.0\.2: .*{text}", err, re.M), err
    assert "no rank could be started on host 127.0.0.2: ssh ended with status 255. Does this work" in err
    assert re.search("the job failed on another host: PeerLost: rank 1.*: no rank could be started", err), err


def test_a_host_without_mscomm_or_without_the_script_is_named(start, sshd, tmp_path):
    (tmp_path / "script.py").write_text(GATHER)
    elsewhere = tmp_path / "ssh"  # an ssh that runs Python from a path that does not exist
    elsewhere.write_text(f"#!/bin/sh\nexec {sshd.command()} 127.0.0.2 /nowhere/python\n")
    elsewhere.chmod(0o755)
    process = start("--hosts", "127.0.0.1:1,127.0.0.2:1", "script.py", MSCOMM_SSH=str(elsewhere))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and re.search(r"127\.0\.0\.2: .*/nowhere/python: ", err), err
    assert "ssh ended with status 127. Every host needs mscomm for the same Python, " in err
    # Each host checks the program's file. Here rank 0 deletes the file before the other host checks it.
    body = "import os, time\nif os.environ['MSCOMM_RANK'] == '0': os.unlink('program')\nwhile True: time.sleep(1)\n"
    (tmp_path / "program").write_text(f"#!{sys.executable}\n{body}")
    (tmp_path / "program").chmod(0o755)
    slow = tmp_path / "slow"
    slow.write_text(f'#!/bin/sh\nwhile [ -e program ]; do sleep 0.05; done\nexec {sshd.command()} "$@"\n')
    slow.chmod(0o755)
    process = start("--hosts", "127.0.0.1:1,127.0.0.2:1", "./program", report_s=0.2, MSCOMM_SSH=str(slow))
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "host 127.0.0.2 cannot start its ranks: ./program is neither a .py file nor a program" in err, err


PIDS = (
    "import os, signal, sys, time\nrank = os.environ['MSCOMM_RANK']\n{}\n"
    "open('pid' + rank, 'w').write(str(os.getpid()))\nwhile True: time.sleep(0.1)\n"
)


def test_a_failure_here_ends_the_ranks_there_and_the_other_way_round(start, tmp_path):
    # Python imports this module when it starts, on both hosts.
    (tmp_path / "sitecustomize.py").write_text("from mscomm.launching import processes\nprocesses.REPORT_S = 0.2\n")
    for failing in ("0", "1"):
        wait = f"while not os.path.exists('pid{1 - int(failing)}'): time.sleep(0.01)"
        body = f"if rank == {failing!r}:\n    {wait}\n    sys.exit(7)"
        (tmp_path / "script.py").write_text(PIDS.format(body))
        process = start("--hosts", "127.0.0.1:1,127.0.0.2:1", "script.py", report_s=0.2, PYTHONPATH=str(tmp_path))
        _, err = process.communicate(timeout=60)
        assert process.returncode != 0 and f"rank {failing}" in err and "exit code 7" in err, err
        left = tmp_path / f"pid{1 - int(failing)}"
        assert not alive(int(left.read_text()))
        left.unlink()


def test_an_ssh_that_ends_well_and_has_started_nothing_is_a_failure(start, tmp_path):
    (tmp_path / "script.py").write_text(GATHER)
    process = start("--hosts", "127.0.0.1:1,127.0.0.2:1", "script.py", MSCOMM_SSH="true")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "rank could be started on host 127.0.0.2: ssh ended with status 0" in err, err


def test_more_than_a_host_takes_is_told_before_ssh_starts(start, tmp_path):
    (tmp_path / "script.py").write_text(GATHER)
    process = start("--hosts", TWO, "script.py", *["x" * 120_000] * 9, MSCOMM_SSH="no-such-ssh")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.search(
        r"^Error: arguments and variables are 108\d+ bytes; 127.0.0.2 takes at most 1048576$", err, re.M
    ), err


def test_a_process_that_ssh_leaves_behind_keeps_nobody_waiting(start, tmp_path):
    (tmp_path / "ssh").write_text('#!/bin/bash\nsleep 1000 &\necho $! > pid\nexec bash -c "${@: -1}"\n')
    (tmp_path / "ssh").chmod(0o700)
    (tmp_path / "script.py").write_text(GATHER)
    process = start("--hosts", "127.0.0.1:1,127.0.0.2:1", "script.py", MSCOMM_SSH=str(tmp_path / "ssh"))
    try:
        assert process.wait(60) == 0
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_a_signal_for_the_launcher_ends_the_ranks_of_other_hosts(start, tmp_path, number):
    """After SIGKILL, only the closed ssh connection tells the other host that the launcher has ended."""
    (tmp_path / "script.py").write_text(PIDS.format(""))
    process = start("--hosts", "127.0.0.1:1,127.0.0.2:1", "script.py")
    pids = [int(appears(tmp_path / f"pid{rank}")) for rank in range(2)]
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    for pid in pids:
        ends(pid)
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL), err


def test_hosts_that_do_not_answer_are_given_up_together(monkeypatch):
    monkeypatch.setattr(remote, "_ENDS_S", 1.0)
    waits: list[float] = []
    close = remote._Agent.close
    monkeypatch.setattr(remote._Agent, "close", lambda agent, wait_s: (waits.append(wait_s), close(agent, wait_s)))
    shares = remote.shares([(f"127.0.0.{last}", 1) for last in range(1, 8)], None)
    hosts = remote.Hosts(shares, 0, None, Protection(), 10, False, {"grace": 0.0})
    hosts._agents = [remote._Agent(["bash", "-c", "exec sleep 1000"], share, {}) for share in shares[1:]]
    hosts._close()
    assert waits[0] > 0 and waits[1:] == [0.0] * 5
    assert [agent.process.returncode for agent in hosts._agents] == [-signal.SIGKILL] * 6
    for agent in hosts._agents:
        for pipe in (agent.process.stdout, agent.process.stderr):
            pipe.close()


# -- the list of hosts, without ssh


@pytest.mark.parametrize(
    ("hosts", "each", "expected"),
    [
        ("a:4,b:4", None, [("a", 0, 4), ("b", 4, 8)]),
        ("a,b:1", 3, [("a", 0, 3), ("b", 3, 4)]),
        ("a:1,b:1,a:1", None, [("a", 0, 2), ("b", 2, 3)]),
        ("me@[fd00::1]:2,c.example", 1, [("me@[fd00::1]", 0, 2), ("c.example", 2, 3)]),
    ],
)
def test_hosts_and_their_ranks(hosts, each, expected):
    found = remote.shares(remote.listed(hosts), each)
    assert [(host.name, host.ranks.start, host.ranks.stop) for host in found] == expected


def test_a_command_that_makes_no_sense_is_one_line(start):
    process = start("--hosts", "127.0.0.1:1,127.0.0.2:1", "true", MSCOMM_SSH="ssh -i 'key")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "MSCOMM_SSH=ssh -i 'key: No closing quotation" in err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--hosts", "a:4,b", "true"], "how many ranks on b? Write b:4, or give -n"),
        (["--hosts", "a:x", "true"], "'a:x' is not a host"),
        (["--hosts", "-oProxyCommand=x:1", "true"], "is not a host"),
        (["--hosts", "203.0.113.1:1", "true"], "none of the hosts 203.0.113.1 is this one"),
        (["--hosts", "a:1", "--nnodes", "2", "true"], "--hosts says this already; leave out --nnodes"),
        (["--hostfile", "HOSTS", "--nnodes", "2", "true"], "--hostfile says this already; leave out --nnodes"),
        (["--hostfile", "absent", "true"], "--hostfile absent: "),
        (["--hostfile", "HOSTS", "true"], "line 2: 'cpus=2': expected slots=N, or host:N"),
        (
            ["--hosts", "localhost:1,203.0.113.1:1", "true"],
            "this host is in the list as localhost, a name that the other hosts",
        ),
    ],
)
def test_lists_that_make_no_sense_are_one_line(monkeypatch, tmp_path, words, text):
    (tmp_path / "HOSTS").write_text("a slots=2\nb cpus=2\n")
    monkeypatch.chdir(tmp_path)
    done = invoke(run.command, *words)
    assert done.exit_code == 1 and text in done.output, done.output
