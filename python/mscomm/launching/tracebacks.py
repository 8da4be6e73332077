"""Shows the ranks' tracebacks. If several ranks write the same traceback, it is shown once, with these ranks' numbers.

From the first line of a traceback on, a rank's stderr is held back for a moment, because other ranks may write the same
lines in that time. All held lines are then shown together, unchanged, at the latest when the ranks have ended.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from typing import NamedTuple

from mscomm.tracebacks import innermost
from mscomm.writing import Output

# How long to hold lines if no rank has failed. If the program continues, its output must not be delayed for long.
HOLD_S = 1.0
RECENT_S = 10.0  # if a rank ends with PYTHONS_STATUS this soon after a traceback, the traceback's exception ended it
PYTHONS_STATUS = 1  # Python's exit status for a program that ends by an exception
_MOST_BYTES = 256 << 10  # if more is held for one rank, all held lines are shown
_FIRST_LINE = re.compile(
    rb"Traceback \(most recent call last\):|  \+ Exception Group Traceback|Exception in thread |KeyboardInterrupt\b"
    rb'|  File ".+", line \d+$'  # a script that cannot be compiled
    rb"|Exception ignored |Error in sys\.excepthook:"
)
# Lines that introduce an exception that did not end the program.
_NOT_THE_END = (b"Exception ignored ", b"Error in sys.excepthook:")
_BETWEEN = re.compile(
    rb"\s*$|During handling of the above exception|The above exception was the direct cause|Original exception was:"
)
_FRAME = re.compile(r'\s*(?:\|\s*)*File "(.*)", line (\d+)')


class LastWords(NamedTuple):
    """The exception at the end of a traceback."""

    what: str  # "ValueError: no such column: price"
    place: str  # "train.py:6"; "" if `what` contains it
    at_s: float  # the time.monotonic() at which the first line of the traceback arrived

    def __str__(self) -> str:
        return f"{self.what} ({self.place})" if self.place else self.what

    @property
    def interrupted_at(self) -> str:
        """The line that this rank was executing when Ctrl-C was pressed; "" if Ctrl-C did not cause the exception."""
        if not re.match(r"KeyboardInterrupt\b|Aborted: .*(: KeyboardInterrupt\b| was interrupted in )", self.what):
            return ""
        here = re.fullmatch(r"KeyboardInterrupt \((.+)\)", self.what)
        return here[1] if here else self.place or "an unknown line"


class Tracebacks:
    """Holds the tracebacks from this host's ranks, and shows them on our stderr. full: show all, even after Ctrl-C."""

    def __init__(self, output: Output, full: bool) -> None:
        self._output = output
        self._full = full
        self._held: dict[int, list[bytes]] = {}  # each rank's held lines; the rank with the oldest line comes first
        self._began_s: dict[int, float] = {}  # for each rank, the time.monotonic() of its first held line
        self._last: dict[int, LastWords] = {}  # for each rank, the exception in its latest traceback
        self.due = float("inf")  # when to show the held lines, unless the ranks are being ended after a failure
        self._interrupted = False  # whether Ctrl-C was received; if so, the tracebacks that it causes are left out
        # The latest lines that show() wrote, and the lines that the same ranks have written since. At most _MOST_BYTES.
        self.shown = b""
        self._told: set[int] = set()  # the ranks whose lines show() has written

    def take(self, rank: int, lines: list[bytes]) -> list[bytes]:
        """Take a rank's next lines. Hold all lines from the start of a traceback on. Return the lines to show now."""
        now: list[bytes] = []
        for line in lines:
            held = self._held.get(rank)
            if held is None and _FIRST_LINE.match(line):
                held = self._held[rank] = []
                self.due = min(self.due, time.monotonic() + HOLD_S)
                self._began_s[rank] = time.monotonic()
            (now if held is None else held).append(line)
        if rank in self._told:  # show() may have come in the middle of a traceback
            self.shown = (self.shown + b"".join(b"[%d] %b\n" % (rank, line) for line in now))[-_MOST_BYTES:]
        if sum(len(line) + 1 for line in self._held.get(rank, ())) > _MOST_BYTES:
            self.show()
        return now

    def show(self) -> None:
        """Write all lines that are held."""
        self._told.update(self._held)
        text = self.release()
        self.shown = (self.shown + text)[-_MOST_BYTES:]
        self._output.write(text)

    def interrupt(self) -> None:
        """Note that the ranks are about to get Ctrl-C. If it is the first, show the lines held so far."""
        if not self._interrupted:
            self.show()
        self._interrupted = True

    def release(self, last: int | None = None) -> bytes:
        """Return all held lines, and stop holding them.

        Equal texts appear only once. The text of rank `last` is at the end.
        """
        by_text: dict[bytes, list[int]] = {}
        for rank, lines in self._held.items():
            words = last_words(lines, self._began_s[rank])
            if words.what:
                self._last[rank] = words
            if self._interrupted and not self._full:
                lines = _without_tracebacks(lines) if words.interrupted_at else _without_ignored_interrupts(lines)
            if lines:
                by_text.setdefault(b"\n".join(lines), []).append(rank)
        self._held.clear()
        self.due = float("inf")
        return b"".join(
            f"[{numbers(ranks)}] ".encode() + line + b"\n"
            for text, ranks in sorted(by_text.items(), key=lambda group: last in group[1])
            for line in text.split(b"\n")
        )

    def of(self, rank: int, ended_at_s: float) -> LastWords | None:
        """Return the exception that ended the rank; None if it is not known.

        Call this only if the rank's exit status says that an exception ended it.
        """
        words = self._last.get(rank)
        return words if words and ended_at_s - words.at_s < RECENT_S else None


