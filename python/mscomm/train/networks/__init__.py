"""Adapts each library's networks to Model. There is one file per library, chosen by the type of the network.

Each file has a class Network(network, loss_fn, optimizer), which inherits from the protocol networks.Network.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from mscomm.arrays import fill, names, values
from mscomm.group import Group
from mscomm.train.reducer import GradientReducer


class Network(Protocol):
    """A network with its loss function and its optimizer."""

    _optimizer: Any

    def trained(self) -> dict[str, Any]:
        """Return the weights that are passed to GradientReducer, by name. Their order is the same on every rank."""

    def weights(self) -> dict[str, Any]:
        """Return the arrays to save: the trained weights, and other arrays that training changes, such as running
        means."""
        return self.trained()

    def divide(self, mode: str, group: Group) -> None:
        """Prepare for steps in a mode of context.DIVIDING, which divide the network. Model.train calls this method."""
        raise NotImplementedError(
            f"Model.train: the parallel mode {mode} needs a PyTorch module or a cell of mscomm.nn;"
            " ParallelMode.DATA_PARALLEL trains networks of every library"
        )

    def parts(self) -> dict[str, Any]:
        """Return this rank's parts of the weights."""
        return self.weights()

    def slices(self) -> dict[str, Any]:
        """Return which parts of the weights this rank has, or {} if the network is not divided."""
        return {}

    def join(self) -> None:
        """Bring the weights together on every rank, if they are divided."""

    def own(self) -> set[str]:
        """Return the names of the weights and optimizer entries that each rank keeps for itself."""
        return set()

    def is_own_entry(self, path: tuple[Any, ...]) -> bool:
        """Return whether each rank keeps this entry of the optimizer's state for itself. path: its keys."""
        return not self.own().isdisjoint(path)

    def load(self, weights: dict[str, np.ndarray[Any, Any]]) -> None:
        """Write the given weights into the network, by name. Raise ValueError if a shape or dtype does not fit."""
        write_over(self.weights(), weights)

    def clear_gradients(self) -> None:
        """Remove gradients that an interrupted step has left in the network."""

    def begin(self) -> None:
        """Prepare for the first step. Model.train calls this method."""

    def step(self, batch: tuple[Any, ...], reducer: GradientReducer | None) -> np.generic:
        """Train on one batch, which holds NumPy arrays or arrays of the network's library. Return this rank's loss.

        If there is a reducer, the loss is sent with the gradients (reducer.carry).
        """

    def optimizer_state(self) -> Any:
        return self._optimizer.state_dict()

    def load_optimizer_state(self, state: Any) -> None:
        self._optimizer.load_state_dict(state)


def adapt(network: Any, loss_fn: Any = None, optimizer: Any = None) -> Network:
    """Return the network in the form that Model uses. Raise TypeError for an unknown kind of network."""
    name = next((name for name in names(network) if name != "numpy"), None)  # NumPy has no networks of its own
    if name is None:
        if hasattr(network, "loss_and_gradients"):
            name = "numpy"
        elif callable(network) and not hasattr(network, "parameters"):
            name = "jax"
        else:
            raise TypeError(
                f"Model: network is a {type(network).__name__}; expected a torch.nn.Module, a MindSpore cell, a JAX"
                " function, or an object with parameters and loss_and_gradients(*batch)"
            )
    made: Network = importlib.import_module(f"mscomm.train.networks.{name}").Network(network, loss_fn, optimizer)
    return made


def write_over(weights: dict[str, Any], given: dict[str, np.ndarray[Any, Any]]) -> None:
    """Write the given arrays into the weights with these names. Raise ValueError if a shape differs, or if the dtypes
    differ and are not both float."""
    for name, x in given.items():
        there = values(weights[name], name, "load")
        if there.shape != x.shape:
            raise ValueError(f"{name} is {list(x.shape)} in the file, the network's is {list(there.shape)}")
        if there.dtype != x.dtype and not (_is_float(there.dtype) and _is_float(x.dtype)):
            raise ValueError(f"{name} is {x.dtype} in the file, the network's is {there.dtype}")
    for name, x in given.items():
        fill(weights[name], x, name, "load")


def _is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f" or dtype.name == "bfloat16"  # the kind of bfloat16 is not "f"


def as_tuple(batch: Any) -> tuple[Any, ...]:
    """Return a dataset's batch as a tuple. A dict becomes the tuple of its values."""
    if isinstance(batch, dict):
        return tuple(batch.values())
    if isinstance(batch, tuple | list):
        return tuple(batch)
    return (batch,)


def data_and_label(batch: tuple[Any, ...]) -> tuple[Iterable[Any], Any]:
    """Return (data, label) for a loss_fn: the last item of the batch is the label, the other items are the data."""
    if len(batch) < 2:
        raise ValueError(f"Model: with a loss_fn a batch is (data, label); this one has {len(batch)} arrays")
    return batch[:-1], batch[-1]
