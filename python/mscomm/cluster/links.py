"""Opens, accepts and authenticates connections, and passes file descriptors. Every socket is close-on-exec.

The hello itself is in hello.py, and control frames are in frames.py.
"""

from __future__ import annotations

import array
import contextlib
import errno
import math
import os
import random
import resource
import secrets
import select
import selectors
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from mscomm import environment
from mscomm.cluster.bytestream import PERMITTED, ByteStream
from mscomm.cluster.deadline import Deadline, NothingHappened, wait
from mscomm.cluster.hello import (
    HELLO_S,
    OF_THE_HUB,
    UNKNOWN_RANK,
    UNKNOWN_RUN,
    Busy,
    Cut,
    Hello,
    Identity,
    NotMscomm,
    named,
    package_version,
)
from mscomm.cluster.key_stream import KeyStream, lacking
from mscomm.cluster.security import is_loopback
from mscomm.errors import AuthenticationError, CollectiveTimeout, Error, on_failure

if TYPE_CHECKING:
    from mscomm.cluster.credentials import Credentials
    from mscomm.cluster.protection import Protection

# ("host", port), or the name of an abstract unix socket: b"\0..." or "\0..."
Address: TypeAlias = "tuple[str, int] | str | bytes"

_HALF_OPEN = 64  # how many hellos may be in progress at once; in large jobs, twice the number of ranks
_FDS_A_MESSAGE = 253  # the kernel's SCM_MAX_FD
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_NEXT_ADDRESS_S = 5.0  # how long to wait for one of several addresses; a firewall may swallow the packets to it
CUT_S = 5.0  # how long to try again if connections end in the TLS handshake
_COMPLAIN_EVERY_S = 10.0
_MOST_OPEN = 65536  # not more, because some programs close all descriptors up to the limit, one by one
_PAUSE_S = 0.1  # how long to ignore a listener when descriptors or memory have run out
_UCRED = struct.Struct("=iII")  # pid, uid, gid


# -- connecting


def is_address(value: Any) -> bool:
    """Return whether a value from another rank is an Address. A pair of host and port may be a list."""
    match value:
        case [str(), int() as port]:
            return 0 < port < 1 << 16
        case str() | bytes():
            return value[:1] == (b"\0" if isinstance(value, bytes) else "\0")
    return False


def connect(address: Address, deadline: Deadline, *, source: str | None = None) -> socket.socket:
    """Return a connected TCP or abstract unix socket.

    Raise OSError if the address refuses, is unreachable or times out. Over TCP, the other host must answer within
    MS_NODE_TIMEOUT. If the name has several addresses, try them in turn. Each but the last may take 5 s at most.
    """
    if isinstance(address, (str, bytes)):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with on_failure(sock.close):
            _connect_unix(sock, address, deadline)
    else:
        sock = _connect_tcp(address, deadline.within(node_timeout_s()), source)
        tune(sock)
    sock.settimeout(None)
    return sock


def _connect_tcp(address: tuple[str, int], deadline: Deadline, source: str | None) -> socket.socket:
    problems: list[tuple[str, OSError]] = []  # for each address, why it could not be reached
    found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    for place, (family, _, _, _, name) in enumerate(found, 1):
        limit_s = deadline.left() if place == len(found) else min(deadline.left(), _NEXT_ADDRESS_S)
        sock = socket.socket(family, socket.SOCK_STREAM)
        with on_failure(sock.close):
            sock.settimeout(limit_s or 1e-3)
            try:
                if source:
                    sock.bind((source, 0))
                sock.connect(name)
                return sock
            except TimeoutError as error:
                sock.close()
                text = f"its host did not answer for {limit_s:g} s"
                problems.append((str(name[0]), TimeoutError(error.errno, text)))
            except OSError as error:
                sock.close()
                problems.append((str(name[0]), error))
    _, last = problems[-1]
    if len(problems) == 1:
        raise last
    text = "; ".join(f"{host}: {error.strerror or error}" for host, error in problems)
    raise type(last)(last.errno, text) from last


