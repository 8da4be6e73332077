"""Small files in CIFAR-10's format, and other data for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mscomm.dataset import cifar10


def records(labels: Any, seed: int = 0) -> np.ndarray:
    """Return the contents of a file in CIFAR-10's format: random images with these labels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (len(labels), 3072), np.uint8)
    return np.concatenate([np.asarray(labels, np.uint8)[:, None], pixels], axis=1)


def write(folder: Path, rows: tuple[int, ...] = (20, 20, 20, 20, 4), test: int = 12) -> Path:
    """Write small files in CIFAR-10's format to the folder, which is created if necessary. Return the folder."""
    folder.mkdir(exist_ok=True)
    for number, (name, count) in enumerate(zip([*cifar10.TRAIN, cifar10.TEST], [*rows, test], strict=True)):
        records(np.arange(count) % 10, number).tofile(folder / name)
    return folder


def numbers(n: int) -> list[tuple[int]]:
    """Return a source with random access, whose row i holds the number i."""
    return [(i,) for i in range(n)]


def image(height: int, width: int, channels: int | None = 3, dtype: Any = np.uint8) -> np.ndarray:
    shape = (height, width) if channels is None else (height, width, channels)
    random = np.random.default_rng(height * width)
    return random.integers(0, 256, shape, dtype) if dtype == np.uint8 else random.random(shape, np.float32) * 255
