"""Finds the accelerators that this process can use, and chooses one for the job. There is one module per backend.

Each backend's module has four functions. `load(env)` opens the backend's libraries, or raises BackendUnavailable if a
library is missing. The others are described in shares_devices(), warning() and set_up() below. No library is opened
before it is needed, because a library that is loaded early may be the wrong one for a framework that is imported later.

When a rank joins, it tells the other ranks what it found. Each rank then computes the backend and every rank's device
only from what all ranks reported, so all ranks get the same result or the same error.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

from mscomm import _core, environment
from mscomm.errors import BackendUnavailable, Error, Mismatch

NAMES = ("nccl", "hccl")  # if init() gets no backend name, it tries them in this order
CPU = "cpu"

Facts = Mapping[str, Any]


class Opened(NamedTuple):
    """The libraries that this process has opened for one accelerator: the vendor's collectives, and the runtime."""

    vendor: _core.Vendor
    runtime: _core.Runtime


class Accelerator(NamedTuple):
    """An accelerator that the job uses: its name, its libraries, and the number of this rank's device."""

    name: str
    opened: Opened
    device: int


class Chosen(NamedTuple):
    """What the job uses: the backend, each rank's device (-1 if it has none), and the reason for the choice."""

    backend: str
    devices: list[int]
    reason: str


@functools.cache
def opened(name: str) -> Opened:
    """Open the accelerator's libraries and return them. Later calls return the same objects.

    If this fails, raise BackendUnavailable, which lists the places that were tried.
    """
    found: Opened = importlib.import_module(f"{__name__}.{name}").load(os.environ)
    return found


def facts(asked: str, device: int | None, local_rank: int | None, env: Mapping[str, str]) -> dict[str, Any]:
    """Return what this rank tells the other ranks about its accelerators. device: the user's choice, or None."""
    found = {}
    for name in (name for name in NAMES if asked in ("auto", name)):
        try:
            vendor, runtime = opened(name)
            devices = [[runtime.uuid(i), runtime.device_name(i)] for i in range(runtime.devices())]
            words = {"version": vendor.version(), "path": vendor.path(), "runtime": runtime.version()}
            found[name] = {**words, "devices": devices, "shares": shares_devices(name, env)}
        except Error as error:
            # All ranks get this text, so keep it short unless the user asked for this backend by name.
            found[name] = {"missing": str(error).partition(". Tried: ")[0] if asked == "auto" else str(error)}
    plain = environment.read("MSCOMM_ALLOW_PLAIN_DEVICE", env)
    return {"device": device, "local_rank": local_rank, "plain_device": plain, "accelerators": found}


def set_up(name: str, interface: str | None, env: MutableMapping[str, str]) -> dict[str, str]:
    """Set environment variables for the accelerator's libraries, unless the user has set them. Return what was set.

    Call this function before the libraries are first used. interface: the network interface through which ranks on
    other hosts reach this rank; None if there are no other hosts.
    """
    wished: Mapping[str, str] = importlib.import_module(f"{__name__}.{name}").settings(interface)
    told = {variable: text for variable, text in wished.items() if variable not in env}
    env.update(told)
    return told


def warning(name: str, env: Mapping[str, str]) -> str:
    """Return what the user should know about the variables that the accelerator's libraries read, or ""."""
    return str(importlib.import_module(f"{__name__}.{name}").warning(env))


def shares_devices(name: str, env: Mapping[str, str]) -> str:
    """Return the value of the environment variable that lets ranks share a device, or "" if no such variable exists.

    Ranks can share a device only if their values differ.
    """
    module = importlib.import_module(f"{__name__}.{name}")
    return str(module.shares_devices(env))


