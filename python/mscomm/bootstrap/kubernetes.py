"""Joins a Kubernetes indexed job that runs one rank per pod.

JOB_COMPLETION_INDEX is the rank, and WORLD_SIZE is the number of ranks. MASTER_ADDR names pod 0. If MASTER_ADDR is not
set, mscomm takes this pod's full name and replaces the index in it with 0. A pod's full name ends with the domain of
the job's headless service. The name of pod 0 cannot be resolved until some time after pod 0 has started, so the other
ranks retry until the deadline.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping

from mscomm.bootstrap.invitation import Invitation, Seat, turn
from mscomm.bootstrap.rendezvous import Meeting, Spot, number, port_range, ports_instead
from mscomm.bootstrap.torchrun import DEFAULT_PORT
from mscomm.cluster.deadline import Deadline
from mscomm.cluster.protection import Protection
from mscomm.errors import BackendUnavailable

NAME = "Kubernetes indexed job"
PLACE = (("JOB_COMPLETION_INDEX",), ("WORLD_SIZE",))


def detect(env: Mapping[str, str]) -> bool:
    return "JOB_COMPLETION_INDEX" in env


def accept(env: Mapping[str, str], deadline: Deadline, protection: Protection) -> Invitation:
    if not env.get("WORLD_SIZE"):
        raise BackendUnavailable(
            f"{NAME}: JOB_COMPLETION_INDEX={env['JOB_COMPLETION_INDEX']} is set, and WORLD_SIZE is not: Kubernetes "
            "does not tell a pod how many pods there are. Set WORLD_SIZE in the pod template to the job's completions,"
            " or to 1 if each pod works alone"
        )
    size = number(NAME, env, "WORLD_SIZE", 1)
    rank = number(NAME, env, "JOB_COMPLETION_INDEX", 0, size - 1)
    host = env.get("MASTER_ADDR") or pod_0(socket.getfqdn(), rank)
    port = number(NAME, env, "MASTER_PORT", 1, 65535) if env.get("MASTER_PORT") else DEFAULT_PORT
    ports = ports_instead(port, env)
    advice = (
        "Does the job have a headless service, and does the pod template name it as subdomain? If not, set"
        f" MASTER_ADDR to pod 0's name. Its {port_range(ports)} must be open to the other pods"
    )
    seat, spot = Seat(rank, size, 0, one_host=size == 1), Spot(f"kubernetes {host} {port} {turn(NAME)}", host, ports)
    return Meeting(NAME, seat, spot, env, deadline, protection, advice).invitation()


def pod_0(name: str, index: int) -> str:
    """Return pod 0's full name. name, index: this pod's full name and index. train-3.svc and 3 give train-0.svc."""
    pod, dot, domain = name.partition(".")
    if not pod.endswith(f"-{index}"):
        raise BackendUnavailable(
            f"{NAME}: this pod's host name, {pod}, does not end with its index, -{index}, so pod 0's name is not "
            "known. Set MASTER_ADDR to that name"
        )
    return re.sub(r"-\d+$", "-0", pod) + dot + domain
