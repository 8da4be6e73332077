"""@ranks(n): run a test as n real processes that have joined one job.

    @ranks(3)
    def test_sum(rank, group):
        assert mscomm.all_reduce(np.float32([rank]))[0] == 3

When a rank returns from a call, other ranks may still be in it. If the rank then ends or aborts, the call may fail on
the others. To prevent such a failure, let all ranks call everybody_is_here() before one of them ends or aborts.

Each process writes a log. When a rank fails, the others have GRACE_S to report and to end. Then they are killed, and
the test shows the logs. `expect` has the exit codes of the ranks that must not end with 0. Parameters of the test
(pytest.mark.parametrize) must be JSON.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import json
import os
import resource
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import interpreter
import rotated
from interpreter import Forked, Order

from mscomm.bootstrap.launcher import CONTROL_FD
from mscomm.cluster import hub, security

# How long the other ranks may take to end after the first failure. It only bounds a hang.
GRACE_S = 60.0
FINALIZED = 1 / 8  # the share of tests, other ones in each run, whose ranks finalize Python when they end
TOLD = "RANKS_TOLD"  # the environment variable that names the folder in which ranks signal each other


class Job:
    """n rank processes, with their hub in this process. Job starts the ranks as `mscomm run` does, and the test
    controls them.
    """

    def __init__(
        self,
        size: int,
        command: list[str],
        folder: Path,
        env: dict[str, str] | Callable[[int], dict[str, str]] | None = None,
        test: Order | None = None,
    ) -> None:
        """command: the command line that starts a rank. test: the order that lets an interpreter fork the rank instead.
        If there is an order, Job uses the command only for ranks whose environment Interpreter.suits() rejects.
        """
        self.size = size
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes] | Forked] = []
        told = tempfile.mkdtemp(prefix="told-", dir=folder)
        self.hub = hub.Hub(size, key=security.new_key(), topo_timeout_s=120, ranks_known=True, watched=True)
        for rank in range(size):
            ours, theirs = socket.socketpair()
            self.hub.adopt(ours, rank)
            with theirs:
                own = {
                    "MSCOMM_RANK": str(rank),
                    "MSCOMM_WORLD_SIZE": str(size),
                    "MSCOMM_LOCAL_RANK": str(rank),
                    "MSCOMM_LOCAL_WORLD_SIZE": str(size),
                    CONTROL_FD: str(theirs.fileno()),
                    TOLD: told,
                }
                whole = {**common(), **own, **(env(rank) if callable(env) else env or {})}
                self.processes.append(self._started(rank, command, test, whole, theirs))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.outcome: hub.Outcome | None = None
        self._thread.start()

    def _started(
        self, rank: int, command: list[str], test: Order | None, env: dict[str, str], control: socket.socket
    ) -> subprocess.Popen[bytes] | Forked:
        if test:
            ready = interpreter.of(test["file"], rank, common())
            if ready.suits(env):
                return ready.start(test, env, self.log(rank), control)
        with open(self.log(rank), "wb") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                pass_fds=[control.fileno()],
                start_new_session=True,
            )

    def _serve(self) -> None:
        self.outcome = self.hub.serve()

    def log(self, rank: int) -> Path:
        return self.folder / f"rank_{rank}.log"

    def output(self, rank: int) -> str:
        return self.log(rank).read_text(errors="replace")

    def wait(self, timeout_s: float) -> list[int | None]:
        """Wait for all ranks to end, at most timeout_s in total and at most GRACE_S after the first failure. Then kill
        the ranks that are still running.

        Return the exit codes, with None for each rank that had to be killed.
        """
        until = time.monotonic() + timeout_s
        reported: set[int] = set()
        try:
            while time.monotonic() < until:
                codes = [process.poll() for process in self.processes]
                for rank, code in enumerate(codes):
                    if code is not None and rank not in reported:
                        reported.add(rank)
                        self.hub.process_ended(rank, _how(code), badly=code != 0)
                        if code != 0:
                            until = min(until, time.monotonic() + GRACE_S)
                if len(reported) == self.size:
                    break
                time.sleep(0.005)
            return [process.poll() for process in self.processes]
        finally:
            self.kill()

    def kill(self) -> None:
        """End everything that this job started, including children of the ranks."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.hub.stop()
        self._thread.join(60)

    def logs(self) -> str:
        return "\n".join(f"--- rank {rank} ---\n{self.output(rank)[-3000:]}" for rank in range(self.size))


def common() -> dict[str, str]:
    """Return the environment variables that are the same for all ranks."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def _how(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _by_hand(program: list[str], rank: int, envs: list[dict[str, str]]) -> str:
    """Return a text with the shell command that runs a test's ranks without pytest, so that one can be debugged."""
    same = {name: value for name, value in envs[0].items() if all(env.get(name) == value for env in envs)}
    variables = [
        f"{TOLD}=$(mktemp -d)",
        f"{rotated.SEED}={rotated.seed()}",
        *(f"{name}={shlex.quote(value)}" for name, value in same.items()),
    ]
    left_out = sorted({name for env in envs for name in env} - set(same))
    differing = f" It leaves out {', '.join(left_out)}: the values differ between the ranks." if left_out else ""
    run = [str(Path(sys.executable).with_name("mscomm")), "run", "-n", str(len(envs)), "--stdin", str(rank)]
    return (
        "To debug the test, put breakpoint() into its body, and run this command. The rank after --stdin gets the"
        f" terminal.{differing}\n" + " ".join([*variables, *run, *program])
    )


