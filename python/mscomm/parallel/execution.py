"""Divided: runs a plan. Each rank holds its part of the parameters, and computes its part of each operator."""

from __future__ import annotations

import contextlib
import hashlib
import zlib
from collections.abc import Iterator, Sequence
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
from mscomm.parallel.tracing import Node, Value


class Ranks:
    """The groups of ranks along the axes of a mesh, and the steps of redistributions over them."""

    def __init__(self, mesh: Mesh, world: Group) -> None:
        self.mesh = mesh
        self.world = world
        self._groups: dict[Axes, Group] = {}

    def group(self, axes: Axes) -> Group:
        """Return the group of this rank along these axes. All ranks create the groups in the same order."""
        if axes not in self._groups:
            members = [self.world.ranks[rank] for rank in self.mesh.group(self.world.rank, axes)]
            # The name says which ranks these are, and is short also for many ranks.
            name = f"{self.world.name}/{'.'.join(map(str, axes))}/{members[0]}"
            whole = len(axes) == len(self.mesh.sizes)
            own = job.job_of(self.world)
            self._groups[axes] = self.world if whole else subgroups.create_group(name, members, job=own)
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


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """In this context, random numbers on the device follow from the seed. Later ones are as without the context."""
    own = torch.default_generator
    generator = own if device.type == "cpu" else getattr(torch, device.type).default_generators[device.index or 0]
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


