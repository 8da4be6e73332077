"""Shortens an uncaught exception: keeps only the frames of the user's program, and only the first cause."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from types import TracebackType

from mscomm.errors import Error

PACKAGE = os.path.dirname(__file__) + os.sep
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def shorten(error: BaseException) -> None:
    """Remove mscomm's own frames from the tracebacks of `error` and of the exceptions in its chain.

    If the cause of an mscomm error is another mscomm error, remove the cause from the chain: it is only the symptom
    that this rank saw. A traceback that has only mscomm frames keeps them.
    """
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Error) and isinstance(one.__cause__, Error):
            one.__cause__ = None
        one.__traceback__ = users_part(one.__traceback__)
        waiting += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]


def users_part(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without mscomm's frames, or the unchanged traceback if all frames are mscomm's."""
    kept: TracebackType | None = None
    ours = False  # whether the next inner frame is mscomm's
    for entry in reversed(list(_entries(trace))):
        path = entry.tb_frame.f_code.co_filename
        # A contextlib frame just outside an mscomm frame comes from a `with` statement in mscomm.
        ours = path.startswith(PACKAGE) or (ours and path == contextlib.__file__)
        if not ours:
            kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept or trace


def place(trace: TracebackType | None) -> str:
    """Return the innermost line of the user's own program, such as "train.py:6"; "" without a traceback."""
    entries = _entries(users_part(trace))
    return innermost((entry.tb_frame.f_code.co_filename, entry.tb_lineno) for entry in entries)


def innermost(lines: Iterable[tuple[str, int]]) -> str:
    """Return the innermost line outside of installed libraries; if there is none, the innermost line of all.

    lines: pairs of path and line number, the outermost first.
    """
    last = own = ""
    for path, line in lines:
        last = f"{os.path.basename(path)}:{line}"
        library = path.startswith(("<", _STANDARD_LIBRARY)) or any(part in path for part in _INSTALLED)
        own = own if library else last
    return own or last


def _entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next
