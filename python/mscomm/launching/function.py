"""`mscomm.launch`: runs a function on all ranks of a new job, for notebooks and tests."""

from __future__ import annotations

import contextlib
import importlib
import operator
import os
import pickle
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import spawn, util
from types import ModuleType
from typing import Any, NamedTuple

from mscomm import tracebacks
from mscomm.cluster.cpus import usable_cpus
from mscomm.cluster.deadline import join_timeout_s, seconds_of
from mscomm.errors import BackendUnavailable, CollectiveTimeout, Error, PeerLost
from mscomm.interpreter import child_environment, is_frozen, own_child, python_executable
from mscomm.launching.ending import End
from mscomm.launching.parts import WholeJob
from mscomm.launching.processes import FORWARDED, JOB_CONTROL, PIPE_CLOSED, Launch
from mscomm.launching.tracebacks import PYTHONS_STATUS, numbers
from mscomm.writing import Output, TextOutput

# The program of a rank. It first sets sys.path to the value in the launching process, to find the same mscomm.
_SERVE = """
import os, pickle, sys
with open(os.dup(int(sys.argv[1])), "rb") as memory:
    memory.seek(0)
    sys.path[:] = pickle.load(memory)
from mscomm.launching.function import serve
serve()
"""
_OF_THE_MAIN_MODULE = ("sys_argv", "dir", "init_main_from_name", "init_main_from_path")
_importing_main = False  # true in a rank while it imports the script that called launch()


def launch(function: Callable[..., Any], n: int, *args: Any, timeout: float | timedelta | None = None) -> list[Any]:
    """Run function(*args) on n ranks, each a new process on this host. Return the results in rank order.

    The function joins the job with init(), like a script under `mscomm run`. Its output goes to sys.stdout and
    sys.stderr of this process, in whole lines that begin with the rank.

    As with multiprocessing's "spawn" method, the ranks are new processes, not forks. Therefore, the function, args and
    results are pickled. The pickles are passed in unnamed in-memory files. In a script, call launch() under
    `if __name__ == "__main__":`. A function that was defined in a notebook requires the package cloudpickle.

    timeout: the limit for the whole launch, in seconds or as a timedelta; None means no limit. A rank that ignores
    SIGTERM is killed 30 s later.

    If a rank fails, launch() raises the exception of the first rank that failed. If that exception cannot be pickled,
    launch() raises an Error with its text. If the rank ended without an exception, launch() raises the first failure of
    the job, or PeerLost if the job has reported none. After the timeout, launch() raises CollectiveTimeout, whose
    waiting_for holds the ranks that had not returned. The __cause__ of each of these errors contains the tracebacks of
    all ranks as text. Its `.rank` is the rank that failed first or, after the timeout, the lowest rank that had not
    returned. In all these cases, and after KeyboardInterrupt, the remaining ranks are terminated.

    Raise TypeError if function or args cannot be pickled, ValueError if n < 1, and BrokenPipeError if the ranks print
    something while sys.stdout or sys.stderr is closed.

    >>> def total(x):
    ...     mscomm.init()
    ...     return mscomm.all_reduce(np.full(2, x + mscomm.get_rank()))
    >>> mscomm.launch(total, 2, 10)
    [array([21, 21]), array([21, 21])]
    """
    size = operator.index(n)
    if size < 1:
        raise ValueError(f"launch: n is {size}; a job needs at least 1 rank")
    if _importing_main:
        raise RuntimeError(
            "launch was called while a rank imports the script that called it: put that call, and what only the first "
            'process should do, under `if __name__ == "__main__":`'
        )
    name = getattr(function, "__name__", repr(function))
    timeout_s = float("inf") if timeout is None else seconds_of(timeout, "launch")
    call = _pickled(function, args, name)
    with contextlib.ExitStack() as stack:
        files = [os.memfd_create(f"mscomm-call-{rank}", os.MFD_CLOEXEC) for rank in range(size)]
        for file in files:
            stack.callback(os.close, file)
            with open(os.dup(file), "wb") as memory:
                memory.write(call)
        job = _Calls(size, files, len(call), timeout_s)
        status = job.run()
        if job.signals:
            signal.raise_signal(job.signals[0])  # usually raises KeyboardInterrupt; all ranks have ended by now
        if status == PIPE_CLOSED and job.first is None:
            raise BrokenPipeError(f"launch: {name}: the ranks were ended: sys.stdout or sys.stderr cannot be written")
        outcomes = [_outcome(rank, file, len(call)) for rank, file in enumerate(files)]
    return _results(job, outcomes, f"launch: {name}", timeout_s)


