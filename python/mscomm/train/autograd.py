"""The PyTorch part of GradientReducer: hooks report ready gradients, and gradients are views into the buckets.

In each backward pass, a hook queues a callback in autograd's engine. The engine runs the callback at the end of the
pass. For GradientReducer, the hook of the first ready gradient queues the callback. The callback records the gradients'
versions, so that wait() can tell whether the program changed a gradient before it was reduced. For
DistributedDataParallel, a hook on the output of the forward pass queues the callback, and the callback finishes the
step.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mscomm import log
from mscomm.arrays import torch as arrays
from mscomm.train.join import warn_of_old_state
from mscomm.train.states import with_arrays
from mscomm.train.step import Step

_alive: weakref.WeakSet[Autograd] = weakref.WeakSet()


class Autograd:
    """Keeps the gradients of the parameters in the step's buffers.

    others: parameters whose gradients are not reduced; zero() sets these gradients to zero. The gradients of a backward
    pass are reduced if `syncing` is True. autograd sometimes allocates a gradient outside its buffer. Such a gradient
    is copied into its buffer immediately if it is on the CPU, not contiguous, or a view that is conjugated or negated.
    Otherwise, it is copied when its bucket is started, so that one kernel launch can copy all such gradients of the
    bucket.
    """

    def __init__(self, step: Step, names: list[str], parameters: list[Any], others: Iterable[Any]) -> None:
        self._step = step
        self._names = names
        self._parameters = parameters
        self._others = list(others)
        self._hooks: list[Any] = []
        self._elsewhere: set[int] = set()  # on a device: gradients of this step that lie outside their buffers
        self._stream: Any = None  # the stream of the previous gradient
        self.syncing = True  # False inside no_sync()
        self._seen: dict[int, tuple[Any, int]] = {}  # from backward() to wait(): the gradients and their versions
        self._end_of_pass: Any = lambda: None  # weak reference to the callback queued in this pass
        self._optimizers: weakref.WeakKeyDictionary[Any, tuple[int, bool]] = weakref.WeakKeyDictionary()
        self._within = False  # whether the backward pass itself finishes the step
        self._as_views = True  # whether gradients stay in the buffers after the step
        self._opaque = False  # whether the output of the latest forward pass has no tensor that can take a hook
        self.accumulating = False  # whether the latest forward pass ran inside no_sync()
        self._told = self._told_of_state = False
        self._taken_over = ""  # a parameter that a later reducer took over, which ended this object; "" if none
        mine = {id(parameter) for parameter in parameters}
        for earlier in list(_alive):  # only one reducer may write a gradient, so end earlier reducers
            common = [name for name, p in zip(earlier._names, earlier._parameters, strict=True) if id(p) in mine]
            if common:
                earlier._taken_over = common[0]
                earlier.end()
        # The hooks hold only a weak reference to this object. When the reducer is deleted, this object is deleted too
        # and removes the hooks, even if the parameters live longer.
        accumulated = functools.partial(_if_alive, weakref.ref(self), Autograd.accumulated)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(functools.partial(accumulated, index))
            for index, parameter in enumerate(parameters)
        ]
        _alive.add(self)
        self._look_at_buffers()

    def end(self) -> None:
        _alive.discard(self)
        for hook in self._hooks:
            hook.remove()

    def __del__(self) -> None:
        self.end()

    def _look_at_buffers(self) -> None:
        self._on_device = isinstance(self._step.buffers[0], torch.Tensor)
        self._views = self._step.buffers if self._on_device else [arrays.over(one) for one in self._step.buffers]
        # Recognise gradients by their addresses rather than by their tensor objects, because the program may replace
        # the memory of a tensor.
        self._addresses = [view.data_ptr() for view in self._views]
        self._strides = [view.stride() for view in self._views]

    def accumulated(self, index: int, _parameter: torch.Tensor) -> None:
        """Handle a gradient that the backward pass has just accumulated. A hook calls this method."""
        if self.syncing or self._opaque:
            self._watch_pass()
            self._put(index)
        elif self._within and not self.accumulating and not self._told:
            self._told = True
            log.warn(
                f"DistributedDataParallel: a gradient of {self._names[index]} stays on this rank, because its backward"
                " pass did not begin at an output of the wrapped module's forward pass; call the wrapper, not its "
                ".module"
            )

    def _watch_pass(self) -> None:
        """Make autograd call ended() at the end of the running backward pass.

        The engine drops the callback at the end of the pass, even if the pass raises an exception. The weak reference
        to the callback is then dead, so the next pass knows that it must queue a new callback.
        """
        if self._end_of_pass() is None:
            callback = functools.partial(_if_alive, weakref.ref(self), Autograd.ended)
            self._end_of_pass = weakref.ref(callback)
            torch.autograd.Variable._execution_engine.queue_callback(callback)

    def ended(self) -> None:
        """Handle the end of a backward pass that raised no exception. autograd calls this method."""
        if not self._within:
            self._remember()
        elif self._step.begun:
            self.finish()

    def _remember(self) -> None:
        """Record each gradient and its version after a backward pass. In-place operations increment the version."""
        for index, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            if gradient is not None:
                self._seen[index] = weakref.ref(gradient), gradient._version

    def _check_unchanged(self) -> None:
        """Raise RuntimeError if the program changed a gradient before it was reduced."""
        for index, (before, version) in self._seen.items():
            gradient = self._parameters[index].grad
            if gradient is not None and (gradient is not before() or gradient._version != version):
                raise RuntimeError(
                    f"GradientReducer.wait: the gradient of {self._names[index]} was changed between backward() and"
                    " wait(), before it was reduced; clip and unscale gradients after wait()"
                )
        self._seen.clear()

    def finish(self) -> None:
        """End the step: reduce the remaining gradients, and wait for all reductions."""
        self._check_unchanged()
        with self._step.owed():
            self._follow(self._views[0])
            for index in self._step.missing():  # gradients that come only from earlier backward passes
                self._put(index)
            outcome = self._step.finish()
            self._hand_out(outcome.from_others)
            if outcome.moved:
                self.move()
        if self._within:
            self.syncing = False

    # -- for DistributedDataParallel

    def finish_within(self, as_views: bool) -> None:
        """From now on, finish each step at the end of its backward pass.

        expect() determines in which passes gradients are reduced.
        """
        self._within, self._as_views, self.syncing = True, as_views, False

    def check_before_forward(self) -> None:
        """Raise RuntimeError if the previous backward pass failed in the middle of a step."""
        self._end_of_pass = lambda: None
        if self._step.begun:
            raise RuntimeError(
                "DistributedDataParallel: the last backward pass raised an exception in the middle of a step, and the"
                " other ranks are waiting for the remaining gradients; end the program, or after rejoin() make a new"
                " wrapper on every rank"
            )

    def check_not_taken_over(self) -> None:
        """Raise RuntimeError if a later wrapper or reducer took over a parameter of this object."""
        if self._taken_over:
            raise RuntimeError(
                f"DistributedDataParallel: a wrapper or GradientReducer that was made later reduces {self._taken_over},"
                " and this one no longer reduces anything; put all layers that are trained together into one module,"
                " and wrap that"
            )

    def expect(self, output: Any) -> None:
        """Reduce the gradients of the backward pass that will begin at this output of the module.

        Layers under torch.utils.checkpoint(use_reentrant=True) run inner backward passes inside the outermost pass.
        Only the end of the outermost pass may end the step. Therefore, a hook on the output calls reached() when the
        outermost pass begins. reached() queues the callback for the end of this pass before an inner pass can begin.
        """
        self.syncing, self.accumulating = True, False
        reached = functools.partial(_if_alive, weakref.ref(self), Autograd.reached)
        watched = [one for one in tensors_in(output) if one.grad_fn is not None]
        for one in watched:
            one.register_hook(reached)
        self._opaque = not watched

    def expect_nothing(self) -> None:
        """Do not reduce the gradients of a backward pass that begins at the latest output of the module.
        DistributedDataParallel calls this method after a forward pass inside no_sync().
        """
        self.syncing, self._opaque, self.accumulating = False, False, True

    def reached(self, _gradient: torch.Tensor) -> None:
        """Handle the start of a backward pass at the output of a forward pass. A hook calls this method."""
        self.syncing = True
        self._watch_pass()

    # -- optimizers

    def steps_by(self, optimizer: Any) -> bool:
        """Return whether the optimizer updates any of this object's parameters."""
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._optimizers.get(optimizer)
        if known is None or known[0] != size:
            mine = {id(parameter) for parameter in self._parameters}
            ours = any(id(p) in mine for group in optimizer.param_groups for p in group["params"])
            known = self._optimizers[optimizer] = size, ours
        return known[1]

    def check_before_step(self, optimizer: Any) -> None:
        if self.steps_by(optimizer) and self._step.begun:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step: the gradients are not reduced yet: call GradientReducer.wait()"
                " first; with DistributedDataParallel, step when backward() has returned"
            )

    def warn_of_optimizers(self, given: list[Any]) -> None:
        """After a join() with unequal steps, warn about optimizers whose state is outdated on ranks that left early.

        given: the objects whose state the program has asked join() to send.
        """
        for optimizer, (_, ours) in self._optimizers.items():
            if not ours or any(one is optimizer for one in given) or self._told_of_state:
                continue
            if any(isinstance(x, torch.Tensor) for state in optimizer.state.values() for x in state.values()):
                self._told_of_state = True
                warn_of_old_state(optimizer)

    # -- gradients: to the buckets, and back to the program

    def _put(self, index: int) -> None:
        """If the parameter has a gradient, report the gradient as ready. If the gradient lies outside its buffer, copy
        it into the buffer, now or when the bucket is started."""
        parameter = self._parameters[index]
        gradient = parameter.grad
        if gradient is None:  # an earlier hook removed the gradient
            return
        if gradient.layout is not torch.strided:
            raise TypeError(
                f"GradientReducer: a gradient of layout {gradient.layout}; use dense gradients (sparse=False), or"
                " exclude the parameter"
            )
        if gradient.dtype is not self._views[index].dtype:
            raise RuntimeError(
                f"GradientReducer: the gradient of {self._names[index]} is of {gradient.dtype}, but was of"
                f" {self._views[index].dtype} at the beginning; convert the model before, on every rank"
            )
        self._follow(gradient)
        source = None
        if gradient.data_ptr() != self._addresses[index] or gradient.stride() != self._strides[index]:
            as_it_is = gradient.is_contiguous() and not (gradient.is_conj() or gradient.is_neg())
            if self._on_device and as_it_is:
                source = arrays.memory(gradient)
                self._elsewhere.add(index)
            else:
                view = self._views[index]
                view.copy_(gradient.detach())
                if self._as_views:
                    parameter.grad = view.detach()
        self._take_over(self._step.ready(index, source))

    def _follow(self, on_it: torch.Tensor) -> None:
        """Make the current stream wait for the previous gradient's stream.

        The reduction of a bucket is enqueued on the stream that is current when the bucket is started. So this stream
        must wait for the streams on which the bucket's gradients are computed.
        """
        if not on_it.is_cuda:
            return
        stream = torch.cuda.current_stream(on_it.device)
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def _take_over(self, indices: Iterable[int]) -> None:
        """Release the tensors that autograd allocated for these gradients, which are now also in their buffers."""
        for index in self._elsewhere.intersection(indices):
            parameter = self._parameters[index]
            if parameter.grad is not None:
                arrays.used(parameter.grad)
                if self._as_views:
                    parameter.grad = self._views[index].detach()
            self._elsewhere.remove(index)

    def _hand_out(self, new: Sequence[int]) -> None:
        """After the step, hand all gradients to the program. new: the gradients that only other ranks had."""
        here = [index for index, parameter in enumerate(self._parameters) if parameter.grad is not None]
        self._take_over(list(self._elsewhere))
        self._stream = None
        if not self._as_views:
            self._copy_out([*here, *new])
            return
        for index in new:
            self._parameters[index].grad = self._views[index].detach()

    def _copy_out(self, indices: list[int]) -> None:
        """Copy the gradients of these parameters from the buckets into tensors outside the buckets."""
        for index in indices:
            parameter = self._parameters[index]
            # With create_graph=True, autograd's graph may still need the old gradient, so do not overwrite it.
            if parameter.grad is None or parameter.grad.requires_grad:
                parameter.grad = torch.empty_like(parameter, requires_grad=False)
        if indices:
            into = [self._parameters[index].grad for index in indices]
            torch._foreach_copy_(into, [self._views[index] for index in indices])

    def move(self) -> None:
        """Make the gradients views of the new buffers."""
        self._look_at_buffers()
        for view, parameter in zip(self._views, self._parameters, strict=True):
            if parameter.grad is not None and self._as_views:
                parameter.grad = view.detach()

    def zero(self) -> None:
        self._step.clear()
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None and parameter.grad.data_ptr() != self._addresses[index]:
                parameter.grad = self._views[index].detach()
        for parameter in self._others:
            if parameter.grad is not None:
                parameter.grad = torch.zeros_like(parameter.grad)


