"""Serves many control links in one selector loop.

It reads whole control frames, queues unsent data up to a limit, and never waits for a slow link.
"""

from __future__ import annotations

import selectors
import traceback
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from mscomm.cluster.bytestream import ByteStream
from mscomm.cluster.frames import FROM_HUB_BYTES, FROM_MEMBER_BYTES, Frame, Parser
from mscomm.errors import Error

_UNSENT_BYTES = 2 * FROM_HUB_BYTES  # a link with more unsent bytes is closed, because its other end does not read


class Line:
    """The hub's end of one control link."""

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self.open = True
        self.parser = Parser(FROM_MEMBER_BYTES)
        self.unsent: deque[memoryview] = deque()


L = TypeVar("L", bound=Line)


class Switchboard(Generic[L]):
    """Calls `handle(line, frame)` for each control frame, and `ended(line, how)` when a line has ended.

    If `handle` raises an Error, the other end is at fault. Any other exception is a fault of the hub, and `log` gets
    its traceback. Both end the line.

    `how` says why the line ended. It is "" if the other end closed the line, or if the process at the other end ended.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        handle: Callable[[L, Frame], None],
        ended: Callable[[L, str], None],
        log: Callable[[str], None],
    ) -> None:
        self.lines: set[L] = set()
        self._selector = selector
        self._handle = handle
        self._ended = ended
        self._log = log

    def add(self, line: L) -> L:
        self.lines.add(line)
        self._selector.register(line.stream, line.stream.events(sending=False), lambda: self._turn(line))
        if line.stream.pending:  # the end of the hello was read together with what follows it
            self._turn(line)
        return line

    def write(self, line: L, data: bytes) -> None:
        """Send what the socket accepts now, and keep the rest for later. Do nothing if the line has ended."""
        if not line.open:
            return
        line.unsent.append(memoryview(data))
        self._flush(line)
        if sum(map(len, line.unsent)) > _UNSENT_BYTES:
            self.end(line, "does not read its control link")

    def drain(self, line: L) -> None:
        """Read and handle everything that the other end has sent so far."""
        while line.open and self._read(line):
            continue

    def end(self, line: L, how: str) -> None:
        if line.open:
            self.drop(line)
            self._ended(line, how)

    def drop(self, line: L) -> None:
        """Close the line without calling `ended`."""
        line.open = False
        self.lines.remove(line)
        self._selector.unregister(line.stream)
        line.stream.close()

    def _turn(self, line: L) -> None:
        if line.open and line.unsent:
            self._flush(line)
        if line.open:
            self._read(line)
        while line.open and line.stream.pending:
            self._read(line)
        if line.open:
            self._watch(line)

    def _read(self, line: L) -> bool:
        """Read once and handle the frames. Return False if there was nothing to read or the line has ended."""
        try:
            received = line.stream.receive(64 << 10)
        except ConnectionResetError:  # the other end closed before it had read everything
            received = b""
        except OSError as error:
            self.end(line, f"lost its control link ({error.strerror or error})")
            return False
        if received is None:
            return False
        if not received:
            self.end(line, "")
            return False
        try:
            for frame in line.parser.feed(received):
                if line.open:
                    self._handle(line, frame)
        except Error as error:
            self.end(line, f"sent invalid data on its control link ({error})")
        except Exception as error:  # a fault of ours; the other links must go on
            self._log(traceback.format_exc())
            self.end(line, f"sent data on its control link that the hub failed on ({type(error).__name__}: {error})")
        return line.open

    def _flush(self, line: L) -> None:
        try:
            while line.unsent and (sent := line.stream.send(line.unsent[0])):
                if sent < len(line.unsent[0]):
                    line.unsent[0] = line.unsent[0][sent:]
                else:
                    line.unsent.popleft()
        except OSError:
            line.unsent.clear()  # _read() ends the line, but first reads the other end's final frames
        self._watch(line)

    def _watch(self, line: L) -> None:
        """Wait for what the stream needs now."""
        key = self._selector.get_key(line.stream)
        events = line.stream.events(sending=bool(line.unsent))
        if key.events != events:
            self._selector.modify(line.stream, events, key.data)
