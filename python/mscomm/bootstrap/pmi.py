"""Joins a job that MPICH's Hydra or Intel MPI has started, with the PMI-1 text protocol over PMI_FD or PMI_PORT.

With PMI_FD, an MPI library in this process may use PMI-1 over the same descriptor, before or after us. Therefore, we
leave the descriptor open with its flags unchanged, and read only the answers to our own requests.

Hydra kills the other ranks if a rank that has used PMI-1 ends without `finalize`. So if the MPI library does not send
`finalize`, we send it. We send it only at exit, because MPI_Init fails with a broken pipe after a `finalize`.

With PMI_PORT (`mpirun -pmi-port`), this process inherits no descriptor, and we open our own connection. Hydra then
drops the connection of an MPI library, so PMI_PORT works only for processes that do not use MPI.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import select
import socket
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from mscomm.bootstrap import kvs
from mscomm.bootstrap.invitation import Invitation, Seat, turn
from mscomm.cluster.deadline import Deadline, wait
from mscomm.cluster.protection import Protection
from mscomm.errors import BackendUnavailable, CollectiveTimeout

NAME = "PMI"

_NAMES = kvs.Names(
    rank=("PMI_RANK",),
    size=("PMI_SIZE",),
    local_rank=("MPI_LOCALRANKID", "SLURM_LOCALID"),
    local_size=("MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE"),
)
PLACE = (_NAMES.rank, _NAMES.size)
_ANSWER_BYTES = 4096  # no answer is longer, because each value that we store has fewer than 300 bytes
_GOODBYE_S = 2.0
_farewells: set[int] = set()  # inherited descriptors for which an exit handler is registered


def detect(env: Mapping[str, str]) -> bool:
    """Return whether a process manager that speaks PMI started this process."""
    return "PMI_FD" in env or "PMI_PORT" in env or ("PMI_RANK" in env and "PMI_SIZE" in env)


def accept(env: Mapping[str, str], deadline: Deadline, protection: Protection) -> Invitation:
    """Connect to the hub that rank 0 starts. Before that, all ranks wait for each other in a PMI barrier."""
    with _process_manager(env, deadline) as (fd, full_env):
        seat = kvs.place(full_env, _NAMES, NAME)
        return kvs.Join(NAME, seat, _Store(fd, seat, deadline), env, deadline, protection).invitation()


class _Store:
    """The store of mpirun, with new names for this join. Another rank's values can be read after the next barrier."""

    def __init__(self, fd: int, seat: Seat, deadline: Deadline) -> None:
        """Send cmd=init, which is allowed even if MPI has sent it before."""
        _ask(fd, "cmd=init pmi_version=1 pmi_subversion=1", "response_to_init", deadline)
        limit = _ask(fd, "cmd=get_maxes", "maxes", deadline).get("vallen_max", "")
        self._space = _ask(fd, "cmd=get_my_kvsname", "my_kvsname", deadline).get("kvsname", "")
        if not self._space or not limit.isdecimal():
            raise BackendUnavailable(f"{NAME}: mpirun does not describe its key-value store. {kvs.INSTEAD}")
        self._fd, self._seat, self._limit = fd, seat, int(limit)
        self._late = False  # whether a barrier has timed out: mpirun may still answer it, so nothing else can be asked
        self._key = f"mscomm-{turn(NAME)}"

    def ask(self, text: str, deadline: Deadline) -> str:
        if text:
            self._put(f"{self._key}-ask-{self._seat.rank}", text, deadline)
            self._meet(deadline)
        self._meet(deadline)
        return self._get(kvs.entry(self._key, self._seat, self._seat.rank), deadline)

    def collect(self, deadline: Deadline, wanted: bool) -> list[str]:
        self._meet(deadline)
        return [self._get(f"{self._key}-ask-{rank}", deadline) for rank in range(1, self._seat.size) if wanted]

    def answer(self, texts: Sequence[str], deadline: Deadline) -> None:
        if self._late:
            return
        for rank, text in enumerate(texts):
            self._put(kvs.entry(self._key, self._seat, rank), text, deadline)
        self._meet(deadline)

    def _put(self, key: str, text: str, deadline: Deadline) -> None:
        if len(text) >= self._limit:
            raise BackendUnavailable(
                f"{NAME}: mpirun stores at most {self._limit} bytes, but mscomm needs {len(text)}. {kvs.INSTEAD}"
            )
        _ask(self._fd, f"cmd=put kvsname={self._space} key={key} value={text}", "put_result", deadline)

    def _get(self, key: str, deadline: Deadline) -> str:
        return _ask(self._fd, f"cmd=get kvsname={self._space} key={key}", "get_result", deadline).get("value", "")

    def _meet(self, deadline: Deadline) -> None:
        try:
            _ask(self._fd, "cmd=barrier_in", "barrier_out", deadline)
        except CollectiveTimeout as error:
            self._late = True
            raise CollectiveTimeout(
                f"{NAME}: not all {self._seat.size} ranks called mscomm.init() within {deadline.seconds:g} s: "
                "one has ended, or never calls it"
            ) from error