def _connect_unix(sock: socket.socket, address: str | bytes, deadline: Deadline) -> None:
    """Connect, and retry while the listener's backlog is full. Any user on the host can fill it for a while."""
    sock.setblocking(False)
    while True:
        try:
            sock.connect(address)
            require_same_user(sock)
            return
        except BlockingIOError:
            if deadline.passed:
                raise TimeoutError(f"the listener accepts no connection for {deadline.seconds:g} s") from None
            time.sleep(random.SystemRandom().uniform(0.001, 0.01))


def is_shortage(error: BaseException) -> bool:
    """Return whether the error says that this process or host lacks descriptors or memory, so no peer is to blame."""
    return isinstance(error, OSError) and error.errno in _SHORTAGES


def raise_descriptor_limit() -> None:
    """Let this process and its children open as many descriptors as the system permits, but not more than _MOST_OPEN.

    The limit is never lowered. Each group needs descriptors for its links to other ranks.
    """
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_OPEN if most == resource.RLIM_INFINITY else min(most, _MOST_OPEN)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # the system may permit even less
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def node_timeout_s() -> float:
    """Return MS_NODE_TIMEOUT, the seconds of silence after which a host counts as lost."""
    return float(environment.read("MS_NODE_TIMEOUT", os.environ))


def tune(sock: socket.socket) -> None:
    """Make a TCP socket send small messages at once, and fail if the other host is silent on an idle link.

    The limit for the silence is MS_NODE_TIMEOUT.
    """
    if not _is_tcp(sock):
        return
    silence_s = node_timeout_s()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probe_s = max(1, int(silence_s / 6))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(silence_s / 2)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _limit_silence(sock: socket.socket, limited: bool = True) -> None:
    """Limit how long the other host of a TCP link may leave our data unacknowledged, or lift this limit.

    The limit is MS_NODE_TIMEOUT. It is for links to the hub, and for the hello. After the hello, links between ranks
    must not have the limit, because it would also end a link to a healthy rank that has not read for that long, for
    example because it is computing when data for the next call arrives. These links use Stream::check_silence instead.
    """
    if _is_tcp(sock):
        milliseconds = math.ceil(node_timeout_s() * 1000) if limited else 0  # 0: no limit
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def _is_tcp(sock: socket.socket) -> bool:
    return sock.family in (socket.AF_INET, socket.AF_INET6)


def job_of(env: Mapping[str, str]) -> bytes:
    """Return the job id for the hello of a link to the hub. It is derived from MSCOMM_JOB_ID."""
    return named(environment.read("MSCOMM_JOB_ID", env))


def newcomer(env: Mapping[str, str], rank: int = UNKNOWN_RANK, run: bytes = UNKNOWN_RUN) -> Identity:
    """Return the Identity that a process sends to the hub of a job that it has not joined yet."""
    return Identity(job_of(env), package_version(), rank, run=run)


