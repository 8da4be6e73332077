"""A pipeline is a source of rows, followed by steps: map, shuffle, batch, repeat.

A pass has two parts. `tickets` yields one ticket for each row or batch, in the order of the pass. It reads no rows,
unless the source has no random access. `load` makes the rows for given tickets. So a pass can be resumed without making
the rows before the resumed position, and one call of `load` makes all rows of a batch. The result of `load` depends
only on its arguments, so several threads may make batches at the same time (workers.py).

Rows of one shape are put into one array, whose first axis indexes the rows. mscomm's operations transform many rows of
the array in one call.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mscomm.dataset import config, draws, workers
from mscomm.dataset.iterator import DatasetIterator, row_of
from mscomm.dataset.operation import Array, Operation, RandomOperation
from mscomm.dataset.workers import Turn

Column = Array | list[Any]  # a column of several rows: an array whose first axis indexes the rows, or a list
_VERSION = 1  # the version of the format of state_dict()
_PIECE_BYTES = 1 << 20  # how many bytes map's operations process at once; these bytes stay in the cache


class Ticket(NamedTuple):
    """Stands for a row or a batch that has not been made yet."""

    epoch: int  # the number of the pass over the source; one pass over `repeat` makes several passes over the source
    sample: int  # the row's number in the source, the same on every rank; for a batch, the number of its first row
    held: Any = None  # for a batch, its rows' tickets; for a row of a source without random access, the row itself


Tickets = Generator[Ticket, None, None]


class Dataset(ABC):
    """The base class of sources and steps.

    One iteration over a dataset is called a pass, or an epoch. Each pass has its own order. A row has one array for
    each column. After `batch`, the arrays have an additional first axis, for the rows of the batch.
    """

    columns: tuple[str, ...]

    def __init__(self, place: int, workers: int | None) -> None:
        self._place = place  # the place in the pipeline; the source has place 0
        self._workers = workers  # how many threads may work in this step at once; None means any number
        self._seed: int | None = None
        self._next = (0, 0)  # the position at which the next pass begins: (epoch, batch)
        self._agreed = False
        self.position = (0, 0)  # the position in the latest pass: (epoch, number of batches taken)

    # -- adding steps --------------------------------------------------------------------------------------------------

    def map(
        self,
        operations: Callable[..., Any] | Sequence[Callable[..., Any]],
        input_columns: str | Sequence[str] | None = None,
        output_columns: str | Sequence[str] | None = None,
        num_parallel_workers: int | None = None,
    ) -> Dataset:
        """Apply operations to some columns of each row, one operation after the other.

        operations: one callable or several. The first operation gets the arrays of the input columns. Each later
        operation gets the result of the previous operation: an array, or a tuple of arrays. User-defined functions get
        arrays in C order. input_columns: one name or several; None means the first column. output_columns: names for
        the results. These names are needed if there are more or fewer results than input columns. In this case, the
        results become the first columns.

        num_parallel_workers: how many threads may work in this step at once, from 1 to the number of CPUs. None means
        no limit if all operations are from mscomm.dataset. If there is a user-defined function, None means 1, so the
        function sees the batches in order. An iterator has as many threads as the largest num_parallel_workers of its
        steps, and each thread makes whole batches. The results do not depend on the number of threads, unless a
        function keeps a state between calls.

        If an operation raises an exception, the iterator raises a RuntimeError in place of the batch. The error names
        the operation and the row. Raise TypeError if an operation is not callable, and ValueError if a column is
        unknown or num_parallel_workers is out of range.

        >>> data = data.map(operations=[vision.RandomCrop(24), vision.HWC2CHW()], input_columns="image")
        """
        return _Map(self, operations, input_columns, output_columns, workers.checked("map", num_parallel_workers))

    def shuffle(self, buffer_size: int) -> Dataset:
        """Shuffle rows within a window: each row is drawn at random from a buffer of the next buffer_size rows.

        The random numbers are the same on every rank, but different in each pass. Raise TypeError if buffer_size is not
        an int, and ValueError if it is below 2, as in MindSpore.

        >>> data = data.shuffle(buffer_size=10)
        """
        return _Shuffle(self, buffer_size)

    def batch(self, batch_size: int, drop_remainder: bool = False, num_parallel_workers: int | None = None) -> Dataset:
        """Combine every batch_size rows into a batch: each column's arrays are stacked along a new first axis.

        drop_remainder: if True, the last batch of a pass is dropped if it has fewer than batch_size rows. If the rows
        of a batch have different shapes or dtypes, the iterator raises RuntimeError in place of the batch.
        num_parallel_workers: as in map. Raise TypeError or ValueError for invalid arguments.

        >>> data = data.batch(batch_size=32, drop_remainder=True)
        """
        return _Batch(self, batch_size, drop_remainder, workers.checked("batch", num_parallel_workers))

    def repeat(self, count: int | None = None) -> Dataset:
        """Combine `count` passes into one. Each of the combined passes has its own order. None or -1 repeats endlessly.

        Raise TypeError if count is not an int, and ValueError if it is 0 or below -1.

        >>> data = data.repeat(2)
        """
        return _Repeat(self, count)

    # -- iterating, and sizes ------------------------------------------------------------------------------------------

    def create_dict_iterator(
        self, num_epochs: int = -1, output_numpy: bool = False, do_copy: bool = False
    ) -> DatasetIterator:
        """Return an iterator over the rows or batches as dicts {column: array}; see DatasetIterator.

        The arrays are NumPy arrays in C order. output_numpy and do_copy have no effect. Raise TypeError if num_epochs
        is not an int, and ValueError if it is 0 or below -1.

        >>> batch = next(data.batch(32).create_dict_iterator())
        >>> batch["image"].shape, batch["label"].shape
        ((32, 32, 32, 3), (32,))
        """
        return DatasetIterator(self, self.columns, True, num_epochs)

    def create_tuple_iterator(
        self,
        columns: Sequence[str] | None = None,
        num_epochs: int = -1,
        output_numpy: bool = False,
        do_copy: bool = False,
    ) -> DatasetIterator:
        """Return an iterator over tuples of arrays. columns: the names of the columns; None means all.

        The other arguments are those of create_dict_iterator. Raise ValueError for an unknown column.

        >>> image, label = next(data.batch(32).create_tuple_iterator())
        """
        return DatasetIterator(self, self.columns if columns is None else columns, False, num_epochs)

    def __iter__(self) -> DatasetIterator:
        """Return an iterator over one pass, which yields tuples of arrays, as in `for image, label in data`."""
        return DatasetIterator(self, self.columns, False, 1)

    @abstractmethod
    def get_dataset_size(self) -> int:
        """Return how many rows or batches a pass has on this rank. An endless repeat counts as one repetition.

        If the source does not know how many rows it has, it is read once to count them.
        """

    def get_col_names(self) -> list[str]:
        """Return the names of the columns, in the order in which a tuple iterator yields their arrays."""
        return list(self.columns)

    def get_batch_size(self) -> int:
        """Return the batch_size of the pipeline's last batch step, or 1 if there is none."""
        return 1

    def get_repeat_count(self) -> int:
        """Return the product of the counts of all repeat steps: -1 if one of them is endless, 1 if there are none."""
        return 1

    # -- resuming a pass -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the latest pass, for a checkpoint. The position is the same on every rank.

        The position is the one after the latest batch that the program has taken. Batches that were only prefetched do
        not change the position. The values of the dict are ints, strings and lists.

        >>> state = data.batch(32).state_dict()
        >>> state["epoch"], state["batch"], state["pipeline"]
        (0, 0, ['Cifar10Dataset(96 rows, shuffle)', 'batch(32)'])
        """
        epoch, batch = self.position
        if batch and batch == self._known_size():
            epoch, batch = epoch + 1, 0
        seed = config.get_seed() if self._seed is None else self._seed
        return {"version": _VERSION, "seed": seed, "epoch": epoch, "batch": batch, "pipeline": self._described()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`, a result of state_dict(): the next pass begins at the position in the state.

        The remaining batches of that pass are bit-identical to those of the interrupted run. If the source has random
        access, the order up to that position is computed again without reading or transforming rows. Raise ValueError
        if the state belongs to another pipeline; the message says what differs. In a job, load the state on every rank:
        before the next pass, the ranks compare their data again, and all ranks must take part in this comparison.

        >>> data.load_state_dict(data.state_dict())
        """
        try:
            version, seed, epoch, batch = (int(state[name]) for name in ("version", "seed", "epoch", "batch"))
            theirs = [str(step) for step in state["pipeline"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"load_state_dict: this is not the state of a pipeline: {state!r:.200}") from error
        if version != _VERSION or min(seed, epoch, batch) < 0 or max(seed, epoch, batch) >= 2**32:
            raise ValueError(
                f"load_state_dict: version {version}, seed {seed}, epoch {epoch}, batch {batch} is not a valid state"
            )
        for mine, other in itertools.zip_longest(self._described(), theirs, fillvalue="nothing"):
            if mine != other:
                raise ValueError(
                    f"load_state_dict: the state belongs to another pipeline: it has {other}, and this one has {mine}"
                )
        self._seed, self._next, self.position, self._agreed = seed, (epoch, batch), (epoch, batch), False

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next pass, counted from 0.

        The number determines the order and the random transformations. Without this call, each pass gets the next
        number. Model.train makes this call for its initial_epoch. Raise TypeError if epoch is not an int, and
        ValueError if it is outside 0..2**32-1.

        >>> data.set_epoch(3)
        """
        epoch = config.whole("set_epoch", "epoch", epoch, 0)
        if epoch >= 2**32:
            raise ValueError(f"set_epoch: epoch={epoch}; expected less than 2**32")
        self._next = self.position = (epoch, 0)

    def begin_pass(self) -> tuple[int, int, int]:
        """Begin a pass. Return its seed, its epoch and the number of its first batch. Before the first pass, the ranks
        compare their data."""
        seed = config.get_seed() if self._seed is None else self._seed
        if not self._agreed:
            begin = list(self._next)
            self.compare(lambda: {"seed": seed, "position": begin, "pipeline": self._described()})
            self._agreed = True
        self._seed = seed
        (epoch, batch), self._next = self._next, (self._next[0] + 1, 0)
        self.position = (epoch, batch)
        return seed, epoch, batch

    # -- methods that sources and steps implement ----------------------------------------------------------------------

    @abstractmethod
    def compare(self, facts: Callable[[], dict[str, Any]]) -> None:
        """Prepare the source for the first pass: compare facts() and this rank's data with those of the other ranks."""

    @abstractmethod
    def tickets(self, seed: int, epoch: int) -> Tickets:
        """Yield the tickets of a pass, in order."""

    @abstractmethod
    def load(self, turn: Turn, tickets: Sequence[Ticket]) -> list[Column]:
        """Make the rows of these tickets, and return them column by column. Several threads may call load() at once."""

    def widths(self) -> dict[int, int]:
        """Return {place of a step: how many threads may work in it at once}. Steps without a limit are left out."""
        return {} if self._workers is None else {self._place: self._workers}

    def threads(self) -> int:
        """Return how many threads make batches: the largest num_parallel_workers of the steps."""
        return self._workers or 1

    def _known_size(self) -> int | None:
        """Return the size if it is known without reading rows, else None."""
        return self.get_dataset_size()

    @abstractmethod
    def _described(self) -> list[str]:
        """Return one string per step, for state_dict. The strings describe everything that affects the rows' order."""


class Source(Dataset):
    """The first dataset of a pipeline."""

    def __init__(self, columns: Sequence[str], workers: int | None) -> None:
        super().__init__(0, workers)
        self.columns = tuple(columns)


class _Step(Dataset):
    """A dataset that transforms the dataset before it. This base class passes the rows on unchanged."""

    def __init__(self, before: Dataset, workers: int | None = None) -> None:
        super().__init__(before._place + 1, workers)
        self._before = before
        self.columns = before.columns

    def compare(self, facts: Callable[[], dict[str, Any]]) -> None:
        self._before.compare(facts)

    def tickets(self, seed: int, epoch: int) -> Tickets:
        yield from self._before.tickets(seed, epoch)

    def load(self, turn: Turn, tickets: Sequence[Ticket]) -> list[Column]:
        return self._before.load(turn, tickets)

    def widths(self) -> dict[int, int]:
        return {**self._before.widths(), **super().widths()}

    def threads(self) -> int:
        return max(self._before.threads(), super().threads())

    def get_dataset_size(self) -> int:
        return self._of(self._before.get_dataset_size())

    def _known_size(self) -> int | None:
        before = self._before._known_size()
        return None if before is None else self._of(before)

    def _of(self, before: int) -> int:
        """Return the size of this dataset, given the size of the dataset before it."""
        return before

    def get_batch_size(self) -> int:
        return self._before.get_batch_size()

    def get_repeat_count(self) -> int:
        return self._before.get_repeat_count()

    def _described(self) -> list[str]:
        return self._before._described()


class _Map(_Step):
    def __init__(
        self, before: Dataset, operations: Any, input_columns: Any, output_columns: Any, workers: int | None
    ) -> None:
        super().__init__(before, workers)
        self._operations = list(operations) if isinstance(operations, (list, tuple)) else [operations]
        if not self._operations:
            raise ValueError("map: operations is empty")
        for operation in self._operations:
            if not callable(operation):
                raise TypeError(f"map: {operation!r} is not callable; expected operations on arrays")
        self._inputs = [before.columns[0]] if input_columns is None else names_of("map", "input_columns", input_columns)
        self._outputs = self._inputs if output_columns is None else names_of("map", "output_columns", output_columns)
        for name in self._inputs:
            if name not in before.columns:
                raise ValueError(f"map: there is no column {name!r}; there are {', '.join(before.columns)}")
        others = [name for name in before.columns if name not in self._inputs]
        if set(others) & set(self._outputs):
            raise ValueError(f"map: output_columns {self._outputs} has the name of a column that stays")
        if len(self._outputs) == len(self._inputs):
            renamed = dict(zip(self._inputs, self._outputs, strict=True))
            self.columns = tuple(renamed.get(name, name) for name in before.columns)
        else:
            self.columns = (*self._outputs, *others)
        self._ours = all(isinstance(operation, Operation) for operation in self._operations)
        if not self._ours:
            self._workers = workers or 1
        self._row_bytes = [1] * len(self._operations)  # for each operation: the bytes per row of its latest result

    def load(self, turn: Turn, tickets: Sequence[Ticket]) -> list[Column]:
        columns = dict(zip(self._before.columns, self._before.load(turn, tickets), strict=True))
        inputs = [columns.pop(name) for name in self._inputs]
        with turn.at(self._place):
            drawn = self._draws(turn.seed, tickets)
            rows = _together(inputs[0]) if self._ours and len(inputs) == len(self._outputs) == 1 else None
            if rows is not None:
                columns[self._outputs[0]] = self._by_pieces(rows, drawn, tickets)
            else:
                columns.update(zip(self._outputs, self._by_rows(inputs, drawn, tickets), strict=True))
        return [columns[name] for name in self.columns]

    def _draws(self, seed: int, tickets: Sequence[Ticket]) -> list[list[int]]:
        """Return one list per operation: random bits for each row. An operation without random bits gets an empty
        list."""
        epochs, samples = [ticket.epoch for ticket in tickets], [ticket.sample for ticket in tickets]
        return [
            draws.bits(seed, self._place, number, epochs, samples).tolist()
            if isinstance(operation, RandomOperation)
            else []
            for number, operation in enumerate(self._operations)
        ]

    def _by_pieces(self, rows: Array, drawn: list[list[int]], tickets: Sequence[Ticket]) -> Column:
        """Find the first operation that has a large result. Run the operations before it on all rows together. Run this
        operation and all later operations on a few rows at a time."""
        large = [len(rows) * size > _PIECE_BYTES for size in self._row_bytes]
        first = large.index(True) if True in large else len(large)
        step = max(1, _PIECE_BYTES // max(self._row_bytes))
        try:
            together = self._piece(rows, drawn, range(first), slice(None))
            if first == len(large):
                return together
            result: Array | None = None
            for begin in range(0, len(rows), step):
                some = slice(begin, begin + step)
                piece = self._piece(together[some], drawn, range(first, len(large)), some)
                if result is None:
                    result = np.empty((len(rows), *piece.shape[1:]), piece.dtype)
                result[some] = piece
        except Exception:
            return self._by_rows([rows], drawn, tickets)[0]  # raises the error again, with the row's number
        assert result is not None
        return result

    def _piece(self, rows: Array, drawn: list[list[int]], numbers: range, some: slice) -> Array:
        for number in numbers:
            rows = self._operations[number].on_rows(rows, drawn[number][some])
            self._row_bytes[number] = max(1, rows.nbytes // len(rows))
        return rows

    def _by_rows(self, inputs: list[Column], drawn: list[list[int]], tickets: Sequence[Ticket]) -> list[list[Any]]:
        """Run each operation separately on each row. Return the results column by column."""
        values = [tuple(row_of(column, which) for column in inputs) for which in range(len(tickets))]
        for number, (operation, bits) in enumerate(zip(self._operations, drawn, strict=True)):
            for which, ticket in enumerate(tickets):
                try:
                    if isinstance(operation, RandomOperation):
                        (value,) = values[which]
                        result = operation.apply(value, bits[which])
                    elif isinstance(operation, Operation):
                        result = operation(*values[which])
                    else:
                        result = operation(*map(_in_c_order, values[which]))
                except Exception as error:
                    raise RuntimeError(self._tell(number, ticket, f"{type(error).__name__}: {error}")) from error
                values[which] = result if isinstance(result, tuple) else (result,)
        for value, ticket in zip(values, tickets, strict=True):
            if len(value) != len(self._outputs):
                came = (
                    f"it returned {len(value)} values for {len(self._outputs)} columns; name them with output_columns"
                )
                raise RuntimeError(self._tell(len(self._operations) - 1, ticket, came))
        return [[np.asarray(value[place]) for value in values] for place in range(len(self._outputs))]

    def _tell(self, number: int, ticket: Ticket, what: str) -> str:
        operation = self._operations[number]
        name = repr(operation) if isinstance(operation, Operation) else getattr(operation, "__name__", repr(operation))
        of_all = f" ({number + 1} of {len(self._operations)})" if len(self._operations) > 1 else ""
        batch = isinstance(ticket.held, list) and any(isinstance(part, Ticket) for part in ticket.held)
        where = f"the batch that begins with row {ticket.sample}" if batch else f"row {ticket.sample}"
        return f"map of {', '.join(self._inputs)}: {name}{of_all} on {where} of the source: {what}"


class _Shuffle(_Step):
    def __init__(self, before: Dataset, buffer_size: int) -> None:
        super().__init__(before)
        self._buffer_size = config.whole("shuffle", "buffer_size", buffer_size, 2)

    def tickets(self, seed: int, epoch: int) -> Tickets:
        buffer: list[Ticket] = []
        picks = self._picks(seed, epoch)
        for ticket in self._before.tickets(seed, epoch):
            if len(buffer) < self._buffer_size:
                buffer.append(ticket)
            else:
                which = next(picks) % self._buffer_size
                yield buffer[which]
                buffer[which] = ticket
        while buffer:
            which = next(picks) % len(buffer)
            buffer[which], buffer[-1] = buffer[-1], buffer[which]
            yield buffer.pop()

    def _picks(self, seed: int, epoch: int) -> Generator[int, None, None]:
        for begin in itertools.count(0, 1024):
            yield from draws.bits(seed, self._place, epoch, np.arange(begin, begin + 1024)).tolist()

    def _described(self) -> list[str]:
        return [*super()._described(), f"shuffle({self._buffer_size})"]


class _Batch(_Step):
    def __init__(self, before: Dataset, batch_size: int, drop_remainder: bool, workers: int | None) -> None:
        super().__init__(before, workers)
        self._batch_size = config.whole("batch", "batch_size", batch_size, 1)
        if not isinstance(drop_remainder, bool):
            raise TypeError(f"batch: drop_remainder is a {type(drop_remainder).__name__}; expected a bool")
        self._drop_remainder = drop_remainder

    def tickets(self, seed: int, epoch: int) -> Tickets:
        before = self._before.tickets(seed, epoch)
        while parts := list(itertools.islice(before, self._batch_size)):
            if len(parts) == self._batch_size or not self._drop_remainder:
                yield Ticket(parts[0].epoch, parts[0].sample, parts)

    def load(self, turn: Turn, tickets: Sequence[Ticket]) -> list[Column]:
        # Load the rows of all batches at once, because a turn may enter each step only once.
        columns = self._before.load(turn, [part for ticket in tickets for part in ticket.held])
        batches: list[list[Any]] = [[] for _ in self.columns]
        with turn.at(self._place):
            begin = 0
            for ticket in tickets:
                end = begin + len(ticket.held)
                for name, column, into in zip(self.columns, columns, batches, strict=True):
                    into.append(_stacked(name, column[begin:end], ticket.held))
                begin = end
        return list(batches)

    def _of(self, before: int) -> int:
        return before // self._batch_size if self._drop_remainder else -(-before // self._batch_size)

    def get_batch_size(self) -> int:
        return self._batch_size

    def _described(self) -> list[str]:
        drop = ", drop_remainder" if self._drop_remainder else ""
        return [*super()._described(), f"batch({self._batch_size}{drop})"]


class _Repeat(_Step):
    def __init__(self, before: Dataset, count: int | None) -> None:
        super().__init__(before)
        self._count = -1 if count is None or count == -1 else config.whole("repeat", "count", count, 1)

    def tickets(self, seed: int, epoch: int) -> Tickets:
        if self._count > 0:
            passes: Any = range(epoch * self._count, (epoch + 1) * self._count)
        else:
            passes = itertools.count(epoch << 32)  # different numbers for each pass over an endless repeat
        for number in passes:
            some = False
            for ticket in self._before.tickets(seed, number):
                some = True
                yield ticket
            if not some:
                return

    def _of(self, before: int) -> int:
        return before * max(self._count, 1)

    def get_repeat_count(self) -> int:
        before = self._before.get_repeat_count()
        return -1 if self._count < 0 or before < 0 else before * self._count

    def _described(self) -> list[str]:
        return [*super()._described(), f"repeat({self._count})"]


def _together(column: Column) -> Array | None:
    """Return the rows as one array if they have the same shape and dtype, else None."""
    if isinstance(column, np.ndarray):
        return column
    alike = len({(row.shape, row.dtype) for row in column}) == 1
    return np.stack(column) if alike else None


def _in_c_order(x: Any) -> Any:
    return x.copy() if isinstance(x, np.ndarray) and not x.flags.c_contiguous else x


def _stacked(name: str, arrays: Column, tickets: Sequence[Ticket]) -> Array:
    if isinstance(arrays, np.ndarray):
        return np.ascontiguousarray(arrays)
    first = arrays[0]
    for array, ticket in zip(arrays, tickets, strict=True):
        if array.shape != first.shape or (array.dtype != first.dtype and array.dtype.kind not in "SU"):
            raise RuntimeError(
                f"batch: column {name} is {array.dtype}{list(array.shape)} in row {ticket.sample} of the source and"
                f" {first.dtype}{list(first.shape)} in row {tickets[0].sample}; make them equal with map"
            )
    # The result must be in C order, even if the rows are not. For example, HWC2CHW returns views with other strides.
    dtype = np.result_type(*arrays) if first.dtype.kind in "SU" else first.dtype
    return np.stack(arrays, out=np.empty((len(arrays), *first.shape), dtype))


def names_of(function: str, argument: str, value: Any) -> list[str]:
    """Return `value`, one column name or several, as a list. Raise TypeError or ValueError for anything else."""
    names = [value] if isinstance(value, str) else list(value)
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{function}: {argument}={value!r}; expected the name of a column, or several")
    if len(set(names)) != len(names):
        raise ValueError(f"{function}: {argument}={value!r} has a name twice")
    return names
