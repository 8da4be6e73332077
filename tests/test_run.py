"""`mscomm run` on one node and on two: output, exit status, signals, and nothing left behind."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import warm
from patched_run import JUMP_S, patched_run
from rotated import rotated
from sessions import MSCOMM, invoke, mscomm_run, run

import mscomm
from mscomm import environment
from mscomm.bootstrap.rendezvous import ports_instead
from mscomm.cli.run import command, sizes
from mscomm.launching.processes import Launch


@pytest.fixture
def script(tmp_path):
    """script(body) writes a script that begins by setting `rank` to the rank's number. It returns the script's path."""

    def write(body: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(f"import os, signal, subprocess, sys, time\nrank = int(os.environ['MSCOMM_RANK'])\n{body}\n")
        return path

    return write


def state(pid: int) -> str:
    """Return the letter in /proc for the state of the process, such as S for sleeping; Z if it does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return "Z"


def alive(pid: int) -> bool:
    """Return whether the process is running, and is not a zombie."""
    return state(pid) != "Z"


def ends(pid: int) -> None:
    """Check that the process ends. A killed process may need a moment."""
    until = time.monotonic() + 60
    while alive(pid):
        assert time.monotonic() < until, f"{pid} lives on"
        time.sleep(0.01)


def appears(path: Path, timeout_s=60.0) -> str:
    """Wait for a file that another process writes, and return its text."""
    end = time.monotonic() + timeout_s
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.01)
    return path.read_text()


