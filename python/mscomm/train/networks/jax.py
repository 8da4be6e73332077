"""JAX networks: a function loss(parameters, *batch), or output(parameters, *data) if there is a loss_fn.

The optimizer holds the parameters: JAX arrays in a dict or a list, possibly nested. The optimizer is
mscomm.train.Momentum or SGD, or an object of your own with `parameters`, step(gradients), state_dict() and
load_state_dict(). The loss function and its gradients are compiled with jax.jit. Gradients are reduced outside of the
compiled code.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from mscomm.train import networks, trees
from mscomm.train.networks import data_and_label
from mscomm.train.reducer import GradientReducer
from mscomm.train.states import with_arrays


class Network(networks.Network):
    def __init__(self, network: Any, loss_fn: Any, optimizer: Any) -> None:
        def loss(parameters: Any, *batch: Any) -> Any:
            if loss_fn is None:
                return network(parameters, *batch)
            data, label = data_and_label(batch)
            return loss_fn(network(parameters, *data), label)

        self._optimizer = optimizer
        self._loss_and_gradients = jax.jit(jax.value_and_grad(loss))

    def trained(self) -> dict[str, Any]:
        if self._optimizer is None:
            raise TypeError(
                "Model: the parameters of a JAX function come from its optimizer, and there is no optimizer"
            )
        return trees.leaves(self._optimizer.parameters)

    def load(self, weights: dict[str, np.ndarray[Any, Any]]) -> None:
        before = self.trained()
        for name, x in weights.items():
            if (x.shape, x.dtype) != (before[name].shape, before[name].dtype):
                mine = f"{before[name].dtype}{list(before[name].shape)}"
                raise ValueError(f"{name} is {x.dtype}{list(x.shape)} in the file, the network's is {mine}")
        loaded = before | {name: jax.device_put(x) for name, x in weights.items()}
        self._optimizer.parameters = trees.rebuilt(self._optimizer.parameters, list(loaded.values()))

    def step(self, batch: tuple[Any, ...], reducer: GradientReducer | None) -> np.generic:
        loss, gradients = self._loss_and_gradients(self._optimizer.parameters, *batch)
        result: Any = np.asarray(loss)[()]
        if reducer is not None:
            reducer.carry(float(result))
            named = trees.leaves(gradients)  # match by name, because JAX sorts the keys of dicts
            reduced = reducer.reduce({name: named[name] for name in self.trained()})
            gradients = trees.rebuilt(self._optimizer.parameters, list(reduced.values()))
        self._optimizer.step(gradients)
        return result  # type: ignore[no-any-return]

    def load_optimizer_state(self, state: Any) -> None:
        self._optimizer.load_state_dict(with_arrays(state, jax.device_put))
