"""Passes over a pipeline, and the program's position in a pass."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator, Sequence
from typing import Any, Protocol

import numpy as np

from mscomm.dataset import config
from mscomm.dataset.prefetch import Prefetch
from mscomm.dataset.workers import Turn, in_order


class Pipeline(Protocol):
    """What a pass needs of a pipeline. The methods are described in pipeline.Dataset."""

    columns: tuple[str, ...]
    position: tuple[int, int]

    def begin_pass(self) -> tuple[int, int, int]: ...

    def tickets(self, seed: int, epoch: int) -> Generator[Any, None, None]: ...

    def load(self, turn: Turn, tickets: Sequence[Any]) -> list[Any]: ...

    def widths(self) -> dict[int, int]: ...

    def threads(self) -> int: ...


def row_of(column: Any, which: int) -> Any:
    """One row of a column. The column is an array whose first axis counts the rows, or a list of arrays."""
    return column[which, ...] if isinstance(column, np.ndarray) else column[which]


class DatasetIterator:
    """What create_dict_iterator and create_tuple_iterator return. Each pass over it is the pipeline's next epoch.

    After the end of a pass, the next `for` begins another pass, up to num_epochs passes (-1: without end). If a pass
    was left by `break`, the next `for` over the same iterator continues it. The iterator's thread ends with close(),
    when a `with` block is left, or when the iterator is no longer referenced.
    """

    def __init__(self, dataset: Pipeline, columns: Sequence[str], as_dict: bool, num_epochs: int) -> None:
        if isinstance(num_epochs, bool) or not isinstance(num_epochs, int):
            raise TypeError(f"num_epochs is a {type(num_epochs).__name__}; expected an int")
        if num_epochs != -1 and num_epochs < 1:
            raise ValueError(f"num_epochs={num_epochs}; expected 1 or more, or -1 for no end")
        for name in columns:
            if name not in dataset.columns:
                raise ValueError(f"there is no column {name!r}; there are {', '.join(dataset.columns)}")
        self._dataset = dataset
        self._columns = tuple(columns)
        self._places = [dataset.columns.index(name) for name in columns]
        self._as_dict = as_dict
        self._left = num_epochs
        self._rows: Prefetch | Generator[Any, None, None] | None = None
        self._epoch = self._batch = self._first = 0

    def __iter__(self) -> DatasetIterator:
        return self

    def __next__(self) -> Any:
        if self._rows is None:
            if self._left == 0:
                raise StopIteration
            self._begin()
        assert self._rows is not None
        try:
            row = next(self._rows)
        except StopIteration:
            self._rows = None
            if 0 < self._batch == self._first:  # the state was taken after the pass's last batch: begin the next pass
                return next(self)
            self._left -= self._left > 0
            self._dataset.position = (self._epoch + 1, 0)
            raise
        except BaseException:
            self.close()
            raise
        self._batch += 1
        self._dataset.position = (self._epoch, self._batch)
        chosen = tuple(row[place] for place in self._places)
        return dict(zip(self._columns, chosen, strict=True)) if self._as_dict else chosen

    def _begin(self) -> None:
        seed, self._epoch, self._batch = self._dataset.begin_pass()
        self._first = self._batch
        rows = _rows(self._dataset, seed, self._epoch, self._batch)
        ahead = config.get_prefetch_size()
        self._rows = Prefetch(rows, ahead) if ahead else rows

    def close(self) -> None:
        """End the thread; there are no further batches."""
        rows, self._rows, self._left = self._rows, None, 0
        if rows is not None:
            rows.close()

    def __enter__(self) -> DatasetIterator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _rows(dataset: Pipeline, seed: int, epoch: int, skip: int) -> Generator[Any, None, None]:
    """The rows or batches of one pass, without the first `skip`: of these, only the order is computed."""
    tickets = dataset.tickets(seed, epoch)

    def make(turn: Turn, ticket: Any) -> tuple[Any, ...]:
        # In C order, because functions such as torch.from_numpy do not take negative strides.
        row = (row_of(column, 0) for column in dataset.load(turn, [ticket]))
        return tuple(array if array.flags.c_contiguous else array.copy() for array in row)

    widths = dataset.widths()
    threads = dataset.threads()
    with contextlib.closing(tickets):
        yield from in_order(make, seed, itertools.islice(tickets, skip, None), threads, widths)
