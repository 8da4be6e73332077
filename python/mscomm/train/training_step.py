"""TrainingStep: one step of Model.steps()."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mscomm import log
from mscomm.errors import Error
from mscomm.train.reducer import GradientReducer


class TrainingStep:
    """One step of Model.steps(). `with step as batch` gives the batch, as a tuple.

    Attributes: reducer, the GradientReducer, or None if this rank trains alone; number, counted from 1 over all epochs;
    epoch, counted from 1. The block passes on every exception, except the loss of a rank in a call with recovery: this
    ends only the block, and steps() then repeats the step or raises the error. failures: the types of these errors.
    """

    def __init__(
        self, now: SimpleNamespace, reducer: GradientReducer | None, failures: tuple[type[Error], ...]
    ) -> None:
        self.reducer = reducer
        self.number: int = now.cur_step_num
        self.epoch: int = now.cur_epoch_num
        self.loss: Any = None
        self._now = now
        self._failures = failures
        self._ended = False
        self._error: BaseException | None = None

    def report(self, loss: Any) -> None:
        """Tell the callbacks this rank's loss, a number or a one-element array. Their net_outputs is the mean over the
        ranks.

        Call this before the backward pass, or before reducer.reduce(). Raise RuntimeError if it is too late for this
        step.
        """
        self.loss = float(loss.detach() if hasattr(loss, "detach") else loss)
        if self.reducer is not None:
            self.reducer.carry(self.loss)

    def __enter__(self) -> tuple[Any, ...]:
        batch: tuple[Any, ...] = self._now.train_dataset_element
        return batch

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        self._ended = True
        if not isinstance(error, self._failures):
            return False
        self._error = error
        return True

    def abandon(self) -> None:
        """Called if the program leaves the loop. Warn of the failure that ended the block, if any."""
        if self._error is not None:
            log.warn(
                f"Model.steps: the program left the loop after step {self.number} had failed:"
                f" {type(self._error).__name__}: {self._error}. Put the whole body of the loop into `with step`, so"
                " that the step is repeated"
            )

    def end(self) -> None:
        """Raise the failure that ended the block, if any. Otherwise, tell the callbacks the loss."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # otherwise, its traceback would keep this frame, and the frame would keep the error
        if not self._ended:
            raise RuntimeError("Model.steps: a step was left out; compute each step inside `with step as batch`")
        now = self._now
        now.local_loss = now.net_outputs = self.loss
        if self.reducer is not None:
            if self.loss is not None:
                now.net_outputs = type(self.loss)(self.reducer.carried)
            now.communication_s = self.reducer.waited_s
