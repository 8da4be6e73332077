"""Functions for arrays that mscomm knows only by a protocol, such as DLPack.

mscomm cannot create such arrays, so each function raises TypeError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from mscomm.arrays.device import OnDevice


def new(x: Any, shape: tuple[int, ...]) -> tuple[OnDevice, Callable[[], Any]]:
    _refuse(x, f"give out=, an array of shape {shape}")


def packed(x: Any) -> Any:
    _refuse(x, "pass it in C order")


def assign(out: Any, made: Any) -> None:
    _refuse(out, "pass out in C order")


def on_host(x: Any) -> np.ndarray[Any, Any]:
    _refuse(x, "copy it to the host yourself, and pass the copy")


def from_host(x: Any, numbers: np.ndarray[Any, Any]) -> Any:
    _refuse(x, "copy the numbers to the device yourself")


def _refuse(x: Any, advice: str) -> NoReturn:
    raise TypeError(f"mscomm knows {type(x).__name__} only by its protocol, so it cannot create such arrays: {advice}")
