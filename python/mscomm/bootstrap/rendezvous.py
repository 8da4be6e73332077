"""Lets the ranks meet at an address that each rank can compute. Rank 0 starts the hub there, and the others connect.

The modules for launchers without a key-value store share this code. If all ranks are on one host, they meet at an
abstract unix socket whose name is derived from the job. The job's key is then in a file that only the current user can
read. Ranks on several hosts meet at a TCP port of rank 0's host. Rank 0 has a list of a few ports and takes the first
free one. The other ranks try the ports of this list in turn, and the hello tells them which port belongs to their job.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mscomm import environment
from mscomm.bootstrap.invitation import Invitation, Seat
from mscomm.cluster import hub_process, interfaces, links, security
from mscomm.cluster.bytestream import ByteStream
from mscomm.cluster.deadline import Deadline
from mscomm.cluster.frames import Frames
from mscomm.cluster.hello import CONTROL, LAUNCHER, Busy, Cut, Identity, NotMscomm
from mscomm.cluster.protection import Protection
from mscomm.errors import AuthenticationError, BackendUnavailable, Error, on_failure

if TYPE_CHECKING:
    import psutil

_RETRY_S = (0.02, 0.2)  # the first pause and the longest pause between attempts to connect
_ATTEMPT_S = 5.0  # the time limit of one attempt if there are several addresses; a firewall can make an attempt hang
_SAYS_WAITING_AFTER_S = 10.0
_LAST_JOB_S = 5.0  # how long rank 0 retries if the address is taken; the hub of the previous job may still hold it
_HIGH_PORTS = range(61440, 1 << 16)  # above Linux's ephemeral ports, 32768 to 60999
_STARTED_TOGETHER_S = 5.0  # how long before its hub a job's ranks may be started, if its hub process is older than that
_TELL_S = 2.0  # how long to keep trying to reach the hub at a taken address; that hub may not be listening yet


class Spot(NamedTuple):
    """Where the ranks meet.

    job: text that identifies the job among all jobs that may use the same address. host: the name or address of rank
    0's host. key_path: a file on a shared file system; rank 0 writes the key to it if the user provides no key. key: a
    key that all ranks have already.
    """

    job: str
    host: str = ""
    ports: Sequence[int] = ()
    key_path: str = ""
    key: bytes = b""


class Meeting(NamedTuple):
    """How the ranks of a job meet. advice: what the user should check, for the error message."""

    launcher: str
    seat: Seat
    spot: Spot
    env: Mapping[str, str]
    deadline: Deadline
    protection: Protection
    advice: str

    def invitation(self) -> Invitation:
        """Connect to this job's hub, which rank 0 starts."""
        launcher, seat, spot, env, deadline, protection, advice = self
        if seat.one_host and (job_id := environment.read("MSCOMM_JOB_ID", env)):
            spot = spot._replace(job=f"{spot.job} {job_id}")  # jobs with different ids then use different sockets
        if seat.rank == 0:
            return self._replace(spot=spot)._host()
        targets = [_unix_name(spot.job)] if seat.one_host else [(spot.host, port) for port in spot.ports]
        where = _where(seat, spot)
        stream, key = reach(
            targets,
            deadline,
            lambda address: security.admission_key(_key(spot, address, env, protection)[0], CONTROL),
            links.newcomer(env, seat.rank),
            f"{launcher}: rank {seat.rank} finds no hub of rank 0 at {where}",
            advice,
            protection=protection,
        )
        return Invitation(launcher, seat, stream, key, f"the hub that rank 0 started at {where}")

    def _host(self) -> Invitation:
        """Do rank 0's part of invitation(): start the hub, and connect to it.

        Until the hub process runs, connections wait in the listener's backlog.
        """
        launcher, seat, spot, env, deadline, protection, advice = self
        began, until = time.monotonic(), deadline.within(_LAST_JOB_S)
        while True:
            try:
                listener, key, file = _open(seat, spot, env, protection)
                break
            except AuthenticationError:
                raise
            except OSError as error:
                if error.errno != errno.EADDRINUSE or until.passed:
                    taken = ""
                    if error.errno == errno.EADDRINUSE and not seat.one_host and len(spot.ports) == 1:
                        host, port = _resolve(spot.host, spot.ports[0])[1][:2]
                        waited_s = time.monotonic() - began
                        taken = contend(
                            host, port, lambda at: _key(spot, at, env, protection)[0], env, protection, waited_s
                        )
                    what = {
                        errno.EADDRINUSE: f"taken{taken}, perhaps by another job",
                        errno.EADDRNOTAVAIL: "this host, where rank 0 runs, does not have that address",
                    }.get(error.errno or 0, words(error))
                    raise BackendUnavailable(
                        f"{launcher}: rank 0 cannot listen at {_where(seat, spot)}: {what}. {advice}"
                    ) from error
            time.sleep(_RETRY_S[1])
        with contextlib.ExitStack() as failing:
            if file:
                failing.callback(file.remove)
            with listener:
                address = links.address_of(listener)
                process = hub_process.spawn(listener, seat.size, key, deadline.rest(), links.job_of(env), protection)
            with hub_process.connecting(process):
                admission, mine = security.admission_key(key, CONTROL), links.newcomer(env, seat.rank)
                stream = links.open_link(address, admission, CONTROL, mine, deadline, protection)
            failing.pop_all()
        where = interfaces.endpoint(*address) if isinstance(address, tuple) else _where(seat, spot)
        hub = f"the hub that rank 0 started at {where}"
        return Invitation(launcher, seat, stream, admission, hub, key_file=file)


