"""Cell: a torch.nn.Module with MindSpore's methods."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from mscomm.ops.operator import Operator
from mscomm.tensor import Parameter


class Cell(torch.nn.Module):
    """A torch.nn.Module that defines `construct` instead of `forward`.

    Like a cell of MindSpore, and unlike a module of PyTorch, a new cell is in evaluation mode, and so are PyTorch's
    modules in its attributes. Model.train() and TrainOneStepCell set training mode. auto_prefix: if False, a parameter
    of a cell inside this one keeps its name, without the name of the attribute in front. Subclasses must call
    super().__init__() before they set attributes.

    state_dict(), load_state_dict() and checkpoints name the parameters after the attributes that hold them, as in
    PyTorch: self.weight = Parameter(..., "w") is "weight".
    """

    def __init__(self, auto_prefix: bool = True, flags: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.training = False
        self._auto_prefix = auto_prefix
        self.add_flags(**(flags or {}))

    def construct(self, *inputs: Any, **named: Any) -> Any:
        """Compute the result. Every subclass defines this method."""
        raise NotImplementedError(f"{type(self).__name__} does not define construct()")

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.construct(*inputs, **named)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, torch.nn.Module) and not isinstance(value, Cell):
            value.train(self.training)
        if isinstance(value, Operator) and not value.instance_name:
            value.instance_name = name
        elif isinstance(value, Parameter) and not value.is_named:
            value.name = name
        elif isinstance(value, Cell) and self._auto_prefix:
            for parameter in value.parameters():
                if isinstance(parameter, Parameter):
                    parameter.name = f"{name}.{parameter.name}"

    # -- parameters

    def get_parameters(self, expand: bool = True) -> Iterator[torch.nn.Parameter]:
        """Yield the parameters of this cell and, if expand is True, of the cells inside it."""
        return self.parameters(recurse=expand)

    def parameters_and_names(self, name_prefix: str = "", expand: bool = True) -> Iterator[tuple[str, Any]]:
        """Yield (name, parameter). The names are those of the attributes, as in state_dict()."""
        return self.named_parameters(prefix=name_prefix, recurse=expand)

    def parameters_dict(self, recurse: bool = True) -> dict[str, Any]:
        """Return the parameters by name."""
        return dict(self.named_parameters(recurse=recurse))

    def trainable_params(self, recurse: bool = True) -> list[torch.nn.Parameter]:
        """Return the parameters that require a gradient."""
        return [one for one in self.parameters(recurse) if one.requires_grad]

    def untrainable_params(self, recurse: bool = True) -> list[torch.nn.Parameter]:
        """Return the parameters that do not require a gradient."""
        return [one for one in self.parameters(recurse) if not one.requires_grad]

    def insert_param_to_cell(self, param_name: str, param: torch.nn.Parameter) -> None:
        """Add a parameter under this name."""
        setattr(self, param_name, param)

    # -- the cells inside this one

    def cells(self) -> Iterable[torch.nn.Module]:
        """Return the cells that this cell holds directly."""
        return [one for one in self._modules.values() if one is not None]

    def cells_and_names(self, name_prefix: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield (name, cell) for this cell and all cells inside it."""
        return self.named_modules(prefix=name_prefix)

    def name_cells(self) -> dict[str, torch.nn.Module]:
        """Return the cells that this cell holds directly, by name."""
        return dict(self.named_children())

    def insert_child_to_cell(self, child_name: str, child_cell: torch.nn.Module) -> None:
        """Add a cell under this name."""
        setattr(self, child_name, child_cell)

    # -- modes

    def set_train(self, mode: bool = True) -> Cell:
        """Set training mode, or evaluation mode with False, for this cell and all cells inside it."""
        return self.train(mode)

    def set_grad(self, requires_grad: bool = True) -> Cell:
        """Return the cell. PyTorch records what a gradient needs, unless torch.no_grad() says otherwise."""
        return self

    def add_flags(self, **flags: Any) -> Cell:
        """Set attributes with these names, and return the cell."""
        for name, value in flags.items():
            setattr(self, name, value)
        return self


class SequentialCell(Cell):
    """Calls cells one after another. args: the cells, or one list, tuple or dict of them. A cell may occur twice.

    Raises TypeError if an item is not a cell or module.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__()
        given = args[0] if len(args) == 1 and isinstance(args[0], list | tuple | dict) else args
        for name, cell in given.items() if isinstance(given, dict) else enumerate(given):
            self._add(str(name), cell)

    def append(self, cell: torch.nn.Module) -> SequentialCell:
        """Add a cell at the end."""
        self._add(str(len(self)), cell)
        return self

    def _add(self, name: str, cell: Any) -> None:
        if not isinstance(cell, torch.nn.Module):
            raise TypeError(f"{type(self).__name__}: item {name} is a {type(cell).__name__}; expected a cell")
        setattr(self, name, cell)

    def construct(self, x: Any) -> Any:
        for cell in self:
            x = cell(x)
        return x

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[torch.nn.Module]:
        return iter(list(self._modules.values()))

    def __getitem__(self, index: int | slice) -> torch.nn.Module:
        found = list(self)[index]
        return type(self)(found) if isinstance(found, list) else found


class CellList(SequentialCell):
    """A list of cells, which the cell that holds the list calls itself."""

    def construct(self, *inputs: Any, **named: Any) -> Any:
        raise NotImplementedError("CellList: call the cells in the list, not the list")
