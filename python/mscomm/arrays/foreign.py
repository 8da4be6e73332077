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
    _refuse(x, "give it in C order")


def assign(out: Any, made: Any) -> None:
    _refuse(out, "give out in C order")


def on_host(x: Any) -> np.ndarray[Any, Any]:
    _refuse(x, "copy it to the host yourself, and give that")


def from_host(x: Any, numbers: np.ndarray[Any, Any]) -> Any:
    _refuse(x, "copy the numbers to the device yourself")


def _refuse(x: Any, advice: str) -> NoReturn:
    raise TypeError(f"{type(x).__name__} is known by its protocol alone, by which mscomm makes no arrays: {advice}")