def _ask(fd: int, question: str, answer: str, deadline: Deadline, lines: int = 1) -> dict[str, str]:
    """Send a request to mpirun, and return the fields of its answer.

    answer: the name that the answer must have. Raise BackendUnavailable if mpirun sends another answer or an error, and
    CollectiveTimeout if no answer arrives before the deadline.
    """
    asked = question.partition(" ")[0]
    try:
        os.write(fd, f"{question}\n".encode("ascii"))
        text = _read(fd, lines, deadline)
    except TimeoutError as error:
        raise CollectiveTimeout(f"{NAME}: mpirun did not answer {asked} within {deadline.seconds:g} s") from error
    except OSError as error:
        raise BackendUnavailable(
            f"{NAME}: {error} after {asked}. Was MPI_Finalize called, or has mpirun ended? "
            "A script that starts it with & must wait for it."
        ) from error
    fields = dict(re.findall(r"([a-z_]+)=(\S*)", text))
    if not re.match(rf"cmd={answer}\s", text) or fields.get("rc", "0") != "0":
        raise BackendUnavailable(f"{NAME}: mpirun answered {asked} with {text!r}, not cmd={answer} rc=0. {kvs.INSTEAD}")
    return fields


def _read(fd: int, lines: int, deadline: Deadline) -> str:
    """Read `lines` lines of printable ASCII; raise OSError if mpirun closes the connection or sends anything else."""
    text = b""
    while text.count(b"\n") < lines:
        wait(fd, select.POLLIN, deadline)
        received = os.read(fd, _ANSWER_BYTES)
        text += received
        if not received:
            raise ConnectionResetError("mpirun closed the connection")
        if len(text) > _ANSWER_BYTES or re.search(rb"[^ -~\n]", text):
            raise ConnectionAbortedError(f"mpirun sent {text[:40]!r}..., which is not PMI-1")
    if text.count(b"\n") != lines or not text.endswith(b"\n"):
        raise ConnectionAbortedError(f"mpirun sent {text[:40]!r}..., which is more than the answer")
    return text.decode("ascii")


@contextmanager
def _process_manager(env: Mapping[str, str], deadline: Deadline) -> Iterator[tuple[int, Mapping[str, str]]]:
    """Yield the descriptor of a connection to mpirun, and an environment that has PMI_RANK and PMI_SIZE.

    With PMI_FD, `finalize` is sent when the process exits. With PMI_PORT, it is sent at the end of the `with` block.
    """
    if "PMI_FD" in env:
        fd = _inherited(env["PMI_FD"])
        if fd not in _farewells:
            _farewells.add(fd)
            atexit.register(_finalize_unless_mpi, fd, os.fstat(fd).st_ino, os.getpid())
        yield fd, env
    elif "PMI_PORT" in env:
        rank = env.get("PMI_ID") or env.get("PMI_RANK")
        with _dial(env["PMI_PORT"], deadline) as sock:
            said = _ask(sock.fileno(), f"cmd=initack pmiid={rank}", "initack", deadline, lines=4)
            yield sock.fileno(), {**env, "PMI_RANK": said.get("rank", ""), "PMI_SIZE": said.get("size", "")}
            _ask(sock.fileno(), "cmd=finalize", "finalize_ack", deadline)
    else:
        raise BackendUnavailable(
            f"{NAME}: PMI_RANK and PMI_SIZE are set, but neither PMI_FD nor PMI_PORT leads to mpirun. {kvs.INSTEAD}"
        )


def _inherited(text: str) -> int:
    """Return the descriptor in PMI_FD. Raise BackendUnavailable if it is not a socket.

    For example, a child process of a rank may inherit the variable without the descriptor.
    """
    try:
        fd = int(text)
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            return fd
        problem = "is not a socket"
    except (OSError, ValueError, OverflowError) as error:
        problem = f"cannot be used: {error}"
    raise BackendUnavailable(
        f"{NAME}: PMI_FD={text} {problem}. Was MPI_Finalize called before, or was this process started by a rank, "
        "not by mpirun? Then remove PMI_FD, PMI_RANK and PMI_SIZE from its environment."
    )


def _dial(address: str, deadline: Deadline) -> socket.socket:
    host, _, port = address.rpartition(":")
    try:
        sock = socket.create_connection((host, int(port)), deadline.left())
    except (OSError, ValueError, OverflowError) as error:
        raise BackendUnavailable(f"{NAME}: cannot reach mpirun, PMI_PORT={address}: {error}. {kvs.INSTEAD}") from error
    sock.setblocking(True)
    return sock


def _finalize_unless_mpi(fd: int, inode: int, pid: int) -> None:
    """At exit, send `finalize` if the inherited descriptor is still open and no MPI library sends `finalize`."""
    # An error means that mpirun has ended, or is about to end this job.
    with suppress(OSError, BackendUnavailable, CollectiveTimeout):
        if os.getpid() == pid and os.fstat(fd).st_ino == inode and not _mpi_initialized():
            _ask(fd, "cmd=finalize", "finalize_ack", Deadline(_GOODBYE_S))


def _mpi_initialized() -> bool:
    """Return whether an MPI library in this process was initialised.

    If so, the library has sent `finalize`, or will send it.
    """
    with open("/proc/self/maps") as maps:
        loaded = {line.split(maxsplit=5)[5].strip() for line in maps if re.search(r"/libmpi(ch)?\.so", line)}
    answer = ctypes.c_int(0)
    for path in loaded:
        ctypes.CDLL(path).MPI_Initialized(ctypes.byref(answer))
        if answer.value:
            return True
    return False
