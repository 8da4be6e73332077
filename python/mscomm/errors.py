"""The errors that a failed collective call raises.

Every error says which rank and host failed, in which operation and call number, what was expected and what to do. A
failed call breaks the group on all its members: each later call on the group raises the same error again. A call with
wrong arguments raises TypeError or ValueError instead. It sends nothing, and the group can still be used.
"""

from __future__ import annotations

from collections.abc import Iterable


class Error(RuntimeError):
    """The base class of mscomm's errors."""

    def __init__(self, text: str, ranks: Iterable[int] = (), waiting_for: Iterable[int] = ()) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)
        self.waiting_for = tuple(waiting_for)


class PeerLost(Error):
    """A rank ended, or its host went silent, while other ranks still needed that rank. `.ranks` has the lost ranks."""


class CollectiveTimeout(Error, TimeoutError):
    """A deadline passed. `.waiting_for` has the ranks that are silent or behind."""


class Mismatch(Error, ValueError):
    """Ranks made different calls under one call number. The error's text names the calls.

    `.ranks` has the ranks whose call differs from rank 0's.
    """


class BackendUnavailable(Error):
    """The backend, or a library that it needs, is not on this machine; the text says what was looked for and where."""


class AuthenticationError(Error, PermissionError):
    """A peer could not prove that it knows the job's key."""


class Aborted(Error):
    """A rank called abort(), or ended with an uncaught exception, which the text quotes. `.ranks` has that rank."""


KINDS: dict[str, type[Error]] = {
    kind.__name__: kind
    for kind in (Error, PeerLost, CollectiveTimeout, Mismatch, BackendUnavailable, AuthenticationError, Aborted)
}


def make(kind: str, text: str, ranks: Iterable[int] = (), waiting_for: Iterable[int] = ()) -> Error:
    """An error of the class named `kind`. An unknown name, which only a newer peer could send, gives a plain Error."""
    return KINDS.get(kind, Error)(text, ranks, waiting_for)
