"""Ascend NPUs, with HCCL and AscendCL.

This module has not been tested on hardware. docs/guide.md says how it was tested instead.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from mscomm import _core, environment
from mscomm.accelerators import Opened
from mscomm.accelerators.places import Candidate, homes, places
from mscomm.errors import BackendUnavailable

ADVICE = (
    "This needs CANN: source its set_env.sh, or set ASCEND_TOOLKIT_HOME. "
    'Without an NPU, use init("gloo"), which runs on the CPU'
)
_ROOTS = ("/usr/local/Ascend/cann", "/usr/local/Ascend/ascend-toolkit/latest")


def _places(soname: str, variable: str, env: Mapping[str, str]) -> list[Candidate]:
    known = homes(env, "ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH", below=("lib64",))
    known += [(root, f"{root}/lib64") for root in _ROOTS]
    return places(soname, variable, env, homes=known)


def acl_places(env: Mapping[str, str]) -> list[Candidate]:
    older = _places("libascendcl.so", "MSCOMM_ACL_LIBRARY", env)
    return older if older[0][2] == "must" else older + _places("libacl_rt.so", "MSCOMM_ACL_LIBRARY", env)


def hcomm_places(env: Mapping[str, str]) -> list[Candidate]:
    """Return the places where libhcomm.so may be. Newer releases have this library next to libhccl.so."""
    said = environment.read("MSCOMM_HCCL_LIBRARY", env)
    if said:
        return [("MSCOMM_HCCL_LIBRARY", os.path.join(os.path.dirname(said), "libhcomm.so"), "must")]
    return _places("libhcomm.so", "MSCOMM_HCCL_LIBRARY", env)


def visible(env: Mapping[str, str]) -> list[str]:
    """Return the host's numbers for the devices that this process can see. An empty list means all devices."""
    said: str = environment.read("ASCEND_RT_VISIBLE_DEVICES", env) or ""
    return [number.strip() for number in said.split(",") if number.strip()]


def load(env: Mapping[str, str]) -> Opened:
    missing, soc, runtime = [], "", None
    try:
        runtime = _core.open_acl(acl_places(env), visible(env))
        soc = runtime.device_name(0)
    except BackendUnavailable as error:
        missing.append(str(error))
    try:
        hccl_places = _places("libhccl.so", "MSCOMM_HCCL_LIBRARY", env)
        vendor = _core.open_hccl(hccl_places, hcomm_places(env), soc)
    except BackendUnavailable as error:
        missing.append(str(error))
    if missing or runtime is None:
        raise BackendUnavailable(f"{'. '.join(missing)}. {ADVICE}")
    return Opened(vendor, runtime)


def settings(interface: str | None) -> dict[str, str]:
    """Return the variables that configure HCCL; see nccl.settings."""
    return {} if interface is None else {"HCCL_SOCKET_IFNAME": f"={interface}"}


def warning(env: Mapping[str, str]) -> str:
    return ""


def shares_devices(env: Mapping[str, str]) -> str:
    return ""
