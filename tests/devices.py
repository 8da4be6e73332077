"""Ranks with one device each, over the stand-ins of tests/fakes: the environment of such a job, and its arrays.

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
import pytest
from fakes import library
from fakes.build import build
from fakes.device_array import DeviceArray, counters
from fakes.kernels import IMAGE, build_kernels
from ranks import before_joining, ranks

from mscomm import _core

BACKENDS = ("nccl", "hccl")
each_backend = pytest.mark.parametrize("backend", BACKENDS)
NCCL = "nccl-22809"  # the version for tests that name none

before_joining.append(lambda: library.register(os.environ.get("FAKE_BACKEND", "nccl")))


@functools.cache
def built() -> dict[str, str]:
    return {name: str(path) for name, path in build().items()}


def variables(backend: str = "nccl", library: str = "", **more: str) -> dict[str, str]:
    """The variables with which a process loads the stand-ins instead of the vendor's libraries.

    library: load this one for the collectives.
    """
    # A short delay of the device, so that code that does not wait for it reads old values.
    own = {"FAKE_BACKEND": backend, "FAKE_DELAY_US": "50"}
    if backend == "nccl":
        own |= {"MSCOMM_CUDA_LIBRARY": built()["cuda"], "FAKE_CUDA_LIBRARY": built()["cuda"]}
        own["MSCOMM_NCCL_LIBRARY"] = built()[library or NCCL]
    else:
        own |= {"MSCOMM_ACL_LIBRARY": built()["acl"], "FAKE_CUDA_LIBRARY": built()["acl"]}
        own["MSCOMM_HCCL_LIBRARY"] = built()[library or "hccl"]
    return {**own, **more}


def devices(n: int | str, env: dict[str, str] | Callable[..., dict[str, str]] | None = None, **options: Any) -> Any:
    """Like @ranks, with init() for "nccl" or for the test's parameter `backend`.

    env: variables besides those that the stand-ins need; its LIBRARY is the library for the collectives.
    """

    def whole(rank: int, backend: str = "nccl", **parameters: Any) -> dict[str, str]:
        own = env(rank=rank, **parameters) if callable(env) else env or {}
        filled = {name: value.format(rank=rank, **parameters) for name, value in own.items()}
        return {**variables(backend, filled.pop("LIBRARY", "")), **filled}

    def init(backend: str = "nccl", **_: Any) -> dict[str, Any]:
        return {"backend_name": backend}

    return ranks(n, env=whole, **{"init": init, **options})


# -- kernels, which the stand-in for the CUDA driver runs on the CPU

# What a process has: kernels, loaded in either of the two ways, or no kernels.
LOADED = {"library": {"FAKE_CUDA_VERSION": "13000"}, "module": {"FAKE_CUDA_VERSION": "11080"}}
WITHOUT = {
    "no image": "none, this mscomm was built without nvcc",
    "refused": "none, cuLibraryLoadData: CUDA_ERROR_NO_BINARY_FOR_GPU (209), no kernel image is available",
    "refused module": "none, cuModuleLoadData: CUDA_ERROR_NO_BINARY_FOR_GPU (209), no kernel image is available",
}


def kernel_variables(rank: int, how: str, **_: Any) -> dict[str, str]:
    """The variables with which the driver has, or refuses, kernels in this way."""
    if how in LOADED:
        return {"FAKE_CUDA_KERNELS": str(build_kernels()), **LOADED[how]}
    return {"FAKE_CUDA_VERSION": "11080"} if how == "refused module" else {}


def load_kernels(how: str) -> None:
    """Make init() load the kernels. Call it before init(), in a process with those variables."""
    image = b"" if how == "no image" else _core.embedded_image()[0] or IMAGE
    _core.open_cuda = functools.partial(_core.open_cuda, image=image)


def launches() -> int:
    return int(counters().get("launches", 0))


# -- arrays


def on_device(x: Any) -> DeviceArray:
    """A copy of x on this rank's device."""
    return DeviceArray.from_numpy(np.asarray(x), device=int(os.environ["MSCOMM_RANK"]))


def handles() -> dict[str, int]:
    """The number of device objects of each kind that this process holds."""
    told = counters()
    return {name: told[name] for name in ("streams", "events", "comms", "allocations")}


def violations() -> list[str]:
    """The uses that the stand-ins have seen and that the vendor's libraries do not allow."""
    return list(counters()["texts"])
