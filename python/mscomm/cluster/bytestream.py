"""The byte stream of a control link. csrc/net/stream.h is its counterpart for the links of a group.

After the hello, only this module reads, writes, polls or shuts down the socket of a control link, so that an encrypted
stream can take its place. Over a socket pair that a rank inherits, this holds after the rank has read the key.
"""

from __future__ import annotations

import fcntl
import select
import selectors
import socket
import termios

from mscomm.cluster.deadline import Deadline, wait

# why a link is plain: the user permits it
PERMITTED = "permitted"


class ByteStream:
    """One end of a connected socket, which the stream owns. One thread can receive while another thread sends.

    sock: the socket. Other code may ask it for addresses and options, and must use it in no other way. secret: a key
    that only the two ends know. run: the id of the hub's start of the job. plain: why this end does not encrypt a link
    between hosts: PERMITTED, or what it lacks; "" on other links. The hello sets these three.
    """

    encrypted = False

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.secret = b""
        self.run = b""
        self.plain = ""
        self._rest = memoryview(b"")  # what send_all() has not sent yet

    @property
    def is_local(self) -> bool:
        """Whether the other end is on this host for sure: a unix socket."""
        return self.sock.family == socket.AF_UNIX

    def fileno(self) -> int:
        """Return the descriptor for a selector or poll object: -1 after close()."""
        return self.sock.fileno()

    # -- moving bytes

    def send(self, data: bytes | memoryview) -> int:
        """Send as much as possible without waiting. Return the number of bytes sent, which may be 0.

        Raise OSError if the link has ended.
        """
        try:
            return self.sock.send(data, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0

    def receive(self, most: int) -> bytes | None:
        """Return at most `most` bytes that have arrived, without waiting. Return None if no byte has arrived.

        Return b"" if the other end has closed the link for writing. Raise OSError if the link has ended.
        """
        try:
            return self.sock.recv(most)
        except BlockingIOError:
            return None

    @property
    def pending(self) -> bool:
        """Whether receive() has bytes to return that the descriptor does not announce."""
        return False

    def events(self, sending: bool) -> int:
        """Return the selector events to wait for: to receive and, if `sending`, also to send."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if sending else 0)

    def answer_without_tls(self) -> None:
        """For a stream with TLS: if the other end does not use TLS, tell it that it must."""

    # -- waiting

    def send_all(self, data: bytes, deadline: Deadline) -> None:
        """Send all of the data. Raise OSError if the link has ended, and TimeoutError at the deadline.

        After a TimeoutError, the next call sends the rest of this data first. So the other end never gets only a part.
        """
        self._send_rest(deadline)
        self._rest = memoryview(data)
        self._send_rest(deadline)

    def _send_rest(self, deadline: Deadline) -> None:
        while self._rest:
            if sent := self.send(self._rest):
                self._rest = self._rest[sent:]
            else:
                self._await_room(deadline)

    def _await_room(self, deadline: Deadline) -> None:
        """Wait until send() may make progress. Raise TimeoutError at the deadline."""
        wait(self.sock, select.POLLOUT, deadline)

    def await_bytes(self, deadline: Deadline) -> None:
        """Wait until receive() has something to return. Raise TimeoutError at the deadline."""
        if not self.pending:
            wait(self.sock, select.POLLIN, deadline)

    def unacknowledged(self) -> bool:
        """Return whether the other host has not acknowledged all data that was sent. Always False on a unix socket."""
        if self.is_local:
            return False
        try:
            return any(fcntl.ioctl(self.sock, termios.TIOCOUTQ, bytes(4)))
        except OSError:
            return False  # the link has ended

    # -- ending

    def close_for_writing(self) -> None:
        """Tell the other end that nothing more will come. It can still send."""
        self.sock.shutdown(socket.SHUT_WR)

    def shut_down(self) -> None:
        """End the link in both directions, which wakes every thread that waits for it."""
        self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.sock.close()
