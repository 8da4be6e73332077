"""Passes on the ranks' output: whole lines with a rank prefix to the terminal, and the unchanged bytes to log files.

The launcher's loop never waits for the reader of the launcher's output, because each `Output` has a writing thread
(writing.py). While an output has too many unwritten bytes, the launcher does not read the ranks' pipes. The ranks then
wait, and no output is lost.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from mscomm.writing import Output

_LONGEST_LINE_BYTES = 64 << 10  # a longer line is shown in pieces
_PROMPT_S = 0.1  # after this time, an unfinished line of the rank that has our stdin counts as a prompt
# How often a progress bar is shown: a line that the rank writes again and again, with a carriage return. To a terminal,
# which shows the bar in one line; and to a pipe or a file, which gets a line each time, at first more often than later.
_BAR_S = 0.2
_BARS_S = (0.5, 10.0)


class Log:
    """A log file. A full disk must not end the job, so bytes that do not fit are dropped and counted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dropped = 0
        self._why = ""
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115

    def write(self, data: bytes) -> None:
        """Write the data, or as much of it as fits."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self.dropped += len(rest)
            self._why = error.strerror or str(error)

    @property
    def complaint(self) -> str:
        """Return a message for the user if anything was dropped, otherwise ""."""
        return f"{self.path} is incomplete: {self.dropped} bytes were dropped: {self._why}" if self.dropped else ""

    def close(self) -> None:
        self._file.close()


Hold = Callable[[list[bytes]], list[bytes]]


class Stream:
    """Passes on one rank's stdout or stderr to ours."""

    def __init__(self, pipe: IO[bytes], rank: int, output: Output, log: Log | None, hold: Hold, prompts: bool) -> None:
        """hold: a function that takes the next lines, and returns the lines to show now.

        prompts: whether to show unfinished lines as prompts.
        """
        os.set_blocking(pipe.fileno(), False)
        self.pipe = pipe
        self.output = output
        self._prefix = f"[{rank}] ".encode()
        self._log = log
        self._line = b""
        self._hold = hold
        self._prompts = prompts
        self._shown = b""  # the progress bar that was shown last
        self._shown_at_s = float("-inf")
        self._pause_s = _BARS_S[0]
        self.unfinished_at_s = float("inf")  # when to show the unfinished line

    def pump(self) -> bool:
        """Pass on the data that has arrived. Return False at the end of the stream."""
        data = self.pipe.read(64 << 10)
        if data is None:  # nothing to read
            return True
        if self._log:
            self._log.write(data)
        *lines, self._line = map(_not_overwritten, (self._line + data).split(b"\n"))
        if lines:
            lines = [line[1:] if line[:1] == b"\r" and len(line) > 1 else line for line in lines]
            if self._shown and self._shown == lines[0] and not self.output.terminal:
                del lines[0]  # it was shown in a line of its own
            self._shown, self._shown_at_s, self._pause_s = b"", float("-inf"), _BARS_S[0]
        if self._line and (not data or len(self._line) > _LONGEST_LINE_BYTES):
            lines, self._line = [*lines, self._line.strip(b"\r")], b""
        if lines := self._hold(lines):
            self.output.write(b"".join(self.named(line) + b"\n" for line in lines))
        if self._bar not in (b"", self._shown):
            pause_s = _BAR_S if self.output.terminal else self._pause_s
            self.unfinished_at_s = max(time.monotonic(), self._shown_at_s + pause_s)
        else:
            self.unfinished_at_s = time.monotonic() + _PROMPT_S if self._prompts and self._line else float("inf")
        return bool(data)

    @property
    def _bar(self) -> bytes:
        """The unfinished line without its carriage return, if it has one; b"" if it has none."""
        return self._line.strip(b"\r") if b"\r" in self._line else b""

    def named(self, line: bytes) -> bytes:
        """Return the line with its prefix."""
        return self._prefix + line

    def show_unfinished(self) -> None:
        """Show the unfinished line: a progress bar, or a prompt.

        A prompt is shown without a newline. The user's answer ends with Enter, which begins the next line.
        """
        self.unfinished_at_s = float("inf")
        if not self._bar:
            self.output.write(self.named(self._line))
            self._line = b""
            return
        self._shown, self._shown_at_s = self._bar, time.monotonic()
        self._pause_s = min(2 * self._pause_s, _BARS_S[1])
        if not self._hold([self._shown]):  # it is in the middle of a traceback
            return
        if self.output.terminal:
            self.output.write_bar(self.named(self._shown))
        else:
            self.output.write(self.named(self._shown) + b"\n")


def _not_overwritten(line: bytes) -> bytes:
    """Return the part of a line that a terminal would still show, with the carriage return before it.

    A line may end with carriage returns, because programs for Windows end their lines so.
    """
    return line[max(0, line.rstrip(b"\r").rfind(b"\r")) :]


class Streams:
    """The streams of all ranks. The selector callbacks raise BrokenPipeError if our output has lost its reader."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._open: set[Stream] = set()
        self._paused: set[Stream] = set()
        self._may_pause = True
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        selector.register(self._wake_fd, selectors.EVENT_READ, self._woken)

    def add(self, stream: Stream) -> None:
        self._open.add(stream)
        self._watch(stream)

    def wake(self) -> None:
        """Make the launcher look at the outputs. Any thread may call this."""
        os.eventfd_write(self._wake_fd, 1)

    def take_all(self) -> None:
        """Read the pipes from now on, even if our outputs are full. The ranks have ended, so little data is left."""
        self._may_pause = False
        self._resume()

    def __bool__(self) -> bool:
        return bool(self._open)

    @property
    def unfinished_at_s(self) -> float:
        """Return when to show the next unfinished line."""
        return min((stream.unfinished_at_s for stream in self._open), default=float("inf"))

    def show_unfinished(self) -> None:
        """Show the unfinished lines that are due."""
        for stream in self._open:
            if stream.unfinished_at_s <= time.monotonic():
                stream.show_unfinished()

    def _watch(self, stream: Stream) -> None:
        self._selector.register(stream.pipe, selectors.EVENT_READ, lambda: self._pump(stream))

    def _pump(self, stream: Stream) -> None:
        if not stream.pump():
            self._open.remove(stream)
            self._selector.unregister(stream.pipe)
            stream.pipe.close()
        elif stream.output.full and self._may_pause:
            self._paused.add(stream)
            self._selector.unregister(stream.pipe)

    def _woken(self) -> None:
        os.eventfd_read(self._wake_fd)
        if any(stream.output.broken for stream in self._open):
            raise BrokenPipeError
        self._resume()

    def _resume(self) -> None:
        for stream in [stream for stream in self._paused if not (stream.output.full and self._may_pause)]:
            self._paused.remove(stream)
            self._watch(stream)

    def close(self) -> None:
        """Close our ends of the pipes that are still open.

        The ranks and their process groups have been killed by now. Only a process that has left its rank's process
        group can still hold the other end of such a pipe.
        """
        for stream in self._open:
            if stream not in self._paused:
                self._selector.unregister(stream.pipe)
            stream.pipe.close()
        self._open.clear()

    def release(self) -> None:
        """Close the wake-up descriptor. Call this when no thread can call wake() any more."""
        os.close(self._wake_fd)
