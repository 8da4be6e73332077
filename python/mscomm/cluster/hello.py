"""The hello that opens a connection; docs/design/0001-call.md lists its messages. The caller does all I/O.

Both ends prove that they know the job's key, the acceptor first. Every message has a fixed size. Therefore, a peer that
does not know the key cannot decide how many bytes the other end parses or allocates.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import Callable, Container, Generator
from typing import NamedTuple

from mscomm.errors import AuthenticationError, Error
from mscomm.version import VERSION

MAGIC = b"MSCM"
WIRE = 1
CONTROL, MEMORY, DATA, MESSAGES, LAUNCHER = 1, 2, 3, 4, 5
OF_THE_HUB = (CONTROL, LAUNCHER)  # links to the hub; a process opens them before it has joined the job
HELLO_S = 5.0  # an acceptor abandons a hello that takes longer; so does a connector on a TCP link to the hub

_OPENING = struct.Struct("<4sHBB32s")  # messages 1 and 2: magic, wire version, purpose (in 1) or status (2), 0, nonce
_IDENTITY = struct.Struct("<16s16siIQ")  # message 3: job, package version, rank, epoch, 0
_VERDICT = struct.Struct("<B7s")  # message 4: verdict, 0
_PROOF_BYTES = 32
_GO_ON, _OTHER_WIRE = 0, 1
_WELCOME, _JOB, _VERSION, _RANK, _EPOCH = range(5)

UNKNOWN_JOB = bytes(16)
UNKNOWN_RANK = -1


class Identity(NamedTuple):
    """What a connecting process says about itself: job (16 bytes), mscomm version, rank (-1 if unknown) and epoch."""

    job: bytes = UNKNOWN_JOB
    version: str = ""
    rank: int = UNKNOWN_RANK
    epoch: int = 0


def named(job_id: str | None) -> bytes:
    """Return the job id for the hello of a link to the hub: a hash of MSCOMM_JOB_ID, or zeros if that is not set."""
    return hashlib.sha256(b"mscomm job id " + job_id.encode()).digest()[:16] if job_id else UNKNOWN_JOB


def package_version() -> str:
    """Return mscomm's version in the form used in the hello: at most 16 characters."""
    return VERSION[:16]


class NotMscomm(Error):
    """The other end does not speak this protocol."""


# A script yields the bytes to send now and the number of bytes to read next; 0 bytes to read means the hello is over.
_Script = Generator[tuple[bytes, int], bytes, None]


class Hello:
    """One end of a hello.

    The caller first sends what `feed(b"")` returns. Then it repeats three steps until `done` is True: read up to
    `needs` bytes, pass them to `feed`, and send what `feed` returns.

    If something is wrong with the peer, `feed` raises an Error that says what is wrong. However, if an acceptor must
    tell the peer why it is refused, `feed` returns an answer that does so, and sets `refusal`. The hello is then
    `done`. The caller must send this answer before it closes the connection.
    """

    def __init__(self, script: Callable[[Hello], _Script]) -> None:
        self.peer = Identity()
        self.purpose = 0  # for an acceptor: the purpose that the peer sent
        self.refusal: Error | None = None
        self.heard = False  # whether a whole message has arrived; if so, the other end speaks this protocol
        self._script = script(self)
        self._to_send, self._size = next(self._script)
        self._held = b""

    @classmethod
    def connector(cls, key: bytes, purpose: int, mine: Identity) -> Hello:
        """Return the hello of the connecting end. `mine`: what this end says about itself."""
        return cls(lambda hello: _connector(hello, key, purpose, mine))

    @classmethod
    def acceptor(cls, key: bytes, purposes: Container[int], mine: Identity, ranks: Container[int]) -> Hello:
        """Return the hello of the accepting end.

        The peer must send the same job, version and epoch as in `mine`, and one of `ranks`. On a link to the hub, the
        peer may send UNKNOWN_RANK, and the job is derived from MSCOMM_JOB_ID (see `named`).
        """
        return cls(lambda hello: _acceptor(hello, key, purposes, mine, ranks))

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
            raise NotMscomm(f"it sent {self._held[:16]!r}, which does not begin a hello")
        if len(self._held) < self._size or self.done:
            return to_send
        self.heard = True
        message, self._held = self._held, b""
        answer, self._size = self._script.send(message)
        return to_send + answer


