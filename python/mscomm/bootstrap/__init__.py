"""Finds the launcher through which this process joins its job.

There is one module per launcher. mscomm uses the first launcher in LAUNCHERS that recognises the environment.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from mscomm.bootstrap.invitation import Found, Launcher

# If launcher A can start launcher B, B comes before A, because B knows more about the ranks.
LAUNCHERS = (
    "launcher",
    "ms_cluster",
    "torchrun",
    "pmix",
    "pmi",
    "slurm",
    "torch_env",
    "rank_table",
    "kubernetes",
)


def find(
    env: Mapping[str, str],
    init_method: Any = None,
    rank: int | None = None,
    world_size: int | None = None,
    name: str = "",
) -> Launcher | None:
    """Return the launcher that the arguments of join() describe, or else the launcher that started this process.

    Return None if this process is a job of one rank.
    """
    if init_method not in (None, "env://") or rank is not None or world_size is not None:
        from mscomm.bootstrap import by_hand

        return by_hand.launcher(init_method, rank, world_size)
    launcher = _detected(env)
    if launcher is None:
        return None
    from mscomm.bootstrap import again

    return again.found(launcher, env, name)


def _detected(env: Mapping[str, str]) -> Found | None:
    for name in LAUNCHERS:
        launcher = cast(Found, importlib.import_module(f"{__name__}.{name}"))
        if launcher.detect(env):
            return launcher
    return None


class Announced(NamedTuple):
    """What the environment variables say about a process before it joins.

    `rank` or `size` is None if no variable gives it as a number.
    """

    launcher: str
    rank: int | None
    size: int | None


def announced(env: Mapping[str, str]) -> Announced | None:
    """Return what the environment variables alone say about this process; None if no launcher started it."""
    launcher = _detected(env)
    if launcher is None:
        return None
    texts = [next((env[name] for name in names if env.get(name)), "") for names in launcher.PLACE]
    rank, size = (int(text) if re.fullmatch(r"\d{1,9}", text, re.ASCII) else None for text in texts)
    return Announced(launcher.NAME, rank, size)
