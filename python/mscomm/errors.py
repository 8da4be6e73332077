"""The errors that failed calls raise.

Every error says which rank and host failed, in which operation and call number, what was expected and what to do. A
failed call breaks the group on all its ranks: each later call on the group raises the same error again. A call with
invalid arguments raises TypeError or ValueError instead. It sends nothing, and the group can still be used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any


class Error(RuntimeError):
    """The base class of mscomm's errors.

    An Error is also used as the record of a failure: the hub's verdict is an Error, and a broken group stores the
    cause of its failure as an Error. Such a record is never raised itself, because each raise changes an exception's
    traceback. again() creates the exception to raise.
    """

    def __init__(self, text: str, ranks: Iterable[int] = (), waiting_for: Iterable[int] = ()) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)
        self.waiting_for = tuple(waiting_for)

    @property
    def kind(self) -> str:
        return type(self).__name__

    def again(self, text: str | None = None) -> Error:
        """Return a new exception of the same class, with the same ranks. text: its text, or None for the same text."""
        return make(self.kind, str(self) if text is None else text, self.ranks, self.waiting_for)

    def fields(self) -> dict[str, Any]:
        """Return the error as fields of a control frame. of_fields() turns them into an error again."""
        return {"kind": self.kind, "text": str(self), "ranks": self.ranks, "waiting_for": self.waiting_for}


class PeerLost(Error):
    """A rank ended, or its host went silent, while other ranks still needed it. `.ranks` holds the lost ranks."""


class CollectiveTimeout(Error, TimeoutError):
    """A deadline passed. `.waiting_for` holds the ranks that were late or did not respond."""


class Mismatch(Error, ValueError):
    """Ranks made different calls with the same call number. The text of the error names the call of each rank.

    `.ranks` holds the ranks whose call differs from that of the lowest rank in the text. A rank is missing from the
    text if it has not made the call, if it has left the group, or if it did not answer the hub within 1 s.
    """


class BackendUnavailable(Error):
    """The backend, or a library that it needs, was not found. The text says what was looked for, and where."""


class AuthenticationError(Error, PermissionError):
    """A peer could not prove that it belongs to the job: it has another key, or its certificate does not fit."""


class Aborted(Error):
    """A rank called abort(), or ended with an uncaught exception, which the text quotes. `.ranks` holds that rank."""


# The classes of this module, by the names that C++ and other ranks send.
KINDS = {"Error": Error} | {kind.__name__: kind for kind in Error.__subclasses__()}


def make(kind: str, text: str, ranks: Iterable[int] = (), waiting_for: Iterable[int] = ()) -> Error:
    """Return an error of the class named `kind`.

    If the name is unknown, return a plain Error. Only a peer with a newer version of mscomm could send such a name.
    """
    return KINDS.get(kind, Error)(text, ranks, waiting_for)


def of_fields(fields: Mapping[str, Any]) -> Error:
    """Return the error that a control frame carries. This is the inverse of Error.fields()."""
    return make(fields["kind"], fields["text"], fields["ranks"], fields["waiting_for"])


@contextlib.contextmanager
def on_failure(undo: Callable[..., object], *args: Any, **options: Any) -> Iterator[None]:
    """If the with block raises, call undo(*args, **options), and let the exception propagate."""
    try:
        yield
    except BaseException:
        undo(*args, **options)
        raise