def test_lines_are_whole_prefixed_and_keep_their_stream(script):
    done = mscomm_run(
        "-n", 3, script("for i in range(200): print('out', rank, i, 'x' * 50)\nprint('err', rank, file=sys.stderr)")
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 600
    for rank in range(3):
        mine = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert mine == [f"[{rank}] out {rank} {i} {'x' * 50}" for i in range(200)]
    assert sorted(done.stderr.splitlines()) == [f"[{rank}] err {rank}" for rank in range(3)]


@pytest.mark.long
def test_64_ranks_join_and_make_a_call(script):
    body = "import mscomm, numpy as np\nmscomm.init()\nprint(mscomm.all_reduce(np.array([rank]))[0])"
    done = warm.mscomm_run("-n", 64, script(body), env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(f"[{rank}] {64 * 63 // 2}" for rank in range(64))


def test_the_last_line_needs_no_end(script):
    assert mscomm_run("-n", 1, script("sys.stdout.write('a\\nb')")).stdout == "[0] a\n[0] b\n"


def test_arguments_and_identity_reach_the_script(script):
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE"
    body = f"names = '{names}'.split()\n"
    body += "assert all(os.environ[name] == os.environ[f'MSCOMM_{name}'] for name in names)\n"
    body += "print(sys.argv[1:], [os.environ[name] for name in names])"
    done = mscomm_run("-n", 2, script(body), "-n", "--flag", "a b")
    assert sorted(done.stdout.splitlines()) == [
        "[0] ['-n', '--flag', 'a b'] ['0', '2', '0', '2']",
        "[1] ['-n', '--flag', 'a b'] ['1', '2', '1', '2']",
    ]


def test_ranks_know_the_port_of_torchs_store_and_nothing_of_an_outer_torchrun(script):
    """Rank 0 of torch.distributed listens at the port, with SO_REUSEADDR. Nobody else gets it."""
    body = """
import socket, mscomm
assert not [name for name in os.environ if name.startswith("TORCHELASTIC_")]
mscomm.init()
assert mscomm.get_group_size() == 2
where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
try:
    socket.socket().bind(where)
except OSError:
    print("held", where[1])
if rank == 0:
    with socket.create_server(where):
        mscomm.barrier()
        mscomm.barrier()
else:
    mscomm.barrier()
    socket.create_connection(where)
    mscomm.barrier()
"""
    outer = {"RANK": "7", "WORLD_SIZE": "8", "MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}
    done = mscomm_run("-n", 2, script(body), env={**outer, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert done.returncode == 0, done.stderr
    assert len(set(re.findall(r"held (\d+)", done.stdout))) == 1 and done.stdout.count("held") == 2, done.stdout


FLAGS = ["-n", "-np", "--nproc_per_node", "--nproc-per-node", "--worker_num", "--local-worker-num"]


@pytest.mark.parametrize("flag", FLAGS)
def test_the_flags_of_msrun_and_torchrun_work(flag):
    given = command.make_context("run", [flag, "2", "x.py"]).params
    assert sizes(given["per_node"], given["worker_num"], given["local_worker_num"], given["nnodes"]) == (2, 1)


def test_variables_and_torchruns_standalone_reach_the_ranks(script):
    path = script("print(os.environ['ONE'], os.environ['TWO'])")
    done = mscomm_run("--standalone", "--env", "ONE=a=b", "-x", "TWO", "-n", 1, path, env={"TWO": "2"})
    assert (done.returncode, done.stdout) == (0, "[0] a=b 2\n")


def test_a_misspelt_variable_is_told():
    assert environment.misspelt({"MSCOMM_TIMOUT": "5", "MSCOMM_TIMEOUT": "5", "MSCOMM_TEST_SEED": "1"}) == {
        "MSCOMM_TIMOUT": "MSCOMM_TIMEOUT"
    }
    done = mscomm_run("-n", 1, "true", env={"MSCOMM_TIMOUT": "5"})
    assert done.stderr == "mscomm run: mscomm reads no variable MSCOMM_TIMOUT; did you mean MSCOMM_TIMEOUT?\n"


@pytest.mark.parametrize("follows", [True, False])
def test_the_time_limit_ends_the_job_with_a_status_of_its_own(script, tmp_path, follows):
    """Rank 0 advances the launcher's clock past the limit. Both ranks end well after SIGTERM, or not."""
    body = (
        f"if {follows}: signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        f"open(f'{tmp_path}/up{{rank}}', 'w').close()\n"
        f"while not all(os.path.exists(f'{tmp_path}/up{{one}}') for one in range(2)): time.sleep(0.01)\n"
        f"if rank == 0: open('{tmp_path}/clock', 'w').write('!')\n"
        "print('late')\nwhile True: time.sleep(1)"
    )
    done = run([*patched_run(clock=tmp_path / "clock"), "-n", "2", "--timeout", str(0.9 * JUMP_S), script(body)])
    assert done.returncode == 124
    assert "ended after 90 s, the time limit (--timeout): ranks 0,1 had not ended" in done.stderr.splitlines()[-1]


def test_a_folder_that_has_been_removed_is_one_line(tmp_path):
    (tmp_path / "gone").mkdir()
    command = f"cd {tmp_path}/gone && rmdir ../gone && {shlex.join(MSCOMM)} run -n 1 nothere.py"
    done = run(["sh", "-c", command])
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "Error: there is no script nothere.py (in this folder, which has been removed)\n"


def test_a_log_folder_may_have_a_name_that_is_not_utf_8(script, tmp_path):
    logs = os.fsencode(tmp_path) + b"/l\xf6gs"
    command = [*map(os.fsencode, [*MSCOMM, "run", "-n", "1", "--log_dir"]), logs, os.fsencode(script("sys.exit(3)"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert "rank 0 failed first: exit code 3" in done.stderr.splitlines()[-1]
    assert os.path.exists(logs + b"/worker_0.log")


def test_the_version_is_told():
    done = run([*MSCOMM, "--version"])
    assert done.stdout == f"mscomm {mscomm.__version__}\n"


def test_modules_programs_and_pytest_are_started(tmp_path):
    (tmp_path / "test_it.py").write_text("def test_it(): pass\n")
    assert "[0] 2" in mscomm_run("-n", 1, "-m", "timeit", "-n", "1", "-r", "1", "-s", "print(1+1)").stdout
    assert mscomm_run("-n", 2, "--", "sh", "-c", "echo $MSCOMM_RANK").stdout.count("\n") == 2
    assert "1 passed" in mscomm_run("-n", 1, "pytest", "-q", "-p", "no:cacheprovider", tmp_path / "test_it.py").stdout


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["-n", "0", "x.py"], "Error: -n 0: a job needs at least 1 rank"),
        (["x.py"], "Error: say how many ranks to start"),
        (["-n", "2", "absent.py"], "Error: there is no script absent.py"),
        (["-n", "2", "no-such-program"], "Error: no-such-program is neither"),
        (["-n", "3", "--local_worker_num", "2", "x.py"], "both say how many ranks this host has"),
        (["--worker_num", "5", "--local_worker_num", "2", "x.py"], "--worker_num 5 is not 2 on each of 1 host"),
        (["--nnodes", "1:4", "-n", "2", "x.py"], "--nnodes 1:4: expected the number of hosts"),
        (["--worker_num", "4", "--local_worker_num", "2", "x.py"], "the job has 2 hosts: say which one this is"),
        (["--nnodes", "2", "-n", "2", "--node-rank", "2", "x.py"], "--node-rank 2: a job of 2 hosts has"),
        (["--nnodes", "2", "-n", "2", "--node-rank", "1", "x.py"], "name node 0's address"),
        (["-n", "2", "--node-rank", "1", "x.py"], "--node-rank 1: a job of 1 host has only node 0; add --nnodes"),
        (["--hosts", "a:2", "--local_worker_num", "2", "x.py"], "leave out --local_worker_num"),
        (["--stdin", "2", "-n", "2", "true"], "Error: --stdin 2: this host has the ranks 0 to 1"),
        (["--join=False", "-n", "2", "x.py"], "stays until the ranks have ended"),
        (["hello.py", "-n", "2", "-v"], "options of mscomm run come before the script: mscomm run -n 2 ... hello.py"),
        (
            ["--standalone", "--nnodes", "2", "-n", "2", "x.py"],
            "--standalone: the job has only this host; leave out --nn",
        ),
        (["--env", "NOT_SET_HERE", "-n", "2", "x.py"], "Error: --env NOT_SET_HERE: this variable is not set here"),
        (["--timeout", "0", "-n", "2", "x.py"], "Error: --timeout 0: expected a number of seconds, more than 0"),
        (["--grace", "-1", "-n", "2", "x.py"], "Error: --grace -1: expected a number of seconds, 0 or more"),
        (["--cluster_time_out", "0", "-n", "2", "true"], "MS_TOPO_TIMEOUT='0.0'"),
    ],
)
def test_wrong_arguments_are_one_line(monkeypatch, args, text):
    monkeypatch.setenv("MS_TOPO_TIMEOUT", "60")  # --cluster_time_out changes it in this process
    done = invoke(command, *args)
    assert done.exit_code == 1
    assert text in done.output
    assert len(done.output.splitlines()) == 1


@pytest.mark.parametrize("name", ["PET_NODE_RANK", "PET_MAX_RESTARTS"])
def test_torchruns_variables_must_be_numbers(monkeypatch, name):
    monkeypatch.setenv(name, "two")
    done = invoke(command, "-n", 2, "true")
    assert (done.exit_code, done.output) == (1, f"Error: {name}='two': expected a number\n")


def test_torchruns_port_must_be_a_port(monkeypatch):
    env = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": "99999"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    done = invoke(command, "-n", 1, "true")
    assert (done.exit_code, done.output) == (1, "Error: PET_MASTER_PORT=99999: expected a port, at most 65535\n")


def test_omp_threads_are_set_and_said_once_unless_given(script):
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    path = script("print(os.environ['OMP_NUM_THREADS'])")
    command = [*MSCOMM, "run", "-n", "2", str(path)]
    done = run(command, env=env)
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert done.stderr.count(f"OMP_NUM_THREADS={threads}") == 1
    assert f"[1] {threads}\n" in done.stdout
    assert mscomm_run("-n", 2, path, env={"OMP_NUM_THREADS": "7"}).stderr == ""


def test_the_status_is_that_of_the_first_failure(script):
    done = mscomm_run("-n", 3, script("sys.exit({0: 0, 1: 7, 2: 0}[rank])"))
    assert done.returncode == 7
    assert "rank 1 failed first: exit code 7" in done.stderr.splitlines()[-1]


def test_a_killed_rank_gives_128_plus_the_signal(script):
    done = mscomm_run("-n", 2, script("rank == 1 and os.kill(os.getpid(), signal.SIGKILL)"))
    assert done.returncode == 128 + signal.SIGKILL
    assert "rank 1 failed first: killed by SIGKILL" in done.stderr


def test_the_traceback_of_the_first_failure_is_shown_and_its_log_is_named(script, tmp_path):
    logs = tmp_path / "logs"
    path = script("print('hello', rank, os.environ['MSCOMM_RECORD'])\nif rank == 1: raise ValueError('no data')")
    done = mscomm_run("-n", 2, "--log_dir", logs, path)
    assert done.returncode == 1
    assert "[1] ValueError: no data" in done.stderr
    assert f"; the log of rank 1: {logs}/worker_1.log" in done.stderr
    assert (logs / "worker_0.log").read_text() == f"hello 0 {logs}\n"
    assert (logs / "worker_1.log").read_text().startswith(f"hello 1 {logs}\nTraceback")
    assert (logs / "scheduler.log").exists()


def test_the_others_may_report_before_they_are_ended(script):
    path = script("if rank == 1: sys.exit(3)\ntime.sleep(0.5)\nprint('reported')")
    done = run([*patched_run(REPORT_S=60.0), "-n", "2", path])
    assert done.returncode == 3
    assert "[0] reported" in done.stdout


def test_a_rank_that_goes_on_after_a_failure_gets_sigterm_then_sigkill(script, tmp_path):
    """Rank 0 gets SIGTERM soon, and it advances the launcher's clock only then, so SIGKILL comes later."""
    path = script(
        "def asked(*_):\n"
        f"    open('{tmp_path}/clock', 'w').write('!')\n"
        "    print('asked to end')\n"
        "signal.signal(signal.SIGTERM, asked)\n"
        f"if rank == 0: open('{tmp_path}/up', 'w').close()\n"
        f"while rank == 1 and not os.path.exists('{tmp_path}/up'): time.sleep(0.01)\n"
        "if rank == 1: sys.exit(3)\n"
        "while True: time.sleep(1)"
    )
    done = run([*patched_run(REPORT_S=0.1, clock=tmp_path / "clock"), "-n", "2", "--grace", "60", path])
    assert done.returncode == 3
    assert done.stdout == "[0] asked to end\n"
    *_, asked, killed, last = done.stderr.splitlines()
    assert asked == ("mscomm run: rank 1 has failed (exit code 3): SIGTERM to rank 0, and SIGKILL 60 s later")
    assert killed == "mscomm run: killed rank 0: still running 60 s after SIGTERM"
    assert "rank 1 failed first: exit code 3" in last


def test_a_stopped_rank_that_is_all_that_is_left_is_ended(script):
    path = script("if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)")
    done = run([*patched_run(STOPPED_S=0.3), "-n", "2", path])
    assert done.returncode == 128 + signal.SIGKILL
    assert "killed rank 1: stopped (SIGSTOP or SIGTSTP) though all other ranks had ended" in done.stderr


def test_a_process_that_has_ended_is_not_stopped():
    with subprocess.Popen(["true"]) as process:
        while Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
            time.sleep(0.01)
        assert not Launch._is_stopped(types.SimpleNamespace(_processes=[process]), 0)


# The arguments name the file of the launchers' clock, and the ranks that die. The second one dies while the survivors
# are already waiting in shrink(). The survivors advance the clock past the time at which the launchers would have ended
# ranks that do not shrink.
SHRINKS = """
import numpy as np, mscomm
clock, *dying = ARGUMENTS
mscomm.init()
dies = dying.index(str(rank)) + 1 if str(rank) in dying else 0
try:
    mscomm.barrier()  # some ranks may still be in the barrier when another is dead
    while dies != 1: mscomm.barrier()
except mscomm.PeerLost:
    pass
if dies:
    time.sleep((dies - 1) / 2)
    os.kill(os.getpid(), signal.SIGKILL)
left = mscomm.shrink(None, "left")
open(clock, "w").write("!")
for i in range(10):  # 1 s: the launchers look at their clocks every 0.2 s
    time.sleep(0.1)
    assert mscomm.all_reduce(np.ones(1), group=left)[0] == left.size
print("went on")
"""


def shrinking(clock: Path, *dying: int) -> str:
    return SHRINKS.replace("ARGUMENTS", repr([str(clock), *map(str, dying)]))


def test_ranks_that_shrink_go_on_and_the_status_tells_the_loss(script, tmp_path):
    clock = tmp_path / "clock"
    done = run([*patched_run(clock=clock), "-n", "3", script(shrinking(clock, 2))])
    assert done.returncode == 128 + signal.SIGKILL and done.stdout.count("went on") == 2, done.stderr
    assert "rank 2 failed first: killed by SIGKILL" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_signals_are_forwarded_to_all_ranks(script, tmp_path, number):
    body = (
        f"def stop(*_):\n    print('stopping', rank)\n    sys.exit(0)\nsignal.signal({int(number)}, stop)\n"
        f"open(f'{tmp_path}/up{{rank}}', 'w').write('up')\nwhile True: time.sleep(1)"
    )
    # If the tests run under nohup or as a background job of a shell, some signals are ignored. env resets the signal.
    reset = ["env", f"--default-signal={number.name.removeprefix('SIG')}"]
    command = [*reset, *patched_run(REPORT_S=60.0), "-n", "2", script(body)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for rank in range(2):
        appears(tmp_path / f"up{rank}")
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert sorted(out.splitlines()) == ["[0] stopping 0", "[1] stopping 1"]
    assert process.returncode == 0


def test_the_third_signal_kills(script, tmp_path):
    body = (
        f"signal.signal(signal.SIGINT, lambda *_: open(f'{tmp_path}/seen', 'a').write('!'))\n"
        f"open(f'{tmp_path}/up', 'w').write('up')\nwhile True: time.sleep(1)"
    )
    process = subprocess.Popen([*MSCOMM, "run", "-n", "1", script(body)], stderr=subprocess.DEVNULL)
    appears(tmp_path / "up")
    for count in (1, 2):
        process.send_signal(signal.SIGINT)
        while len(appears(tmp_path / "seen")) < count:
            time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 128 + signal.SIGKILL


def test_ranks_that_do_not_follow_a_signal_are_ended(script, tmp_path):
    """The rank advances the launcher's clock twice: first almost to the end of the grace period, and later past it."""
    body = (
        f"def go_on(*_):\n    os.write(1, b'not yet\\n')\n    open('{tmp_path}/clock', 'a').write('!')\n"
        "signal.signal(signal.SIGTERM, go_on)\n"
        f"open('{tmp_path}/up', 'w').write('up')\n"
        f"while not os.path.exists('{tmp_path}/clock'): time.sleep(0.01)\n"
        "time.sleep(0.5)  # a second SIGTERM would come now\n"
        f"print('saved')\nopen('{tmp_path}/clock', 'a').write('!')\nwhile True: print('late'); time.sleep(0.1)"
    )
    grace = ["--grace", str(1.5 * JUMP_S)]
    command = [*patched_run(clock=tmp_path / "clock"), "-n", "1", *grace, script(body)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    appears(tmp_path / "up")
    process.terminate()
    out, _ = process.communicate(timeout=60)
    assert out.replace("[0] late\n", "") == "[0] not yet\n[0] saved\n"
    assert process.returncode == 128 + signal.SIGKILL


def test_signals_for_programs_reach_the_ranks_alone_and_end_nothing(script, tmp_path):
    """A child of the rank has no handler, so SIGUSR1 would end it."""
    body = (
        "child = subprocess.Popen(['sleep', '1000'])\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('one'))\n"
        "def two(*_):\n    print('two', child.poll())\n    sys.exit(0)\n"
        "signal.signal(signal.SIGUSR2, two)\n"
        f"open(f'{tmp_path}/up{{rank}}', 'w').write('up')\nwhile True: time.sleep(1)"
    )
    with subprocess.Popen([*MSCOMM, "run", "-n", "2", script(body)], stdout=subprocess.PIPE, text=True) as process:
        for rank in range(2):
            appears(tmp_path / f"up{rank}")
        process.send_signal(signal.SIGUSR1)
        assert sorted(process.stdout.readline() for _ in range(2)) == ["[0] one\n", "[1] one\n"]
        process.send_signal(signal.SIGUSR2)
        assert sorted(process.stdout) == ["[0] two None\n", "[1] two None\n"]
        assert process.wait(60) == 0


def test_ranks_stop_and_go_on_with_the_launcher(script, tmp_path):
    body = f"open(f'{tmp_path}/pid{{rank}}', 'w').write(str(os.getpid()))\nsys.stdin.read()\nwhile True: time.sleep(1)"
    process = subprocess.Popen([*MSCOMM, "run", "-n", "2", script(body)], stderr=subprocess.DEVNULL)
    pids = [process.pid, *(int(appears(tmp_path / f"pid{rank}")) for rank in range(2))]
    for number, states in (signal.SIGTSTP, "T"), (signal.SIGCONT, "RS"):
        process.send_signal(number)
        until = time.monotonic() + 60
        while not all(state(pid) in states for pid in pids):
            assert time.monotonic() < until, number
            time.sleep(0.01)
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM


def test_a_rank_that_cannot_be_killed_is_named_and_left_behind(script, tmp_path):
    """A stand-in for a rank in a frozen container: the launcher's signals do not reach it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\n"
        "killpg = os.killpg\n"
        f"os.killpg = lambda pid, number: None if str(pid) == open('{tmp_path}/pid1').read() else killpg(pid, number)\n"
    )
    body = (
        f"open(f'{tmp_path}/pid{{rank}}', 'w').write(str(os.getpid()))\n"
        f"while rank == 0 and not os.path.exists('{tmp_path}/pid1'): time.sleep(0.01)\n"
        "sys.exit(5) if rank == 0 else time.sleep(1000)"
    )
    command = [*patched_run(REPORT_S=0.2, KILLED_S=0.3), "-n", "2", "--grace", "0.1", script(body)]
    done = run(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, kill_rest=False)
    pid = int((tmp_path / "pid1").read_text())
    try:
        assert done.returncode == 5
        assert re.search(rf"rank 1 \(pid {pid}, state S .*\) cannot be killed, and is left behind", done.stderr)
        assert "rank 0 failed first: exit code 5" in done.stderr.splitlines()[-1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


JOINS = "import os, sys, mscomm, numpy as np\nmscomm.init()\nprint('sum', mscomm.all_reduce(np.ones(1))[0])\n"


@pytest.mark.parametrize(("nodes", "keeps"), rotated(itertools.product([(), ("--nnodes", 1)], [True, False]), few=1))
def test_a_program_joins_behind_a_wrapper_that_closes_descriptors(tmp_path, nodes, keeps):
    """It does so once: a second program of the same rank is refused."""
    program = tmp_path / "program.py"
    program.write_text(JOINS)
    first = f"subprocess.run([sys.executable, {str(program)!r}], check=True)"
    second = f"sys.exit(5 if subprocess.run([sys.executable, {str(program)!r}]).returncode else 0)"
    wrapper = tmp_path / "wrapper.py"
    closes = "" if keeps else "os.closerange(3, 200)\n"
    wrapper.write_text(f"import os, subprocess, sys\n{closes}{first}\n{second}\n")
    done = mscomm_run("-n", 2, *nodes, wrapper)
    assert sorted(done.stdout.splitlines()) == ["[0] sum 2.0", "[1] sum 2.0"], done.stderr
    assert done.returncode == 5
    assert "can join, and only once" in done.stderr


def test_only_a_descendant_of_a_rank_gets_its_connection(script, tmp_path):
    """A process of the same user that asks, and is none, gets nothing. The job goes on."""
    body = (
        f"open(f'{tmp_path}/env', 'w').write(os.environ['MSCOMM_ENTRANCE'])\n"
        f"while not os.path.exists('{tmp_path}/asked'): time.sleep(0.01)\n{JOINS}"
    )
    command = [*MSCOMM, "run", "-n", "1", script(body)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        name = appears(tmp_path / "env")
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(60)
            stranger.connect(f"\0{name}")
            assert socket.recv_fds(stranger, 10, 2)[:2] == (b"", [])
        (tmp_path / "asked").touch()
        assert process.stdout.read() == b"[0] sum 1.0\n"
        assert process.wait(60) == 0


@pytest.mark.parametrize("numbers", ["SIGTERM", "SIGKILL"])
def test_a_program_behind_a_wrapper_ends_with_a_launcher_that_is_killed(tmp_path, numbers):
    """The shell ends at the kernel's SIGTERM. The program in it gets one SIGTERM, and SIGKILL if it goes on."""
    program = (
        "import os, signal, sys, time\n"
        "def stop(*_):\n"
        f"    open('{tmp_path}/stops', 'a').write('!')\n"
        f"    {numbers!r} == 'SIGTERM' and sys.exit()\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        f"open('{tmp_path}/pid', 'w').write(str(os.getpid()))\nwhile True: time.sleep(1)"
    )
    wrapper = '"$0" -c "$1"; echo the shell goes on'
    command = [*MSCOMM, "run", "-n", "1", "--grace", "1", "--", "sh", "-c", wrapper, sys.executable, program]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    pid = int(appears(tmp_path / "pid"))
    process.kill()
    process.wait()
    ends(pid)
    assert (tmp_path / "stops").read_text() == "!"


def test_ranks_end_with_a_launcher_that_is_killed(script, tmp_path):
    body = f"open(f'{tmp_path}/pid{{rank}}', 'w').write(str(os.getpid()))\ntime.sleep(60)"
    process = subprocess.Popen([*MSCOMM, "run", "-n", "2", script(body)], stderr=subprocess.DEVNULL)
    pids = [int(appears(tmp_path / f"pid{rank}")) for rank in range(2)]
    process.kill()
    process.wait()
    for pid in pids:
        ends(pid)


def test_a_rank_that_exits_with_a_status_is_lost_to_the_others(script):
    done = mscomm_run("-n", 2, script("import mscomm\nmscomm.init()\nif rank == 1: sys.exit(3)\nmscomm.barrier()"))
    assert done.returncode == 3
    assert "left the job: exit code 3" in done.stderr
    assert "rank 1 failed first: exit code 3" in done.stderr


@pytest.mark.parametrize("status", [0, 5])
def test_what_a_rank_started_does_not_stay_behind(script, tmp_path, status):
    body = (
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        f"open(f'{tmp_path}/child{{rank}}', 'w').write(str(child.pid))\nsys.exit({status})"
    )
    done = mscomm_run("-n", 2, script(body))
    assert done.returncode == status
    for rank in range(2):
        ends(int((tmp_path / f"child{rank}").read_text()))


@pytest.mark.skipif(os.geteuid() != 0, reason="a namespace of processes needs root")
def test_as_the_first_process_of_a_container_the_launcher_reaps_orphans(script):
    body = (
        "import psutil\n"
        "for _ in range(3): subprocess.run(['sh', '-c', 'true & exit 0'])\n"
        "def zombies():\n"
        "    told = [process.info for process in psutil.process_iter(['ppid', 'status'])]\n"
        "    return {'ppid': 1, 'status': 'zombie'} in told\n"
        "while zombies(): time.sleep(0.01)\n"
        "print('none')"
    )
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    done = run([*unshare, *MSCOMM, "run", "-n", "1", script(body)], 60)
    assert (done.returncode, done.stdout) == (0, "[0] none\n"), done.stderr


def test_a_reader_that_goes_away_ends_the_job(script, tmp_path):
    body = f"open(f'{tmp_path}/pid{{rank}}', 'w').write(str(os.getpid()))\nwhile True: print('y' * 1000)"
    command = [*MSCOMM, "run", "-n", "2", script(body)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.read(100)
        appears(tmp_path / "pid0"), appears(tmp_path / "pid1")
        process.stdout.close()
        assert process.wait(timeout=60) == 128 + signal.SIGPIPE
        assert b"Traceback" not in process.stderr.read()
    for rank in range(2):
        assert not alive(int((tmp_path / f"pid{rank}").read_text()))


def test_an_empty_line_that_arrives_by_itself_is_shown(script):
    """There is no progress bar, which the line could be the end of."""
    body = "for word in ('one', '', '', 'two', ''):\n    os.write(1, word.encode() + b'\\n')\n    time.sleep(0.1)"
    done = mscomm_run("-n", 1, script(body))
    assert done.stdout == "[0] one\n[0] \n[0] \n[0] two\n[0] \n"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_progress_bar_is_shown_while_it_grows(script, tmp_path, terminal):
    """The rank overwrites its line, and goes on when the test has seen that."""
    body = (
        "for i in range(3):\n"
        "    sys.stderr.write(f'\\rnot seen\\rstep {i}')\n"
        f"    while not os.path.exists(f'{tmp_path}/seen{{i}}'): time.sleep(0.01)\n"
        "print('done\\r', file=sys.stderr)"
    )
    reader, writer = os.openpty() if terminal else os.pipe()
    with subprocess.Popen([*patched_run(_BARS_S=(0.1, 0.1)), "-n", "1", script(body)], stderr=writer) as process:
        os.close(writer)
        said = b""
        for i in range(3):
            while b"step %d" % i not in said:
                said += os.read(reader, 1000)
            (tmp_path / f"seen{i}").touch()
        with contextlib.suppress(OSError):  # the other end of the terminal is closed
            while data := os.read(reader, 1000):
                said += data
        assert process.wait(60) == 0
    os.close(reader)
    end = b"\x1b[K\r" if terminal else b"\n"
    bars = b"".join(b"[0] step %d%b" % (i, end) for i in range(3))
    last = b"\x1b[K[0] step 2done\r\r\n" if terminal else b"[0] step 2done\r\n"
    assert said.endswith(bars + last), said


def test_a_full_disk_under_our_output_does_not_end_the_job(script, tmp_path):
    body = f"for _ in range(300): print('y' * 1000)\nopen('{tmp_path}/done', 'w').close()"
    with open("/dev/full", "w") as full:
        command = [*MSCOMM, "run", "-n", "1", "--log_dir", str(tmp_path), str(script(body))]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (tmp_path / "done").exists()
    assert done.returncode == 1
    assert done.stderr.count("stdout cannot be written, and is dropped until it can: No space left on device") == 1
    lost = 300 * len("[0] \n" + "y" * 1000)
    assert f"{lost} bytes of the ranks' output were dropped: stdout: No space left on device" in done.stderr
    assert (tmp_path / "worker_0.log").stat().st_size == 300 * 1001


def waits(pid: int) -> bool:
    """Return whether the process is in one system call for a while, such as write() to a pipe that is full."""
    first, *more = [Path(f"/proc/{pid}/syscall").read_text() for _ in range(20) if not time.sleep(0.005)]
    return first != "running\n" and all(one == first for one in more)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_slow_reader_gets_everything_and_stops_nobody(script, tmp_path, blocking):
    reader, writer = os.pipe()
    os.set_blocking(writer, blocking)
    body = (
        f"if rank == 1: sys.exit(3)\nopen('{tmp_path}/pid', 'w').write(str(os.getpid()))\n"
        f"for i in range(3000): print('y' * 1000)\nopen('{tmp_path}/done', 'w').write('!')"
    )
    command = [*patched_run(REPORT_S=60.0), "-n", "2", script(body)]
    with subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE) as process:
        os.close(writer)
        pid = int(appears(tmp_path / "pid"))
        while not waits(pid):  # until all pipes are full
            continue
        assert not (tmp_path / "done").exists()
        with open(reader, "rb") as pipe:
            assert pipe.read() == (b"[0] " + b"y" * 1000 + b"\n") * 3000
        assert process.wait(60) == 3


def test_output_that_nobody_read_is_counted_and_is_a_failure(script, tmp_path):
    """The rank prints more than a pipe holds, and nobody reads it. The rank does not have to wait, and ends with status
    0. But some output is lost, so `mscomm run` ends with status 1.
    """
    path = script("for _ in range(600): print('y' * 995)")
    command = [*patched_run(STALLED_S=0.3), "-n", "1", "--log_dir", tmp_path, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        said = process.stderr.read()  # the test reads all of stderr, and nothing from stdout yet
        assert process.wait(60) == 1
        lost = int(re.search(r"mscomm run: (\d+) bytes of the ranks' output were dropped: nobody read stdout", said)[1])
        # A piece of output counts as dropped even if a part of it was written.
        assert 600_000 <= len(process.stdout.read()) + lost < 600_000 + (16 << 10)
    assert f"{lost} bytes of output were dropped" in (tmp_path / "scheduler.log").read_text()


def test_torchruns_variables_are_the_defaults(script):
    env = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_MASTER_PORT": "29500"}
    assert sorted(mscomm_run(script("print('here')"), env=env).stdout.splitlines()) == ["[0] here", "[1] here"]
    assert mscomm_run("-n", 1, script("print('here')"), env=env).stdout == "[0] here\n"


def test_msruns_line_is_understood(script):
    words = ["--worker_num=2", "--local_worker_num=2", "--master_port=8118", "--join=True", "--cluster_time_out=60"]
    done = mscomm_run(*words, script("print(os.environ['MS_TOPO_TIMEOUT'])"))
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] 60.0", "[1] 60.0"])


# -- several nodes, all on this host; tests/test_hosts.py uses several hosts


def start_node(rank, *args, port, mscomm_run=(*MSCOMM, "run"), **env):
    words = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port), "--node-rank", str(rank)]
    return subprocess.Popen(
        [*mscomm_run, *words, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )


@pytest.fixture
def nodes(script, port):
    """nodes(body) runs the body on two nodes with two ranks each. It returns (status, stdout, stderr) for each node.

    first: the node that is started first. more: mscomm_run and variables of start_node().
    """

    def run_both(body, first=1, **more):
        path = script(body)
        started = {rank: start_node(rank, "-n", 2, path, port=port, **more) for rank in (first, 1 - first)}
        try:
            said = {rank: process.communicate(timeout=60) for rank, process in started.items()}
        finally:
            for process in started.values():
                process.kill()
                process.communicate()
        return [(started[rank].returncode, *said[rank]) for rank in (0, 1)]

    return run_both


@pytest.mark.parametrize("lost", rotated([[3], [0, 1]], few=1))
def test_ranks_of_all_nodes_go_on_when_they_shrink(nodes, tmp_path, lost):
    clock = tmp_path / "clock"
    (code_0, out_0, err_0), (code_1, out_1, err_1) = nodes(shrinking(clock, *lost), mscomm_run=patched_run(clock=clock))
    killed = 128 + signal.SIGKILL
    assert out_0.count("went on") + out_1.count("went on") == 4 - len(lost), err_0 + err_1
    assert (code_0, code_1) == ((1, killed) if lost == [3] else (killed, 1)), err_0 + err_1


def test_two_nodes_make_one_job_whose_key_is_in_no_environment_and_no_command_line(nodes, port, tmp_path):
    key = os.urandom(32).hex()
    (tmp_path / "key").write_text(key)
    (tmp_path / "key").chmod(0o600)
    body = (
        "import numpy as np, mscomm\nmscomm.init()\nprint(mscomm.all_gather(np.array([rank])), mscomm.get_launcher())\n"
        "assert os.environ['RANK'] == str(rank)\n"
        "stores = mscomm.all_gather_object([os.environ['MASTER_ADDR'], os.environ['MASTER_PORT']])\n"
        "assert stores == [['127.0.0.1', 'NEXT']] * 4, stores\n"
        "assert open('/proc/self/environ').read().count(KEY) == open('/proc/self/cmdline').read().count(KEY) == 0"
    ).replace("KEY", f"{key[:20]!r} + {key[20:]!r}")
    body = body.replace("NEXT", str(ports_instead(port, {})[0]))
    ends = nodes(body, first=0, MSCOMM_JOB_KEY_FILE=str(tmp_path / "key"))
    for node, (code, out, err) in enumerate(ends):
        assert code == 0, err
        assert sorted(out.splitlines()) == [f"[{2 * node + i}] [0 1 2 3] mscomm run" for i in range(2)]
        assert ("--node-rank 1 --master-addr 127.0.0.1" in err) == (node == 0)  # node 0 prints a line for node 1


def test_a_failure_on_one_node_ends_the_job_on_the_other(nodes):
    body = "import mscomm\nmscomm.init()\nif rank == 3: os._exit(7)\nmscomm.barrier()"
    (code_0, _, err_0), (code_1, _, err_1) = nodes(body)
    assert (code_0, code_1) == (1, 7), err_0 + err_1
    assert "the job failed on another host: PeerLost" in err_0
    assert "ended without release: exit code 7" in err_0, err_0 + err_1
    assert "rank 3 failed first on this host: exit code 7" in err_1


def test_a_rank_that_is_killed_elsewhere_ends_ranks_that_do_not_look(nodes, tmp_path):
    body = (
        "import mscomm\nmscomm.init()\nmscomm.barrier()\n"
        f"open(f'{tmp_path}/up{{rank}}', 'w').close()\n"
        f"while not all(os.path.exists(f'{tmp_path}/up{{one}}') for one in range(4)): time.sleep(0.01)\n"
        "if rank == 2: os.kill(os.getpid(), signal.SIGKILL)\nwhile True: time.sleep(1)"
    )
    (code_0, _, err_0), (code_1, _, err_1) = nodes(body, mscomm_run=patched_run(REPORT_S=0.2))
    assert code_0 == 128 + signal.SIGTERM and code_1 == 128 + signal.SIGKILL, err_0 + err_1
    assert "the job failed on another host: PeerLost: rank 2" in err_0


def test_a_program_that_fails_on_one_node_is_ended_on_the_other_though_it_knows_nothing_of_mscomm(nodes, tmp_path):
    soon = patched_run(REPORT_S=0.2)
    body = "if rank == 2: sys.exit(7)\nwhile True: time.sleep(1)"
    (code_0, _, err_0), (code_1, _, err_1) = nodes(body, mscomm_run=soon)
    assert (code_0, code_1) == (128 + signal.SIGTERM, 7), err_0 + err_1
    assert "the job failed on another host: PeerLost: rank 2: exit code 7" in err_0
    body = (
        f"up = '{tmp_path}/up'\nif rank == 2: open(up, 'w').close()\n"
        "while not (rank == 0 and os.path.exists(up)): time.sleep(0.01)\nsys.exit(7)"
    )
    (code_0, _, err_0), (code_1, _, err_1) = nodes(body, mscomm_run=soon)
    assert (code_0, code_1) == (7, 128 + signal.SIGTERM), err_0 + err_1
    assert "the job failed on another host: PeerLost: rank 0: exit code 7" in err_1


def test_ranks_end_when_the_launcher_of_node_0_is_killed(script, tmp_path, port):
    path = script(f"open(f'{tmp_path}/up{{rank}}', 'w').write('up')\nwhile True: time.sleep(1)")
    soon = patched_run(REPORT_S=0.2)
    node_0, node_1 = (start_node(rank, "-n", 1, path, port=port, mscomm_run=soon) for rank in (0, 1))
    for rank in (0, 1):
        appears(tmp_path / f"up{rank}")
    node_0.kill()
    node_0.communicate()
    _, err = node_1.communicate(timeout=60)
    assert node_1.returncode == 128 + signal.SIGTERM
    assert "the launcher of node 0 has ended" in err


def test_node_0_stays_until_the_others_have_left(nodes, tmp_path):
    body = (
        "import mscomm\nmscomm.init()\n"
        f"if rank < 2: open(f'{tmp_path}/pid{{rank}}', 'w').write(str(os.getpid()))\n"
        "def ended(other):\n"
        "    try:\n"
        f"        return open('/proc/' + open(f'{tmp_path}/pid{{other}}').read() + '/stat').read().split()[2] == 'Z'\n"
        "    except FileNotFoundError: return False\n"
        "if rank > 1:\n"
        "    while not (ended(0) and ended(1)): time.sleep(0.01)\n"
        "    time.sleep(0.5)  # a launcher that did not stay would be gone by now\n"
        "print('done')"
    )
    for code, out, err in nodes(body):
        assert code == 0 and len(out.splitlines()) == 2, err


def test_programs_that_know_nothing_of_mscomm_need_no_hub(nodes):
    for node, (code, out, err) in enumerate(nodes("print(os.environ['MSCOMM_WORLD_SIZE'], os.environ['MSCOMM_RANK'])")):
        assert code == 0, err
        assert sorted(out.splitlines()) == [f"[{2 * node + i}] 4 {2 * node + i}" for i in range(2)]


def test_node_0_waits_for_a_node_that_comes_after_its_own_ranks_have_ended(script, tmp_path, port):
    path = script(f"open(f'{tmp_path}/up{{rank}}', 'w').write('up')")
    node_0 = start_node(0, "-n", 1, path, port=port)
    appears(tmp_path / "up0")
    time.sleep(0.5)
    assert node_0.poll() is None
    node_1 = start_node(1, "-n", 1, path, port=port)
    for process in (node_1, node_0):
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    assert (tmp_path / "up1").exists()


def test_off_loopback_several_nodes_need_a_key_or_permission():
    words = ["--nnodes", "2", "--node-rank", "0", "--master-addr", "0.0.0.0", "--master-port", "28118"]
    done = mscomm_run(*words, "-n", 1, "true")
    assert done.returncode == 1
    assert "export MSCOMM_JOB_KEY_FILE=" in done.stderr and "mscomm run --permit-plain" in done.stderr


def test_a_node_without_node_0_says_where_it_looked():
    words = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--cluster_time_out", "0.5"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        done = mscomm_run(*words, "--master-port", taken.getsockname()[1], "-n", 1, "true")
    assert done.returncode == 1
    assert "no node 0 at 127.0.0.1:" in done.stderr and "Connection refused" in done.stderr


def test_a_failure_ends_the_job_though_nobody_reads(script):
    body = "if rank == 1: sys.exit(3)\nwhile True: print('y' * 1000)"
    command = [*patched_run(REPORT_S=0.2, STALLED_S=0.3), "-n", "2", script(body)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert b"rank 1 failed first" in process.stderr.read()
        assert process.wait(60) == 3


def test_closed_streams_are_no_trouble(script, tmp_path):
    body = f"print('x')\nopen('{tmp_path}/done', 'w').write('!')"
    subprocess.run(
        ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", *MSCOMM, "run", "-n", "2", script(body)], timeout=60, check=True
    )
    assert (tmp_path / "done").exists()


def test_ranks_see_the_end_of_the_control_link_when_the_launcher_dies(script, tmp_path):
    body = (
        "import socket\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open(f'{tmp_path}/pid{{rank}}', 'w').write(str(os.getpid()))\n"
        "link = socket.socket(fileno=int(os.environ['MSCOMM_CONTROL_FD'].partition(':')[0]))\n"
        "link.recv(48)\nlink.settimeout(60)\n"
        f"open(f'{tmp_path}/end{{rank}}', 'w').write(repr(link.recv(1)))"
    )
    process = subprocess.Popen([*MSCOMM, "run", "-n", "2", script(body)], stderr=subprocess.DEVNULL)
    pids = [int(appears(tmp_path / f"pid{rank}")) for rank in range(2)]
    process.kill()
    process.wait()
    try:
        assert [appears(tmp_path / f"end{rank}") for rank in range(2)] == ["b''", "b''"]
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_program_that_cannot_be_executed_is_one_line(tmp_path):
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF nonsense")
    program.chmod(0o755)
    done = mscomm_run("-n", 2, program)
    assert done.returncode == 1
    assert "Error: cannot start" in done.stderr
    assert "Traceback" not in done.stderr
