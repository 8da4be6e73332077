"""StepTrace: records when a rank computed, read data and communicated. `mscomm trace` reads the records."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from mscomm.train.hooks import Callback, RunContext


class StepTrace(Callback):
    """Writes a file `rank_<rank>.json` when training ends. Pass the same directory on all ranks.

    The file describes steps first_step to last_step of this training run. For each step, it says when the step began,
    how long the step took, how long the rank waited for data, and which calls the group made.
    `mscomm trace merge DIR -o FILE` merges the files of all ranks into one file for Perfetto. `mscomm trace DIR` says
    which rank the others waited for. At the end, rank 0 prints which steps were recorded. Raises ValueError if
    first_step is below 1 or last_step is below first_step.

    >>> model.train(1, dataset, callbacks=[mscomm.train.StepTrace("trace", first_step=10, last_step=20)])
    """

    def __init__(self, directory: str | os.PathLike[str], first_step: int = 1, last_step: int = 20) -> None:
        if not 0 < first_step <= last_step:
            raise ValueError(
                f"StepTrace: steps {first_step} to {last_step}; expected a first step of 1 or more, and a last step "
                "that is not before it"
            )
        self._directory = Path(directory)
        self._first, self._last = first_step, last_step
        self._calls: list[dict[str, Any]] = []
        self._ended = self._began = 0.0  # when the previous step ended, and when the current step began
        self._steps = 0  # how many steps of this training run have begun
        self._number = 0  # the number of the latest recorded call of the group
        self._who: tuple[int, int] | None = None

    def begin(self, run_context: RunContext) -> None:
        now = run_context.original_args()
        self._calls, self._steps, self._ended = [], 0, time.time()
        self._who = (now.rank, now.device_number)

    def step_begin(self, run_context: RunContext) -> None:
        now = run_context.original_args()
        self._began = time.time()
        self._steps += 1
        if self._steps == self._first and now.group is not None:
            self._number = now.group.core.where()[0]

    def step_end(self, run_context: RunContext) -> None:
        now = run_context.original_args()
        ended = time.time()
        if self._first <= self._steps <= self._last:
            self._note("data", now, self._ended, self._began)
            self._note("step", now, self._began, ended)
            for call in now.group.core.calls(self._number) if now.group is not None else ():
                self._calls.append({**call, "group": now.group.name})
                self._number = call["number"]
        self._ended = ended

    def __exit__(self, *error: object) -> None:
        if self._who is None:
            return
        (rank, size), self._who = self._who, None
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"rank_{rank}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(
            json.dumps({"rank": rank, "size": size, "cause": "the training ended", "calls": self._calls})
        )
        partial.replace(path)
        if rank == 0:
            last = min(self._last, self._steps)
            which = f"steps {self._first} to {last} are" if self._first <= last else "no step is"
            asked = f"first_step={self._first}, last_step={self._last}"
            print(f"StepTrace: {which} in {self._directory}, of {self._steps} ({asked})", flush=True)

    def _note(self, what: str, now: Any, began: float, ended: float) -> None:
        number = now.cur_step_num
        call = f"{what} #{number} (epoch {now.cur_epoch_num})"
        span = {"number": number, "call": call, "state": "done", "began": began, "took": ended - began, "group": what}
        self._calls.append(span)
