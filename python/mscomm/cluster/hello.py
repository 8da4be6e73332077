"""The hello that opens a connection; docs/design/0001-call.md lists its messages. The caller does all I/O.

Both ends prove that they know the key of the connection, the connector first. Every message has a fixed size.
Therefore, a peer that does not know the key cannot decide how many bytes the other end parses or allocates.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import Callable, Container, Generator, Mapping
from typing import NamedTuple

from mscomm.errors import AuthenticationError, Error
from mscomm.version import VERSION

MAGIC = b"MSCM"
WIRE = 4
CONTROL, MEMORY, DATA, MESSAGES, LAUNCHER = 1, 2, 3, 4, 5
OF_THE_HUB = (CONTROL, LAUNCHER)  # links to the hub; a process opens them before it has joined the job
HELLO_S = 5.0  # an acceptor abandons a hello that takes longer; so does a connector on a TCP link to the hub

_OPENING = struct.Struct("<4sHBB32s")  # message 1: magic, wire version, purpose, 0, nonce
_ANSWER = struct.Struct("<4sHBB32s16s16x")  # message 2: magic, wire version, status, 0, nonce, run
_IDENTITY = struct.Struct("<16s16s16s16siiII")  # message 3: the fields of Identity, and whether TLS follows
_VERDICT = struct.Struct("<B7x")  # message 4: verdict
_PROOF_BYTES = 32
_GO_ON, _OTHER_WIRE, _TLS = range(3)  # _TLS: continue, and then use TLS if you can
_WELCOME, _JOB, _VERSION, _RANK, _EPOCH, _RUN, _LINK, _BUSY, _KEY = range(9)

UNKNOWN_JOB = UNKNOWN_RUN = NO_GROUP = bytes(16)
UNKNOWN_RANK = HUB = -1


class Identity(NamedTuple):
    """What a connecting process says about itself, and about the link that it wants.

    job: `named()` of the job id, on a link to the hub. run: the id of this start of the job, which the hub chooses. A
    process learns the run from its launcher, or when it joins. version: mscomm's version. rank: -1 if unknown. to: the
    rank of the accepting end; -1 for the hub. group: `grouped()` of the group id, on a link of a group.
    """

    job: bytes = UNKNOWN_JOB
    version: str = ""
    rank: int = UNKNOWN_RANK
    epoch: int = 0
    run: bytes = UNKNOWN_RUN
    to: int = HUB
    group: bytes = NO_GROUP


def named(job_id: str | None) -> bytes:
    """Return the job id for the hello of a link to the hub: a hash of MSCOMM_JOB_ID, or zeros if that is not set."""
    return hashlib.sha256(b"mscomm job id " + job_id.encode()).digest()[:16] if job_id else UNKNOWN_JOB


def grouped(group: str) -> bytes:
    """Return the id of a group for the hello of one of its links: a hash of the group id at the hub."""
    return hashlib.sha256(b"mscomm group " + group.encode()).digest()[:16]


def package_version() -> str:
    """Return mscomm's version in the form used in the hello: at most 16 characters."""
    return VERSION[:16]


class NotMscomm(Error):
    """The other end does not speak this protocol."""


class Busy(Error):
    """The other end had too many hellos in progress. Try again."""


class Cut(NotMscomm):
    """The connection ended in its TLS handshake: the other end was busy, or does not use TLS. Try again for a while."""


_OF_TLS = {  # the beginnings of TLS records
    b"\x16\x03": "it uses TLS, and this process does not; set enable_ssl and config.json in every process or in none",
    b"\x15\x03": "it expects TLS; call set_ps_context(enable_ssl=True, config_file_path=...) in this process too",
}


# A script yields the bytes to send now and the number of bytes to read next; 0 bytes to read means the hello is over.
_Script = Generator[tuple[bytes, int], bytes, None]


