"""Joins a job step that Slurm's srun has started without an MPI plugin. The step's first node runs task 0.

The step's variables describe the job. With --mpi=pmix, mscomm uses pmix.py instead of this module, and with --mpi=pmi2
it uses pmi.py. In a job step on several nodes, the key is in the file that MSCOMM_JOB_KEY_FILE names. If this variable
is not set, rank 0 writes the key to a file in ~/.mscomm, a folder that all nodes must share.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from mscomm.bootstrap.invitation import Invitation, Seat, turn
from mscomm.bootstrap.rendezvous import Meeting, Spot, meeting_ports, number, port_range
from mscomm.cluster.deadline import Deadline
from mscomm.cluster.protection import Protection
from mscomm.errors import BackendUnavailable

NAME = "Slurm"
PLACE = (("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"))
_SPECIAL_STEPS = 0xFFFFFFF0  # srun's steps have lower ids; those of batch scripts and interactive shells begin here


def detect(env: Mapping[str, str]) -> bool:
    """Return whether srun started this process as one of several tasks.

    SLURM_PROCID alone does not show this, because Slurm also sets it in the batch script.
    """
    step, tasks = (env.get(name, "") for name in ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"))
    return (
        "SLURM_PROCID" in env
        and re.fullmatch(r"\d+", step, re.ASCII) is not None
        and int(step) < _SPECIAL_STEPS
        and (tasks or env.get("SLURM_NTASKS", "1")) != "1"
    )


def accept(env: Mapping[str, str], deadline: Deadline, protection: Protection) -> Invitation:
    tasks = "SLURM_STEP_NUM_TASKS" if env.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    size = number(NAME, env, tasks, 1)
    rank = number(NAME, env, "SLURM_PROCID", 0, size - 1)
    local_rank = number(NAME, env, "SLURM_LOCALID", 0, size - 1) if "SLURM_LOCALID" in env else None
    listed = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST") or ""
    nodes = hosts(listed)
    step = f"{env.get('SLURM_JOB_ID', '')}.{env['SLURM_STEP_ID']}"
    ports = meeting_ports(step, env)
    call = turn(NAME)
    key_path = os.path.expanduser(f"~/.mscomm/slurm-{step}-{call}.key")
    spot = Spot(f"slurm {step} {call}", nodes[0], ports, key_path)
    advice = (
        f"Task 0 must run on {nodes[0]} (the first of the step's nodes, {listed}), and the others must reach its "
        f"{port_range(ports)}"
    )
    place = Seat(rank, size, local_rank, one_host=len(nodes) == 1)
    return Meeting(NAME, place, spot, env, deadline, protection, advice).invitation()


def hosts(text: str) -> list[str]:
    """Return the names of the nodes in a list in Slurm's notation, such as node[001,007-015],x[1-2]-ib.

    Raise BackendUnavailable if the list cannot be parsed.
    """
    found: list[str] = []
    at = 0
    while at < len(text):
        item = re.compile(r"(?:[^\[\],\s]|\[[0-9,-]+\])+").match(text, at)
        if not item or (item.end() < len(text) and text[item.end()] != ","):
            raise BackendUnavailable(f"{NAME}: cannot read the list of nodes {text!r} at {text[at : at + 20]!r}")
        found += _expand(item[0], text)
        at = item.end() + 1
    if not found:
        raise BackendUnavailable(f"{NAME}: SLURM_STEP_NODELIST={text!r} names no node; was this started by srun?")
    return found


def _expand(item: str, text: str) -> list[str]:
    before, bracket, rest = item.partition("[")
    if not bracket:
        return [item]
    ranges, _, after = rest.partition("]")
    names = []
    for part in ranges.split(","):
        bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", part, re.ASCII)
        if not bounds or int(bounds[2] or bounds[1]) < int(bounds[1]):
            raise BackendUnavailable(f"{NAME}: cannot read the list of nodes {text!r}: {part!r} is not a range")
        first, last = bounds[1], bounds[2] or bounds[1]
        names += [f"{before}{value:0{len(first)}d}" for value in range(int(first), int(last) + 1)]
    return [name + tail for name in names for tail in _expand(after, text)]
