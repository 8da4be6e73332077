"""A control link that TLS protects. credentials.py makes the contexts, and checks whom a certificate belongs to.

OpenSSL works in memory here, and ByteStream moves the encrypted bytes. OpenSSL's own way to use a socket can raise
SIGPIPE.
"""

from __future__ import annotations

import contextlib
import select
import selectors
import socket
import ssl
import threading
from collections.abc import Iterator
from typing import Any

from mscomm.cluster.bytestream import ByteStream
from mscomm.cluster.deadline import Deadline, NothingHappened, wait

_RECORD_BYTES = 16 << 10  # the most that one TLS record carries
_READ_BYTES = 64 << 10
_PULLS = 4  # how often one call reads from the socket, which a peer could fill with records that hold no data
_CLOSE_S = 2.0
_LOOK_S = 0.05


class TlsStream(ByteStream):
    """One end of a TLS connection over a connected socket, which the stream owns.

    The functions that move bytes do the handshake on the way: until it is done, receive() returns None and send()
    returns 0. If send() returns 0, it may have encrypted the beginning of the data, which the kernel has not accepted
    yet. The next send() must begin with the same data; after that, send() counts it. So, as with ByteStream, data that
    send() counts has reached the kernel. The stream holds at most one encrypted record that the kernel has not
    accepted, and at most 64 KiB that it has read ahead.

    Every function that moves bytes raises ssl.SSLError, which is an OSError, if the handshake fails or a record is
    forged. The text says what is wrong. If the connection ends without TLS's own end, the functions that receive raise
    ConnectionResetError, as they do if the process at the other end of a plain link was killed.
    """

    encrypted = True

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, server_side: bool) -> None:
        super().__init__(sock)
        # The lock protects everything below: an SSLObject is not thread-safe. No thread waits while it holds the lock.
        self._lock = threading.Lock()
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._arrived, self._leaving, server_side)
        self._shaken = False  # whether the handshake is done
        self._unflushed = memoryview(b"")  # encrypted bytes that the kernel must accept before those in _leaving
        self._uncounted = b""  # data that has been encrypted and that send() has not counted yet
        self._ahead = b""  # decrypted data that receive() returns next
        self._failure = ""  # the text of the error that ended TLS
        with self._errors(), contextlib.suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()  # a client's first message is now in _leaving, so events() asks for writing

    def answer_without_tls(self) -> None:
        """If the other end does not use TLS, tell it that it must."""
        if self._failure.endswith(_NOT_TLS):
            with contextlib.suppress(OSError):
                super().send(NEEDED)

    @property
    def shaken(self) -> bool:
        """Whether the handshake is done. A client may learn only later that the server refuses its certificate."""
        return self._shaken

    def peer_certificate(self) -> dict[str, Any]:
        """Return the verified certificate of the other end, in the form of ssl.SSLSocket.getpeercert()."""
        with self._lock:
            return self._tls.getpeercert() or {}

    # -- moving bytes

    def send(self, data: bytes | memoryview) -> int:
        with self._lock, self._errors():
            try:
                return self._send(data)
            except ConnectionError:
                # The other end has closed. It may have said why: then raise that instead.
                with contextlib.suppress(ConnectionError):
                    while len(self._ahead) < _READ_BYTES and (received := self._receive(_RECORD_BYTES)):
                        self._ahead += received
                raise

    def _send(self, data: bytes | memoryview) -> int:
        if not self._shake() or not self._flush():
            return 0
        begun, self._uncounted = self._uncounted, b""
        if begun and data[: len(begun)] == begun:
            return len(begun)
        piece = bytes(data[:_RECORD_BYTES])
        self._tls.write(piece)
        if self._flush():
            return len(piece)
        self._uncounted = piece
        return 0

    def receive(self, most: int) -> bytes | None:
        with self._lock, self._errors():
            if self._ahead:
                piece, self._ahead = self._ahead[:most], self._ahead[most:]
                return piece
            return self._receive(most)

    def _receive(self, most: int) -> bytes | None:
        self._offer()
        for _ in range(_PULLS):
            if not self._shake():
                break
            try:
                return self._tls.read(most)
            except ssl.SSLZeroReturnError:  # only if we have ended TLS, too; otherwise read() returns b""
                return b""
            except ssl.SSLWantReadError:
                if not self._pull():
                    break
        return None

    def _shake(self) -> bool:
        """Continue the handshake. Return whether it is done."""
        for _ in range(0 if self._shaken else _PULLS):
            try:
                self._tls.do_handshake()
                self._shaken = True
                self._offer()
                break
            except ssl.SSLWantReadError:
                self._offer()
                if not self._pull():
                    break
        return self._shaken

    def _pull(self) -> bool:
        """Pass encrypted bytes from the socket to OpenSSL, which has used all earlier ones. Return whether any came."""
        received = super().receive(_READ_BYTES)
        if received == b"":
            if self._shaken:
                raise ConnectionResetError("it ended, or its connection was cut: TLS was not closed")
            raise ConnectionResetError("it closed the connection during the TLS handshake")
        if received:
            self._arrived.write(received)
        return bool(received)

    def _offer(self) -> None:
        """Pass encrypted bytes to the kernel. If the other end has closed, go on: we first read what it has sent."""
        with contextlib.suppress(ConnectionError):
            self._flush()

    def _flush(self) -> bool:
        """Pass encrypted bytes to the kernel. Return whether it has accepted all of them."""
        while self._unflushed or self._leaving.pending:
            self._unflushed = self._unflushed or memoryview(self._leaving.read())
            sent = super().send(self._unflushed)
            if not sent:
                return False
            self._unflushed = self._unflushed[sent:]
        return True

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Replace OpenSSL's errors by errors with a plain text, and raise the first one again on every later use."""
        if self._failure:
            raise ssl.SSLError(ssl.SSL_ERROR_SSL, self._failure)
        try:
            yield
        except ssl.SSLWantReadError:
            raise
        except ssl.SSLError as error:
            self._failure = plain(error)
            with contextlib.suppress(OSError):  # tell the other end why, if it still listens
                self._flush()
            raise ssl.SSLError(ssl.SSL_ERROR_SSL, self._failure) from error

    @property
    def pending(self) -> bool:
        """Whether receive() may have bytes to return that the descriptor does not announce.

        If they are only a part of a record, receive() returns None once, and then this is False.
        """
        with self._lock:
            return bool(self._ahead or self._tls.pending() or self._arrived.pending)

    def events(self, sending: bool) -> int:
        with self._lock:
            to_write = self._has_unflushed() or (sending and self._shaken)
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if to_write else 0)

    def _has_unflushed(self) -> bool:
        return bool(self._unflushed or self._leaving.pending)

    # -- waiting

    def _await_room(self, deadline: Deadline) -> None:
        self._wait(deadline, sending=True)

    def await_bytes(self, deadline: Deadline) -> None:
        while not self._can_receive():
            self._wait(deadline, sending=False)

    def _can_receive(self) -> bool:
        with self._lock:
            try:
                if not self._ahead and not self._failure:
                    with self._errors():
                        received = self._receive(_RECORD_BYTES)
                    self._ahead = received or b""
                    return received is not None
            except OSError:  # receive() raises it again
                pass
            return True

    def _wait(self, deadline: Deadline, sending: bool) -> None:
        with self._lock:
            shaken, unflushed = self._shaken, self._has_unflushed()
        events = select.POLLOUT if unflushed or (sending and shaken) else 0
        if not (sending and shaken):
            events |= select.POLLIN
        # During the handshake, look again soon: another thread may end it, and read ahead, which no descriptor tells.
        try:
            wait(self.sock, events, deadline if shaken else deadline.within(_LOOK_S))
        except NothingHappened:
            if shaken:
                raise
            if deadline.passed:
                raise NothingHappened(f"the TLS handshake did not end within {deadline.seconds:g} s") from None

    def unacknowledged(self) -> bool:
        with self._lock:
            unflushed = self._has_unflushed()
        return unflushed or super().unacknowledged()

    # -- ending

    def close_for_writing(self) -> None:
        """Tell the other end that nothing more will come. It can still send.

        Wait up to 2 s until the kernel has accepted what is left. Raise TimeoutError if it has not.
        """
        with self._lock, self._errors():
            if self._shaken:
                # unwrap() fails if it finds data that nobody has read.
                while received := self._read_ahead():
                    self._ahead += received
                with contextlib.suppress(ssl.SSLWantReadError):  # the other end has not ended TLS, and need not
                    self._tls.unwrap()
        deadline = Deadline(_CLOSE_S)
        while True:
            with self._lock:
                if self._flush():
                    break
            wait(self.sock, select.POLLOUT, deadline)
        super().close_for_writing()

    def _read_ahead(self) -> bytes:
        try:
            return self._tls.read(_RECORD_BYTES)
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            return b""


