"""Checks that all ranks have the same dataset, before they begin to use it."""

from __future__ import annotations

import socket
from hashlib import blake2b
from typing import Any

from mscomm import job, objects

# The facts that the ranks compare, and what the user can do if the ranks differ in a fact.
_CURES = {
    "rows": "Give every rank the same data.",
    "files": "Give every rank the same files.",
    "seed": "Call mscomm.dataset.config.set_seed with the same number on every rank.",
    "position": "Load the same state on every rank.",
    "pipeline": "Build the same pipeline on every rank.",
}


def compare(source: str, num_shards: int, facts: dict[str, Any], where: str, problem: Exception | None) -> None:
    """Raise ValueError on every rank if the ranks' facts differ, or if a rank has a problem.

    source, where: the names of the dataset and of this rank's data in error messages. problem: the exception that this
    rank got when it read its data, or None. A rank with a problem raises this exception, not ValueError. If no job was
    joined, or if num_shards is not the size of the job, the ranks compare nothing, and only a rank with a problem
    raises an error.
    """
    alone = not job.is_initialized() or num_shards < 2 or num_shards != job.get_group_size()
    if not alone:
        mine = {"facts": facts, "where": f"{where} on {socket.gethostname()}", "problem": problem and str(problem)}
        ranks = objects.all_gather_object(mine)
    if problem is not None:
        raise problem
    if alone:
        return
    broken = [
        f"rank {rank} ({theirs['where']}): {theirs['problem']}"
        for rank, theirs in enumerate(ranks)
        if theirs["problem"]
    ]
    if broken:
        raise ValueError(f"{source}: another rank cannot read its data. " + "; ".join(broken))
    differing = [name for name in _CURES if any(theirs["facts"].get(name) != facts.get(name) for theirs in ranks)]
    # If the rows differ, the descriptions of the pipelines differ, too, so only the rows are reported.
    if "rows" in differing and "pipeline" in differing:
        differing.remove("pipeline")
    if differing:
        raise ValueError(_tell(source, ranks, differing))


def _tell(source: str, ranks: list[Any], differing: list[str]) -> str:
    kinds: dict[str, list[int]] = {}  # for each set of facts: the ranks that sent these facts
    for rank, theirs in enumerate(ranks):
        kinds.setdefault(repr(theirs["facts"]), []).append(rank)
    firsts = [ranks[members[0]] for members in kinds.values()]
    lines = [f"{source}: the ranks would not train on the same data; they differ in {' and '.join(differing)}."]
    for theirs, members in zip(firsts, kinds.values(), strict=True):
        values = [f"{name} {_short(name, theirs['facts'].get(name))}" for name in differing]
        who = "rank" if len(members) == 1 else "ranks"
        lines.append(f"  {who} {', '.join(map(str, members))} ({theirs['where']}): {', '.join(values)}")
    files = [{name: tuple(what) for name, *what in theirs["facts"].get("files") or []} for theirs in firsts]
    odd = sorted(name for name in set().union(*files) if len({one.get(name) for one in files}) > 1)
    if odd:
        lines.append(f"  Not the same everywhere: {', '.join(odd)}.")
    return "\n".join(
        [*lines, *(f"  {_CURES[name]}" for name in differing if name != "rows" or "files" not in differing)]
    )


def _short(name: str, value: Any) -> str:
    if name == "files" and value:
        whole = blake2b(repr(value).encode(), digest_size=6).hexdigest()
        return f"with the hash {whole}"
    return str(value)
