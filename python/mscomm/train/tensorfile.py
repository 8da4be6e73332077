"""Safetensors files (https://github.com/huggingface/safetensors), which hold named arrays and short strings.

Reading these files never executes anything in them. This module adds two things to the package safetensors: a file is
written completely or not at all, and its metadata contains a checksum of everything in the file. The checksum is zlib's
CRC-32. It detects every single-bit error and every burst of up to 32 wrong bits. It misses one in 2^32 of the other
errors. It does not protect against deliberate changes, and neither would SHA-256 or BLAKE2, because whoever changes the
file can also change the hash in it. SHA-256 and BLAKE2 take two to four times as long as CRC-32.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mscomm.arrays.numpy import DTYPES
from mscomm.errors import on_failure

Array = np.ndarray[Any, Any]

# the dtypes that a file can hold
HELD = tuple(name for name in DTYPES if name != "complex128" and not name.startswith("float8"))
CHECKSUM = "mscomm.checksum"  # the metadata key of two checksums: one of the other metadata, and one of the arrays
PARTIAL = ".partial"  # the suffix of a file that is still being written


def write(path: Path, arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """Write a file completely or not at all. The file gets its final name only when its whole content is on disk.

    The arrays may have any strides. An older file with the same name is replaced, but is unchanged after an OSError.
    Raise TypeError for complex128, which the format does not support, and for float8.
    """
    for name, x in arrays.items():
        if x.dtype.name not in HELD:
            raise TypeError(f"{path}: {name} has dtype {x.dtype}; safetensors files hold {', '.join(HELD)}")
    safetensors = _package()
    in_order = {name: x.astype(x.dtype.newbyteorder("="), order="C", copy=False) for name, x in arrays.items()}
    checked = {**metadata, CHECKSUM: f"{_of_texts(metadata)} {_of_arrays(in_order)}"}
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    with on_failure(partial.unlink, missing_ok=True):
        try:
            safetensors.numpy.save_file(in_order, partial, metadata=checked)
        except safetensors.SafetensorError as error:
            raise OSError(f"{path} cannot be written: {error}") from error
        _to_disk(partial, os.O_RDONLY)
        os.replace(partial, path)
    _to_disk(path.parent, os.O_RDONLY | os.O_DIRECTORY)  # also write the file's new name to disk


def _to_disk(path: Path, flags: int) -> None:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    """Return the arrays and the metadata of a file. The arrays are new and writable.

    Raise ValueError if the file is truncated, damaged, or not a safetensors file, or if it holds a dtype that NumPy
    lacks. Earlier versions of mscomm and other programs write files without a checksum. Such files are not checked for
    damage.
    """
    with _opened(path) as file:
        arrays = {name: _array(path, file, name) for name in file.keys()}  # noqa: SIM118
        metadata, checksum = _checked_metadata(path, file)
    if checksum is not None and checksum != _of_arrays(arrays):
        raise ValueError(_damaged(path))
    return arrays, metadata


def _array(path: Path, file: Any, name: str) -> Array:
    try:
        array: Array = file.get_tensor(name)
    except (AttributeError, TypeError) as error:  # safetensors has looked the dtype up in NumPy
        dtype = file.get_slice(name).get_dtype()
        advice = "install ml-dtypes" if dtype == "BF16" else "convert it with the program that wrote the file"
        raise ValueError(f"{path}: {name!r} has dtype {dtype}, which NumPy lacks; {advice}") from error
    return array


def read_metadata(path: Path) -> dict[str, str]:
    """Check and return the metadata of a file. The arrays are not checked. Raise ValueError if the file is truncated or
    the metadata is damaged."""
    with _opened(path) as file:
        return _checked_metadata(path, file)[0]


def _checked_metadata(path: Path, file: Any) -> tuple[dict[str, str], str | None]:
    """Check the metadata. Return the metadata, and the arrays' checksum (None if the file has no checksum)."""
    metadata: dict[str, str] = file.metadata() or {}
    if CHECKSUM not in metadata:
        return metadata, None
    of_texts, _, of_arrays = metadata.pop(CHECKSUM).partition(" ")
    if of_texts != _of_texts(metadata):
        raise ValueError(_damaged(path))
    return metadata, of_arrays


def _damaged(path: Path) -> str:
    return f"{path}: damaged: its content does not match its checksum"


def _of_texts(metadata: Mapping[str, str]) -> str:
    return f"{zlib.crc32(json.dumps(sorted(metadata.items())).encode()):08x}"


def _of_arrays(arrays: Mapping[str, Array]) -> str:
    checksum = 0
    for name, x in sorted(arrays.items()):
        checksum = zlib.crc32(f"{name} {x.dtype.name} {x.shape} ".encode(), checksum)
        checksum = zlib.crc32(x.reshape(-1).view(np.uint8).data, checksum)
    return f"{checksum:08x}"


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    safetensors = _package()
    if path.exists() and not path.is_file():  # to open a FIFO, for example, could wait for ever
        raise ValueError(f"{path}: not a safetensors file: it is a folder, a FIFO or a device")
    try:
        with safetensors.safe_open(path, "np") as file:
            yield file
    except safetensors.SafetensorError as error:
        with open(path, "rb") as other:
            begin = other.read(9)
        # MindSpore's files are protobuf and begin with a newline. A damaged safetensors file may also have the suffix
        # .ckpt and begin with a newline, but its ninth byte is "{".
        if path.suffix == ".ckpt" and begin.startswith(b"\n") and not begin.endswith(b"{"):
            to = path.with_suffix(".safetensors")
            raise ValueError(
                f"{path}: mscomm reads safetensors files, and this is MindSpore's .ckpt. Convert it once, where"
                f' MindSpore is installed: mscomm.save_checkpoint(mindspore.load_checkpoint("{path}"), "{to}")'
            ) from error
        raise ValueError(f"{path}: not a complete safetensors file ({path.stat().st_size} bytes): {error}") from error


def _package() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            "checkpoints are safetensors files; install the package: pip install 'safetensors>=0.8'"
        ) from error
    with contextlib.suppress(ImportError):
        import ml_dtypes  # noqa: F401  from then on, NumPy knows bfloat16
    return safetensors
