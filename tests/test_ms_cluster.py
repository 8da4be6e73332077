"""How a rank joins: without a launcher, through the link to mscomm's own launcher, and through a scheduler with MS_*
variables.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from control import KEY, RUN, listening, soon

from mscomm import errors
from mscomm.bootstrap import find, launcher, ms_cluster, rendezvous
from mscomm.cluster import interfaces, security
from mscomm.cluster.hello import CONTROL
from mscomm.cluster.protection import Protection


def test_without_a_launcher_it_is_a_job_of_one():
    assert find({"PATH": "/bin"}) is None


def test_the_own_launchers_link_is_taken_over_once(monkeypatch):
    monkeypatch.setattr(launcher, "_taken", set())
    ours, theirs = socket.socketpair()
    with ours:
        ours.send(KEY + RUN)
        env = dict(zip(launcher.VARIABLES, ("1", "4", "1", "4", str(theirs.detach())), strict=True))
        assert find(env) is launcher
        invitation = launcher.accept(env, soon(), Protection())
        with contextlib.closing(invitation.stream) as stream:
            assert (*invitation.seat[:3], invitation.key, stream.secret) == (1, 4, 1, KEY, KEY)
            assert stream.sock.get_inheritable() is False
        with pytest.raises(errors.BackendUnavailable, match="can join its job only once"):
            launcher.accept(env, soon(), Protection())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"MSCOMM_RANK": "4"}, "do not fit together"),
        ({"MSCOMM_RANK": "x"}, "MSCOMM_RANK='x'"),
        ({"MSCOMM_CONTROL_FD": ""}, "MSCOMM_CONTROL_FD=''"),
        ({"MSCOMM_CONTROL_FD": "9999"}, "MSCOMM_CONTROL_FD=9999: Bad file descriptor"),
        ({"MSCOMM_CONTROL_FD": "file"}, "is not a socket"),
        ({"MSCOMM_CONTROL_FD": "tcp"}, "is not a unix stream socket"),
        ({"MSCOMM_CONTROL_FD": "other"}, "is another socket than that of the launcher"),
    ],
)
def test_a_launcher_that_cannot_be_reached_is_an_error_and_no_job_of_one(change, text):
    env = {**dict(zip(launcher.VARIABLES, ("1", "4", "1", "4", "0"), strict=True)), **change}
    with open(os.devnull, "rb") as file, socket.socket() as tcp, socket.socket(socket.AF_UNIX) as other:
        names = {"file": str(file.fileno()), "tcp": str(tcp.fileno()), "other": f"{other.fileno()}:1"}
        env["MSCOMM_CONTROL_FD"] = names.get(env["MSCOMM_CONTROL_FD"], env["MSCOMM_CONTROL_FD"])
        with pytest.raises(errors.BackendUnavailable, match=text):
            find(env).accept(env, soon(), Protection())


MS = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "2", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": "8117"}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"MS_ROLE": "MS_PSERVER"}, "MS_ROLE='MS_PSERVER'.*no parameter servers"),
        ({"MS_ROLE": "boss"}, "MS_ROLE='boss': expected MS_WORKER or MS_SCHED"),
        ({"MS_WORKER_NUM": "0"}, "MS_WORKER_NUM='0': expected the number of workers"),
        ({"MS_WORKER_NUM": ""}, "MS_WORKER_NUM is not set"),
        ({"MS_SCHED_PORT": "99999"}, "MS_SCHED_PORT='99999'"),
        ({"MS_SCHED_HOST": ""}, "MS_SCHED_HOST is not set"),
        ({"MS_SERVER_NUM": "2"}, "MS_SERVER_NUM='2': expected 0"),
        ({"MS_TOPO_TIMEOUT": "soon"}, "MS_TOPO_TIMEOUT='soon'"),
    ],
)
def test_each_ms_variable_is_checked(change, text):
    with pytest.raises(ValueError, match=text):
        ms_cluster.accept({**MS, **change}, soon(), Protection())


def test_a_worker_without_a_scheduler_says_where_it_looked(port):
    env = {**MS, "MS_SCHED_PORT": str(port), "MS_TOPO_TIMEOUT": "0.3"}
    with pytest.raises(errors.BackendUnavailable, match=f"no scheduler at 127.0.0.1:{port}.*refused"):
        ms_cluster.accept(env, soon(), Protection())


@pytest.mark.parametrize("permitted", [True, False])
def test_a_host_name_that_is_a_loopback_address_here_stands_for_the_address_that_others_reach(monkeypatch, permitted):
    """On Debian and Ubuntu, /etc/hosts maps a host's own name to 127.0.1.1."""
    resolve = socket.getaddrinfo
    names = dict.fromkeys(["node1", b"node1"], "127.0.1.1")
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *args, **more: resolve(names.get(host, host), *args, **more)
    )
    monkeypatch.setattr(interfaces, "host_address", lambda env: "10.0.0.7")
    monkeypatch.delenv("MSCOMM_JOB_KEY_FILE", raising=False)
    protection, said = Protection(permit_plain=permitted), []
    at = rendezvous.listening_address("node1", 8118, os.environ, protection, said.append)
    assert at == rendezvous.connecting_address("node1", 8118, os.environ, protection)
    assert at == ("10.0.0.7" if permitted else "node1")
    if not permitted:  # only the workers of this host can join, as they need no key
        assert "node1 is 127.0.1.1 here (/etc/hosts), so processes on other hosts cannot join" in said[0]
        assert "MSCOMM_JOB_KEY_FILE" in said[0]
    for host in ("127.0.1.1", "localhost", "192.0.2.7"):
        assert rendezvous.listening_address(host, 8118, os.environ, protection, pytest.fail) == host