def greet(
    sock: socket.socket,
    key: bytes,
    purpose: int,
    mine: Identity,
    deadline: Deadline,
    protection: Protection | None = None,
    check: Callable[[], None] | None = None,
) -> ByteStream:
    """Run the connecting side of the hello. Return the stream, with its `secret` and `run`.

    protection: for a link to the hub, how the user wants the link to be protected. check: a function that is called at
    least every 100 ms while this process waits for the answer; if it raises an Error, the wait ends with a Checked that
    holds this Error.

    Errors name the address. Raise Busy if the other end says that this process should try again, and
    AuthenticationError if it has another key, or a certificate that does not fit. The caller must close the socket on
    an error.
    """
    # Only a hub on TCP must answer soon: it accepts at once, so a silent listener is not a hub. A hub on a unix socket
    # may still be starting, which can take a while on a busy host. A rank may be busy for long before it accepts.
    if purpose in OF_THE_HUB and sock.family != socket.AF_UNIX:
        deadline = deadline.within(HELLO_S)
    _limit_silence(sock)
    where = f"what listens at {_name(sock)}"
    expected = f"mscomm {'scheduler' if purpose in OF_THE_HUB else 'rank'}"
    credentials = protection.credentials if protection else None
    can = protection is not None and protection.uses_keys and _is_tcp(sock) and not lacking()
    hello = Hello.connector(key, purpose, mine, can)
    stream = _stream(sock, credentials, server_side=False)
    try:
        stream.send_all(hello.feed(b""), deadline)
        while not hello.done:
            _await_bytes(stream, deadline, check)
            received = stream.receive(hello.needs)
            if received == b"":
                raise ConnectionResetError("it closed the connection")
            stream.send_all(hello.feed(received or b""), deadline)
        _check_certificate(stream, credentials, "scheduler")
        stream.secret, stream.run = hello.secret, hello.peer.run
        if protection and not credentials and is_between_hosts(sock):
            stream.plain = PERMITTED if protection.permit_plain else lacking()
        if hello.tls:
            stream = KeyStream(stream, connects=True)
            stream.complete(deadline)
        if purpose not in OF_THE_HUB:
            _limit_silence(sock, False)
    except NotMscomm as error:
        raise NotMscomm(f"{where} is not an {expected}: {error}") from error
    except Busy as error:
        raise Busy(f"{where} did not accept this process: {error}") from error
    except Error as error:
        raise type(error)(f"{where} and this process do not fit together: {error}") from error
    except TimeoutError as error:
        if error.errno == errno.ETIMEDOUT:  # reported by the kernel; wait() sets no errno
            silent = f"has been silent for {node_timeout_s():g} s (MS_NODE_TIMEOUT)"
            raise NotMscomm(f"the host of {where} {silent}") from error
        raise NotMscomm(
            f"{where} is not an {expected}, or it is stopped: it said nothing for {deadline.seconds:g} s"
        ) from error
    except OSError as error:
        if _is_of_tls(error):
            raise AuthenticationError(f"{where} and this process do not fit together: {error}") from error
        ended = f"{where} is not an {expected}, or it just ended: {error}"
        if credentials and stream.encrypted and not hello.heard:
            raise Cut(f"{ended}. This process uses TLS (MSCOMM_SSL_CONFIG_FILE); does the other one?") from error
        if hello.tls and hello.done:
            raise Cut(f"{where} closed the connection in the TLS handshake: {error}") from error
        raise NotMscomm(f"{ended} during the hello") from error
    return stream


def open_link(
    address: Address,
    key: bytes,
    purpose: int,
    mine: Identity,
    deadline: Deadline,
    protection: Protection | None = None,
    check: Callable[[], None] | None = None,
) -> ByteStream:
    """Connect to the address, and run the hello. If the other end is too busy, try again until the deadline.

    check: see greet(). Raise what connect() and greet() raise.
    """
    cut_until = deadline.within(CUT_S)
    while True:
        sock = connect(address, deadline)
        try:
            return greet(sock, key, purpose, mine, deadline, protection, check)
        except (Busy, Cut) as error:
            sock.close()
            if (cut_until if isinstance(error, Cut) else deadline).passed:
                raise
            time.sleep(random.SystemRandom().uniform(0.01, 0.1))
        except BaseException:
            sock.close()
            raise


class Checked(Exception):
    """Carries the error that `check` has raised past the handlers for errors of the link."""

    def __init__(self, error: Error) -> None:
        self.error = error


def _await_bytes(stream: ByteStream, deadline: Deadline, check: Callable[[], None] | None) -> None:
    if check is None:
        stream.await_bytes(deadline)
        return
    while True:
        try:
            check()
        except Error as error:
            raise Checked(error) from None
        try:
            return stream.await_bytes(deadline.within(0.1))
        except NothingHappened:
            if deadline.passed:
                raise


def _stream(sock: socket.socket, credentials: Credentials | None, server_side: bool) -> ByteStream:
    """Return the stream for a connected socket: with TLS if there are credentials, but not on a unix socket."""
    if credentials is None or not _is_tcp(sock):
        return ByteStream(sock)
    from mscomm.cluster.tls import TlsStream  # slow to import: ssl

    return TlsStream(sock, credentials.server() if server_side else credentials.client(), server_side)


def is_between_hosts(sock: socket.socket) -> bool:
    """Return whether the other end of a connection may be on another host."""
    return _is_tcp(sock) and not is_loopback(sock.getsockname()[0])


def _check_certificate(stream: ByteStream, credentials: Credentials | None, role: str) -> None:
    """Raise AuthenticationError if the other end's certificate is for another role or another job."""
    if credentials is not None and _is_tcp(stream.sock):
        from mscomm.cluster.tls import TlsStream

        assert isinstance(stream, TlsStream)
        credentials.check_peer(stream, role, environment.read("MSCOMM_JOB_ID", os.environ) or "")