class Hello:
    """One end of a hello.

    The caller first sends what `feed(b"")` returns. Then it repeats three steps until `done` is True: read up to
    `needs` bytes, pass them to `feed`, and send what `feed` returns.

    If something is wrong with the peer, `feed` raises an Error that says what is wrong. However, if an acceptor must
    tell the peer why it is refused, `feed` returns an answer that does so, and sets `refusal`. The hello is then
    `done`. The caller must send this answer before it closes the connection.

    After a hello without an error or refusal, `secret` is a key that only the two ends of this connection know.
    """

    def __init__(self, script: Callable[[Hello], _Script]) -> None:
        self.peer = Identity()  # for an acceptor: what the peer sent. For a connector, only the run is set
        self.purpose = 0  # for an acceptor: the purpose that the peer sent
        self.refusal: Error | None = None
        self.secret = b""
        self.tls = False  # whether both ends use TLS after the hello, with `secret` as the key
        self.heard = False  # whether a whole message has arrived; if so, the other end speaks this protocol
        self._script = script(self)
        self._to_send, self._size = next(self._script)
        self._held = b""

    @classmethod
    def connector(cls, key: bytes, purpose: int, mine: Identity, tls: bool = False) -> Hello:
        """Return the hello of the connecting end. mine: what this end says of itself. tls: whether it can use TLS."""
        return cls(lambda hello: _connector(hello, key, purpose, mine, tls))

    @classmethod
    def acceptor(cls, keys: Mapping[int, bytes], mine: Identity, ranks: Container[int], tls: bool = False) -> Hello:
        """Return the hello of the accepting end. `keys`: the key for each purpose. tls: whether this end wants TLS.

        The peer must send the same job, run, version, epoch and group as in `mine`, the rank of `mine` as `to`, and one
        of `ranks` as its own rank. On a link to the hub, the peer may send UNKNOWN_RANK and UNKNOWN_RUN.
        """
        return cls(lambda hello: _acceptor(hello, keys, mine, ranks, tls))

    def put_off(self) -> bytes:
        """Return the bytes that tell a connecting peer to try again, for an acceptor that abandons this hello."""
        return _VERDICT.pack(_BUSY) + bytes(_PROOF_BYTES) if self.heard else _answer(_BUSY, UNKNOWN_RUN)

    @property
    def done(self) -> bool:
        return self._size == 0

    @property
    def needs(self) -> int:
        """The number of bytes to read next, which is the rest of the current message."""
        return self._size - len(self._held)

    def feed(self, received: bytes) -> bytes:
        """Process the bytes that were read. Return the bytes to send now, possibly none."""
        to_send, self._to_send = self._to_send, b""
        self._held += received
        if not self.heard and self._held[: len(MAGIC)] != MAGIC[: len(self._held)]:
            of_tls = f": {_OF_TLS[self._held[:2]]}" if self._held[:2] in _OF_TLS else ""
            raise NotMscomm(f"it sent {self._held[:16]!r}, which does not begin a hello{of_tls}")
        if len(self._held) < self._size or self.done:
            return to_send
        self.heard = True
        message, self._held = self._held, b""
        answer, self._size = self._script.send(message)
        return to_send + answer


def _answer(status: int, run: bytes) -> bytes:
    return _ANSWER.pack(MAGIC, WIRE, status, 0, os.urandom(32), run)


def _connector(hello: Hello, key: bytes, purpose: int, mine: Identity, tls: bool) -> _Script:
    first = _OPENING.pack(MAGIC, WIRE, purpose, 0, os.urandom(32))
    second = yield first, _ANSWER.size
    _, wire, status, _, _, run = _ANSWER.unpack(second)
    if wire != WIRE or status == _OTHER_WIRE:
        raise Error(f"it speaks wire version {wire}, this mscomm speaks {WIRE}: install the same mscomm everywhere")
    if status == _BUSY:
        raise Busy(_BUSY_TEXT)
    hello.tls = tls and status == _TLS
    version = mine.version.encode("ascii")[:16]
    identity = _IDENTITY.pack(mine.job, mine.run, mine.group, version, mine.rank, mine.to, mine.epoch, hello.tls)
    third = _signed(identity, key, b"connector", first, second)
    fourth = yield third, _VERDICT.size + _PROOF_BYTES
    (verdict,) = _VERDICT.unpack(_body(fourth))
    if not _proven(fourth, key, b"verdict", first, second, third):
        if verdict == _BUSY:
            raise Busy(_BUSY_TEXT)
        raise AuthenticationError(
            "it does not have the key of this job: both ends need the same key file (MSCOMM_JOB_KEY_FILE)"
        )
    if verdict != _WELCOME:
        reason = _OTHER_NAME if verdict == _JOB and purpose in OF_THE_HUB else _REASONS.get(verdict)
        raise Error(f"it refused this connection: {(reason or f'reason {verdict}').format(mine)}")
    hello.peer = Identity(run=run)
    hello.secret = _mac(key, b"link", first, second, third, fourth)
    yield b"", 0


