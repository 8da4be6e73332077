"""NVIDIA GPUs, with NCCL and the CUDA driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mscomm import _core, environment
from mscomm.accelerators import Opened
from mscomm.accelerators.places import Candidate, homes, places
from mscomm.errors import BackendUnavailable

ADVICE = (
    "This needs NVIDIA's driver, and nvidia-nccl-cu12 or nvidia-nccl-cu13, whichever the driver can run."
    ' Without a GPU, use init("gloo"), which runs on the CPU'
)


def nccl_places(env: Mapping[str, str]) -> list[Candidate]:
    known = [*homes(env, "CONDA_PREFIX", below=("lib",)), *homes(env, "NCCL_HOME", "CUDA_HOME", "CUDA_PATH")]
    return places("libnccl.so.2", "MSCOMM_NCCL_LIBRARY", env, wheel="nvidia/nccl/lib", homes=known)


def vendor(env: Mapping[str, str]) -> _core.Vendor:
    """Open NCCL without the CUDA driver. This needs no GPU."""
    return _core.open_nccl(nccl_places(env))


def load(env: Mapping[str, str]) -> Opened:
    """Open NCCL and the CUDA driver. If either is missing, raise BackendUnavailable, which names it."""
    opened: list[Any] = []
    missing = []
    cuda_places = places("libcuda.so.1", "MSCOMM_CUDA_LIBRARY", env)
    for open_one in (lambda: vendor(env), lambda: _core.open_cuda(cuda_places)):
        try:
            opened.append(open_one())
        except BackendUnavailable as error:
            missing.append(str(error))
    if missing:
        raise BackendUnavailable(f"{'. '.join(missing)}. {ADVICE}")
    return Opened(*opened)


def settings(interface: str | None) -> dict[str, str]:
    """Return the variables that configure NCCL. set_up() sets only variables that the user has not set.

    interface: the network interface of this rank's links to other hosts; None if all ranks are on this host.
    """
    return {
        # Let the calls of several groups on one device run in the order in which they were made (since NCCL 2.26).
        "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
        # Make NCCL connect when a group is created (since NCCL 2.22). Otherwise the first call of the group would wait
        # for the other ranks.
        "NCCL_RUNTIME_CONNECT": "0",
        # NCCL's listening sockets do not check the job's key, so limit the interfaces on which NCCL listens.
        "NCCL_SOCKET_IFNAME": "lo" if interface is None else f"={interface}",
    }


def warning(env: Mapping[str, str]) -> str:
    """Return what the user should know about the variables that are set, or ""."""
    if environment.read("NCCL_COMM_BLOCKING", env) != "1":
        return ""
    return (
        "NCCL_COMM_BLOCKING=1 takes away the time limits of the nccl backend: joining a group, and the first call of a"
        " group, wait without end for a rank that does not come, and abort() waits, too. Unset it"
    )


def shares_devices(env: Mapping[str, str]) -> str:
    """Return the value of NCCL_HOSTID. NCCL treats ranks with different values like ranks on different hosts, and
    therefore lets them share a GPU."""
    return env.get("NCCL_HOSTID", "")
