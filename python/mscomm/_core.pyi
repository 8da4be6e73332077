"""The C++ core: what src/module.cc offers.

The place of a name in collectives, ops and dtypes() is its number in the other functions.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, final

import numpy as np

version: str
collectives: list[str]
ops: list[str]

def dtypes() -> list[str]: ...
def supports(dtype: int, op: int, /) -> bool: ...
def algorithms() -> list[tuple[str, str, Literal["arena", "mesh"]]]:
    """(collective, name, carrier) of each, in order of preference."""

def select(what: int, hosts: Sequence[int], forced: Sequence[str], /) -> tuple[str, Literal["arena", "mesh"]]:
    """The algorithm, and its carrier, for a collective among ranks on these hosts; forced: by collective, "" to choose.

    ValueError for a forced name that is none, or that these hosts do not allow.
    """

def make_control(size: int, /) -> int:
    """The descriptor of a new control block for a group of that size."""

def make_heap(bytes: int, /) -> tuple[Heap, int]:
    """A heap and the descriptor by which the peers map it; the caller closes it."""

@final
class Heap:
    """One rank's shared memory."""

    def allocate(self, bytes: int, /) -> np.ndarray[tuple[int], np.dtype[np.uint8]] | None:
        """At least that many bytes, in use for as long as an array refers to them; None when there is no room."""

    def in_use(self) -> int:
        """Bytes that arrays refer to."""

@final
class Group:
    """One rank's part of a group: its communicator, transports and recorder."""

    def __init__(
        self,
        *,
        name: str,
        rank: int,
        hosts: Sequence[int],
        epoch: int,
        names: Sequence[str],
        forced: Sequence[str],
        pidfds: Sequence[int],
        heap: Heap | None,
        control_fd: int,
        heap_fds: Sequence[int],
        spin: bool,
        links: Sequence[int],
        notice: Callable[[str], object],
    ) -> None:
        """hosts, names, pidfds, heap_fds and links are by rank; pidfds and links are taken over; -1: there is none.

        No arena with control_fd -1, no mesh with empty links.
        """

    def run(
        self,
        what: int,
        dtype: int,
        op: int,
        root: int,
        x: np.ndarray[Any, Any] | None,
        out: np.ndarray[Any, Any] | None,
        timeout_s: float,
        fused: int,
        /,
    ) -> None:
        """One collective call on C-contiguous arrays, which the caller has checked."""

    def abort(self, kind: str, ranks: Sequence[int], waiting_for: Sequence[int], text: str, /) -> None:
        """Break the group with a verdict; from any thread, without waiting."""

    def left(self, rank: int, /) -> None:
        """rank ended well: a failure only for a call that still needs it."""

    def where(self) -> tuple[int, bool, str]:
        """(number of the last call, whether it is still inside, words)."""

    def failure(self) -> tuple[str, str, list[int], list[int], bool] | None:
        """(kind, text, ranks, waiting_for, whether it is the job's verdict) of a broken group."""

    def calls(self, after: int = 0) -> list[dict[str, Any]]:
        """The last calls, oldest first, those after that number: their number, call, state (inside, done, failed),
        began and took."""

    def last_look(self) -> None:
        """Compare what the peers said last with this rank's own calls; raises Mismatch."""

    def close(self) -> None: ...
    def chosen(self) -> dict[str, str]:
        """Which algorithm runs each collective."""

    def lost_wakes(self) -> int:
        """Sleeps at the gate that only their time limit ended though the gate was open: always 0, and tested to be."""
