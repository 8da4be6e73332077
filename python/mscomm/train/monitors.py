"""Callbacks that report the progress of training: LossMonitor, TimeMonitor, ProgressBar."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

from mscomm import notices
from mscomm.train.hooks import Callback, RunContext

_EVERY_S = 5.0  # the interval at which ProgressBar prints lines if there is no terminal


def _say(line: str) -> None:
    """Print a line with a single write, so that it is not mixed with lines that other ranks write to the same pipe.
    print() would write the newline separately."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class LossMonitor(Callback):
    """Prints lines such as `epoch: 1 step: 1, loss is 2.3025854`. The loss is the mean over the ranks.

    The mean has the same bits on all ranks. per_print_times: the number of steps between two lines; 0 prints no lines.
    local: if True, the lines show the loss of this rank's own batch. If the mean is NaN or infinite, training ends with
    a ValueError on every rank, even if no lines are printed.

    Raises TypeError if per_print_times is not an int, and ValueError if it is negative.

    >>> model.train(10, dataset, callbacks=[mscomm.LossMonitor()])
    """

    def __init__(self, per_print_times: int = 1, local: bool = False) -> None:
        if isinstance(per_print_times, bool) or not isinstance(per_print_times, int):
            raise TypeError(f"LossMonitor: per_print_times is a {type(per_print_times).__name__}; expected an int")
        if per_print_times < 0:
            raise ValueError(f"LossMonitor: per_print_times is {per_print_times}; expected 0 or more")
        self._per_print_times = per_print_times
        self._local = local

    def step_end(self, run_context: RunContext) -> None:
        now = run_context.original_args()
        step = (now.cur_step_num - 1) % now.batch_num + 1
        where = f"epoch: {now.cur_epoch_num} step: {step}"
        if not np.isfinite(now.net_outputs):
            raise ValueError(
                f"{where}. Invalid loss {now.net_outputs!s} ({now.local_loss!s} on rank {now.rank}): training ends here"
            )
        if self._per_print_times and now.cur_step_num % self._per_print_times == 0:
            loss = now.local_loss if self._local else now.net_outputs
            _say(f"{where}, loss is {loss!s}")  # str() writes a float32 with few digits; format() writes more


class TimeMonitor(Callback):
    """Prints the duration of each epoch at its end: `Train epoch time: 1234.567 ms, per step time: 12.346 ms`.

    data_size: the number of steps in an epoch; by default, the dataset's size. data_time: no effect; True prints a
    warning.
    """

    def __init__(self, data_size: int | None = None, data_time: bool = False) -> None:
        notices.tell_without_effect("TimeMonitor", data_time=data_time)
        self._steps = data_size
        self._began = 0.0

    def epoch_begin(self, run_context: RunContext) -> None:
        self._began = time.monotonic()

    def epoch_end(self, run_context: RunContext) -> None:
        took_ms = 1e3 * (time.monotonic() - self._began)
        each_ms = took_ms / (self._steps or run_context.original_args().batch_num)
        _say(f"Train epoch time: {took_ms:5.3f} ms, per step time: {each_ms:5.3f} ms")


class ProgressBar(Callback):
    """Shows the epoch, the steps, the loss, the speed and the share of communication on rank 0's terminal.

    The speed is in data rows per second over all ranks. The share of communication is the part of the time that rank 0
    spends waiting for communication.

    console: a rich.console.Console; by default it is on stderr. If the console is not a terminal, as under `mscomm
    run`, ProgressBar prints a line every 5 seconds and one at the end.

    >>> model.train(10, dataset, callbacks=[mscomm.train.ProgressBar()])
    """

    def __init__(self, console: Any = None) -> None:
        self._console = console
        self._active = False  # True on rank 0 during training
        self._state = ""  # without a terminal: the latest step's line, or "" if this line has been printed
        self._printed = 0.0
        self._bar: Any = None
        self._task: Any = None
        self._rows = 0
        self._began = 0.0

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._print()

    def begin(self, run_context: RunContext) -> None:
        self._active = run_context.original_args().rank == 0
        if not self._active:
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._console = self._console or Console(stderr=True)
        self._rows, self._began = 0, time.monotonic()
        self._printed = self._began
        if not (self._console.is_terminal or self._console.is_jupyter):
            return
        says = TextColumn("loss {task.fields[loss]}  {task.fields[rate]} images/s  {task.fields[share]} communication")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), says)
        self._bar = Progress(*columns, console=self._console)
        self._task = self._bar.add_task("", total=0, loss="-", rate="-", share="-")
        self._bar.start()

    def step_end(self, run_context: RunContext) -> None:
        if not self._active:
            return
        now = run_context.original_args()
        self._rows += len(now.train_dataset_element[0]) * now.device_number
        took = max(time.monotonic() - self._began, 1e-9)
        epoch = f"epoch {now.cur_epoch_num}/{now.epoch_num}"
        step = (now.cur_step_num - 1) % now.batch_num + 1
        loss, rate = f"{now.net_outputs:.4f}", f"{self._rows / took:.0f}"
        share = f"{100 * now.communication_s / took:.0f} %"
        if self._bar is not None:
            self._bar.update(
                self._task, description=epoch, total=now.batch_num, completed=step, loss=loss, rate=rate, share=share
            )
            return
        self._state = f"{epoch} {step}/{now.batch_num} loss {loss}  {rate} images/s  {share} communication"
        if time.monotonic() - self._printed >= _EVERY_S:
            self._print()

    def _print(self) -> None:
        """Print the line of the latest step, unless it has already been printed."""
        if self._state:
            self._console.print(self._state, highlight=False, soft_wrap=True)
        self._state, self._printed = "", time.monotonic()