def choose(
    asked: str, everyone: Sequence[Facts], hosts: Sequence[int], names: Sequence[str], tls: bool = False
) -> Chosen:
    """Choose the backend and the devices of a job whose ranks all asked for the backend `asked`.

    names: the ranks' names in error messages. tls: whether the links between hosts must be encrypted. If the ranks
    asked for a backend by name and cannot use it, choose() raises BackendUnavailable (a library or a device is missing,
    two ranks would share a device, or the device's traffic must be encrypted) or Mismatch (the ranks have different
    versions of the library).
    """
    none = [-1] * len(everyone)
    if asked == CPU:
        return Chosen(CPU, none, "asked for")
    if asked != "auto":
        return Chosen(asked, _devices(asked, everyone, hosts, names, tls), "asked for")
    reasons = []
    for name in NAMES:
        try:
            return Chosen(name, _devices(name, everyone, hosts, names, tls), "every rank has a device of its own")
        except Error as error:
            reasons.append(str(error))
    return Chosen(CPU, none, "; ".join(reasons))


def _devices(name: str, everyone: Sequence[Facts], hosts: Sequence[int], names: Sequence[str], tls: bool) -> list[int]:
    """Return the number of each rank's device. Raise the same errors as choose()."""
    if tls and len(set(hosts)) > 1 and not all(fact["plain_device"] for fact in everyone):
        raise BackendUnavailable(
            f"{name} cannot use TLS across hosts: its traffic is plain. If the network between the devices is trusted, "
            "set MSCOMM_ALLOW_PLAIN_DEVICE=1 on every rank"
        )
    told = [fact["accelerators"][name] for fact in everyone]
    missing = {rank: fact["missing"] for rank, fact in enumerate(told) if "missing" in fact}
    if missing:
        raise BackendUnavailable(_of_ranks(f"{name} cannot be used", missing, names))
    versions = {rank: f"{fact['version']} ({fact['path']})" for rank, fact in enumerate(told)}
    if len({fact["version"] for fact in told}) > 1:
        differing = [rank for rank, fact in enumerate(told) if fact["version"] != told[0]["version"]]
        words = _of_ranks(f"the ranks have different versions of {name}", versions, names)
        raise Mismatch(
            f"{words}. Install the same version on every host, or name its file in MSCOMM_{name.upper()}_LIBRARY",
            differing,
        )
    devices = [_device(rank, everyone, told[rank], hosts) for rank in range(len(told))]
    absent = {
        rank: f"device {device} of {len(told[rank]['devices'])}"
        for rank, device in enumerate(devices)
        if not 0 <= device < len(told[rank]["devices"])
    }
    if absent:
        raise BackendUnavailable(_of_ranks(f"{name}: there is no such device", absent, names))
    owners: dict[tuple[int, str, str], int] = {}
    for rank, device in enumerate(devices):
        uuid, kind = told[rank]["devices"][device]
        other = owners.setdefault((hosts[rank], uuid, told[rank]["shares"]), rank)
        if other != rank:
            raise BackendUnavailable(
                f"{name}: {names[other]} and {names[rank]} would share one device, {kind} ({uuid}). Start at most as"
                f' many ranks on a host as it has devices, or choose a different one for each rank: init("{name}", '
                "device=...)"
            )
    return devices


def _device(rank: int, everyone: Sequence[Facts], told: Facts, hosts: Sequence[int]) -> int:
    """Return the number of the device that the user chose for this rank.

    By default, return the rank's local rank modulo the number of devices that the rank sees. The modulo is for
    launchers that let each rank see only one device.
    """
    if (said := everyone[rank]["device"]) is not None:
        return int(said)
    place = everyone[rank]["local_rank"]
    if place is None:
        place = hosts[:rank].count(hosts[rank])
    return int(place) % max(1, len(told["devices"]))


def _of_ranks(what: str, words: Mapping[int, str], names: Sequence[str]) -> str:
    """Return an error message: `what`, and each rank's text from `words`. Equal texts appear only once."""
    alike: dict[str, list[int]] = {}
    for rank, text in words.items():
        alike.setdefault(text, []).append(rank)
    parts = []
    for text, ranks in alike.items():
        them = ", ".join(names[rank] for rank in ranks[:4])
        more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
        who = f"all {len(names)} ranks" if 1 < len(ranks) == len(names) else f"{them}{more}"
        parts.append(f"on {who}: {text}")
    return f"{what}, {'; '.join(parts)}"
