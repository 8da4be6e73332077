"""Writes to our own stdout and stderr in a thread, so that no other thread waits for the reader of the output."""

from __future__ import annotations

import codecs
import errno
import os
import select
import threading
from collections.abc import Callable
from typing import TextIO

from mscomm.threads import start_thread
from mscomm.undisturbed import Condition

_FULL_BYTES = 1 << 20  # an output with this many unwritten bytes counts as full
_PIECE_BYTES = 16 << 10
_ERASE = b"\x1b[K"  # tells a terminal to clear the rest of the line


class Output:
    """Our own stdout or stderr. Its writing thread calls `wake` when there is room again, or if writing fails.

    If the reader is gone, the output is broken. After another error, such as a full disk, the data is dropped and
    counted, and later data is tried again.
    """

    def __init__(self, fd: int, wake: Callable[[], None], bar: threading.Event | None = None) -> None:
        """bar: set while a progress bar is on the terminal; outputs that may share a terminal share it."""
        self._fd = fd
        self._wake = wake
        self.terminal = fd >= 0 and os.isatty(fd)
        self._bar = bar or threading.Event()
        self.dropped = 0  # how many bytes could not be written
        self.why = ""  # why the latest of them could not be written
        self._closed = False
        # Protects the unwritten bytes. The writing thread and flush() wait on it until these bytes change.
        self._news = Condition()
        self._unwritten = bytearray()
        self._writes = 0  # how many times some of them were written
        self.broken = False  # whether nobody reads this output any more
        self._thread = threading.Thread(target=self._serve, name="mscomm-output", daemon=True)
        start_thread(self._thread)

    @property
    def full(self) -> bool:
        return len(self._unwritten) >= _FULL_BYTES

    def write(self, data: bytes) -> None:
        """Queue the data, and return at once."""
        if self.terminal and self._bar.is_set():
            self._bar.clear()
            data = _ERASE + data
        self._queue_bytes(data)

    def write_bar(self, line: bytes) -> None:
        """Show the line on a terminal until the next write() or write_bar()."""
        self._bar.set()
        self._queue_bytes(line + _ERASE + b"\r")

    def _queue_bytes(self, data: bytes) -> None:
        with self._news.lock:
            if not self.broken:
                self._unwritten += data
                self._news.notify_all()

    def flush(self, stalled_s: float) -> int:
        """Wait until all is written, or nothing was written for `stalled_s` seconds. Return how many bytes are left."""
        while self._written_after(self._writes, stalled_s):
            continue
        return len(self._unwritten)

    def _written_after(self, writes: int, within_s: float) -> bool:
        """Wait for another write. Return False if nothing is left to write, or no write has ended within this time."""
        self._news.wait_for(lambda: self._writes != writes or not self._unwritten, within_s)
        with self._news.lock:
            return self._writes != writes and bool(self._unwritten)

    def close(self, within_s: float) -> bool:
        """Let the thread end when it has written everything. Return whether it has ended within `within_s` seconds."""
        with self._news.lock:
            self._closed = True
            self._news.notify_all()
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _write(self, piece: bytes) -> int:
        """Write some or all of the piece. Return how many bytes were written."""
        return os.write(self._fd, piece)

    def _serve(self) -> None:
        while not self.broken:
            self._news.wait_for(lambda: bool(self._unwritten) or self._closed, float("inf"))
            with self._news.lock:
                piece = bytes(self._unwritten[:_PIECE_BYTES])
                if not piece:
                    return
            failed = False  # for the first time
            try:
                written = self._write(piece)
            except BlockingIOError:  # another process made the descriptor non-blocking
                _await_room(self._fd)
                continue
            except OSError as error:
                if isinstance(error, ConnectionError) or error.errno == errno.EBADF:  # the reader is gone
                    self.broken, written = True, len(self._unwritten)
                else:
                    written, failed = len(piece), not self.why
                    self.dropped, self.why = self.dropped + written, error.strerror or str(error)
            with self._news.lock:
                was_full = self.full
                del self._unwritten[:written]
                self._writes += 1
                self._news.notify_all()
            if self.broken or failed or (was_full and not self.full):
                self._wake()


class TextOutput(Output):
    """Writes to sys.stdout or sys.stderr, which may have no descriptor in a notebook or a test.

    If `stream` is None, as sys.stdout can be, the output is dropped.
    """

    def __init__(self, stream: TextIO | None, wake: Callable[[], None]) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        super().__init__(-1, wake)

    def _write(self, piece: bytes) -> int:
        if self._stream is not None:
            text = self._decoder.decode(piece)
            try:
                try:
                    self._stream.write(text)
                except UnicodeEncodeError as error:  # the encoding of the stream lacks a character
                    self._stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
                self._stream.flush()
            except OSError:
                raise
            except Exception as error:  # the stream is closed, or is not a stream
                raise BrokenPipeError from error
        return len(piece)


class LogLines(TextOutput):
    """Writes the lines of a log to sys.stdout or sys.stderr. While the output is full, lines are dropped and counted.

    head: the text at the beginning of each line.
    """

    def __init__(self, stream: TextIO | None, head: str) -> None:
        self._head = head
        self._dropped = 0
        super().__init__(stream, self._tell_dropped)

    def add(self, text: str) -> None:
        """Queue a line, and return at once. Any thread may call this."""
        with self._news.lock:
            if self.full:
                self._dropped += 1
            else:
                self._tell_dropped()
                self._queue(text)

    def _queue(self, text: str) -> None:
        self.write(f"{self._head}{text}\n".encode("utf-8", "backslashreplace"))

    def _tell_dropped(self) -> None:
        with self._news.lock:
            dropped, self._dropped = self._dropped, 0
            if dropped:
                self._queue(f"{dropped} lines are missing here, because nobody read this output")

    def _write(self, piece: bytes) -> int:
        try:
            fd = -1 if self._stream is None else self._stream.fileno()
        except (OSError, ValueError):  # the stream is closed, or has no descriptor
            fd = -1
        if fd >= 0:
            # Wait before the write, not inside it, because a write holds the stream's lock, which flush() also takes.
            _await_room(fd)
            piece = piece[: select.PIPE_BUF]  # a pipe that has room takes this many bytes without blocking
        return super()._write(piece)


def _await_room(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    poll.poll()
