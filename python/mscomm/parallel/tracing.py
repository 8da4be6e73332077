"""Graph: the calls that a network makes for one batch, found by running it once on tensors without memory.

The network's parameters and inputs are replaced by tensors of the class Traced on PyTorch's device "meta", which has
shapes and dtypes but no numbers. Every function of PyTorch that gets such a tensor becomes a node of the graph, and so
does every operator of mscomm.ops that rules.py knows. Python code around the calls runs once. Therefore, the graph is
valid only for inputs of the same shapes, and a branch that depends on numbers is an error.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as tree

from mscomm.ops import operator as operators
from mscomm.ops.operator import Operator


@dataclass(eq=False)
class Value:
    """A tensor of the graph.

    node: the node that computes it, or None for an input, a parameter, a buffer or a constant; index: its place among
    the results of the node. kind: "result", "input", "parameter", "buffer" or "constant". name: the name of a
    parameter or buffer, and the number of an input. data: the tensor of a constant.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    name: str = ""
    node: Node | None = None
    index: int = 0
    data: torch.Tensor | None = None
    requires_grad: bool = False

    @functools.cached_property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(eq=False)
class Node:
    """A call. args and kwargs contain Values where the call gets tensors."""

    number: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str  # of the function or operator, such as "matmul" or "MatMul"
    scope: tuple[tuple[str, str], ...]  # (attribute, class) of the modules around the call
    operator: Operator | None = None
    inputs: list[Value] = field(default_factory=list)  # in the order of args and kwargs; a Value may occur twice
    outputs: list[Value] = field(default_factory=list)
    is_tuple: bool = False  # whether the call returns several tensors
    has_gradient: bool = False  # whether the gradient of an output is needed

    @property
    def inputs_change(self) -> bool:
        """Whether the call may change an input: the moving means of a normalization."""
        return any(value.kind == "buffer" for value in self.inputs)

    @property
    def label(self) -> str:
        """The name with the module or the operator's attribute, for messages."""
        where = ".".join(attribute for attribute, _ in self.scope if attribute)
        own = self.operator.instance_name if self.operator is not None else ""
        return f"{self.name} ({'.'.join(filter(None, (where, own)))})" if where or own else self.name


@dataclass
class Graph:
    """nodes: in the order of the calls. result: the network's result, in which Values stand for tensors."""

    nodes: list[Node]
    inputs: list[Value]
    parameters: dict[str, Value]
    buffers: dict[str, Value]
    result: Any

    @property
    def results(self) -> list[Value]:
        return [one for one in tree.tree_leaves(self.result) if isinstance(one, Value)]


class Traced(torch.Tensor):
    """A tensor without memory whose calls are recorded."""

    value: Value
    recorder: _Recorder

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        traced = next(one for one in tree.tree_leaves((args, kwargs)) if isinstance(one, Traced))
        return traced.recorder.call(func, args, kwargs or {})


_FACTS = {
    *("size", "dim", "numel", "stride", "is_floating_point", "is_complex", "element_size", "nelement", "ndimension"),
    *("is_contiguous", "storage_offset", "data_ptr", "get_device", "type", "__len__", "__repr__", "__format__"),
}
_DETACHED = {"detach", "data", "zeros_like", "ones_like"}
_NUMBERS = {
    *("item", "tolist", "numpy", "nonzero", "is_nonzero", "equal", "allclose"),
    *("__bool__", "__float__", "__int__", "__index__", "__array__"),
}


class _Recorder:
    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.scope: list[tuple[str, str]] = []
        self._constants: dict[
            int, tuple[torch.Tensor, Value]
        ] = {}  # by id; the tensor is kept, so the id stays its own

    def traced(self, meta: torch.Tensor, value: Value) -> Traced:
        with torch._C.DisableTorchFunctionSubclass():
            made = meta.as_subclass(Traced)
        made.value, made.recorder = value, self
        return made

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", str(func))
        if name == "__get__" and func.__self__.__name__ in ("T", "mT", "data"):
            name = func.__self__.__name__
        elif name == "__get__" or name in _FACTS:
            return _plain(func, args, kwargs)
        if name in _NUMBERS:
            raise RuntimeError(
                f"mscomm.parallel: {self._where()} calls {name}(), which needs the numbers of a tensor. A network is"
                " planned without numbers; compute with tensors instead, for example with torch.where"
            )
        target = (
            args[0] if kwargs.get("inplace") or (name[-1:] == "_" and name[-2:] != "__") or name in _IN_PLACE else None
        )
        if kwargs.get("inplace"):
            kwargs = {**kwargs, "inplace": False}
        result = self.record(func, name.strip("_"), args, kwargs)
        if isinstance(target, Traced):  # from here on, the tensor has the new value
            target.value = result.value
            return target
        return result

    def record(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], operator: Operator | None = None
    ) -> Any:
        positional, named = tree.tree_map(self._value, (args, kwargs))
        metas = tree.tree_map(lambda one: _meta(one) if isinstance(one, torch.Tensor) else one, (args, kwargs))
        try:
            results = _plain(func, *metas)
        except NotImplementedError as error:
            raise NotImplementedError(f"mscomm.parallel: {self._where()}: {name}: {error}") from error
        node = Node(len(self.nodes), func, positional, named, name, tuple(self.scope), operator)
        node.inputs = [one for one in tree.tree_leaves((positional, named)) if isinstance(one, Value)]
        node.is_tuple = isinstance(results, tuple | list)
        made = []
        for index, meta in enumerate(results if node.is_tuple else (results,)):
            if not isinstance(meta, torch.Tensor):
                return results  # numbers, which need no communication
            grad = meta.is_floating_point() and any(one.requires_grad for one in node.inputs) and name not in _DETACHED
            value = Value(tuple(meta.shape), meta.dtype, "result", "", node, index, requires_grad=grad)
            node.outputs.append(value)
            made.append(self.traced(meta, value))
        self.nodes.append(node)
        if not node.is_tuple:
            return made[0]
        return type(results)(made) if type(results) in (tuple, list) else tuple(made)

    def _value(self, one: Any) -> Any:
        if isinstance(one, Traced):
            return one.value
        if not isinstance(one, torch.Tensor):
            return one
        if id(one) not in self._constants:
            data = one.detach().as_subclass(torch.Tensor)
            self._constants[id(one)] = one, Value(tuple(one.shape), one.dtype, "constant", data=data)
        return self._constants[id(one)][1]

    def _where(self) -> str:
        return ".".join(attribute or kind for attribute, kind in self.scope) or "the network"


