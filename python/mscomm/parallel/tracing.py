"""Graph: the calls that a network makes for one batch, found by running it once on tensors without memory.

The network's parameters and inputs are replaced by tensors of the class Traced on PyTorch's device "meta", which has
shapes and dtypes but no numbers. Every function of PyTorch that gets such a tensor becomes a node of the graph, and so
does every operator of mscomm.ops that rules.py knows. Python code around the calls runs once. Therefore, the graph is
valid only for inputs of the same shapes, and a branch that depends on numbers is an error.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as tree
from torch.utils._python_dispatch import TorchDispatchMode

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
    is_tuple: bool = False  # whether the call returns something else than one tensor
    writes: bool = False  # whether the call writes into its first input, which is a buffer
    grad: bool = True  # whether gradients were enabled
    has_gradient: bool = False  # whether the gradient of an output is needed
    draws: bool = False  # whether the call draws random numbers

    @property
    def changes_buffer(self) -> bool:
        """Whether the call may change a buffer, such as the moving means of a normalization."""
        return self.writes or (self.name == "batch_norm" and any(value.kind == "buffer" for value in self.inputs))

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


_METADATA = {
    *("size", "dim", "numel", "stride", "is_floating_point", "is_complex", "element_size", "nelement", "ndimension"),
    *("is_contiguous", "storage_offset", "__len__", "__repr__", "__format__", "__hash__", "untyped_storage"),
}
_DETACHED = {"detach", "data", "zeros_like", "ones_like", "rand_like", "randn_like", "randint_like"}
_NEED_NUMBERS = {
    *("item", "tolist", "numpy", "nonzero", "is_nonzero", "equal", "allclose", "data_ptr"),
    *("__bool__", "__float__", "__int__", "__index__", "__array__"),
}
_REFUSED = {"register_hook", "backward", "retain_grad", "register_post_accumulate_grad_hook", "requires_grad_", "set_"}
# On a GPU, cuDNN seeds the dropout of these functions only once in a process.
_CACHES_GENERATOR = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
_IN_PLACE = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"}
_DEVICES: dict[str, Callable[[torch.device], Any]] = {
    "device": lambda there: there,
    "is_cuda": lambda there: there.type == "cuda",
    "is_cpu": lambda there: there.type == "cpu",
    "is_meta": lambda there: False,
}


class _Recorder:
    """Records calls. device: where the network really is."""

    def __init__(self, device: torch.device) -> None:
        self.nodes: list[Node] = []
        self.scope: list[tuple[str, str]] = []
        self.device = device
        self.drawn: bool | None = None  # while a call is recorded: whether it has drawn random numbers; otherwise None
        # By id and version. The tensor is kept, so that no other tensor gets its id.
        self._constants: dict[tuple[int, int], tuple[torch.Tensor, Value]] = {}
        self._traced: weakref.WeakSet[Traced] = weakref.WeakSet()
        self._written: list[Traced] = []  # the buffers that the network has changed in place

    def traced(self, meta: torch.Tensor, value: Value) -> Traced:
        with torch._C.DisableTorchFunctionSubclass():
            made: Traced = meta.as_subclass(Traced)
        made.value, made.recorder = value, self
        self._traced.add(made)
        return made

    def refuse(self, what: str) -> NotImplementedError:
        return NotImplementedError(f"mscomm.parallel: {self._where()}: {what}")

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", str(func))
        if name == "__get__":
            name = func.__self__.__name__
            if name in _DEVICES:
                return _DEVICES[name](self.device)
            if name == "requires_grad":
                return args[0].value.requires_grad
            found = _plain(func, args, kwargs)
            if not isinstance(found, torch.Tensor):
                return found
        elif name in _METADATA:
            return _plain(func, args, kwargs)
        if name in _NEED_NUMBERS:
            raise RuntimeError(
                f"mscomm.parallel: {self._where()} calls {name}(), which needs the numbers of a tensor. A network is"
                " planned without numbers; compute with tensors instead, for example with torch.where"
            )
        if name in _REFUSED or name == "__set__":
            raise self.refuse(f"{name}() on a tensor is not in mscomm.parallel")
        args, kwargs, inplace = _without_inplace(func, args, kwargs)
        if not (inplace or (name[-1:] == "_" and name[-2:] != "__") or name in _IN_PLACE):
            return self.record(func, name.strip("_"), args, kwargs)
        target = args[0]
        if not isinstance(target, Traced):
            raise self.refuse(f"{name}() writes into a tensor that is not computed from the inputs; use a new tensor")
        self._check_target(target, name)
        if inplace and target.value.kind == "buffer":
            raise self.refuse(f"{name}(inplace=True) writes into a buffer; use copy_()")
        if not inplace and target.value.kind != "buffer":
            func = functools.partial(_of_copy, func)
        result = self.record(func, name.strip("_"), args, kwargs, target=target)
        target.value = result.value  # from here on, the tensor has the new value
        return target

    def _check_target(self, target: Traced, name: str) -> None:
        """Refuse to write into a tensor whose memory others use, or into a buffer for the second time."""
        storage = _storage(target)
        if any(other is not target and _storage(other) == storage for other in self._traced):
            raise self.refuse(f"{name}() writes into a tensor of which there are views; use a new tensor")
        if any(target is one for one in self._written):
            raise self.refuse(f"{name}() writes into a buffer that was written before; write each buffer once")
        if target.value.kind == "parameter":
            raise self.refuse(f"{name}() writes into a parameter")
        if target.value.kind == "buffer":
            self._written.append(target)

    def record(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        operator: Operator | None = None,
        target: Traced | None = None,
    ) -> Any:
        if torch.is_autocast_enabled(self.device.type):
            raise self.refuse("autocast is not in mscomm.parallel")
        positional, named = tree.tree_map(self._value, (args, kwargs))
        metas = tree.tree_map(_meta, (args, kwargs))
        given = [one for one in tree.tree_leaves(metas) if isinstance(one, torch.Tensor)]
        before = [one._version for one in given]
        self.drawn = False
        try:
            results = _plain(func, *metas)
        except NotImplementedError as error:
            raise error if "mscomm.parallel" in str(error) else self.refuse(f"{name}: {error}") from error
        finally:
            drawn, self.drawn = self.drawn, None
        if drawn and any(isinstance(one, torch.Generator) for one in tree.tree_leaves((args, kwargs))):
            raise self.refuse(
                f"{name} draws random numbers from a generator of its own, which may differ between ranks"
            )
        if drawn and name in _CACHES_GENERATOR and self.device.type != "cpu":
            raise self.refuse(f"{name} with dropout is in mscomm.parallel only on the CPU")
        changed = [one for one, version in zip(given, before, strict=True) if one._version != version]
        if [_storage(one) for one in changed] not in ([], [] if target is None else [_storage(target)]):
            raise self.refuse(f"{name}() writes into a tensor, or into a part of one; use torch.where or torch.cat")
        node = Node(len(self.nodes), func, positional, named, name, tuple(self.scope), operator)
        node.inputs = [one for one in tree.tree_leaves((positional, named)) if isinstance(one, Value)]
        node.grad, node.draws = torch.is_grad_enabled(), drawn
        node.writes = target is not None and target.value.kind == "buffer"
        leaves, form = tree.tree_flatten(results)
        if not any(isinstance(one, torch.Tensor) for one in leaves):
            return results  # numbers, which need no communication
        node.is_tuple = form.num_leaves > 1 or not isinstance(results, torch.Tensor)
        differentiable = node.grad and name not in _DETACHED and any(one.requires_grad for one in node.inputs)
        made: list[Any] = []
        for meta in leaves:
            if isinstance(meta, torch.Tensor):
                has = differentiable and (meta.is_floating_point() or meta.is_complex())
                value = Value(tuple(meta.shape), meta.dtype, "result", "", node, len(node.outputs), requires_grad=has)
                node.outputs.append(value)
                made.append(self.traced(meta, value))
            else:
                made.append(meta)
        self.nodes.append(node)
        return tree.tree_unflatten(made, form)

    def _value(self, one: Any) -> Any:
        if isinstance(one, Traced):
            return one.value
        if not isinstance(one, torch.Tensor):
            return one
        if one.is_meta:
            raise self.refuse("a tensor without memory was made outside of the calls that are recorded")
        if one.requires_grad:
            raise self.refuse("a tensor that requires a gradient is not a parameter of the network")
        key = id(one), one._version
        if key not in self._constants:
            data = one.detach().clone().as_subclass(torch.Tensor)
            self._constants[key] = one, Value(tuple(one.shape), one.dtype, "constant", data=data)
        return self._constants[key][1]

    def _where(self) -> str:
        return ".".join(attribute or kind for attribute, kind in self.scope) or "the network"


def _without_inplace(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any], bool]:
    """Return (args, kwargs, whether the call was to work in place), with inplace=False."""
    try:
        parameters = inspect.signature(func).parameters
    except (TypeError, ValueError):
        return args, kwargs, False
    if "inplace" not in parameters:
        return args, kwargs, False
    place = list(parameters).index("inplace")
    if len(args) > place:
        return (*args[:place], False, *args[place + 1 :]), kwargs, bool(args[place])
    return args, {**kwargs, "inplace": False} if "inplace" in kwargs else kwargs, bool(kwargs.get("inplace"))


def _of_copy(func: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call a function that changes its first argument with a copy of it."""
    return func(x if x.is_meta else x.clone(), *args, **kwargs)


