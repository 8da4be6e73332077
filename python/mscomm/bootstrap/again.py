"""Joins another job of the ranks that a launcher has started, after they have joined their first job through it.

Most launchers bring their ranks together only once. For example, a rank of `mscomm run` has closed the descriptor that
it inherited, and the scheduler of an MS_* cluster ends with its job. So all later jobs do without the launcher. In the
first job, each rank has learned its rank, the address of rank 0, and the admission key, which only the ranks know. The
ranks meet as described in rendezvous.py: rank 0 starts a hub at a unix socket or at one of a few ports, and each rank
computes from the first job where that is.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from types import ModuleType

from mscomm import environment
from mscomm.bootstrap.invitation import Invitation, Launcher, Seat
from mscomm.bootstrap.rendezvous import Meeting, Spot, meeting_ports
from mscomm.cluster.assemble import Epoch
from mscomm.cluster.deadline import Deadline
from mscomm.cluster.protection import Protection
from mscomm.errors import BackendUnavailable


class Again:
    """A launcher for the later jobs of this process. first: the invitation to the first job."""

    def __init__(self, launcher: Launcher, first: Invitation, epoch: Epoch, env: Mapping[str, str]) -> None:
        self.NAME = launcher.NAME
        self._first = first
        self._restarts = epoch.restarts
        self._given = _given(env)
        one_host = len(set(epoch.hosts)) == 1
        self._seat = Seat(epoch.rank, epoch.size, first.seat.local_rank, one_host)
        self._host = "" if one_host else epoch.facts[0]["listen"]
        self._run = epoch.run.hex()
        self._turns = itertools.count(2)

    def continues(self, launcher: Launcher, env: Mapping[str, str]) -> bool:
        """Return whether the environment still describes the job that this process has joined."""
        return self.NAME == launcher.NAME and self._given == _given(env)

    def accept(self, env: Mapping[str, str], deadline: Deadline, protection: Protection) -> Invitation:
        if self._restarts:
            raise BackendUnavailable(
                f"{self.NAME}: lost ranks of this job are restarted, so a process can join it only once, and this one "
                "did so already: call init() once, and release() at the end"
            )
        turn = next(self._turns)
        job = f"{self.NAME} {self._run} {turn}"
        ports = () if self._seat.one_host else meeting_ports(job, env)
        spot = Spot(job, self._host, ports, key=self._first.key)
        advice = f"This is join number {turn} of this process. All ranks must join equally often. Has rank 0 ended?"
        invitation = Meeting(self.NAME, self._seat, spot, env, deadline, protection, advice).invitation()
        invitation.device = self._first.device
        return invitation


_again: Again | None = None


def remember(launcher: Launcher, first: Invitation, epoch: Epoch, env: Mapping[str, str]) -> None:
    """Keep what the next join needs. Call this when a job has been joined through any launcher."""
    global _again
    if isinstance(launcher, ModuleType):  # a launcher of this folder, and neither an Again nor one from by_hand.py
        _again = Again(launcher, first, epoch, env)


def found(launcher: Launcher, env: Mapping[str, str]) -> Launcher:
    """Return the launcher of this process, or its Again if this process has already joined a job through it."""
    return _again if _again is not None and _again.continues(launcher, env) else launcher


def _given(env: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables that place this process in a job."""
    return environment.given(env, environment.CLUSTER, environment.RUN, environment.LAUNCHER)


def _forget() -> None:
    global _again
    _again = None


# A forked child is not a rank. It must not meet the ranks in place of its parent.
os.register_at_fork(after_in_child=_forget)
