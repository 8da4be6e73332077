"""Provides a CUDA driver and an NCCL that do nothing (idle.cc), and arrays on a device of this driver.

With them, enqueue.py and tests/test_cost.py measure the time that mscomm itself takes. An array is just an address, a
shape and a dtype.

    python bench/idle.py     # compiles the library, and prints its path
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mscomm import arrays
from mscomm.arrays.device import OnDevice, on_device
from mscomm.arrays.numpy import CODES


def library() -> str:
    """Return the path of the library, which is both the driver and NCCL. Compile it if its source has changed."""
    source = Path(__file__).with_suffix(".cc")
    folder = Path(tempfile.gettempdir(), f"mscomm-idle-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"{folder} belongs to another user: nothing in it is loaded")
    made = folder / f"{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}.so"
    if not made.exists():
        part = made.with_suffix(f".{os.getpid()}")
        flags = ["-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden"]
        subprocess.run([*os.environ.get("CXX", "c++").split(), *flags, source, "-o", part], check=True)
        part.rename(made)
    return str(made)


class IdleArray:
    __slots__ = ("dtype", "ptr", "shape")
    places = 1 << 20

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.shape, self.dtype = shape, dtype
        IdleArray.places += 1 << 20
        self.ptr = IdleArray.places


PLAIN = {IdleArray: "nccl"}


def register() -> None:
    """Make this module one of the array libraries of mscomm.arrays."""
    arrays.LIBRARIES["idle"] = "idle"
    sys.modules["mscomm.arrays.idle"] = sys.modules[__name__]


def is_array(x: Any) -> bool:
    return isinstance(x, IdleArray)


def memory(x: IdleArray) -> OnDevice:
    return on_device(x, x.ptr, x.shape, x.dtype, None, 0, lambda: 0)


def plain(x: IdleArray) -> tuple[int, tuple[int, ...], int, int, int] | None:
    code = CODES.get(x.dtype)
    return None if code is None else (x.ptr, x.shape, code, 0, 0)


def empty(x: IdleArray, shape: tuple[int, ...]) -> IdleArray:
    return IdleArray(shape, x.dtype)


def new(x: IdleArray, shape: tuple[int, ...]) -> tuple[OnDevice, Callable[[], IdleArray]]:
    made = empty(x, shape)
    return memory(made), lambda: made


def packed(x: IdleArray) -> IdleArray:
    return x


def assign(out: IdleArray, made: IdleArray) -> None: ...


if __name__ == "__main__":
    print(library())
