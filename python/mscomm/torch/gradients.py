"""ddp_hook: mscomm averages the gradients of torch.nn.parallel.DistributedDataParallel."""

# Without `from __future__ import annotations`, because torch compares the annotations of a hook with its own classes.

import contextlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mscomm
from mscomm.job import resolve
from mscomm.torch.process_group import group as group_of
from mscomm.torch.process_group import on_cpu, shared_memory
from mscomm.torch.works import Pending, uncompiled

Hook = Callable[[mscomm.Group, dist.GradBucket], torch.futures.Future[torch.Tensor]]


def ddp_hook(
    model: DistributedDataParallel, group: mscomm.Group | dist.ProcessGroup | str | None = None
) -> tuple[mscomm.Group, Hook]:
    """Return the arguments of register_comm_hook with which mscomm averages the gradients of the model.

    The gradients are reduced while the backward pass runs. From PyTorch 2.13 on, the hook puts the buckets into memory
    that the ranks of a host share, so that all_reduce need not copy them. If all_reduce fails, backward() raises a
    RuntimeError; if a rank was lost, the error names it.

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
    if group is None and on_cpu(model.process_group) is not None:
        group = model.process_group
    found = group_of(group) if isinstance(group, dist.ProcessGroup) else resolve(group)
    expected = dist.get_process_group_ranks(model.process_group)
    ranks = mscomm.all_gather(torch.tensor([dist.get_rank()]), group=found).tolist()
    if ranks != expected:
        raise ValueError(
            f"ddp_hook: the model averages over torch's ranks {expected}, but the group {found.name!r} of mscomm"
            f" consists of torch's ranks {ranks}; pass a group with the same ranks in the same order"
        )
    return found, _averaging()


def _averaging() -> Hook:
    """Return the hook of one model."""
    before: torch.futures.Future[torch.Tensor] | None = None  # that of the bucket before, in the same backward pass

    def averaged(state: mscomm.Group, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        nonlocal before
        resolve(state)  # raises the error of a group that cannot be used
        buffer = bucket.buffer()
        _share(buffer, state)
        work = Pending([buffer], [mscomm.all_reduce_(buffer, "avg", group=state, async_op=True)])
        here = bucket.is_last() and _ends_here(work, before)
        future = work.get_future(hurry=not here).then(lambda done: done.value()[0])
        before = None if bucket.is_last() else future
        return future

    uncompiled(averaged)
    return averaged


def _ends_here(work: Pending, before: torch.futures.Future[torch.Tensor] | None) -> bool:
    """Let this thread wait for the Work at the end of the backward pass, just before DistributedDataParallel does.

    The thread then carries out the call itself and completes its future, which takes less time than to wake two other
    threads. But the future before must be complete, because the futures are completed in order. Return False outside a
    backward pass: join() calls the hook there.
    """

    def end() -> None:
        with contextlib.suppress(Exception):  # the future raises it
            work.wait()
        if before is None or before.done():
            work.complete()

    try:
        torch.autograd.Variable._execution_engine.queue_callback(end)
    except RuntimeError:
        return False
    return True


def _share(bucket: torch.Tensor, group: mscomm.Group) -> None:
    """Move a bucket into memory that the ranks of this host share, unless it is there.

    Its storage gets the new memory, so gradients that are views of the bucket move with it. PyTorch makes a storage
    non-resizable if a NumPy array uses its memory, which must then stay. After the move, it is non-resizable, too.
    """
    if bucket.layout is not torch.strided or group.hosts.count(group.hosts[group.rank]) == 1:
        return
    storage = bucket.untyped_storage()
    if not (storage.resizable() and hasattr(storage, "_swap_data_ptr_")) or storage.is_shared():  # from PyTorch 2.13 on
        return
    with contextlib.suppress(MemoryError):  # the bucket then stays in private memory
        memory = shared_memory(group, storage.nbytes())
        if memory is not None:
            memory.untyped_storage().copy_(storage)
            storage._swap_data_ptr_(memory.untyped_storage())


uncompiled(_ends_here, _share)
