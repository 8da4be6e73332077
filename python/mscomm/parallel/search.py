"""Chooses how each node of a graph is divided: strategies that the user has set, and the best ones for the others.

The cost of a plan is an estimate of a training step's time: computation, and the bytes that a rank sends in the forward
pass, in the backward pass and for the gradients of the parameters. Latencies are left out, so that small examples
are planned like large networks of the same form.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mscomm.parallel.layout import Axes, Layout, Mesh, Step, redistribution, sent_bytes
from mscomm.parallel.rules import Rule, rule_of
from mscomm.parallel.tracing import Graph, Node, Value

MANY = 3  # with more axes than this, only runs of neighbouring axes are tried
LETTERS = 4  # and only so many letters of a node
SWEEPS = 20
CLOSE = 1.05  # what propagated strategies may cost, compared with the best ones that a search has found


class Machine(NamedTuple):
    """What the cost model assumes: floating-point operations, bytes of memory and bytes of communication per second and
    rank."""

    flops: float = 50e9
    memory: float = 10e9
    network: float = 2e9


@dataclass(frozen=True, eq=False)
class Choice:
    """How a node is divided: the axes of its letters, and the layouts that follow."""

    axes: Mapping[str, Axes]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    gradients: tuple[Layout, ...]  # the layouts in which the gradients of the inputs are computed
    used: frozenset[int]  # all axes that divide a letter


@dataclass
class Problem:
    """A graph, its rules and the possible choices. data: how the inputs are divided; see plan(). given: strategies by
    the numbers of the nodes."""

    graph: Graph
    mesh: Mesh
    machine: Machine
    data: Sequence[Layout]
    given: Mapping[int, Sequence[Sequence[int]]] = field(default_factory=dict)
    rules: list[Rule] = field(init=False)
    choices: list[list[Choice]] = field(init=False)
    users: dict[int, list[tuple[Node, int]]] = field(init=False)  # by id of a Value: its uses
    _layouts: dict[Layout, Layout] = field(default_factory=dict)  # so that equal layouts are one object

    def __post_init__(self) -> None:
        self.data = [self._layouts.setdefault(layout, layout) for layout in self.data]
        self.rules = [rule_of(node) for node in self.graph.nodes]
        self.users = {}
        for node in self.graph.nodes:
            for place, value in enumerate(node.inputs):
                self.users.setdefault(id(value), []).append((node, place))
        self.choices = [self._choices(node) for node in self.graph.nodes]
        for node in self.graph.nodes:
            self._restrict(node)
        self._alone: dict[tuple[int, int], float] = {}

    # -- the choices

    def choice(self, node: Node, axes: Mapping[str, Axes]) -> Choice:
        """Return the choice that divides the letters by these axes."""
        rule = self.rules[node.number]
        ins = tuple(Layout(tuple(axes.get(letter, ()) for letter in letters)) for letters in rule.inputs)
        used = frozenset(axis for some in axes.values() for axis in some)
        outs = []
        for letters in rule.outputs:
            layout = Layout(tuple(axes.get(letter, ()) for letter in letters))
            outs.append(Layout(layout.dims, used - layout.used))
        back = (Layout(layout.dims, used - layout.used) for layout in ins)
        same = self._layouts.setdefault
        return Choice(
            axes, tuple(same(x, x) for x in ins), tuple(same(x, x) for x in outs), tuple(same(x, x) for x in back), used
        )

    def _choices(self, node: Node) -> list[Choice]:
        sizes = self.rules[node.number].letters(node)
        operator = node.operator
        if node.number in self.given:
            return [self.choice(node, self._of_strategy(node, sizes, self.given[node.number]))]
        if operator is not None and operator.in_strategy is not None:
            return [self.choice(node, self._of_strategy(node, sizes, operator.in_strategy))]
        axes = range(len(self.mesh.sizes))
        made = []
        if len(axes) <= MANY:
            for letters in itertools.product((*sizes, None), repeat=len(axes)):
                made.append({one: tuple(a for a in axes if letters[a] == one) for one in sizes})
        else:
            made = [dict(one) for one in self._runs(self._useful(node, sizes), 0)]
        fitting = [
            {letter: some for letter, some in one.items() if some}
            for one in made
            if all(sizes[letter] % self.mesh.parts(some) == 0 for letter, some in one.items())
        ]
        return [self.choice(node, one) for one in fitting]

    def _restrict(self, node: Node) -> None:
        """Keep only the choices that fit the marks of parallel.shard() on the node's inputs, if there are any."""
        for place, value in enumerate(node.inputs):
            mark = value.node
            if mark is None or mark.name != "Identity" or not is_set(mark):
                continue
            wanted = self.choices[mark.number][0].outputs[0].dims
            fitting = [one for one in self.choices[node.number] if one.inputs[place].dims == wanted]
            self.choices[node.number] = fitting or self.choices[node.number]

    def _useful(self, node: Node, sizes: Mapping[str, int]) -> list[str]:
        """Return at most LETTERS letters: those that are summed over, and the first and last ones."""
        rule = self.rules[node.number]
        outs = {letter for letters in rule.outputs for letter in letters}
        order = [*(one for one in sizes if one not in outs), *(one for one in sizes if one in outs)]
        kept = order if len(order) <= LETTERS else [*order[: LETTERS - 1], order[-1]]
        return [letter for letter in sizes if letter in kept]

    def _runs(self, letters: Sequence[str], first: int) -> Iterable[list[tuple[str, Axes]]]:
        """Yield all ways to divide the letters by runs of axes, from left to right."""
        if not letters:
            yield []
            return
        for end in range(first, len(self.mesh.sizes) + 1):
            for rest in self._runs(letters[1:], end):
                yield [(letters[0], tuple(range(first, end))), *rest]

    def _of_strategy(self, node: Node, sizes: Mapping[str, int], strategy: Sequence[Sequence[int]]) -> dict[str, Axes]:
        """Return the axes of a strategy that the user has set. Raise ValueError if it does not fit."""
        rule, where = self.rules[node.number], f"mscomm.parallel: {node.label}: the strategy {strategy}"
        if len(strategy) != len(node.inputs):
            raise ValueError(f"{where} has {len(strategy)} tuples for {len(node.inputs)} inputs")
        numbers: dict[str, int] = {}
        for place, (letters, value, parts) in enumerate(zip(rule.inputs, node.inputs, strategy, strict=True)):
            if len(parts) != len(letters):
                raise ValueError(f"{where}: input {place} has {len(letters)} dimensions, not {len(parts)}")
            for dim, (letter, size, number) in enumerate(zip(letters, value.shape, parts, strict=True)):
                at = f"dimension {dim} of input {place}"
                if letter == "." and number > 1 and size != 1:
                    raise ValueError(f"{where}: {at} cannot be divided")
                if size % number:
                    raise ValueError(f"{where}: {at} has the size {size}, which cannot be divided by {number}")
                if letter == ".":
                    continue
                if numbers.setdefault(letter, number) != number:
                    raise ValueError(f"{where}: {at} must be divided into {numbers[letter]} parts, not {number}")
        if math.prod(numbers.values()) > self.mesh.ranks:
            raise ValueError(f"{where} needs {math.prod(numbers.values())} ranks; there are {self.mesh.ranks}")
        left, axes = list(range(len(self.mesh.sizes))), {}
        for letter, number in numbers.items():
            some = self._axes_for(left, number)
            if some is None:
                raise ValueError(
                    f"{where}: {self.mesh.ranks} ranks cannot be divided by {number} here; use factors of their number"
                )
            axes[letter] = some
            left = [axis for axis in left if axis not in some]
        return {letter: some for letter, some in axes.items() if some}

    def _axes_for(self, left: Sequence[int], number: int) -> Axes | None:
        """Return the first axes, from left to right, whose sizes have this product."""
        for count in range(len(left) + 1):
            for some in itertools.combinations(left, count):
                if self.mesh.parts(some) == number:
                    return some
        return None

    # -- the costs, in seconds

    def alone(self, node: Node, choice: Choice) -> float:
        """Return the cost of a node without its edges: its computation, its own sums, and its parameters' gradients."""
        rule = self.rules[node.number]
        parts = self.mesh.parts(tuple(choice.used))
        cost = 3 * rule.flops / parts / self.machine.flops  # the backward pass takes twice as long as the forward pass
        layouts = zip((*node.inputs, *node.outputs), (*choice.inputs, *choice.outputs), strict=True)
        cost += 3 * sum(self._part(value, layout) for value, layout in layouts) / self.machine.memory
        for axes, size in self.own_sums(node, choice):
            cost += 2 * self._summed(axes, size) / self.machine.network
        for place, value in enumerate(node.inputs):
            if value.kind == "parameter" and value.requires_grad:
                axes = tuple(sorted(choice.gradients[place].partial))
                cost += self._summed(axes, self._part(value, choice.inputs[place])) / self.machine.network
        return cost

    def own_sums(self, node: Node, choice: Choice) -> list[tuple[Axes, float]]:
        """Return (axes, bytes) of each sum within the node's computation."""
        rule = self.rules[node.number]
        if rule.sums is None:
            return []
        found = rule.sums(Parts(self.mesh, choice).parts)
        return [(choice.axes[letter], size * node.inputs[0].dtype.itemsize) for letter, size in found]

    def _part(self, value: Value, layout: Layout) -> float:
        return value.nbytes / self.mesh.parts(tuple(layout.used))

    def _summed(self, axes: Axes, size: float) -> float:
        """Return the bytes that a rank sends for a sum over the axes."""
        return sent_bytes(Step("all_reduce", axes), self.mesh, size)[0] if axes else 0.0

    @functools.cached_property
    def _edges(self) -> dict[tuple[float, bool, int, int, int], float]:
        return {}

    def edge(self, value: Value, before: Layout, node: Node, place: int, choice: Choice) -> float:
        """Return the cost of bringing a value to an input of a node, and its gradient back."""
        back = value.requires_grad and node.has_gradient
        key = (value.nbytes, back, id(before), id(choice.inputs[place]), id(choice.gradients[place]))
        if key not in self._edges:
            sent = self._moved(value, before, choice.inputs[place])
            if back:
                sent += self._moved(value, choice.gradients[place], before.whole)
            self._edges[key] = sent / self.machine.network
        return self._edges[key]

    def _moved(self, value: Value, before: Layout, after: Layout) -> float:
        size, total = self._part(value, before), 0.0
        for step in redistribution(before, after):
            sent, size = sent_bytes(step, self.mesh, size)
            total += sent
        return total

    def source(self, value: Value, chosen: Sequence[Choice | None]) -> Layout | None:
        """Return the layout that a value has before it is used; None if its node has no choice yet.

        A parameter or buffer has the layout of its first use. Constants are whole on every rank.
        """
        if value.node is not None:
            made = chosen[value.node.number]
            return None if made is None else made.outputs[value.index]
        if value.kind == "input":
            return self.data[int(value.name)]
        if value.kind in ("parameter", "buffer"):
            node, place = self.users[id(value)][0]
            made = chosen[node.number]
            return None if made is None else made.inputs[place]
        return self._layouts.setdefault(whole := Layout(((),) * len(value.shape)), whole)

    def local(self, node: Node, choice: Choice, chosen: list[Choice | None]) -> float:
        """Return the cost of a node and of its edges to nodes that have a choice."""
        kept, chosen[node.number] = chosen[node.number], choice
        cost = self.alone_of(node, choice)
        for place, value in enumerate(node.inputs):
            before = self.source(value, chosen)
            if before is not None:
                cost += self.edge(value, before, node, place, choice)
        for value in (*node.outputs, *(one for one in node.inputs if one.kind in ("parameter", "buffer"))):
            for user, place in self.users.get(id(value), []):
                theirs = chosen[user.number]
                before = self.source(value, chosen)
                if theirs is not None and user is not node and before is not None:
                    cost += self.edge(value, before, user, place, theirs)
        if any(value in self._results for value in map(id, node.outputs)):
            for value, layout in zip(node.outputs, choice.outputs, strict=True):
                whole = Layout(((),) * len(value.shape))
                if id(value) in self._results:
                    cost += self._moved(value, layout, whole) / self.machine.network
        chosen[node.number] = kept
        return cost

    @functools.cached_property
    def _results(self) -> set[int]:
        return {id(value) for value in self.graph.results}

    def alone_of(self, node: Node, choice: Choice) -> float:
        key = (node.number, id(choice))
        if key not in self._alone:
            self._alone[key] = self.alone(node, choice)
        return self._alone[key]

    def cost(self, chosen: Sequence[Choice]) -> float:
        """Return the cost of a whole plan."""
        total = 0.0
        for node, choice in zip(self.graph.nodes, chosen, strict=True):
            total += self.alone_of(node, choice)
            for place, value in enumerate(node.inputs):
                before = self.source(value, chosen)
                assert before is not None
                total += self.edge(value, before, node, place, choice)
            for value, layout in zip(node.outputs, choice.outputs, strict=True):
                if id(value) in self._results:
                    total += self._moved(value, layout, Layout(((),) * len(value.shape))) / self.machine.network
        return total


