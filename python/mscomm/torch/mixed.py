"""mscomm as one of several backends of a process group, as in "cpu:mscomm,cuda:nccl".

The process group is then torch's own. It passes each call to the backend of the tensors' device, through torch's
dispatcher, which takes about 15 us. So a process group that has only the backend mscomm does without this, unless
torch is to look for NaN in its tensors, which torch does in the dispatcher.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend as _TorchBackend

from mscomm.torch.process_group import ProcessGroup
from mscomm.torch.works import uncompiled

_CALLS = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier", "send", "recv", "recv_anysource"),
    *("allgather", "allgather_coalesced", "all_gather_single", "all_gather_single_coalesced", "gather", "scatter"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced", "all_to_all_single", "alltoall"),
    "set_timeout",
)
_in_use: set[Backend] = set()  # torch does not keep the Python part of a backend alive


class Backend(_TorchBackend):  # type: ignore[misc, unused-ignore]
    """The backend for tensors on the CPU. group: makes the calls."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group.getRank(), group.getSize())
        self.group = group
        _in_use.add(self)

    def getBackendName(self) -> str:
        return "mscomm"

    def allreduce_sparse(self, tensors: list[Any], opts: Any) -> Any:
        return self.group.allreduce(tensors, opts)

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        self.group.monitored_barrier(opts.timeout, wait_all_ranks)

    def abort(self) -> None:
        _in_use.discard(self)
        self.group.abort()

    def shutdown(self) -> None:
        _in_use.discard(self)
        self.group.shutdown()


def _passed_on(name: str) -> Any:
    method = getattr(ProcessGroup, name)

    @functools.wraps(method)
    def passed_on(self: Backend, *given: Any) -> Any:
        return method(self.group, *given)

    return passed_on


for _name in _CALLS:
    setattr(Backend, _name, _passed_on(_name))
uncompiled(*vars(Backend).values())


def part_of_mixed(group: ProcessGroup) -> ProcessGroup | Backend:
    """Return the Backend of the group if calls are to pass torch's dispatcher, or else the group.

    Before 2.14.1, torch has no backends in Python. It then takes the group for the whole process group, so this warns.
    """
    names = _names_in_creation()
    mixed = len(set(names.values())) > 1
    if not mixed and os.environ.get("TORCH_DIST_NAN_CHECK") != "1":
        return group
    try:
        return Backend(group)
    except TypeError:  # No constructor defined
        if not mixed:  # this torch does not know the variable, either
            return group
        text = ",".join(f"{device}:{name}" for device, name in names.items())
        warnings.warn(
            f'mscomm: "{text}": PyTorch {torch.__version__} creates no backend beside mscomm; PyTorch 2.14.1 and later'
            ' do. For tensors on another device, make another process group, with new_group(backend="...")',
            stacklevel=2,
        )
        return group


def _names_in_creation() -> dict[str, str]:
    """Return the backend for each device of the process group that torch is creating.

    Torch does not tell this to a backend, so this reads a local variable of torch's function that calls us.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        config = frame.f_locals.get("backend_config")
        if isinstance(config, dist.distributed_c10d.BackendConfig):
            return dict(config.get_device_backend_map())
        frame = frame.f_back
    return {}