def number(launcher: str, env: Mapping[str, str], name: str, low: int, high: int | None = None) -> int:
    """Return the variable's value; raise BackendUnavailable if it is not a whole number from low to high."""
    text = env.get(name, "").strip()
    if not (text.isascii() and text.isdecimal() and low <= int(text) and (high is None or int(text) <= high)):
        value = f"{name}={env[name]!r}" if name in env else f"{name} is not set"
        limits = f"a number from {low} to {high}" if high is not None else f"a number of at least {low}"
        raise BackendUnavailable(f"{launcher}: {value}, expected {limits}; the launcher should set it")
    return int(text)


def ports_instead(port: int, env: Mapping[str, str]) -> Sequence[int]:
    """Return ports at which the hub can listen instead of `port`, which another program uses.

    They are far from `port`, because a user's next job often has the next port. They include `port` only if
    MSCOMM_PORTS has no other port.
    """
    ports = high_ports(str(port), env)
    return [one for one in ports if one != port] or ports


def meeting_ports(job: str, env: Mapping[str, str]) -> Sequence[int]:
    """Return the hub's ports if the launcher names none: MSCOMM_PORT, or else eight ports derived from the job."""
    if port := environment.read("MSCOMM_PORT", env):
        return range(port, port + 1)
    return high_ports(job, env)


def high_ports(job: str, env: Mapping[str, str]) -> Sequence[int]:
    """Return eight ports of MSCOMM_PORTS, or eight high ports if that is not set. They are derived from the job."""
    return _eight_of(environment.read("MSCOMM_PORTS", env) or _HIGH_PORTS, job)


def _eight_of(ports: range, job: str) -> range:
    """Return eight consecutive ports of the range, or all if it has fewer. All ranks of the job get the same ports."""
    place = int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "little") % max(1, len(ports) - 7)
    return ports[place : place + 8]


def port_range(ports: Sequence[int]) -> str:
    """Return the ports as text for error messages."""
    return f"ports {ports[0]} to {ports[-1]}" if len(ports) > 1 else f"port {ports[0]}"


# -- ranks other than 0: reaching the hub


def reach(
    targets: Sequence[links.Address],
    deadline: Deadline,
    key_at: Callable[[Any], bytes],
    mine: Identity,
    absent: str,
    advice: str,
    *,
    purpose: int = CONTROL,
    source: str | None = None,
    protection: Protection | None = None,
) -> tuple[ByteStream, bytes]:
    """Try the targets in turn, until one accepts our connection and our hello. Return the stream and the admission key.

    key_at: a function that takes the listener's address and returns the admission key for the purpose.

    Retry until the deadline, because the listener may start after us. At the deadline, raise BackendUnavailable with
    the message "<absent> within 3 s: <problems>. <advice>".

    If there is only one target, raise an Error from `key_at` or from the hello at once, except if the listener was too
    busy, or if the connection was closed or silent without an answer: the hub of an earlier job may be ending, and a
    proxy, such as that of a container, accepts connections before the hub listens. If the connection is cut in a TLS
    handshake, retry for links.CUT_S.
    """
    started, pause_s, said = time.monotonic(), _RETRY_S[0], False
    cut_until: Deadline | None = None
    heard: dict[links.Address, str] = {}  # for each target, why the most recent hello failed
    while True:
        problems = {}
        for target in targets:
            try:
                sock = _connect(target, deadline if len(targets) == 1 else deadline.within(_ATTEMPT_S), source)
            except AuthenticationError:  # also an OSError: another user's process listens at a unix socket
                raise
            except OSError as error:
                problems[target] = words(error)
                continue
            try:
                key = key_at(sock.getpeername())
                return links.greet(sock, key, purpose, mine, deadline, protection), key
            except (Error, OSError) as error:
                sock.close()
                again = isinstance(error, Busy) or (
                    isinstance(error, NotMscomm) and isinstance(error.__cause__, OSError)
                )
                if isinstance(error, Cut):
                    cut_until = cut_until or deadline.within(links.CUT_S)
                    again = not cut_until.passed
                if isinstance(error, Error) and len(targets) == 1 and not again:
                    raise
                problems[target] = heard[target] = str(error)
            except BaseException:
                sock.close()
                raise
        what = _summary(problems)
        if heard and not heard.items() <= problems.items():
            what += f"; before that: {_summary(heard)}"
        waited_s = time.monotonic() - started
        if deadline.passed:
            raise BackendUnavailable(f"{absent} within {waited_s:.3g} s: {what}. {advice}")
        if waited_s > _SAYS_WAITING_AFTER_S and not said:
            said = True
            print(f"mscomm: still waiting: {absent}: {what}", file=sys.stderr, flush=True)
        time.sleep(min(pause_s, deadline.left()))  # no event tells us when a process begins to listen
        pause_s = min(2 * pause_s, _RETRY_S[1])


