"""Device arrays with DLPack's methods (`__dlpack__`, `__dlpack_device__`) from libraries without a module of their own.

Calls are enqueued on the legacy default stream; `__dlpack__` makes the array ready for use on that stream. mscomm
cannot create such arrays, so `out` must be passed.
"""

from __future__ import annotations

from typing import Any

from mscomm import _core
from mscomm.arrays.device import OnDevice, on_device
from mscomm.arrays.foreign import assign, from_host, new, on_host, packed
from mscomm.arrays.numpy import DTYPES, described_dtype

__all__ = ["assign", "from_host", "is_array", "memory", "new", "on_host", "packed"]

# DLPack's number for a type of device -> the backend that can access memory on such devices.
_BACKENDS = {2: "nccl", 13: "nccl", 12: "hccl"}  # kDLCUDA, kDLCUDAManaged, and kDLExtDev, which torch_npu uses
_LEGACY_DEFAULT_STREAM = 1


def is_array(x: Any) -> bool:
    if not (hasattr(type(x), "__dlpack__") and hasattr(type(x), "__dlpack_device__")):
        return False
    return int(x.__dlpack_device__()[0]) in _BACKENDS


def memory(x: Any) -> OnDevice:
    kind = int(x.__dlpack_device__()[0])
    stream = _LEGACY_DEFAULT_STREAM if kind != 12 else None
    try:
        capsule = x.__dlpack__(stream=stream, max_version=(1, 0))
    except TypeError:  # the library is older than DLPack 1.0, and does not know max_version
        capsule = x.__dlpack__(stream=stream)
    try:
        address, shape, strides, dtype, _, index, read_only = _core.describe_dlpack(capsule)
    except ValueError as error:
        raise TypeError(f"cannot be reached by DLPack: {error}") from None
    return on_device(
        (x, capsule),
        address,
        shape,
        described_dtype(DTYPES.index(dtype)),
        strides,
        index,
        lambda: stream or 0,
        backend=_BACKENDS[kind],
        writable=not read_only,
    )
