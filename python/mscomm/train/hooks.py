"""Callbacks, which Model.train calls at each step. The names are MindSpore's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class RunContext:
    """The argument of callbacks: it says where the training is, and can end the training."""

    def __init__(self, arguments: SimpleNamespace) -> None:
        self._arguments = arguments
        self._stop = False

    def original_args(self) -> SimpleNamespace:
        """The training's values, as attributes.

        * cur_epoch_num, cur_step_num: the current epoch and step, counted from 1; steps are counted over all epochs.
          epoch_num: the last epoch. batch_num: the number of steps in an epoch.
        * net_outputs: the step's loss, a NumPy scalar of the loss's dtype. In data parallel training it is the mean
          over the ranks, with the same bits on all. local_loss: this rank's own loss.
        * network, loss_fn, optimizer, train_dataset, list_callback, parallel_mode, dataset_sink_mode: as the program
          gave them.
        * train_dataset_element: the batch, as a tuple.
        * group: the ranks that train together, None if this rank trains alone. device_number: how many ranks these are.
          rank: this rank's number in the group, or in the job if it trains alone.
        * communication_s: the seconds that this rank has waited for communication since the training began.
        * training_state: a function that returns what ModelCheckpoint writes: (weights, state).
        """
        return self._arguments

    def request_stop(self) -> None:
        """End the training after this step.

        In data parallel training, every rank must call it at the same step. So decide by net_outputs, which is the same
        on all ranks.
        """
        self._stop = True

    def get_stop_requested(self) -> bool:
        """Whether request_stop() was called."""
        return self._stop


class Callback:
    """The base class of callbacks: override the methods that you need. Each is called with a RunContext.

    on_train_begin, on_train_epoch_begin, on_train_step_begin, on_train_step_end, on_train_epoch_end, on_train_end call
    begin, epoch_begin, step_begin, step_end, epoch_end and end; you can override either of the two. A callback is a
    context manager, which is entered before begin and left at the end of the training, also after an exception.

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
        """The folders that only this callback writes to. Two ranks of a host that name the same folder cannot train."""
        return []

    def state_dict(self) -> dict[str, Any] | None:
        """What a checkpoint keeps of this callback, such as a scheduler's state: numbers, text, arrays, or None.

        Change this state in step_end or epoch_end, because the checkpoint of a step is written after them.
        """
        return None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Called before begin when training resumes, with what state_dict() returned. Arrays are NumPy's."""

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
        """Called after the last step, when every rank has ended it."""

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


def checked(callbacks: Any) -> list[Callback]:
    """A list of one callback, of several, or of none for None. TypeError for anything else."""
    given = [] if callbacks is None else list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
    for one in given:
        if not isinstance(one, Callback):
            raise TypeError(f"Model.train: callbacks has a {type(one).__name__}; expected a mscomm.train.Callback")
    return given