def test_a_taken_port_is_named_with_what_to_do(tmpdir_env):
    with listening() as taken:
        env = {**MS, "MS_ROLE": "MS_SCHED", "MS_SCHED_PORT": str(taken.getsockname()[1])}
        with pytest.raises(errors.BackendUnavailable, match=r"the port is taken.*another MS_SCHED_PORT"):
            ms_cluster.serve(env, Protection())


def test_the_second_scheduler_at_a_port_leaves_the_key_of_the_first(tmpdir_env, monkeypatch, port):
    env = {**MS, "MS_ROLE": "MS_SCHED", "MS_SCHED_PORT": str(port)}

    class Served(Exception):
        pass

    def second(*args):
        """Start a second scheduler when the first has bound the port and written its key, but does not listen yet."""
        monkeypatch.undo()
        monkeypatch.setattr("tempfile.tempdir", str(tmpdir_env))
        answer = write_key(*args)
        with pytest.raises(errors.BackendUnavailable, match="the port is taken"):
            ms_cluster.serve(env, Protection())
        assert Path(answer[1].path).exists()
        raise Served

    write_key = security.scheduler_key
    monkeypatch.setattr(security, "scheduler_key", second)
    with pytest.raises(Served):
        ms_cluster.serve(env, Protection())


WORKER = """
import os, time
from mscomm.bootstrap import ms_cluster
from mscomm.cluster.deadline import Deadline
from mscomm.cluster.frames import Frames
from mscomm.cluster.member import Member
from mscomm.cluster.protection import Protection
way = ms_cluster.accept(os.environ, Deadline(60), Protection())
member = Member(Frames(way.stream), key=way.key, node_id=way.node_id, hub=way.where)
welcome = member.join({"size": way.seat.size}, Deadline(60))
member.ready(Deadline(60))
print(welcome.rank, welcome.size, flush=True)
member.leave(0)
"""
SCHEDULER = """
import os
from mscomm.bootstrap import ms_cluster
from mscomm.cluster.protection import Protection
ms_cluster.accept(os.environ, None, Protection())
"""


def test_workers_may_start_before_the_scheduler_and_the_key_file_goes_at_the_end(tmpdir_env, port):
    env = {**os.environ, **MS, "MS_SCHED_HOST": "localhost", "MS_SCHED_PORT": str(port)}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER], env={**env, "MS_NODE_ID": f"worker_{i}"}, stdout=subprocess.PIPE
        )
        for i in (1, 0)
    ]
    scheduler = subprocess.run(
        [sys.executable, "-c", SCHEDULER],
        env={**env, "MS_ROLE": "MS_SCHED"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    outputs = [worker.communicate(timeout=60)[0] for worker in workers]
    assert outputs == [b"1 2\n", b"0 2\n"]
    assert scheduler.returncode == 0, scheduler.stderr
    assert "all 2 workers have left" in scheduler.stdout
    assert not list(tmpdir_env.glob("mscomm-*/*"))


def test_the_workers_of_a_killed_scheduler_remove_its_key_file(tmpdir_env, port):
    env = {**os.environ, **MS, "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": str(port)}
    command = [sys.executable, "-c", WORKER.replace("member.leave(0)", "member._reader.join(60); member.close()")]
    with subprocess.Popen([sys.executable, "-c", SCHEDULER], env={**env, "MS_ROLE": "MS_SCHED"}) as scheduler:
        workers = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE) for _ in range(2)]
        for worker in workers:
            assert worker.stdout.readline()
        assert len(list(tmpdir_env.glob("mscomm-*/*.key"))) == 1
        scheduler.kill()
    for worker in workers:
        worker.communicate(timeout=60)
        assert worker.returncode == 0
    assert not list(tmpdir_env.glob("mscomm-*/*"))