class Divided(torch.nn.Module):
    """A network whose parameters and computations are divided among ranks by a plan. divide() makes one.

    It is called with this rank's inputs, and returns the network's results, which are whole on every rank. After
    backward(), call reduce_gradients(), or sum the gradients of the parameters in `to_reduce` yourself. All ranks must
    compute the same loss, from the results alone: a penalty on the weights belongs into the network.

    `network` is the original module. Its parameters hold this rank's parts, so only this class can call it, until
    join(). Norms over its parameters or gradients are norms of the parts: use clip_grad_norm_() of this class.
    """

    def __init__(self, network: torch.nn.Module, plan: Plan, group: Group) -> None:
        super().__init__()
        self.network = network
        self.plan = plan
        self.ranks = Ranks(plan.mesh, group)
        self._draws = any(node.draws for node in plan.graph.nodes)
        self._contexts = [_Context(self.ranks, choice) for choice in plan.choices]
        self._parameters_of = dict(network.named_parameters())
        self._buffers_of = dict(network.named_buffers())
        self._modes = [one.training for one in network.modules()]
        for name, x in (*self._parameters_of.items(), *self._buffers_of.items()):
            x.data = self.part(name, x.data).clone()
            x.grad = None
        self._guards = [one.register_forward_pre_hook(_ends_calls) for one in network.modules()]
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
        """Sum the gradients over the ranks that have computed parts of them.

        All ranks call this together, once before each step of the optimizer: if gradients are accumulated over several
        backward passes, after the last one.
        """
        for axes, every in self.to_reduce.items():
            parameters = [x for x in every if x.grad is not None]
            gradients = [x.grad for x in parameters if x.grad is not None]
            if not gradients:
                continue
            sums = collectives.all_reduce_many(gradients, group=self.ranks.group(axes))
            for x, gradient in zip(parameters, sums, strict=True):
                x.grad = gradient

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients so that their norm over the whole network is at most max_norm. Return the norm before.

        All ranks call this together, after reduce_gradients().
        """
        total = torch.zeros(())
        for name, x in self._parameters_of.items():
            if x.grad is not None:  # a part that several ranks have counts once
                copies = self.plan.ranks // self.plan.mesh.parts(tuple(self.layout(name).used))
                total += x.grad.float().square().sum().cpu() / copies
        norm = collectives.all_reduce(total, group=self.ranks.world).sqrt()
        for x in self._parameters_of.values():
            if x.grad is not None:
                x.grad.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0).to(x.grad.device))
        return norm

    def join(self) -> None:
        """Bring the parameters and buffers together on every rank. The network can then be called again, but not this
        object. All ranks call this together."""
        for name, x in (*self._parameters_of.items(), *self._buffers_of.items()):
            x.data = self.whole(name, x.data).clone()
            x.grad = None
        for guard in self._guards:
            guard.remove()
        self._guards = []

    def forward(self, *inputs: torch.Tensor) -> Any:
        plan = self.plan
        if not self._guards:
            raise RuntimeError("mscomm.parallel: join() has brought the network's weights together; divide() it again")
        if [one.training for one in self.network.modules()] != self._modes:
            raise RuntimeError(
                "mscomm.parallel: the network was switched between training and evaluation; the plan is for the mode in"
                " which it was made"
            )
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

        seed = self._drawn_seed() if self._draws else 0
        for node, rule, edges, context in zip(plan.graph.nodes, plan.rules, plan.edges, self._contexts, strict=True):
            with torch.set_grad_enabled(node.grad and torch.is_grad_enabled()), contextlib.ExitStack() as stack:
                tensors = [brought(edge) for edge in edges]
                if node.draws:
                    # Which numbers an element gets depends on the strides, too.
                    written = 1 if node.writes else 0
                    tensors[written:] = [x.contiguous() for x in tensors[written:]]
                    stack.enter_context(_seeded(self._seed_of(node, seed), tensors[0].device))
                made = rules.call(node, tensors) if rule.compute is None else rule.compute(context, tensors)
            results = [one for one in tree.tree_leaves(made) if isinstance(one, torch.Tensor)]
            given.update(zip(map(id, node.outputs), results, strict=True))
        left = iter([brought(edge) for edge in plan.results])
        return tree.tree_map(lambda one: next(left) if isinstance(one, Value) else one, plan.graph.result)

    def _drawn_seed(self) -> int:
        """Return a number that rank 0 draws, for the random numbers of one call of the network."""
        # All ranks draw, so that equal generators stay equal.
        seed = torch.randint(2**62, ())
        return int(collectives.broadcast(seed, 0, group=self.ranks.world))

    def _seed_of(self, node: Node, seed: int) -> int:
        """Return the seed for a node's random numbers. Ranks that compute the same part get the same one."""
        used = self.plan.choices[node.number].axes.values()
        axes = tuple(sorted({axis for some in used for axis in some}))
        part = self.plan.mesh.index(self.ranks.world.rank, axes)
        text = f"{seed} {node.number} {part}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")

    def _checked(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        wanted = [self.plan.layout(value).shape(self.plan.mesh, value.shape) for value in self.plan.graph.inputs]
        if any(x.requires_grad for x in inputs):
            raise ValueError("mscomm.parallel: an input requires a gradient; only parameters have gradients")
        shapes = [tuple(x.shape) for x in inputs]
        if shapes != wanted:
            raise ValueError(
                f"mscomm.parallel: the inputs of this rank have the shapes {shapes}; the plan was made for {wanted}."
                " All batches must have the same size"
            )
        return inputs


def _ends_calls(module: torch.nn.Module, inputs: Any) -> None:
    raise RuntimeError(
        "the network is divided among the ranks, and each has only parts of its weights: call the result of"
        " mscomm.parallel.divide(), or join() it first"
    )


def divide(module: torch.nn.Module, plan: Plan, *, group: Group | str | None = None) -> Divided:
    """Divide the parameters of a module among the ranks of a group, and return the network that runs the plan.

    module: the module that the plan was made for, with the same weights on every rank. Its parameters are changed in
    place: each then holds this rank's part, so that optimizers keep their parameters. All ranks call this together.

    Raise ValueError on all ranks if the group does not have plan.ranks ranks, or if the ranks have different plans or
    weights. Raise RuntimeError if the module is divided already.

    >>> net = mscomm.parallel.divide(module, mscomm.parallel.plan(module, [x], mscomm.get_group_size()))
    >>> loss = net(rows_of_this_rank)
    >>> loss.backward()
    >>> net.reduce_gradients()
    >>> optimizer.step()
    """
    found = job.resolve(group)
    if found.size != plan.ranks:
        raise ValueError(f"divide: the plan is for {plan.ranks} ranks, the group has {found.size}")
    own = [name for name, x in module.named_parameters() if getattr(x, "layerwise_parallel", False)]
    if own:
        raise ValueError(f"divide: {own[0]} has layerwise_parallel=True; a plan divides the parameters itself")
    if any(_ends_calls in one._forward_pre_hooks.values() for one in module.modules()):
        raise RuntimeError("divide: the network is divided already; join() brings its weights together")
    if found.size > 1:
        told = objects.all_gather_object(_beginning(module, plan), group=found)
        for rank, theirs in enumerate(told):
            what = next((what for what in told[0] if theirs.get(what) != told[0][what]), None)
            if what is not None:
                difference = _DIFFERENCES.get(what, f"begin with different values of {what}; {_REMEDY}")
                raise ValueError(f"divide: ranks 0 and {rank} of the group {difference}")
    return Divided(module, plan, found)


_DIFFERENCES = {
    "the plan": "have different plans; do they run the same code?",
    "random numbers": "draw different random numbers with one seed, because their processors or versions of PyTorch"
    " differ; on such ranks, a divided network cannot use dropout or other random numbers",
}
_REMEDY = "use one seed on all ranks, or mscomm.train.broadcast_parameters(module.state_dict())"


def _beginning(module: torch.nn.Module, plan: Plan) -> dict[str, Any]:
    """Return what must be equal on all ranks, by the keys of _DIFFERENCES or the names of parameters and buffers."""
    found: dict[str, Any] = {"the plan": plan.digest()}
    nodes = plan.graph.nodes
    used = {value.name for node in nodes for value in node.inputs if value.kind == "buffer"}
    tensors = [*module.named_parameters(), *((name, x) for name, x in module.named_buffers() if name in used)]
    if any(node.draws for node in nodes):
        device = tensors[0][1].device if tensors else torch.device("cpu")
        with _seeded(1, device):
            numbers = torch.empty(64, device=device)
            found["random numbers"] = [_checksum(numbers.bernoulli_(0.5)), _checksum(numbers.normal_())]
    return found | {name: _checksum(x) for name, x in tensors}


def _checksum(x: torch.Tensor) -> int:
    data = x.detach().cpu().resolve_conj().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
    return zlib.crc32(memoryview(data.numpy()), zlib.crc32(f"{x.dtype} {tuple(x.shape)}".encode()))