class Parts(NamedTuple):
    """The part of a rule's context that does not compute: how many parts letters have."""

    mesh: Mesh
    choice: Choice

    def parts(self, letters: Sequence[str]) -> int:
        return math.prod(self.mesh.parts(self.choice.axes.get(letter, ())) for letter in letters)


def data_parallel(problem: Problem) -> list[Choice]:
    """Return the strategies that the user has set, and for each other node the division of its first dimension."""
    chosen = []
    for node, choices in zip(problem.graph.nodes, problem.choices, strict=True):
        if len(choices) > 1:
            letters = problem.rules[node.number].inputs[0] if node.inputs else ()
            first = (
                {choice.axes.get(letters[0], ()): choice for choice in choices if set(choice.axes) <= {letters[0]}}
                if letters
                else {}
            )
            choices = (
                [first[max(first, key=lambda axes: (problem.mesh.parts(axes), [-a for a in axes]))]]
                if first
                else choices[-1:]
            )
        chosen.append(choices[0])
    return chosen


def propagated(problem: Problem) -> list[Choice]:
    """Return choices for all nodes, with the strategies that the user has set.

    If there are such strategies, they are propagated from node to node: each node continues the layouts of its
    neighbours, so that parts need not move. If these choices cost at most CLOSE times as much as the best that a search
    has found, they are returned, otherwise the best. The search improves several starting points node by node: the
    propagated choices, choices that are made from the first node to the last, and data parallelism.
    """
    if not problem.graph.nodes:
        return []
    outward = [_outward(problem)] if any(map(is_set, problem.graph.nodes)) else []
    starts = [*outward, _forward(problem), data_parallel(problem)]
    best = min((_improved(problem, start) for start in starts), key=problem.cost)
    return next((one for one in outward if problem.cost(one) <= CLOSE * problem.cost(best)), best)


