"""Chooses the checkpoint to resume from: the newest one that is complete and undamaged on all ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mscomm import log, objects
from mscomm.group import Group
from mscomm.train import serialization
from mscomm.train.serialization import Saved

Weights = dict[str, np.ndarray[Any, Any]]
Resumed = tuple[Saved, Weights, dict[str, Any]]  # a checkpoint, its weights and its state


def agree_on(path: Path, group: Group | None) -> Resumed | None:
    """Return the checkpoint to resume from, its weights and its state. Return None if there is nothing to resume.

    All ranks of the group must call this, each with its own directory or file. If path is a file, the checkpoint gets
    the prefix "", so that training begins a new series of files. The arrays of a file are read only after the ranks
    have chosen this file. If the file turns out to be damaged on one rank, all ranks choose the next older checkpoint.
    All ranks raise ValueError if they cannot agree. Return None also if other ranks are already in Model.train and go
    on after a failure. train() then chooses the checkpoint.
    """
    is_file = path.is_file() or path.suffix == serialization.SUFFIX
    found: list[Saved] = []
    problem = ""
    try:
        found = [serialization.saved(path)._replace(prefix="")] if is_file else serialization.complete(path)
    except (OSError, ValueError) as error:
        problem = str(error)
    newest = serialization.newest_prefix(found)
    # Files that earlier versions of mscomm wrote have no run. Keep such a file only if it has the newest file's prefix.
    found = [one for one in found if one.run or one.prefix == newest]
    while True:
        files = [tuple(one) for one in found]
        offers = _gathered([files, problem, os.path.realpath(path)], group)
        if not all(isinstance(offer, list) for offer in offers):
            log.info("Model.resume: the other ranks go on after a failure, so train() chooses the checkpoint")
            return None
        place, told = _newest_of_all([_Offer([Saved(*one) for one in files], *rest) for files, *rest in offers])
        if told and (group is None or group.rank == 0):
            log.warn(f"Model.resume: {told}")
        if place is None:
            return None
        chosen = next(one for one in found if one.place == place)
        content, fault = _read(chosen.path)
        if not any(_gathered(fault, group)) and content is not None:
            return (chosen._replace(run="") if is_file else chosen), *content
        if fault and is_file:
            problem = fault
        elif fault and len(found) == 1:
            problem = f"no complete checkpoint in {path}: {fault}"
        elif fault:
            log.warn(f"checkpoint left out: {fault}")
            found.remove(chosen)


def newest_common(directory: Path, group: Group, run: str) -> Resumed | None:
    """Return the newest checkpoint that is complete and undamaged on all ranks, or None if there is none.

    Only checkpoints of the given training run are considered; "" stands for the run that wrote the newest file. All
    ranks of the group must call this. A line says which checkpoints are left out.
    """
    found = undamaged(directory)
    while True:
        offers = [[Saved(*one) for one in files] for files in _gathered([tuple(one) for one in found], group)]
        files = [one for offer in offers for one in offer]
        last = run or max(files, key=lambda one: one.time).run if files else run
        have = [{one.place for one in offer if one.run == last} for offer in offers]
        common = set.intersection(*have)
        chosen = max(common, key=_steps, default=None)
        for epoch, step in sorted({_steps(place) for place in set.union(*have) - common}):
            if group.rank == 0 and (chosen is None or (epoch, step) > _steps(chosen)):
                log.warn(f"Model.train: checkpoint {epoch}_{step} is left out, because not every rank has it")
        if chosen is None:
            return None
        mine = next(one for one in found if one.place == chosen)
        content, fault = _read(mine.path)
        if not any(_gathered(fault, group)) and content is not None:
            return mine, *content
        if fault:
            log.warn(f"checkpoint left out: {fault}")
            found.remove(mine)


def is_of_train(offer: Any) -> bool:
    """Return whether a gathered object comes from train() without recovery, rather than from resume()."""
    return isinstance(offer, list) and isinstance(offer[0], dict)


def undamaged(directory: Path) -> list[Saved]:
    """Return a directory's complete checkpoints. Warn about incomplete ones."""
    try:
        return serialization.complete(directory)
    except (OSError, ValueError) as error:
        log.warn(f"checkpoints left out: {error}")
        return []


def _read(path: Path) -> tuple[tuple[Weights, dict[str, Any]] | None, str]:
    """Return the weights and the state in a file, or None, and what is wrong with the file, or ""."""
    try:
        return serialization.load_training(path), ""
    except (OSError, ValueError) as error:
        return None, str(error)


def _gathered(mine: Any, group: Group | None) -> list[Any]:
    """Return the values of all ranks of the group, or only this rank's value if there is no group."""
    return [mine] if group is None else objects.all_gather_object(mine, group=group)


class _Offer(NamedTuple):
    """Holds what a rank tells the other ranks: its checkpoints, its problem (or ""), and its path."""

    files: list[Saved]
    problem: str
    path: str


def _newest_of_all(offers: list[_Offer]) -> tuple[tuple[str, int, int, str] | None, str]:
    """Return the place of the newest checkpoint that all ranks have (or None), and a warning text (or "").

    Only checkpoints of the training run that wrote the newest file are considered. Raise ValueError if a rank has a
    problem, or if the run got further than its first checkpoint but there is no checkpoint that all ranks have.
    """
    for rank, offer in enumerate(offers):
        if offer.problem:
            who = f"rank {rank} of the group: " if len(offers) > 1 else ""
            raise ValueError(f"Model.resume: {who}{offer.problem}")
    files = [one for offer in offers for one in offer.files]
    if not files:
        return None, ""
    last = max(files, key=lambda one: one.time).run
    have = [{one.place for one in offer.files if one.run == last} for offer in offers]
    common = set.intersection(*have)
    if common:
        return max(common, key=_steps), ""
    newest = ", ".join(
        "{}_{}".format(*max(map(_steps, places))) + f" on rank {rank}" for rank, places in enumerate(have) if places
    )
    without = [rank for rank, places in enumerate(have) if not places]
    if all(one.first for one in files if one.run == last):
        missing = f"; rank {without[0]} has none" if without else ""
        return None, (
            f"training begins at step 0: not every rank has written the first checkpoint ({newest}{missing}). The files"
            " stay where they are"
        )
    if without:
        rank, other = without[0], next(rank for rank, places in enumerate(have) if places)
        which = "of the last training " if offers[rank].files else ""
        raise ValueError(
            f"Model.resume: rank {rank} of the group has no checkpoint {which}in {offers[rank].path}, rank {other} has"
            f" {len(have[other])}; delete those to begin anew"
        )
    raise ValueError(f"Model.resume: there is no checkpoint that every rank has; the newest are {newest}")


def _steps(place: tuple[str, int, int, str]) -> tuple[int, int]:
    return place[1:3]
