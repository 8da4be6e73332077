"""Writes a log of what mscomm does, for troubleshooting. MSCOMM_DEBUG and MSCOMM_DEBUG_FILE control it.

A line of the log looks like this:

    mscomm node7:4711 [3] INFO mesh: 7 links by 10.0.0.7, algorithm of all_reduce: direct

The levels are those of NCCL_DEBUG: VERSION, WARN, INFO, TRACE. Each level includes the lines of the levels before it.
If MSCOMM_DEBUG is unset, only warnings are written. Callers must not log a key or the contents of an array.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import select
import socket
import sys
from collections.abc import Mapping

from mscomm import environment

VERSION, WARN, INFO, TRACE = range(1, 5)
_NAMES = dict(zip((VERSION, WARN, INFO, TRACE), environment.LEVELS, strict=True))
# The maximum number of log entries that are held in memory until the rank is known. Entries are held only if the name
# of the log file contains the rank (%r).
_HELD = 1000
_PIECE = select.PIPE_BUF  # a pipe that is ready for writing takes this many bytes without blocking


class Log:
    """Writes the log lines of this process. The constructor raises ValueError if MSCOMM_DEBUG is not a level."""

    def __init__(self, env: Mapping[str, str]) -> None:
        level = environment.read("MSCOMM_DEBUG", env)
        self.level = WARN if level is None else environment.LEVELS.index(level) + 1
        self.tells_version = level is not None
        self._pattern: str | None = environment.read("MSCOMM_DEBUG_FILE", env)
        self._host = socket.gethostname().partition(".")[0]
        self._rank: int | None = None
        self._fd: int | None = None if self._pattern else 2
        self._held: list[bytes] = []

    def set_rank(self, rank: int) -> None:
        self._rank = rank
        self.flush()

    def write(self, level: int, text: str) -> None:
        """Write `text`, which may have several lines. Output of other processes never appears inside a line."""
        place = "-" if self._rank is None else self._rank
        head = f"mscomm {self._host}:{os.getpid()} [{place}] {_NAMES[level]} "
        data = "".join(f"{head}{line}\n" for line in text.splitlines()).encode("utf-8", "backslashreplace")
        if self._fd is None:
            self._held.append(data)
            del self._held[:-_HELD]
            if self._rank is not None or "%r" not in (self._pattern or ""):
                self.flush()
        else:
            self._put(data)

    def flush(self) -> None:
        """Write the held entries. If the rank is still unknown, the file name has `-` in place of %r."""
        if self._fd is None and self._held:
            self._fd = self._open()
            self._put(b"".join(self._held))
            self._held.clear()

    def _open(self) -> int:
        assert self._pattern is not None
        values = {"h": self._host, "p": str(os.getpid()), "r": "-" if self._rank is None else str(self._rank), "%": "%"}
        path = re.sub("%([hpr%])", lambda match: values[match[1]], self._pattern)
        try:
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            print(f"mscomm: MSCOMM_DEBUG_FILE={path}: {error.strerror}; the lines go to stderr", file=sys.stderr)
            return 2

    def _put(self, data: bytes) -> None:
        assert self._fd is not None
        try:
            os.write(self._fd, data)
        except OSError:  # nobody reads stderr any more, or the disk is full: drop the lines, but let the job continue
            self._fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


@functools.cache
def _get() -> Log:
    log = Log(os.environ)
    atexit.register(log.flush)
    return log


def enabled(level: int) -> bool:
    """Return whether lines of this level are written. Check this before you build a line in a collective call."""
    return _get().level >= level


def set_rank(rank: int) -> None:
    """Show this rank in all later lines."""
    _get().set_rank(rank)


def version(text: str) -> None:
    """Log the version if the user has set MSCOMM_DEBUG to any level."""
    if _get().tells_version:
        _get().write(VERSION, text)


def warn(text: str) -> None:
    """Log something that the user should know, although the job continues."""
    if enabled(WARN):
        _get().write(WARN, text)


def info(text: str) -> None:
    """Log what mscomm has found and chosen. Use this once per job or group, never per call."""
    if enabled(INFO):
        _get().write(INFO, text)


def notice(text: str) -> None:
    """Write a line to stderr without blocking or raising an exception.

    Text that cannot be written at once is dropped.
    """
    data = f"{text}\n".encode("utf-8", "backslashreplace")
    stderr = select.poll()
    stderr.register(2, select.POLLOUT)
    with contextlib.suppress(OSError):  # nobody reads stderr any more, or the disk is full
        while data and any(events & select.POLLOUT for _, events in stderr.poll(0)):
            data = data[os.write(2, data[:_PIECE]) :]


def trace(text: str) -> None:
    """Log a line about one call."""
    if enabled(TRACE):
        _get().write(TRACE, text)