def _best(problem: Problem, node: Node, chosen: list[Choice | None]) -> Choice:
    return min(problem.choices[node.number], key=lambda choice: problem.local(node, choice, chosen))


def _outward(problem: Problem) -> list[Choice]:
    """Choose for the nodes with strategies first, then for their neighbours, and so on.

    A node's choice is the one with the fewest moves of parts to the neighbours that have a choice. Among these, it is
    the cheapest one together with the best choices of the nodes that use its results.
    """
    nodes = problem.graph.nodes
    chosen: list[Choice | None] = [None] * len(nodes)
    waiting = [node for node in nodes if is_set(node)]
    seen = {node.number for node in waiting}
    while waiting:
        node = waiting.pop(0)
        chosen[node.number] = min(problem.choices[node.number], key=functools.partial(_ahead, problem, node, chosen))
        near = [value.node for value in node.inputs if value.node is not None]
        near += [user for value in node.outputs for user, _ in problem.users.get(id(value), [])]
        for other in near:
            if other.number not in seen:
                seen.add(other.number)
                waiting.append(other)
        if not waiting:  # the graph may have parts that are not connected
            waiting += [other for other in nodes if other.number not in seen][:1]
            seen.update(other.number for other in waiting)
    return [choice for choice in chosen if choice is not None]


