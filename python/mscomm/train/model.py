"""Model: the data-parallel training loop."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from mscomm import bootstrap, collectives, context, job, log, notices, objects
from mscomm.arrays import on_host
from mscomm.context import ParallelMode
from mscomm.group import Group
from mscomm.job import is_initialized, resolve
from mscomm.train import hooks, networks, randomness, resuming, states
from mscomm.train.checkpoint import ModelCheckpoint
from mscomm.train.epochs import Epochs, knows_its_place
from mscomm.train.hooks import RunContext
from mscomm.train.recovery import FAILURES, Recovery, Start, job_id
from mscomm.train.reducer import GradientReducer, broadcast_parameters
from mscomm.train.serialization import Saved
from mscomm.train.training_step import TrainingStep

BATCHES = "batches in an epoch"
# The line of code that makes all ranks train one model. Warnings recommend it.
ONE_MODEL = "mscomm.set_auto_parallel_context(parallel_mode=mscomm.ParallelMode.DATA_PARALLEL, gradients_mean=True)"


class _Plan(NamedTuple):
    """The arguments of a call of train(), after they were checked."""

    group: Group | None
    callbacks: list[hooks.Callback]
    epoch: int
    dataset: Any
    batches: int
    initial_epoch: int
    dataset_sink_mode: bool


class Model:
    """A network with a loss function and an optimizer. train() trains the network on one rank or many.

    network, loss_fn, optimizer:

    * PyTorch: a torch.nn.Module; a loss_fn(output, label) that returns a one-element tensor; a torch.optim optimizer.
    * MindSpore, in graph or PyNative mode: a mindspore.nn cell, loss and optimizer.
    * JAX: a function loss(parameters, *batch), or output(parameters, *data) if there is a loss_fn;
      mscomm.train.Momentum or SGD over the parameters. After training, the parameters are `optimizer.parameters`.
    * NumPy, CuPy: an object with `parameters` (a dict of float arrays) and `loss_and_gradients(*batch)`, which returns
      the loss and a dict of gradients; Momentum or SGD over the same parameters. The optimizer updates the parameters
      in place.

    PyTorch modules and CuPy arrays are trained on the device that they are on. If there is no loss_fn, the network
    itself must return the loss. compression: "bf16" or "fp16", as in GradientReducer. group: the ranks that train
    together; None means all ranks. Raises TypeError if the network is of none of the kinds above.

    >>> mscomm.init()
    >>> mscomm.set_auto_parallel_context(parallel_mode=mscomm.ParallelMode.DATA_PARALLEL, gradients_mean=True)
    >>> model = mscomm.Model(net, torch.nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), 0.01, 0.9))
    >>> model.train(10, dataset, callbacks=[mscomm.LossMonitor()])
    epoch: 1 step: 1, loss is 2.3025854
    ...
    """

    def __init__(
        self,
        network: Any,
        loss_fn: Any = None,
        optimizer: Any = None,
        *,
        compression: str | None = None,
        group: Group | str | None = None,
    ) -> None:
        if loss_fn is not None and not callable(loss_fn):
            raise TypeError(f"Model: loss_fn is a {type(loss_fn).__name__}; expected a callable(output, label)")
        if group is not None and is_initialized():
            resolve(group)  # raises an error if this rank is not in the group
        self._given = {"network": network, "loss_fn": loss_fn, "optimizer": optimizer}
        self._network = networks.adapt(network, loss_fn, optimizer)
        self._compression = compression
        self._group = group
        self._resumed: tuple[Saved, dict[str, Any]] | None = None  # what resume() has loaded

    def train(
        self,
        epoch: int,
        train_dataset: Any,
        callbacks: Any = None,
        dataset_sink_mode: bool = False,
        sink_size: int = -1,
        initial_epoch: int = 0,
        *,
        recovery: bool | None = None,
    ) -> None:
        """Train until the end of epoch number `epoch`.

        epoch: the number of the final epoch, 1 or more. train_dataset: an iterable with get_dataset_size() or len().
        Each pass over train_dataset must yield the batches of one epoch. A batch must be a tuple, list or dict of NumPy
        arrays or of arrays of the network's library. If there is a loss_fn, a batch must be (data, ..., label). With
        PyTorch, integer labels become int64, and CPU arrays are moved to the device of the module's first parameter.
        callbacks: one Callback or several. They are called in the given order, except that ModelCheckpoint is called
        last. dataset_sink_mode, sink_size: no effect, because steps always run one by one, as with MindSpore on the
        CPU; values other than the defaults print a warning. initial_epoch: the number of epochs to skip at the
        beginning; it must be 0 after resume(), which determines where training begins.

        Before each epoch, train() calls set_epoch() on the dataset and on a DataLoader's samplers with the number of
        the epoch, which is counted from 0. It does not call set_epoch() on a dataset that has state_dict() and
        load_state_dict(), because such a dataset counts its epochs itself.

        In data-parallel mode (set_auto_parallel_context), the ranks of the group train one model. Each rank uses the
        batches of its own dataset, and all ranks make the same updates. Callbacks see the mean of the ranks' losses. In
        stand-alone mode, the default, each rank trains its own model.

        The modes SEMI_AUTO_PARALLEL and AUTO_PARALLEL need a PyTorch module or a Cell of mscomm.nn. The first step
        makes a plan (see mscomm.parallel.plan) and divides the weights among the ranks, and the end of train() brings
        them together again. The loss and the gradients are those of the whole batch of all ranks. Checkpoints contain
        whole weights and optimizer states, so all ranks must save them at the same steps, and any number of ranks can
        resume() with other strategies.

        recovery: whether training goes on if ranks are lost and restarted. None means yes if the job restarts lost
        ranks, that is, under `mscomm run --max-restarts N`, or with MS_ENABLE_RECOVERY=1. The surviving ranks then call
        rejoin(). All ranks go on after the newest step whose state they can take from the memory of a surviving rank,
        or from the newest checkpoint that is complete on all ranks, or from the beginning. A restarted rank runs the
        same script, which must not make collective calls between init() and train(), except create_group and split.
        train() begins from the newest common checkpoint in the directory of the first ModelCheckpoint if an earlier job
        did not finish the training, so the script need not call resume(). Callbacks see repeated steps again: after a
        failure they are exited, and then they are entered again, load_state_dict() is called if they have a state, and
        begin() is called. True is for launchers that restart all processes themselves, such as torchrun: train() then
        only begins from the newest common checkpoint. False: a lost rank raises PeerLost, and train() begins at step 0.
        Recovery needs data-parallel mode with all ranks of the job.

        Raise TypeError or ValueError for invalid arguments, and RuntimeError if the dataset yields fewer batches than
        its size. All ranks raise ValueError if they differ in the number of batches or epochs, or if they begin with
        different weights or optimizer states. All ranks also raise ValueError if two ranks on one host write
        checkpoints to the same directory. With recovery, they raise ValueError if keep_checkpoint_max is 1, and
        RuntimeError if there is nothing from which all ranks can go on. The other errors are those of all_reduce, and
        those of rejoin() if training cannot go on after a failure.
        """
        _checked("sink_size", sink_size, -1)
        notices.tell_without_effect("Model.train", dataset_sink_mode=dataset_sink_mode, sink_size=sink_size)
        steps = self._steps(epoch, train_dataset, callbacks, initial_epoch, recovery, dataset_sink_mode)
        for step in steps:
            try:
                with step as batch:
                    step.loss = self._network.step(batch, step.reducer)
                    if step.loss.shape != ():
                        raise ValueError(
                            f"Model.train: the loss has the shape {list(step.loss.shape)}; it must be one number"
                        )
            except BaseException as error:
                steps.throw(error)  # the callbacks are exited with this error

    def steps(
        self,
        epoch: int,
        train_dataset: Any,
        callbacks: Any = None,
        *,
        initial_epoch: int = 0,
        recovery: bool | None = None,
    ) -> Iterator[TrainingStep]:
        """Yield the steps of a training loop of your own, with the callbacks, checkpoints and recovery of train().

        The arguments, the errors and the steps are those of train(). Compute each step inside `with step as batch`. The
        whole body of the loop must be in this block, because a step that fails is repeated if training can go on. If
        the ranks train together, `step.reducer` is the GradientReducer of this step; reduce with it once in a step, and
        update the weights only after that. `step.report(loss)` tells the callbacks this rank's loss. Pass schedulers
        and other objects that change during training as callbacks with state_dict() and load_state_dict(), so that
        checkpoints and recovery include them.

        >>> for step in model.steps(10, loader, callbacks=[files]):
        ...     with step as (images, labels):
        ...         step.reducer.zero_grad()
        ...         loss = loss_fn(net(images), labels)
        ...         step.report(loss)
        ...         loss.backward()
        ...         step.reducer.wait()
        ...         optimizer.step()
        """
        if self._divides():
            raise NotImplementedError(
                "Model.steps: not for modes that divide the network; use Model.train, or mscomm.parallel.divide()"
            )
        return self._steps(epoch, train_dataset, callbacks, initial_epoch, recovery, False)

    def _steps(
        self,
        epoch: int,
        train_dataset: Any,
        callbacks: Any,
        initial_epoch: int,
        recovery: bool | None,
        dataset_sink_mode: bool,
    ) -> Generator[TrainingStep, None, None]:
        listed = hooks.checked(callbacks)
        # ModelCheckpoint comes last, because it saves the other callbacks' states.
        listed.sort(key=lambda one: isinstance(one, ModelCheckpoint))
        batches = _checked_size(epoch, train_dataset, initial_epoch)
        if self._given["optimizer"] is None:
            raise ValueError("Model.train: there is no optimizer; give one to Model()")
        if initial_epoch and self._resumed is not None:
            raise ValueError(f"Model.train: initial_epoch={initial_epoch} after resume(), which says where to begin")
        group = self._training_group("train")
        plan = _Plan(group, listed, epoch, train_dataset, batches, initial_epoch, dataset_sink_mode)
        guard = self._recovery(recovery, plan)
        if group is None or guard is None:
            yield from self._attempt(plan, self._resumed or (None, None), None)
            return
        while True:
            try:
                start = guard.align(group)
                if start is not None:
                    yield from self._attempt(plan, start, guard)
                return
            except FAILURES as failure:
                guard.rejoin(failure)
                self._network.clear_gradients()

    def _recovery(self, wanted: bool | None, plan: _Plan) -> Recovery | None:
        """Return the Recovery for a call of train(), or None without recovery."""
        if wanted is not None and not isinstance(wanted, bool):
            raise TypeError(f"Model.train: recovery is a {type(wanted).__name__}; expected a bool or None")
        restarts = is_initialized() and job.default().restarts
        if wanted is False or (wanted is None and not restarts):
            return None
        group, optimizer = plan.group, self._given["optimizer"]
        lacks = ""
        if group is None or group.size == 1 or group.size < job.default().size or self._divides():
            lacks = "data-parallel mode with all ranks of a job of several ranks"
        elif not hasattr(optimizer, "state_dict") and not hasattr(optimizer, "get_parameters"):
            lacks = "an optimizer with state_dict() and load_state_dict()"
        if group is None or lacks:
            if wanted:
                notices.warn_once(f"Model.train: recovery=True has no effect: it needs {lacks}")
            return None
        return Recovery(
            self._network,
            plan.dataset,
            plan.callbacks,
            epoch=plan.epoch,
            batches=plan.batches,
            initial_epoch=plan.initial_epoch,
            resumed=self._resumed,
            compressed=self._compression is not None,
            rejoins=restarts,
            load=lambda found: self._load(found, group),
        )

    def _attempt(self, plan: _Plan, start: Start, guard: Recovery | None) -> Iterator[TrainingStep]:
        """Train from the given start to the end."""
        resumed, state = start
        group, listed, epoch, train_dataset, batches, initial_epoch, dataset_sink_mode = plan
        done = _steps_done(resumed, state, batches, initial_epoch)
        folders = [folder for one in listed for folder in one.writes_to()]
        all_ranks_save, part = _agree(group, {BATCHES: batches, "epochs": epoch, "first step": done + 1}, folders)
        self._resumed = None
        if group is not None and resumed is None and context.get_auto_parallel_context("parameter_broadcast"):
            own = self._network.own()
            shared = {name: x for name, x in self._network.weights().items() if name not in own}
            sent = broadcast_parameters(shared, group=group)
            new = {name: x for name, x in sent.items() if x is not shared[name]}  # arrays not overwritten in place
            self._network.load({name: on_host(x, name, "Model.train") for name, x in new.items()})
        _check_same_start(
            group,
            "weights",
            self._network.trained(),
            "use the same seed on every rank, or mscomm.set_auto_parallel_context(parameter_broadcast=True)",
        )
        _check_same_start(
            group,
            "optimizer states",
            self._optimizer_entries(),
            "make the same optimizer on every rank, and resume all from one checkpoint",
        )
        self._divide(group)
        reducer = self._reducer(group)
        if reducer is not None and state is not None and state["reducer"] is not None:
            reducer.load_state_dict(state["reducer"])

        now = SimpleNamespace(
            **self._given,
            train_network=self._given["network"],
            train_dataset=train_dataset,
            list_callback=listed,
            parallel_mode=context.get_auto_parallel_context("parallel_mode"),
            dataset_sink_mode=dataset_sink_mode,
            epoch_num=epoch,
            batch_num=batches,
            cur_epoch_num=done // batches + 1,
            cur_step_num=done,
            net_outputs=None,
            local_loss=None,
            train_dataset_element=None,
            communication_s=0.0,
            group=group,
            rank=resolve(group).rank if is_initialized() else 0,
            device_number=1 if group is None else group.size,
            all_ranks_save=all_ranks_save,
            resumed_from=resumed,
            run=(resumed.run if resumed is not None else "") or part,
            part=part,
            call=None if guard is None else guard.call,
            epoch_random=None,
        )
        numbers = None if state is None else state.get("epochs", {})
        epochs = Epochs(train_dataset, initial_epoch, numbers, first=done // batches)
        run_context = RunContext(now)
        now.training_state = lambda whole=True: self._training_state(run_context, reducer, epochs, whole)
        if guard is not None:
            guard.follow(reducer, lambda: _position(run_context, reducer, epochs), start)
            if state is not None and state.get("stopped"):
                run_context.request_stop()
        try:
            _load_callbacks(listed, state["callbacks"] if state is not None else [])
            yield from self._loop(run_context, reducer, state, epochs, guard)
        finally:
            if reducer is not None:
                reducer.close()

    def resume(self, path: str | os.PathLike[str]) -> tuple[int, int] | None:
        """Load a checkpoint. The results of the next train() are bit-identical to those of an uninterrupted run.

        path: a file, or a directory that ModelCheckpoint has written to. Each rank must have its own directory. In a
        directory, resume() considers only the training run that wrote the newest file. It loads the newest checkpoint
        that is complete and undamaged on every rank. A warning names the checkpoints that are skipped. In data-parallel
        mode, all ranks must call resume() together, after set_auto_parallel_context.

        Return the (epoch, step) of the checkpoint, or None if there is nothing to resume, so a script can always call
        resume(). The result is None if no rank has a checkpoint. It is also None, with a warning, if some ranks have
        only the first checkpoint of the run and the others have none. No file is deleted.

        The dataset's load_state_dict() restores the position in the dataset. If the dataset has no such method, train()
        reads the batches of the epoch again and skips the batches that were already used. If the number of ranks or of
        batches has changed, resume() or train() raises ValueError. You can then load only the weights, with
        load_checkpoint.

        All ranks raise ValueError if the training run got further than its first checkpoint, but there is no checkpoint
        that all ranks have. resume() also raises ValueError if a file is truncated, damaged, not a checkpoint, or a
        checkpoint of another network.

        >>> model.resume(f"checkpoints/{mscomm.get_rank()}")
        (3, 100)
        """
        group = self._training_group("resume")
        agreed = resuming.agree_on(Path(path), group)
        if agreed is None:
            return None
        self._load(agreed, group)
        chosen, _, state = agreed
        self._resumed = (chosen, state)
        return chosen.epoch, chosen.step

    def _load(self, checkpoint: resuming.Resumed, group: Group | None) -> None:
        """Load a checkpoint into the network and the optimizer. Raise ValueError if it does not fit."""
        chosen, weights, state = checkpoint
        ranks, mine = state["ranks"], _place(group)
        if ranks[1] != mine[1]:
            raise ValueError(
                f"Model.resume: {chosen.path} was written by one of {ranks[1]} ranks, now there are {mine[1]}; to"
                " load only its weights: load_param_into_net(net, load_checkpoint(file))"
            )
        if ranks[0] != mine[0]:
            log.warn(
                f"Model.resume: rank {mine[0]} continues from the checkpoint of rank {ranks[0]}, {chosen.path}: with"
                " that rank's random numbers, running means and residual of compression"
            )
        there = self._network.weights()
        differing = [*(weights.keys() - there.keys()), *(there.keys() - weights.keys())]
        if differing:
            raise ValueError(
                f"Model.resume: {chosen.path} belongs to another network: only one of the two has "
                f"{sorted(differing)[0]}"
            )
        try:
            self._network.load(weights)
            self._network.load_optimizer_state(state["optimizer"])
        except ValueError as error:
            raise ValueError(f"Model.resume: {chosen.path}: {error}") from error

    def _optimizer_entries(self) -> dict[str, Any]:
        """Return the optimizer's state as {path: entry}. Entries that each rank keeps for itself are left out."""
        optimizer = self._given["optimizer"]
        if not hasattr(optimizer, "state_dict") and not hasattr(optimizer, "get_parameters"):
            return {}  # a user-defined optimizer, whose state cannot be saved
        entries = states.entries(self._network.optimizer_state())
        return {"".join(f"[{key!r}]" for key in path): x for path, x in entries if not self._network.is_own_entry(path)}

    def _training_group(self, function: str) -> Group | None:
        """Return the group whose ranks train one model, or None if this rank trains alone. function: the function's
        name, for error messages."""
        if context.get_auto_parallel_context("parallel_mode") == ParallelMode.STAND_ALONE:
            if not context.auto_parallel_was_set("parallel_mode"):
                _tell_if_one_of_several(self._group)
            return None
        group = resolve(self._group)
        for name, mine, what in (
            ("device_num", group.size, "the number of ranks is"),
            ("global_rank", group.rank, "this rank is"),
        ):
            said = context.get_auto_parallel_context(name)
            if context.auto_parallel_was_set(name) and said != mine:
                raise ValueError(f"Model.{function}: {name}={said} was set, but {what} {mine}")
        return group

    def _divides(self) -> bool:
        return context.get_auto_parallel_context("parallel_mode") in context.DIVIDING

    def _divide(self, group: Group | None) -> None:
        """Prepare the network for a mode that divides it. In other modes, warn of an option that has no effect."""
        mode = context.get_auto_parallel_context("parallel_mode")
        if group is None or not self._divides():
            if context.get_context("save_graphs"):
                notices.warn_once(
                    f"Model.train: save_graphs has no effect in the parallel mode {mode}; mscomm has graphs only where"
                    " it divides the network (SEMI_AUTO_PARALLEL, AUTO_PARALLEL)"
                )
            return
        search_mode = context.get_auto_parallel_context("search_mode")
        if context.auto_parallel_was_set("search_mode") and search_mode != "sharding_propagation":
            raise NotImplementedError(
                f'Model.train: search_mode={search_mode!r} is not in mscomm; "sharding_propagation" is, and the default'
            )
        if self._compression is not None:
            raise NotImplementedError(f"Model.train: compression is not in this release for the parallel mode {mode}")
        self._network.divide(mode, group)

    def _reducer(self, group: Group | None) -> GradientReducer | None:
        if group is None or self._divides():
            return None
        mean = context.get_auto_parallel_context("gradients_mean")
        if group.size > 1 and not mean:
            notices.warn_once(
                f"Model.train: the gradients of {group.size} ranks are summed, as gradients_mean is False (MindSpore's"
                " default); for their mean: mscomm.set_auto_parallel_context(gradients_mean=True)",
                group.rank,
            )
        trained = self._network.trained()
        if not trained:
            notices.warn_once(
                "Model.train: each rank trains a model of its own, because all parameters have layerwise_parallel=True",
                group.rank,
            )
            return None
        fusion = (context.get_auto_parallel_context("comm_fusion") or {}).get("allreduce", {})
        return GradientReducer(
            trained,
            mean=mean,
            bucket_mb=fusion.get("config"),
            compression=self._compression,
            group=group,
        )

    def _loop(
        self,
        run_context: RunContext,
        reducer: GradientReducer | None,
        state: dict[str, Any] | None,
        epochs: Epochs,
        guard: Recovery | None,
    ) -> Iterator[TrainingStep]:
        now = run_context.original_args()
        called = list(now.list_callback)
        if guard is not None:
            called.append(guard)
            called.sort(key=lambda one: isinstance(one, ModelCheckpoint))
        with contextlib.ExitStack() as entered:
            for one in now.list_callback:
                entered.enter_context(one)

            def call(hook: str) -> None:
                for one in called:
                    getattr(one, f"on_train_{hook}")(run_context)

            self._network.begin()
            call("begin")
            while now.cur_step_num < now.epoch_num * now.batch_num and not run_context.get_stop_requested():
                now.cur_epoch_num = now.cur_step_num // now.batch_num + 1
                epochs.begin()
                call("epoch_begin")
                for batch in self._rest_of_epoch(now, state):
                    now.train_dataset_element = networks.as_tuple(batch)
                    now.cur_step_num += 1
                    call("step_begin")
                    step = TrainingStep(now, reducer, () if guard is None else FAILURES)
                    try:
                        yield step
                    except GeneratorExit:
                        step.abandon()
                        raise
                    step.end()
                    call("step_end")
                    if run_context.get_stop_requested():
                        break
                state = None
                call("epoch_end")
            if now.group is not None:
                try:
                    collectives.barrier(group=now.group)
                except FAILURES as failure:
                    if guard is None or not guard.may_end_without(failure):
                        raise
            call("end")
            self._network.join()

    def _rest_of_epoch(self, now: SimpleNamespace, state: dict[str, Any] | None) -> Iterator[Any]:
        """Yield the remaining batches of the current epoch. state: if training resumes in this epoch, the state in the
        checkpoint; otherwise None."""
        dataset, first = now.train_dataset, now.cur_step_num % now.batch_num
        taken = first
        if state is not None:
            if knows_its_place(dataset) and state["dataset"] is not None:
                dataset.load_state_dict(state["dataset"])
            else:
                taken = 0
            # If batches are read again, restore the random states that the program had when the epoch began, because
            # the order of the dataset may depend on these states.
            randomness.restore(state["epoch_random"] if taken < first and state["epoch_random"] else state["random"])
        now.epoch_random = None if knows_its_place(dataset) else randomness.states()
        batches = iter(dataset)
        while taken < now.batch_num:
            if taken == first > 0 and state is not None:
                randomness.restore(state["random"])
            try:
                batch = next(batches)
            except StopIteration:
                raise RuntimeError(
                    f"Model.train: epoch {now.cur_epoch_num} ended after {taken} batches, but the dataset had"
                    f" announced {now.batch_num}"
                ) from None
            taken += 1
            if taken > first:
                yield batch

    def _training_state(
        self, run_context: RunContext, reducer: GradientReducer | None, epochs: Epochs, whole: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what a checkpoint holds: (weights, state). whole: whether a divided network's parts are joined."""
        slices = {} if whole else self._network.slices()
        if not slices:
            return self._network.weights(), {**self._state(run_context, reducer, epochs), "slices": {}}
        state = {**_position(run_context, reducer, epochs), "slices": slices}
        return self._network.parts(), state

    def _state(self, run_context: RunContext, reducer: GradientReducer | None, epochs: Epochs) -> dict[str, Any]:
        """Return everything that a checkpoint holds in addition to the weights."""
        return {
            "optimizer": self._network.optimizer_state(),
            **_position(run_context, reducer, epochs),
            "reducer": None if reducer is None else reducer.state_dict(),
            "callbacks": hooks.states_of(run_context.original_args().list_callback),
        }


def _position(run_context: RunContext, reducer: GradientReducer | None, epochs: Epochs) -> dict[str, Any]:
    """Return what a checkpoint holds about the position in the training, without the arrays of the training."""
    now = run_context.original_args()
    return {
        "epochs": epochs.numbers(ended=now.cur_step_num % now.batch_num == 0),
        "epoch": (now.cur_step_num - 1) // now.batch_num + 1,
        "step": (now.cur_step_num - 1) % now.batch_num + 1,
        "batch_num": now.batch_num,
        "run": now.run,
        "part": now.part,
        "job": job_id(),
        "call": now.call,
        "stopped": run_context.get_stop_requested(),
        "ranks": _place(now.group),
        "reducer": None if reducer is None else {"order": reducer.order, "residual": {}},
        "random": randomness.states(),
        "epoch_random": now.epoch_random,
        "dataset": now.train_dataset.state_dict() if knows_its_place(now.train_dataset) else None,
    }


def _steps_done(resumed: Saved | None, state: dict[str, Any] | None, batches: int, initial_epoch: int) -> int:
    """Return the number of steps that come before the first step of this train()."""
    if resumed is None or state is None:
        return initial_epoch * batches
    if state["batch_num"] != batches:
        raise ValueError(
            f"Model.train: an epoch has {batches} batches; it had {state['batch_num']} when {resumed.path.name} was"
            " written"
        )
    return (resumed.epoch - 1) * batches + resumed.step


def _checked(name: str, value: Any, low: int) -> None:
    """Raise TypeError or ValueError unless the argument of train() is a number from low, and not 0 if low is -1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"Model.train: {name} is a {type(value).__name__}; expected an int")
    if value < low or (low < 0 and value == 0):
        raise ValueError(f"Model.train: {name}={value}; expected {'-1 or ' if low < 0 else ''}{max(low, 0)} or more")


def _checked_size(epoch: Any, train_dataset: Any, initial_epoch: Any) -> int:
    """Raise TypeError or ValueError for invalid arguments of train(). Return the number of batches in an epoch."""
    _checked("epoch", epoch, 1)
    _checked("initial_epoch", initial_epoch, 0)
    if initial_epoch >= epoch:
        raise ValueError(f"Model.train: initial_epoch={initial_epoch} must be less than epoch={epoch}")
    if hasattr(train_dataset, "get_dataset_size"):
        size = int(train_dataset.get_dataset_size())
    elif hasattr(train_dataset, "__len__"):
        size = len(train_dataset)
    else:
        raise TypeError(
            f"Model.train: train_dataset is a {type(train_dataset).__name__}, which has neither get_dataset_size() nor"
            " len()"
        )
    if size < 1:
        raise ValueError("Model.train: the dataset has no batches on this rank")
    return size


def _load_callbacks(callbacks: list[hooks.Callback], states: list[Any]) -> None:
    """Load each pair (class name, state) into the first callback of that class that has no state yet."""
    left = list(callbacks)
    for name, state in states:
        one = next((one for one in left if type(one).__name__ == name), None)
        if one is None:
            log.warn(
                f"Model.train: the checkpoint has the state of a callback {name}, which was not passed; this state is "
                "ignored"
            )
            continue
        left.remove(one)
        one.load_state_dict(state)


def _place(group: Group | None) -> list[int]:
    """Return [rank, size] in the group whose ranks train together.

    Return [0, 1] if this rank trains alone, or in a mode that divides the network: a checkpoint then is the same on all
    ranks, and any number of ranks can go on from it.
    """
    divides = context.get_auto_parallel_context("parallel_mode") in context.DIVIDING
    return [0, 1] if group is None or divides else [group.rank, group.size]


def _agree(group: Group | None, facts: dict[str, Any], folders: list[str]) -> tuple[bool, str]:
    """Return whether all ranks write checkpoints, and a random name for this call of train(). All ranks get the same
    name. Raise ValueError on all ranks if the facts differ, or if two ranks on one host write to the same folder."""
    part = secrets.token_hex(8)
    if group is None:
        return False, part
    everybodys = objects.all_gather_object([facts, folders, part], group=group)
    if not all(isinstance(theirs, list) for theirs in everybodys):
        raise ValueError("Model.train: recovery is on for some ranks only; pass the same on every rank")
    for name in facts:
        values = [theirs[name] for theirs, *_ in everybodys]
        if len(set(values)) > 1:
            other = next(rank for rank, value in enumerate(values) if value != values[0])
            advice = "; give every rank a shard of the same size (num_shards, shard_id, drop_remainder)"
            raise ValueError(
                f"Model.train: ranks differ in {name}: {values[0]} on rank 0, {values[other]} on rank {other} of the"
                f" group{advice if name == BATCHES else ''}"
            )
    owners: dict[tuple[int, str], int] = {}
    for rank, (_, theirs, _) in enumerate(everybodys):
        for folder in set(theirs):
            first = owners.setdefault((group.hosts[rank], folder), rank)
            if first != rank:
                raise ValueError(
                    f"Model.train: ranks {first} and {rank} of the group write checkpoints into one directory,"
                    f" {folder};"
                    ' give each its own, as directory=f"checkpoints/{get_rank()}"'
                )
    counts = [len(theirs) for _, theirs, _ in everybodys]
    if len(set(counts)) > 1 and context.get_auto_parallel_context("parallel_mode") in context.DIVIDING:
        other = next(rank for rank, count in enumerate(counts) if count != counts[0])
        raise ValueError(
            f"Model.train: rank 0 of the group writes {counts[0]} series of checkpoints, rank {other} {counts[other]}."
            " In a mode that divides the network, all ranks must save, because they join their parts"
        )
    return all(count == len(folders) > 0 for count in counts), everybodys[0][2]


def _check_same_start(group: Group | None, what: str, mine: dict[str, Any], advice: str) -> None:
    """Raise ValueError on all ranks if the ranks begin with different values. mine: this rank's arrays and numbers, by
    name."""
    if group is None or group.size == 1:
        return
    sums = {name: states.checksum(x, name, "Model") for name, x in mine.items()}
    everybodys = objects.all_gather_object(sums, group=group)
    first = everybodys[0]
    for rank, theirs in enumerate(everybodys):
        if what == "weights" and theirs.keys() != first.keys():
            continue  # GradientReducer will raise a more detailed error
        name = next((name for name in {**first, **theirs} if theirs.get(name) != first.get(name)), None)
        if name is not None:
            raise ValueError(
                f"Model.train: ranks 0 and {rank} of the group begin with different {what}, of {name}; {advice}"
            )


def _tell_if_one_of_several(group: Group | str | None) -> None:
    """Warn if there are several processes and each trains its own model. Stand-alone mode is the default, as in
    MindSpore, but users rarely want it."""
    if is_initialized():
        size = resolve(group).size
        if size > 1:
            notices.warn_once(
                f"Model: each of the {size} ranks trains a model of its own. For one model: {ONE_MODEL}",
                resolve(group).rank,
            )
        return
    place = bootstrap.announced(os.environ)
    if place is not None and place.size != 1:
        if place.rank is None:
            notices.know_rank(0)  # without init(), the rank is unknown, so let every process warn
        notices.warn_once(
            f"Model: {place.launcher} has started {place.size or 'several'} processes, but mscomm.init() was not"
            f" called: each trains a model of its own. For one model: mscomm.init(), then {ONE_MODEL}"
        )
