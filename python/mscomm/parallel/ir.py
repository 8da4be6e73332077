"""A plan as text, in the form of the graphs that MindSpore saves with save_graphs=2."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mscomm.parallel.layout import Layout, Step
from mscomm.parallel.planning import Edge, Plan
from mscomm.parallel.tracing import Node, Value

_NAMES = {"all_reduce": "AllReduce", "reduce_scatter": "ReduceScatter", "all_gather": "AllGather",
          "all_to_all": "AlltoAll", "slice": "StridedSlice"}  # fmt: skip


def begin(plan: Plan) -> str:
    """Return the operators with their strategies and the shapes of whole tensors."""
    return "\n".join(_operator(plan, node, _names(plan, node), whole=True) for node in plan.graph.nodes) + "\n"


def execute(plan: Plan, rank: int) -> str:
    """Return what one rank executes in the forward pass: operators with the shapes of its parts, and communication."""
    lines: list[str] = []
    for node, edges in zip(plan.graph.nodes, plan.edges, strict=True):
        inputs, count = [], 0
        for edge in edges:
            moved = list(_moves(plan, edge, rank, f"{node.number}", count))
            count += len(moved)
            lines += [line for line, _ in moved]
            inputs.append(moved[-1][1] if moved else plan.name(edge.value))
        lines.append(_operator(plan, node, inputs, whole=False))
    for number, edge in enumerate(plan.results):
        lines += [line for line, _ in _moves(plan, edge, rank, f"result{number}", 0)]
    return "\n".join(lines) + "\n"


def save(plan: Plan, folder: str | os.PathLike[str], rank: int) -> None:
    """Write both texts, and the plan's table, into folder/rank_<rank>."""
    there = Path(folder or ".") / f"rank_{rank}"
    there.mkdir(parents=True, exist_ok=True)
    (there / "step_parallel_begin_0001.ir").write_text(begin(plan))
    (there / "18_execute_0001.ir").write_text(execute(plan, rank))
    (there / "plan.txt").write_text(f"{plan}\n")


def _names(plan: Plan, node: Node) -> list[str]:
    return [plan.name(value) for value in node.inputs]


def _operator(plan: Plan, node: Node, inputs: list[str], *, whole: bool) -> str:
    choice = plan.choices[node.number]
    strategy = _tuples(plan.strategy(node))
    name = node.operator.instance_name if node.operator is not None else ""
    attributes: dict[str, Any] = {}
    if node.operator is not None:
        attributes = {"input_names": f"[{', '.join(node.operator.input_names)}]", **node.operator.attributes}
        if node.operator.in_strategy is not None:
            attributes["in_strategy"] = _tuples(node.operator.in_strategy)
    given = ", ".join(f"{key}: {_value(value)}" for key, value in attributes.items())

    def types(values: list[Value], layouts: tuple[Layout, ...]) -> str:
        shapes = [v.shape if whole else one.shape(plan.mesh, v.shape) for v, one in zip(values, layouts, strict=True)]
        return f"({', '.join(_type(v, shape) for v, shape in zip(values, shapes, strict=True))})"

    scope = "/".join(f"{attribute or 'network'}-{kind}" for attribute, kind in node.scope)
    return (
        f"%{node.number}(out) = {node.name}({', '.join(inputs)}) {{instance name: {name or node.name}}}"
        f" primitive_attrs: {{{given}}} {{in_strategy: {strategy}}}"
        f" : {types(node.inputs, choice.inputs)} -> {types(node.outputs, choice.outputs)}"
        f" # scope: (Default/{scope})"
    )


def _moves(plan: Plan, edge: Edge, rank: int, prefix: str, first: int) -> Iterator[tuple[str, str]]:
    """Yield (line, name of its result) for each step of an edge. The names are %prefix.number, counted from first."""
    source = plan.name(edge.value)
    shape = list(edge.before.shape(plan.mesh, edge.value.shape))
    for number, step in enumerate(edge.steps, first):
        before = _type(edge.value, shape)
        index = plan.mesh.index(rank, step.axes)
        begin_ = [0] * len(shape)
        _resize(shape, step, plan.mesh.parts(step.axes))
        if step.kind == "slice":
            begin_[step.to] = index * shape[step.to]
            end = [first + size for first, size in zip(begin_, shape, strict=True)]
            arguments = f"{source}, {_value(tuple(begin_))}, {_value(tuple(end))}, {_value((1,) * len(shape))}"
            attributes = ""
        else:
            ranks = plan.mesh.group(rank, step.axes)
            joined = "-".join(map(str, ranks))
            hashed = int.from_bytes(hashlib.sha256(joined.encode()).digest()[:8], "big")
            sums = "op: sum, " if step.kind in ("all_reduce", "reduce_scatter") else ""
            arguments = source
            attributes = (
                f"group: {len(ranks)}-{hashed}, fusion: 0, {sums}rank_list: {_value(tuple(ranks))},"
                f" group_ranks: {joined}"
            )
        kind = "forward_op" if step.kind == "all_reduce" else "redistribution_op"
        name = _NAMES[step.kind]
        result = f"%{prefix}.{number}"
        yield (
            f"{result}(out) = {name}({arguments}) {{instance name: {kind}_{name}}} primitive_attrs: {{{attributes}}}"
            f" : ({before}) -> ({_type(edge.value, shape)})",
            result,
        )
        source = result


def _resize(shape: list[int], step: Step, parts: int) -> None:
    """Change the shape of a rank's part as the step does."""
    if step.dim >= 0:
        shape[step.dim] *= parts
    if step.to >= 0:
        shape[step.to] //= parts


def _type(value: Value, shape: Any) -> str:
    kind = str(value.dtype).removeprefix("torch.").capitalize()
    return f"<Tensor[{kind}], {_value(tuple(shape))}>"


def _tuples(strategy: Any) -> str:
    return f"({', '.join(_value(tuple(one)) for one in strategy)})"


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(str, value))})"
    return str(value).lower() if isinstance(value, bool) else str(value)
