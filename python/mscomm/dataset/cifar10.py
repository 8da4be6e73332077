"""Cifar10Dataset reads the files data_batch_1.bin to data_batch_5.bin and test_batch.bin.

The files have the "binary version" format of https://www.cs.toronto.edu/~kriz/cifar.html: a file is a sequence of
records. A record has one byte for the label, 0 to 9, and 3072 bytes for 32 rows of 32 pixels: all red values, then all
green values, then all blue values.
"""

from __future__ import annotations

import bisect
import itertools
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from mscomm.dataset import agree, workers
from mscomm.dataset.pipeline import Column, Source, Ticket, Tickets
from mscomm.dataset.sampler import DistributedSampler, choose
from mscomm.dataset.workers import Turn

CHANNELS, SIDE, CLASSES = 3, 32, 10
RECORD_BYTES = 1 + CHANNELS * SIDE * SIDE
TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST = "test_batch.bin"
_USAGES = ("train", "test", "all")
_PIECE = 2048  # how many records are hashed and checked at once; these records take 6 MiB
_GET_IT = (
    "Take cifar-10-binary.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html, or make a small set of real images"
    " by `mscomm data make --from digits --out DIR`"
)
# The first bytes of other file formats, and what the error message says about such a file.
_FOREIGN = {
    b"\x1f\x8b": "is compressed by gzip; unpack it",
    b"PK\x03\x04": "is a zip file; unpack it",
    b"\x89HDF": "is an HDF5 file",
    b"<": "is a web page, not the data",
}


class Cifar10Dataset(Source):
    """Reads the images of CIFAR-10, or other images in its binary format, from a folder.

    The column `image` has dtype uint8 and shape (32, 32, 3): height, width, and the channels red, green and blue. The
    column `label` has dtype uint32 and shape (); its values are 0 to 9.

    usage: "train" reads data_batch_1.bin to data_batch_5.bin; files at the end of this series may be missing. "test"
    reads test_batch.bin. "all" or None reads all these files, which have 60,000 rows in CIFAR-10. num_shards, shard_id:
    which part of the rows this rank reads, as in DistributedSampler. shuffle: if None or True, each pass has a
    different order; if False, the rows are in the order of the files. num_samples: the maximum number of rows for this
    rank. sampler: a DistributedSampler, or row numbers, in place of num_shards, shard_id, shuffle and num_samples.
    num_parallel_workers: as in Dataset.map; None means that any number of threads may read.

    The constructor checks the files' names and sizes. Before the first pass, each rank reads all files once to check
    the labels. If num_shards is the number of ranks in the job, the ranks then compare what they have read. If there is
    a difference, all ranks raise ValueError. ValueError is also raised if a file is missing, truncated or in another
    format; the message names the file and says what to do. Pickles are never loaded. Invalid or contradictory arguments
    raise TypeError, ValueError or RuntimeError, as in MindSpore.

    >>> data = Cifar10Dataset("cifar-10-batches-bin", num_shards=8, shard_id=0)
    >>> data.get_dataset_size()
    7500
    """

    def __init__(
        self,
        dataset_dir: str | os.PathLike[str],
        usage: str | None = None,
        num_samples: int | None = None,
        num_parallel_workers: int | None = None,
        shuffle: bool | None = None,
        sampler: DistributedSampler | Iterable[int] | None = None,
        num_shards: int | None = None,
        shard_id: int | None = None,
    ) -> None:
        super().__init__(("image", "label"), workers.checked("Cifar10Dataset", num_parallel_workers))
        if usage is not None and usage not in _USAGES:
            raise ValueError(f"Cifar10Dataset: usage={usage!r}; expected one of {', '.join(_USAGES)}")
        self._sampler = choose("Cifar10Dataset", num_samples, shuffle, sampler, num_shards, shard_id)
        if not isinstance(dataset_dir, str | os.PathLike):
            raise TypeError(f"Cifar10Dataset: dataset_dir is {dataset_dir!r}; expected the folder's path, a str")
        self._folder = Path(dataset_dir)
        self._names = _find(self._folder, usage or "all")
        self._ends = list(itertools.accumulate(_records(self._folder / name) for name in self._names))
        self._rows = self._ends[-1]
        self._files: list[int] = []  # file descriptors, which the first pass opens

    def compare(self, facts: Callable[[], dict[str, Any]]) -> None:
        problem: Exception | None = None
        digests = []
        try:
            if not self._files:
                self._open()
            for name, fd in zip(self._names, self._files, strict=True):
                digests.append([name, os.fstat(fd).st_size, _digest(self._folder / name, fd)])
        except (OSError, ValueError) as error:
            problem = error
        mine = {"rows": self._rows, "files": digests, **facts()}
        agree.compare("Cifar10Dataset", self._sampler.num_shards, mine, str(self._folder), problem)

    def _open(self) -> None:
        files: list[int] = []
        # Do not close the files when the process exits, because a thread may still be reading them.
        weakref.finalize(self, _close, files).atexit = False
        for name in self._names:
            files.append(os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC))
        self._files = files

    def tickets(self, seed: int, epoch: int) -> Tickets:
        for index in self._sampler.indices(self._rows, seed, epoch).tolist():
            yield Ticket(epoch, index)

    def load(self, turn: Turn, tickets: Sequence[Ticket]) -> list[Column]:
        records = np.empty((len(tickets), RECORD_BYTES), np.uint8)
        with turn.at(self._place):
            for record, ticket in zip(records, tickets, strict=True):
                which = bisect.bisect_right(self._ends, ticket.sample)
                place = ticket.sample - (self._ends[which - 1] if which else 0)
                # Read the file instead of mapping it. If another process truncated a mapped file, reading it would kill
                # this process.
                if _read(self._files[which], record.data, place * RECORD_BYTES) != RECORD_BYTES:
                    where = self._folder / self._names[which]
                    raise ValueError(f"{where}: record {place} is gone; the file was cut short")
        planes = records[:, 1:].reshape(-1, CHANNELS, SIDE, SIDE)
        return [planes.transpose(0, 2, 3, 1), records[:, 0].astype(np.uint32)]

    def get_dataset_size(self) -> int:
        return self._sampler.count(self._rows)

    def _described(self) -> list[str]:
        return [f"Cifar10Dataset({self._rows} rows, {self._sampler})"]


