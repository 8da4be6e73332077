"""The last line of `mscomm run`. It says which rank failed first, or what all ranks did wrong, and what to do."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mscomm.errors import Error
from mscomm.launching.tracebacks import LastWords, numbers

_CRASHES = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL")
# Verdicts about one rank. If the verdict is one of these, failed() says how the rank that failed first ended.
_OF_ONE_RANK = ("PeerLost", "Aborted")


class End(NamedTuple):
    """How the process of one rank ended."""

    rank: int  # the rank's number in the job, not on this host
    code: int  # as in subprocess: the exit status, or -N if signal N killed the process
    after_s: float

    @property
    def how(self) -> str:
        return f"killed by {signal_name(-self.code)}" if self.code < 0 else f"exit code {self.code}"

    @property
    def status(self) -> int:
        """The exit status as a shell reports it: 128 + N if signal N killed the process."""
        return 128 - self.code if self.code < 0 else self.code


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def failed(first: End, others: Sequence[End], words: Mapping[int, LastWords], verdict: Error | None, here: str) -> str:
    """Return the message about a failed job.

    first: the rank that failed first. others: the other ranks that failed. words: for each rank, the exception that
    ended it, if that is known. here: " on this host" if the job has several hosts, otherwise "".
    """
    said = words.get(first.rank)
    # The verdict is the cause if the first rank raised it, or ended without an exception. Otherwise, the exception that
    # ended this rank is the cause.
    ended_it = verdict is not None and (said is None or said.what.startswith(f"{verdict.kind}:"))
    if verdict and ended_it and verdict.kind not in _OF_ONE_RANK:
        return _sentences(f"{verdict.kind} after {first.after_s:.1f} s: {verdict}", _ADVICE.get(verdict.kind, ""))
    if said is None:
        return _sentences(
            f"rank {first.rank} failed first{here}: {first.how} after {first.after_s:.1f} s", _of_end(first)
        )
    advice = _ADVICE.get(said.what.partition(":")[0], "")
    alike = [end.rank for end in others if str(words.get(end.rank)) == str(said)]
    if alike:
        return _sentences(f"ranks {numbers([first.rank, *alike])} failed{here}: {said}", advice)
    because = "The others failed because of it" if others else ""
    return _sentences(f"rank {first.rank} failed first{here}: {said}", because, advice)


# What the user should do, by the name of the exception.
_ADVICE = {
    "CollectiveTimeout": "If the work only takes longer, give init or the call a larger timeout",
    "ModuleNotFoundError": f"Install it for {sys.executable}, or name its folder in PYTHONPATH",
}


def _of_end(end: End) -> str:
    """Return what the user should do if a rank ended in this way, without a Python exception; "" if unknown."""
    name = signal_name(-end.code) if end.code < 0 else ""
    if name == "SIGKILL":
        return "If nobody killed it, its host had no memory left: see dmesg"
    if name in ("SIGUSR1", "SIGUSR2"):
        return "mscomm run passes this signal on to the ranks, and the program has no handler for it"
    if name in _CRASHES:
        return "That is a crash in native code: set PYTHONFAULTHANDLER=1 to see the line"
    return ""


def _sentences(*texts: str) -> str:
    return ". ".join(text.rstrip(".") for text in texts if text)


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {numbers(ranks)}"


def asked(ranks: Sequence[int], grace_s: float, why: str) -> str:
    """Return the message about ranks that are to end. why: why they are."""
    return f"{why}: SIGTERM to {_named(ranks)}, and SIGKILL {grace_s:g} s later"


def killed(ranks: Sequence[int], grace_s: float) -> str:
    """Return the message about ranks that are killed because they have not ended after SIGTERM."""
    return f"killed {_named(ranks)}: still running {grace_s:g} s after SIGTERM"


def late(ranks: Sequence[int], timeout_s: float) -> str:
    """Return the message about a job that was ended at its time limit. ranks: those that were still running."""
    return f"ended after {timeout_s:g} s, the time limit (--timeout): {_named(ranks)} had not ended"


def left_behind(rank: int, pid: int) -> str:
    """Return the message about a rank that SIGKILL does not end."""
    try:
        state = re.search(r"^State:\s*(.*)", Path(f"/proc/{pid}/status").read_text(), re.M)
    except OSError:  # it has just ended
        state = None
    now = f", state {state[1]}" if state else ""
    return f"rank {rank} (pid {pid}{now}) cannot be killed, and is left behind: it may be frozen, or wait for a device"


def stopped(ranks: Sequence[int]) -> str:
    """Return the message about ranks that were killed because they were stopped and all other ranks had ended."""
    return f"killed {_named(ranks)}: stopped (SIGSTOP or SIGTSTP) though all other ranks had ended"


def interrupted(number: int, after_s: float, words: Mapping[int, LastWords]) -> str:
    """Return the message about a job that a signal from the user or the system ended. words: see failed()."""
    by_place: dict[str, list[int]] = {}
    for rank, said in sorted(words.items()):
        if place := said.interrupted_at:
            by_place.setdefault(place, []).append(rank)
    places = [f"{_named(ranks)} at {place}" for place, ranks in by_place.items()]
    by = "Ctrl-C" if number == signal.SIGINT else signal_name(number)
    return f"ended by {by} after {after_s:.1f} s" + (f": {'; '.join(places)}" if places else "")
