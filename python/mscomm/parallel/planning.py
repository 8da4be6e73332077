"""plan(): divides a network among ranks, and shows what each rank computes and communicates."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as tree

from mscomm.context import ParallelMode
from mscomm.ops.operator import Operator
from mscomm.parallel import picture, rules, search, tracing
from mscomm.parallel.layout import Axes, Layout, Mesh, Step, redistribution, sent_bytes
from mscomm.parallel.search import Choice, Machine, Problem
from mscomm.parallel.tracing import Graph, Node, Value

FORWARD, BACKWARD, GRADIENT = "forward", "backward", "gradient"
STRATEGIES = {"data_parallel", "full_batch"}


class Transfer(NamedTuple):
    """A collective call of a plan, or a slice.

    node: the number of the node whose input is redistributed, or -1 for the network's result. phase: "forward",
    "backward", or "gradient" for the sum of a parameter's gradient. what: the name of the tensor. ranks: the ranks of
    rank 0's group. bytes: the size of the array that each rank passes to the call. sent: the bytes that it has to send.
    """

    node: int
    phase: str
    what: str
    step: Step
    ranks: list[int]
    bytes: int
    sent: int


@dataclass(frozen=True)
class Edge:
    """How an input of a node, or a result of the network, is brought from one layout to another, and its gradient back.

    backward: the layouts between which the gradient is redistributed, or None if there is no gradient.
    """

    value: Value
    before: Layout
    after: Layout
    backward: tuple[Layout, Layout] | None

    @property
    def steps(self) -> tuple[Step, ...]:
        return redistribution(self.before, self.after)

    @property
    def steps_back(self) -> tuple[Step, ...]:
        return () if self.backward is None else redistribution(*self.backward)


class Plan:
    """How a network is divided among ranks. plan() makes one.

    ranks: the number of ranks. `str(plan)` is a table, and `to_dict()` has the same for programs. `transfers()` are the
    collective calls of a training step. `cost_s` is the estimated time of a step, without latencies.
    """

    def __init__(self, graph: Graph, problem: Problem, choices: list[Choice]) -> None:
        self.graph = graph
        self.mesh = problem.mesh
        self.ranks = problem.mesh.ranks
        self.choices = choices
        self.rules = problem.rules
        self.cost_s = problem.cost(choices)
        self._problem = problem
        self.edges = [
            [self._edge(node, place, choice) for place in range(len(node.inputs))]
            for node, choice in zip(graph.nodes, choices, strict=True)
        ]
        self.results = [self._result(value) for value in graph.results]

    def layout(self, value: Value) -> Layout:
        """Return the layout in which a value is computed, or in which an input, parameter or buffer is given.

        A parameter that no node uses is whole.
        """
        if value.kind in ("parameter", "buffer") and id(value) not in self._problem.users:
            return Layout(((),) * len(value.shape))
        found = self._problem.source(value, self.choices)
        assert found is not None
        return found

    def gradient_axes(self, name: str) -> Axes:
        """Return the axes over which a parameter's gradient is summed once, after the backward pass."""
        value = self.graph.parameters[name]
        uses = self._problem.users.get(id(value), [])
        if not value.requires_grad or not self._is_deferred(value) or not uses[0][0].has_gradient:
            return ()  # the gradient of each use is summed at its edge
        node, place = uses[0]
        return tuple(sorted(self.choices[node.number].gradients[place].partial))

    def _is_deferred(self, value: Value) -> bool:
        """Return whether a value's gradient is summed once, after the backward pass: a parameter with one use."""
        uses = self._problem.users.get(id(value), [])
        return value.kind == "parameter" and len(uses) == 1 and all(value is not one for one in self.graph.results)

    def _edge(self, node: Node, place: int, choice: Choice) -> Edge:
        value = node.inputs[place]
        before = self.layout(value)
        back = None
        if value.requires_grad and node.has_gradient and not self._is_deferred(value):
            back = (choice.gradients[place], before.whole)
        return Edge(value, before, choice.inputs[place], back)

    def _result(self, value: Value) -> Edge:
        before, whole = self.layout(value), Layout(((),) * len(value.shape))
        return Edge(value, before, whole, (whole, before.whole) if value.requires_grad else None)

    # -- what is communicated

    def transfers(self) -> list[Transfer]:
        """Return the collective calls and slices of a training step: node by node, and then the network's results."""
        found: list[Transfer] = []
        for node, choice, edges in zip(self.graph.nodes, self.choices, self.edges, strict=True):
            for place, edge in enumerate(edges):
                found += self._steps(node.number, FORWARD, edge, edge.before, edge.steps)
                if edge.backward is not None:
                    found += self._steps(node.number, BACKWARD, edge, edge.backward[0], edge.steps_back)
                elif edge.value.kind == "parameter" and (axes := self.gradient_axes(edge.value.name)):
                    layout = choice.gradients[place]
                    found += self._steps(node.number, GRADIENT, edge, layout, (Step("all_reduce", axes),))
            for axes, size in self._problem.own_sums(node, choice):
                step, what = Step("all_reduce", axes), f"sum within {node.name}"
                phases = (FORWARD, BACKWARD) if node.outputs[0].requires_grad and size > 8 else (FORWARD,)
                found += [self._transfer(node.number, phase, what, step, size) for phase in phases]
        for edge in self.results:
            found += self._steps(-1, FORWARD, edge, edge.before, edge.steps)
            if edge.backward is not None:
                found += self._steps(-1, BACKWARD, edge, edge.backward[0], edge.steps_back)
        return found

    def _steps(self, node: int, phase: str, edge: Edge, layout: Layout, steps: Sequence[Step]) -> Iterator[Transfer]:
        size = edge.value.nbytes / self.mesh.parts(tuple(layout.used))
        for step in steps:
            yield self._transfer(node, phase, self.name(edge.value), step, size)
            size = sent_bytes(step, self.mesh, size)[1]

    def _transfer(self, node: int, phase: str, what: str, step: Step, size: float) -> Transfer:
        sent = sent_bytes(step, self.mesh, size)[0]
        return Transfer(node, phase, what, step, self.mesh.group(0, step.axes), round(size), round(sent))

    def name(self, value: Value) -> str:
        """Return a name of a value: the parameter's, or %number of the node."""
        if value.node is not None:
            return f"%{value.node.number}" + (f"[{value.index}]" if value.node.is_tuple else "")
        return value.name if value.kind in ("parameter", "buffer") else f"{value.kind} {value.name}".strip()

    def saved_bytes(self) -> int:
        """Return how many bytes less each rank sends because the plan sums with reduce_scatter where all_reduce and
        slices would do the same."""
        return sum(one.sent for one in self.transfers() if one.step.kind == "reduce_scatter")

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes of a rank's parameters, gradients and results of nodes, which the backward pass needs."""

        def part(value: Value) -> int:
            return value.nbytes // self.mesh.parts(tuple(self.layout(value).used))

        parameters = list(self.graph.parameters.values())
        return {
            "parameters": sum(map(part, parameters)),
            "gradients": sum(part(one) for one in parameters if one.requires_grad),
            "results": sum(part(value) for node in self.graph.nodes for value in node.outputs),
        }

    # -- as text

    def strategy(self, node: Node) -> tuple[tuple[int, ...], ...]:
        """Return a node's strategy: for each input, into how many parts each dimension is divided."""
        return tuple(layout.numbers(self.mesh) for layout in self.choices[node.number].inputs)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as a dict of lists, numbers and texts, which json.dumps accepts."""
        transfers = self.transfers()
        return {
            "ranks": self.ranks,
            "mesh": list(self.mesh.sizes),
            "cost_us": round(self.cost_s * 1e6, 3),
            "memory_bytes": self.memory_bytes(),
            "saved_bytes": self.saved_bytes(),
            "parameters": [
                {
                    "name": name,
                    "shape": list(value.shape),
                    "strategy": list(self.layout(value).numbers(self.mesh)),
                    "local_shape": list(self.layout(value).shape(self.mesh, value.shape)),
                }
                for name, value in self.graph.parameters.items()
            ],
            "operators": [
                {
                    "number": node.number,
                    "operator": node.name,
                    "name": node.label,
                    "configured": node.operator is not None and node.operator.in_strategy is not None,
                    "strategy": [list(one) for one in self.strategy(node)],
                    "inputs": [self.name(value) for value in node.inputs],
                    "local_inputs": [
                        list(layout.shape(self.mesh, value.shape))
                        for layout, value in zip(choice.inputs, node.inputs, strict=True)
                    ],
                    "local_outputs": [
                        list(layout.shape(self.mesh, value.shape))
                        for layout, value in zip(choice.outputs, node.outputs, strict=True)
                    ],
                    "partial": [sorted(layout.partial) for layout in choice.outputs],
                    "transfers": [_as_dict(one, self.mesh) for one in transfers if one.node == node.number],
                }
                for node, choice in zip(self.graph.nodes, self.choices, strict=True)
            ],
            "results": [_as_dict(one, self.mesh) for one in transfers if one.node == -1],
        }

    def to_json(self) -> str:
        """Return the plan as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def strategies(self) -> dict[str, list[list[int]]]:
        """Return the strategy of each operator, by a name that is the same whenever the network is planned."""
        names = _keys(self.graph)
        return {names[node.number]: [list(one) for one in self.strategy(node)] for node in self.graph.nodes}

    def save_strategies(self, path: str | os.PathLike[str]) -> None:
        """Write the strategies of all operators into a JSON file, which plan(strategies=path) reads.

        Folders that do not exist are created.
        """
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"ranks": self.ranks, "strategies": self.strategies()}, indent=1)
        partial = Path(f"{path}.partial")
        partial.write_text(text + "\n")
        partial.replace(path)

    def plot(self, path: str | os.PathLike[str], first: int = 0, last: int | None = None) -> None:
        """Draw which ranks hold which parts of the tensors of the operators with the numbers first to last.

        Without last, at most 12 operators are drawn. path: a file whose name ends with .svg, .png or .pdf. This needs
        matplotlib (the extra `plot`). Raise ImportError without it, and ValueError for another kind of file or if there
        is no such operator.

        >>> plan.plot("plan.svg")
        """
        count = len(self.graph.nodes)
        last = min(first + picture.MOST, count) - 1 if last is None else last
        if not 0 <= first <= last < count:
            raise ValueError(f"Plan.plot: operators {first} to {last}; the plan has operators 0 to {count - 1}")
        picture.draw(self, path, first, last)

    def digest(self) -> bytes:
        """Return a digest that is equal for equal plans. The ranks of a job compare it."""
        facts = self.to_dict()
        axes = [sorted((letter, list(some)) for letter, some in choice.axes.items()) for choice in self.choices]
        arguments = [tree.tree_map(_fact, (node.args, node.kwargs)) for node in self.graph.nodes]
        return hashlib.sha256(json.dumps([facts, axes, repr(arguments)]).encode()).digest()

    def __str__(self) -> str:
        """Return a table: a row for each operator, followed by the calls that bring its inputs."""
        rows: list[tuple[str, ...]] = [("", "operator", "strategy", "local inputs", "local outputs")]
        facts = self.to_dict()
        for one in facts["operators"]:
            strategy = ", ".join(_tuple(numbers) for numbers in one["strategy"])
            inputs, outputs = (" ".join(map(_shape, one[key])) for key in ("local_inputs", "local_outputs"))
            mark = "*" if one["configured"] else ""
            rows.append((f"%{one['number']}", one["name"] + mark, strategy, inputs, outputs))
            rows += [("", *_row(transfer)) for transfer in one["transfers"]]
        rows += [("result", *_row(transfer)) for transfer in facts["results"]]
        widths = [max(len(row[column]) for row in rows if len(row) == 5) for column in range(5)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows
        ]
        memory = ", ".join(f"{name} {_size(size)}" for name, size in facts["memory_bytes"].items())
        sent = sum(one.sent for one in self.transfers())
        lines += [
            "",
            f"{self.ranks} ranks. Memory of each rank: {memory}.",
            f"Each rank sends {_size(sent)} in a step"
            + (f"; reduce_scatter saves {_size(facts['saved_bytes'])}" if facts["saved_bytes"] else "")
            + f". Estimated time of a step, without latencies: {self.cost_s * 1e6:.1f} us.",
        ]
        if any(one["configured"] for one in facts["operators"]):
            lines.append("* The strategy was set by shard().")
        return "\n".join(lines)


