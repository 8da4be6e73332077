"""DistributedDataParallel: a wrapper that replaces PyTorch's wrapper of the same name, and uses GradientReducer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch

from mscomm import collectives, log
from mscomm.group import Group
from mscomm.job import resolve
from mscomm.train import join, trees
from mscomm.train.autograd import Autograd
from mscomm.train.reducer import GradientReducer
from mscomm.train.step import FORWARD, LEFT, Step

PREFIX = "module."


class DistributedDataParallel(torch.nn.Module):  # type: ignore[misc]
    """Wraps a module that all ranks train together. backward() also averages the gradients over the ranks.

    The names and rules are those of torch.nn.parallel.DistributedDataParallel, so only two lines of a script change:
    the line that joins the job, and the import of the wrapper. Clipping, GradScaler and optimizer.step() come after
    backward(), as with PyTorch's wrapper. If the reduction fails, backward() raises the error.

    >>> mscomm.init()
    >>> model = mscomm.DistributedDataParallel(module)
    >>> for images, labels in batches:
    ...     optimizer.zero_grad()
    ...     loss_fn(model(images), labels).backward()
    ...     torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    ...     optimizer.step()

    device_ids: None, or a list with the module's GPU. If it is a list, the forward pass moves its arguments to that
    GPU. output_device: None, or the module's GPU. broadcast_buffers: unless this is False, all ranks receive rank 0's
    buffers (such as BatchNorm's running means) when the module is wrapped and before each forward pass, except a pass
    that directly follows a pass inside no_sync() or torch.no_grad(). forward_sync_buffers: if given, it replaces
    broadcast_buffers for the forward passes; the buffers are still sent when the module is wrapped. init_sync: if True,
    all ranks receive rank 0's parameters when the module is wrapped. If False, neither parameters nor buffers are sent
    at that time: the ranks only compare their parameters, and all ranks raise ValueError if the parameters differ.
    process_group: an mscomm Group or its name; None means all ranks. bucket_cap_mb: the size of a bucket in MiB
    (default 4). gradient_as_bucket_view: if True, the gradients stay in the buckets. This saves two copies, but the
    next step overwrites gradient tensors that the program has kept. find_unused_parameters: no effect, because a
    parameter that is not used in a step is never an error. If only some ranks use a parameter in a step, all ranks get
    its mean gradient, in which the other ranks count as zeros. static_graph: no effect; True prints a warning.
    compression: as in GradientReducer.

    The gradients of a backward pass are reduced if the pass begins at an output of a forward pass that ran outside
    no_sync(). If a step has several such backward passes, the gradients of each are reduced. A forward pass under
    torch.no_grad() does not change which gradients are reduced, but the ranks may exchange buffers before it, so all
    ranks must run it. To evaluate on one rank only, call `.module`. Layers under torch.utils.checkpoint are supported;
    if two of these layers share parameters, they need use_reentrant=False.

    The wrapper reduces the gradients of the parameters that the module has when it is wrapped. The forward pass raises
    RuntimeError if a parameter that needs a gradient was later added or replaced, or if a frozen parameter was later
    unfrozen. It also raises RuntimeError if a later wrapper or reducer has taken over a parameter. The parameters and
    buffers that are named in module._ddp_params_and_buffers_to_ignore are not shared: each rank keeps its own values.
    SyncBatchNorm layers need torch.distributed. If the module contains such a layer and torch.distributed is not
    initialized, the constructor raises ValueError. The other errors are those of GradientReducer.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        *,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Group | str | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        forward_sync_buffers: bool | None = None,
        compression: str | None = None,
    ) -> None:
        super().__init__()
        self._group = resolve(process_group)
        self._device = _device(module, device_ids, output_device)
        _check_layers(module)
        if static_graph and self._group.rank == 0:
            log.warn("DistributedDataParallel: static_graph has no effect: nothing depends on the graph here")
        first = broadcast_buffers is not False or forward_sync_buffers is not None
        self.broadcast_buffers = (
            broadcast_buffers is not False if forward_sync_buffers is None else bool(forward_sync_buffers)
        )
        self.find_unused_parameters = bool(find_unused_parameters)
        self.gradient_as_bucket_view = bool(gradient_as_bucket_view)
        self.module = module
        self._ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._reducer = GradientReducer(
            dict(self._shared_parameters()),
            bucket_mb=bucket_cap_mb,
            compression=compression,
            parameter_broadcast=bool(init_sync),
            group=self._group,
        )
        if init_sync and first and self._group.size > 1:
            join.broadcast_all(self._shared_buffers(), 0, self._group)
        self._autograd: Autograd = self._reducer._autograd
        self._step: Step = self._reducer._step
        self._autograd.finish_within(self.gradient_as_bucket_view)
        self._frozen = [(name, p) for name, p in self._shared_parameters() if not p.requires_grad]
        self._known = {id(p) for _, p in self._shared_parameters()}
        self._places = _places(module)
        self._syncing = True  # False inside no_sync()
        self._buffers_due = True
        self._refuses_uneven = False  # True inside join(throw_on_early_termination=True)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass."""
        # Whether this runs inside a backward pass, in which torch.utils.checkpoint recomputes layers.
        again = torch._C._current_graph_task_id() != -1
        if not again:
            self._autograd.check_before_forward()
        if torch.is_grad_enabled() and self._syncing:
            self._autograd.check_not_taken_over()
            self._check_parameters()
        if not again:
            self._before_forward()
        if self._device is not None:
            inputs, kwargs = _moved(inputs, self._device), _moved(kwargs, self._device)
        output = self.module(*inputs, **kwargs)
        if torch.is_grad_enabled() and self._syncing:
            self._autograd.expect(output)
            self._buffers_due = True
        elif not again:
            self._buffers_due = False
            if torch.is_grad_enabled():
                self._autograd.expect_nothing()
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context for forward passes whose gradients stay on this rank until a later backward pass reduces
        them.

        >>> with model.no_sync():
        ...     for images, labels in micro_batches[:-1]:
        ...         loss_fn(model(images), labels).backward()
        >>> loss_fn(model(*micro_batches[-1]), ...).backward()          # reduces the gradients of all micro-batches
        """
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    @contextlib.contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        sync: Iterable[Any] | None = None,
    ) -> Iterator[None]:
        """Return a context for training loops in which some ranks have fewer steps than others. A rank that has run out
        of batches sends zeros until no rank has batches left.

        At the end, all ranks receive the parameters of the last rank. This is the rank that ran out of batches last, or
        the highest such rank if there are several. With broadcast_buffers, all ranks also receive the last rank's
        buffers. sync: further objects whose state all ranks receive from the last rank, such as [optimizer, scheduler].
        Without sync, a rank that ran out early keeps the older state of these objects. divide_by_initial_world_size: if
        True, the mean is taken over all ranks; if False, over the ranks that still have batches. enable: if False,
        join() does nothing. throw_on_early_termination: if True, all ranks raise RuntimeError as soon as one rank has
        no batches left.

        The loop itself must make no calls on the group. Inside join(), the highest rank that still has batches sends
        its buffers before a forward pass, instead of rank 0. If one rank's loop raises an exception, the other ranks
        raise Aborted.

        >>> with model.join(sync=[optimizer]):
        ...     for images, labels in batches:
        ...         ...
        """
        if not enable:
            yield
            return
        given = join.checked(sync)

        def at_end(root: int, uneven: bool) -> None:
            buffers = self._shared_buffers() if self.broadcast_buffers else []
            join.broadcast_all([*self._shared_parameters(), *buffers], root, self._group)
            if uneven and root == self._group.rank:
                self._autograd.warn_of_optimizers(given)

        self._refuses_uneven = bool(throw_on_early_termination)
        try:
            with join.join(
                self._step,
                self._group,
                given,
                by_all=bool(divide_by_initial_world_size),
                on_forward=self._exchange_buffers,
                at_end=at_end,
                throw=self._refuses_uneven,
            ):
                yield
        finally:
            self._refuses_uneven = False
            self._buffers_due = True  # the same value on all ranks, so that all ranks make the same calls

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state as torch.nn.Module does. The names in state_dict may have the prefix "module.", but need not.

        Raise ValueError if assign is True, because this would replace the parameters.
        """
        if assign:
            raise ValueError(
                "DistributedDataParallel.load_state_dict: assign=True replaces the parameters; load into the module"
                " before it is wrapped"
            )
        if not any(PREFIX + name in state_dict for name in self.module.state_dict()):
            return self.module.load_state_dict(state_dict, strict)
        return super().load_state_dict(state_dict, strict)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "DistributedDataParallel holds this job's memory; copy or save its .module, or its state_dict()"
        )

    # -- parameters and buffers that the ranks share

    def _shared_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(name, p) for name, p in self.module.named_parameters() if name not in self._ignored]

    def _shared_buffers(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, x) for name, x in self.module.named_buffers() if name not in self._ignored]

    def _check_parameters(self) -> None:
        for name, p in self._frozen:
            if p.requires_grad:
                raise RuntimeError(
                    f"DistributedDataParallel: {name} needs a gradient, but needed none when the module was wrapped;"
                    " wrap it again on every rank after requires_grad has changed"
                )
        if all(there.get(last) is what for there, last, what in self._places):
            return
        for name, p in self._shared_parameters():
            if p.requires_grad and id(p) not in self._known:
                raise RuntimeError(
                    f"DistributedDataParallel: {name} was added or replaced after the module was wrapped; change the"
                    " module first, and then wrap it on every rank"
                )
        self._places = _places(self.module)  # no parameter is new, but a layer may have been renamed

    def _before_forward(self) -> None:
        """Exchange the buffers before a forward pass, if they are due. Inside join(), this may raise OutOfBatches."""
        if self._group.size == 1:
            return
        due = self._buffers_due and self.broadcast_buffers and bool(self._shared_buffers())
        if not (due or self._refuses_uneven):
            return
        root = 0
        if self._step.joining:
            kinds = self._step.meet(FORWARD)
            if self._refuses_uneven and LEFT in kinds:
                raise join.OutOfBatches(
                    f"join: rank {self._group.rank} of the group has batches left, but rank"
                    f" {kinds.tolist().index(LEFT)} has none"
                )
            root = join.last_rank(kinds)
        if due:
            self._exchange_buffers(root)

    def _exchange_buffers(self, root: int) -> None:
        """Broadcast the buffers of rank root, in one call for each dtype and device."""
        kinds: dict[Any, list[torch.Tensor]] = {}
        for _, buffer in self._shared_buffers():
            kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer.detach())
        for buffers in kinds.values():
            together = torch.cat([buffer.reshape(-1) for buffer in buffers])
            collectives.broadcast(together, root, out=together, group=self._group)
            if root != self._group.rank:
                for buffer, part in zip(buffers, together.split([one.numel() for one in buffers]), strict=True):
                    # Write through .data, which autograd does not track. Otherwise a second forward pass would make the
                    # backward pass of the first forward pass fail.
                    buffer.data.copy_(part.view(buffer.shape))


