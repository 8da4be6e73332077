"""DatasetIterator makes passes over a pipeline, and keeps track of the program's position in a pass."""

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
    """The attributes and methods of a pipeline that DatasetIterator uses. See pipeline.Dataset for their meaning."""

    columns: tuple[str, ...]
    position: tuple[int, int]

    def begin_pass(self) -> tuple[int, int, int]: ...

    def tickets(self, seed: int, epoch: int) -> Generator[Any, None, None]: ...

    def load(self, turn: Turn, tickets: Sequence[Any]) -> list[Any]: ...

    def widths(self) -> dict[int, int]: ...

    def threads(self) -> int: ...


def row_of(column: Any, which: int) -> Any:
    """Return one row of a column. The column is an array whose first axis indexes the rows, or a list of arrays."""
    return column[which, ...] if isinstance(column, np.ndarray) else column[which]


class DatasetIterator:
    """The iterator that create_dict_iterator and create_tuple_iterator return. Each pass is the pipeline's next epoch.

    After the end of a pass, the next `for` begins another pass, up to num_epochs passes (-1: any number). If the
    program leaves a pass with `break`, the next `for` over the same iterator continues the pass. The iterator's thread
    ends when close() is called, when the iterator's `with` block is left, or when nothing references the iterator.
    """

    def __init__(self, dataset: Pipeline, columns: Sequence[str], as_dict: bool, num_epochs: int) -> None:
        if isinstance(num_epochs, bool) or not isinstance(num_epochs, int):
            raise TypeError(f"num_epochs is a {type(num_epochs).__name__}; expected an int")
        if num_epochs != -1 and num_epochs < 1:
            raise ValueError(f"num_epochs={num_epochs}; expected 1 or more, or -1 for no limit")
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
            if 0 < self._batch == self._first:  # resumed at the end of a pass: begin the next pass
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
        """End the thread. The iterator then yields no more batches."""
        rows, self._rows, self._left = self._rows, None, 0
        if rows is not None:
            rows.close()

    def __enter__(self) -> DatasetIterator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _rows(dataset: Pipeline, seed: int, epoch: int, skip: int) -> Generator[Any, None, None]:
    """Yield the rows or batches of one pass, without making the first `skip` of them."""
    tickets = dataset.tickets(seed, epoch)

    def make(turn: Turn, ticket: Any) -> tuple[Any, ...]:
        # Return arrays in C order, because functions such as torch.from_numpy do not accept negative strides.
        row = (row_of(column, 0) for column in dataset.load(turn, [ticket]))
        return tuple(array if array.flags.c_contiguous else array.copy() for array in row)

    with contextlib.closing(tickets):
        rest = itertools.islice(tickets, skip, None)
        yield from in_order(make, seed, rest, dataset.threads(), dataset.widths())
