"""mscomm: collective communication and data-parallel training for Python.

>>> import numpy as np, mscomm
>>> mscomm.init()
>>> mscomm.all_reduce(np.ones(3))
array([1., 1., 1.])

A submodule is imported only when one of its names is first used, so `import mscomm`, the command line and the scheduler
start fast. Type checkers cannot follow such imports. They read the names from __init__.pyi.
"""

from __future__ import annotations

import importlib
from typing import Any

from mscomm.version import VERSION

__version__ = VERSION

_WHERE = {
    "errors": (
        "Error",
        "PeerLost",
        "CollectiveTimeout",
        "Mismatch",
        "BackendUnavailable",
        "AuthenticationError",
        "Aborted",
    ),
    "group": ("Group", "Work"),
    "job": (
        "abort",
        "get_backend",
        "get_group_rank_from_world_rank",
        "get_group_size",
        "get_launcher",
        "get_local_rank",
        "get_local_rank_size",
        "get_process_group_ranks",
        "get_rank",
        "get_world_rank_from_group_rank",
        "get_world_size",
        "init",
        "is_initialized",
        "rejoin",
        "release",
    ),
    "subgroups": ("create_group", "destroy_group", "shrink", "split"),
    "collectives": (
        "all_gather",
        "all_gather_v",
        "all_reduce",
        "all_reduce_",
        "all_reduce_many",
        "all_to_all",
        "all_to_all_v",
        "barrier",
        "broadcast",
        "broadcast_",
        "empty",
        "exscan",
        "gather",
        "gather_v",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_v",
        "scan",
        "scatter",
        "scatter_v",
        "zeros",
    ),
    "launching.function": ("launch",),
    "messages": ("ANY_SOURCE", "ANY_TAG", "Status", "recv", "send", "sendrecv"),
    "objects": (
        "all_gather_object",
        "broadcast_object",
        "gather_object",
        "recv_object",
        "register_object",
        "scatter_object",
        "send_object",
    ),
    "dtype": (
        "bool_",
        "complex64",
        "complex128",
        "float16",
        "float32",
        "float64",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
    ),
    "context": (
        "GRAPH_MODE",
        "PYNATIVE_MODE",
        "ParallelMode",
        "get_auto_parallel_context",
        "get_context",
        "reset_auto_parallel_context",
        "set_auto_parallel_context",
        "set_context",
        "set_ps_context",
    ),
    "train": (
        "Callback",
        "CheckpointConfig",
        "DistributedDataParallel",
        "LossMonitor",
        "Model",
        "ModelCheckpoint",
        "TimeMonitor",
        "load_checkpoint",
        "load_param_into_net",
        "save_checkpoint",
    ),
}
# Submodules that can be used after a bare `import mscomm`, as in MindSpore.
_MODULES = ("common", "communication", "context", "dataset", "dtype", "ops", "train")
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}

_NEEDS_TORCH = {"DistributedDataParallel"}  # omitted from `from mscomm import *`, which must work without torch

__all__ = ["__version__", *sorted(_MODULE_OF.keys() - _NEEDS_TORCH)]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"mscomm.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'mscomm' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"mscomm.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *_MODULES, *_MODULE_OF]
