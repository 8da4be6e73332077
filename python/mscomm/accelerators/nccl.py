"""NVIDIA GPUs: NCCL and the CUDA driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mscomm import _core, environment
from mscomm.accelerators import Opened
from mscomm.accelerators.places import Place, homes, places
from mscomm.errors import BackendUnavailable

ADVICE = (
    "This needs NVIDIA's driver, and nvidia-nccl-cu12 or nvidia-nccl-cu13, whichever the driver can run."
    ' Without a GPU: init("gloo"), the CPU core'
)


def nccl_places(env: Mapping[str, str]) -> list[Place]:
    said = environment.read("MSCOMM_NCCL_LIBRARY", env)
    known = [*homes(env, "CONDA_PREFIX", below=("lib",)), *homes(env, "NCCL_HOME", "CUDA_HOME", "CUDA_PATH")]
    return places("libnccl.so.2", said, "MSCOMM_NCCL_LIBRARY", wheel="nvidia/nccl/lib", homes=known)


def cuda_places(env: Mapping[str, str]) -> list[Place]:
    return places("libcuda.so.1", environment.read("MSCOMM_CUDA_LIBRARY", env), "MSCOMM_CUDA_LIBRARY")


def vendor(env: Mapping[str, str]) -> _core.Vendor:
    """NCCL alone, which can be opened without a GPU."""
    return _core.open_nccl(nccl_places(env))


def load(env: Mapping[str, str]) -> Opened:
    """Both, or BackendUnavailable with what is missing of them."""
    opened: list[Any] = []
    missing = []
    for open_one in (lambda: vendor(env), lambda: _core.open_cuda(cuda_places(env))):
        try:
            opened.append(open_one())
        except BackendUnavailable as error:
            missing.append(str(error))
    if missing:
        raise BackendUnavailable(f"{'. '.join(missing)}. {ADVICE}")
    return Opened(*opened)


def settings(interface: str | None) -> dict[str, str]:
    """What NCCL is told by its variables, where the user has not set them. interface: by which ranks of other hosts
    reach this one, as this job's own links have shown; None: they are all on this host."""
    told = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}  # several groups on one device run in the order of their calls (2.26)
    return told if interface is None else {**told, "NCCL_SOCKET_IFNAME": f"={interface}"}


def shares_devices(env: Mapping[str, str]) -> str:
    """NCCL takes ranks with different NCCL_HOSTID for those of different hosts, which cannot have one GPU."""
    return env.get("NCCL_HOSTID", "")
