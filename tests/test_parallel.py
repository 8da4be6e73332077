"""mscomm.parallel: plans, redistributions, and networks that are divided among ranks."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import ranks

import mscomm

torch = pytest.importorskip("torch")

from test_nn import CASES  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils import _pytree as tree  # noqa: E402

from mscomm import Parameter, nn, ops, parallel  # noqa: E402
from mscomm.common.initializer import initializer  # noqa: E402
from mscomm.parallel import rules  # noqa: E402
from mscomm.parallel.layout import Layout, Mesh, Step, redistribution, sent_bytes  # noqa: E402
from mscomm.parallel.planning import Plan  # noqa: E402


def numbers(*shape: int, seed: int = 1) -> Any:
    return torch.tensor(np.random.default_rng(seed).standard_normal(shape), dtype=torch.float32)


# -- layouts: redistributions of NumPy arrays, with all ranks in this process


def part(x: np.ndarray, layout: Layout, mesh: Mesh, rank: int) -> np.ndarray:
    """Return a rank's part of an array. If the layout is partial, the parts are different arrays with this sum."""
    for dim, axes in enumerate(layout.dims):
        x = np.split(x, mesh.parts(axes), dim)[mesh.index(rank, axes)]
    places = [mesh.sizes[axis] for axis in sorted(layout.partial)]
    if not places:
        return x
    # Integers, so that sums are exact: all terms but the last one are the number of the term.
    count, mine = int(np.prod(places)), mesh.index(rank, sorted(layout.partial))
    return np.full_like(x, mine) if mine < count - 1 else x - sum(range(count - 1))


def taken(parts: list[np.ndarray], step: Step, mesh: Mesh) -> list[np.ndarray]:
    """Take a step on all ranks."""
    made = []
    for rank in range(mesh.ranks):
        group = mesh.group(rank, step.axes)
        mine, n = group.index(rank), len(group)
        if step.kind == "slice":
            made.append(np.split(parts[rank], n, step.to)[mine])
        elif step.kind in ("all_reduce", "reduce_scatter"):
            total = sum(parts[other] for other in group)
            made.append(total if step.kind == "all_reduce" else np.split(total, n, step.to)[mine])
        elif step.kind == "all_gather":
            made.append(np.concatenate([parts[other] for other in group], step.dim))
        else:
            pieces = [np.split(parts[other], n, step.to)[mine] for other in group]
            made.append(np.concatenate(pieces, step.dim))
    return made


def layouts(dims: int, axes: int, partial: bool) -> list[Layout]:
    """Return all layouts in which each axis divides a dimension, in any order, is partial, or is not used."""
    found = []
    for places in itertools.product(range(-2 if partial else -1, dims), repeat=axes):
        orders = [itertools.permutations([a for a in range(axes) if places[a] == dim]) for dim in range(dims)]
        for order in itertools.product(*orders):
            found.append(Layout(tuple(order), frozenset(a for a in range(axes) if places[a] == -2)))
    return found


@pytest.mark.parametrize("count", [4, 6, 8])
def test_a_redistribution_gives_each_rank_its_part(count: int) -> None:
    mesh = Mesh.of(count)
    x = np.arange(24 * 24).reshape(24, 24)
    pairs = list(itertools.product(layouts(2, len(mesh.sizes), True), layouts(2, len(mesh.sizes), False)))
    for before, after in random.Random(1).sample(pairs, min(len(pairs), 1500)):
        parts = [part(x, before, mesh, rank) for rank in range(count)]
        for step in redistribution(before, after):
            assert list(step.axes) == sorted(step.axes)
            size = parts[0].size
            parts = taken(parts, step, mesh)
            assert sent_bytes(step, mesh, size)[1] == parts[0].size
        for rank in range(count):
            assert np.array_equal(parts[rank], part(x, after, mesh, rank)), (before, after)


def test_sums_and_gathers_over_several_axes_are_one_call() -> None:
    summed = Layout(((0,), ()), frozenset({1, 2}))
    assert redistribution(summed, Layout(((0,), ()))) == (Step("all_reduce", (1, 2)),)
    assert redistribution(summed, Layout(((0,), (1, 2)))) == (Step("reduce_scatter", (1, 2), to=1),)
    assert redistribution(Layout(((0,), (1, 2))), Layout(((0,), ()))) == (Step("all_gather", (1, 2), 1),)
    assert redistribution(Layout(((), ())), Layout(((), (0, 1)))) == (Step("slice", (0, 1), to=1),)
    assert redistribution(Layout(((0,), ())), Layout(((), (0,)))) == (Step("all_to_all", (0,), 0, 1),)
    with pytest.raises(ValueError, match="cannot become partial"):
        redistribution(Layout(((),)), Layout(((),), frozenset({0})))


def test_a_mesh_has_an_axis_for_each_prime_factor() -> None:
    assert [Mesh.of(n).sizes for n in (1, 2, 6, 8, 12, 7)] == [(), (2,), (2, 3), (2, 2, 2), (2, 2, 3), (7,)]
    mesh = Mesh.of(8)
    assert mesh.group(5, (1, 2)) == [4, 5, 6, 7] and mesh.group(5, (0,)) == [1, 5]
    assert sorted(mesh.place(rank) for rank in range(8)) == list(itertools.product((0, 1), repeat=3))


# -- plans


class Net(nn.Cell):
    """The network of the quick-start tutorial."""

    def __init__(self, strategy: Any = ((2, 4), (4, 1)), in_dim: int = 32, hidden_dim: int = 16, out_dim: int = 16):
        super().__init__()
        self.weight = Parameter(initializer("normal", [in_dim, hidden_dim]), "w")
        self.weight2 = Parameter(initializer("normal", [hidden_dim, out_dim]), "w2")
        self.matmul = ops.MatMul()
        if strategy is not None:
            self.matmul.shard(strategy)
        self.relu = ops.ReLU()
        self.matmul2 = ops.MatMul()

    def construct(self, x: Any) -> Any:
        out = self.matmul(x, self.weight)
        out = self.relu(out)
        return self.matmul2(out, self.weight2)


