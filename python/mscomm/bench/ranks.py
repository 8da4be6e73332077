"""What each rank of `mscomm bench` does: it joins, creates contenders, and measures them in turn. Rank 0 reports."""

from __future__ import annotations

import sys

import numpy as np

import mscomm
from mscomm.bench import report
from mscomm.bench.contenders import ourselves
from mscomm.bench.measuring import Result, of_size, rehearse, telling
from mscomm.bench.peers import PEERS, Unfit
from mscomm.bench.plan import BUCKETS, TUNE, Plan
from mscomm.bench.table import Case


def run(plan: Plan, wanted_ranks: int | None) -> None:
    """Measure and report. Exit with status 1 on every rank if something cannot be measured or if a result is wrong."""
    mscomm.init()
    rank, ranks = mscomm.get_rank(), mscomm.get_group_size()
    with telling(rank):
        if wanted_ranks not in (None, ranks):
            raise Unfit(f"-n {wanted_ranks}, but {mscomm.get_launcher()} started {ranks} ranks; leave out -n")
        if plan.root >= ranks:
            raise Unfit(f"root {plan.root} is not a rank: there are {ranks}")
    if plan.collective == BUCKETS:
        from mscomm.bench import buckets

        result = buckets.measure(plan, rank, ranks)
    elif plan.collective == TUNE:
        from mscomm.bench import tune

        result = tune.measure(plan, rank, ranks)
    else:
        result = _measure(plan, plan.case(rank, ranks))
    wrong = 0
    if rank == 0:
        wrong = report.finish(plan, result)
    if int(mscomm.all_reduce(np.array([wrong]))[0]):
        sys.exit(1)


def _measure(plan: Plan, case: Case) -> Result:
    contenders = [ourselves(case, plan.shared)]
    for name in plan.peers:
        with telling(case.rank):
            contenders.append(PEERS[name].start(case, plan.prefixes.get(name)))
    counts = plan.counts(case)
    for contender in contenders:
        for in_place in plan.modes(case):
            with telling(case.rank):
                rehearse(contender, counts[0], in_place)
    result: Result = {"environment": report.environment(case.ranks), "rows": []}
    result["environment"]["contenders"] = {contender.name: contender.about for contender in contenders}
    if case.rank == 0:
        report.head(plan, case, result["environment"])
    for count in counts:
        row = {"size": case.size(count), "count": count, "results": of_size(plan, case, contenders, count)}
        result["rows"].append(row)
        if case.rank == 0:
            report.row(plan, case, row)
    for contender in contenders:
        contender.close()
    return result
