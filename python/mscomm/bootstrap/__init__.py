"""How this process finds out its rank and its job. There is one module per launcher; the first that recognises the
environment is used.
"""

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

    `greeted`: the hello is done, or the socket is inherited and needs none. `hub`: the hub's process, if this rank
    started it.
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
    where: str = "the scheduler"  # what messages call the hub
    device: int | None = None  # the accelerator's number, if the launcher gives one


class Launcher(Protocol):
    """A way into a job."""

    NAME: str

    def detect(self, env: Mapping[str, str]) -> bool:
        """Whether this launcher started the process. It looks only at `env`."""

    def accept(self, env: Mapping[str, str], deadline: Deadline, permit_plain: bool) -> Invitation:
        """Connect to the job. Raises an Error that says what was tried if that fails."""


class Found(Launcher, Protocol):
    """What each launcher module of this folder offers."""

    PLACE: tuple[tuple[str, ...], tuple[str, ...]]
    """The variables that tell the rank, and those that tell how many ranks there are; the first that is set counts."""


# The order matters: one launcher may have been started by a later one of this list, and it knows more about the ranks.
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
    """The launcher that init's arguments describe, or else the one that started this process; None: a job of one."""
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
    """What a launcher says about a process, which may not have joined yet; None for what it does not say."""

    launcher: str
    rank: int | None
    size: int | None


def announced(env: Mapping[str, str]) -> Announced | None:
    """What the environment variables alone say; None: no launcher started this process."""
    launcher = _detected(env)
    if launcher is None:
        return None
    texts = [next((env[name] for name in names if env.get(name)), "") for names in launcher.PLACE]
    rank, size = (int(text) if re.fullmatch(r"\d{1,9}", text, re.ASCII) else None for text in texts)
    return Announced(launcher.NAME, rank, size)
