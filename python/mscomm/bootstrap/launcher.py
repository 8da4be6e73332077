"""Our own launcher, `mscomm run`: MSCOMM_* variables say who we are, the control link is an inherited descriptor."""

from __future__ import annotations

import os
import select
import socket
import stat
from collections.abc import Mapping

from mscomm.bootstrap import Invitation
from mscomm.cluster.deadline import Deadline, wait
from mscomm.cluster.links import require_same_user
from mscomm.cluster.security import KEY_BYTES
from mscomm.errors import BackendUnavailable

NAME = "mscomm run"
_taken: set[int] = set()  # descriptors that this process took over; their numbers may be somebody else's by now
VARIABLES = ("MSCOMM_RANK", "MSCOMM_WORLD_SIZE", "MSCOMM_LOCAL_RANK", "MSCOMM_LOCAL_WORLD_SIZE", "MSCOMM_CONTROL_FD")


def detect(env: Mapping[str, str]) -> bool:
    return "MSCOMM_CONTROL_FD" in env or "MSCOMM_WORLD_SIZE" in env


def accept(env: Mapping[str, str], deadline: Deadline, permit_plain: bool) -> Invitation:
    """Take over the inherited end of the control link and read the job's key from it."""
    rank, size, local_rank, local_size, fd = (_number(env, name) for name in VARIABLES)
    if fd in _taken:
        raise BackendUnavailable(
            "mscomm run: a process can join its job once, and this one has: call init() once, and release() at the end"
        )
    if not (rank < size and local_rank < local_size <= size):
        values = ", ".join(f"{name}={env[name]}" for name in VARIABLES[:4])
        raise BackendUnavailable(f"mscomm run: {values} do not fit together; leave these variables to the launcher")
    sock = _adopt(fd)
    _taken.add(fd)
    try:
        key = _read_key(sock, deadline)
    except BaseException:
        sock.close()
        raise
    return Invitation(sock, key, True, rank, size, local_rank, None, NAME, where="the launcher (mscomm run)")


def _number(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "")
    if not (text.isascii() and text.isdecimal()):
        value = f"{name}={text!r}" if name in env else f"{name} is not set"
        raise BackendUnavailable(
            f"mscomm run: {value}, expected a number that the launcher sets; start with `mscomm run -n N ...`"
        )
    return int(text)


def _adopt(fd: int) -> socket.socket:
    """The socket behind the descriptor; no child of ours inherits it again."""
    advice = "only the process that `mscomm run` started, or one that inherits its descriptors, can join, and only once"
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            raise BackendUnavailable(f"mscomm run: MSCOMM_CONTROL_FD={fd} is not a socket; {advice}")
        os.set_inheritable(fd, False)
        sock = socket.socket(fileno=fd)
    except OSError as error:
        raise BackendUnavailable(f"mscomm run: MSCOMM_CONTROL_FD={fd}: {error.strerror}; {advice}") from error
    if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_STREAM:
        sock.detach()  # somebody else's socket: leave it as it is
        raise BackendUnavailable(f"mscomm run: MSCOMM_CONTROL_FD={fd} is not a unix stream socket; {advice}")
    require_same_user(sock)
    return sock


def _read_key(sock: socket.socket, deadline: Deadline) -> bytes:
    key = b""
    while len(key) < KEY_BYTES:
        try:
            wait(sock, select.POLLIN, deadline)
            received = sock.recv(KEY_BYTES - len(key))
        except OSError as error:
            raise BackendUnavailable(f"mscomm run: no word from the launcher on MSCOMM_CONTROL_FD: {error}") from error
        if not received:
            raise BackendUnavailable(
                "mscomm run: the launcher has ended, or another process of this rank has joined already"
            )
        key += received
    return key