def _connect(target: links.Address, deadline: Deadline, source: str | None) -> socket.socket:
    sock = links.connect(target, deadline, source=source)
    if isinstance(target, tuple) and sock.getsockname() == sock.getpeername():
        # If no process listens at a port in the ephemeral range, TCP may connect our socket to itself.
        sock.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    return sock


def words(error: OSError) -> str:
    """Return the error as text for error messages."""
    if isinstance(error, socket.gaierror):
        return f"the name cannot be resolved ({error.strerror})"
    return error.strerror or str(error)


def _summary(problems: Mapping[links.Address, str]) -> str:
    """Return the problems as text, without repetitions. If problems differ, name the ports of each problem."""
    different = list(dict.fromkeys(problems.values()))
    if len(different) == 1:
        return different[0]
    by_port = {text: [str(t[1]) for t, problem in problems.items() if problem == text] for text in different}
    return "; ".join(f"port {', '.join(ports)}: {text}" for text, ports in by_port.items())


# -- rank 0: starting the hub


def _open(
    seat: Seat, spot: Spot, env: Mapping[str, str], protection: Protection
) -> tuple[socket.socket, bytes, security.KeyFile | None]:
    """Return a socket that listens at the first free port of the spot, the job's key, and the file with the key."""
    own = "" if seat.one_host else own_address(spot.host, env)
    for place in [_resolve(own, port) for port in spot.ports] if own else [(int(socket.AF_UNIX), _unix_name(spot.job))]:
        with contextlib.ExitStack() as failing:
            try:
                listener = failing.enter_context(_bound(*place))
                key, file = _key(spot, links.address_of(listener), env, protection, new=True)
                if file:
                    failing.callback(file.remove)
                # The key file is written already, so a rank that can connect can also read the key.
                listener.listen(seat.size + 64)
                failing.pop_all()
                return listener, key, file
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def own_address(host: str, env: Mapping[str, str]) -> str:
    """Return the numeric address at which other hosts reach this host. `host`: the name or address that they use."""
    address = str(_resolve(host, 0)[1][0])
    if security.is_loopback(address) and not is_loopback_name(host):
        # /etc/hosts often maps a host's own name to a loopback address, which the other hosts cannot reach.
        return interfaces.host_address(env)
    return address


def listening_address(
    host: str, port: int, env: Mapping[str, str], protection: Protection, tell: Callable[[str], None]
) -> str:
    """Return where to listen on this host for processes that know it as `host`: `host` itself, or own_address().

    If other hosts may not join, because the job has no key, stay at the loopback address, and tell the user. tell: a
    function that writes a line for the user. Raise OSError if the name cannot be resolved.
    """
    address = str(_resolve(host, port)[1][0])
    if not security.is_loopback(address) or is_loopback_name(host):
        return host
    try:
        own = own_address(host, env)
        security.job_key(env, own, port, protection)  # raises an error if other hosts may not join
    except Error as error:
        why = " ".join(str(error).split())
        tell(f"{host} is {address} here (/etc/hosts), so processes on other hosts cannot join. If they should: {why}")
        return host
    return own


def connecting_address(host: str, port: int, env: Mapping[str, str], protection: Protection) -> str:
    """Return where to connect to a listener at listening_address(), which may be on this host."""
    try:
        return listening_address(host, port, env, protection, lambda text: None)
    except OSError:  # the name cannot be resolved yet
        return host


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to exactly this address of this host. Raise OSError if that is not possible."""
    return _bound(*_resolve(host, port))


def _bound(family: int, address: Any) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    with on_failure(listener.close):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    return listener


def _resolve(host: str, port: int) -> tuple[int, Any]:
    # For a str, Python loads its codec of international names, which takes 2 ms.
    name = host.encode() if host.isascii() else host
    family, _, _, _, address = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return int(family), address


def is_loopback_name(host: str) -> bool:
    """Return whether the user's name for a host can only mean this machine: a loopback address or "localhost"."""
    try:
        return security.is_loopback(host)
    except ValueError:
        return host == "localhost"


