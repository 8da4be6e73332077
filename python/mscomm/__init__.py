"""mscomm: collective communication and data-parallel training for Python.

>>> import numpy as np, mscomm
>>> mscomm.init()
>>> mscomm.all_reduce(np.ones(3))
array([1., 1., 1.])

Names are imported at first use, so that `import mscomm`, the command line and the scheduler stay light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

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
    "groups": (
        "abort",
        "create_group",
        "destroy_group",
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
        "shrink",
        "split",
    ),
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
    "launching": ("launch",),
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
# After a bare `import mscomm` too, as in MindSpore.
_MODULES = ("common", "communication", "context", "dataset", "dtype", "ops", "train")
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}

_NEEDS_TORCH = {"DistributedDataParallel"}  # and so no part of `from mscomm import *`

__all__ = ["__version__", *sorted(_MODULE_OF.keys() - _NEEDS_TORCH)]  # noqa: PLE0604


if not TYPE_CHECKING:  # a type checker that saw it would take every misspelt name for Any

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


if TYPE_CHECKING:
    from mscomm.collectives import all_gather as all_gather
    from mscomm.collectives import all_gather_v as all_gather_v
    from mscomm.collectives import all_reduce as all_reduce
    from mscomm.collectives import all_reduce_ as all_reduce_
    from mscomm.collectives import all_reduce_many as all_reduce_many
    from mscomm.collectives import all_to_all as all_to_all
    from mscomm.collectives import all_to_all_v as all_to_all_v
    from mscomm.collectives import barrier as barrier
    from mscomm.collectives import broadcast as broadcast
    from mscomm.collectives import broadcast_ as broadcast_
    from mscomm.collectives import empty as empty
    from mscomm.collectives import exscan as exscan
    from mscomm.collectives import gather as gather
    from mscomm.collectives import gather_v as gather_v
    from mscomm.collectives import reduce as reduce
    from mscomm.collectives import reduce_scatter as reduce_scatter
    from mscomm.collectives import reduce_scatter_v as reduce_scatter_v
    from mscomm.collectives import scan as scan
    from mscomm.collectives import scatter as scatter
    from mscomm.collectives import scatter_v as scatter_v
    from mscomm.collectives import zeros as zeros
    from mscomm.context import GRAPH_MODE as GRAPH_MODE
    from mscomm.context import PYNATIVE_MODE as PYNATIVE_MODE
    from mscomm.context import ParallelMode as ParallelMode
    from mscomm.context import get_auto_parallel_context as get_auto_parallel_context
    from mscomm.context import get_context as get_context
    from mscomm.context import reset_auto_parallel_context as reset_auto_parallel_context
    from mscomm.context import set_auto_parallel_context as set_auto_parallel_context
    from mscomm.context import set_context as set_context
    from mscomm.context import set_ps_context as set_ps_context
    from mscomm.dtype import bool_ as bool_
    from mscomm.dtype import complex64 as complex64
    from mscomm.dtype import complex128 as complex128
    from mscomm.dtype import float16 as float16
    from mscomm.dtype import float32 as float32
    from mscomm.dtype import float64 as float64
    from mscomm.dtype import int8 as int8
    from mscomm.dtype import int16 as int16
    from mscomm.dtype import int32 as int32
    from mscomm.dtype import int64 as int64
    from mscomm.dtype import uint8 as uint8
    from mscomm.dtype import uint16 as uint16
    from mscomm.dtype import uint32 as uint32
    from mscomm.dtype import uint64 as uint64
    from mscomm.errors import Aborted as Aborted
    from mscomm.errors import AuthenticationError as AuthenticationError
    from mscomm.errors import BackendUnavailable as BackendUnavailable
    from mscomm.errors import CollectiveTimeout as CollectiveTimeout
    from mscomm.errors import Error as Error
    from mscomm.errors import Mismatch as Mismatch
    from mscomm.errors import PeerLost as PeerLost
    from mscomm.group import Group as Group
    from mscomm.group import Work as Work
    from mscomm.groups import abort as abort
    from mscomm.groups import create_group as create_group
    from mscomm.groups import destroy_group as destroy_group
    from mscomm.groups import get_backend as get_backend
    from mscomm.groups import get_group_rank_from_world_rank as get_group_rank_from_world_rank
    from mscomm.groups import get_group_size as get_group_size
    from mscomm.groups import get_launcher as get_launcher
    from mscomm.groups import get_local_rank as get_local_rank
    from mscomm.groups import get_local_rank_size as get_local_rank_size
    from mscomm.groups import get_process_group_ranks as get_process_group_ranks
    from mscomm.groups import get_rank as get_rank
    from mscomm.groups import get_world_rank_from_group_rank as get_world_rank_from_group_rank
    from mscomm.groups import get_world_size as get_world_size
    from mscomm.groups import init as init
    from mscomm.groups import is_initialized as is_initialized
    from mscomm.groups import rejoin as rejoin
    from mscomm.groups import release as release
    from mscomm.groups import shrink as shrink
    from mscomm.groups import split as split
    from mscomm.launching import launch as launch
    from mscomm.messages import ANY_SOURCE as ANY_SOURCE
    from mscomm.messages import ANY_TAG as ANY_TAG
    from mscomm.messages import Status as Status
    from mscomm.messages import recv as recv
    from mscomm.messages import send as send
    from mscomm.messages import sendrecv as sendrecv
    from mscomm.objects import all_gather_object as all_gather_object
    from mscomm.objects import broadcast_object as broadcast_object
    from mscomm.objects import gather_object as gather_object
    from mscomm.objects import recv_object as recv_object
    from mscomm.objects import register_object as register_object
    from mscomm.objects import scatter_object as scatter_object
    from mscomm.objects import send_object as send_object
    from mscomm.train import Callback as Callback
    from mscomm.train import CheckpointConfig as CheckpointConfig
    from mscomm.train import DistributedDataParallel as DistributedDataParallel
    from mscomm.train import LossMonitor as LossMonitor
    from mscomm.train import Model as Model
    from mscomm.train import ModelCheckpoint as ModelCheckpoint
    from mscomm.train import TimeMonitor as TimeMonitor
    from mscomm.train import load_checkpoint as load_checkpoint
    from mscomm.train import load_param_into_net as load_param_into_net
    from mscomm.train import save_checkpoint as save_checkpoint
