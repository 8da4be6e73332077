"""Mesh, Layout and redistribution: how the parts of a tensor are laid out over the ranks, and how they get from one
layout to another.

The mesh of n ranks has one axis for each prime factor of n: (2, 2, 2) for 8 ranks. The last axis changes fastest from
rank to rank. A dimension of a tensor is divided by some axes, in a given order, of which the first one is the slowest.
A tensor may also be partial over some axes: the tensor is then the sum of the values of the ranks along these axes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

Axes = tuple[int, ...]


@dataclass(frozen=True)
class Mesh:
    """The axes of the ranks: one for each prime factor of their number, from the smallest."""

    sizes: tuple[int, ...]

    @classmethod
    def of(cls, ranks: int) -> Mesh:
        """Return the mesh of this number of ranks."""
        sizes, factor = [], 2
        while ranks > 1:
            while ranks % factor == 0:
                sizes.append(factor)
                ranks //= factor
            factor += 1
        return cls(tuple(sizes))

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes)

    def parts(self, axes: Sequence[int]) -> int:
        """Return into how many parts these axes divide a dimension."""
        return math.prod(self.sizes[axis] for axis in axes)

    def place(self, rank: int) -> tuple[int, ...]:
        """Return the index of a rank along each axis."""
        found = []
        for size in reversed(self.sizes):
            rank, index = divmod(rank, size)
            found.append(index)
        return tuple(reversed(found))

    def index(self, rank: int, axes: Sequence[int]) -> int:
        """Return the index of a rank among the parts of a dimension that these axes divide."""
        place, index = self.place(rank), 0
        for axis in axes:
            index = index * self.sizes[axis] + place[axis]
        return index

    def group(self, rank: int, axes: Sequence[int]) -> list[int]:
        """Return the ranks that differ from this rank only along these axes, in the order of their parts."""
        place = self.place(rank)
        others = [axis for axis in range(len(self.sizes)) if axis not in axes]
        same = [r for r in range(self.ranks) if all(self.place(r)[axis] == place[axis] for axis in others)]
        return sorted(same, key=lambda r: self.index(r, axes))


class Layout(NamedTuple):
    """dims: for each dimension of the tensor, the axes that divide it. partial: the axes over which it is a sum."""

    dims: tuple[Axes, ...]
    partial: frozenset[int] = frozenset()

    def shape(self, mesh: Mesh, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a rank's part of a tensor of this shape."""
        return tuple(size // mesh.parts(axes) for size, axes in zip(shape, self.dims, strict=True))

    def numbers(self, mesh: Mesh) -> tuple[int, ...]:
        """Return into how many parts each dimension is divided, as in a strategy of MindSpore."""
        return tuple(map(mesh.parts, self.dims))

    @property
    def used(self) -> frozenset[int]:
        """The axes that divide a dimension."""
        return frozenset(axis for axes in self.dims for axis in axes)

    @property
    def whole(self) -> Layout:
        """The same layout, but not partial."""
        return Layout(self.dims)


class Step(NamedTuple):
    """One step of a redistribution. Only "slice" needs no communication.

    kind: "all_reduce" sums over the axes; "reduce_scatter" sums over them and divides the dimension `to`; "all_gather"
    joins the parts of the dimension `dim`; "all_to_all" joins the parts of `dim` and divides `to`; "slice" divides
    `to`.
    """

    kind: str
    axes: Axes
    dim: int = -1
    to: int = -1


@functools.cache
def redistribution(before: Layout, after: Layout) -> tuple[Step, ...]:
    """Return the steps from one layout to another, which must not be partial over other axes.

    Only the last axes of a dimension can be joined, and axes can be added only at the end of a dimension. Sums come
    first, because they may make the parts smaller; then parts move between dimensions; then dimensions are divided;
    what has to be joined is joined last.
    """
    if not after.partial <= before.partial:
        raise ValueError(f"a tensor cannot become partial: {before} to {after}")
    now = [list(axes) for axes in before.dims]
    left = set(before.partial - after.partial)
    steps: list[Step] = []

    def kept(dim: int) -> int:
        """Return how many leading axes of the dimension stay."""
        count = 0
        for mine, wanted in zip(now[dim], after.dims[dim], strict=False):
            if mine != wanted:
                break
            count += 1
        return count

    def wanted(dim: int) -> int | None:
        """Return the axis by which the dimension is to be divided next, or None if nothing is to be added yet."""
        count = kept(dim)
        return after.dims[dim][count] if count == len(now[dim]) < len(after.dims[dim]) else None

    dims = range(len(now))
    for dim in dims:
        while (axis := wanted(dim)) is not None and axis in left:
            steps.append(Step("reduce_scatter", (axis,), to=dim))
            now[dim].append(axis)
            left.remove(axis)
    if left:
        steps.append(Step("all_reduce", tuple(sorted(left))))
    while True:
        used = {axis for axes in now for axis in axes}
        for dim in dims:
            axis = wanted(dim)
            if axis is None:
                continue
            if axis not in used:
                steps.append(Step("slice", (axis,), to=dim))
                now[dim].append(axis)
                break
            source = next(other for other in dims if axis in now[other])
            if now[source][-1] == axis and len(now[source]) > kept(source):
                now[source].pop()
                now[dim].append(axis)
                steps.append(Step("all_to_all", (axis,), source, dim))
                break
        else:
            dim = next((dim for dim in dims if len(now[dim]) > kept(dim)), -1)
            if dim < 0:
                break
            steps.append(Step("all_gather", (now[dim].pop(),), dim))
    return _joined(steps)


def _joined(steps: list[Step]) -> tuple[Step, ...]:
    """Join consecutive steps of the same kind on the same dimensions into one step over several axes.

    The axes of a joined step ascend, as the ranks of a group do.
    """
    joined: list[Step] = []
    for step in steps:
        last = joined[-1] if joined else None
        if last is not None and (last.kind, last.dim, last.to) == (step.kind, step.dim, step.to):
            if step.kind == "all_gather" and step.axes[-1] < last.axes[0]:  # the last axis is joined first
                joined[-1] = last._replace(axes=step.axes + last.axes)
                continue
            if step.kind in ("reduce_scatter", "slice") and last.axes[-1] < step.axes[0]:
                joined[-1] = last._replace(axes=last.axes + step.axes)
                continue
        joined.append(step)
    return tuple(joined)


def sent_bytes(step: Step, mesh: Mesh, size: float) -> tuple[float, float]:
    """Return (bytes that a rank sends in a step, bytes of its part after the step). size: the bytes before the step.

    The numbers are those of algorithms that are optimal in bytes: Chan et al., Collective communication: theory,
    practice, and experience (2007).
    """
    n = mesh.parts(step.axes)
    share = (n - 1) / n
    if step.kind == "all_reduce":
        return 2 * share * size, size
    if step.kind == "reduce_scatter":
        return share * size, size / n
    if step.kind == "all_gather":
        return (n - 1) * size, size * n
    if step.kind == "all_to_all":
        return share * size, size
    return 0.0, size / n
