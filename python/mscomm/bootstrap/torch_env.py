"""Joins by RANK, WORLD_SIZE and MASTER_ADDR, as set by Kubeflow's PyTorchJob or the user's script, without torchrun."""

from __future__ import annotations

from collections.abc import Mapping

from mscomm.bootstrap import torchrun
from mscomm.bootstrap.invitation import Invitation
from mscomm.cluster.deadline import Deadline
from mscomm.cluster.protection import Protection

NAME = "RANK and WORLD_SIZE"
PLACE = (("RANK",), ("WORLD_SIZE",))


def detect(env: Mapping[str, str]) -> bool:
    return all(name in env for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


def accept(env: Mapping[str, str], deadline: Deadline, protection: Protection) -> Invitation:
    return torchrun.join(NAME, env, deadline, protection)
