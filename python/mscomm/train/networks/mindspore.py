"""MindSpore cells, in graph or PyNative mode, with mindspore.nn optimizers."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np

from mscomm.train import networks
from mscomm.train.networks import data_and_label, write_over
from mscomm.train.reducer import GradientReducer


class Network(networks.Network):
    """A cell with its loss and optimizer. The loss is loss_fn(output, label), or the cell's output if there is no
    loss_fn. Each rank keeps parameters with layerwise_parallel=True for itself."""

    def __init__(self, network: Any, loss_fn: Any, optimizer: Any) -> None:
        self._cell = network
        self._optimizer = optimizer

        def loss(*batch: Any) -> Any:
            if loss_fn is None:
                return network(*batch)
            data, label = data_and_label(batch)
            return loss_fn(network(*data), label)

        self._parameters = list(network.trainable_params())
        self._eager = self._loss_and_gradients = mindspore.value_and_grad(loss, None, self._parameters)
        self._compiled: Any = None

    def trained(self) -> dict[str, Any]:
        return {p.name: p for p in self._parameters if not p.layerwise_parallel}

    def weights(self) -> dict[str, Any]:
        return {p.name: p for p in self._cell.get_parameters()}

    def own(self) -> set[str]:
        optimizers = [] if self._optimizer is None else self._optimizer.get_parameters()
        return {p.name for p in (*self._cell.get_parameters(), *optimizers) if p.layerwise_parallel}

    def begin(self) -> None:
        """In graph mode, compile the loss and the gradients into one graph. The optimizer's step is a second graph. The
        reduction runs between the two graphs, in Python."""
        self._cell.set_train(True)
        if mindspore.get_context("mode") != mindspore.GRAPH_MODE:
            self._loss_and_gradients = self._eager
            return
        if self._compiled is None:  # compile only once, because MindSpore keeps every graph that jit makes
            self._compiled = mindspore.jit(self._eager)
        self._loss_and_gradients = self._compiled

    def step(self, batch: tuple[Any, ...], reducer: GradientReducer | None) -> np.generic:
        loss, gradients = self._loss_and_gradients(*(_tensor(x) for x in batch))
        result: Any = loss.asnumpy()[()]
        if reducer is not None:
            reducer.carry(float(result))
            named = dict(zip((p.name for p in self._parameters), gradients, strict=True))
            named |= reducer.reduce({name: named[name] for name in self.trained()})
            gradients = named.values()
        self._optimizer(tuple(gradients))
        return result  # type: ignore[no-any-return]

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's parameters, such as moments, step number and learning rate, without the weights."""
        ours = {id(p) for p in self._cell.get_parameters()}
        return {p.name: p for p in self._optimizer.get_parameters() if id(p) not in ours}

    def load_optimizer_state(self, state: Any) -> None:
        mine = self.optimizer_state()
        if state.keys() != mine.keys():
            raise ValueError(f"the optimizer's state has {', '.join(state)}, this optimizer {', '.join(mine)}")
        write_over(mine, state)


def _tensor(x: Any) -> Any:
    return mindspore.Tensor(x) if isinstance(x, np.ndarray) else x