def test_a_lock_that_the_kernel_frees_late_is_waited_for(tmpdir_env, monkeypatch):
    """When a process is killed, its connections may be closed before its locks are freed. So remove_stale() must wait
    for the lock of a scheduler whose connections have just been closed.
    """
    monkeypatch.setattr(security, "_FREED_WITHIN_S", 60)
    living, killed = (security.KeyFile(security.key_path(name)) for name in ("living", "killed"))
    closing = threading.Timer(0.1, os.close, [killed._fd])
    closing.start()
    security.remove_stale(security.admission_key(killed.key, CONTROL))
    assert not Path(killed.path).exists()
    closing.join()
    # remove_stale() must not wait for the lock of another job's scheduler.
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("remove_stale waits"))
    security.remove_stale(b"the key of a hub without a file")
    assert Path(living.path).exists()
    living.remove()


def test_a_new_key_file_removes_those_of_killed_processes_only(tmpdir_env):
    path = security.key_path("killed")
    code = "import os, sys; from mscomm.cluster import security; security.KeyFile(sys.argv[1]); os.kill(os.getpid(), 9)"
    living = security.KeyFile(security.key_path("living"))
    subprocess.run([sys.executable, "-c", code, path], env=dict(os.environ), timeout=60)
    assert Path(path).exists()
    new = security.KeyFile(security.key_path("new"))
    assert not Path(path).exists()
    assert security.read_key(living.path) == living.key
    for file in (living, new):
        file.remove()
    assert not list(tmpdir_env.glob("mscomm-*/*"))


@pytest.mark.parametrize("closed", ["closed", "unread"])
def test_a_scheduler_needs_nobody_who_reads_its_log(tmpdir_env, closed, port):
    env = {**os.environ, **MS, "MS_WORKER_NUM": "1", "MS_SCHED_PORT": str(port)}
    reader, writer = os.pipe()
    os.close(reader)
    command = ["sh", "-c", 'exec "$0" "$@" >&-'] if closed == "closed" else []
    scheduler = subprocess.Popen(
        [*command, sys.executable, "-c", SCHEDULER], env={**env, "MS_ROLE": "MS_SCHED"}, stdout=writer
    )
    os.close(writer)
    done = subprocess.run([sys.executable, "-c", WORKER], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "0 1\n", done.stderr
    assert scheduler.wait(60) == 0


def full_pipe():
    """Return a pipe that has no room. Its reading end first yields 4096 zeros."""
    reader, writer = os.pipe()
    os.write(writer, bytes(fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)))
    return reader, writer


def test_a_job_runs_and_ends_although_nobody_takes_the_log_of_its_scheduler(tmpdir_env, port):
    env = {**os.environ, **MS, "MS_SCHED_PORT": str(port)}
    reader, writer = full_pipe()
    scheduler = subprocess.Popen([sys.executable, "-c", SCHEDULER], env={**env, "MS_ROLE": "MS_SCHED"}, stdout=writer)
    os.close(writer)
    workers = [subprocess.Popen([sys.executable, "-c", WORKER], env=env, stdout=subprocess.PIPE) for _ in range(2)]
    outputs = sorted(worker.communicate(timeout=60)[0] for worker in workers)
    assert outputs == [b"0 2\n", b"1 2\n"]
    assert scheduler.wait(60) == 0
    os.close(reader)


def test_sigterm_ends_a_scheduler_whose_log_nobody_takes(tmpdir_env, port):
    env = {**os.environ, **MS, "MS_SCHED_PORT": str(port)}
    command = [sys.executable, "-c", WORKER.replace("member.leave(0)", "member._reader.join(60); member.close()")]
    reader, writer = full_pipe()
    scheduler = subprocess.Popen([sys.executable, "-c", SCHEDULER], env={**env, "MS_ROLE": "MS_SCHED"}, stdout=writer)
    os.close(writer)
    workers = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE) for _ in range(2)]
    for worker in workers:
        assert worker.stdout.readline()
    scheduler.terminate()
    assert scheduler.wait(60) == 1
    for worker in workers:
        worker.communicate(timeout=60)
    assert not list(tmpdir_env.glob("mscomm-*/*"))
    os.close(reader)


def test_a_scheduler_whose_job_fails_ends_with_1(tmpdir_env, port):
    env = {**os.environ, **MS, "MS_ROLE": "MS_SCHED", "MS_SCHED_PORT": str(port), "MS_TOPO_TIMEOUT": "0.2"}
    done = subprocess.run(
        [sys.executable, "-m", "mscomm", "sched"], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "only 0 of 2 workers joined within 0.2 s" in done.stdout
    assert not list(tmpdir_env.glob("mscomm-*/*"))


def test_a_stopped_process_that_holds_the_folder_delays_a_new_key_file_only(tmpdir_env, monkeypatch):
    monkeypatch.setattr(security, "_ALONE_WITHIN_S", 0.1)
    first = security.KeyFile(security.key_path("first"))
    fd = os.open(os.path.dirname(first.path), os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)  # like a process that was stopped while it held this lock
    second = security.KeyFile(security.key_path("second"))
    assert security.read_key(second.path) == second.key and security.read_key(first.path) == first.key
    os.close(fd)
    first.remove()
    second.remove()
