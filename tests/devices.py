"""Tests on ranks with one device each. The stand-ins in tests/fakes replace the vendor libraries.

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
NCCL = "nccl-22809"  # the stand-in for tests that do not choose a version of NCCL

before_joining.append(lambda: library.register(os.environ.get("FAKE_BACKEND", "nccl")))


@functools.cache
def built() -> dict[str, str]:
    return {name: str(path) for name, path in build().items()}


def variables(backend: str = "nccl", library: str = "", **more: str) -> dict[str, str]:
    """Return the variables that make a process load the stand-ins instead of the vendor libraries.

    library: the stand-in to load for the collectives.
    """
    # The device runs each operation 50 µs late. Code that does not wait for the device then reads old values.
    own = {"FAKE_BACKEND": backend, "FAKE_DELAY_US": "50"}
    if backend == "nccl":
        own |= {"MSCOMM_CUDA_LIBRARY": built()["cuda"], "FAKE_CUDA_LIBRARY": built()["cuda"]}
        own["MSCOMM_NCCL_LIBRARY"] = built()[library or NCCL]
    else:
        own |= {"MSCOMM_ACL_LIBRARY": built()["acl"], "FAKE_CUDA_LIBRARY": built()["acl"]}
        own["MSCOMM_HCCL_LIBRARY"] = built()[library or "hccl"]
    return {**own, **more}


def devices(n: int | str, env: dict[str, str] | Callable[..., dict[str, str]] | None = None, **options: Any) -> Any:
    """Decorate a test as @ranks does. init() is called with the test's parameter `backend`, or with "nccl" if the test
    has no such parameter.

    env: variables in addition to those that the stand-ins need. LIBRARY in env names the stand-in for the collectives.
    """

    def whole(rank: int, backend: str = "nccl", **parameters: Any) -> dict[str, str]:
        own = env(rank=rank, **parameters) if callable(env) else env or {}
        filled = {name: value.format(rank=rank, **parameters) for name, value in own.items()}
        return {**variables(backend, filled.pop("LIBRARY", "")), **filled}

    def init(backend: str = "nccl", **_: Any) -> dict[str, Any]:
        return {"backend_name": backend}

    return ranks(n, env=whole, **{"init": init, **options})


# -- kernels, which the stand-in for the CUDA driver runs on the CPU

# Two driver functions can load kernels. For each function, LOADED has the variables that make mscomm use the function.
# For each case in which no kernels can be loaded, WITHOUT has the reason that mscomm must report.
LOADED = {"library": {"FAKE_CUDA_VERSION": "13000"}, "module": {"FAKE_CUDA_VERSION": "11080"}}
WITHOUT = {
    "no image": "none, this mscomm was built without nvcc",
    "refused": "none, cuLibraryLoadData: CUDA_ERROR_NO_BINARY_FOR_GPU (209), no kernel image is available",
    "refused module": "none, cuModuleLoadData: CUDA_ERROR_NO_BINARY_FOR_GPU (209), no kernel image is available",
}


def kernel_variables(rank: int, how: str, **_: Any) -> dict[str, str]:
    """Return the variables that make the driver load or refuse the kernels. `how` is a key of LOADED or WITHOUT."""
    if how in LOADED:
        return {"FAKE_CUDA_KERNELS": str(build_kernels()), **LOADED[how]}
    return {"FAKE_CUDA_VERSION": "11080"} if how == "refused module" else {}


def load_kernels(how: str) -> None:
    """Let init() load the image with the kernels, or an empty image if `how` is "no image". The caller must not have
    called init() yet, and its process must have been started with the variables of kernel_variables().
    """
    image = b"" if how == "no image" else _core.embedded_image()[0] or IMAGE
    _core.open_cuda = functools.partial(_core.open_cuda, image=image)


def launches() -> int:
    return int(counters().get("launches", 0))


# -- arrays


def on_device(x: Any) -> DeviceArray:
    """Return a copy of x on this rank's device."""
    return DeviceArray.from_numpy(np.asarray(x), device=int(os.environ["MSCOMM_RANK"]))


def handles() -> dict[str, int]:
    """Return the number of device objects of each kind that this process holds."""
    told = counters()
    return {name: told[name] for name in ("streams", "events", "comms", "allocations")}


def violations() -> list[str]:
    """Return a text for each call in which this process broke a rule of the vendor libraries."""
    return list(counters()["texts"])