def _ahead(problem: Problem, node: Node, chosen: list[Choice | None], choice: Choice) -> tuple[int, float]:
    """Return (moves to neighbours that have a choice, cost with the best choices of the nodes that use the results)."""
    moves, cost = 0, problem.local(node, choice, chosen)
    for place, value in enumerate(node.inputs):
        before = problem.source(value, chosen) if value.node is not None else None
        moves += 0 if before is None else _moves(before, choice.inputs[place])
    for value, layout in zip(node.outputs, choice.outputs, strict=True):
        for user, place in problem.users.get(id(value), []):
            theirs = chosen[user.number]
            if theirs is not None:
                moves += _moves(layout, theirs.inputs[place])
                continue
            ways = (
                (
                    _moves(layout, one.inputs[place]),
                    problem.alone_of(user, one) + problem.edge(value, layout, user, place, one),
                )
                for one in problem.choices[user.number]
            )
            cost += min(ways)[1]
    return moves, cost


def _moves(before: Layout, after: Layout) -> int:
    return sum(step.kind in ("all_gather", "all_to_all") for step in redistribution(before, after))


def is_set(node: Node) -> bool:
    """Return whether the user has set the node's strategy."""
    return node.operator is not None and node.operator.in_strategy is not None


def _forward(problem: Problem) -> list[Choice]:
    """Choose by dynamic programming, as if the graph were a tree: exact for a chain."""
    best: list[list[float]] = []
    back: list[list[list[int]]] = []
    for node in problem.graph.nodes:
        costs, froms = [], []
        for choice in problem.choices[node.number]:
            cost, from_ = problem.alone_of(node, choice), []
            for place, value in enumerate(node.inputs):
                if value.node is None:
                    if value.kind in ("input", "constant"):
                        before = problem.source(value, [])
                        cost += problem.edge(value, before, node, place, choice) if before is not None else 0.0
                    continue
                theirs = problem.choices[value.node.number]
                shared = max(1, len(problem.users[id(value)]))
                ways = [
                    best[value.node.number][i] / shared
                    + problem.edge(value, one.outputs[value.index], node, place, choice)
                    for i, one in enumerate(theirs)
                ]
                least = min(range(len(ways)), key=ways.__getitem__)
                cost += ways[least]
                from_.append(least)
            if any(id(value) in problem._results for value in node.outputs):
                cost += problem.local(node, choice, [None] * len(problem.graph.nodes)) - problem.alone_of(node, choice)
            costs.append(cost)
            froms.append(from_)
        best.append(costs)
        back.append(froms)
    picked: list[int | None] = [None] * len(best)
    for node in reversed(problem.graph.nodes):
        mine = picked[node.number]
        if mine is None:
            mine = picked[node.number] = min(range(len(best[node.number])), key=best[node.number].__getitem__)
        producers = [value.node for value in node.inputs if value.node is not None]
        for producer, index in zip(producers, back[node.number][mine], strict=True):
            if picked[producer.number] is None:
                picked[producer.number] = index
    return [problem.choices[number][index] for number, index in enumerate(picked) if index is not None]


def _improved(problem: Problem, start: Sequence[Choice]) -> list[Choice]:
    """Change the choice of one node at a time, as long as the cost falls."""
    chosen: list[Choice | None] = list(start)
    for sweep in range(SWEEPS):
        changed = False
        nodes = problem.graph.nodes if sweep % 2 == 0 else problem.graph.nodes[::-1]
        for node in nodes:
            now = chosen[node.number]
            assert now is not None
            best = _best(problem, node, chosen)
            if problem.local(node, best, chosen) < problem.local(node, now, chosen) * (1 - 1e-9):
                chosen[node.number], changed = best, True
        if not changed:
            break
    return [choice for choice in chosen if choice is not None]
