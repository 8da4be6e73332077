"""Divided: runs a plan. Each rank holds its part of the parameters, and computes its part of each operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as tree

from mscomm import collectives, job, objects, subgroups
from mscomm.group import Group
from mscomm.ops.communication import AlltoAll
from mscomm.parallel import rules
from mscomm.parallel.layout import Axes, Layout, Mesh, Step, redistribution
from mscomm.parallel.planning import Edge, Plan
from mscomm.parallel.search import Choice, Parts
from mscomm.parallel.tracing import Value


class Ranks:
    """The groups of ranks along the axes of a mesh, and the steps of redistributions over them.

    counted: (kind, bytes of the array that was passed) of each call so far, for tests and reports.
    """

    def __init__(self, mesh: Mesh, world: Group) -> None:
        self.mesh = mesh
        self.world = world
        self.counted: list[tuple[str, int]] = []
        self._groups: dict[Axes, Group] = {}

    def group(self, axes: Axes) -> Group:
        """Return the group of this rank along these axes. All ranks create the groups in the same order."""
        if axes not in self._groups:
            members = [self.world.ranks[rank] for rank in self.mesh.group(self.world.rank, axes)]
            name = f"{self.world.name}/{'-'.join(map(str, members))}"
            whole = len(axes) == len(self.mesh.sizes)
            self._groups[axes] = self.world if whole else subgroups.create_group(name, members)
        return self._groups[axes]

    def run(self, x: torch.Tensor, steps: Sequence[Step]) -> torch.Tensor:
        """Take the steps of a redistribution."""
        for step in steps:
            x = self._taken(x, step)
        return x

    def total(self, x: torch.Tensor, axes: Axes) -> torch.Tensor:
        """Return the sum over the ranks along these axes."""
        return self._taken(x, Step("all_reduce", axes)) if axes else x

    def _taken(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        parts, index = self.mesh.parts(step.axes), self.mesh.index(self.world.rank, step.axes)
        if step.kind == "slice":
            size = x.shape[step.to] // parts
            return x.narrow(step.to, index * size, size)
        group, x = self.group(step.axes), x.contiguous()
        self.counted.append((step.kind, x.numel() * x.element_size()))
        if step.kind == "all_reduce":
            return collectives.all_reduce(x, group=group)
        if step.kind == "reduce_scatter":
            front = x.movedim(step.to, 0).contiguous()
            return collectives.reduce_scatter(front, group=group).movedim(0, step.to)
        if step.kind == "all_gather":
            front = x.movedim(step.dim, 0).contiguous()
            return collectives.all_gather(front, group=group).movedim(0, step.dim)
        return AlltoAll(parts, step.to, step.dim, group).compute(x)


class _Redistributed(torch.autograd.Function):
    """Takes the steps of an edge, and in the backward pass those of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: Ranks, steps: Sequence[Step], back: Sequence[Step]) -> torch.Tensor:
        ctx.ranks, ctx.back = ranks, back
        made = ranks.run(x, steps)
        return made.view_as(made) if made is x else made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.ranks.run(gradient, ctx.back), None, None, None


class _Total(torch.autograd.Function):
    """The sum over ranks of a tensor that all of them then use with their own parts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: Ranks, axes: Axes) -> torch.Tensor:
        ctx.ranks, ctx.axes = ranks, axes
        return ranks.total(x, axes)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.ranks.total(gradient, ctx.axes), None, None


class _Context:
    """What a rule needs to compute this rank's part of a node."""

    def __init__(self, ranks: Ranks, choice: Choice) -> None:
        self._ranks, self._choice = ranks, choice
        self.parts = Parts(ranks.mesh, choice).parts

    def total(self, x: torch.Tensor, letters: Sequence[str]) -> torch.Tensor:
        axes = tuple(sorted(axis for letter in letters for axis in self._choice.axes.get(letter, ())))
        if not axes:
            return x
        return _Total.apply(x, self._ranks, axes) if x.requires_grad else self._ranks.total(x, axes)


