"""PyTorch modules, with torch.optim optimizers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mscomm.arrays import on_host
from mscomm.arrays import torch as arrays
from mscomm.group import Group
from mscomm.train import networks
from mscomm.train.autograd import loader
from mscomm.train.networks import data_and_label
from mscomm.train.reducer import GradientReducer


class Network(networks.Network):
    """A module with its loss and optimizer. The loss is loss_fn(output, label), or the module's output if there is no
    loss_fn. CPU batches are moved to the device of the module's first parameter."""

    def __init__(self, network: torch.nn.Module, loss_fn: Any, optimizer: Any) -> None:
        self._module = network
        self._loss_fn = loss_fn
        self._optimizer = optimizer
        self._device = torch.device("cpu")
        self._division: Division | None = None
        # A Cell of mscomm.nn gets mscomm.Tensors, which have MindSpore's methods.
        cells = sys.modules.get("mscomm.nn.cell")  # without this module, there is no Cell
        is_cell = cells is not None and isinstance(network, cells.Cell)
        self._as_given = sys.modules["mscomm.tensor"].Tensor if is_cell else None

    def trained(self) -> dict[str, Any]:
        """Return the parameters, including frozen ones, which the ranks compare. Each rank keeps mscomm.Parameters with
        layerwise_parallel=True for itself."""
        return {name: p for name, p in self._module.named_parameters() if not _is_own(p)}

    def own(self) -> set[str]:
        return {name for name, p in self._module.named_parameters() if _is_own(p)}

    def weights(self) -> dict[str, Any]:
        if self._division is not None:
            return self._division.weights()
        return dict(self._module.state_dict())

    def parts(self) -> dict[str, Any]:
        return dict(self._module.state_dict())

    def slices(self) -> dict[str, Any]:
        return {} if self._division is None else self._division.slices()

    def divide(self, mode: str, group: Group) -> None:
        from mscomm.train.dividing import Division  # not imported at the top, because few trainings need it

        self._division = Division(self._module, self._loss_fn, self._optimizer, mode, group)

    def join(self) -> None:
        if self._division is not None:
            self._division.join()
            self._division = None

    def is_own_entry(self, path: tuple[Any, ...]) -> bool:
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        return len(path) > 1 and path[0] == "state" and _is_own(parameters[path[1]])

    def load(self, weights: dict[str, np.ndarray[Any, Any]]) -> None:
        super().load(weights)
        self.clear_gradients()

    def clear_gradients(self) -> None:
        for p in self._module.parameters():
            p.grad = None  # an optimizer skips a parameter without a gradient, but not one whose gradient is zero

    def begin(self) -> None:
        self._module.train()
        self._device = next((p.device for p in self._module.parameters()), self._device)

    def step(self, batch: tuple[Any, ...], reducer: GradientReducer | None) -> np.generic:
        if self._division is not None:
            return self._divided_step(self._division, batch)
        if reducer is None:
            self._optimizer.zero_grad()
        else:
            reducer.zero_grad()
            for p in filter(_is_own, self._module.parameters()):
                p.grad = None
        loss = _one_number(self._loss(tuple(self._there(x) for x in batch)))
        late = self._device.type != "cpu"  # read the loss after the backward pass, because reading waits for the device
        if late:
            loss.backward()
        result: Any = on_host(loss.detach(), "the loss", "Model.train")[()]
        if reducer is not None:
            reducer.carry(float(result))
        if not late:
            loss.backward()
        if reducer is not None:
            reducer.wait()
        self._optimizer.step()
        return result  # type: ignore[no-any-return]

    def _divided_step(self, division: Division, batch: tuple[Any, ...]) -> np.generic:
        given = tuple(self._there(x) for x in batch)
        if self._loss_fn is not None:
            data, label = data_and_label(given)
            given = (*data, _class_numbers(label))
        self._optimizer.zero_grad()
        loss = _one_number(division.network(given)(*given))
        result: Any = on_host(loss.detach(), "the loss", "Model.train")[()]
        loss.backward()
        division.network(given).reduce_gradients()
        self._optimizer.step()
        return result  # type: ignore[no-any-return]

    def _there(self, x: Any) -> Any:
        x = _tensor(x)
        x = x.to(self._device, non_blocking=True) if x.device.type == "cpu" else x
        return x if self._as_given is None or self._division is not None else x.as_subclass(self._as_given)

    def _loss(self, batch: tuple[Any, ...]) -> torch.Tensor:
        if self._loss_fn is None:
            return self._module(*batch)
        data, label = data_and_label(batch)
        return self._loss_fn(self._module(*data), _class_numbers(label))

    def optimizer_state(self) -> Any:
        state = super().optimizer_state()
        return state if self._division is None else self._division.whole_state(state)

    def load_optimizer_state(self, state: Any) -> None:
        loader(self._optimizer)(state)


if TYPE_CHECKING:
    from mscomm.train.dividing import Division


def _one_number(loss: torch.Tensor) -> torch.Tensor:
    if loss.ndim:
        raise ValueError(
            f"Model.train: the loss has the shape {list(loss.shape)}; it must be one number, such as the mean"
            ' (reduction="mean")'
        )
    return loss


def _class_numbers(label: torch.Tensor) -> torch.Tensor:
    """Return integer labels as int64, which PyTorch's losses need."""
    return label if label.is_floating_point() or label.is_complex() or label.dtype is torch.bool else label.long()


def _is_own(p: torch.nn.Parameter) -> bool:
    return getattr(p, "layerwise_parallel", False)


def _tensor(x: Any) -> Any:
    if not isinstance(x, np.ndarray):
        return x if isinstance(x, torch.Tensor) else torch.as_tensor(x)
    return arrays.of_numpy(x)