def _device(module: torch.nn.Module, device_ids: Any, output_device: Any) -> torch.device | None:
    """Return the device to which forward() moves its arguments, or None.

    Raise ValueError unless each given argument names the one GPU that the module is on.
    """
    devices = sorted({str(p.device) for p in module.parameters()})
    given = [] if device_ids is None else list(device_ids)
    for argument, ones in (("device_ids", given), ("output_device", [] if output_device is None else [output_device])):
        for one in ones:
            device = torch.device("cuda", one) if isinstance(one, int) else torch.device(one)
            if len(ones) > 1 or devices != [str(device)] or device.type == "cpu":
                raise ValueError(
                    f"DistributedDataParallel: {argument} has {one}, but the module is on {', '.join(devices)}; give"
                    " None, or the one GPU on which it is"
                )
    return torch.device(devices[0]) if given else None


def _moved(x: Any, device: torch.device) -> Any:
    """Return x with all its tensors moved to that device, including those in lists, tuples and dicts."""
    return trees.mapped(x, lambda one: one.to(device, non_blocking=True) if isinstance(one, torch.Tensor) else one)


def _check_layers(module: torch.nn.Module) -> None:
    """Raise ValueError for layers that this wrapper cannot train. Call this before anything is sent."""
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.SyncBatchNorm) and not torch.distributed.is_initialized():
            raise ValueError(
                f"DistributedDataParallel: {name or 'the module'} is a SyncBatchNorm, which needs torch.distributed to"
                " combine its statistics; without it, each rank would have its own; use BatchNorm"
            )
    for name, p in module.named_parameters():
        if isinstance(p, torch.nn.parameter.UninitializedParameter):
            raise ValueError(f"DistributedDataParallel: {name} has no shape yet; run one forward pass before")
        if hasattr(p, "_in_backward_optimizers"):
            raise ValueError(
                f"DistributedDataParallel: {name} is stepped by an optimizer inside the backward pass, before gradients"
                " are reduced; step after backward()"
            )


def _places(module: torch.nn.Module) -> list[tuple[dict[str, Any], str, Any]]:
    """Return a list of (dict, key, value), with one entry for each parameter in the module and one for each layer that
    has parameters."""
    places: list[tuple[dict[str, Any], str, Any]] = []
    for layer in module.modules():
        places += [(layer._parameters, last, p) for last, p in layer._parameters.items() if p is not None]
        places += [
            (layer._modules, last, child)
            for last, child in layer._modules.items()
            if child is not None and any(True for _ in child.parameters())
        ]
    return places
