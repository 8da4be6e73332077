"""ModelCheckpoint saves the state of a training run in files. Model.resume continues with bit-identical results.

A rank's file also holds state that differs between ranks: random states, the position in the data, and the compression
residual. Therefore, each rank writes to its own directory. In data-parallel training, all ranks take part in reducing
the gradients of step k + 1. A rank that has completed this reduction knows that all ranks have written their
checkpoints for step k. Only then does the rank delete older files. So at any time, there is a checkpoint that every
rank has.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np

from mscomm import collectives, notices
from mscomm.train import serialization, tensorfile
from mscomm.train.hooks import Callback, RunContext


class CheckpointConfig:
    """Tells ModelCheckpoint when to write files and which files to keep. Names and defaults are MindSpore's.

    save_checkpoint_steps: the number of steps between two files. save_checkpoint_seconds: the time between two files,
    measured by rank 0's clock; used if save_checkpoint_steps is 0 or None. keep_checkpoint_max: how many files to keep;
    the oldest are deleted. keep_checkpoint_per_n_minutes: used if keep_checkpoint_max is 0 or None; ModelCheckpoint
    then keeps the newest file, and one older file for every period of this many minutes. integrated_save:
    if False, and the network is divided (SEMI_AUTO_PARALLEL, AUTO_PARALLEL), each rank's file has only its own parts of
    the weights, which load_distributed_checkpoint merges; Model.resume cannot read such files. async_save: no effect,
    because a file is complete when the step ends; True prints a warning. crc_check: no effect, because files always
    have a checksum.

    Raises TypeError if a value is not a number, ValueError if a number is negative or if all four numbers are 0 or
    None, and NotImplementedError for MindSpore's other options.

    >>> config = mscomm.CheckpointConfig(save_checkpoint_steps=100, keep_checkpoint_max=5)
    """

    def __init__(
        self,
        save_checkpoint_steps: int | None = 1,
        save_checkpoint_seconds: float | None = 0,
        keep_checkpoint_max: int | None = 5,
        keep_checkpoint_per_n_minutes: float | None = 0,
        integrated_save: bool = True,
        async_save: bool = False,
        **others: Any,
    ) -> None:
        numbers = {
            "save_checkpoint_steps": save_checkpoint_steps,
            "save_checkpoint_seconds": save_checkpoint_seconds,
            "keep_checkpoint_max": keep_checkpoint_max,
            "keep_checkpoint_per_n_minutes": keep_checkpoint_per_n_minutes,
        }
        for name, value in numbers.items():
            kinds = (int,) if name in ("save_checkpoint_steps", "keep_checkpoint_max") else (int, float)
            if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
                raise TypeError(f"CheckpointConfig: {name} is a {type(value).__name__}; expected a number")
            if value is not None and value < 0:
                raise ValueError(f"CheckpointConfig: {name} is {value}; expected 0 or more")
        if not any(numbers.values()):
            raise ValueError(f"CheckpointConfig: one of {', '.join(numbers)} must be more than 0")
        for name, value in others.items():
            if name not in ("saved_network", "append_info", "enc_key", "enc_mode", "exception_save", "crc_check"):
                raise TypeError(f"CheckpointConfig: unknown option {name!r}")
            if value and name != "crc_check" and not (name == "enc_mode" and others.get("enc_key") is None):
                raise NotImplementedError(f"CheckpointConfig: {name} is not in this release")
        self.save_checkpoint_steps = save_checkpoint_steps or 0
        self.save_checkpoint_seconds = 0 if save_checkpoint_steps else save_checkpoint_seconds or 0
        self.keep_checkpoint_max = keep_checkpoint_max or (0 if keep_checkpoint_per_n_minutes else 1)
        self.keep_checkpoint_per_n_minutes = 0 if keep_checkpoint_max else keep_checkpoint_per_n_minutes or 0
        notices.tell_without_effect("CheckpointConfig", async_save=async_save)
        self.integrated_save = integrated_save
        self.async_save = async_save


class ModelCheckpoint(Callback):
    """Writes checkpoints to this rank's directory, at config's intervals and at the end of training.

    The files are named `<prefix>-<epoch>_<step>.safetensors`.

    prefix: the beginning of the file names. If the directory already has files with that prefix, a new training run
    uses `<prefix>_1`, `<prefix>_2` and so on; after Model.resume(directory), training continues with the prefix of the
    resumed file. directory: where to write the files; it is created if it does not exist. None means the current
    directory. If two ranks on one host use the same directory, all ranks raise an error before training begins. config:
    a CheckpointConfig.

    A file gets its final name only when its whole content is on disk. It holds the weights under their own names, so
    any safetensors reader can read them. It also holds, as text and arrays, the epoch, the step, the optimizer's state,
    random states, the dataset's position and the compression residual. Nothing in a file can be executed. A CRC-32
    checksum of the whole content reveals damage when the file is read. Until a rank knows that every rank has the
    newest file, it keeps one file more than keep_checkpoint_max.

    Raises TypeError if prefix or config has the wrong type, ValueError if prefix is empty or has a slash, and OSError
    if a file cannot be written; earlier files are then unchanged.

    >>> config = mscomm.CheckpointConfig(save_checkpoint_steps=100)
    >>> directory = f"checkpoints/{mscomm.get_rank()}"
    >>> model.train(10, dataset, callbacks=[mscomm.ModelCheckpoint("resnet", directory, config)])
    """

    def __init__(
        self,
        prefix: str = "CKP",
        directory: str | os.PathLike[str] | None = None,
        config: CheckpointConfig | None = None,
    ) -> None:
        if not isinstance(prefix, str):
            raise TypeError(f"ModelCheckpoint: prefix is a {type(prefix).__name__}; expected a str")
        if not prefix or "/" in prefix:
            raise ValueError(f"ModelCheckpoint: prefix {prefix!r} must be part of a file's name, without a slash")
        if config is not None and not isinstance(config, CheckpointConfig):
            raise TypeError(f"ModelCheckpoint: config is a {type(config).__name__}; expected a CheckpointConfig")
        self._given_prefix = self._prefix = prefix
        self._directory = Path(directory or os.curdir)
        self._config = config or CheckpointConfig()
        # The files with the current prefix, in the order in which they will be deleted. Each file is paired with the
        # time when it was written.
        self._kept: list[tuple[Path, float]] = []
        self._has_saved = False  # whether this training run has saved a file
        self._is_due_at_epoch_end = False
        self._saved_step = 0
        self._saved_at = 0.0  # when the newest file was saved, on the monotonic clock
        self._minute_mark = 0.0  # when the newest file kept by keep_checkpoint_per_n_minutes was written

    @property
    def latest_ckpt_file_name(self) -> str:
        """The path of the newest file, or "" if there is no file yet."""
        return str(self._kept[-1][0]) if self._kept else ""

    @property
    def directory(self) -> Path:
        """The directory of the files."""
        return self._directory

    def why_no_recovery(self) -> str:
        """Return why training cannot be recovered from the files that this object keeps, or ""."""
        if self._config.keep_checkpoint_max != 1:
            return ""
        return (
            "keep_checkpoint_max is 1; recovery needs 2 or more, so that there is an older checkpoint if a file is"
            " damaged"
        )

    def writes_to(self) -> list[str]:
        return [os.path.realpath(self._directory)]

    def begin(self, run_context: RunContext) -> None:
        now = run_context.original_args()
        self._directory.mkdir(parents=True, exist_ok=True)
        for left in self._directory.glob(f".*{serialization.SUFFIX}.*{tensorfile.PARTIAL}"):
            left.unlink()  # left behind by a process that was killed
        there = serialization.named_like_one(self._directory)
        self._kept = []
        resumed = now.resumed_from
        if resumed is not None and self._is_of_series(resumed.prefix) and self._is_here(resumed.path):
            self._prefix = resumed.prefix
            mine = sorted((epoch, step, path) for path, prefix, epoch, step in there if prefix == resumed.prefix)
            # When old files are deleted, this rank's files of later steps go first. The job could not resume from these
            # steps, because at least one rank's file is damaged or missing. Training repeats the steps.
            later = [path for epoch, step, path in mine if (epoch, step) > (resumed.epoch, resumed.step)]
            others = [path for _, _, path in mine if path not in later]
            self._kept = [(path, path.stat().st_mtime) for path in (*later, *others)]
        else:
            numbers = [self._number(prefix) for _, prefix, *_ in there if self._is_of_series(prefix)]
            self._prefix = f"{self._given_prefix}_{max(numbers) + 1}" if numbers else self._given_prefix
        self._is_due_at_epoch_end = self._has_saved = False
        self._saved_step, self._saved_at, self._minute_mark = now.cur_step_num, time.monotonic(), time.time()

    def step_end(self, run_context: RunContext) -> None:
        now = run_context.original_args()
        self._delete_surplus()
        due = self._is_due(now)
        # At the final step of an epoch, save only after the other callbacks' epoch_end has run. A run that resumes from
        # the saved file begins with the next epoch, and does not call epoch_end for the finished epoch.
        self._is_due_at_epoch_end = due and now.cur_step_num % now.batch_num == 0
        if due and not self._is_due_at_epoch_end:
            self._save(now)

    def epoch_end(self, run_context: RunContext) -> None:
        now = run_context.original_args()
        is_last = now.cur_epoch_num == now.epoch_num or run_context.get_stop_requested()
        if self._is_due_at_epoch_end or (is_last and self._saved_step != now.cur_step_num):
            self._save(now)
        self._is_due_at_epoch_end = False

    def end(self, run_context: RunContext) -> None:
        self._delete_surplus()

    def _is_due(self, now: Any) -> bool:
        if self._config.save_checkpoint_steps:
            return bool(now.cur_step_num % self._config.save_checkpoint_steps == 0)
        if not self._config.save_checkpoint_seconds:
            return False
        due = np.array([time.monotonic() - self._saved_at >= self._config.save_checkpoint_seconds])
        if now.all_ranks_save:  # all ranks must save at the same step, so use rank 0's clock
            collectives.broadcast_(due, group=now.group)
        return bool(due[0])

    def _save(self, now: Any) -> None:
        weights, state = now.training_state(whole=self._config.integrated_save)
        if not self._config.integrated_save and not state["slices"]:
            notices.warn_once(
                "ModelCheckpoint: integrated_save=False has no effect: the network is not divided, so each rank has the"
                " whole weights"
            )
        written = time.time()
        path = self._directory / f"{self._prefix}-{state['epoch']}_{state['step']}{serialization.SUFFIX}"
        serialization.save_training(
            path, weights, state, written, first=now.resumed_from is None and not self._has_saved
        )
        self._has_saved = True
        self._kept = [*((old, at) for old, at in self._kept if old != path), (path, written)]
        self._saved_step, self._saved_at = now.cur_step_num, time.monotonic()

    def _delete_surplus(self) -> None:
        """Delete the files that config says not to keep. Call this only when every rank has the newest file.

        Nothing is deleted before this training run has saved a file.
        """
        if not self._has_saved:
            return
        if self._config.keep_checkpoint_max:
            surplus = self._kept[: -self._config.keep_checkpoint_max]
        else:
            surplus = []
            for path, written in self._kept[:-1]:
                if written <= self._minute_mark:
                    continue  # an earlier call or an earlier run decided to keep this file
                if written - self._minute_mark >= 60 * self._config.keep_checkpoint_per_n_minutes:
                    self._minute_mark = written
                else:
                    surplus.append((path, written))
        for path, _ in surplus:
            path.unlink(missing_ok=True)
        self._kept = [one for one in self._kept if one not in surplus]

    def _is_here(self, path: Path) -> bool:
        return os.path.realpath(path.parent) == os.path.realpath(self._directory)

    def _is_of_series(self, prefix: str) -> bool:
        return re.fullmatch(rf"{re.escape(self._given_prefix)}(_\d+)?", prefix) is not None

    def _number(self, prefix: str) -> int:
        return int(prefix[len(self._given_prefix) + 1 :] or 0)
