"""Writes warnings about the whole job, on one rank only. Also has the table of options that have no effect.

mscomm accepts options without effect because scripts written for MindSpore set them. Each such option has a row in
WITHOUT_EFFECT, and a script that sets the option gets a warning.

Rank 0 writes the warnings. A process that has not joined a job yet reads its rank from its launcher's variables. If
the variables do not contain the rank, the process holds the warning until init() knows the rank. A process without a
launcher writes its own warnings.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from mscomm import bootstrap, log

_said: set[str] = set()
_waiting: list[str] = []
_rank: int | None = None  # set by know_rank()


def warn_once(text: str, rank: int | None = None) -> None:
    """Warn about the whole job, or about a group. Only rank 0 writes the text, and only once.

    rank: for a warning about a group, the rank of this process in the group.
    """
    if text in _said:
        return
    _said.add(text)
    speaks = _speaks() if rank is None else rank == 0
    if speaks is None:
        _waiting.append(text)
    elif speaks:
        log.warn(text)


def know_rank(rank: int) -> None:
    """Set this process's rank, which decides whether it writes warnings. Write or drop the pending warnings."""
    global _rank
    _rank = rank
    waiting, _waiting[:] = list(_waiting), []
    for text in waiting if rank == 0 else []:
        log.warn(text)


def _speaks() -> bool | None:
    if _rank is not None:
        return _rank == 0
    place = bootstrap.announced(os.environ)
    if place is None:
        return True
    return None if place.rank is None else place.rank == 0


# -- the table of options without effect, and their warnings


class Option(NamedTuple):
    """A row of WITHOUT_EFFECT."""

    silent: tuple[Any, ...]  # the values that cause no warning; the first is the default
    instead: str  # why the option has no effect, or what to do instead


_WORLD = (None, "hccl_world_group", "nccl_world_group", "mccl_world_group")
_OTHER_MODES = (
    "it belongs to MindSpore's auto-parallel modes; in data parallel mode there is nothing to search or slice"
)
_WHOLE = "in data parallel mode each rank's checkpoint has the whole weights"
_SUMS = "16-bit floats are summed in float32 in any case"
_DEALT = "each rank trains on all rows of its dataset; divide the rows with num_shards and shard_id"

WITHOUT_EFFECT: dict[tuple[str, str], Option] = {
    ("set_context", "mode"): Option((0,), "the framework decides how it computes (mindspore.set_context(mode=...))"),
    ("set_auto_parallel_context", "all_reduce_fusion_config"): Option(
        ([], (), None),
        'buckets follow the order of the gradients; comm_fusion={"allreduce": {"mode": "size", "config": MiB}} sets'
        " their size",
    ),
    ("set_auto_parallel_context", "auto_parallel_search_mode"): Option(("recursive_programming",), _OTHER_MODES),
    ("set_auto_parallel_context", "dataset_strategy"): Option(("data_parallel",), _DEALT),
    ("set_auto_parallel_context", "enable_alltoall"): Option((False,), _OTHER_MODES),
    ("set_auto_parallel_context", "force_fp32_communication"): Option((False,), _SUMS),
    ("set_auto_parallel_context", "full_batch"): Option((False,), _DEALT),
    ("set_auto_parallel_context", "gradient_fp32_sync"): Option((True,), _SUMS),
    ("set_auto_parallel_context", "loss_repeated_mean"): Option((True,), _OTHER_MODES),
    ("set_auto_parallel_context", "parallel_optimizer_config"): Option(
        (None, {}), "every rank has the whole optimizer; enable_parallel_optimizer is not in this release"
    ),
    ("set_auto_parallel_context", "search_mode"): Option(("recursive_programming",), _OTHER_MODES),
    ("set_auto_parallel_context", "strategy_ckpt_config"): Option((None, {}), _WHOLE),
    ("set_auto_parallel_context", "strategy_ckpt_load_file"): Option(("", None), _WHOLE),
    ("set_auto_parallel_context", "strategy_ckpt_save_file"): Option(("", None), _WHOLE),
    ("comm_fusion", "allgather"): Option((None,), _OTHER_MODES),
    ("comm_fusion", "reducescatter"): Option((None,), _OTHER_MODES),
    ("comm_fusion", "openstate"): Option(
        (True,), 'gradients are always fused; {"allreduce": {"mode": "size", "config": 1}} makes small buckets'
    ),
    ("CheckpointConfig", "async_save"): Option((False,), "a file is complete when its step ends"),
    ("save_checkpoint", "integrated_save"): Option((True,), _WHOLE),
    ("save_checkpoint", "async_save"): Option((False,), "the file is complete when the call returns"),
    ("Model.train", "dataset_sink_mode"): Option(
        (False,), "steps run one at a time, as on MindSpore's CPU, and each one calls the callbacks"
    ),
    ("Model.train", "sink_size"): Option((-1,), "there is no sink; an epoch is a pass over the dataset"),
    ("TimeMonitor", "data_time"): Option((False,), "StepTrace shows how long a rank has waited for data"),
    ("Send", "group_back"): Option(_WORLD, "no gradient flows through Send"),
    ("Receive", "group_back"): Option(_WORLD, "no gradient flows through Receive"),
    ("environment", "MS_ENABLE_RECOVERY"): Option(
        (None, "", "0"), "it is for a scheduler and workers; `mscomm run --max-restarts N` restarts lost ranks"
    ),
    ("environment", "MS_RECOVERY_PATH"): Option(
        (None, ""), "it is for a scheduler and workers with MS_ENABLE_RECOVERY=1"
    ),
}


def tell_without_effect(function: str, **options: Any) -> None:
    """Warn about each option that has a row in WITHOUT_EFFECT, unless its value is one of the row's silent values."""
    for name, value in options.items():
        row = WITHOUT_EFFECT.get((function, name))
        if row is not None and not any(value == quiet for quiet in row.silent):
            warn_once(f"{function}: {name}={value!r:.80} has no effect here: {row.instead}")
