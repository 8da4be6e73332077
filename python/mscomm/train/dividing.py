"""Division: a PyTorch module with its loss, divided among the ranks for Model.train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mscomm import context, parallel
from mscomm.group import Group
from mscomm.parallel import ir
from mscomm.train.reducer import broadcast_parameters


class WithLossCell(torch.nn.Module):
    """A network and its loss function as one module. Its name is in the texts of plans, as in MindSpore."""

    def __init__(self, backbone: torch.nn.Module, loss_fn: Any) -> None:
        super().__init__()
        self._backbone = backbone
        self._loss_fn = loss_fn

    def forward(self, *batch: Any) -> Any:
        *data, label = batch
        return self._loss_fn(self._backbone(*data), label)


class Division:
    """A module and its optimizer, which the first step divides among the ranks of a group.

    net: the divided network, or None before the first step.
    """

    def __init__(self, module: torch.nn.Module, loss_fn: Any, optimizer: Any, mode: str, group: Group) -> None:
        self._module = module
        self._optimizer = optimizer
        self._whole = module if loss_fn is None else WithLossCell(module, loss_fn)
        self._mode = mode
        self._group = group
        self.net: parallel.Divided | None = None
        self._names = {id(x): name for name, x in (*self._whole.named_parameters(), *self._whole.named_buffers())}

    def network(self, batch: tuple[torch.Tensor, ...]) -> parallel.Divided:
        """Return the divided network. The first call makes the plan for batches of this size."""
        if self.net is None:
            strategy = context.get_auto_parallel_context("dataset_strategy")
            times = self._group.size if strategy == "data_parallel" else 1
            inputs = [torch.empty(_rows(x, times), dtype=x.dtype, device="meta") for x in batch]
            self._whole.train(self._module.training)
            plan = parallel.plan(
                self._whole,
                inputs,
                self._group.size,
                parallel_mode=self._mode,
                dataset_strategy=strategy,
                strategies=context.get_auto_parallel_context("strategy_ckpt_load_file") or None,
            )
            if context.get_auto_parallel_context("strategy_ckpt_save_file"):
                plan.save_strategies(context.get_auto_parallel_context("strategy_ckpt_save_file"))
            if context.get_context("save_graphs"):
                ir.save(plan, context.get_context("save_graphs_path"), self._group.rank)
            # A training in data-parallel mode leaves different moving means on the ranks.
            buffers = {name: x for name, x in self._whole.named_buffers() if x.numel()}
            broadcast_parameters(buffers, group=self._group)
            self.net = parallel.divide(self._whole, plan, group=self._group)
            self._convert_state(self._part)
        return self.net

    def weights(self) -> dict[str, Any]:
        """Return the whole weights by the names of the module's state_dict(). All ranks call this together."""
        found = self._module.state_dict(keep_vars=True)
        if self.net is None:
            return {name: x.detach() for name, x in found.items()}
        return {name: self.net.whole(self._names[id(x)], x.detach()) for name, x in found.items()}

    def slices(self) -> dict[str, Any]:
        """Return which parts this rank has, as serialization.load_distributed_checkpoint reads it."""
        if self.net is None:
            return {}
        found = self._module.state_dict(keep_vars=True)
        layouts = {name: self.net.layout(self._names[id(x)]).dims for name, x in found.items()}
        return {
            "rank": self._group.rank,
            "mesh": list(self.net.plan.mesh.sizes),
            "axes": {name: [list(axes) for axes in dims] for name, dims in layouts.items()},
        }

    def whole_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the optimizer's state_dict() with whole tensors. All ranks call this together."""
        if self.net is None:
            return state
        order = [x for group in self._optimizer.param_groups for x in group["params"]]
        entries = {
            number: {key: self._joined(order[number], x) for key, x in entry.items()}
            for number, entry in state["state"].items()
        }
        return {**state, "state": entries}

    def join(self) -> None:
        """Bring the weights and the optimizer's state together on every rank, so that they can be used without the
        others."""
        if self.net is not None:
            self._convert_state(self._joined)
            self.net.join()
            self.net = None

    def _convert_state(self, convert: Callable[[torch.Tensor, Any], Any]) -> None:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                state = self._optimizer.state.get(parameter, {})
                state.update({key: convert(parameter, x) for key, x in state.items()})

    def _part(self, parameter: torch.Tensor, x: Any) -> Any:
        """Return this rank's part of an entry of the optimizer's state, if it has the shape of the parameter."""
        name, value = self._value(parameter)
        if self.net is None or value is None or not isinstance(x, torch.Tensor) or tuple(x.shape) != value.shape:
            return x
        return self.net.part(name, x).clone()

    def _joined(self, parameter: torch.Tensor, x: Any) -> Any:
        """Return the whole of an entry of the optimizer's state, if it has the shape of this rank's parameter."""
        name, value = self._value(parameter)
        if self.net is None or value is None or not isinstance(x, torch.Tensor):
            return x
        part = self.net.plan.layout(value).shape(self.net.plan.mesh, value.shape)
        return self.net.whole(name, x).clone() if tuple(x.shape) == part else x

    def _value(self, parameter: torch.Tensor) -> tuple[str, Any]:
        """Return (name, value in the plan) of a parameter, or ("", None) if it is not one of the network's."""
        name = self._names.get(id(parameter), "")
        return name, self.net.plan.graph.parameters.get(name) if self.net is not None else None


def _rows(x: torch.Tensor, times: int) -> tuple[int, ...]:
    if not x.shape:
        raise ValueError("Model.train: a batch has an array without dimensions; its rows cannot be divided")
    return (x.shape[0] * times, *x.shape[1:])
