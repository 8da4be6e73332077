"""GeneratorDataset: a source whose rows come from a Python object."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from mscomm.dataset import agree, workers
from mscomm.dataset.pipeline import Column, Source, Ticket, Tickets, names_of
from mscomm.dataset.sampler import DistributedSampler, choose
from mscomm.dataset.workers import Turn


class GeneratorDataset(Source):
    """A source whose rows come from a Python object.

    source: a function that returns an iterator over rows; an object that can be iterated repeatedly; or an object with
    random access (__getitem__ and __len__) that is not callable. A row is a tuple or list with one item per column. An
    item is an array, or something that numpy.asarray can convert to an array; the dtype must not be object. If there is
    only one column, a row may also be the item itself. column_names: one name or several.

    num_shards, shard_id, shuffle, sampler: as in Cifar10Dataset. If the source has no random access, these arguments
    raise ValueError, except shuffle=False. With random access, rows are shuffled unless shuffle=False, as in MindSpore.
    num_samples: the maximum number of rows for this rank. num_parallel_workers: as in Dataset.map, but None means 1, as
    in MindSpore. A source without random access is read by only one thread. Raises ValueError if source is an iterator,
    because it can be read only once. mscomm may call the source in one of its own threads. If the source raises an
    exception, or if a row is invalid, the iterator raises a RuntimeError that names the row.

    >>> data = GeneratorDataset(lambda: iter([(1, 2.0), (3, 4.0)]), ["input", "label"])
    >>> [(x.item(), y.item()) for x, y in data]
    [(1, 2.0), (3, 4.0)]
    """

    def __init__(
        self,
        source: Callable[[], Iterator[Any]] | Iterable[Any] | Sequence[Any],
        column_names: str | Sequence[str],
        *,
        num_samples: int | None = None,
        num_parallel_workers: int | None = None,
        shuffle: bool | None = None,
        sampler: DistributedSampler | Iterable[int] | None = None,
        num_shards: int | None = None,
        shard_id: int | None = None,
    ) -> None:
        threads = workers.checked("GeneratorDataset", num_parallel_workers)
        names = names_of("GeneratorDataset", "column_names", column_names)
        super().__init__(names, threads or 1)
        self._source: Any = source
        self._random_access = not callable(source) and hasattr(source, "__getitem__") and hasattr(source, "__len__")
        self._num_samples = num_samples
        self._counted: int | None = None
        if self._random_access:
            self._sampler = choose("GeneratorDataset", num_samples, shuffle, sampler, num_shards, shard_id)
            return
        sharding = {"sampler": sampler, "num_shards": num_shards, "shard_id": shard_id}
        for name, value in {**sharding, "shuffle": shuffle or None}.items():
            if value is not None:
                raise ValueError(
                    f"GeneratorDataset: {name} needs a source with __getitem__ and __len__;"
                    f" this {type(source).__name__} can only be read in order"
                )
        if not callable(source) and not hasattr(source, "__iter__"):
            raise TypeError(
                f"GeneratorDataset: source is a {type(source).__name__}; expected a function that returns an iterator,"
                " something to iterate over, or an object with __getitem__ and __len__"
            )
        if isinstance(source, Iterator):
            raise ValueError(
                f"GeneratorDataset: source is a {type(source).__name__}, which can be read only once; give the function"
                " that makes it"
            )
        # This call only checks the remaining arguments. Rows are read in order, so the returned sampler is not used.
        self._sampler = choose("GeneratorDataset", num_samples, False, None, None, None)

    def compare(self, facts: Callable[[], dict[str, Any]]) -> None:
        if not self._random_access:
            return
        mine: dict[str, Any] = {}
        problem: Exception | None = None
        try:
            mine = {"rows": len(self._source), **facts()}
        except Exception as error:  # the user's __len__ may raise any exception; agree.compare() tells the other ranks
            problem = error
        agree.compare("GeneratorDataset", self._sampler.num_shards, mine, type(self._source).__name__, problem)

    def tickets(self, seed: int, epoch: int) -> Tickets:
        if self._random_access:
            for index in self._sampler.indices(len(self._source), seed, epoch).tolist():
                yield Ticket(epoch, index)
            return
        index = -1
        try:
            rows = iter(self._source() if callable(self._source) else self._source)
            for index, row in enumerate(rows):
                if self._num_samples and index == self._num_samples:
                    return
                yield Ticket(epoch, index, row)
        except Exception as error:
            raise RuntimeError(_tell(index + 1, error)) from error

    def load(self, turn: Turn, tickets: Sequence[Ticket]) -> list[Column]:
        rows = []
        with turn.at(self._place):
            for ticket in tickets:
                try:
                    rows.append(self._row(self._source[ticket.sample] if self._random_access else ticket.held))
                except Exception as error:
                    raise RuntimeError(_tell(ticket.sample, error)) from error
        return [list(column) for column in zip(*rows, strict=True)]

    def _row(self, given: Any) -> tuple[Any, ...]:
        values = tuple(given) if isinstance(given, (tuple, list)) else (given,)
        if len(values) != len(self.columns):
            raise ValueError(f"it has {len(values)} values, there are {len(self.columns)} columns")
        arrays = tuple(np.asarray(value) for value in values)
        for name, array in zip(self.columns, arrays, strict=True):
            if array.dtype.hasobject:
                raise TypeError(f"column {name} is an array of Python objects, not of numbers or text")
        return arrays

    def get_dataset_size(self) -> int:
        if self._random_access:
            return self._sampler.count(len(self._source))
        if self._counted is None:
            self._counted = sum(1 for _ in self.tickets(0, 0))
        return self._counted

    def _known_size(self) -> int | None:
        return self.get_dataset_size() if self._random_access else self._counted

    def _described(self) -> list[str]:
        what = f"{len(self._source)} rows, {self._sampler}" if self._random_access else "in order"
        limit = f", num_samples {self._num_samples}" if self._num_samples and not self._random_access else ""
        return [f"GeneratorDataset({what}{limit})"]


def _tell(index: int, error: Exception) -> str:
    return f"GeneratorDataset: row {index} of the source: {type(error).__name__}: {error}"