def quick_start(strategy: Any = ((2, 4), (4, 1))) -> Any:
    return nn.WithLossCell(Net(strategy), nn.MSELoss())


X, Y = np.zeros((16, 32), np.float32), np.zeros((16, 16), np.float32)


@pytest.mark.parametrize("with_loss", [False, True])
def test_the_plan_of_the_quick_start_tutorial(with_loss: bool) -> None:
    plan = parallel.plan(quick_start() if with_loss else Net(), [X, Y][: 1 + with_loss], 8)
    facts = plan.to_dict()
    first, relu, second = facts["operators"][:3]
    assert [one["strategy"] for one in (first, relu, second)] == [[[2, 4], [4, 1]], [[2, 4]], [[2, 4], [4, 1]]]
    assert (first["configured"], relu["configured"], second["configured"]) == (True, False, False)
    assert first["local_inputs"] == [[8, 8], [8, 16]] and first["local_outputs"] == [[8, 16]]
    assert relu["local_inputs"] == [[8, 4]] and second["local_inputs"] == [[8, 4], [4, 16]]
    summed = next(one for one in relu["transfers"] if one["phase"] == "forward")
    assert (summed["call"], summed["ranks"], summed["groups"]) == ("reduce_scatter", [0, 1, 2, 3], 2)
    assert Mesh.of(8).group(4, (1, 2)) == [4, 5, 6, 7]  # the other group
    assert (summed["bytes"], summed["sent_bytes"]) == (8 * 16 * 4, 8 * 16 * 4 * 3 // 4)
    assert [one["local_shape"] for one in facts["parameters"]] == [[8, 16], [4, 16]]
    assert json.loads(plan.to_json()) == facts
    table = str(plan)
    assert "%1  ReLU" in table and "forward: reduce_scatter of %0, 512 B, ranks 0-1-2-3" in table
    assert "* The strategy was set by shard()." in table and "reduce_scatter saves" in table


def test_semi_automatic_parallelism_divides_the_rows_of_other_operators() -> None:
    plan = parallel.plan(quick_start(), [X, Y], 8, parallel_mode="semi_auto_parallel")
    assert [plan.strategy(node)[0] for node in plan.graph.nodes[:3]] == [(2, 4), (8, 1), (8, 1)]


def test_full_batch_gives_each_rank_all_rows() -> None:
    plan = parallel.plan(Net(), [X], 8, dataset_strategy="full_batch")
    first = [one for one in plan.transfers() if one.node == 0 and one.what == "input 0"]
    assert [one.step.kind for one in first] == ["slice", "slice"]


def test_shard_sets_strategies_for_functions_and_modules_of_pytorch(capfd: pytest.CaptureFixture[str]) -> None:
    class Sharded(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(32, 16))
            self.head = parallel.shard(torch.nn.Linear(16, 8), ((8, 1),), ((8, 1),))
            self.matmul = parallel.shard(torch.matmul, ((2, 4), None))

        def forward(self, x: Any) -> Any:
            return self.head(self.matmul(x, self.weight))

    net = Sharded()
    plan = parallel.plan(net, [X], 8)
    found = {node.name: plan.strategy(node) for node in plan.graph.nodes if node.name != "Identity"}
    assert found == {"matmul": ((2, 4), (4, 1)), "linear": ((8, 1), (1, 1), (1,))}
    assert [plan.strategy(node) for node in plan.graph.nodes if node.name == "Identity"] == [
        ((2, 4),),
        *[((8, 1),)] * 2,
    ]
    assert net(torch.zeros(16, 32)).shape == (16, 8) and "shard() has no effect" in capfd.readouterr().err
    net.matmul = parallel.shard(ops.MatMul(), ((2, 4), None), ((2, 2),))
    net.head = torch.nn.Identity()
    plan = parallel.plan(net, [X], 8)
    assert (plan.graph.nodes[-1].name, plan.strategy(plan.graph.nodes[-1])) == ("Identity", ((2, 2),))
    with pytest.raises(ValueError, match="in_strategy has 2 items, relu was called with 1 inputs"):
        parallel.shard(torch.relu, ((1,), (1,)))(torch.zeros(1))
    with pytest.raises(ValueError, match="out_strategy has 2 items, relu has returned 1 results"):
        parallel.shard(torch.relu, (), ((1,), (1,)))(torch.zeros(1))
    with pytest.raises(TypeError, match="in_strategy is a int"):
        parallel.shard(torch.relu, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: parallel.plan(Net(((2, 4),)), [X], 8), ValueError, r"MatMul \(matmul\): .* has 1 tuples for 2 inputs"),
        (lambda: parallel.plan(Net(((2,), (1, 1))), [X], 8), ValueError, "input 0 has 2 dimensions, not 1"),
        (lambda: parallel.plan(Net(((3, 1), (1, 1))), [X], 8), ValueError, "dimension 0 of input 0 has the size 16"),
        (lambda: parallel.plan(Net(((2, 4), (2, 1))), [X], 8), ValueError, "dimension 0 of input 1 must be .* 4 parts"),
        (lambda: parallel.plan(Net(((4, 4), (4, 1))), [X], 8), ValueError, "needs 16 ranks; there are 8"),
        (lambda: parallel.plan(Net(((4, 1), (1, 1))), [X], 6), ValueError, "6 ranks"),
        (
            lambda: parallel.plan(Net(), [X[:12]], 8),
            ValueError,
            "cannot be divided among 8 ranks; use dataset_strategy",
        ),
        (lambda: parallel.plan(Net(), [X], 0), ValueError, "ranks=0"),
        (lambda: parallel.plan(Net(), [X], "8"), TypeError, "ranks is a str"),
        (lambda: parallel.plan(lambda x: x, [X], 8), TypeError, "module is a function"),
        (lambda: parallel.plan(Net(), [X], 8, parallel_mode="data_parallel"), ValueError, "parallel_mode='data_par"),
        (lambda: parallel.plan(Net(), [X], 8, dataset_strategy="x"), ValueError, "data_parallel, full_batch"),
    ],
)
def test_what_is_wrong_with_a_plan_is_said(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_what_cannot_be_planned_is_said() -> None:
    class Branch(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x if x.sum() > 0 else -x

    with pytest.raises(RuntimeError, match=r"calls __bool__\(\), which needs the numbers"):
        parallel.plan(Branch(), [X], 2)

    class Twice(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.weight = Parameter(initializer("normal", [32, 32]), "w")
            self.one, self.two = ops.MatMul().shard(((1, 2), (2, 1))), ops.MatMul().shard(((1, 1), (1, 2)))

        def construct(self, x: Any) -> Any:
            return self.two(self.one(x, self.weight), self.weight)

    with pytest.raises(ValueError, match=r"parameter weight is divided into \(2, 1\) parts by MatMul \(one\) and into"):
        parallel.plan(Twice(), [X], 2)

    class Rare(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.tile = ops.Tile().shard(((2, 1),))

        def construct(self, x: Any) -> Any:
            return self.tile(x, (2, 1))

    with pytest.raises(NotImplementedError, match="Tile cannot be sharded"):
        parallel.plan(Rare(), [X], 2)


class Mlp(torch.nn.Module):
    """The two layers of a transformer between which it is divided by columns and then by rows."""

    def __init__(self, size: int = 512) -> None:
        super().__init__()
        self.up = torch.nn.Linear(size, 4 * size)
        self.down = torch.nn.Linear(4 * size, size)

    def forward(self, x: Any) -> Any:
        return x + self.down(functional.gelu(self.up(x)))


def test_the_layers_of_a_transformer_are_divided_by_columns_and_then_by_rows() -> None:
    """Shoeybi et al., Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism (2019)."""
    plan = parallel.plan(Mlp(), [torch.zeros(8, 128, 512)], 4)
    weights = {one["name"]: one["strategy"] for one in plan.to_dict()["parameters"]}
    assert weights == {"up.weight": [4, 1], "up.bias": [4], "down.weight": [1, 4], "down.bias": [1]}


def random_net(seed: int, count: int) -> tuple[torch.nn.Module, Any]:
    """Return a network of about `count` random operators, and its input."""
    draw = random.Random(seed)

    class Random(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.ParameterList(
                [torch.nn.Parameter(numbers(8, 8, seed=seed + i) / 3) for i in range(3)]
            )
            self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)])
            self.kinds = [draw.choice(KINDS) for _ in range(count)]

        def forward(self, x: Any) -> Any:
            old = x = self.layers[0](x)
            for number, kind in enumerate(self.kinds):
                x, old = kind(self, x, old, self.weights[number % 3]), x
            return functional.mse_loss(x, x.detach() * 0.5 + 1) if x.ndim == 2 else x.square().mean()

    return Random(), numbers(16, 8, seed=seed)


KINDS: list[Any] = [
    lambda net, x, old, w: x @ w,
    lambda net, x, old, w: torch.tanh(x),
    lambda net, x, old, w: net.layers[0](x),
    lambda net, x, old, w: functional.relu(x) + old,
    lambda net, x, old, w: net.layers[1](x),
    lambda net, x, old, w: torch.softmax(x, -1),
    lambda net, x, old, w: x * old,
    lambda net, x, old, w: (x.t().contiguous().t() - x.mean(0)) / 2,
    lambda net, x, old, w: x.reshape(4, 4, 8).transpose(0, 1).reshape(16, 8),
    lambda net, x, old, w: torch.matmul(x.view(2, 8, 8), w.t()).flatten(0, 1),
    lambda net, x, old, w: 1 - x.sum(1, keepdim=True) * 0.1 + x,
    lambda net, x, old, w: functional.gelu(x) @ torch.ones(8, 8).div(8),
    lambda net, x, old, w: torch.cat([x[:, :4], x[:, 4:]], 1),
    lambda net, x, old, w: torch.where(x > 0, x, old),
    lambda net, x, old, w: functional.scaled_dot_product_attention(*[x.view(4, 4, 8)] * 3).reshape(16, 8),
]


class Chain(torch.nn.Module):
    """Up to 6 operators, drawn at random, with two matrix products and, for some seeds, a strategy."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.first, self.second = (torch.nn.Parameter(torch.ones(8, 8)) for _ in range(2))
        self.matmul = ops.MatMul()
        if seed % 3 == 0:
            self.matmul.shard(draw.choice([((2, 1), (1, 1)), ((1, 2), (2, 1)), ((1, 1), (1, 2))]))
        self.kinds = [draw.choice([torch.relu, torch.t, lambda x: x.softmax(-1), lambda x: x * 2]) for _ in range(3)]

    def forward(self, x: Any) -> Any:
        x = self.matmul(x, self.first)
        for kind in self.kinds[:2]:
            x = kind(x)
        return self.kinds[2](x if x.shape == (8, 8) else x.t()) @ self.second


@pytest.mark.parametrize("seed", range(12))
def test_the_found_strategies_are_almost_as_good_as_the_best(seed: int) -> None:
    """The costs of all plans on 2 ranks are compared."""
    plan = parallel.plan(Chain(seed), [torch.zeros(8, 8)], 2)
    problem = plan._problem
    best = min(map(problem.cost, itertools.product(*problem.choices)))
    assert plan.cost_s <= 1.05 * best


# -- execution


def planned(plan: Plan) -> Counter[Any]:
    """Return the bytes of a step's calls by axes and kind of call, as in the plan."""
    found: Counter[Any] = Counter()
    for one in plan.transfers():
        if one.step.kind != "slice":
            found[one.step.axes, one.step.kind] += one.bytes
    return found


def latest(net: Any) -> dict[Any, int]:
    """Return the number of the latest call of each group of the divided network, by the group's axes."""
    for axes, _ in planned(net.plan):
        net.ranks.group(axes)
    cores = {axes: group.core for axes, group in net.ranks._groups.items()}
    return {axes: max([0, *(call["number"] for call in core.calls())]) for axes, core in cores.items()}


def counted(net: Any, after: dict[Any, int]) -> Counter[Any]:
    """Return the bytes of the later calls by axes and kind of call, as the communicators have recorded them."""
    found: Counter[Any] = Counter()
    for axes, group in net.ranks._groups.items():
        for call in group.core.calls(after.get(axes, 0)):
            kind, dtype, shape = re.match(r"(\w+?)(?:_many)? #\d+ \((\w+)\[(.*?)\]", call["call"]).groups()
            count = np.prod([int(n) for n in shape.split(", ") if n], dtype=int)
            found[axes, kind] += int(count) * np.dtype(dtype).itemsize
    return found


def compared(module: torch.nn.Module, inputs: list[Any], plan: Plan) -> None:
    """Compare results and gradients of a divided network with those of the whole network, and calls with the plan."""
    rank, size = mscomm.get_rank(), mscomm.get_group_size()
    expected = module(*inputs)
    expected.sum().backward()
    expected = expected.detach()  # a graph that is kept would remember the shapes of the whole parameters
    gradients = {name: one.grad.clone() for name, one in module.named_parameters() if one.grad is not None}
    module.zero_grad()
    net = parallel.divide(module, plan)
    before = latest(net)
    rows = [torch.tensor_split(one, size)[rank] for one in inputs]
    result = net(*rows)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    result.sum().backward()
    net.reduce_gradients()
    for name, one in module.named_parameters():
        wanted = net.part(name, gradients[name]) if name in gradients else None
        if wanted is not None:
            torch.testing.assert_close(one.grad, wanted, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: name + text)
    assert counted(net, before) == planned(plan)


@pytest.mark.timeout(240)
@ranks(4)
def test_random_graphs_with_random_strategies_equal_the_whole_network(rank, group):
    """50 graphs, each with choices that were drawn at random."""
    for seed in range(50):
        mscomm.set_seed(seed)
        module, x = random_net(seed, 4)
        found = parallel.plan(module, [x], 4)
        draw = random.Random(seed)
        choices = [draw.choice(one) for one in found._problem.choices]
        plan = found if seed % 10 == 0 else Plan(found.graph, found._problem, choices)
        try:
            compared(module, [x], plan)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {module.kinds}\n{plan}") from error


class Operates(torch.nn.Module):
    """Applies an operator of mscomm.ops to its inputs and to constants. arguments: as in CASES of test_nn."""

    def __init__(self, operator: Any, arguments: Any) -> None:
        super().__init__()
        self.operator, self.arguments = operator, arguments

    def forward(self, *inputs: Any) -> Any:
        left = iter(inputs)

        def given(x: Any) -> Any:
            if isinstance(x, tuple | list) and any(isinstance(one, np.ndarray) for one in x):
                return type(x)(map(given, x))
            return next(left) if isinstance(x, np.ndarray) else x

        return self.operator(*map(given, self.arguments))


@pytest.mark.timeout(240)
@ranks(2)
def test_every_operator_in_a_plan_equals_the_whole_operator(rank, group):
    """Each of the operators' cases in test_nn, with the found choice and with three that were drawn at random."""
    for number, (operator, arguments, _) in enumerate(CASES):
        inputs = [torch.tensor(x) for x in tree.tree_leaves(list(arguments)) if isinstance(x, np.ndarray)]
        if not inputs:
            continue
        module = Operates(operator, arguments)
        expected = module(*inputs)
        found = parallel.plan(module, inputs, 2, dataset_strategy="full_batch")
        draw = random.Random(number)
        drawn = [[draw.choice(one) for one in found._problem.choices] for _ in range(3)]
        for plan in (found, *(Plan(found.graph, found._problem, choices) for choices in drawn)):
            result = parallel.divide(module, plan)(*inputs)
            torch.testing.assert_close(result, expected, msg=lambda text: f"{operator}: {text}\n{plan}")  # noqa: B023
            module = Operates(operator, arguments)


class Calls(torch.nn.Module):
    """Calls a function with itself and its inputs."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.w = torch.nn.Parameter(numbers(8, 8, seed=5) / 3)
        self.s = torch.nn.Parameter(torch.tensor(0.5))
        self.layer = torch.nn.Linear(8, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.table = torch.nn.Embedding(16, 8, padding_idx=2)
        self.attention = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("positions", torch.arange(16))

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


def in_place(m: Any, x: Any) -> Any:
    h = x @ m.w
    h += x
    h.mul_(2)
    return functional.dropout(functional.relu(h, inplace=True), 0.0, True, True) + h


def without_gradient(m: Any, x: Any) -> Any:
    with torch.no_grad():
        target = torch.tanh(x @ m.w)
    penalty = sum(p.square().sum() for p in m.layer.parameters() if p.requires_grad)
    return (x @ m.w - target).square() + penalty * 0.01 + (0 if torch.is_grad_enabled() else 1)


def moving_mean(m: Any, x: Any) -> Any:
    h = m.norm(x @ m.w)
    m.mean.lerp_(h.detach().mean(0), 0.1)
    return h * m.s


def with_constants(m: Any, x: Any) -> Any:
    count = torch.zeros(1)
    y = x @ m.w + count
    count += 1
    mask = torch.ones(8, 8, dtype=torch.bool, device=x.device).tril()
    return (
        (y * count).masked_fill(~mask.repeat(2, 1), 0.5) + m.table(torch.arange(16, device=x.device)) + m.positions[:8]
    )


RIGHT: dict[str, Any] = {
    "in place": in_place,
    "without a gradient": without_gradient,
    "a moving mean": moving_mean,
    "constants": with_constants,
    "a weight that is used twice": lambda m, x: x @ m.w @ m.w.t() + m.w.sum() * m.s,
    "an encoder layer": lambda m, x: m.attention(x.view(4, 4, 8)).reshape(16, 8),
    "an attention mask": lambda m, x: functional.scaled_dot_product_attention(
        *[(x @ m.w).view(2, 8, 8)] * 3, attn_mask=torch.eye(8, device=x.device)
    ).flatten(0, 1),
    "NumPy's names": lambda m, x: torch.cat([m.layer(x), x], axis=1).sum(axis=1, keepdim=True) * x,
    "concat": lambda m, x: torch.concat([x @ m.w, x], 1)[:, 4:12].softmax(axis=0),
    "largest": lambda m, x: (x @ m.w).max(1, keepdim=True).values + torch.topk(x, 8).values,
    "complex": lambda m, x: torch.fft.fft(x @ m.w).abs() + torch.view_as_real(torch.fft.fft(x @ m.w)).sum(-1),
    "16 bits": lambda m, x: m.norm((x @ m.w).bfloat16().to(x.dtype)).type(x.dtype).type_as(m.w),
    "tensors by name": lambda m, x: torch.matmul(other=m.w, input=x) + functional.linear(bias=m.s, weight=m.w, input=x),
    "several results": lambda m, x: torch.stack(torch.unbind(x @ m.w), 0).split([3, 5], 1)[1].repeat(1, 2)[:, :8],
    "loss with classes": lambda m, x: (
        functional.cross_entropy(m.layer(x), m.positions % 8, ignore_index=2, reduction="none").unsqueeze(1) * x
    ),
}


@pytest.mark.timeout(240)
@ranks(4)
def test_functions_with_other_arguments_equal_the_whole_network_for_two_steps(rank, group):
    """Results, gradients and buffers are compared, with random strategies."""
    x = numbers(16, 8)
    for name, function in RIGHT.items():
        for seed in range(4):
            mscomm.set_seed(seed)
            whole, parts = Calls(function), Calls(function)
            parts.load_state_dict(whole.state_dict())
            found = parallel.plan(parts, [x], 4)
            draw = random.Random(seed)
            choices = list(map(draw.choice, found._problem.choices))
            net = parallel.divide(parts, Plan(found.graph, found._problem, choices) if seed else found)
            for step in range(2):
                text = f"{name}, seed {seed}, step {step}\n{net.plan}"
                for one in (whole, parts):
                    one.zero_grad()
                expected, result = whole(x), net(torch.tensor_split(x, 4)[rank])
                torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4, msg=lambda m, t=text: m + t)
                (expected * x).sum().backward()
                (result * x).sum().backward()
                net.reduce_gradients()
                for (key, one), mine in zip(whole.named_parameters(), parts.parameters(), strict=True):
                    assert (one.grad is None or not one.grad.any()) if mine.grad is None else one.grad is not None, text
                    if mine.grad is not None:
                        wanted = net.part(key, one.grad)
                        torch.testing.assert_close(mine.grad, wanted, rtol=1e-3, atol=1e-3, msg=lambda m, t=text: m + t)
                for (key, one), mine in zip(whole.named_buffers(), parts.buffers(), strict=True):
                    torch.testing.assert_close(mine, net.part(key, one), rtol=1e-4, atol=1e-4)
            norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
            torch.testing.assert_close(net.clip_grad_norm_(0.1), norm, rtol=1e-3, atol=1e-4)
            net.join()
            for one, mine in zip(whole.parameters(), parts.parameters(), strict=True):
                assert torch.equal(one, mine)


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient


def assigned(m: Any, x: Any) -> Any:
    m.mean = m.mean * 0.9
    return x + m.mean


def into_zeros(m: Any, x: Any) -> Any:
    out = torch.zeros(16, 8)
    out[:, :] = x @ m.w
    return out


def into_a_view(m: Any, x: Any) -> Any:
    y = x @ m.w
    y[:, :4].mul_(2)
    return y


def in_autocast(m: Any, x: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return x @ m.w


HIDDEN = [torch.nn.Parameter(torch.ones(8))]


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (into_zeros, r"setitem\(\) writes into a tensor, or into a part of one"),
        (into_a_view, r"mul_\(\) writes into a tensor of which there are views"),
        (lambda m, x: torch.zeros(16, 8).add_(x @ m.w), r"add_\(\) writes into a tensor that is not computed from"),
        (lambda m, x: x + m.mean.mul_(0.9).add_(x.mean(0)), "writes into a buffer that was written before"),
        (lambda m, x: x * m.w.mul_(0.9)[0], "writes into a parameter"),
        (assigned, "the buffer mean is replaced by another tensor"),
        (lambda m, x: m.norm(m.norm(x)), "norm: .* writes into a buffer that was written before"),
        (lambda m, x: Own.apply(x @ m.w), "Own has a backward pass of its own"),
        (lambda m, x: x * HIDDEN[0], "requires a gradient is not a parameter of the network"),
        (lambda m, x: x + torch.rand(8), "rand draws random numbers, but gets no tensor"),
        (lambda m, x: torch.bernoulli(x, generator=torch.Generator()), "from a generator of its own"),
        (lambda m, x: x + functional.relu(m.mean, inplace=True), r"relu\(inplace=True\) writes into a buffer"),
        (in_autocast, "autocast is not in"),
        (lambda m, x: (x @ m.w).register_hook(print), r"register_hook\(\) on a tensor"),
        (
            lambda m, x: functional.embedding(m.positions, m.w.repeat(2, 1), sparse=True),
            "scale_grad_by_freq and sparse",
        ),
        (lambda m, x: torch.ones(3), "a result is not computed from the inputs"),
    ],
)
def test_what_a_plan_would_compute_wrongly_is_refused(function: Any, text: str) -> None:
    with pytest.raises(NotImplementedError, match=text):
        parallel.plan(Calls(function), [torch.zeros(16, 8)], 4)


def test_divided_batch_normalization_has_pytorchs_results_and_moving_statistics():
    one_part = types.SimpleNamespace(parts=lambda _: 1, total=lambda x, _: x)
    x, weight, bias = numbers(4, 3, 2), numbers(3, seed=2), numbers(3, seed=3)
    mine, theirs = [torch.zeros(3), torch.ones(3)], [torch.zeros(3), torch.ones(3)]
    got = rules._synchronized(one_part, [x, *mine, weight, bias], 0.1, 1e-5)
    torch.testing.assert_close(got, functional.batch_norm(x, *theirs, weight, bias, True, 0.1, 1e-5))
    torch.testing.assert_close(mine, theirs)


@ranks(2)
def test_moving_means_of_data_parallel_training_do_not_stop_a_division(rank, group):
    mscomm.set_seed(4)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    batches = [(numbers(16, 8, seed=rank), numbers(16, 8, seed=rank + 2))]
    for mode in ("data_parallel", "auto_parallel"):
        mscomm.set_auto_parallel_context(parallel_mode=mode)
        mscomm.Model(net, torch.nn.MSELoss(), torch.optim.SGD(net.parameters(), 0.01)).train(1, batches)
        every = mscomm.all_gather(net[1].running_mean.numpy()[None])
        assert np.array_equal(every[0], every[1]) == (mode == "auto_parallel")


@ranks(2)
def test_a_divided_network_guards_its_parts(rank, group):
    module = Calls(lambda m, x: m.norm(x @ m.w))
    with pytest.raises(ValueError, match=r"ranks 0 and 1 of the group begin with different values of layer\.weight"):
        parallel.divide(module, parallel.plan(module, [torch.zeros(16, 8)], 2))
    mscomm.set_seed(1)
    module = Calls(lambda m, x: m.norm(x @ m.w))
    x = numbers(16, 8)
    plan = parallel.plan(module, [x], 2)
    net = parallel.divide(module, plan)
    rows = torch.tensor_split(x, 2)[rank]
    with pytest.raises(RuntimeError, match=r"each has only parts of its weights: call the result of mscomm\.parallel"):
        module(x)
    with pytest.raises(RuntimeError, match="the network is divided already"):
        parallel.divide(module, plan)
    with pytest.raises(ValueError, match="an input requires a gradient"):
        net(rows.clone().requires_grad_())
    module.eval()
    with pytest.raises(RuntimeError, match="switched between training and evaluation"):
        net(rows)
    module.train()
    assert net(rows).shape == (16, 8)
    net.join()
    assert module(x).shape == (16, 8)
    with pytest.raises(RuntimeError, match=r"join\(\) has brought the network's weights together"):
        net(rows)
    module.w = Parameter(numbers(8, 8), "w", layerwise_parallel=True)
    with pytest.raises(ValueError, match="w has layerwise_parallel=True"):
        parallel.divide(module, plan)


@ranks(4)
def test_convolutions_and_normalization_equal_the_whole_network(rank, group):
    class Small(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)
            self.norm = torch.nn.BatchNorm2d(8)
            self.conv2 = torch.nn.Conv2d(8, 8, 3, 2, bias=False)
            self.norm2 = torch.nn.BatchNorm2d(8)
            self.head = torch.nn.Linear(8, 4)
            self.table = torch.nn.Embedding(4, 4)

        def forward(self, x, label):
            x = functional.max_pool2d(torch.relu(self.norm(self.conv(x))), 2)
            x = functional.adaptive_avg_pool2d(functional.relu(self.norm2(self.conv2(x)), inplace=True), 1)
            logits = self.head(torch.flatten(x, 1)) + self.table(label)
            return functional.cross_entropy(logits, label, ignore_index=3)

    x, label = numbers(8, 3, 12, 12), torch.arange(8) % 4
    for seed in range(12):
        mscomm.set_seed(seed)
        module = Small().train()
        found = parallel.plan(module, [x, label], 4)
        draw = random.Random(seed)
        plan = found if seed == 0 else Plan(found.graph, found._problem, list(map(draw.choice, found._problem.choices)))
        before = {name: one.clone() for name, one in module.named_buffers()}
        mscomm.set_seed(seed)
        alone = Small().train()
        alone.load_state_dict(module.state_dict())
        alone(x, label)
        module_statistics = dict(alone.named_buffers())
        for name, one in module.named_buffers():
            one.data = before[name].clone()
        try:
            compared_with_buffers(module, [x, label], plan, module_statistics)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}\n{plan}") from error


def compared_with_buffers(module, inputs, plan, statistics):
    saved = {name: one.clone() for name, one in module.named_buffers()}
    rank, size = mscomm.get_rank(), mscomm.get_group_size()
    expected = module(*inputs)
    expected.backward()
    expected = expected.detach()
    gradients = {name: one.grad.clone() for name, one in module.named_parameters()}
    module.zero_grad()
    for name, one in module.named_buffers():
        one.data = saved[name]
    net = parallel.divide(module, plan)
    before = latest(net)
    result = net(*[torch.tensor_split(one, size)[rank] for one in inputs])
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    result.backward()
    net.reduce_gradients()
    for name, one in module.named_parameters():
        torch.testing.assert_close(one.grad, net.part(name, gradients[name]), rtol=1e-3, atol=1e-4)
    assert counted(net, before) == planned(plan)
    for name, one in module.named_buffers():
        torch.testing.assert_close(net.whole(name, one), statistics[name], rtol=1e-4, atol=1e-5)


# -- Model.train


def trained(mode: str, strategy: Any, rows: slice, **options: Any) -> tuple[list[float], dict[str, Any], Any]:
    """Train for 20 steps with these rows of each batch. Return the losses, the weights and the network."""
    found: list[float] = []

    class Losses(mscomm.Callback):
        def on_train_step_end(self, run_context: Any) -> None:
            found.append(float(run_context.original_args().net_outputs))

    mscomm.reset_auto_parallel_context()
    mscomm.set_auto_parallel_context(parallel_mode=mode, **options)
    mscomm.set_seed(7)
    net = Net(strategy)
    optimizer = nn.Momentum(net.trainable_params(), 0.2, 0.9)
    batches = [(numbers(16, 32, seed=i).numpy()[rows], numbers(16, 16, seed=i + 50).numpy()[rows]) for i in range(10)]
    model = mscomm.Model(net, nn.MSELoss(), optimizer)
    model.train(1, batches, callbacks=[Losses()])
    model.train(2, batches, callbacks=[Losses()], initial_epoch=1)  # weights and momentum go on
    mscomm.reset_auto_parallel_context()
    return found, {name: x.detach().clone() for name, x in net.named_parameters()}, net


@ranks(8)
def test_model_trains_a_divided_network_as_one_process_does(rank, group):
    expected, weights, _ = trained("stand_alone", None, slice(None))
    mine = slice(2 * rank, 2 * rank + 2)
    saved = f"{os.environ['RANKS_TOLD']}/strategy_{rank}.json"
    for mode, strategy, options, rows in (
        ("auto_parallel", ((2, 4), (4, 1)), {"search_mode": "sharding_propagation"}, mine),
        ("auto_parallel", None, {}, mine),
        ("semi_auto_parallel", ((1, 2), (2, 2)), {"strategy_ckpt_save_file": saved}, mine),
        ("auto_parallel", None, {"strategy_ckpt_load_file": saved}, mine),
        ("semi_auto_parallel", ((8, 1), (1, 1)), {"dataset_strategy": "full_batch"}, slice(None)),
    ):
        losses, found, net = trained(mode, strategy, rows, **options)
        np.testing.assert_allclose(losses, expected, rtol=1e-5, err_msg=f"{mode} {strategy}")
        for name, x in found.items():
            torch.testing.assert_close(x, weights[name], rtol=1e-4, atol=1e-6)
        assert net(torch.zeros(3, 32)).shape == (3, 16)  # the weights are whole again


@ranks(2)
def test_what_the_modes_that_divide_a_network_refuse(rank, group):
    mscomm.set_auto_parallel_context(parallel_mode="auto_parallel")

    def model(net=None, **options):
        net = net or Net(None)
        return mscomm.Model(net, nn.MSELoss(), nn.Momentum(net.trainable_params(), 0.1, 0.9), **options)

    batches = [(X, Y)]
    with pytest.raises(NotImplementedError, match=r"Model\.steps: not for modes that divide the network"):
        model().steps(1, batches)
    with pytest.raises(NotImplementedError, match="compression is not in this release"):
        model(compression="bf16").train(1, batches)
    own = type("Own", (), {"parameters": {"x": np.ones(1)}, "loss_and_gradients": lambda self, x: (0.0, {"x": x})})()
    with pytest.raises(NotImplementedError, match=r"needs a PyTorch module or a cell of mscomm\.nn"):
        mscomm.Model(own, optimizer=mscomm.train.SGD(own.parameters)).train(1, [np.ones(1)])
    with pytest.raises(
        ValueError, match=r"the inputs of this rank have the shapes \[\(8, 32\), \(8, 16\)\]; the plan was"
    ):
        model().train(1, [(X, Y), (X[:8], Y[:8])])
    mscomm.set_auto_parallel_context(search_mode="dynamic_programming")
    with pytest.raises(NotImplementedError, match="search_mode='dynamic_programming' is not in mscomm"):
        model().train(1, batches)
    with pytest.raises(ValueError, match="the plan is for 4 ranks, the group has 2"):
        parallel.divide(Net(None), parallel.plan(Net(None), [X], 4))
    constant = torch.tensor(float(rank))
    differing = Calls(lambda m, x: m.layer(x) * constant)
    with pytest.raises(ValueError, match="ranks 0 and 1 of the group have different plans"):
        parallel.divide(differing, parallel.plan(differing, [numbers(16, 8)], 2))
    with pytest.raises(ValueError, match="ranks 0 and 1 of the group have different plans"):
        parallel.divide(Net(None), parallel.plan(Net(((1, 2), (2, 1)) if rank else ((2, 1), (1, 1))), [X], 2))


@ranks(8)
def test_a_checkpoint_of_eight_ranks_continues_on_four_and_on_one(rank, group):
    """Each has another strategy. The losses are those of one process that was never interrupted."""
    found: list[float] = []
    batches = [(numbers(16, 32, seed=i).numpy(), numbers(16, 16, seed=i + 50).numpy()) for i in range(5)]

    class Losses(mscomm.Callback):
        def on_train_step_end(self, run_context):
            found.append(float(run_context.original_args().net_outputs))

    def go_on(mode, strategy, group, epoch, path, *others):
        mscomm.reset_auto_parallel_context()
        mscomm.set_auto_parallel_context(parallel_mode=mode)
        mscomm.set_seed(7)
        net = Net(strategy)
        model = mscomm.Model(net, nn.MSELoss(), nn.Adam(net.trainable_params(), 0.01), group=group)
        done = None if path is None else model.resume(path)
        size = 1 if group is None else group.size
        rows = slice(None) if size == 1 else slice(group.rank * 16 // size, (group.rank + 1) * 16 // size)
        del found[:]
        model.train(epoch, [(x[rows], y[rows]) for x, y in batches], callbacks=[Losses(), *others])
        mscomm.reset_auto_parallel_context()
        return done, list(found)

    _, expected = go_on("stand_alone", None, None, 4, None)
    here = Path(os.environ["RANKS_TOLD"]) / f"checkpoints_{rank}"
    saved = mscomm.ModelCheckpoint(directory=str(here), config=mscomm.CheckpointConfig(save_checkpoint_steps=5))
    config = mscomm.CheckpointConfig(save_checkpoint_steps=5, integrated_save=False)
    parts = mscomm.ModelCheckpoint(directory=str(here / "parts"), config=config)
    eight = mscomm.create_group("eight", list(range(8)))
    _, first = go_on("auto_parallel", ((2, 4), (4, 1)), eight, 2, None, saved, parts)
    np.testing.assert_allclose(first, expected[:10], rtol=1e-5)
    four = mscomm.create_group("four", [0, 1, 2, 3])
    if four:
        done, rest = go_on("semi_auto_parallel", ((1, 2), (2, 2)), four, 4, here)
        assert done == (2, 5)
        np.testing.assert_allclose(rest, expected[10:], rtol=1e-5)
    files = [here.parent / f"checkpoints_{r}/parts/CKP-2_5.safetensors" for r in range(8)]
    own = mscomm.load_checkpoint(files[rank])
    assert own["weight"].shape == (8, 16) and own["weight2"].shape == (4, 16)
    net = Net(None)
    assert mscomm.load_distributed_checkpoint(net, files[::-1]) == ([], [])
    whole = mscomm.load_checkpoint(here / "CKP-2_5.safetensors")
    assert all(np.array_equal(x.detach(), whole[name]) for name, x in net.named_parameters())
    with pytest.raises(ValueError, match=r"the files of the ranks \[7\] of 8 are missing"):
        mscomm.load_distributed_checkpoint(net, files[:7])
    with pytest.raises(ValueError, match="is of another step or training"):
        mscomm.load_distributed_checkpoint(net, [files[0], files[1].with_name("CKP-1_5.safetensors")])
    with pytest.raises(ValueError, match="has no parts of weights"):
        mscomm.load_distributed_checkpoint(net, [here / "CKP-2_5.safetensors"])
    with pytest.raises(ValueError, match="has only one rank's parts of the weights"):
        mscomm.Model(net, nn.MSELoss(), nn.Momentum(net.trainable_params(), 0.1, 0.9)).resume(files[rank])
    if rank == 0:
        done, rest = go_on("stand_alone", None, None, 4, here)
        assert done == (2, 5)
        np.testing.assert_allclose(rest, expected[10:], rtol=1e-5)
    mscomm.barrier()


def test_save_graphs_without_a_divided_network_has_no_effect(capfd: pytest.CaptureFixture[str]) -> None:
    mscomm.set_context(save_graphs=2)
    try:
        net = Net(None)
        mscomm.Model(net, nn.MSELoss(), nn.Momentum(net.trainable_params(), 0.1, 0.9)).train(1, [(X, Y)])
    finally:
        mscomm.set_context(save_graphs=False)
    assert "save_graphs has no effect in the parallel mode stand_alone" in capfd.readouterr().err


def test_strategies_are_saved_and_used_again(tmp_path: Path) -> None:
    plan = parallel.plan(quick_start(), [X, Y], 8)
    plan.save_strategies(tmp_path / "new/strategy.json")
    again = parallel.plan(quick_start(None), [X, Y], 8, strategies=tmp_path / "new/strategy.json")
    assert again.strategies() == plan.strategies() and len(plan.strategies()) == 6
    wanted = {"ReLU (_backbone.relu)": [[4, 1]]}
    other = parallel.plan(quick_start(None), [X, Y], 8, strategies=wanted)
    assert other.strategies()["ReLU (_backbone.relu)"] == [[4, 1]]
    with pytest.raises(ValueError, match="has an operator 'GeLU', which the network does not have"):
        parallel.plan(Net(), [X], 8, strategies={"GeLU": [[1]]})
    with pytest.raises(ValueError, match="needs 8 ranks; there are 2"):
        parallel.plan(quick_start(None), [X, Y], 2, strategies=tmp_path / "new/strategy.json")
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ValueError, match=r"other\.json is not a file of Plan\.save_strategies"):
        parallel.plan(Net(), [X], 8, strategies=tmp_path / "other.json")


def test_a_plan_is_drawn(tmp_path: Path) -> None:
    plan = parallel.plan(Net(), [X], 8)
    for arguments, text in (
        ((tmp_path / "plan.jpg",), "must end with"),
        (("p.svg", 2, 3), "operators 2 to 3; the plan"),
    ):
        with pytest.raises(ValueError, match=text):
            plan.plot(*arguments)
    pytest.importorskip("matplotlib")
    plan.plot(tmp_path / "plan.svg")
    drawn = (tmp_path / "plan.svg").read_text()
    assert drawn.startswith("<?xml") and drawn.count("<path") > 50


def test_the_page_shows_what_its_program_prints() -> None:
    page = (Path(__file__).parent.parent / "docs/parallel.md").read_text()
    program, shown = (re.findall(rf"^```{kind}\n(.*?)^```$", page, re.M | re.S)[0] for kind in ("python", "text"))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, shown), done.stderr