def tensors_in(x: Any) -> list[torch.Tensor]:
    """Return the tensors in a module's output, including those inside lists, tuples, dicts and dataclasses."""
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, Mapping):
        x = list(x.values())
    elif dataclasses.is_dataclass(x) and not isinstance(x, type):
        x = [getattr(x, field.name) for field in dataclasses.fields(x)]
    return [one for part in x for one in tensors_in(part)] if isinstance(x, list | tuple) else []


def loader(optimizer: Any) -> Callable[[Any], None]:
    """Return a function that works like the optimizer's load_state_dict, but also accepts NumPy arrays and CPU
    tensors."""

    def load(state: Any) -> None:
        loaded = with_arrays(state, arrays.over)
        # PyTorch's load_state_dict moves the moments to the devices of the parameters. It does not move tensors in
        # param_groups, such as a learning rate.
        for mine, theirs in zip(optimizer.param_groups, loaded["param_groups"], strict=False):
            for name, x in theirs.items():
                if isinstance(x, torch.Tensor) and isinstance(mine.get(name), torch.Tensor):
                    theirs[name] = x.to(mine[name].device)
        optimizer.load_state_dict(loaded)

    return load


def _before_optimizer_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    for one in list(_alive):
        one.check_before_step(optimizer)


register_optimizer_step_pre_hook(_before_optimizer_step)


def _if_alive(autograd: weakref.ref[Autograd], method: Callable[..., None], *arguments: Any) -> None:
    """Call the method on the Autograd object, if the object still exists."""
    there = autograd()
    if there is not None:
        method(there, *arguments)
