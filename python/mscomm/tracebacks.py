"""What a rank shows of an uncaught exception: the frames of the user's program, and the first cause alone."""

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
    """Take mscomm's own frames out of the tracebacks of error and of the exceptions in its chain.

    An error of mscomm that was raised from another one loses it: that is what this rank alone saw of the first cause.
    A traceback that has no other frames than mscomm's keeps them.
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
    """The traceback without mscomm's frames; the whole of it if there are no others."""
    kept: TracebackType | None = None
    ours = False  # the frame after the one that is looked at
    for entry in reversed(list(_entries(trace))):
        path = entry.tb_frame.f_code.co_filename
        ours = path.startswith(PACKAGE) or (ours and path == contextlib.__file__)  # the with statements of ours
        if not ours:
            kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept or trace


def place(trace: TracebackType | None) -> str:
    """ "train.py:6", the innermost line of the user's own program; "": there is none."""
    entries = _entries(users_part(trace))
    return innermost((entry.tb_frame.f_code.co_filename, entry.tb_lineno) for entry in entries)


def innermost(lines: Iterable[tuple[str, int]]) -> str:
    """Of (path, line), outermost first: the last that is of no installed library, else the last."""
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