_IN_PLACE = {"__iadd__", "__isub__", "__imul__", "__itruediv__"}


def _plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _meta(x: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return x.detach().as_subclass(torch.Tensor).to("meta")


def trace(module: torch.nn.Module, inputs: Sequence[Any], known: Callable[[Operator], bool]) -> Graph:
    """Return the calls of module(*inputs). inputs: tensors or arrays, of which only shapes and dtypes matter. known:
    whether an operator of mscomm.ops becomes one node; if not, its calls of PyTorch become nodes."""
    recorder = _Recorder()

    def traced(x: torch.Tensor, value: Value) -> Traced:
        return recorder.traced(torch.empty_like(x, device="meta").detach(), value)

    given: list[Value] = []
    tensors = []
    for number, one in enumerate(inputs):
        x = one if isinstance(one, torch.Tensor) else torch.as_tensor(one)
        given.append(Value(tuple(x.shape), x.dtype, "input", str(number)))
        tensors.append(traced(x.as_subclass(torch.Tensor), given[-1]))
    parameters = {
        name: Value(tuple(x.shape), x.dtype, "parameter", name, requires_grad=x.requires_grad)
        for name, x in module.named_parameters()
    }
    buffers = {name: Value(tuple(x.shape), x.dtype, "buffer", name) for name, x in module.named_buffers()}
    swapped = {name: traced(x, parameters[name]) for name, x in module.named_parameters()}
    swapped |= {name: traced(x, buffers[name]) for name, x in module.named_buffers()}

    def called(operator: Operator, args: tuple[Any, ...]) -> Any:
        if not known(operator) or not any(isinstance(one, Traced) for one in tree.tree_leaves(args)):
            if operator.in_strategy is not None:
                raise NotImplementedError(f"mscomm.parallel: {type(operator).__name__} cannot be sharded; no strategy")
            return NotImplemented
        compute = functools.partial(type(operator).compute, **operator.attributes)
        return recorder.record(compute, type(operator).__name__, args, {}, operator)

    with torch.no_grad(), _scopes(module, recorder), operators.intercepted(called):
        result = torch.func.functional_call(module, swapped, tuple(tensors))
    values = tree.tree_map(lambda one: one.value if isinstance(one, Traced) else one, result)
    return _pruned(Graph(recorder.nodes, given, parameters, buffers, values))


def _pruned(graph: Graph) -> Graph:
    """Remove the nodes on which no result depends, and the gradients that no result needs."""
    wanted = {id(value) for value in graph.results}
    differentiated = {id(value) for value in graph.results if value.requires_grad}
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if wanted.isdisjoint(map(id, node.outputs)) and not node.inputs_change:
            continue
        kept.insert(0, node)
        wanted.update(map(id, node.inputs))
        for value in node.outputs:
            value.requires_grad = value.requires_grad and id(value) in differentiated
        node.has_gradient = any(value.requires_grad for value in node.outputs)
        if node.has_gradient:
            differentiated.update(id(value) for value in node.inputs if value.requires_grad)
    for value in graph.parameters.values():
        value.requires_grad = value.requires_grad and id(value) in differentiated
    for number, node in enumerate(kept):
        node.number = number
    graph.nodes = kept
    return graph


@contextlib.contextmanager
def _scopes(module: torch.nn.Module, recorder: _Recorder) -> Iterator[None]:
    """Keep recorder.scope up to date while modules call each other."""
    names = {id(one): name.rpartition(".")[2] for name, one in module.named_modules()}

    def enter(one: torch.nn.Module, args: Any) -> None:
        recorder.scope.append((names.get(id(one), ""), type(one).__name__))

    def leave(one: torch.nn.Module, args: Any, result: Any) -> None:
        recorder.scope.pop()

    hooks = [
        torch.nn.modules.module.register_module_forward_pre_hook(enter),
        torch.nn.modules.module.register_module_forward_hook(leave),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
