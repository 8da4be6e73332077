"""Sources and steps for the mscomm.dataset tests, and functions that inspect a pass and its threads."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
from images import numbers

import mscomm.dataset as ds

SEED = 5489


def given_by(data: ds.Dataset) -> list[Any]:
    """Make one pass over data. Return the values of its first column, as Python numbers, texts or lists."""
    return [row[0].tolist() for row in data]


def same(some: list[Any], others: list[Any]) -> bool:
    """Return whether the rows are the same, bit for bit."""
    return len(some) == len(others) and all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
        for one, other in zip(some, others, strict=True)
        for x, y in zip(one, other, strict=True)
    )


class Rows:
    """A source with random access. It records which rows are read."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.read: list[int] = []

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.read.append(index)
        return np.full(3, index, np.float32), index

    def __len__(self) -> int:
        return self.n


def ordered(n: int) -> ds.Dataset:
    return ds.GeneratorDataset(numbers(n), "x", shuffle=False)


def fails_at_5(x: Any) -> Any:
    if x == 5:
        raise KeyError("no such word")
    return x


def fillers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("mscomm-data")]


def none_is_left() -> bool:
    """Wait up to 60 s for the threads of all datasets to end. Each thread finishes its batch first. Return whether all
    threads have ended.
    """
    until = time.monotonic() + 60
    while fillers() and time.monotonic() < until:
        time.sleep(0.001)
    return not fillers()
