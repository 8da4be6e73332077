"""Runs scripts on ranks that are forked from an interpreter that has already imported NumPy, mscomm and PyTorch.

mscomm_run() is `mscomm run`, and torchrun() does what torchrun does. Importing PyTorch costs seconds of CPU time in
each process, and importing NumPy a tenth of a second. A script must import mscomm before it changes a variable that
mscomm reads at its import. All ranks are forked from one interpreter, so they hash strings alike, and they do not
finalize Python. Tests of a launcher itself start real processes: sessions.mscomm_run() and with_torchrun().
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import interpreter
import psutil
from ranks import Job, common, ranks
from sessions import clean_environment, run

import mscomm.cli
import mscomm.cli.run
import mscomm.dataset
import mscomm.train
from mscomm.launching import processes

TIMEOUT_S = 600
WITH_TORCH = str(Path(__file__).with_name("warm_torch.py"))  # an interpreter that has imported PyTorch, too


def as_main(words: Sequence[str]) -> None:
    """Run the script words[0] with the arguments words[1:], as Python does."""
    sys.argv = list(words)
    sys.path[0] = str(Path(words[0]).resolve().parent)
    main = sys.modules["__main__"] = type(sys)("__main__")
    main.__dict__.update(__file__=words[0], __builtins__=__builtins__)
    exec(compile(Path(words[0]).read_bytes(), words[0], "exec", dont_inherit=True), main.__dict__)  # noqa: S102


# -- mscomm run


def mscomm_run(
    *words: object,
    timeout_s: float = TIMEOUT_S,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    file: str = __file__,
) -> subprocess.CompletedProcess[str]:
    """Run `mscomm run WORDS`, in which the launcher's process and the ranks are forked. The ranks run Python scripts.

    env: variables in addition to those of this process. file: WITH_TORCH if the script imports PyTorch.
    """
    job = Started(*words, env=env, cwd=cwd, file=file)
    try:
        return job.ended(timeout_s)
    finally:
        job.kill()


class Started:
    """A launcher that mscomm_run() would wait for."""

    def __init__(
        self,
        *words: object,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        file: str = __file__,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.stdout, self.stderr = (Path(self._folder.name, name) for name in ("stdout", "stderr"))
        self.stdout.touch()
        self.stderr.touch()
        parameters = {"words": ["run", *map(str, words)], "cwd": str(cwd or Path.cwd()), "folder": self._folder.name}
        order = {"file": file, "name": "launcher", "parameters": parameters, "init": None}
        variables = {**common(), **(env or {}), "MSCOMM_RANK": "0"}
        one = interpreter.of(file, 0, common())
        assert one.suits(variables), "the interpreter cannot fork, or the variables matter only at the start of Python"
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._process = one.start(order, variables, Path(self._folder.name, "log"), theirs)

    def ended(self, timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        until = time.monotonic() + timeout_s
        while (code := self._process.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(
                    "mscomm run", timeout_s, self.stdout.read_bytes(), self.stderr.read_bytes()
                )
            time.sleep(0.005)
        log = Path(self._folder.name, "log").read_text()
        return subprocess.CompletedProcess(
            ["mscomm", "run"], code, self.stdout.read_text(), self.stderr.read_text() + log
        )

    def kill(self) -> None:
        """Kill the launcher and its ranks, also stopped ones."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in psutil.Process(self._process.pid).children(recursive=True):
                one.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._folder.cleanup()


@ranks(1, init=None)
def launcher(words: list[str], cwd: str, folder: str) -> None:
    """Be the process of `mscomm run`, whose ranks are forked from this process."""
    for name in ("MSCOMM_RANK", interpreter.CONTROL_FD):
        os.environ.pop(name, None)
    os.chdir(cwd)
    for number, name in (1, "stdout"), (2, "stderr"):
        file = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    processes.Launch._execute = _execute  # type: ignore[method-assign]
    mscomm.cli.main(words)