def _connector(hello: Hello, key: bytes, purpose: int, mine: Identity) -> _Script:
    first = _OPENING.pack(MAGIC, WIRE, purpose, 0, os.urandom(32))
    second = yield first, _OPENING.size + _PROOF_BYTES
    _, wire, status, _, _ = _OPENING.unpack(_body(second))
    if wire != WIRE or status == _OTHER_WIRE:
        raise Error(f"it speaks wire version {wire}, this mscomm speaks {WIRE}: install the same mscomm everywhere")
    if not _proven(second, key, b"acceptor", first):
        raise AuthenticationError(
            "it does not have the key of this job: both ends need the same key file (MSCOMM_JOB_KEY_FILE)"
        )
    identity = _IDENTITY.pack(mine.job, mine.version.encode("ascii")[:16], mine.rank, mine.epoch, 0)
    third = _signed(identity, key, b"connector", first, second)
    fourth = yield third, _VERDICT.size + _PROOF_BYTES
    if not _proven(fourth, key, b"verdict", first, second, third):
        raise AuthenticationError("its verdict on this connection is forged: somebody is in between")
    verdict = fourth[0]
    if verdict != _WELCOME:
        reason = _OTHER_NAME if verdict == _JOB and purpose in OF_THE_HUB else _REASONS.get(verdict)
        raise Error(f"it refused this connection: {(reason or f'reason {verdict}').format(mine)}")
    yield b"", 0


def _acceptor(hello: Hello, key: bytes, purposes: Container[int], mine: Identity, ranks: Container[int]) -> _Script:
    first = yield b"", _OPENING.size
    _, wire, asked, _, _ = _OPENING.unpack(first)
    status = _GO_ON if wire == WIRE else _OTHER_WIRE
    second = _signed(_OPENING.pack(MAGIC, WIRE, status, 0, os.urandom(32)), key, b"acceptor", first)
    if status == _OTHER_WIRE:
        hello.refusal = Error(f"a connection speaks wire version {wire}, this mscomm speaks {WIRE}")
        yield second, 0
        return
    if asked not in purposes:
        raise Error(f"a connection for purpose {asked} came where only purpose {purposes} is served")
    hello.purpose = asked
    third = yield second, _IDENTITY.size + _PROOF_BYTES
    if not _proven(third, key, b"connector", first, second):
        raise AuthenticationError("a connection could not prove that it knows the key of this job")
    job, version, rank, epoch, _ = _IDENTITY.unpack(_body(third))
    hello.peer = Identity(job, version.rstrip(b"\0").decode("ascii", "replace"), rank, epoch)
    verdict = _judge(hello.peer, mine, ranks, stranger_allowed=asked in OF_THE_HUB)
    if verdict != _WELCOME:
        hello.refusal = Error(
            f"refused a connection: {_REASONS[verdict].format(hello.peer)} Here: {mine.version}, epoch {mine.epoch}."
        )
    yield _signed(_VERDICT.pack(verdict, bytes(7)), key, b"verdict", first, second, third), 0


def _judge(peer: Identity, mine: Identity, ranks: Container[int], stranger_allowed: bool) -> int:
    if peer.version != mine.version:
        return _VERSION
    if peer.job != mine.job:
        return _JOB
    if peer.epoch != mine.epoch:
        return _EPOCH
    if not (peer.rank in ranks or (stranger_allowed and peer.rank == UNKNOWN_RANK)):
        return _RANK
    return _WELCOME


_REASONS = {
    _JOB: "it serves another job.",
    _VERSION: "it runs another version of mscomm than {0.version}: install the same one everywhere.",
    _RANK: "rank {0.rank} is not expected there, or is connected already.",
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