def _is_of_tls(error: OSError) -> bool:
    ssl = sys.modules.get("ssl")  # slow to import; if it is not imported, no stream uses TLS
    return ssl is not None and isinstance(error, ssl.SSLError)


def _name(sock: socket.socket) -> str:
    """Return the address of the peer, as text for messages."""
    try:
        address = sock.getpeername()
    except OSError:
        return "an address that is gone"
    if isinstance(address, tuple):
        return f"{address[0]}:{address[1]}"
    return repr(os.fsdecode(address)) if address else "the other end of a socket pair"


# -- accepting


def listen(host: str, backlog: int, env: Mapping[str, str]) -> socket.socket:
    """Return a TCP socket that listens at the address, on a free port from MSCOMM_PORTS.

    Raise OSError if no such port is free. If MSCOMM_PORTS is not set, the kernel chooses the port.
    """
    allowed = environment.read("MSCOMM_PORTS", env)
    # Try the ports in random order, because other ranks try the same ports. Do not use Python's global generator,
    # because the user may have seeded it.
    ports = random.SystemRandom().sample(allowed, len(allowed)) if allowed else [0]
    # getaddrinfo includes the scope if the address is link-local.
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    for port in ports:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            if allowed:  # allow ports that only old connections in TIME_WAIT still hold
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address[0], port, *address[2:]))
            listener.listen(backlog)  # with SO_REUSEADDR, this may be the first call to fail if the port is taken
            return listener
        except OSError as error:
            listener.close()
            if not allowed or error.errno != errno.EADDRINUSE:
                raise
    raise OSError(
        errno.EADDRINUSE,
        f"MSCOMM_PORTS={env['MSCOMM_PORTS']}: all {len(ports)} ports are taken at {host}, by other ranks or other "
        "programs; give more of them",
    )


