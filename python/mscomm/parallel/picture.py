"""Draws a plan: the tensors of each operator, and which ranks hold which parts."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mscomm.parallel.layout import Layout
    from mscomm.parallel.tracing import Value

MOST = 12  # operators in one picture
SUFFIXES = (".svg", ".png", ".pdf")
_COLOURS = ("#9ecae1", "#fdae6b", "#a1d99b", "#bcbddc", "#fdd0a2", "#c7e9c0", "#dadaeb", "#c6dbef")
_GREY = "#666666"


def draw(plan: Any, path: str | os.PathLike[str], first: int, last: int) -> None:
    """Draw the operators of a Plan with the numbers first to last, one in each row: its inputs, then its results."""
    if Path(path).suffix not in SUFFIXES:
        raise ValueError(f"Plan.plot: {path}: the file's name must end with one of {', '.join(SUFFIXES)}")
    if find_spec("matplotlib") is None:
        raise ImportError("Plan.plot needs matplotlib, which is not in this environment: pip install matplotlib")
    from matplotlib.figure import Figure

    nodes = plan.graph.nodes[first : last + 1]
    columns = max((len(node.inputs) + len(node.outputs) for node in nodes), default=1)
    figure = Figure(figsize=(2.6 * columns + 0.6, 2.0 * max(len(nodes), 1)), layout="constrained")
    axes = figure.subplots(max(len(nodes), 1), columns, squeeze=False)
    for row in axes:
        for one in row:
            one.set_axis_off()
    for node, row in zip(nodes, axes, strict=False):
        choice = plan.choices[node.number]
        for value, layout, there in zip(node.inputs, choice.inputs, row, strict=False):
            _tensor(plan, there, plan.name(value), value, layout)
        for value, layout in zip(node.outputs, choice.outputs, strict=True):
            _tensor(plan, row[columns - len(node.outputs) + value.index], f"{plan.name(value)} =", value, layout)
        row[0].text(-0.02, 1.32, f"%{node.number}  {node.label}", transform=row[0].transAxes, weight="bold", fontsize=9)
    figure.savefig(path)


def _tensor(plan: Any, axes: Any, name: str, value: Value, layout: Layout) -> None:
    """Draw a tensor as a rectangle, divided by its first two dimensions; each part has the numbers of its ranks."""
    from matplotlib.patches import Rectangle

    mesh = plan.mesh
    rows, columns = (layout.dims[dim] if dim < len(layout.dims) else () for dim in (0, 1))
    down, across = mesh.parts(rows), mesh.parts(columns)
    for i in range(down):
        for j in range(across):
            ranks = [r for r in range(mesh.ranks) if mesh.index(r, rows) == i and mesh.index(r, columns) == j]
            corner = (j / across, 1 - (i + 1) / down)
            colour = _COLOURS[(i * across + j) % len(_COLOURS)]
            axes.add_patch(Rectangle(corner, 1 / across, 1 / down, facecolor=colour, edgecolor="white"))
            label = ",".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]}..{ranks[-1]}"
            centre = (corner[0] + 0.5 / across, corner[1] + 0.5 / down)
            axes.text(*centre, label, ha="center", va="center", fontsize=7)
    shape = "x".join(map(str, value.shape)) or "number"
    axes.set_title(f"{name}  {shape}  {layout.numbers(mesh)}", fontsize=8, color=_GREY)
    if layout.partial:
        group = "-".join(map(str, mesh.group(0, sorted(layout.partial))))
        axes.text(0.5, -0.14, f"a sum over the ranks {group}, ...", ha="center", fontsize=7, color=_GREY)
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.2, 1)