def _fact(argument: Any) -> str:
    """Return what is compared of an argument of a call: of a constant, its numbers; of another value, its shape."""
    if not isinstance(argument, Value):
        return repr(argument) if isinstance(argument, int | float | bool | str | None) else type(argument).__name__
    data = b"" if argument.data is None else argument.data.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{argument.kind} {argument.name} {argument.shape} {hashlib.sha256(data).hexdigest()}"


def _as_dict(transfer: Transfer, mesh: Mesh) -> dict[str, Any]:
    return {
        "phase": transfer.phase,
        "call": transfer.step.kind,
        "tensor": transfer.what,
        "dims": [one for one in (transfer.step.dim, transfer.step.to) if one >= 0],
        "ranks": transfer.ranks,
        "groups": mesh.ranks // mesh.parts(transfer.step.axes),
        "bytes": transfer.bytes,
        "sent_bytes": transfer.sent,
    }


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    ranks = "-".join(map(str, one["ranks"] if len(one["ranks"]) <= 8 else [*one["ranks"][:3], "...", one["ranks"][-1]]))
    return (f"  {one['phase']}: {one['call']} of {one['tensor']}, {_size(one['bytes'])}, ranks {ranks}",)


def _tuple(numbers: Sequence[int]) -> str:
    return f"({', '.join(map(str, numbers))})"