def unix_listener(backlog: int) -> socket.socket:
    """Return a listening unix socket without a name in any file system."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with on_failure(listener.close):
        listener.bind(f"\0mscomm-{secrets.token_hex(16)}")
        listener.listen(backlog)
    return listener


def address_of(listener: socket.socket) -> Address:
    """Return the address at which connect() reaches the listener."""
    name = listener.getsockname()
    return name[:2] if isinstance(name, tuple) else name


class _Newcomer(NamedTuple):
    """A connection whose hello is in progress."""

    stream: ByteStream
    hello: Hello
    source: str  # the host that it comes from
    until: float  # when to drop the connection


class Door:
    """The listeners of one selector loop, and the connections to them whose hello is still in progress.

    `keys`: the key for each purpose that is served. `enter(stream, peer, purpose)` is called for each connection whose
    hello succeeds. `turned_away(address, why, unproven)` is called for each connection that is dropped during its
    hello. unproven: whether the peer speaks mscomm's protocol but has a different key or no valid certificate. A
    connection is dropped if it sends garbage, has the wrong key, or is too slow. `protection`: for a hub, how the user
    wants the links to be protected.

    At most 64 hellos, or twice the number of `ranks` if that is more, can be in progress at the same time. If another
    connection arrives, the oldest connection of the host that has the most is told to try again, and dropped. So a
    flood from one host does not push out the connections of other hosts.

    The data of each selector key is a function to call when the socket is ready.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        keys: Mapping[int, bytes],
        mine: Identity,
        ranks: Collection[int],
        enter: Callable[[ByteStream, Identity, int], None],
        log: Callable[[str], None] | None = None,
        turned_away: Callable[[str, str, bool], None] | None = None,
        on_shortage: Callable[[OSError], None] | None = None,
        protection: Protection | None = None,
    ) -> None:
        self._selector = selector
        self._credentials = protection.credentials if protection else None
        if self._credentials:
            self._credentials.server()  # raises the error of a wrong file or password now
        self._uses_keys = protection is not None and protection.uses_keys
        self._new_hello: Callable[[bool], Hello] = lambda tls: Hello.acceptor(keys, mine, ranks, tls)
        self._ranks = ranks
        self._room = max(_HALF_OPEN, 2 * len(ranks))
        self._enter = enter
        self._turned_away = turned_away or (lambda address, why, unproven: None)
        self._on_shortage = on_shortage
        self._complaints = _Complaints(log or (lambda text: None))
        self._listeners: list[socket.socket] = []
        self._paused: dict[socket.socket, float] = {}  # for each paused listener, when to accept again
        self._half_open: dict[socket.socket, _Newcomer] = {}  # oldest first

    def listen(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._watch(listener)
        self._listeners.append(listener)

    def _watch(self, listener: socket.socket) -> None:
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))

    def expire(self) -> float | None:
        """Drop connections whose hello takes too long, and try paused listeners again.

        Return the seconds until this must be called again; None if no hello is in progress and no listener is paused.
        """
        now = time.monotonic()
        while self._half_open and self._oldest().until <= now:
            self._drop(self._oldest(), "it did not finish its hello in time")
        for listener in [listener for listener, until in self._paused.items() if until <= now]:
            self._watch(listener)
            del self._paused[listener]
        times = [*self._paused.values(), *([self._oldest().until] if self._half_open else [])]
        return min((until - now for until in times), default=None)

    def _oldest(self) -> _Newcomer:
        return next(iter(self._half_open.values()))

    def close(self) -> None:
        """Drop the connections whose hello is in progress. Forget the listeners, which stay open for their owner."""
        for newcomer in list(self._half_open.values()):
            self._forget(newcomer).close()
        for listener in self._listeners:
            if listener not in self._paused:
                self._selector.unregister(listener)
        self._listeners.clear()
        self._paused.clear()
        self._complaints.close()

    def _accept(self, listener: socket.socket) -> None:
        # Accept only one connection per iteration of the loop. All other sockets are served in between, so a flood of
        # connections cannot push out legitimate ones.
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # e.g. the connection was reset while it waited, or no descriptors are left
            self._complaints.add("accept", f"cannot accept a connection: {error}")
            # Make room, perhaps by dropping a stranger. But with on_shortage, keep as many connections as there are
            # expected ranks, because a rank whose connection we dropped would report us as lost.
            expected = len(self._ranks) if self._on_shortage else 0
            if is_shortage(error) and len(self._half_open) > expected:
                self._put_off("its descriptor is needed for a newer connection")
            elif is_shortage(error):
                # Pause the listener. Otherwise, the selector would report it again at once, because the connection is
                # still in the listener's backlog.
                self._paused[listener] = time.monotonic() + _PAUSE_S
                self._selector.unregister(listener)
                if self._on_shortage:
                    self._on_shortage(error)
            return
        try:
            if sock.family == socket.AF_UNIX:
                require_same_user(sock)
            else:
                tune(sock)
        except (AuthenticationError, OSError) as error:
            self._complaints.add("tune", f"dropped a connection: {error}")
            sock.close()
            return
        if len(self._half_open) >= self._room:
            self._put_off(f"more than {self._room} connections are in their hello")
        source = _name(sock).rpartition(":")[0]
        stream = _stream(sock, self._credentials, server_side=True)
        tls = self._uses_keys and is_between_hosts(sock) and not lacking()
        newcomer = _Newcomer(stream, self._new_hello(tls), source, time.monotonic() + HELLO_S)
        # A signal handler may raise an exception between any two lines. So register first: close() relies on it.
        self._selector.register(sock, stream.events(sending=False), lambda: self._turn(newcomer))
        self._half_open[sock] = newcomer

    def _turn(self, newcomer: _Newcomer) -> None:
        sock = newcomer.stream.sock
        while sock in self._half_open:  # it may have been dropped earlier in this iteration of the loop
            newcomer = self._half_open[sock]
            self._read(newcomer)
            if not newcomer.stream.pending:
                break
        if sock in self._half_open:
            key = self._selector.get_key(sock)
            if key.events != (events := self._half_open[sock].stream.events(sending=False)):
                self._selector.modify(sock, events, key.data)

    def _read(self, newcomer: _Newcomer) -> None:
        stream, hello, _, _ = newcomer
        try:
            if isinstance(stream, KeyStream):  # the hello is done, and the handshake is in progress
                if not stream.shake_hands():
                    return
            else:
                received = stream.receive(hello.needs)
                if received is None:
                    return
                if not received:
                    self._drop(newcomer, "it closed during the hello")
                    return
                answer = hello.feed(received)
                if answer and stream.send(answer) != len(answer):
                    self._drop(newcomer, "it does not read")
                    return
                if not hello.done:
                    return
                if not hello.refusal:
                    _check_certificate(stream, self._credentials, "worker")
                    stream.secret = hello.secret
                    if hello.tls:
                        self._half_open[stream.sock] = newcomer._replace(stream=KeyStream(stream, connects=False))
                        return
        except (Error, OSError) as error:
            kind = AuthenticationError if isinstance(error, OSError) and _is_of_tls(error) else type(error)
            if kind is AuthenticationError and self._credentials:
                stream.answer_without_tls()
            self._drop(newcomer, _text(error), kind.__name__)
            return
        if hello.refusal:
            self._drop(newcomer, str(hello.refusal), type(hello.refusal).__name__)
            return
        if hello.purpose in OF_THE_HUB:
            _limit_silence(stream.sock)
        self._enter(self._forget(newcomer), hello.peer, hello.purpose)

    def _forget(self, newcomer: _Newcomer) -> ByteStream:
        del self._half_open[newcomer.stream.sock]
        self._selector.unregister(newcomer.stream.sock)
        return newcomer.stream

    def _put_off(self, why: str) -> None:
        """Drop one connection to make room, and tell it to try again."""
        # Not Counter.most_common(), which imports a module, and so needs a descriptor.
        counts = Counter(newcomer.source for newcomer in self._half_open.values())
        source = max(counts, key=counts.__getitem__)
        newcomer = next(newcomer for newcomer in self._half_open.values() if newcomer.source == source)
        with contextlib.suppress(OSError):  # the connection may have ended
            newcomer.stream.send(newcomer.hello.put_off())
        self._drop(newcomer, why)

    def _drop(self, newcomer: _Newcomer, why: str, kind: str = "") -> None:
        """kind: what `why` has in common with other texts, for which only the most recent text is logged."""
        name = _name(newcomer.stream.sock)
        self._complaints.add(kind or why, f"dropped a connection from {name}: {why}")
        self._forget(newcomer).close()
        self._turned_away(name, why, kind == AuthenticationError.__name__)