class RankTraceback(Exception):
    """The __cause__ of an error from launch(): the ranks' tracebacks as text.

    rank: the rank that failed first or, after the timeout, the lowest rank that had not returned.
    """

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(rank, text)
        self.rank = rank
        self.text = text

    def __str__(self) -> str:
        return f"in rank {self.rank}\n{self.text}"


class _Outcome(NamedTuple):
    """What a rank passes back to the process that called launch()."""

    result: Any = None
    error: BaseException | None = None


class _Calls(Launch):
    """Runs the ranks of one launch(). Unlike `mscomm run`, it records how the ranks ended, and does not print it."""

    program = "mscomm.launch"
    taken = (*FORWARDED, *JOB_CONTROL)  # SIGUSR1 and SIGUSR2 are left to this process's own program

    def __init__(self, size: int, files: Sequence[int], begin: int, timeout_s: float) -> None:
        """files: for each rank, the file with the pickled call, which ends at offset `begin`."""
        if is_frozen():
            raise BackendUnavailable(
                "launch: the ranks are new interpreters, which cannot import the modules of a frozen program. "
                "Start the program with `mscomm run -n N -- PROGRAM`"
            )
        threads = max(1, usable_cpus() // size)
        env = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1", **child_environment(os.environ)}
        part = WholeJob(size, join_timeout_s(os.environ), restarts=False)
        python = python_executable("the ranks of launch()")
        command = [python, *util._args_from_interpreter_flags(), "-c", _SERVE]  # type: ignore[attr-defined]
        super().__init__(command, size, env, part, call_fds=files, timeout_s=timeout_s)
        self._begin = begin
        self.said = b""  # the tracebacks of all ranks
        self.verdict: Error | None = None
        self.first: End | None = None

    def _outputs(self, wake: Callable[[], None]) -> tuple[Output, Output]:
        return TextOutput(sys.stdout, wake), TextOutput(sys.stderr, wake)

    def _reap_orphans(self) -> None:
        """Leave this process's other children to its own program."""

    def _unknown_code(self, local_rank: int) -> int:
        outcome = _outcome(local_rank, self.call_fds[local_rank], self._begin)
        return 0 if outcome and not outcome.error else PYTHONS_STATUS

    def _show_last(self, tracebacks: bytes) -> None:
        self.said = self._tracebacks.shown + tracebacks
        if self._first() is None and not self.late:
            self._stderr.write(tracebacks)

    def _summary(self, verdict: Error | None, elsewhere: Error | None) -> int:
        self.verdict, self.first = verdict, self._first()
        self._flush()
        return self.first.status if self.first else 0


def _results(job: _Calls, outcomes: list[_Outcome | None], what: str, timeout_s: float) -> list[Any]:
    text = job.said.decode(errors="replace")
    if job.late:
        where = f"rank{'s' * (len(job.late) > 1)} {numbers(job.late)}"
        late = CollectiveTimeout(f"{what} did not return within {timeout_s:g} s on {where}", job.late, job.late)
        raise late from RankTraceback(job.late[0], text)
    without = [rank for rank, outcome in enumerate(outcomes) if outcome is None or outcome.error]
    if job.first is None and not without:
        return [outcome.result for outcome in outcomes if outcome]
    rank = job.first.rank if job.first else without[0]
    outcome = outcomes[rank]
    if outcome and outcome.error:
        error = outcome.error
    elif job.verdict:
        error = job.verdict.again(f"{what}: {job.verdict}")
    else:
        how = job.first.how if job.first else "it ended the process itself"
        error = PeerLost(f"{what}: rank {rank} did not end well: {how}", [rank])
    if hasattr(error, "add_note"):  # Python 3.11 or later
        error.add_note(f"in rank {rank} of {len(outcomes)}")
    raise error from RankTraceback(rank, text)


# -- passing the call to the ranks, and the results back


def _pickled(function: Callable[..., Any], args: tuple[Any, ...], name: str) -> bytes:
    """Return the pickles for a rank: sys.path, the data for setting up this process's main module, and the call."""
    prepared = spawn.get_preparation_data("mscomm-rank")
    main = {key: prepared[key] for key in _OF_THE_MAIN_MODULE if key in prepared}
    pickler: Any = pickle
    if not _can_be_imported(function, main):
        try:
            pickler = importlib.import_module("cloudpickle")
        except ImportError:
            raise TypeError(
                f"launch: {name} cannot be imported by a new process (it was written in a notebook, inside another "
                "function, or is a lambda): put it into a module, or install cloudpickle"
            ) from None
    try:
        head = pickle.dumps(prepared["sys_path"]) + pickle.dumps((main, pickler.__name__))
        return head + bytes(pickler.dumps((function, args)))
    except Exception as error:
        raise TypeError(f"launch: {name} or its arguments cannot be pickled: {error}") from error


def _can_be_imported(function: Callable[..., Any], main: dict[str, Any]) -> bool:
    """Return whether a new process can find the function by the name that pickle gives it."""
    try:
        pickle.dumps(function)
    except Exception:
        return False
    in_main = getattr(function, "__module__", None) in ("__main__", "__mp_main__")
    return not in_main or any(key.startswith("init_main") for key in main)


def _outcome(rank: int, file: int, begin: int) -> _Outcome | None:
    """Return the outcome that the rank wrote to its file after the pickled call, from offset `begin` on.

    Return None if the outcome is missing or incomplete.
    """
    with open(os.dup(file), "rb") as memory:
        memory.seek(begin)
        try:
            outcome = pickle.load(memory)  # noqa: S301 - our own child wrote it
        except (EOFError, pickle.UnpicklingError):
            return None
        except Exception as error:
            what = f"launch: what rank {rank} returned or raised cannot be unpickled here: {error}"
            return _Outcome(error=Error(what, [rank]))
    return outcome if isinstance(outcome, _Outcome) else None


def serve() -> None:
    """Run the call in the file whose descriptor is argv[1]. This is the whole program of a rank."""
    global _importing_main
    own_child()
    rank = int(os.environ["MSCOMM_RANK"])
    file = int(sys.argv[1])
    os.set_inheritable(file, False)
    failure: Exception | None = None
    with open(file, "r+b") as memory:
        memory.seek(0)
        pickle.load(memory)  # noqa: S301 - skips sys.path, which _SERVE has set
        pickler: ModuleType = pickle
        try:
            main, name = pickle.load(memory)  # noqa: S301 - from the process that started this one
            pickler = importlib.import_module(name)
            _importing_main = True
            spawn.prepare(main)
            _importing_main = False
            function, args = pickle.load(memory)  # noqa: S301
            result = function(*args)
            if job := sys.modules.get("mscomm.job"):
                job.leave_all()  # raises a failure of a job that no call has raised yet
            outcome = _result(pickler, result)
        except Exception as error:
            failure, outcome = error, _error(pickler, rank, error)
        memory.seek(0, os.SEEK_END)
        memory.write(outcome)
    if failure:  # show it like an uncaught exception; after init(), the excepthook also tells the other ranks
        tracebacks.shorten(failure)
        sys.excepthook(type(failure), failure, failure.__traceback__)
        sys.exit(PYTHONS_STATUS)


def _result(pickler: Any, result: Any) -> bytes:
    try:
        return bytes(pickler.dumps(_Outcome(result)))
    except Exception as error:
        raise TypeError(f"launch: the result, a {type(result).__name__}, cannot be pickled: {error}") from error


def _error(pickler: Any, rank: int, error: BaseException) -> bytes:
    """Return the pickled exception, or an Error with its text if the exception cannot be pickled."""
    with contextlib.suppress(Exception):
        pickled = bytes(pickler.dumps(_Outcome(error=error)))
        if type(pickle.loads(pickled).error) is type(error):  # noqa: S301
            return pickled
    return pickle.dumps(_Outcome(error=Error(f"rank {rank}: {type(error).__name__}: {error}", [rank])))