# -- two jobs at one address


def contend(
    host: str,
    port: int,
    key: Callable[[Any], bytes],
    env: Mapping[str, str],
    protection: Protection,
    waited_s: float = 0.0,
) -> str:
    """Find out which process has taken our hub's address. If it is another hub, tell it that our job wants the address.

    Return text about that process, for error messages. The other hub must know about our job, because ranks of both
    jobs may have joined that hub, and the hub cannot tell which rank belongs to which job. key: a function that takes
    the other hub's address and returns that hub's job key. The function is called only after the other hub has accepted
    our connection. waited_s: how long this process has already tried to get the address.
    """
    import psutil

    me = psutil.Process()
    who = f"{_words_of(me)} on host {socket.gethostname()}"
    deadline = Deadline(_TELL_S)
    # This process may be much older than its job, if it is a notebook for example.
    age_s = max(0.0, time.time() - me.create_time())
    words = {"t": "rival", "who": who, "seconds": min(age_s, waited_s + _STARTED_TOGETHER_S)}
    # An error means that no hub listens, or that the hub refuses this process, as it will refuse our ranks. In both
    # cases, our ranks cannot join that hub, so it need not know about our job.
    with contextlib.suppress(Error, OSError):

        def admission(address: Any) -> bytes:
            return security.admission_key(key(address), LAUNCHER)

        mine = links.newcomer(env)
        stream, _ = reach([(host, port)], deadline, admission, mine, "", "", purpose=LAUNCHER, protection=protection)
        with contextlib.closing(stream):
            Frames(stream).send(words, deadline)
    return _holder(host, port)


def _holder(host: str, port: int) -> str:
    """Return the process that listens at the address, as " by pid 7 (python train.py)"; "" if we cannot see it."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for entry in psutil.net_connections("tcp"):
            here = entry.laddr and entry.laddr.port == port and entry.laddr.ip in (host, "0.0.0.0", "::")
            if here and entry.status == psutil.CONN_LISTEN and entry.pid:
                process = psutil.Process(entry.pid)
                if any("mscomm.cluster.hub" in word for word in process.cmdline()):
                    process = process.parent() or process  # rank 0, which started that hub
                return f" by {_words_of(process)}"
    return ""


def _words_of(process: psutil.Process) -> str:
    words = " ".join(" ".join(process.cmdline()).split())  # the text after python -c may have several lines
    return f"pid {process.pid} ({words if len(words) < 100 else words[:97] + '...'})"


# -- the key of the job


def _key(
    spot: Spot, address: Any, env: Mapping[str, str], protection: Protection, *, new: bool = False
) -> tuple[bytes, security.KeyFile | None]:
    """Return the key of the job. It comes from the user's key file, or else from a file that rank 0 writes.
    If this call has written that file, also return the file.

    A key file must be readable by all ranks and by nobody else. If no such file is possible, and the user permits a job
    without a key, return a key that anybody can compute. new: whether this is rank 0, which writes the file. The other
    ranks call this function after they have connected. Raise FileNotFoundError if rank 0's file is missing.
    """
    file = None
    if spot.key:
        key = spot.key
    elif users := environment.read("MSCOMM_JOB_KEY_FILE", env):
        key = security.read_key(users)
    elif not (path := _path(spot, address)):  # which may need a temporary folder
        key = security.job_key(env, address[0], address[1], protection)
    elif new:
        file = security.KeyFile(path)
        file.remove_at_exit()
        key = file.key
    else:
        if not os.path.lexists(path):
            shared = "do all hosts share this folder?" if spot.key_path else "same user, same TMPDIR?"
            raise FileNotFoundError(errno.ENOENT, f"rank 0's key file {path} is not there ({shared})")
        key = security.read_key(path, "rank 0 writes it")
    return security.derived_key(key, spot.job), file


def _path(spot: Spot, address: Any) -> str:
    """Return the file to which rank 0 writes the key; "" if no file can be read by all ranks and nobody else."""
    if not isinstance(address, tuple):
        return security.key_path(_unix_name(spot.job)[1:])
    if security.is_loopback(address[0]):
        return security.key_path(f"rank0-{address[0]}-{address[1]}")
    return spot.key_path


# -- names and addresses


def _unix_name(job: str) -> str:
    return f"\0mscomm-{hashlib.sha256(f'{os.getuid()} {job}'.encode()).hexdigest()[:32]}"


def _where(seat: Seat, spot: Spot) -> str:
    if seat.one_host:
        return f"a unix socket of this host ({spot.job})"
    if len(spot.ports) == 1:
        return interfaces.endpoint(spot.host, spot.ports[0])
    return f"{spot.host}, {port_range(spot.ports)}"