def _execute(
    self: processes.Launch, local_rank: int, inherits: Sequence[int], stdin: int | None, env: Mapping[str, str]
) -> _Rank:
    """Replaces Launch._execute: fork instead of starting Python. Return when the child has a process group of its own,
    and no handlers of the launcher's.
    """
    assert stdin == subprocess.DEVNULL and not self.cpus, "ranks that are forked have no stdin, and are not bound"
    (out, out_of_rank), (err, err_of_rank), (ready, ready_in_rank) = os.pipe(), os.pipe(), os.pipe()
    launcher = os.getpid()
    pid = os.fork()
    if pid == 0:
        _be_a_process(launcher, self.command[1:], inherits, out_of_rank, err_of_rank, ready_in_rank, env)
    for one in (out_of_rank, err_of_rank, ready_in_rank):
        os.close(one)
    os.read(ready, 1)
    os.close(ready)
    return _Rank(pid, open(out, "rb", 0), open(err, "rb", 0))


class _Rank:
    """What Launch uses of subprocess.Popen."""

    def __init__(self, pid: int, stdout: Any, stderr: Any) -> None:
        self.pid, self.stdout, self.stderr = pid, stdout, stderr
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def _be_a_process(
    launcher: int,
    words: Sequence[str],
    inherits: Sequence[int],
    out: int,
    err: int,
    ready: int,
    env: Mapping[str, str],
) -> None:
    """In a forked child: set what a newly started process would have, run the script, and end."""
    try:
        os.setsid()
        processes._prctl(processes._PR_SET_PDEATHSIG, int(signal.SIGTERM))
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, *processes.Launch.taken):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if os.getppid() != launcher:  # the launcher ended before prctl took effect
            os._exit(1)
        os.write(ready, b"!")
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in inherits:
                with contextlib.suppress(OSError):
                    os.close(int(name))
        os.environ.clear()
        os.environ.update(env)
        code = 0
        try:
            as_main(words)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            if isinstance(error.code, str):
                print(error.code, file=sys.stderr)
        except BaseException as error:
            code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        interpreter.leave(code)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


# -- torchrun


@ranks("size", init=None)
def rank_of_torchrun(words: list[str], cwd: str) -> None:
    """Run a script in the environment that torchrun would have made."""
    for name in [name for name in os.environ if name.startswith("MSCOMM_")]:
        del os.environ[name]  # this rank belongs to torchrun's job, not to the Job that has started it
    os.chdir(cwd)
    as_main(words)


def torchrun(size: int, script: Path, *words: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the script on `size` ranks, with torchrun's variables. The store of torchrun's agent is in this process.

    Return the exit code of the first rank that failed, or 0, and the output of all ranks, rank by rank. stdout and
    stderr of the result are equal: a rank has one file for both.
    """
    import torch

    folder = Path(tempfile.mkdtemp(dir=script.parent))
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def variables(rank: int) -> dict[str, str]:
        sizes = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_WORLD_SIZE": 1, "ROLE_WORLD_SIZE": size}
        places = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "ROLE_RANK": rank}
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_RUN_ID": folder.name}
        agent = {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0}
        return {name: str(value) for name, value in {**sizes, **places, **where, **agent, **env}.items()}

    parameters = {"words": [str(script), *map(str, words)], "cwd": str(Path.cwd())}
    order = {"file": WITH_TORCH, "name": "rank_of_torchrun", "parameters": parameters, "init": None}
    command = [sys.executable, "-u", interpreter.__file__, "be", json.dumps(order)]
    job = Job(size, command, folder, variables, order)
    codes = job.wait(TIMEOUT_S)
    said = "".join(map(job.output, range(size)))
    failed = next((code for code in codes if code != 0), 0)
    return subprocess.CompletedProcess(parameters["words"], -signal.SIGKILL if failed is None else failed, said, said)


def with_torchrun(size: int, script: Path, *words: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the script with the program torchrun."""
    program = shutil.which("torchrun", path=f"{sys.prefix}/bin")
    assert program, "torch is installed, but not its torchrun"
    command = [program, "--standalone", "--nproc_per_node", str(size), str(script), *map(str, words)]
    return run(command, TIMEOUT_S, clean_environment(OMP_NUM_THREADS="1", **env))
