"""Joins a job that our own launcher, `mscomm run`, has started.

MSCOMM_* variables tell the process its rank. The process also inherits a descriptor, from which it reads the job's key.
In a job on one host, this descriptor is the rank's control link, too. In a job on several hosts, the rank connects to
the launcher of node 0, at the address in MSCOMM_SCHED.

A wrapper that starts the program may have closed the descriptor. The process then asks the launcher for another one, at
the unix socket in MSCOMM_ENTRANCE. The launcher gives it only to a descendant of the rank's process.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Mapping

from mscomm.bootstrap.invitation import Invitation, Seat
from mscomm.bootstrap.rendezvous import reach
from mscomm.cluster.bytestream import ByteStream
from mscomm.cluster.deadline import Deadline
from mscomm.cluster.hello import UNKNOWN_RUN
from mscomm.cluster.links import newcomer, recv_fds, require_same_user
from mscomm.cluster.protection import Protection
from mscomm.cluster.security import KEY_BYTES
from mscomm.errors import BackendUnavailable, Error, on_failure

NAME = "mscomm run"
PLACE = (("MSCOMM_RANK",), ("MSCOMM_WORLD_SIZE",))
# Descriptors that this process has used to join. Do not use them again: other files may have these numbers now.
_taken: set[int] = set()
SCHED, KEY_FD, CONTROL_FD = "MSCOMM_SCHED", "MSCOMM_KEY_FD", "MSCOMM_CONTROL_FD"
ENTRANCE = "MSCOMM_ENTRANCE"
VARIABLES = ("MSCOMM_RANK", "MSCOMM_WORLD_SIZE", "MSCOMM_LOCAL_RANK", "MSCOMM_LOCAL_WORLD_SIZE", CONTROL_FD)


def detect(env: Mapping[str, str]) -> bool:
    return "MSCOMM_CONTROL_FD" in env or "MSCOMM_WORLD_SIZE" in env


def accept(env: Mapping[str, str], deadline: Deadline, protection: Protection) -> Invitation:
    """Read the admission from the inherited descriptor. In a job on several hosts, also connect to the hub."""
    inherited = KEY_FD if SCHED in env else CONTROL_FD
    rank, size, local_rank, local_size = (_number(env, name) for name in VARIABLES[:4])
    number, _, inode = env.get(inherited, "").partition(":")
    fd = _number({**env, inherited: number} if inode else env, inherited)
    if fd in _taken:
        raise BackendUnavailable(
            "mscomm run: a process can join its job only once, and this one did so already: call init() once, and "
            "release() at the end"
        )
    if not (rank < size and local_rank < local_size <= size):
        values = ", ".join(f"{name}={env[name]}" for name in VARIABLES[:4])
        raise BackendUnavailable(f"mscomm run: {values} do not fit together; leave these variables to the launcher")
    try:
        sock = _adopt(fd, inherited, inode)
    except BackendUnavailable:
        if (asked := _ask(env.get(ENTRANCE, ""), deadline)) is None:
            raise
        sock = asked
    _taken.add(fd)
    stream = ByteStream(sock)
    with on_failure(stream.close):
        admission = _read(stream, KEY_BYTES + len(UNKNOWN_RUN), inherited, deadline)
    key, run = admission[:KEY_BYTES], admission[KEY_BYTES:]
    seat = Seat(rank, size, local_rank, one_host=inherited == CONTROL_FD)
    if seat.one_host:
        stream.secret = key
        return Invitation(NAME, seat, stream, key, "the launcher (mscomm run)")
    stream.close()
    return _connect(env[SCHED], key, run, seat, deadline, protection)


def _connect(sched: str, key: bytes, run: bytes, seat: Seat, deadline: Deadline, protection: Protection) -> Invitation:
    host, _, port = sched.rpartition(":")
    if not (host and port.isdecimal()):
        raise BackendUnavailable(f"mscomm run: {SCHED}={sched!r}, expected address:port; leave it to the launcher")
    stream, _ = reach(
        [(host.strip("[]"), int(port))],
        deadline,
        lambda address: key,
        newcomer(os.environ, seat.rank, run),
        f"mscomm run: rank {seat.rank} finds no launcher of node 0 at {sched}",
        "Has it ended, or does a firewall lie between the hosts?",
        protection=protection,
    )
    return Invitation(NAME, seat, stream, key, f"the launcher of node 0 (mscomm run) at {sched}")


def _number(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "")
    if not (text.isascii() and text.isdecimal()):
        value = f"{name}={text!r}" if name in env else f"{name} is not set"
        raise BackendUnavailable(
            f"mscomm run: {value}, expected a number that the launcher sets; start with `mscomm run -n N ...`"
        )
    return int(text)


def descriptor(sock: socket.socket) -> str:
    """Return the value of CONTROL_FD or KEY_FD for a socket that a rank inherits: its descriptor and its inode.

    A child of a rank also inherits the variable, but may have another file at this descriptor.
    """
    return f"{sock.fileno()}:{os.fstat(sock.fileno()).st_ino}"


def _adopt(fd: int, name: str, inode: str) -> socket.socket:
    """Take over the descriptor as a socket. Our child processes will not inherit it. inode: "" if it is not known."""
    advice = (
        "only a process that `mscomm run` started, or a descendant of it, can join, and only once. If a wrapper starts "
        "the program as another user, in a container or in the background, let it replace itself with the program "
        "(exec), or pass its descriptors on (subprocess with close_fds=False, sudo -C)"
    )
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            raise BackendUnavailable(f"mscomm run: {name}={fd} is not a socket; {advice}")
        if inode and inode != str(os.fstat(fd).st_ino):
            raise BackendUnavailable(f"mscomm run: {name}={fd} is another socket than that of the launcher; {advice}")
        os.set_inheritable(fd, False)
        sock = socket.socket(fileno=fd)
    except OSError as error:
        raise BackendUnavailable(f"mscomm run: {name}={fd}: {error.strerror}; {advice}") from error
    if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_STREAM:
        sock.detach()  # leave the descriptor open, because it is not ours
        raise BackendUnavailable(f"mscomm run: {name}={fd} is not a unix stream socket; {advice}")
    require_same_user(sock)
    return sock


def _ask(name: str, deadline: Deadline) -> socket.socket | None:
    """Get a socket like the one that the rank's process inherited. Return None if the launcher does not give us one."""
    if not name:
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as entrance:
        try:
            entrance.settimeout(deadline.left())  # the launcher may be stopped
            entrance.connect(f"\0{name}")
            entrance.setblocking(True)
            return socket.socket(fileno=recv_fds(entrance, 1, deadline)[0])
        except (Error, OSError):
            return None


def _read(stream: ByteStream, size: int, name: str, deadline: Deadline) -> bytes:
    content = b""
    while len(content) < size:
        try:
            stream.await_bytes(deadline)
            received = stream.receive(size - len(content))
        except OSError as error:
            raise BackendUnavailable(f"mscomm run: no message from the launcher on {name}: {error}") from error
        if received == b"":
            raise BackendUnavailable(
                "mscomm run: the launcher has ended, or another process of this rank has joined already"
            )
        content += received or b""
    return content