def _close(files: list[int]) -> None:
    for fd in files:
        os.close(fd)


# -- finding and checking the files ------------------------------------------------------------------------------------


def _find(folder: Path, usage: str) -> list[str]:
    """Return the names of the files to read. Raise ValueError if a required file is missing."""
    try:
        there = set(os.listdir(folder))
    except OSError as error:
        raise ValueError(f"Cifar10Dataset: {folder}: {error.strerror}. {_GET_IT}") from error
    train = [name for name in TRAIN if name in there]
    if usage != "test":
        missing = [name for name in TRAIN[: TRAIN.index(train[-1])] if name not in there] if train else [TRAIN[0]]
        if missing:
            raise ValueError(_not_there(folder, there, missing))
    if usage != "train" and TEST not in there:
        raise ValueError(_not_there(folder, there, [TEST]))
    return {"train": train, "test": [TEST], "all": [*train, TEST]}[usage]


def _not_there(folder: Path, there: set[str], missing: list[str]) -> str:
    why = f"Cifar10Dataset: {folder} has no {', '.join(missing)}"
    if "data_batch_1" in there or "batches.meta" in there:
        return (
            f"{why}; it has data_batch_1 and others of the python version of CIFAR-10, which are pickles."
            f" mscomm loads no pickles: they can run any code. {_GET_IT}"
        )
    if "train.bin" in there or "fine_label_names.txt" in there:
        return f"{why}; this looks like CIFAR-100. {_GET_IT}"
    inside = [name for name in sorted(there) if (folder / name / TRAIN[0]).exists()]
    if inside:
        return f"{why}; the files are in {folder / inside[0]}"
    return f"{why}. {_GET_IT}"


def _records(path: Path) -> int:
    """Return the number of records in a file, computed from its size.

    Raise ValueError if the size or the first bytes are wrong.
    """
    try:
        with open(path, "rb") as file:
            begin = file.read(64)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ValueError(f"Cifar10Dataset: {path}: {error.strerror}") from error
    if begin[:1] == b"\x80" and begin[1:2] <= b"\x05":
        raise ValueError(f"Cifar10Dataset: {path} is a pickle; mscomm loads none: they can run any code. {_GET_IT}")
    for magic, what in _FOREIGN.items():
        if begin.startswith(magic):
            raise ValueError(f"Cifar10Dataset: {path} {what}. {_GET_IT}")
    if begin.startswith(b"version https://git-lfs"):
        raise ValueError(f"Cifar10Dataset: {path} is a pointer of git-lfs, not the data; run `git lfs pull`")
    if size == 0 or size % RECORD_BYTES:
        raise ValueError(
            f"Cifar10Dataset: {path} has {size} bytes, which is {size // RECORD_BYTES} records of {RECORD_BYTES} and"
            f" {size % RECORD_BYTES} bytes more: it is truncated, or of another format. {_GET_IT}"
        )
    return size // RECORD_BYTES


def _read(fd: int, into: memoryview, at: int) -> int:
    """Read bytes from position `at` until `into` is full or the file ends. Return how many bytes were read."""
    got = 0
    while got < len(into) and (more := os.preadv(fd, [into[got:]], at + got)):
        got += more
    return got


# The hashes of the files that this process has read. The keys are (path, size, modification time in ns).
_digests: dict[tuple[str, int, int], str] = {}


def _digest(path: Path, fd: int) -> str:
    """Return a file's hash. Raise ValueError if a label is out of range, or if the file was truncated."""
    status = os.fstat(fd)
    seen = os.path.abspath(path), status.st_size, status.st_mtime_ns
    if seen not in _digests:
        hashed = blake2b(digest_size=16)
        piece = bytearray(_PIECE * RECORD_BYTES)
        at = 0
        while got := _read(fd, memoryview(piece), at):
            hashed.update(memoryview(piece)[:got])
            labels = np.frombuffer(piece, np.uint8, got)[::RECORD_BYTES]
            wrong = np.flatnonzero(labels >= CLASSES)
            if len(wrong):
                record = at // RECORD_BYTES + int(wrong[0])
                raise ValueError(
                    f"Cifar10Dataset: {path}: record {record} has the label {labels[wrong[0]]}; expected 0 to"
                    f" {CLASSES - 1}: the file is damaged, or of another format. {_GET_IT}"
                )
            at += got
        if at != status.st_size:
            raise ValueError(f"Cifar10Dataset: {path}: {status.st_size} bytes were there, {at} could be read")
        _digests[seen] = hashed.hexdigest()
    return _digests[seen]
