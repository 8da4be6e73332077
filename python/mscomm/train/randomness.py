"""The states of the random number generators that programs share: Python's, NumPy's and PyTorch's."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np


def states() -> dict[str, Any]:
    """What restore() takes: numbers, tuples and arrays. PyTorch's if the program has imported it."""
    found: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state(legacy=False)}
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = torch.get_rng_state().numpy()
    return found


def restore(states: dict[str, Any]) -> None:
    """Go on where these states were taken."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    if "torch" in states:
        import torch

        torch.set_rng_state(torch.from_numpy(states["torch"]))