# -- OpenSSL's errors, in plain words

_OF_PEER = {  # by OpenSSL's number of what is wrong with the other end's certificate
    3: "there is no revocation list of the CA that signed the other end's certificate; crl_path must have one",
    7: "the other end's certificate has a wrong signature: ca_cert_path is another CA of the same name",
    8: "the revocation list in crl_path has a wrong signature",
    9: "the other end's certificate is not valid yet; compare the clocks of the two hosts",
    10: "the other end's certificate has expired; make a new one",
    11: "the revocation list in crl_path is not valid yet; compare the clocks of the two hosts",
    12: "the revocation list in crl_path has expired; get a new one from your CA",
    18: "the other end's certificate is not signed by the CA in ca_cert_path, but by itself",
    19: "the other end's certificate is not signed by the CA in ca_cert_path, but by another CA",
    20: "the other end's certificate is not signed by the CA in ca_cert_path",
    21: "the other end's certificate is not signed by the CA in ca_cert_path",
    23: "the other end's certificate is revoked",
    26: "the other end's certificate is not for its role: the scheduler needs extendedKeyUsage serverAuth, and a worker"
    " clientAuth",
}
_NOT_TLS = "the other end sent bytes that are not TLS: it has no TLS settings, or it is another program"
# An alert that tells a program without TLS, in the form of TLS, that it is needed here: fatal, protocol_version (70).
NEEDED = b"\x15\x03\x03\x00\x02\x02\x46"
_NO_COMMON = "the two ends have no cipher suite or TLS version in common; compare their cipher_list"
_BY_REASON = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the other end has sent no certificate",
    "WRONG_VERSION_NUMBER": _NOT_TLS,
    "HTTP_REQUEST": _NOT_TLS,
    "HTTPS_PROXY_REQUEST": _NOT_TLS,
    "UNKNOWN_PROTOCOL": _NOT_TLS,
    "PACKET_LENGTH_TOO_LONG": _NOT_TLS,
    "RECORD_LAYER_FAILURE": _NOT_TLS,
    "NO_SHARED_CIPHER": _NO_COMMON,
    "UNSUPPORTED_PROTOCOL": _NO_COMMON,
    "NO_PROTOCOLS_AVAILABLE": _NO_COMMON,
    "TLSV1_ALERT_PROTOCOL_VERSION": _NO_COMMON,
    "SSLV3_ALERT_HANDSHAKE_FAILURE": f"the other end refuses the handshake: it got no certificate, or {_NO_COMMON}",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the other end asks for a certificate, and this process has sent none",
    "TLSV1_ALERT_UNKNOWN_CA": "the other end refuses this process's certificate: its ca_cert_path is another CA",
    "TLSV1_ALERT_DECRYPT_ERROR": "the other end refuses this process's certificate: it has a wrong signature for its"
    " ca_cert_path",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "the other end refuses this process's certificate: it has expired, or is not"
    " valid yet by the other host's clock",
    "SSLV3_ALERT_CERTIFICATE_REVOKED": "the other end refuses this process's certificate: it is revoked",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "the other end refuses this process's certificate: its extendedKeyUsage is"
    " not for its role",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the other end refuses this process's certificate",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "the other end refuses this process's certificate; its own error says why",
    "DECRYPTION_FAILED_OR_BAD_RECORD_MAC": "the data was changed on its way, or does not come from the other end",
    "SSLV3_ALERT_BAD_RECORD_MAC": "the data was changed on its way to the other end",
}


def plain(error: ssl.SSLError) -> str:
    """Return one line that says what is wrong, for a user who does not know OpenSSL's names."""
    if isinstance(error, ssl.SSLCertVerificationError):
        said = _OF_PEER.get(error.verify_code, f"the other end's certificate is refused: {error.verify_message}")
    else:
        said = _BY_REASON.get(error.reason, f"{(error.reason or str(error)).lower().replace('_', ' ')}")
    return f"TLS: {said}"
