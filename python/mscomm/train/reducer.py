"""GradientReducer: the mean of the ranks' gradients, in fusion buckets, while the backward pass still runs."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import numpy as np

from mscomm import collectives, objects
from mscomm.arrays import library, memory
from mscomm.arrays.numpy import readable
from mscomm.group import Group
from mscomm.groups import resolve
from mscomm.train.buckets import COMPRESSIONS, Bucket, layouts

BUCKET_MB = 4.0  # where ranks share a host, larger ones gain nothing: see docs/performance.md
# Libraries that compute gradients by themselves and say when each is there; of the others reduce() is given them.
_AUTOGRAD = {"torch": "mscomm.train.autograd"}


class GradientReducer:
    """Combines the gradients of all ranks, so that each takes the step that the whole batch asks for.

    parameters: PyTorch: `model.parameters()` or `model.named_parameters()`. NumPy, JAX, MindSpore: arrays of the shapes
    and dtypes of the gradients, as a list or a dict. All ranks give the same, in the same order; ValueError on all
    ranks, naming the first that differs. mean: divide by the number of ranks; else the sum. bucket_mb: MiB in a bucket
    (4; the first of each dtype has at most 1). compression: "bf16" or "fp16": what goes from rank to rank has 16 bits;
    what the rounding takes away is added in the next step. exclude: parameters or their names that each rank keeps for
    itself. group: None for all ranks, or a Group or its name.

    PyTorch: a gradient's memory is a view of its bucket, and a bucket is reduced as soon as the backward pass has
    filled it and those before it. After the first step the buckets are laid out anew, in the order in which rank 0's
    gradients became ready.

    >>> reducer = GradientReducer(model.parameters())
    >>> for images, labels in batches:
    ...     reducer.zero_grad()                        # optimizer.zero_grad() costs a copy more
    ...     loss_fn(model(images), labels).backward()
    ...     reducer.wait()
    ...     optimizer.step()

    A parameter that took part on no rank keeps its gradient, None perhaps; one that took part on some has on all
    the mean, in which the others count as zeros.

    Others: `reduce(gradients)` gives the combined ones.

    >>> gradients = reducer.reduce(gradients)

    Parameters that need no gradient (`requires_grad`) are left out. The reducer works as long as somebody refers to it.
    The bits are those of all_reduce of each gradient, whatever the buckets. Errors as in all_reduce; then the group is
    broken and the gradients are undefined. After rejoin() each rank makes a new one.
    """

    def __init__(
        self,
        parameters: Any,
        *,
        mean: bool = True,
        bucket_mb: float | None = None,
        compression: str | None = None,
        exclude: Iterable[Any] = (),
        group: Group | str | None = None,
    ) -> None:
        if compression is not None and compression not in COMPRESSIONS:
            raise ValueError(f"GradientReducer: compression {compression!r} is none of {', '.join(COMPRESSIONS)}, None")
        if bucket_mb is not None and not bucket_mb > 0:
            raise ValueError(f"GradientReducer: bucket_mb is {bucket_mb}; it must be more than 0")
        self._group = resolve(group)
        self._op = "avg" if mean else "sum"
        self._compression = compression
        self._bucket_bytes = int((bucket_mb or BUCKET_MB) * (1 << 20))
        self._names, self._parameters = _chosen(parameters, list(exclude), trained=True)
        self._arrays = _one_library(self._names, self._parameters)
        seen = [memory(p, name, "GradientReducer") for name, p in zip(self._names, self._parameters, strict=True)]
        self._shapes = [p.shape for p in seen]
        self._kinds = [(p.dtype, p.size) for p in seen]
        for name, (dtype, _) in zip(self._names, self._kinds, strict=True):
            if dtype.kind not in "fc" and dtype.name != "bfloat16":
                raise TypeError(f"GradientReducer: {name} is of dtype {dtype}, which has no gradient; exclude it")
        self._check_alike()
        self.syncing = True  # False inside no_sync()
        self.carried = 0.0
        """The mean over the ranks of what they gave to carry() in the last step."""
        self.waited_s = 0.0
        """Seconds that this rank has spent in wait() and reduce(): communication that no computing hid."""
        self._carry = 0.0
        self._joining = False
        self._active = 1  # 0 when this rank has run out of batches
        path = _AUTOGRAD.get(self._arrays.__name__.rpartition(".")[2])
        indices = list(range(len(self._kinds)))
        self._order_is_final = path is None
        self._order: list[int] = []  # in which this step's gradients became ready
        self._laid_out: list[int] | None = None  # the order of rank 0's, when it is known
        self._started = 0  # buckets of this step, the first ones
        self._lay_out(indices[::-1] if path else indices)
        self._autograd = importlib.import_module(path).Autograd(self, self._parameters) if path else None

    def carry(self, value: float) -> None:
        """Take a number along with this step's gradients, as the loss: `carried` is its mean over the ranks then.

        Before the backward pass, or reduce(): RuntimeError when the bucket that carries it is on its way.
        """
        if self._carrier in self._buckets[: self._started]:
            raise RuntimeError("GradientReducer.carry: too late for this step; call it before backward()")
        self._carry = float(value)

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """For loops that have fewer steps on some ranks: who leaves goes on with nothing until all have left.

        The mean is that of the ranks that still have batches. Every rank's loop stands in a join(), and each of its
        steps reduces once.
        """
        if self._joining:
            raise RuntimeError("GradientReducer.join: this reducer is in a join() already")
        self._joining = True
        try:
            yield
            self._active = 0
            while self._finish_step():
                continue
        finally:
            self._joining, self._active = False, 1

    # -- going on later

    def state_dict(self) -> dict[str, Any]:
        """What a later reducer of the same parameters needs to go on with the same bits, between two steps.

        {"order": the parameters' numbers as the buckets have them, or None; "residual": {name: array}}, where the
        arrays are what compression still owes, copies of the parameters' shapes; {} without compression.
        """
        residual = {}
        for index, name in enumerate(self._names):
            owed = self._residual(index)
            if owed is not None:
                residual[name] = owed.copy()
        return {"order": self._laid_out, "residual": residual}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as state_dict() says. All ranks call it at the same point, each with its own state, between two steps.

        A residual counts where this reducer compresses. ValueError if the state is of other parameters; on all ranks
        if their orders differ.
        """
        order, residual = state["order"], state["residual"]
        everybodys = objects.all_gather_object(order, group=self._group)
        for rank, theirs in enumerate(everybodys):
            if theirs != everybodys[0]:
                raise ValueError(f"load_state_dict: the states of ranks 0 and {rank} of the group are of two trainings")
        if order is not None and sorted(order) != list(range(len(self._names))):
            raise ValueError(f"load_state_dict: the state is not of these {len(self._names)} parameters")
        if order is not None and self._autograd is not None:
            self._lay_out_anew(order)
        for index, name in enumerate(self._names):
            owed = self._residual(index)
            if owed is None or name not in residual:
                continue
            if residual[name].shape != owed.shape:
                theirs, mine = list(residual[name].shape), list(owed.shape)
                raise ValueError(f"load_state_dict: {name} is {theirs} in the state, the parameter is {mine}")
            owed[...] = residual[name]

    def _residual(self, index: int) -> np.ndarray[Any, Any] | None:
        bucket, turn = self._bucket_of[index]
        if bucket.residual is None:
            return None
        place = bucket.layout.places[turn]
        return bucket.residual[place.begin : place.begin + place.size].reshape(self._shapes[index])

    def close(self) -> None:
        """The end: backward passes leave their gradients alone from now on. Its memory lasts while a gradient uses it.

        PyTorch: a second reducer of the same parameters needs the first one closed.
        """
        if self._autograd is not None:
            self._autograd.close()

    # -- PyTorch

    def wait(self) -> None:
        """The end of the backward pass: reduce what is left, and wait for all of it.

        Gradients that this rank does not have count as zeros. RuntimeError inside no_sync().
        """
        autograd = self._by_autograd("wait", "use reduce(gradients)")
        if not self.syncing:
            raise RuntimeError("GradientReducer.wait: inside no_sync() gradients stay on their rank")
        autograd.gather()
        self._finish_step()
        autograd.hand_out()

    def zero_grad(self) -> None:
        """Every gradient zero where it lies: as `optimizer.zero_grad(set_to_none=False)`, without a loop."""
        self._by_autograd("zero_grad", "reduce(gradients) overwrites them").zero()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here add to this rank's gradients alone: for the accumulation of several batches."""
        self._by_autograd("no_sync", "add the gradients up before reduce(gradients)")
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    def _by_autograd(self, function: str, instead: str) -> Any:
        if self._autograd is None:
            raise RuntimeError(f"GradientReducer.{function} is for PyTorch; {instead}")
        return self._autograd

    # -- other libraries

    def reduce(self, gradients: Any) -> Any:
        """The combined gradients, in the form in which they were given: a list, a tuple or a dict.

        Their number, shapes and dtypes are those of the parameters; ValueError otherwise. NumPy's and MindSpore's
        results lie in the buckets, where the next call overwrites them; who computes gradients into `buffers` in the
        first place saves a copy. JAX's are arrays of their own.
        """
        if self._autograd is not None:
            raise RuntimeError("GradientReducer.reduce: PyTorch's gradients are reduced by backward() and wait()")
        given = list(gradients.values()) if isinstance(gradients, dict) else list(gradients)
        if len(given) != len(self._names):
            raise ValueError(f"reduce: {len(given)} gradients, there are {len(self._names)} parameters")
        sources = [readable(memory(x, f"gradients[{i}]", "reduce")) for i, x in enumerate(given)]
        for name, x, shape, (dtype, _) in zip(self._names, sources, self._shapes, self._kinds, strict=True):
            if (x.shape, x.dtype) != (shape, dtype):
                theirs = f"{x.dtype}{list(x.shape)}"
                raise ValueError(f"reduce: the gradient of {name} is {theirs}, the parameter {dtype}{list(shape)}")
        for index in [place.number for bucket in self._buckets for place in bucket.layout.places]:
            source, buffer = sources[index], self.buffers[index]
            if source.__array_interface__["data"] != buffer.__array_interface__["data"]:
                buffer[...] = source
            self.ready(index)
        self._finish_step()
        results = [self._result(p, buffer) for p, buffer in zip(self._parameters, self.buffers, strict=True)]
        if isinstance(gradients, dict):
            return dict(zip(gradients, results, strict=True))
        return tuple(results) if isinstance(gradients, tuple) else results

    def _result(self, parameter: Any, buffer: np.ndarray[Any, Any]) -> Any:
        if hasattr(self._arrays, "over"):
            return self._arrays.over(buffer)
        target, result = self._arrays.new(parameter, buffer.shape)
        target[...] = buffer
        return result()

    # -- the step; Autograd calls the public ones

    def ready(self, index: int) -> None:
        """That gradient lies in its buffer; what is complete is reduced, strictly in the order of the buckets."""
        bucket, turn = self._bucket_of[index]
        if index not in bucket.missing:
            raise RuntimeError(
                f"GradientReducer: the gradient of {self._names[index]} came twice in one step: call wait() after each"
                " backward pass, or use no_sync() to add several up"
            )
        bucket.missing.discard(index)
        bucket.marks[turn] = 1
        self._order.append(index)
        self._start_complete()

    def is_missing(self, index: int) -> bool:
        """Whether this step's gradient has not come yet."""
        return index in self._bucket_of[index][0].missing

    def was_used(self, index: int) -> bool:
        """After the step: whether some rank had that gradient."""
        bucket, turn = self._bucket_of[index]
        return bool(bucket.marks[turn] != 0)

    def clear(self) -> None:
        """All gradients zero."""
        for bucket in self._buckets:
            bucket.memory[: bucket.layout.marks] = 0

    def _lay_out(self, order: list[int]) -> None:
        """The buckets, for gradients that become ready in that order."""
        self._buckets = [Bucket(one, self._compression) for one in layouts(self._kinds, order, self._bucket_bytes)]
        self._bucket_of = {
            place.number: (bucket, turn) for bucket in self._buckets for turn, place in enumerate(bucket.layout.places)
        }
        # The last bucket whose dtype holds a loss well enough; None: it has a call of its own.
        wide = [bucket for bucket in self._buckets if bucket.layout.dtype.itemsize >= 4]
        self._carrier = wide[-1] if wide and self._compression is None else None
        self.buffers: list[np.ndarray[Any, Any]] = []
        """NumPy arrays, one a parameter and of its shape: where its gradient lies when it is reduced."""
        for index, shape in enumerate(self._shapes):
            bucket, turn = self._bucket_of[index]
            self.buffers.append(bucket.of(bucket.layout.places[turn]).reshape(shape))

    def _start_complete(self) -> None:
        """Begin to reduce the buckets that are next in turn and miss nothing."""
        for bucket in self._buckets[self._started :]:
            if bucket.missing:
                return
            bucket.carried = self._carry if bucket is self._carrier else 0.0
            bucket.start(self._op, self._group)
            self._started += 1

    def _finish_step(self) -> int:
        """Reduce all that has not been, with zeros for what is missing. How many ranks had a batch."""
        began = time.monotonic()
        active = self._finish()
        self.waited_s += time.monotonic() - began
        return active

    def _finish(self) -> int:
        for bucket in self._buckets[self._started :]:
            for turn, place in enumerate(bucket.layout.places):
                if place.number in bucket.missing:
                    bucket.of(place)[:] = 0
                    bucket.marks[turn] = 0
            bucket.missing.clear()
        self._start_complete()
        active = self._group.size
        if self._joining or self._carrier is None:
            facts = np.array([self._carry * self._active, self._active])
            total, active = collectives.all_reduce(facts, group=self._group, async_op=True).wait()
        for bucket in self._buckets:
            bucket.finish()
            if self._op == "avg" and 0 < active < self._group.size:
                bucket.memory[: bucket.layout.marks] *= bucket.layout.dtype.type(self._group.size / active)
        if self._carrier is not None and not self._joining:
            total = self._carrier.carried * (self._group.size if self._op == "avg" else 1)
        self.carried, self._carry = float(total) / max(active, 1), 0.0
        if not self._order_is_final and active == self._group.size:
            self._take_order_of_rank_0()
        self._order.clear()
        self._started = 0
        for bucket in self._buckets:
            bucket.missing = {place.number for place in bucket.layout.places}
        return int(active)

    def _take_order_of_rank_0(self) -> None:
        """Lay the buckets out in the order in which rank 0's gradients became ready, and move all into them."""
        last = [index for index in range(len(self._kinds)) if index not in set(self._order)]
        order = objects.broadcast_object([*self._order, *last], 0, group=self._group)
        self._lay_out_anew(order)

    def _lay_out_anew(self, order: list[int]) -> None:
        before = self._bucket_of
        self._lay_out(order)
        self._order_is_final, self._laid_out = True, order
        for index, (bucket, turn) in self._bucket_of.items():
            old, old_turn = before[index]
            bucket.take(turn, old, old_turn)
        if self._autograd is not None:
            self._autograd.move()

    def _check_alike(self) -> None:
        """ValueError on all ranks where one has other parameters than rank 0."""
        mine = [
            [name, dtype.name, list(shape)]
            for name, (dtype, _), shape in zip(self._names, self._kinds, self._shapes, strict=True)
        ]
        everybodys = objects.all_gather_object(mine, group=self._group)
        for rank, theirs in enumerate(everybodys):
            if theirs == everybodys[0]:
                continue
            if len(theirs) != len(everybodys[0]):
                raise ValueError(
                    f"GradientReducer: rank {rank} of the group has {len(theirs)} parameters, rank 0 has"
                    f" {len(everybodys[0])}"
                )
            i = next(i for i, (one, other) in enumerate(zip(theirs, everybodys[0], strict=True)) if one != other)
            there, at_0 = (f"{name}, {dtype}{shape}" for name, dtype, shape in (theirs[i], everybodys[0][i]))
            raise ValueError(f"GradientReducer: parameter {i} is {there} on rank {rank} of the group, {at_0} on rank 0")


def broadcast_parameters(parameters: Any, root: int = 0, *, group: Group | str | None = None) -> Any:
    """Give every rank the root's parameters, so that all begin with the same model.

    parameters: as GradientReducer takes them, and buffers of a model, too. They are written in place, and returned;
    JAX's cannot be written, so new ones are returned in their form, a list, a tuple or a dict. Errors as in broadcast.

    >>> mscomm.train.broadcast_parameters(model.state_dict())
    """
    resolved = resolve(group)
    names, arrays = _chosen(parameters, [], trained=False)
    works, results = [], []
    for name, x in zip(names, arrays, strict=True):
        writable = memory(x, name, "broadcast_parameters").flags.writeable
        works.append(collectives.broadcast(x, root, out=x if writable else None, group=resolved, async_op=True))
    for work in works:
        results.append(work.wait())
    if isinstance(parameters, dict):
        return dict(zip(parameters, results, strict=True))
    return tuple(results) if isinstance(parameters, tuple) else results


def _chosen(parameters: Any, exclude: list[Any], *, trained: bool) -> tuple[list[str], list[Any]]:
    """Names and parameters, but those that are excluded; of those that are trained, but those that need no gradient."""
    entries = list(parameters.items()) if isinstance(parameters, dict) else list(parameters)
    if not entries or not all(isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str) for one in entries):
        entries = [(f"parameter {i}", one) for i, one in enumerate(entries)]
    unknown = [one for one in exclude if isinstance(one, str) and one not in dict(entries)]
    if unknown:
        raise ValueError(f"GradientReducer: exclude names {unknown[0]!r}, which is none of {', '.join(dict(entries))}")
    kept = [
        (name, p)
        for name, p in entries
        if getattr(p, "requires_grad", True) or not trained
        if not any(one == name if isinstance(one, str) else one is p for one in exclude)
    ]
    return [name for name, _ in kept], [p for _, p in kept]


def _one_library(names: list[str], parameters: list[Any]) -> ModuleType:
    libraries = {library(p, name, "GradientReducer"): name for name, p in zip(names, parameters, strict=True)}
    if not libraries:
        raise ValueError("GradientReducer: there are no parameters")
    if len(libraries) > 1:
        kinds = ", ".join(f"{name} of {module.__name__.rpartition('.')[2]}" for module, name in libraries.items())
        raise TypeError(f"GradientReducer: parameters of more than one array library: {kinds}")
    return next(iter(libraries))