def _plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _storage(x: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return int(x.untyped_storage()._cdata)


def _meta(one: Any) -> Any:
    """Return what a call without memory gets in place of an argument."""
    if isinstance(one, torch.device):
        return torch.device("meta")
    if not isinstance(one, torch.Tensor):
        return one
    with torch._C.DisableTorchFunctionSubclass():
        return one.detach().as_subclass(torch.Tensor).to("meta")


class _RandomNumbers(TorchDispatchMode):
    """Notes which recorded calls draw random numbers. In other calls, which run only once, refuses to draw them."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            name = func.overloadpacket.__name__
            if self._recorder.drawn is None:
                raise self._recorder.refuse(
                    f"{name} draws random numbers, but gets no tensor that is computed from the inputs, so it would run"
                    " only once; use a function such as torch.rand_like"
                )
            self._recorder.drawn = True
        return func(*args, **(kwargs or {}))


def trace(module: torch.nn.Module, inputs: Sequence[Any], known: Callable[[Operator], bool]) -> Graph:
    """Return the calls of module(*inputs). inputs: tensors or arrays, of which only shapes and dtypes matter. known:
    whether an operator of mscomm.ops becomes one node; if not, its calls of PyTorch become nodes."""
    first = next(iter((*module.parameters(), *module.buffers())), torch.empty(0))
    recorder = _Recorder(first.device)

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

    def ended() -> None:
        for name, buffer in module.named_buffers():
            if buffer is not swapped[name]:
                raise recorder.refuse(f"the buffer {name} is replaced by another tensor; write into it in place, once")

    with (
        torch.enable_grad(),
        _RandomNumbers(recorder),
        _scopes(module, recorder, ended),
        _no_functions(recorder),
        operators.intercepted(called),
    ):
        result = torch.func.functional_call(module, swapped, tuple(tensors))
    for one in tree.tree_leaves(result):
        if isinstance(one, torch.Tensor) and not isinstance(one, Traced):
            raise recorder.refuse("a result is not computed from the inputs")
    values = tree.tree_map(lambda one: one.value if isinstance(one, Traced) else one, result)
    return _pruned(Graph(recorder.nodes, given, parameters, buffers, values))


@contextlib.contextmanager
def _no_functions(recorder: _Recorder) -> Iterator[None]:
    """Refuse subclasses of torch.autograd.Function, whose backward pass the graph would not have."""
    own = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(one, Traced) for one in tree.tree_leaves((args, kwargs))):
            raise recorder.refuse(f"{cls.__name__} has a backward pass of its own, which is not in mscomm.parallel")
        return own.__get__(None, cls)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)
    try:
        yield
    finally:
        torch.autograd.Function.apply = own


def _pruned(graph: Graph) -> Graph:
    """Remove the nodes on which no result depends, and the gradients that no result needs."""
    wanted = {id(value) for value in graph.results}
    differentiated = {id(value) for value in graph.results if value.requires_grad}
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if wanted.isdisjoint(map(id, node.outputs)) and not node.changes_buffer:
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
def _scopes(module: torch.nn.Module, recorder: _Recorder, ended: Callable[[], None]) -> Iterator[None]:
    """Keep recorder.scope up to date while modules call each other. Call ended() when the module has computed."""
    names = {id(one): name.rpartition(".")[2] for name, one in module.named_modules()}

    def enter(one: torch.nn.Module, args: Any) -> None:
        recorder.scope.append((names.get(id(one), ""), type(one).__name__))

    def leave(one: torch.nn.Module, args: Any, result: Any) -> None:
        recorder.scope.pop()
        if one is module:
            ended()

    hooks = [
        torch.nn.modules.module.register_module_forward_pre_hook(enter),
        torch.nn.modules.module.register_module_forward_hook(leave),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
