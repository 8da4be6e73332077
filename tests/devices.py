"""Ranks with a device each, over the stand-ins of tests/fakes: the environment of such a job, and its arrays.

@devices(2)
def test_sum(rank, group):
    assert (mscomm.all_reduce(on_device(np.float32([rank]))).to_numpy() == 1).all()
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from fakes import library
from fakes.build import build
from fakes.device_array import DeviceArray, counters
from ranks import ranks

NCCL = "nccl-22809"  # the version that is taken where a test does not say

if "MSCOMM_RANK" in os.environ:  # in a rank's process
    library.register()


@functools.cache
def built() -> dict[str, str]:
    return {name: str(path) for name, path in build().items()}


def variables(nccl: str = NCCL, **more: str) -> dict[str, str]:
    """With which a process takes the stand-ins for the vendor's libraries."""
    cuda = built()["cuda"]
    # A plain delay of the device, so that who does not wait for it reads old values, and few such waits.
    known = {"MSCOMM_CUDA_LIBRARY": cuda, "FAKE_CUDA_LIBRARY": cuda, "MSCOMM_NCCL_LIBRARY": built()[nccl]}
    return {**known, "FAKE_DELAY_US": "50", **more}


def devices(n: int | str, env: dict[str, str] | Callable[..., dict[str, str]] | None = None, **options: Any) -> Any:
    """As @ranks, after init("nccl"). env: beside what the stand-ins need, of which it may set another."""

    def whole(rank: int, **parameters: Any) -> dict[str, str]:
        own = env(rank=rank, **parameters) if callable(env) else env or {}
        filled = {name: value.format(rank=rank, **parameters) for name, value in own.items()}
        return {**variables(filled.pop("NCCL", NCCL)), **filled}

    return ranks(n, env=whole, **{"init": {"backend_name": "nccl"}, **options})


def on_device(x: Any) -> DeviceArray:
    """On this rank's device."""
    return DeviceArray.from_numpy(np.asarray(x), device=int(os.environ["MSCOMM_RANK"]))


def handles() -> dict[str, int]:
    """What this process holds of the device."""
    told = counters()
    return {name: told[name] for name in ("streams", "events", "comms", "allocations")}


def violations() -> list[str]:
    """What the stand-ins have seen that the vendor's libraries do not allow."""
    return list(counters()["texts"])
