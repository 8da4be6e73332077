"""`mscomm bench tune`: measures each collective with each of its algorithms, and shows which algorithm init() chooses.

The choice depends only on the ranks, the hosts, the size of the message and the prices of rank 0, so that all ranks
make the same choice without communication. This command shows how good the choice is on these hosts. It also fits the
prices to the measured times, and shows how good the choice would be with them. MSCOMM_TUNED gives these prices to a
job, and MSCOMM_ALGO forces another choice.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import mscomm
from mscomm import _core, job, subgroups
from mscomm.bench import report
from mscomm.bench.contenders import mscomm_call, ourselves
from mscomm.bench.fitting import Sample, fit
from mscomm.bench.measuring import of_size, rehearse, telling
from mscomm.bench.peers import Unfit
from mscomm.bench.plan import ROUNDS_WITH_PEERS, Plan, dtype_of
from mscomm.bench.table import COLLECTIVES, Buffers, Case
from mscomm.cluster.assemble import OWN_ORDER
from mscomm.group import Group

# The collectives to whose times the prices are fitted. In these, no rank can return before it has heard from all
# others. So a call takes as long in a loop of calls as it does alone.
_FITTED = ("all_reduce", "all_gather", "reduce_scatter")
_FASTER = 0.9  # report an algorithm as faster if each round takes less than this share of the chosen algorithm's time


def algorithms(layout: _core.Layout) -> dict[str, list[str]]:
    """Return the algorithms that each collective can use on these hosts. Omit collectives with only one algorithm."""
    names: dict[str, list[str]] = {}
    for what, name, carrier, _ in _core.algorithms():
        if layout.allows(carrier):
            names.setdefault(what, []).append(name)
    return {what: found for what, found in names.items() if len(found) > 1}


def measure(plan: Plan, rank: int, ranks: int) -> dict[str, Any]:
    """Measure all collectives, one after the other. Every rank must call this. Return all results."""
    world = job.resolve(None)
    with telling(rank):
        if any(world.epoch.forced):
            raise Unfit("tune shows what init chooses; unset MSCOMM_ALGO, which forces it")
    plan = plan._replace(rounds=max(plan.rounds, ROUNDS_WITH_PEERS))
    result: dict[str, Any] = {"environment": report.environment(ranks), "rows": []}
    result["environment"]["contenders"] = {"mscomm": f"mscomm {mscomm.__version__}"}
    if rank == 0:
        report.tune_head(plan, result["environment"])
    layout = world.core.layout
    known = algorithms(layout)
    choices = {}
    with contextlib.ExitStack() as destroying:
        variants = {}
        for name in dict.fromkeys(name for names in known.values() for name in names):
            variants[name] = subgroups.create_variant(f"tune {name}", name)
            destroying.callback(mscomm.destroy_group, variants[name])
        for what, names in known.items():
            case = Case(COLLECTIVES[what], dtype_of(plan.dtype), plan.op, plan.root, ranks, rank)
            rows = _of_collective(plan._replace(collective=what, peers=tuple(names)), case, variants, layout)
            result["rows"] += rows
            choices[what] = choice(layout, what, [row["message"] for row in rows])
    if rank > 0:
        return result
    report.tune_choices(choices, faster(result["rows"]), regrets(result["rows"]))
    # With two ranks, each algorithm has as many latencies as messages, so their prices could not be told apart.
    one_each = ranks > 2 and len(set(world.hosts)) == ranks
    prices = fit(samples(layout, result["rows"])) if one_each else None
    if not prices:
        report.say("# No prices: they need at least 3 ranks, each on a host of its own")
    else:
        result["prices"] = prices._asdict()
        tuned = _core.Layout(hosts=world.hosts, rank=0, forced=world.epoch.forced, prices=prices)
        sizes = {what: [row["message"] for row in result["rows"] if row["collective"] == what] for what in known}
        errors = [prices.us(one.cost) / one.us for one in samples(layout, result["rows"])]
        report.tune_prices(
            prices,
            errors,
            {what: choice(tuned, what, sizes[what]) for what in known},
            regrets([row | {"chosen": _chosen(tuned, row)} for row in result["rows"]]),
        )
    return result


def _of_collective(plan: Plan, case: Case, variants: dict[str, Group], layout: _core.Layout) -> list[dict[str, Any]]:
    what, names = plan.collective, plan.peers
    bind = _until_all_return if case.row.rooted else mscomm_call
    ways = [ourselves(case, plan.shared, name, variants[name], bind) for name in names]
    counts = plan.counts(case)
    for way in ways:
        with telling(case.rank):
            rehearse(way, counts[0], case.row.in_place)
    if case.rank == 0:
        report.tune_columns(what, names)
    rows = []
    for count in counts:
        size = case.size(count)
        # The choice depends on the size of x. If only the result has parts, x has the size of one part.
        message = size if case.row.x_in_parts else count * case.dtype.itemsize
        row = {"collective": what, "size": size, "message": message, "results": of_size(plan, case, ways, count)}
        row["chosen"] = _chosen(layout, row)
        same_bits = [name for name in names if (what, name) not in OWN_ORDER]
        row["best"] = min(same_bits, key=lambda name: _cell(row, name)["us"])
        rows.append(row)
        if case.rank == 0:
            report.tune_row(row)
    return rows


def _chosen(layout: _core.Layout, row: dict[str, Any]) -> str:
    return layout.chosen(_core.collectives.index(row["collective"]), row["message"])


def samples(layout: _core.Layout, rows: list[dict[str, Any]]) -> Iterator[Sample]:
    """Yield a sample for each algorithm and size to which prices are fitted."""
    for number, row in enumerate(rows):
        what = row["collective"]
        for name in row["results"] if what in _FITTED else ():
            cost = layout.cost(_core.collectives.index(what), name, row["message"])
            if cost is not None and (what, name) not in OWN_ORDER:
                yield Sample(cost, _cell(row, name)["us"], number)


def _until_all_return(case: Case, buffers: Buffers, group: Group | None = None) -> Callable[[], object]:
    """Return a function that makes a call with a root, and then a barrier. In a loop of calls with a root, some ranks
    run ahead of the others, so the time of a call would not show when the last rank has its result.
    """
    call = mscomm_call(case, buffers, group)

    def both() -> None:
        call()
        mscomm.barrier()  # of the world, so that it is the same for all algorithms

    return both


def choice(layout: _core.Layout, what: str, sizes: list[int]) -> list[tuple[str, int]]:
    """Return which algorithm is chosen for each message size from 0 to the last of `sizes`.

    The result is a list of pairs (algorithm, size in bytes) in ascending order of size. The algorithm is chosen for
    this size and for all larger sizes below the size in the next pair.
    """

    chosen = functools.partial(layout.chosen, _core.collectives.index(what))
    found = [(chosen(0), 0)]
    # Between two sizes, the choice may change and change back, so look at some sizes in between, too.
    between = [small + (large - small) * k // 16 for small, large in itertools.pairwise([0, *sizes]) for k in range(16)]
    for small, large in itertools.pairwise([*between, *sizes[-1:]]):
        while chosen(large) != found[-1][0]:
            within = range(small, large + 1)
            small = within[bisect.bisect_left(within, True, key=lambda size: chosen(size) != found[-1][0])]
            found.append((chosen(small), small))
    return found


def faster(rows: list[dict[str, Any]]) -> list[tuple[str, int, str, str, float]]:
    """Return the cases in which another algorithm was faster than the chosen algorithm.

    Each case is a tuple (collective, size, chosen, best, time of best / time of chosen).
    """
    found = []
    for row in rows:
        ours, best = (_cell(row, row[which])["rounds_us"] for which in ("chosen", "best"))
        shares = [statistics.median(b) / statistics.median(a) for a, b in zip(ours, best, strict=True)]
        if max(shares) < _FASTER:
            found.append((row["collective"], row["size"], row["chosen"], row["best"], statistics.median(shares)))
    return found


def regrets(rows: list[dict[str, Any]]) -> list[tuple[float, str, int]]:
    """Return for each row its regret, the time of the chosen algorithm divided by that of the best, and its collective
    and size. The largest regret is the first.
    """
    times = [(row, _cell(row, row["chosen"])["us"], _cell(row, row["best"])["us"]) for row in rows]
    return sorted(((ours / best, row["collective"], row["size"]) for row, ours, best in times), reverse=True)


def _cell(row: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the results of the algorithm `name`, which was measured in only one mode: in place, or out of place."""
    (cell,) = row["results"][name].values()
    found: dict[str, Any] = cell
    return found
