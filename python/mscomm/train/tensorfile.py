"""Safetensors files (https://github.com/huggingface/safetensors), by the package of that name: named arrays and short
texts, and nothing that a reader could execute. What is added here: a file is written as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mscomm.arrays.numpy import DTYPES

Array = np.ndarray[Any, Any]

HELD = tuple(name for name in DTYPES if name != "complex128")  # the dtypes that the format has
PARTIAL = ".partial"  # how the name of a file ends that is being written


def write(path: Path, arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """Write a file as a whole or not at all: when it has its name, all of it is on the disk.

    arrays: of any strides. A file of that name is replaced. TypeError for a dtype that the format has not (complex128).
    OSError leaves what was there as it was.
    """
    for name, x in arrays.items():
        if x.dtype.name not in HELD:
            raise TypeError(f"{path}: {name} is of dtype {x.dtype}; safetensors files hold {', '.join(HELD)}")
    safetensors = _package()
    in_order = {name: x if x.flags.c_contiguous else x.copy(order="C") for name, x in arrays.items()}
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        try:
            safetensors.numpy.save_file(in_order, partial, metadata=dict(metadata) or None)
        except safetensors.SafetensorError as error:
            raise OSError(f"{path} cannot be written: {error}") from error
        _to_disk(partial, os.O_RDONLY)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()
        raise
    _to_disk(path.parent, os.O_RDONLY | os.O_DIRECTORY)  # the name, too


def _to_disk(path: Path, flags: int) -> None:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    """The arrays of a file, new and writable, and its metadata. ValueError if it is not whole, or something else."""
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a file of which all is there; ValueError otherwise."""
    with _opened(path) as file:
        return file.metadata() or {}


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    safetensors = _package()
    try:
        with safetensors.safe_open(path, "np") as file:
            yield file
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: no whole safetensors file ({path.stat().st_size} bytes): {error}") from error


def _package() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            "checkpoints are safetensors files; install the package: pip install 'mscomm[train]'"
        ) from error
    return safetensors
