"""Safetensors files: named arrays and short texts, and nothing that a reader could execute.

A file is the length of its header (8 bytes, little endian), the header (JSON: dtype, shape and place of each array, and
`__metadata__`), then the arrays. The format is public: https://github.com/huggingface/safetensors. Written here and not
by the package of that name, because a checkpoint goes from the arrays' memory to the disk without a copy, and is on the
disk before it gets its name.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mscomm.arrays.numpy import DTYPES, dtype_of

Array = np.ndarray[Any, Any]

# The format's words for NumPy's dtypes.
WORDS = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}
_NAMES = {word: name for name, word in WORDS.items()}
_LONGEST_HEADER = 100_000_000  # as in the format's own reader
PARTIAL = ".partial"  # how the name of a file ends that is being written


class Entry(NamedTuple):
    """Where an array lies, in bytes from the end of the header."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(NamedTuple):
    """What a file says about itself; `read_header` has checked that all of it is there."""

    metadata: dict[str, str]
    entries: dict[str, Entry]
    begin: int  # where the arrays begin in the file


def write(path: Path, arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """Write a file as a whole or not at all: when it has its name, all of it is on the disk.

    arrays: of any strides. A file of that name is replaced. TypeError for a dtype that the format has not (complex128).
    OSError leaves what was there as it was.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    order = sorted(arrays, key=lambda name: -arrays[name].dtype.itemsize)  # so that each is aligned
    for name in order:
        x = arrays[name]
        if x.dtype.name not in WORDS:
            raise TypeError(f"{path}: {name} is of dtype {x.dtype}; safetensors files hold {', '.join(WORDS)}")
        header[name] = {"dtype": WORDS[x.dtype.name], "shape": list(x.shape), "data_offsets": [at, at + x.nbytes]}
        at += x.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb") as file:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            for name in order:
                file.write(_bytes(arrays[name]))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)  # the name, too
    finally:
        os.close(folder)


def read(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    """The arrays of a file, new and writable, and its metadata. Errors: see read_header."""
    header = read_header(path)
    arrays = {}
    with open(path, "rb") as file:
        for name, entry in header.entries.items():
            x = np.empty(entry.shape, entry.dtype)
            file.seek(header.begin + entry.begin)
            if file.readinto(_bytes(x)) != x.nbytes:
                raise ValueError(f"{path}: became shorter while it was read")
            arrays[name] = x
    return arrays, header.metadata


def read_header(path: Path) -> Header:
    """The header of a file, once it is sure that all of the file is there.

    ValueError that says what is wrong: no safetensors file, truncated, or a header that contradicts itself. OSError if
    it cannot be read, ImportError if bfloat16 is in it and ml-dtypes is not installed.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        first = file.read(9)
        length = int.from_bytes(first[:8], "little")
        if size < 10 or first[8:] != b"{" or length > _LONGEST_HEADER:
            raise ValueError(f"{path}: no safetensors file ({size} bytes, which begin with {first[:8]!r})")
        if 8 + length > size:
            raise ValueError(f"{path}: truncated: it has {size} bytes, its header alone {8 + length}")
        file.seek(8)
        text = file.read(length)
    try:
        said = json.loads(text)
        metadata = said.pop("__metadata__", {})
        entries = {name: _entry(one) for name, one in said.items()}
        if not all(isinstance(one, str) for one in [*metadata, *metadata.values()]):
            raise ValueError("metadata that is no text")
        _check_places(entries)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = "it is no JSON" if isinstance(error, json.JSONDecodeError | UnicodeDecodeError) else str(error)
        raise ValueError(f"{path}: the header is damaged: {reason}") from error
    whole = 8 + length + max((entry.end for entry in entries.values()), default=0)
    if size < whole:
        raise ValueError(f"{path}: truncated: it has {size} of {whole} bytes")
    if size > whole:
        raise ValueError(f"{path}: has {size} bytes where its header says {whole}")
    return Header(metadata, entries, 8 + length)


def _entry(said: Any) -> Entry:
    word, shape, (begin, end) = said["dtype"], tuple(said["shape"]), said["data_offsets"]
    if word not in _NAMES:
        raise ValueError(f"dtype {word!r} is none of {', '.join(_NAMES)}")
    if any(type(number) is not int or number < 0 for number in (*shape, begin, end)):
        raise ValueError(f"shape {shape} or place {begin}..{end} is no size")
    try:
        dtype = dtype_of(DTYPES.index(_NAMES[word]))
    except TypeError as error:  # not the file's fault
        raise ImportError(str(error)) from None
    wanted = dtype.itemsize
    for length in shape:
        wanted *= length
    if end - begin != wanted:
        raise ValueError(f"{word}{list(shape)} in {end - begin} bytes")
    return Entry(dtype, shape, begin, end)


def _check_places(entries: Mapping[str, Entry]) -> None:
    """One array begins where another ends."""
    at = 0
    for name, entry in sorted(entries.items(), key=lambda one: (one[1].begin, one[1].end)):
        if entry.begin != at:
            raise ValueError(f"{name} begins at byte {entry.begin}, the array before it ends at {at}")
        at = entry.end


def _bytes(x: Array) -> Any:
    """x's memory, in C order, as a buffer of bytes."""
    native = x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))
    return np.ascontiguousarray(native).reshape(-1).view(np.uint8).data
