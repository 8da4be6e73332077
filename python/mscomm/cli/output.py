"""What the ranks write: whole lines behind a rank prefix on the terminal, the bytes as they came in the log files."""

from __future__ import annotations

import os
import selectors
from typing import IO, BinaryIO

_LONGEST_LINE_BYTES = 64 << 10  # a longer one, or a progress bar that never ends its line, is shown in pieces


class Stream:
    """One rank's stdout or stderr on its way to ours."""

    def __init__(self, pipe: IO[bytes], rank: int, terminal: BinaryIO, log: BinaryIO | None) -> None:
        os.set_blocking(pipe.fileno(), False)
        self.pipe = pipe
        self._prefix = f"[{rank}] ".encode()
        self._terminal = terminal
        self._log = log
        self._line = b""

    def pump(self) -> bool:
        """Pass on what is there; False at the end. BrokenPipeError when nobody reads our own output any more."""
        data = self.pipe.read(64 << 10)
        if data is None:  # nothing there after all
            return True
        if self._log:
            self._log.write(data)
            self._log.flush()
        *lines, self._line = (self._line + data).split(b"\n")
        if self._line and (not data or len(self._line) > _LONGEST_LINE_BYTES):
            lines, self._line = [*lines, self._line], b""
        if lines:
            self._terminal.write(b"".join(self._prefix + line + b"\n" for line in lines))
            self._terminal.flush()
        return bool(data)


class Streams:
    """All of them, in the launcher's selector."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._open: set[Stream] = set()

    def add(self, stream: Stream) -> None:
        self._open.add(stream)
        self._selector.register(stream.pipe, selectors.EVENT_READ, lambda: self._pump(stream))

    def __bool__(self) -> bool:
        return bool(self._open)

    def _pump(self, stream: Stream) -> None:
        if not stream.pump():
            self._open.remove(stream)
            self._selector.unregister(stream.pipe)
            stream.pipe.close()

    def close(self) -> None:
        """Give up on what is still open: only a process that escaped its group can hold it."""
        for stream in self._open:
            self._selector.unregister(stream.pipe)
            stream.pipe.close()
        self._open.clear()