def _acceptor(hello: Hello, keys: Mapping[int, bytes], mine: Identity, ranks: Container[int], tls: bool) -> _Script:
    first = yield b"", _OPENING.size
    _, wire, asked, _, _ = _OPENING.unpack(first)
    if wire != WIRE:
        hello.refusal = Error(f"a connection speaks wire version {wire}, this mscomm speaks {WIRE}")
        yield _answer(_OTHER_WIRE, UNKNOWN_RUN), 0
        return
    if asked not in keys:
        raise Error(f"a connection for purpose {asked} came where only purpose {', '.join(map(str, keys))} is served")
    key, hello.purpose = keys[asked], asked
    second = _answer(_TLS if tls else _GO_ON, mine.run)
    third = yield second, _IDENTITY.size + _PROOF_BYTES
    if not _proven(third, key, b"connector", first, second):
        hello.refusal = AuthenticationError("a connection could not prove that it knows the key of this job")
        yield _VERDICT.pack(_KEY) + bytes(_PROOF_BYTES), 0
        return
    job, run, group, version, rank, to, epoch, uses_tls = _IDENTITY.unpack(_body(third))
    hello.tls = tls and bool(uses_tls)
    hello.peer = Identity(job, version.rstrip(b"\0").decode("ascii", "replace"), rank, epoch, run, to, group)
    verdict = _judge(hello.peer, mine, ranks, stranger_allowed=asked in OF_THE_HUB)
    if verdict != _WELCOME:
        hello.refusal = Error(
            f"refused a connection: {_REASONS[verdict].format(hello.peer)} Here: {mine.version}, epoch {mine.epoch}."
        )
    fourth = _signed(_VERDICT.pack(verdict), key, b"verdict", first, second, third)
    hello.secret = _mac(key, b"link", first, second, third, fourth)
    yield fourth, 0


def _judge(peer: Identity, mine: Identity, ranks: Container[int], stranger_allowed: bool) -> int:
    if peer.version != mine.version:
        return _VERSION
    if peer.job != mine.job:
        return _JOB
    if peer.run != mine.run and not (stranger_allowed and peer.run == UNKNOWN_RUN):
        return _RUN
    if peer.epoch != mine.epoch:
        return _EPOCH
    if (peer.to, peer.group) != (mine.rank, mine.group):
        return _LINK
    if not (peer.rank in ranks or (stranger_allowed and peer.rank == UNKNOWN_RANK)):
        return _RANK
    return _WELCOME


_BUSY_TEXT = "it has too many connections whose hello is not finished"

_REASONS = {
    _JOB: "it serves another job.",
    _VERSION: "it runs another version of mscomm than {0.version}: install the same one everywhere.",
    _RANK: "rank {0.rank} is not expected there, or is connected already.",
    _RUN: "this process belongs to another start of the job, which has ended or is ending.",
    _LINK: "the link is for rank {0.to} of another group, or of an earlier one.",
    _EPOCH: "epoch {0.epoch} is not the current one: this rank belongs to an earlier epoch of the job.",
}

_OTHER_NAME = (
    "it serves another job. MSCOMM_JOB_ID must have the same text in every process of a job, or be unset in all; give "
    "each job a port of its own."
)


def _mac(key: bytes, label: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, label + b"".join(parts), hashlib.sha256).digest()


def _body(message: bytes) -> bytes:
    return message[:-_PROOF_BYTES]


def _signed(body: bytes, key: bytes, label: bytes, *before: bytes) -> bytes:
    """Return the body, followed by a MAC over all messages so far and this body."""
    return body + _mac(key, label, *before, body)


def _proven(message: bytes, key: bytes, label: bytes, *before: bytes) -> bool:
    return hmac.compare_digest(message[-_PROOF_BYTES:], _mac(key, label, *before, _body(message)))
