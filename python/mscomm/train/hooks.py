"""Defines Callback, the base class of callbacks, and RunContext, the argument of their methods, as in MindSpore."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any


class RunContext:
    """The argument of all callback methods. It describes the state of the training run, and can end the run."""

    def __init__(self, arguments: SimpleNamespace) -> None:
        self._arguments = arguments
        self._stop = False

    def original_args(self) -> SimpleNamespace:
        """Return the values of the training run, as attributes.

        * cur_epoch_num, cur_step_num: the current epoch and step, counted from 1; steps are counted over all epochs.
          epoch_num: the number of the final epoch. batch_num: the number of steps in an epoch.
        * net_outputs: the step's loss, a NumPy scalar with the dtype of the loss. In data-parallel training it is the
          mean over the ranks, and has the same bits on all ranks. local_loss: this rank's own loss.
        * network, loss_fn, optimizer, train_dataset, list_callback, parallel_mode, dataset_sink_mode: as the program
          passed them.
        * train_dataset_element: the batch, as a tuple.
        * group: the ranks that train together, or None if this rank trains alone. device_number: how many ranks train
          together. rank: the number of this rank in the group, or in the job if this rank trains alone.
        * communication_s: how many seconds this rank has waited for communication since training began.
        * training_state: a function that returns what ModelCheckpoint writes: (weights, state); with
          whole=False, the weights are this rank's parts if the network is divided.
        """
        return self._arguments

    def request_stop(self) -> None:
        """End the training after this step.

        In data-parallel training, every rank must call this at the same step. So base the decision on net_outputs,
        which is the same on all ranks.
        """
        self._stop = True

    def get_stop_requested(self) -> bool:
        """Return whether request_stop() was called."""
        return self._stop


class Callback:
    """The base class of callbacks: override the methods that you need. Model.train calls them with a RunContext.

    The methods begin, epoch_begin, step_begin, step_end, epoch_end and end have second names, as in MindSpore:
    on_train_begin, on_train_epoch_begin and so on. You can override a method under either name. A callback is also a
    context manager, which is entered before begin and exited when training ends, even after an exception. When training
    goes on after a failure, the callback is exited, and then everything happens again as in a call of Model.train after
    Model.resume: the callback is entered, load_state_dict and begin are called, and the repeated steps follow.

    >>> class StopAt(mscomm.Callback):
    ...     def step_end(self, run_context):
    ...         if run_context.original_args().net_outputs < 0.1:
    ...             run_context.request_stop()
    """

    def __enter__(self) -> Callback:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def writes_to(self) -> list[str]:
        """Return the folders that only this rank may write to. If two ranks of a host return the same folder, train()
        raises an error."""
        return []

    def state_dict(self) -> dict[str, Any] | None:
        """Return this callback's state for a checkpoint: numbers, text and arrays. None means that there is no state.

        Change this state only in step_end or epoch_end, because a checkpoint is written after these methods.
        """
        return None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Called before begin when training resumes. state: what state_dict() returned, with all arrays as NumPy
        arrays."""

    def begin(self, run_context: RunContext) -> None:
        """Called before the first step."""

    def epoch_begin(self, run_context: RunContext) -> None:
        """Called before each epoch."""

    def step_begin(self, run_context: RunContext) -> None:
        """Called before each step."""

    def step_end(self, run_context: RunContext) -> None:
        """Called after each step."""

    def epoch_end(self, run_context: RunContext) -> None:
        """Called after each epoch."""

    def end(self, run_context: RunContext) -> None:
        """Called after the last step, when every rank has finished that step."""

    def on_train_begin(self, run_context: RunContext) -> None:
        self.begin(run_context)

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        self.epoch_begin(run_context)

    def on_train_step_begin(self, run_context: RunContext) -> None:
        self.step_begin(run_context)

    def on_train_step_end(self, run_context: RunContext) -> None:
        self.step_end(run_context)

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        self.epoch_end(run_context)

    def on_train_end(self, run_context: RunContext) -> None:
        self.end(run_context)


def states_of(callbacks: Sequence[Callback]) -> list[tuple[str, dict[str, Any]]]:
    """Return a pair (class name, state) for each callback that has a state."""
    return [(type(one).__name__, own) for one in callbacks if (own := one.state_dict()) is not None]


def checked(callbacks: Any) -> list[Callback]:
    """Return a list of callbacks, given one callback, several, or None. Raise TypeError for anything else."""
    given = [] if callbacks is None else list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
    for one in given:
        if not isinstance(one, Callback):
            raise TypeError(f"Model.train: callbacks has a {type(one).__name__}; expected an mscomm.train.Callback")
    return given
