"""The interface of the launcher modules in this folder, and the Invitation that each of them returns."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from mscomm.cluster.bytestream import ByteStream
from mscomm.cluster.deadline import Deadline
from mscomm.cluster.protection import Protection

if TYPE_CHECKING:
    from mscomm.cluster.security import KeyFile


_turns: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


def turn(launcher: str) -> int:
    """Count a join through this launcher, and return how many joins came before it.

    The number makes the names of sockets and keys unique.
    """
    return next(_turns[launcher])


class Seat(NamedTuple):
    """This process's place in the job, according to the launcher."""

    rank: int  # UNKNOWN_RANK if the scheduler will assign it
    size: int
    local_rank: int | None
    one_host: bool  # whether all ranks are on one host, according to the launcher


@dataclass
class Invitation:
    """What a rank needs to join: an authenticated stream to the hub, its admission key, and its place in the job.

    `where`: the name of the hub in error messages. `key_file`: the file through which this rank gave the key to the
    others, if it wrote one; it is removed when this rank leaves the job. `dial_again`: see Member.
    """

    launcher: str
    seat: Seat
    stream: ByteStream
    key: bytes
    where: str
    key_file: KeyFile | None = None
    node_id: str | None = None
    device: int | None = None  # the number of the accelerator, if the launcher provides one
    dial_again: Callable[[bytes, Deadline], ByteStream] | None = None


class Launcher(Protocol):
    """A module or an object that can connect this process to its job."""

    NAME: str

    def accept(self, env: Mapping[str, str], deadline: Deadline, protection: Protection) -> Invitation:
        """Connect to the job. If no connection succeeds, raise an Error that says what was tried.

        protection: how the user wants the links to be protected.
        """


class Found(Launcher, Protocol):
    """What each launcher module in this folder contains."""

    PLACE: tuple[tuple[str, ...], tuple[str, ...]]
    """Two tuples of variables. The first tuple gives the rank, the second gives the number of ranks. In each tuple, the
    first variable that is set is used.
    """

    def detect(self, env: Mapping[str, str]) -> bool:
        """Return whether this launcher started the process. Look only at `env`."""
