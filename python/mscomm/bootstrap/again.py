"""Joins another job of the ranks that a launcher has started, after they have joined their first job through it.

Most launchers bring their ranks together only once. For example, a rank of `mscomm run` has closed the descriptor that
it inherited, and the scheduler of an MS_* cluster ends with its job. So all later jobs do without the launcher. In the
first job, each rank has learned its rank, the address of rank 0, and the admission key, which only the ranks know. The
ranks meet as described in rendezvous.py: rank 0 starts a hub at a unix socket or at one of a few ports, and each rank
computes from the first job where that is.

A child process of a rank inherits the variables by which the rank has joined. It must not join as the same rank, so the
rank adds a variable, MSCOMM_JOINED, which tells the child who has joined already. If the scheduler numbers the workers,
the variables of all workers are the same, and a child may be a worker of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections import Counter
from collections.abc import Mapping
from types import ModuleType

from mscomm import environment
from mscomm.bootstrap.invitation import Found, Invitation, Launcher, Seat
from mscomm.bootstrap.rendezvous import Meeting, Spot, high_ports
from mscomm.cluster.assemble import Epoch
from mscomm.cluster.deadline import Deadline
from mscomm.cluster.hello import UNKNOWN_RANK
from mscomm.cluster.protection import Protection
from mscomm.errors import BackendUnavailable


class _First:
    """What this process has learned in its first job."""

    def __init__(self, launcher: ModuleType, invitation: Invitation, epoch: Epoch, env: Mapping[str, str]) -> None:
        self.launcher = launcher
        self.given = _given(launcher, env)
        self.placed = invitation.seat.rank != UNKNOWN_RANK  # whether only one process can join by these variables
        self.key, self.device = invitation.key, invitation.device
        self.restarts = epoch.restarts
        one_host = len(set(epoch.hosts)) == 1
        self.seat = Seat(epoch.rank, epoch.size, invitation.seat.local_rank, one_host)
        self.host = "" if one_host else epoch.facts[0]["listen"]
        self.run = epoch.run.hex()
        self.joined: Counter[str] = Counter()  # how many jobs of each name have been joined since


class Again:
    """A launcher for the later jobs of this process. name: the name of the job."""

    def __init__(self, first: _First, name: str) -> None:
        self.NAME: str = first.launcher.NAME
        self.first, self._name = first, name

    def accept(self, env: Mapping[str, str], deadline: Deadline, protection: Protection) -> Invitation:
        first = self.first
        if first.restarts:
            raise BackendUnavailable(
                f"{self.NAME}: lost ranks of this job are restarted, so a process can join it only once, and this one "
                "did so already: call init() once, and release() at the end"
            )
        turn = first.joined[self._name] + 1
        job = f"{self.NAME} {first.run} {self._name!a} {turn}"
        ports = () if first.seat.one_host else high_ports(job, env)
        spot = Spot(job, first.host, ports, key=first.key)
        named = f" of the name {self._name!r}" if self._name else ""
        advice = (
            f"This would be job {turn}{named} that this process joins after its first one. All ranks must join equally "
            "often. Has rank 0 ended?"
        )
        invitation = Meeting(self.NAME, first.seat, spot, env, deadline, protection, advice).invitation()
        invitation.device = first.device
        return invitation

    def count(self) -> None:
        self.first.joined[self._name] += 1


_first: _First | None = None


def remember(launcher: Launcher, invitation: Invitation, epoch: Epoch, env: Mapping[str, str]) -> None:
    """Keep what the next join needs. Call this when all ranks of a job have come, through whatever launcher."""
    global _first
    if isinstance(launcher, Again):
        launcher.count()
    elif isinstance(launcher, ModuleType):  # a launcher of this folder, and not one from by_hand.py
        _first = _First(launcher, invitation, epoch, env)


def found(launcher: Found, env: Mapping[str, str], name: str) -> Launcher:
    """Return the launcher of this process, or an Again if this process has already joined a job through it.

    If the variables that the launcher reads have changed, they describe another job.
    """
    assert isinstance(launcher, ModuleType)
    given = _given(launcher, env)
    if _first is not None and _first.launcher is launcher and _first.given == given:
        return Again(_first, name)
    _refuse_child(launcher, given, env)
    return launcher


def joined(launcher: Launcher | None) -> None:
    """Tell the child processes that this process has joined a job through the launcher."""
    if _first is not None and _first.placed and isinstance(launcher, (Again, ModuleType)):
        os.environ["MSCOMM_JOINED"] = f"{os.getpid()} {_first.seat.rank} {_digest(_first.given)}"


def _refuse_child(launcher: Found, given: Mapping[str, str], env: Mapping[str, str]) -> None:
    """Raise BackendUnavailable if a parent of this process has joined, and has not left, by the same variables."""
    mark = re.fullmatch(r"(\d{1,9}) (\d{1,9}) ([0-9a-f]{16})", env.get("MSCOMM_JOINED", ""), re.ASCII)
    if mark is None or mark[3] != _digest(given):
        return
    import psutil

    pid, rank = mark[1], mark[2]
    parents: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):  # this process may not see its parents
        parents = psutil.Process().parents()
    if any(parent.pid == int(pid) for parent in parents):
        raise BackendUnavailable(
            f"{launcher.NAME}: this process was started by pid {pid}, which has joined the job as rank {rank}, and has "
            f"the same variables. So it cannot be another rank: start it without {', '.join(given)}, or do not call "
            "init() in it"
        )


def left() -> None:
    """Note that this process has left all its jobs. Its children may then join by the same variables."""
    os.environ.pop("MSCOMM_JOINED", None)


def _given(launcher: ModuleType, env: Mapping[str, str]) -> Mapping[str, str]:
    return environment.read_by(launcher.__name__.removeprefix("mscomm."), env)


def _digest(given: Mapping[str, str]) -> str:
    return hashlib.sha256(repr(sorted(given.items())).encode()).hexdigest()[:16]


def _forget() -> None:
    global _first
    _first = None


# A forked child is not a rank. It must not meet the ranks in place of its parent.
os.register_at_fork(after_in_child=_forget)
