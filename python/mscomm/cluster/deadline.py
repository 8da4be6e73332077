"""Deadlines. An operation creates its deadline when it begins, and passes it to everything inside that may wait."""

from __future__ import annotations

import reprlib
import select
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import IO, Any

from mscomm import environment


class Deadline:
    """A point in monotonic time, `seconds` after this object was created. With `inf`, the deadline never passes."""

    __slots__ = ("at", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.at = time.monotonic() + seconds

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self.at

    def left(self) -> float:
        """Return how many seconds to wait now: at most an hour, because some system calls refuse `inf`."""
        return min(max(0.0, self.at - time.monotonic()), 3600.0)

    def rest(self) -> float:
        """Return the seconds until the deadline passes, which may be `inf`. For a system call, use left() instead."""
        return max(0.0, self.at - time.monotonic())

    def within(self, seconds: float) -> Deadline:
        """Return a deadline `seconds` from now, or this deadline if it is earlier."""
        sooner = Deadline(seconds)
        return sooner if sooner.at < self.at else self


class NothingHappened(TimeoutError):
    """The deadline of wait() has passed."""


def wait(sock: socket.socket | IO[bytes] | int, events: int, deadline: Deadline) -> None:
    """Wait until the socket or pipe has one of the poll events, or an error. Raise NothingHappened at the deadline."""
    poller = select.poll()
    poller.register(sock, events)
    while not poller.poll(deadline.left() * 1000):
        if deadline.passed:
            raise NothingHappened(f"nothing happened on the socket for {deadline.seconds:g} s")


def seconds_of(timeout: Any, function: str, argument: str = "timeout", may_be_zero: bool = False) -> float:
    """Return the timeout in seconds. function, argument: for error messages.

    `timeout` is a number or a timedelta, and must be more than 0. The number inf means no timeout.
    """
    shown = f"{function}: {argument} {reprlib.repr(timeout)}"
    try:
        if isinstance(timeout, (str, bytes, bool)):
            raise TypeError
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    except (TypeError, ValueError):
        raise TypeError(f"{shown} is neither a number of seconds nor a timedelta") from None
    except OverflowError:
        raise ValueError(f"{shown} is too large (inf means none)") from None
    if may_be_zero and seconds == 0:
        return 0.0
    if not seconds > 0:
        raise ValueError(f"{shown} is not more than 0 seconds (inf means none)")
    return seconds


def join_timeout_s(env: Mapping[str, str]) -> float:
    """Return MS_TOPO_TIMEOUT, the seconds within which all ranks must join; `inf` means no limit."""
    return float(environment.read("MS_TOPO_TIMEOUT", env))