def _without_tracebacks(lines: Iterable[bytes]) -> list[bytes]:
    """Return the lines that are not part of a traceback, such as what a program writes while it ends."""
    kept: list[bytes] = []
    inside = False
    for line in lines:
        if _FIRST_LINE.match(line):
            inside = not line.startswith(b"KeyboardInterrupt")  # no traceback follows such a line
        elif inside:  # the first line that is not indented is the exception, which ends the traceback
            inside = not line[:1].strip(b" |+")
        elif not _BETWEEN.match(line):
            kept.append(line)
    return kept


def _without_ignored_interrupts(lines: Iterable[bytes]) -> list[bytes]:
    """Return the lines without the tracebacks of a Ctrl-C that Python ignored, as it does in an atexit callback."""
    kept: list[bytes] = []
    block: list[bytes] = []
    for line in lines:
        if line.startswith(_NOT_THE_END):
            kept += block
            block = [line]
        elif not block:
            kept.append(line)
        elif line.startswith(b"Traceback ") or not line[:1].strip(b" |+"):
            block.append(line)
        else:  # the line of the exception
            kept += [] if line.startswith(b"KeyboardInterrupt") else [*block, line]
            block = []
    kept += block
    return kept if any(kept) else []


def last_words(lines: Iterable[bytes], at_s: float = 0.0) -> LastWords:
    """Return the final exception in a text that begins with a traceback."""
    what, frames, skipping = "", [], False
    for raw in lines:
        line = raw.decode(errors="replace").rstrip()
        if raw.startswith(_NOT_THE_END):
            skipping = True
        elif skipping:  # skip the traceback of an ignored exception, and its last line, which names the exception
            skipping = line.startswith("Traceback ") or not line[:1].strip(" |+")
        elif frame := _FRAME.match(line):
            frames.append((frame[1], int(frame[2])))
        elif line.startswith("KeyboardInterrupt"):  # with or without the frames of a traceback before it
            what, frames = line, [] if what else frames
        elif _FIRST_LINE.match(raw):
            what, frames = "", []
        elif not what and frames and line[:1].strip(" |+"):
            what = line.removeprefix("mscomm.errors.")
    place = innermost(frames)
    return LastWords(what, "" if what.endswith(f"({place})") else place, at_s)


def numbers(ranks: Iterable[int]) -> str:
    """Return the ranks as text, such as 0,2,5-9. Three or more consecutive ranks are shown as a range."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs]
    return ",".join(words)
