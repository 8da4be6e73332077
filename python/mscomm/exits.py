"""Makes a rank leave the job when its process ends, and tell the other ranks about an uncaught exception.

Also makes a rank end when its MPI launcher is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from mscomm import environment, tracebacks
from mscomm.errors import Error
from mscomm.threads import start_thread

_watching = False
_leaving = False  # whether this process ends, and leaves the job


def watch(release: Callable[[], None], tell: Callable[[BaseException, str], bool]) -> None:
    """Register functions to be called when the process ends. Only the first call to watch() has an effect.

    release() leaves the job. tell(error, words) is called only if an uncaught exception ends this rank. It tells the
    other ranks about the exception, and returns whether there are other ranks. words: the exception and its location.
    """
    global _watching
    full = environment.read("MSCOMM_TRACEBACK", os.environ) == "FULL"
    if _watching:
        return
    _watching = True
    atexit.register(_release, release)
    sys.excepthook = _TellingHook(sys.excepthook, tell, full)
    threading.excepthook = functools.partial(_show_unless_leaving, threading.excepthook)


_PR_SET_PDEATHSIG = 1
# The names of the programs with which MPI implementations start ranks, as in /proc/<pid>/stat: at most 15 characters.
# Without end_with_mpi_launcher(), the ranks would run forever after SIGKILL has killed such a program.
_MPI_LAUNCHERS = ("prterun", "prted", "orterun", "orted", "mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy")


@functools.cache  # a second init() needs no second thread
def end_with_mpi_launcher() -> None:
    """If an MPI launcher has started this process, make this process receive SIGTERM when the launcher ends.

    If the launcher is the parent, the kernel sends the signal. If another program is in between, such as a shell
    script, a thread waits for the launcher's end. The thread needs a pidfd. If the system offers none, this process
    gets no signal.
    """
    launcher = _mpi_launcher()
    if launcher is None:
        return
    try:
        if launcher == os.getppid():
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
            if os.getppid() != launcher:  # the launcher ended before prctl took effect
                raise ProcessLookupError
        elif hasattr(os, "pidfd_open"):
            start_thread(threading.Thread(target=_end_with, args=(os.pidfd_open(launcher),), daemon=True))
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGTERM)
    except OSError:  # the kernel or a sandbox offers no pidfds
        pass


# A forked child has neither the signal nor the thread, so a call of init() in the child must set them up again.
os.register_at_fork(after_in_child=end_with_mpi_launcher.cache_clear)


def _mpi_launcher() -> int | None:
    """Return the process id of the closest ancestor that is an MPI launcher, or None if there is no such ancestor."""
    pid = os.getppid()
    while pid > 1:
        try:
            before, after = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rsplit(")", 1)
        except OSError:  # the ancestor has ended, or is in another PID namespace
            return None
        if before.partition("(")[2] in _MPI_LAUNCHERS:
            return pid
        pid = int(after.split()[1])
    return None


def _end_with(pidfd: int) -> None:
    """Wait until the process has ended. Then send SIGTERM to this process."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    poller.poll()
    os.kill(os.getpid(), signal.SIGTERM)


def _show_unless_leaving(show: Callable[[Any], Any], args: threading.ExceptHookArgs) -> None:
    """Show the exception of a thread, except if the end of the process has broken a call of a daemon thread."""
    if _leaving and args.thread is not None and args.thread.daemon:
        frames = [frame for frame, _ in traceback.walk_tb(args.exc_traceback)]
        if frames and frames[-1].f_code.co_filename.startswith(tracebacks.PACKAGE):
            return
    show(args)


def _release(release: Callable[[], None]) -> None:
    global _leaving
    _leaving = True
    try:
        release()
    except Error as error:
        print(f"mscomm: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


class _TellingHook:
    """An excepthook that tells the other ranks why this rank ends, then calls the previous excepthook.

    full: whether to pass the whole traceback to the previous hook, or only the frames of the user's program.
    """

    def __init__(self, before: Any, tell: Callable[[BaseException, str], bool], full: bool) -> None:
        self._before = before
        self._tell = tell
        self._full = full

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        in_main_thread = threading.current_thread() is threading.main_thread()
        with contextlib.ExitStack() as stack:
            if issubclass(kind, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) and in_main_thread:
                # A second Ctrl-C must not interrupt the hook.
                stack.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.SIG_IGN))
            self._tell_and_show(kind, error, trace)

    def _tell_and_show(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        place = tracebacks.place(trace)
        where = f" ({place})" if place else ""
        has_others = self._tell(error, "".join(traceback.format_exception_only(kind, error)).strip() + where)
        if not self._full:
            tracebacks.shorten(error)
            trace = tracebacks.users_part(trace)
            if has_others and issubclass(kind, KeyboardInterrupt) and self._before is sys.__excepthook__:
                # Ctrl-C interrupts all ranks, so each rank prints only one line.
                print(f"KeyboardInterrupt{where}", file=sys.stderr, flush=True)
                return
        self._before(kind, error, trace)