def _text(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


class _Complaints:
    """Logs problems with connections: the first problem of each kind at once, and more of this kind in one line later.

    kind: a text that a peer cannot influence, so that there are only a few kinds.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._again_at: dict[str, float] = {}  # for each kind, when to log it again
        self._held: dict[str, tuple[int, str]] = {}  # for each kind, how many were not logged, and the latest text

    def add(self, kind: str, text: str) -> None:
        now = time.monotonic()
        if now < self._again_at.get(kind, 0.0):
            self._held[kind] = (self._held.get(kind, (0, ""))[0] + 1, text)
            return
        self._tell(kind)
        self._again_at[kind] = now + _COMPLAIN_EVERY_S
        self._log(text)

    def _tell(self, kind: str) -> None:
        count, text = self._held.pop(kind, (0, ""))
        if count:
            self._log(f"{text} ({count} of this kind since the last line about it)")

    def close(self) -> None:
        for kind in list(self._held):
            self._tell(kind)


def accept_all(
    listeners: Iterable[socket.socket],
    wanted: Iterable[int],
    key: bytes,
    purpose: int,
    mine: Identity,
    deadline: Deadline,
    log: Callable[[str], None] | None = None,
    check: Callable[[], None] | None = None,
) -> dict[int, ByteStream]:
    """Accept one connection from each wanted rank. Return an authenticated stream for each rank.

    See accept_each(), which raises the errors.
    """
    came: dict[int, ByteStream] = {}
    try:
        came.update(accept_each(listeners, wanted, key, purpose, mine, deadline, log, check))
    except BaseException:
        for stream in came.values():
            stream.close()
        raise
    return came


def accept_each(
    listeners: Iterable[socket.socket],
    wanted: Iterable[int],
    key: bytes,
    purpose: int,
    mine: Identity,
    deadline: Deadline,
    log: Callable[[str], None] | None = None,
    check: Callable[[], None] | None = None,
) -> Iterator[tuple[int, ByteStream]]:
    """Accept one connection from each wanted rank. Yield (rank, authenticated stream) as the ranks come.

    At the deadline, raise CollectiveTimeout, which names the missing ranks. If the host has run short of descriptors or
    memory during the wait, raise OSError instead. If this process has no descriptors left, raise OSError at once.
    `check` is called at least every 100 ms. If `check` raises an error, the wait ends with this error.
    """
    missing = set(wanted)
    shortage: OSError | None = None
    came: dict[int, ByteStream] = {}  # those that were not yielded yet

    def enter(stream: ByteStream, peer: Identity, _: int) -> None:
        if peer.rank not in missing:  # the rank's second connection: only the first counts
            stream.close()
            return
        missing.remove(peer.rank)
        came[peer.rank] = stream

    def lack(error: OSError) -> None:
        nonlocal shortage
        shortage = error
        if error.errno == errno.EMFILE:
            raise error

    with selectors.DefaultSelector() as selector:
        door = Door(selector, {purpose: key}, mine, missing, enter, log, on_shortage=lack)
        for listener in listeners:
            door.listen(listener)
        try:
            while missing:
                if deadline.passed:
                    if shortage:
                        raise shortage
                    names = ", ".join(map(str, sorted(missing)))
                    raise CollectiveTimeout(
                        f"no connection came from rank {names} within {deadline.seconds:g} s", waiting_for=missing
                    )
                if check:
                    check()
                for ready, _ in selector.select(min(deadline.left(), 0.1)):
                    ready.data()
                door.expire()  # after what has arrived was read: the caller may have taken long over the last stream
                while came:
                    yield came.popitem()
        finally:
            for stream in came.values():
                stream.close()
            door.close()


# -- passing file descriptors over unix sockets


def require_same_user(sock: socket.socket) -> int:
    """Raise AuthenticationError unless the process at the other end of the unix socket runs under our uid.

    Return its process id.
    """
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(credentials)
    if uid != os.getuid():
        raise AuthenticationError(
            f"process {pid} at the other end of a unix socket runs as uid {uid}, this one as {os.getuid()}"
        )
    return int(pid)


def send_fds(sock: socket.socket, fds: list[int], deadline: Deadline) -> None:
    """Send copies of our descriptors to the process at the other end, which must call recv_fds with the same count."""
    require_same_user(sock)
    sent = 0
    while sent < len(fds):
        wait(sock, select.POLLOUT, deadline)
        piece = array.array("i", fds[sent : sent + _FDS_A_MESSAGE])
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, piece)]
        with contextlib.suppress(BlockingIOError):
            sock.sendmsg([b"F"], rights, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
            sent += len(piece)


def recv_fds(sock: socket.socket, count: int, deadline: Deadline) -> list[int]:
    """Receive exactly `count` descriptors from a process of our own user. They are close-on-exec."""
    require_same_user(sock)
    fds: list[int] = []
    with on_failure(close_all, fds):
        while len(fds) < count:
            wait(sock, select.POLLIN, deadline)
            expected = min(_FDS_A_MESSAGE, count - len(fds))
            space = socket.CMSG_SPACE(expected * array.array("i").itemsize)
            data, ancillary, flags, _ = sock.recvmsg(1, space, socket.MSG_CMSG_CLOEXEC)
            piece = array.array("i")
            for level, kind, content in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    piece.frombytes(content[: len(content) - len(content) % piece.itemsize])
            fds += piece
            if not data:
                raise Error(f"the other end closed after {len(fds)} of {count} file descriptors")
            if flags & socket.MSG_CTRUNC and len(piece) < expected:
                raise OSError(errno.EMFILE, f"{os.strerror(errno.EMFILE)}: received {len(fds)} of {count} descriptors")
            if flags & socket.MSG_CTRUNC or len(piece) != expected:
                raise Error(f"received {len(piece)} file descriptors where {expected} were expected")
    return fds


def close_all(fds: Iterable[int]) -> None:
    """Close the descriptors. Entries of -1 stand for no descriptor."""
    for fd in fds:
        if fd >= 0:
            os.close(fd)
