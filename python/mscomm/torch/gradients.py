"""ddp_hook: mscomm averages the gradients of torch.nn.parallel.DistributedDataParallel."""

# Without `from __future__ import annotations`, because torch compares the annotations of a hook with its own classes.

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mscomm
from mscomm.job import resolve
from mscomm.torch.process_group import ProcessGroup, shared_memory
from mscomm.torch.process_group import group as group_of
from mscomm.torch.works import Pending, timed_out, uncompiled

Hook = Callable[[mscomm.Group, dist.GradBucket], torch.futures.Future[torch.Tensor]]


def ddp_hook(
    model: DistributedDataParallel, group: mscomm.Group | dist.ProcessGroup | str | None = None
) -> tuple[mscomm.Group, Hook]:
    """Return the arguments of register_comm_hook with which mscomm averages the gradients of the model.

    The gradients are reduced while the backward pass runs. From PyTorch 2.13 on, the hook puts the buckets into memory
    that the ranks of a host share, so that all_reduce need not copy them. If all_reduce fails, backward() raises a
    RuntimeError; if a rank was lost, the error names it. It is PeerLost itself if all_reduce fails in the last bucket.

    The process group of the model may have the backend mscomm:

    >>> dist.init_process_group("mscomm")
    >>> model = torch.nn.parallel.DistributedDataParallel(module)
    >>> model.register_comm_hook(*mscomm.torch.ddp_hook(model))

    Or it may have another backend, which then sends everything else:

    >>> dist.init_process_group("gloo")
    >>> mscomm.init()

    model: the wrapped model, whose parameters are on the CPU. group: an mscomm Group or its name, or a process group of
    the backend mscomm. None means the model's process group if that has the backend mscomm, or else all ranks of the
    default job. All ranks of the group must call ddp_hook together, because it compares the group with the process
    group of the model.

    Raise TypeError if model is not a DistributedDataParallel. Raise ValueError if a parameter is not on the CPU, or if
    the group does not consist of the model's ranks in the same order. Raise RuntimeError if no job has been joined. If
    a rank is missing, raise the errors of mscomm.all_gather.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"ddp_hook: model is a {type(model).__name__}, expected a DistributedDataParallel of torch")
    for name, parameter in model.named_parameters():
        if parameter.device.type != "cpu":
            raise ValueError(f"ddp_hook: {name} is on {parameter.device}; the hook is for parameters on the CPU")
    if group is None and isinstance(model.process_group, ProcessGroup):
        group = model.process_group
    found = group_of(group) if isinstance(group, dist.ProcessGroup) else resolve(group)
    expected = dist.get_process_group_ranks(model.process_group)
    ranks = mscomm.all_gather(torch.tensor([dist.get_rank()]), group=found).tolist()
    if ranks != expected:
        raise ValueError(
            f"ddp_hook: the model averages over torch's ranks {expected}, but the group {found.name!r} of mscomm"
            f" consists of torch's ranks {ranks}; pass a group with the same ranks in the same order"
        )
    return found, _averaged


def _averaged(state: mscomm.Group, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients of a bucket over the group."""
    buffer = bucket.buffer()
    _share(buffer, state)
    if not bucket.is_last():
        part = mscomm.all_reduce_(buffer, "avg", group=state, async_op=True)
        return Pending([buffer], [part]).get_future().then(lambda done: done.value()[0])
    # Nothing is left to compute meanwhile, so this thread reduces the bucket. To hand it to another one takes longer.
    try:
        mscomm.all_reduce_(buffer, "avg", group=state)
    except mscomm.CollectiveTimeout as error:
        raise timed_out(error) from error
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


def _share(bucket: torch.Tensor, group: mscomm.Group) -> None:
    """Move a bucket into memory that the ranks of this host share, unless it is there.

    Its storage gets the new memory, so gradients that are views of the bucket move with it. PyTorch makes a storage
    non-resizable if a NumPy array uses its memory, which must then stay. After the move, it is non-resizable, too.
    """
    storage = bucket.untyped_storage()
    if not (storage.resizable() and hasattr(storage, "_swap_data_ptr_")):  # PyTorch has it from 2.13 on
        return
    memory = shared_memory(group, storage.nbytes())
    if memory is not None:
        memory.untyped_storage().copy_(storage)
        storage._swap_data_ptr_(memory.untyped_storage())


uncompiled(_averaged, _share)
