"""NumPy and CuPy networks. Such a network is an object that computes its own gradients.

The object's `parameters` are float arrays in a dict or a list, possibly nested. Its `loss_and_gradients(*batch)` takes
a batch as the dataset yields it, and returns two values: the loss, which is a number or an array of shape (), and the
gradients, which have the same structure as the parameters. The optimizer is mscomm.train.Momentum or SGD over the same
`parameters`, or an object of your own with step(gradients), state_dict() and load_state_dict().
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mscomm.arrays import names, on_host
from mscomm.train import networks, trees
from mscomm.train.reducer import GradientReducer


class Network(networks.Network):
    def __init__(self, network: Any, loss_fn: Any, optimizer: Any) -> None:
        if loss_fn is not None:
            raise TypeError("Model: loss_and_gradients() computes the loss; leave loss_fn out")
        self._network = network
        self._optimizer = optimizer

    def trained(self) -> dict[str, Any]:
        return trees.leaves(self._network.parameters)

    def begin(self) -> None:
        stepped = trees.leaves(getattr(self._optimizer, "parameters", self._network.parameters))
        if [id(x) for x in stepped.values()] != [id(x) for x in self.trained().values()]:
            raise ValueError("Model.train: the optimizer's parameters are not the arrays in network.parameters")

    def step(self, batch: tuple[Any, ...], reducer: GradientReducer | None) -> np.generic:
        loss, gradients = self._network.loss_and_gradients(*batch)
        result: Any = _numbers(loss)[()]
        if reducer is not None:
            reducer.carry(float(result))
            gradients = trees.rebuilt(gradients, list(reducer.reduce(trees.leaves(gradients)).values()))
        self._optimizer.step(gradients)
        return result  # type: ignore[no-any-return]


def _numbers(loss: Any) -> np.ndarray[Any, Any]:
    is_another_librarys = next(names(loss), "numpy") != "numpy"
    return on_host(loss, "the loss", "Model.train") if is_another_librarys else np.asarray(loss)
