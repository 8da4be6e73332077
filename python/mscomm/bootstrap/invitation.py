"""The interface of the launcher modules in this folder, and the Invitation that each returns."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from mscomm.cluster.deadline import Deadline

if TYPE_CHECKING:
    import subprocess


@dataclass
class Invitation:
    """A way into the job: a socket connected to the hub, the job's key, and what the launcher says about this rank.

    `greeted`: the socket needs no hello any more, because the hello is done or the socket is inherited. `hub`: the
    hub's process, if this rank started it.
    """

    sock: socket.socket
    key: bytes
    greeted: bool
    rank: int | None
    size: int
    local_rank: int | None
    node_id: str | None
    launcher: str
    hub: subprocess.Popen[bytes] | None = None
    where: str = "the scheduler"  # the name of the hub in messages
    device: int | None = None  # the accelerator's number, if the launcher gives one


class Launcher(Protocol):
    """Something that can connect this process to its job."""

    NAME: str

    def detect(self, env: Mapping[str, str]) -> bool:
        """Whether this launcher started the process. It looks only at `env`."""

    def accept(self, env: Mapping[str, str], deadline: Deadline, permit_plain: bool) -> Invitation:
        """Connect to the job. If no connection succeeds, raises an Error that says what was tried."""


class Found(Launcher, Protocol):
    """What each launcher module of this folder contains."""

    PLACE: tuple[tuple[str, ...], tuple[str, ...]]
    """The variables that give the rank, and those that give the number of ranks; of each list, the first variable that
    is set counts.
    """
