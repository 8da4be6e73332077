"""Decides which rows of a source a rank reads in a pass, and in which order."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np

from mscomm.dataset import draws
from mscomm.dataset.config import whole

Indices = np.ndarray[Any, np.dtype[np.int64]]


class DistributedSampler:
    """Deals the rows to num_shards ranks in turn, as MindSpore's sampler does, and returns those of rank shard_id.

    shuffle: if True, the rows are dealt in a random order, which is the same on all ranks and different in each pass.
    num_samples: the maximum number of rows per rank; None or 0 means all. offset: if -1, every rank gets ceil(rows /
    num_shards) rows; when the rows run out, dealing continues with the first rows. If 0 or more, the first row goes to
    rank `offset` (rank 0 if offset is num_shards), and no row is dealt twice. Some ranks may then get one row more than
    others.

    Raises TypeError if an argument has the wrong type, and ValueError if num_samples is negative. Raises RuntimeError
    if num_shards is below 1, if shard_id is outside 0..num_shards-1, or if offset is below -1 or above num_shards.

    >>> DistributedSampler(2, 1, shuffle=False).indices(5, seed=0, epoch=0)
    array([1, 3, 0])
    """

    def __init__(
        self, num_shards: int, shard_id: int, shuffle: bool = True, num_samples: int | None = None, offset: int = -1
    ) -> None:
        self.num_shards = whole("DistributedSampler", "num_shards", num_shards)
        self.shard_id = whole("DistributedSampler", "shard_id", shard_id)
        self.offset = whole("DistributedSampler", "offset", offset)
        self.num_samples = 0 if num_samples is None else whole("DistributedSampler", "num_samples", num_samples)
        if not isinstance(shuffle, bool):
            raise TypeError(f"DistributedSampler: shuffle is a {type(shuffle).__name__}; expected a bool")
        self.shuffle = shuffle
        if self.num_shards < 1:
            raise RuntimeError(f"DistributedSampler: num_shards={num_shards}; expected 1 or more")
        if not 0 <= self.shard_id < self.num_shards:
            raise RuntimeError(
                f"DistributedSampler: shard_id={shard_id}; with num_shards={num_shards} expected 0 to {num_shards - 1}"
            )
        if not -1 <= self.offset <= self.num_shards:
            raise RuntimeError(f"DistributedSampler: offset={offset}; expected -1 to num_shards={num_shards}")
        if self.num_samples < 0:
            raise ValueError(f"DistributedSampler: num_samples={num_samples}; expected 0 or more, or None for all")

    def count(self, rows: int) -> int:
        """Return how many of the source's rows this rank reads in a pass."""
        even = -(-rows // self.num_shards)
        mine = even if self.offset < 0 else self._until(rows) - self._first
        return min(mine, self.num_samples) if self.num_samples else mine

    def indices(self, rows: int, seed: int, epoch: int) -> Indices:
        """Return the numbers of the rows that this rank reads in pass `epoch`, in order."""
        turns = np.arange(self._first, self._first + self.count(rows), dtype=np.int64)
        dealt: Indices = (turns * self.num_shards + self.shard_id - max(self.offset, 0)) % max(rows, 1)
        return draws.permutation(rows, seed, 0, epoch)[dealt] if self.shuffle else dealt

    @property
    def _first(self) -> int:
        """The first turn in which this rank gets a row. In each turn, each rank gets one row, except that the ranks
        before `offset` get none in turn 0."""
        return -(-max(max(self.offset, 0) - self.shard_id, 0) // self.num_shards)

    def _until(self, rows: int) -> int:
        """Return the first turn in which no row is left for this rank."""
        return max(-(-(rows + self.offset - self.shard_id) // self.num_shards), self._first)

    def __str__(self) -> str:
        """Return a text for state_dict(). The text is the same on all ranks among which the rows are divided."""
        words = [f"{self.num_shards} shards" if self.num_shards > 1 else "", "shuffle" if self.shuffle else "in order"]
        words += [f"num_samples {self.num_samples}" if self.num_samples else ""]
        words += [f"offset {self.offset}" if self.offset >= 0 else ""]
        return ", ".join(filter(None, words))


class Listed:
    """A sampler for a list of row numbers from the user. Each pass has the order of the list. The methods are those of
    DistributedSampler."""

    num_shards = 1

    def __init__(self, listed: Iterable[int]) -> None:
        try:
            self._listed = np.array([operator.index(index) for index in listed], np.int64)
        except TypeError:
            raise TypeError("sampler: expected a DistributedSampler or the numbers of rows, ints") from None

    def count(self, rows: int) -> int:
        return len(self._listed)

    def indices(self, rows: int, seed: int, epoch: int) -> Indices:
        wrong = self._listed[(self._listed < 0) | (self._listed >= rows)]
        if len(wrong):
            raise ValueError(f"sampler: there is no row {wrong[0]}; the source has {rows}")
        return self._listed

    def __str__(self) -> str:
        return f"{len(self._listed)} rows as listed"


def choose(
    source: str,
    num_samples: int | None,
    shuffle: bool | None,
    sampler: DistributedSampler | Iterable[int] | None,
    num_shards: int | None,
    shard_id: int | None,
) -> DistributedSampler | Listed:
    """Return the sampler that a source's arguments describe. shuffle=None means True. Raise the same errors as
    MindSpore."""
    if sampler is not None:
        for name, value in (("shuffle", shuffle), ("num_shards", num_shards), ("num_samples", num_samples)):
            if value is not None:
                raise RuntimeError(f"{source}: sampler and {name} cannot both be given; give {name} to the sampler")
        return sampler if isinstance(sampler, DistributedSampler) else Listed(sampler)
    if num_shards is None and shard_id is not None:
        raise RuntimeError(f"{source}: shard_id is given but num_shards is not")
    if num_shards is not None and shard_id is None:
        raise RuntimeError(f"{source}: num_shards is given but shard_id is not; pass shard_id=mscomm.get_rank()")
    shards, shard = (1, 0) if num_shards is None or shard_id is None else (num_shards, shard_id)
    whole(source, "num_shards", shards, 1)
    if not 0 <= whole(source, "shard_id", shard) < shards:
        raise ValueError(f"{source}: shard_id={shard}; with num_shards={shards} expected 0 to {shards - 1}")
    return DistributedSampler(shards, shard, True if shuffle is None else shuffle, num_samples)
