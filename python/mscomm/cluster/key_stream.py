"""A control link that TLS protects with a key, the secret of its hello. tls.py has the links with certificates."""

from __future__ import annotations

import functools
import select
import selectors
import socket

from mscomm.cluster.bytestream import ByteStream
from mscomm.cluster.deadline import Deadline, wait
from mscomm.errors import BackendUnavailable

_CLOSE_S = 2.0


@functools.cache
def lacking() -> str:
    """Return why this process cannot make a KeyStream, or "" if it can."""
    from mscomm import _core  # not imported before, because the hub may not need it

    try:
        _core.tls_version()
    except BackendUnavailable as error:
        return str(error)
    return ""


class KeyStream(ByteStream):
    """One end of a link after its hello. Call shake_hands() before any other function.

    plain: the stream of the hello, whose socket and secret this stream takes over. connects: whether this end
    connected. The stream only ever has encrypted bytes that the kernel has not accepted if send() has returned less
    than all; the next send() must then begin with the other bytes.
    """

    encrypted = True

    def __init__(self, plain: ByteStream, connects: bool) -> None:
        from mscomm import _core

        super().__init__(plain.sock)
        self.secret, self.run = plain.secret, plain.run
        self._tls = _core.Tls(self.sock.fileno(), (plain.secret, connects))

    def shake_hands(self) -> bool:
        """Move the handshake on. Return whether it is complete. Raise OSError if it fails."""
        return self._tls.shake_hands()

    def complete(self, deadline: Deadline) -> None:
        """Wait until the handshake is complete. Raise OSError if it fails, and TimeoutError at the deadline."""
        while not self.shake_hands():
            wait(self.sock, select.POLLIN if self._tls.flushed else select.POLLIN | select.POLLOUT, deadline)

    def send(self, data: bytes | memoryview) -> int:
        return self._tls.send(data)

    def receive(self, most: int) -> bytes | None:
        return self._tls.receive(most)

    @property
    def pending(self) -> bool:
        return self._tls.pending

    def events(self, sending: bool) -> int:
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if sending or not self._tls.flushed else 0)

    def unacknowledged(self) -> bool:
        return not self._tls.flushed or super().unacknowledged()

    def close_for_writing(self) -> None:
        deadline = Deadline(_CLOSE_S)
        while not self._tls.close():
            wait(self.sock, select.POLLOUT, deadline)
        self.sock.shutdown(socket.SHUT_WR)
