"""GradientReducer: averages the ranks' gradients, bucket by bucket, while the backward pass is still running."""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import numpy as np

from mscomm import log, objects
from mscomm.arrays import library, values
from mscomm.arrays.device import OnDevice
from mscomm.arrays.numpy import readable
from mscomm.group import Group
from mscomm.job import resolve
from mscomm.train import join
from mscomm.train.buckets import COMPRESSIONS, Bucket, HostBucket, Layout
from mscomm.train.device_buckets import DeviceBucket, why_not
from mscomm.train.optimizers import with_velocities
from mscomm.train.states import checksum
from mscomm.train.step import Step

BUCKET_MB = 4.0  # larger buckets are not faster between ranks on one host: see docs/performance.md
# The libraries that report when each gradient is ready. With the other libraries, the program calls reduce().
_AUTOGRAD = {"torch": "mscomm.train.autograd"}


class GradientReducer:
    """Combines the gradients of all ranks, so that all ranks make the update of one large batch.

    parameters: for PyTorch, `model.parameters()` or `model.named_parameters()`; for NumPy, JAX, MindSpore and CuPy, a
    list or a dict of arrays with the shapes and dtypes of the gradients, preferably the weights themselves. PyTorch
    parameters on a GPU and CuPy arrays must be on the device with which this rank has joined the job. All ranks must
    pass the same parameters in the same order; otherwise all ranks raise a ValueError that names the first difference.
    mean: if True, the sum is divided by the number of ranks. bucket_mb: the size of a bucket in MiB (default 4); the
    first bucket of each dtype has at most 1 MiB. compression: with "bf16" or "fp16", ranks send 16 bits per element and
    carry the rounding error into the next step. exclude: parameters, or their names, that each rank keeps for itself.
    parameter_broadcast: if True, all ranks receive rank 0's parameters at the start. group: a Group or its name; None
    means all ranks.

    Without parameter_broadcast, the ranks compare the bits of their parameters, including frozen ones. If PyTorch or
    MindSpore parameters differ, all ranks raise a ValueError that names the rank and the parameter. Arrays of other
    libraries need not be the weights, so if they differ, rank 0 only prints a warning. The reducer does not change a
    module's buffers, such as BatchNorm's running means, which may differ between ranks. To give all ranks the buffers
    of rank 0, for example before evaluation, call broadcast_parameters(dict(model.named_buffers())).
    DistributedDataParallel makes the buffers equal by itself.

    With PyTorch, each gradient is a view into the memory of a bucket. The reduction of a bucket starts as soon as the
    backward pass has filled it and all buckets before it; wait() reduces the last bucket. After the first step, the
    buckets are rebuilt in the order in which rank 0's gradients became ready.

    >>> reducer = GradientReducer(model.parameters())
    >>> for images, labels in batches:
    ...     reducer.zero_grad()                        # optimizer.zero_grad() costs one more copy
    ...     loss_fn(model(images), labels).backward()
    ...     reducer.wait()
    ...     optimizer.step()

    If no rank used a parameter in a step, the parameter keeps its old gradient, which may be None. If only some ranks
    used a parameter, all ranks get its mean gradient, in which the other ranks count as zeros. Clip and unscale
    gradients after wait(). wait() raises RuntimeError if a gradient was changed between backward() and wait().
    optimizer.step() raises RuntimeError if wait() was not called.

    With other libraries, `reduce(gradients)` returns the combined gradients.

    >>> gradients = reducer.reduce(gradients)

    On a device, work is enqueued on the library's current stream. Only buckets that become full during the backward
    pass are reduced in parallel with that stream. wait() and reduce() return when all ranks have enqueued their calls;
    they do not wait for the device. If this build of mscomm has kernels (see `mscomm doctor`), one kernel launch
    gathers the gradients of a bucket, including those that lie outside it, and also compresses them. Without kernels,
    the gradients are copied first, and the array library compresses them.

    The gradients of a parameter are not reduced if its requires_grad is False. The reducer works only while the program
    holds a reference to it. On the CPU, the results are bit-identical to those of one all_reduce per gradient, and do
    not depend on the buckets. On a device, the order in which the vendor's library adds values may depend on the number
    of elements in the call, so the last bits of the results may depend on the buckets. The errors are those of
    all_reduce. After an error, the group is broken and the gradients are undefined. After rejoin(), each rank must
    create a new reducer.
    """

    def __init__(
        self,
        parameters: Any,
        *,
        mean: bool = True,
        bucket_mb: float | None = None,
        compression: str | None = None,
        exclude: Iterable[Any] = (),
        parameter_broadcast: bool = False,
        group: Group | str | None = None,
    ) -> None:
        if compression is not None and compression not in COMPRESSIONS:
            raise ValueError(
                f"GradientReducer: compression {compression!r} is not one of {', '.join(COMPRESSIONS)}, None"
            )
        if bucket_mb is not None and not bucket_mb > 0:
            raise ValueError(f"GradientReducer: bucket_mb is {bucket_mb}; it must be more than 0")
        self._names, self._parameters, self._excluded, self._frozen = _chosen(parameters, list(exclude))
        self._arrays = _one_library(self._names, self._parameters)
        self._group = resolve(group)
        seen = [self._memory(p, name, "GradientReducer") for name, p in zip(self._names, self._parameters, strict=True)]
        self._on_device = isinstance(seen[0], OnDevice)
        for name, p in zip(self._names, seen, strict=True):
            if isinstance(p, OnDevice) != self._on_device:
                there = "on a device" if self._on_device else "on the CPU"
                raise TypeError(f"GradientReducer: {self._names[0]} is {there}, {name} is not; exclude one of them")
        self._shapes = [p.shape for p in seen]
        self._kinds = [(p.dtype, p.size) for p in seen]
        for name, (dtype, _) in zip(self._names, self._kinds, strict=True):
            if dtype.kind not in "fc" and dtype.name != "bfloat16":
                raise TypeError(f"GradientReducer: {name} has dtype {dtype}, which has no gradient; exclude it")
        library_name = self._arrays.__name__.rpartition(".")[2]
        options: dict[str, Any] = {
            "library": library_name,
            "where they are": "a device" if self._on_device else "the CPU",
            "mean": bool(mean),
            "bucket_mb": float(bucket_mb or BUCKET_MB),
            "compression": compression,
            "parameter_broadcast": bool(parameter_broadcast),
        }
        # The ranks may have different devices. If one rank cannot reduce its gradients, all ranks must raise the error,
        # so each rank tells the others the reason.
        reasons = (
            f"{name}: {why}"
            for name, p, (dtype, _) in zip(self._names, self._parameters, self._kinds, strict=True)
            if self._on_device and (why := why_not(self._group, dtype, compression, p))
        )
        _check_alike(options, self._names, self._kinds, self._shapes, next(reasons, ""), self._group)
        self._same_start(parameter_broadcast)
        path = _AUTOGRAD.get(library_name)
        op = "avg" if mean else "sum"

        def make(layout: Layout) -> Bucket:
            if not self._on_device:
                return HostBucket(layout, op, compression, self._group)
            return DeviceBucket(layout, op, compression, self._group, self._parameters[layout.places[0].number])

        with self._group.committed("GradientReducer"):
            self._step = Step(
                self._names,
                self._kinds,
                self._shapes,
                op=op,
                group=self._group,
                make=make,
                bucket_bytes=int(options["bucket_mb"] * (1 << 20)),
                in_order=path is None,
            )
        self._autograd: Any = None
        if path is not None:
            others = [*self._excluded.values(), *self._frozen.values()]
            self._autograd = importlib.import_module(path).Autograd(self._step, self._names, self._parameters, others)
        self.last_rank: int | None = None
        """The rank in the group whose model all ranks received at the end of the latest join(). None before the first
        join()."""

    def _memory(self, x: Any, name: str, function: str) -> np.ndarray[Any, Any]:
        there = values(x, name, function)
        if isinstance(there, OnDevice):
            self._group.check_device(function, name, there)
        return there

    @property
    def buffers(self) -> list[Any]:
        """One array per parameter, with the parameter's shape. Each gradient is reduced in the memory of its array.

        These are NumPy arrays on the CPU, and arrays of the parameters' library on a device.
        """
        return list(self._step.buffers)

    def carry(self, value: float) -> None:
        """Send a number, such as the loss, with the gradients. After the step, `carried` is the mean over the ranks.

        Call this before the backward pass, or before reduce(). Raise RuntimeError if the bucket that carries the number
        has already been started.
        """
        self._step.carry(float(value))

    @property
    def carried(self) -> float:
        """The mean of the numbers that the ranks passed to carry() in the latest step. A rank that passed no number
        counts as 0."""
        return self._step.outcome.carried

    @property
    def waited_s(self) -> float:
        """The total time in seconds that this rank has spent waiting for reductions at the end of its steps.

        On the CPU, this is the communication time that did not overlap with computation. On a device, it is only the
        time that the program waited for other ranks to make their calls.
        """
        return self._step.waited_s

    @property
    def steps(self) -> int:
        """How many steps this reducer has reduced."""
        return self._step.finished

    @property
    def order(self) -> list[int] | None:
        """The order in which the gradients of rank 0 became ready; None if it is not known yet."""
        return self._step.order_of_rank_0

    def close(self) -> None:
        """Stop reducing: later backward passes leave the gradients as they are."""
        if self._autograd is not None:
            self._autograd.end()

    def join(self, sync: Iterable[Any] | None = None) -> contextlib.AbstractContextManager[None]:
        """Return a context for training loops in which some ranks have fewer steps than others. A rank that has run out
        of batches sends zeros until no rank has batches left.

        The mean is taken over the ranks that still have batches. Every rank must run its loop inside join(), reduce
        once in each step, and make no other calls on the group. If one rank's loop raises an exception, the other ranks
        raise Aborted.

        At the end, all ranks receive the parameters of `last_rank`. This is the rank that ran out of batches last, or
        the highest such rank if there are several. sync: further objects whose state all ranks receive from last_rank:
        optimizers, schedulers, and PyTorch modules with their buffers. All ranks must pass these objects in the same
        order. Raise TypeError if an item does not have state_dict() and load_state_dict(). Without sync, a rank that
        ran out early keeps the older state of its optimizer.

        >>> with reducer.join(sync=[model, optimizer]):
        ...     for images, labels in batches:
        ...         ...

        If the reducer was created with NumPy, CuPy or MindSpore arrays, these arrays are overwritten in place. If an
        item of sync is mscomm's Momentum or SGD, all ranks also receive its parameters from last_rank. If the loop
        creates new arrays in each step, as with JAX, get the final arrays after join():

        >>> weights = broadcast_parameters(weights, root=reducer.last_rank)
        """
        given = None if sync is None else join.checked(sync)
        before = self._checksums() if self._autograd is None and given is None else []

        def at_end(root: int, uneven: bool) -> None:
            self.last_rank = root
            join.broadcast_all(self._named(), root, self._group)  # leaves JAX arrays unchanged
            if not uneven or root != self._group.rank:
                return
            if self._autograd is not None:
                self._autograd.warn_of_optimizers(given or [])
            elif given is None and self._checksums() == before:
                log.warn(
                    "GradientReducer.join: the arrays that the reducer was made with did not change, so they are not"
                    " the weights, and ranks that left early have outdated weights; weights ="
                    " broadcast_parameters(weights, root=reducer.last_rank) gives them the latest ones, and"
                    " join(sync=[]) turns this warning off"
                )
            elif given != []:
                for optimizer in with_velocities(self._parameters):
                    if not any(one is optimizer for one in given or []):
                        join.warn_of_old_state(optimizer)

        return join.join(self._step, self._group, given, at_end=at_end, own=list(self._excluded.values()))

    def _named(self) -> list[tuple[str, Any]]:
        return list(zip(self._names, self._parameters, strict=True))

    def _checksums(self) -> list[int]:
        return [checksum(p, name, "GradientReducer") for name, p in self._named()]

    def _same_start(self, broadcast: bool) -> None:
        """If broadcast is True, send rank 0's parameters to all ranks. Otherwise, compare the parameters. If they
        differ, all ranks raise ValueError for PyTorch and MindSpore parameters, and rank 0 warns for other arrays."""
        if self._group.size == 1:
            return
        weights = [*self._named(), *self._frozen.items()]
        if broadcast:
            for name, p in weights:
                if not self._memory(p, name, "GradientReducer").flags.writeable:
                    raise TypeError(
                        f"GradientReducer: parameter_broadcast: {name} cannot be written; weights ="
                        " broadcast_parameters(weights) gives new arrays"
                    )
            join.broadcast_all(weights, 0, self._group)
            return
        mine = [[name, checksum(p, name, "GradientReducer")] for name, p in weights]
        everybodys = objects.all_gather_object(mine, group=self._group)
        for rank, theirs in enumerate(everybodys):
            pairs = itertools.zip_longest(theirs, everybodys[0])
            differing = next((one or other for one, other in pairs if one != other), None)
            if differing is None:
                continue
            name, _ = differing
            differ = f"ranks 0 and {rank} of the group begin with different weights, of {name}"
            remedy = "use one seed on all ranks, or parameter_broadcast=True, which gives all of them rank 0's"
            if hasattr(self._parameters[0], "requires_grad"):
                raise ValueError(f"GradientReducer: {differ}; {remedy}")
            if self._group.rank == 0:
                log.warn(f"GradientReducer: if these arrays are the weights, {differ}; {remedy}")
            return

    # -- state for checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which another reducer of the same parameters can continue with bit-identical results.

        Call this between steps. In the result, "order" is the list of the parameters' indices in the order of the
        buckets, or None if this order is not known yet. "residual" maps names to compression residuals, which are NumPy
        arrays with the parameters' shapes. Without compression, "residual" is empty.
        """
        self._step.check_between("state_dict")
        owed = {name: self._step.residual(index) for index, name in enumerate(self._names)}
        residual = {name: array for name, array in owed.items() if array is not None}
        return {"order": self._step.order_of_rank_0, "residual": residual}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a result of state_dict().

        All ranks must call this between the same two steps, each with its own state.

        The residuals are used only if this reducer compresses gradients. Raise ValueError if the state belongs to other
        parameters. All ranks raise ValueError if the orders in their states differ.
        """
        self._step.check_between("load_state_dict")
        order, residual = state["order"], state["residual"]
        everybodys = objects.all_gather_object(order, group=self._group)
        for rank, theirs in enumerate(everybodys):
            if theirs != everybodys[0]:
                raise ValueError(
                    f"load_state_dict: the states of ranks 0 and {rank} of the group belong to two different trainings"
                )
        if order is not None and sorted(order) != list(range(len(self._names))):
            raise ValueError(f"load_state_dict: the state does not belong to these {len(self._names)} parameters")
        if order is not None and self._autograd is not None:
            self._step.take_order(order)
            self._autograd.move()
        for index, name in enumerate(self._names):
            if not self._step.narrows(index) or name not in residual:
                continue
            if residual[name].shape != self._shapes[index]:
                theirs, mine = list(residual[name].shape), list(self._shapes[index])
                raise ValueError(f"load_state_dict: {name} is {theirs} in the state, the parameter is {mine}")
            self._step.owe(index, residual[name])

    # -- PyTorch

    def wait(self) -> None:
        """Finish the step after the backward pass: reduce the remaining gradients, and wait for all reductions.

        Gradients that this rank does not have count as zeros. Raise RuntimeError inside no_sync().
        """
        autograd = self._by_autograd("wait", "use reduce(gradients)")
        if not autograd.syncing:
            raise RuntimeError("GradientReducer.wait: inside no_sync() gradients stay on their rank")
        for name, p in self._frozen.items():
            if p.requires_grad and p.grad is not None:
                raise RuntimeError(
                    f"GradientReducer.wait: {name} has a gradient, but needed none when the reducer was made; make a"
                    " new one on every rank after requires_grad has changed"
                )
        autograd.finish()

    def zero_grad(self) -> None:
        """Set all gradients to zero, including excluded ones, like `optimizer.zero_grad(set_to_none=False)`.

        Raise RuntimeError between backward() and wait(). To discard a step, call wait() and then zero_grad().
        """
        autograd = self._by_autograd("zero_grad", "reduce(gradients) overwrites them")
        self._step.check_between("zero_grad")
        autograd.zero()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context for gradient accumulation: backward passes inside it only add to this rank's gradients.

        After the context, run one backward pass whose gradients are reduced. Raise RuntimeError between backward() and
        wait().
        """
        autograd = self._by_autograd("no_sync", "add the gradients up before reduce(gradients)")
        self._step.check_between("no_sync")
        before, autograd.syncing = autograd.syncing, False
        try:
            yield
        finally:
            autograd.syncing = before

    def _by_autograd(self, function: str, instead: str) -> Any:
        if self._autograd is None:
            raise RuntimeError(f"GradientReducer.{function} is for PyTorch; {instead}")
        return self._autograd

    # -- other libraries

    def reduce(self, gradients: Any) -> Any:
        """Return the combined gradients in the same form as the argument: a list, a tuple or a dict.

        A list or tuple must have the order of the parameters, without excluded parameters. A dict must have the
        parameters' names as keys; entries for excluded parameters are returned unchanged. Raise ValueError if a
        gradient's shape or dtype differs from that of its parameter. The results lie in the buckets, so the next call
        overwrites them; only JAX gets new arrays. Gradients that were computed directly into `buffers` are not copied.
        """
        if self._autograd is not None:
            raise RuntimeError("GradientReducer.reduce: PyTorch's gradients are reduced by backward() and wait()")
        self._step.check_between("reduce")
        given = self._in_order(gradients)
        sources = [self._source(x, name) for name, x in zip(self._names, given, strict=True)]
        for name, x, shape, (dtype, _) in zip(self._names, sources, self._shapes, self._kinds, strict=True):
            if (x.shape, x.dtype) != (shape, dtype):
                theirs = f"{x.dtype}{list(x.shape)}"
                raise ValueError(f"reduce: the gradient of {name} is {theirs}, the parameter {dtype}{list(shape)}")
        elsewhere: list[np.ndarray[Any, Any] | None] = []
        for index, source in enumerate(sources):
            at = self._step.where_is(source)
            if at is None:
                elsewhere.append(source)
            else:  # a gradient in another gradient's buffer would be overwritten too early, so copy it
                elsewhere.append(None if at == index else self._copy(source, given[index]))
        with self._step.owed():
            for index in self._step.order:
                self._step.ready(index, elsewhere[index])
            self._step.finish()
        results = [self._result(p, buffer) for p, buffer in zip(self._parameters, self._step.buffers, strict=True)]
        if isinstance(gradients, dict):
            return {**gradients, **dict(zip(self._names, results, strict=True))}
        return tuple(results) if isinstance(gradients, tuple) else results

    def _in_order(self, gradients: Any) -> list[Any]:
        if not isinstance(gradients, dict):
            given = list(gradients)
            if len(given) != len(self._names):
                raise ValueError(f"reduce: {len(given)} gradients, there are {len(self._names)} parameters")
            return given
        missing = [name for name in self._names if name not in gradients]
        left_out = {*self._excluded, *self._frozen}
        unknown = [name for name in gradients if name not in self._names and name not in left_out]
        if missing or unknown:
            wrong = f"no gradient of {missing[0]!r}" if missing else f"a gradient of {unknown[0]!r}"
            raise ValueError(f"reduce: there is {wrong}; the parameters are {', '.join(self._names)}")
        return [gradients[name] for name in self._names]

    def _source(self, x: Any, name: str) -> np.ndarray[Any, Any]:
        """Return the memory of a gradient in C order. A gradient that is not in C order is copied."""
        there = self._memory(x, name, "reduce")
        if isinstance(there, OnDevice) != self._on_device:
            where = (
                "on the CPU, but the parameter is on a device"
                if self._on_device
                else "on a device, but the parameter is on the CPU"
            )
            raise TypeError(f"reduce: the gradient of {name} is {where}")
        if not self._on_device:
            return readable(there)
        return there if there.flags.c_contiguous else self._memory(self._arrays.packed(x), name, "reduce")

    def _copy(self, source: np.ndarray[Any, Any], x: Any) -> np.ndarray[Any, Any]:
        if not isinstance(source, OnDevice):
            return source.copy()
        made: OnDevice = self._arrays.new(x, source.shape)[0]
        self._group.pack(made, [source], made.stream)
        return made

    def _result(self, parameter: Any, buffer: Any) -> Any:
        if self._on_device:
            return buffer
        if hasattr(self._arrays, "over"):
            return self._arrays.over(buffer)
        target, result = self._arrays.new(parameter, buffer.shape)
        target[...] = buffer
        return result()


def broadcast_parameters(parameters: Any, root: int = 0, *, group: Group | str | None = None) -> Any:
    """Broadcast the parameters of rank root, so that all ranks begin with the same model.

    parameters: as for GradientReducer; they may include a model's buffers. They are overwritten in place, except arrays
    that cannot be written, such as JAX arrays. Return a list, a tuple or a dict, like the argument, with new arrays in
    place of those that cannot be written. The errors are those of broadcast.

    >>> mscomm.train.broadcast_parameters(model.state_dict())
    """
    results = join.broadcast_all(_named(parameters), root, resolve(group))
    if isinstance(parameters, dict):
        return dict(zip(parameters, results, strict=True))
    return tuple(results) if isinstance(parameters, tuple) else results


def _named(parameters: Any) -> list[tuple[str, Any]]:
    entries = list(parameters.items()) if isinstance(parameters, dict) else list(parameters)
    if entries and all(isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str) for one in entries):
        return entries
    return [(f"parameter {i}", one) for i, one in enumerate(entries)]


def _chosen(parameters: Any, exclude: list[Any]) -> tuple[list[str], list[Any], dict[str, Any], dict[str, Any]]:
    """Select the parameters whose gradients are reduced. Return four values: their names, the parameters themselves, a
    dict of the excluded parameters, and a dict of the parameters that need no gradient."""
    entries = _named(parameters)
    unknown = [one for one in exclude if isinstance(one, str) and one not in dict(entries)]
    if unknown:
        raise ValueError(
            f"GradientReducer: exclude names {unknown[0]!r}, which is not one of {', '.join(dict(entries))}"
        )
    names, kept, excluded, frozen = [], [], {}, {}
    for name, p in entries:
        if any(one == name if isinstance(one, str) else one is p for one in exclude):
            excluded[name] = p
        elif not getattr(p, "requires_grad", True):
            frozen[name] = p
        else:
            names.append(name)
            kept.append(p)
    return names, kept, excluded, frozen


def _check_alike(
    options: dict[str, Any],
    names: list[str],
    kinds: list[tuple[np.dtype[Any], int]],
    shapes: list[tuple[int, ...]],
    why_not: str,
    group: Group,
) -> None:
    """Raise ValueError on all ranks if a rank's parameters or options differ from those of rank 0. Raise TypeError on
    all ranks if why_not is not empty on some rank."""
    mine = [[name, dtype.name, list(shape)] for name, (dtype, _), shape in zip(names, kinds, shapes, strict=True)]
    everybodys = objects.all_gather_object([options, mine, why_not], group=group)
    (options_of_0, parameters_of_0, _), *_ = everybodys
    for rank, (theirs, parameters, reason) in enumerate(everybodys):
        if reason:
            raise TypeError(f"GradientReducer: {reason}, on rank {rank} of the group")
        for name, value in theirs.items():
            if value != options_of_0[name]:
                at_0 = options_of_0[name]
                raise ValueError(
                    f"GradientReducer: {name} is {value!r} on rank {rank} of the group, {at_0!r} on rank 0"
                )
        if len(parameters) != len(parameters_of_0):
            raise ValueError(
                f"GradientReducer: rank {rank} of the group has {len(parameters)} parameters, rank 0 has"
                f" {len(parameters_of_0)}"
            )
        for i, pair in enumerate(zip(parameters, parameters_of_0, strict=True)):
            there, at_0 = (f"{name}, {dtype}{shape}" for name, dtype, shape in pair)
            if there != at_0:
                raise ValueError(
                    f"GradientReducer: parameter {i} is {there} on rank {rank} of the group, {at_0} on rank 0"
                )


def _one_library(names: list[str], parameters: list[Any]) -> ModuleType:
    libraries = {library(p, name, "GradientReducer"): name for name, p in zip(names, parameters, strict=True)}
    if not libraries:
        raise ValueError("GradientReducer: there are no parameters")
    if len(libraries) > 1:
        kinds = ", ".join(f"{name} of {module.__name__.rpartition('.')[2]}" for module, name in libraries.items())
        raise TypeError(f"GradientReducer: parameters of more than one array library: {kinds}")
    return next(iter(libraries))