class Divided(torch.nn.Module):
    """A network whose parameters and computations are divided among ranks by a plan. divide() makes one.

    It is called with this rank's inputs, and returns the network's results, which are whole on every rank. After
    backward(), call reduce_gradients(), or sum the gradients of the parameters in `to_reduce` yourself. `network` is
    the original module; its parameters hold this rank's parts, so only this class can call it.
    """

    def __init__(self, network: torch.nn.Module, plan: Plan, group: Group) -> None:
        super().__init__()
        self.network = network
        self.plan = plan
        self.ranks = Ranks(plan.mesh, group)
        self._contexts = [_Context(self.ranks, choice) for choice in plan.choices]
        self._parameters_of = dict(network.named_parameters())
        self._buffers_of = dict(network.named_buffers())
        for name, x in (*self._parameters_of.items(), *self._buffers_of.items()):
            x.data = self.part(name, x.data).clone()
        # The groups are created here, because every rank creates the same groups in the same order.
        for transfer in plan.transfers():
            if transfer.step.kind != "slice":
                self.ranks.group(transfer.step.axes)

    def layout(self, name: str) -> Layout:
        """Return the layout of a parameter or buffer."""
        values = self.plan.graph.parameters | self.plan.graph.buffers
        return self.plan.layout(values[name])

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a parameter or buffer, or of a tensor that is divided in the same way."""
        for dim, axes in enumerate(self.layout(name).dims):
            size = whole.shape[dim] // self.plan.mesh.parts(axes)
            whole = whole.narrow(dim, self.plan.mesh.index(self.ranks.world.rank, axes) * size, size)
        return whole

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """Return the whole of a parameter or buffer, or of a tensor that is divided in the same way.

        All ranks call this together.
        """
        layout = self.layout(name)
        joined = Layout(((),) * len(layout.dims))
        return self.ranks.run(part, redistribution(layout, joined))

    @property
    def to_reduce(self) -> dict[Axes, list[torch.nn.Parameter]]:
        """The parameters whose gradients have to be summed after the backward pass, by the axes of the sum."""
        found: dict[Axes, list[torch.nn.Parameter]] = {}
        for name, x in self._parameters_of.items():
            if axes := self.plan.gradient_axes(name):
                found.setdefault(axes, []).append(x)
        return found

    def reduce_gradients(self) -> None:
        """Sum the gradients over the ranks that have computed parts of them. All ranks call this together, once after
        each backward pass."""
        for axes, parameters in self.to_reduce.items():
            gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in parameters]
            for x in gradients:
                self.ranks.counted.append(("all_reduce", x.numel() * x.element_size()))
            sums = collectives.all_reduce_many(gradients, group=self.ranks.group(axes))
            for x, gradient in zip(parameters, sums, strict=True):
                x.grad = gradient

    def forward(self, *inputs: torch.Tensor) -> Any:
        plan = self.plan
        given = dict(zip(map(id, plan.graph.inputs), self._checked(inputs), strict=True))
        for value in plan.graph.parameters.values():
            given[id(value)] = self._parameters_of[value.name]
        for value in plan.graph.buffers.values():
            given[id(value)] = self._buffers_of[value.name]

        def brought(edge: Edge) -> torch.Tensor:
            x = given[id(edge.value)] if edge.value.data is None else edge.value.data
            steps, back = edge.steps, edge.steps_back
            if x.requires_grad and (steps or back):
                return _Redistributed.apply(x, self.ranks, steps, back)
            return self.ranks.run(x, steps)

        for node, rule, edges, context in zip(plan.graph.nodes, plan.rules, plan.edges, self._contexts, strict=True):
            tensors = [brought(edge) for edge in edges]
            made = rules.call(node, tensors) if rule.compute is None else rule.compute(context, tensors)
            results = tuple(made) if node.is_tuple else (made,)
            given.update(zip(map(id, node.outputs), results, strict=True))
        left = iter([brought(edge) for edge in plan.results])
        return tree.tree_map(lambda one: next(left) if isinstance(one, Value) else one, plan.graph.result)

    def _checked(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        wanted = [self.plan.layout(value).shape(self.plan.mesh, value.shape) for value in self.plan.graph.inputs]
        shapes = [tuple(x.shape) for x in inputs]
        if shapes != wanted:
            raise ValueError(
                f"mscomm.parallel: the inputs of this rank have the shapes {shapes}; the plan was made for {wanted}."
                " All batches must have the same size"
            )
        return inputs


def divide(module: torch.nn.Module, plan: Plan, *, group: Group | str | None = None) -> Divided:
    """Divide the parameters of a module among the ranks of a group, and return the network that runs the plan.

    module: the module that the plan was made for, with the same weights on every rank. Its parameters are changed in
    place: each then holds this rank's part, so that optimizers keep their parameters. All ranks call this together.

    Raise ValueError on all ranks if the group does not have plan.ranks ranks, or if the ranks have different plans.

    >>> net = mscomm.parallel.divide(module, mscomm.parallel.plan(module, [x], mscomm.get_group_size()))
    >>> loss = net(rows_of_this_rank)
    >>> loss.backward()
    >>> net.reduce_gradients()
    >>> optimizer.step()
    """
    found = job.resolve(group)
    if found.size != plan.ranks:
        raise ValueError(f"divide: the plan is for {plan.ranks} ranks, the group has {found.size}")
    if found.size > 1:
        digests = objects.all_gather_object(plan.digest(), group=found)
        other = next((rank for rank, one in enumerate(digests) if one != digests[0]), None)
        if other is not None:
            raise ValueError(
                f"divide: ranks 0 and {other} of the group have different plans; do they run the same code?"
            )
    return Divided(module, plan, found)
