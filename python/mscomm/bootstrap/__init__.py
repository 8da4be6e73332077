"""How this process learns who it is: one module a launcher; the first that recognises the environment counts."""

from __future__ import annotations

import importlib
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from mscomm.cluster.deadline import Deadline

if TYPE_CHECKING:
    import subprocess


@dataclass
class Invitation:
    """A way into the job: a socket connected to the hub, the job's key, and what the launcher says about this rank.

    `greeted`: the hello is done, or the socket is an inherited one that needs none. `hub`: the hub's process if this
    rank started it.
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
    where: str = "the scheduler"  # how messages call the hub
    device: int | None = None  # the accelerator's number, where the launcher says it


class Launcher(Protocol):
    """A way into a job."""

    NAME: str

    def detect(self, env: Mapping[str, str]) -> bool:
        """Whether this launcher started the process; looks at `env` only."""

    def accept(self, env: Mapping[str, str], deadline: Deadline, permit_plain: bool) -> Invitation:
        """Connect to the job; an Error that says what was tried if that fails."""


class Found(Launcher, Protocol):
    """What a module of this folder has."""

    PLACE: tuple[tuple[str, ...], tuple[str, ...]]
    """The variables that tell the rank, and those that tell how many ranks there are; the first that is set counts."""


# In this order: what stands before says more about the ranks than what it may have been started by.
LAUNCHERS = (
    "launcher",
    "ms_cluster",
    "torchrun",
    "pmix",
    "pmi",
    "slurm",
    "torch_env",
    "rank_table",
    "kubernetes",
)


def find(
    env: Mapping[str, str], init_method: Any = None, rank: int | None = None, world_size: int | None = None
) -> Launcher | None:
    """The launcher that started this process, or what init's arguments say instead; None: it is a job of one."""
    if init_method not in (None, "env://") or rank is not None or world_size is not None:
        from mscomm.bootstrap import by_hand

        return by_hand.launcher(init_method, rank, world_size)
    return _detected(env)


def _detected(env: Mapping[str, str]) -> Found | None:
    for name in LAUNCHERS:
        launcher = cast(Found, importlib.import_module(f"{__name__}.{name}"))
        if launcher.detect(env):
            return launcher
    return None


class Announced(NamedTuple):
    """What a launcher says about a process that may not have joined yet; None: it does not say that."""

    launcher: str
    rank: int | None
    size: int | None


def announced(env: Mapping[str, str]) -> Announced | None:
    """What the variables alone say; None: no launcher started this process."""
    launcher = _detected(env)
    if launcher is None:
        return None
    texts = [next((env[name] for name in names if env.get(name)), "") for names in launcher.PLACE]
    rank, size = (int(text) if re.fullmatch(r"\d{1,9}", text, re.ASCII) else None for text in texts)
    return Announced(launcher.NAME, rank, size)