def ranks(
    n: int | str,
    *,
    timeout_s: float = 120,
    env: dict[str, str] | Callable[..., dict[str, str]] | None = None,
    expect: dict[int, int] | None = None,
    init: dict[str, Any] | Callable[..., dict[str, Any]] | None = {},  # noqa: B006
    finalizes: bool = False,
) -> Any:
    """Decorate a test whose body runs in each of n processes, as fn(rank, group, **parameters).

    `group` is None, which means the world in every call of mscomm. fn may leave out `rank` and `group`.

    n may be the name of a parameter.

    env: the ranks' variables, or a function that gets the rank and the parameters and returns the variables. In a
    value, "{rank}" is replaced by the rank, and any other name in braces by the parameter with that name. For env, a
    parameter that is a list of n values is replaced by the value at index `rank`; the body gets the whole list.

    expect: the exit codes of ranks that do not end with 0, e.g. {1: -signal.SIGKILL}.

    init: the arguments of mscomm.init, or a function that gets the parameters and returns the arguments; None if the
    body calls init itself.

    finalizes: whether the ranks always finalize Python when they end, because the test is about that. Without it, the
    ranks of most tests end by interpreter.leave().
    """

    def decorate(fn: Callable[..., None]) -> Callable[..., None]:
        wanted = [name for name in inspect.signature(fn).parameters if name not in ("rank", "group")]

        @functools.wraps(fn)
        def test(tmp_path: Path, **parameters: Any) -> None:
            size = parameters[n] if isinstance(n, str) else n

            def filled(rank: int) -> dict[str, str]:
                own = {k: v[rank] if isinstance(v, list) and len(v) == size else v for k, v in parameters.items()}
                own["rank"] = rank
                if callable(env):
                    return env(**own)
                return {name: value.format(**own) for name, value in (env or {}).items()}

            where = {
                "file": fn.__code__.co_filename,
                "name": fn.__name__,
                "parameters": {k: parameters[k] for k in wanted},
                "init": init(**parameters) if callable(init) else init,
            }
            name = f"{Path(where['file']).name} {json.dumps({**where, 'file': ''})}"  # the same in every clone
            where["finalizes"] = finalizes or rotated.chance(name, FINALIZED)
            command = [sys.executable, "-u", interpreter.__file__, "be", json.dumps(where)]
            job = Job(size, command, tmp_path, filled, where)
            codes = job.wait(timeout_s)
            allowed = [(expect or {}).get(rank, 0) for rank in range(size)]
            wrong = [rank for rank in range(size) if codes[rank] != allowed[rank]]
            assert not wrong, f"exit codes {codes}, expected {allowed}\n{job.logs()}\n" + _by_hand(
                [*command[2:-1], shlex.quote(command[-1])], wrong[0], [filled(rank) for rank in range(size)]
            )

        extra = [] if not isinstance(n, str) or n in wanted else [n]
        names = ["tmp_path", *wanted, *extra]
        del test.__wrapped__
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        )
        test.body = fn  # type: ignore[attr-defined]
        return test

    return decorate


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[list[int]]:
    """Lower the limit on file descriptors, and open as many as it allows. Yield the list of them. A caller that closes
    one must also remove it from the list.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 3, hard))
    taken: list[int] = []  # gets at least one descriptor
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield taken
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# -- functions with which ranks signal each other; they use files, because the tests make mscomm fail


def tell(what: str) -> None:
    """Let until_told(what) return on all ranks."""
    Path(os.environ[TOLD], what).touch()


def until_told(*what: str) -> None:
    """Wait until tell() was called for each of these texts. Only the test's own timeout limits the wait."""
    for one in what:
        while not Path(os.environ[TOLD], one).exists():
            time.sleep(0.002)


_meetings = itertools.count()


def everybody_is_here() -> None:
    """Wait until all ranks of the job are in this function. All ranks have then returned from every earlier call."""
    turn = next(_meetings)
    tell(f"here {turn} {os.environ['MSCOMM_RANK']}")
    until_told(*(f"here {turn} {rank}" for rank in range(int(os.environ["MSCOMM_WORLD_SIZE"]))))


def when_inside(number: int, then: Callable[[], object], group: Any = None) -> None:
    """Start a thread that calls then() as soon as this rank is in call `number` of the group, or in a later call."""
    from mscomm.job import resolve

    core = resolve(group).core

    def watch() -> None:
        while not ((where := core.where())[0] >= number and where[1]):
            time.sleep(0.002)
        then()

    threading.Thread(target=watch, daemon=True).start()


before_joining: list[Callable[[], object]] = []  # each rank calls these functions before init(); test files add them


def be_a_rank(where: Order) -> None:
    """Run the test as one rank: join the job, run the body, leave. The test file must be imported already."""
    import mscomm

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started the tests with SIGINT ignored
    for prepare in before_joining:
        prepare()
    body = getattr(sys.modules["under_test"], where["name"]).body
    arguments_of_init = where.get("init", {})
    if arguments_of_init is not None:
        mscomm.init(**arguments_of_init)
    rank = mscomm.get_rank() if mscomm.is_initialized() else int(os.environ["MSCOMM_RANK"])
    arguments = {"rank": rank, "group": None, **where["parameters"]}
    body(**{name: arguments[name] for name in inspect.signature(body).parameters})