def _shape(shape: Sequence[int]) -> str:
    return f"({','.join(map(str, shape))})"


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def plan(
    module: torch.nn.Module,
    inputs: Sequence[Any],
    ranks: int,
    *,
    parallel_mode: str = ParallelMode.AUTO_PARALLEL,
    dataset_strategy: str = "data_parallel",
    machine: Machine | None = None,
    strategies: str | os.PathLike[str] | Mapping[str, Any] | None = None,
) -> Plan:
    """Return a plan that divides a network among ranks. No other rank and no hardware is needed.

    module: a torch.nn.Module, for example a mscomm.nn.Cell. shard() of its operators sets strategies. inputs: the
    tensors or arrays of a whole batch, of all ranks together; only their shapes and dtypes matter. ranks: the number of
    ranks. parallel_mode: with "auto_parallel", strategies are propagated from the operators that have one, or searched
    for if none has one; with "semi_auto_parallel", the first dimension of all other operators is divided.
    dataset_strategy: with "data_parallel", each rank has an equal part of the inputs' rows; with "full_batch", each
    rank has all rows. machine: what the estimated time assumes. strategies: a file of Plan.save_strategies, or what
    Plan.strategies returns, for the same network: the operators in it get these strategies.

    In the plan, each rank computes with its part of the tensors. A result of the network is brought together on every
    rank. Python code of the network runs once, so a plan is valid for inputs of these shapes, and a branch that
    depends on the numbers in a tensor raises RuntimeError.

    Raise TypeError or ValueError for invalid arguments; ValueError for a strategy that does not fit, with the operator
    and the dimension; and NotImplementedError for what the plan would compute wrongly, or if shard() was called for an
    operator without a rule.

    >>> print(mscomm.parallel.plan(net, [np.zeros((16, 32), np.float32)], 8))
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"plan: module is a {type(module).__name__}; expected a torch.nn.Module or a Cell")
    if isinstance(ranks, bool) or not isinstance(ranks, int):
        raise TypeError(f"plan: ranks is a {type(ranks).__name__}; expected an int")
    if ranks < 1:
        raise ValueError(f"plan: ranks={ranks}; expected 1 or more")
    if parallel_mode not in (ParallelMode.AUTO_PARALLEL, ParallelMode.SEMI_AUTO_PARALLEL):
        raise ValueError(f'plan: parallel_mode={parallel_mode!r}; expected "auto_parallel" or "semi_auto_parallel"')
    if dataset_strategy not in STRATEGIES:
        raise ValueError(f"plan: dataset_strategy={dataset_strategy!r} is not one of {', '.join(sorted(STRATEGIES))}")
    mesh = Mesh.of(ranks)
    graph = tracing.trace(module, inputs, _is_known)
    data = [_of_input(value, mesh, dataset_strategy) for value in graph.inputs]
    problem = Problem(graph, mesh, machine or Machine(), data, _given(strategies, graph))
    _check_parameters(problem)
    _check_buffers(problem)
    find = search.propagated if parallel_mode == ParallelMode.AUTO_PARALLEL else search.data_parallel
    return Plan(graph, problem, find(problem))


def _keys(graph: Graph) -> list[str]:
    """Return a name for each node: its label, and a number if several nodes have it."""
    seen: dict[str, int] = {}
    keys = []
    for node in graph.nodes:
        seen[node.label] = seen.get(node.label, 0) + 1
        keys.append(node.label if seen[node.label] == 1 else f"{node.label} #{seen[node.label]}")
    return keys


def _given(strategies: Any, graph: Graph) -> dict[int, Any]:
    """Return the given strategies by the numbers of the nodes. Raise ValueError if they are not of this network."""
    if strategies is None:
        return {}
    if not isinstance(strategies, Mapping):
        path = strategies
        try:
            strategies = json.loads(Path(path).read_text())["strategies"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError(f"plan: {path} is not a file of Plan.save_strategies") from None
    keys = _keys(graph)
    unknown = [key for key in strategies if key not in keys]
    if unknown:
        raise ValueError(f"plan: strategies has an operator {unknown[0]!r}, which the network does not have")
    return {number: strategies[key] for number, key in enumerate(keys) if key in strategies}


def _is_known(operator: Operator) -> bool:
    return rules.is_known(type(operator).__name__)


def _of_input(value: Value, mesh: Mesh, strategy: str) -> Layout:
    if strategy == "full_batch" or mesh.ranks == 1:
        return Layout(((),) * len(value.shape))
    if not value.shape or value.shape[0] % mesh.ranks:
        raise ValueError(
            f"plan: the rows of input {value.name}, of shape {list(value.shape)}, cannot be divided among"
            f' {mesh.ranks} ranks; use dataset_strategy="full_batch"'
        )
    return Layout((tuple(range(len(mesh.sizes))), *[()] * (len(value.shape) - 1)))


def _check_buffers(problem: Problem) -> None:
    """Raise NotImplementedError if two calls use a buffer that one of them may change."""
    for value in problem.graph.buffers.values():
        nodes = [node for node, _ in problem.users.get(id(value), [])]
        if len(nodes) > 1 and any(node.changes_buffer for node in nodes):
            raise NotImplementedError(
                f"mscomm.parallel: the buffer {value.name} is used by {nodes[0].label} and by {nodes[1].label}; a layer"
                " that changes its buffers can be called only once"
            )


def _check_parameters(problem: Problem) -> None:
    """Raise ValueError if two operators set different strategies for one parameter."""
    for value in problem.graph.parameters.values():
        set_by: dict[Layout, Node] = {}
        for node, place in problem.users.get(id(value), []):
            if len(problem.choices[node.number]) == 1 and node.operator is not None and node.operator.in_strategy:
                set_by[problem.choices[node.number][0].inputs[place]] = node
        if len(set_by) > 1:
            (one, first), (other, second), *_ = set_by.items()
            raise ValueError(
                f"mscomm.parallel: the parameter {value.name} is divided into {one.numbers(problem.mesh)} parts by"
                f" {first.label} and into {other.numbers(problem.mesh)} by {second.label}; all operators that use a"
                " parameter need the same strategy for it"
            )
