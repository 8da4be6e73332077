"""The states of the global random number generators: Python's, NumPy's and PyTorch's.

The state of CuPy's generator is left out, because CuPy has no function to read it.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np


def states() -> dict[str, Any]:
    """Return the current states for restore(), as numbers, tuples and arrays. PyTorch's state is included if the
    program has imported PyTorch. The states of the GPUs are included if the program has used a GPU with PyTorch."""
    found: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state(legacy=False)}
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = torch.get_rng_state().numpy()
        if torch.cuda.is_initialized():
            generators = [state.numpy() for state in torch.cuda.get_rng_state_all()]
            found["torch.cuda"] = {"current": torch.cuda.current_device(), "all": generators}
    return found


def restore(states: dict[str, Any]) -> None:
    """Set the generators to these states."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    if "torch" in states:
        import torch

        torch.set_rng_state(torch.from_numpy(states["torch"]))
        if "torch.cuda" in states and torch.cuda.is_initialized():
            _restore_cuda(states["torch.cuda"]["current"], states["torch.cuda"]["all"])


def _restore_cuda(current: int, generators: list[np.ndarray[Any, Any]]) -> None:
    """Set the states of the GPUs. This rank may have used a GPU with a different number when the states were saved. So
    the rank's current GPU gets the state of the GPU that the rank used at that time."""
    import torch

    chosen = dict(enumerate(generators[: torch.cuda.device_count()]))
    chosen[torch.cuda.current_device()] = generators[current]
    for device, state in chosen.items():
        torch.cuda.set_rng_state(torch.from_numpy(state), device)
