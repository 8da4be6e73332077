"""Saves and loads weights (save_checkpoint, load_checkpoint, load_param_into_net), and finds the checkpoints in a
directory."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mscomm import log, notices
from mscomm.arrays import memory_anywhere, on_host
from mscomm.train import networks, states, tensorfile, trees

SUFFIX = ".safetensors"
# Keys in the metadata of mscomm's files, for the fields of Saved, the training state, and the append_dict of
# save_checkpoint.
EPOCH, STEP, SAVED, RUN, PART, FIRST, STATE, APPENDED, SLICES = (
    f"mscomm.{word}" for word in ("epoch", "step", "saved", "run", "part", "first", "state", "appended", "slices")
)
_NAME = re.compile(rf"(?P<prefix>.+)-(?P<epoch>\d+)_(?P<step>\d+){re.escape(SUFFIX)}")


class Saved(NamedTuple):
    """Describes a checkpoint file that ModelCheckpoint has written."""

    path: Path
    prefix: str
    epoch: int
    step: int
    time: float  # when the file was written, in seconds since 1970
    # run and part are random names that are the same on all ranks, or "" in files that earlier versions of mscomm
    # wrote. run identifies the training run, from its first step to its last. part identifies the call of train() that
    # wrote the file, because a resumed run may write the same step again.
    run: str
    part: str
    first: bool  # whether this is the first file of the training run

    @property
    def place(self) -> tuple[str, int, int, str]:
        """Identifies the checkpoint. The value is the same on all ranks, and no two checkpoints of a rank have the same
        value."""
        return self.run, self.epoch, self.step, self.part


def save_checkpoint(
    save_obj: Any,
    ckpt_file_name: str | os.PathLike[str],
    integrated_save: bool = True,
    async_save: bool = False,
    append_dict: dict[str, Any] | None = None,
) -> None:
    """Write a network's weights to a safetensors file, completely or not at all.

    save_obj: a network as for Model, or a dict of arrays, possibly nested. ckpt_file_name: a name without a suffix gets
    `.safetensors`; the format is safetensors in any case. append_dict: numbers and strings that load_checkpoint returns
    with the weights. integrated_save, async_save: no effect, because a file always holds the whole weights and is
    complete when the call returns; values other than the defaults print a warning.

    Raise TypeError for a value that a file cannot hold, and OSError if the file cannot be written; an older file with
    the same name is then unchanged.

    >>> mscomm.save_checkpoint(net, "resnet", append_dict={"accuracy": 0.93})
    """
    notices.tell_without_effect("save_checkpoint", integrated_save=integrated_save, async_save=async_save)
    weights = trees.leaves(save_obj) if isinstance(save_obj, dict) else networks.adapt(save_obj).weights()
    arrays = {name: on_host(x, name, "save_checkpoint") for name, x in weights.items()}
    for name, value in (append_dict or {}).items():
        if not isinstance(value, bool | int | float | str):
            raise TypeError(f"save_checkpoint: append_dict[{name!r}] is a {type(value).__name__}; expected a number")
    path = Path(ckpt_file_name)
    path = path if path.suffix else path.with_suffix(SUFFIX)
    tensorfile.write(path, arrays, {APPENDED: json.dumps(append_dict)} if append_dict else {})


def load_checkpoint(
    ckpt_file_name: str | os.PathLike[str],
    net: Any = None,
    strict_load: bool = False,
    filter_prefix: str | list[str] | tuple[str, ...] | None = None,
) -> dict[str, Any]:
    """Return the weights in a file, or in a directory's newest complete checkpoint, as {name: NumPy array}.

    ckpt_file_name: any safetensors file, or a directory that ModelCheckpoint has written to. In a directory, files that
    are truncated, damaged or not checkpoints are skipped, and a line on stderr names each of them. net: if given, the
    weights are also loaded into this network, as by load_param_into_net. filter_prefix: a string or several; weights
    whose names begin with one of them are left out. The result also has the entries of save_checkpoint's append_dict.
    It does not have the state of the training run, which Model.resume loads.

    Raise FileNotFoundError if there is no such file or checkpoint, and ValueError if a file is truncated or damaged.

    >>> weights = mscomm.load_checkpoint("checkpoints_0")
    >>> mscomm.load_param_into_net(net, weights)
    ([], [])
    """
    path = Path(ckpt_file_name)
    if not path.exists() and path.with_name(path.name + SUFFIX).exists():
        path = path.with_name(path.name + SUFFIX)
    if path.is_dir():
        arrays, metadata = _newest_undamaged(path)
    else:
        arrays, metadata = tensorfile.read(path)
    left_out = (filter_prefix,) if isinstance(filter_prefix, str) else tuple(filter_prefix or ())
    result: dict[str, Any] = {name: x for name, x in arrays.items() if not name.startswith((states.PREFIX, *left_out))}
    if APPENDED in metadata:
        result |= _appended(path, metadata[APPENDED])
    if net is not None:
        load_param_into_net(net, result, strict_load)
    return result


def _appended(path: Path, text: str) -> dict[str, bool | int | float | str]:
    """Return save_checkpoint's append_dict from a file's metadata. Raise ValueError if the text is something else."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(text)
        if isinstance(found, dict) and all(isinstance(value, bool | int | float | str) for value in found.values()):
            return found
    raise ValueError(f"{path}: {APPENDED} is not a dict of numbers and strings, as save_checkpoint writes it")


def load_param_into_net(
    net: Any, parameter_dict: dict[str, Any], strict_load: bool = False
) -> tuple[list[str], list[str]]:
    """Load weights into a network by name.

    Return two lists of names: those that only the network has, and those that only the dict has.

    net: a network as for Model, except a JAX function, which has no weights of its own. parameter_dict: the result of
    load_checkpoint, or a dict {name: array} with arrays of any known library. strict_load: if True, dtypes must be the
    same as in the network; if False, float weights of another precision are converted. Raise ValueError if a shape or
    dtype does not fit; the network is then unchanged.
    """
    network = networks.adapt(net)
    there = network.weights()
    given = {name: on_host(x, name, "load_param_into_net") for name, x in parameter_dict.items() if name in there}
    if strict_load:
        for name, x in given.items():
            mine = memory_anywhere(there[name], name, "load_param_into_net").dtype
            if x.dtype != mine:
                raise ValueError(f"load_param_into_net: {name} is {x.dtype}, the network's is {mine}")
    try:
        network.load(given)
    except ValueError as error:
        raise ValueError(f"load_param_into_net: {error}") from None
    return [name for name in there if name not in given], [name for name in parameter_dict if name not in given]


def load_distributed_checkpoint(
    network: Any, checkpoint_filenames: Sequence[str | os.PathLike[str]]
) -> tuple[list[str], list[str]]:
    """Merge the parts of weights that the ranks of a divided network have saved, and load the whole weights.

    network: as in load_param_into_net, not divided. checkpoint_filenames: the files that ModelCheckpoint wrote with
    integrated_save=False at one step, of all ranks, in any order. The number of ranks and the strategies of a later
    training may differ. Return the result of load_param_into_net. This function needs PyTorch.

    Raise ValueError if a file is damaged or has no parts, if the files are of different steps, or if the file of a rank
    is missing; the network is then unchanged.

    >>> files = [f"checkpoints/{rank}/CKP-5_4.safetensors" for rank in range(8)]
    >>> mscomm.load_distributed_checkpoint(net, files)
    ([], [])
    """
    from mscomm.parallel.layout import Mesh

    merged: dict[str, np.ndarray[Any, Any]] = {}
    ranks: dict[int, Path] = {}
    first: tuple[Any, ...] | None = None
    for path in map(Path, checkpoint_filenames):
        arrays, metadata = tensorfile.read(path)
        rank, mesh, axes = _slices(path, metadata)
        place = (metadata.get(RUN), metadata.get(EPOCH), metadata.get(STEP), metadata.get(PART), mesh, axes)
        if first is not None and place != first:
            raise ValueError(f"load_distributed_checkpoint: {path} is of another step or training than the other files")
        first = place
        ranks[rank] = path
        for name, dims in axes.items():
            part = arrays[name]
            index = [Mesh(mesh).index(rank, one) for one in dims]
            shape = [size * Mesh(mesh).parts(one) for size, one in zip(part.shape, dims, strict=True)]
            whole = merged.setdefault(name, np.empty(shape, part.dtype))
            place_of = tuple(slice(i * size, (i + 1) * size) for i, size in zip(index, part.shape, strict=True))
            whole[place_of] = part
    count = math.prod(first[4]) if first is not None else 1
    missing = [rank for rank in range(count) if rank not in ranks]
    if missing:
        raise ValueError(f"load_distributed_checkpoint: the files of the ranks {missing} of {count} are missing")
    return load_param_into_net(network, merged)


def _slices(path: Path, metadata: dict[str, str]) -> tuple[int, tuple[int, ...], dict[str, list[tuple[int, ...]]]]:
    """Return (rank, sizes of the mesh, axes of each dimension of each array) of a file with parts of weights."""
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        found = json.loads(metadata[SLICES])
        rank, mesh = int(found["rank"]), tuple(map(int, found["mesh"]))
        axes = {name: [tuple(map(int, one)) for one in dims] for name, dims in found["axes"].items()}
        used = [axis for dims in axes.values() for one in dims for axis in one]
        if 0 <= rank < math.prod(mesh) and all(0 <= axis < len(mesh) for axis in used) and all(n > 1 for n in mesh):
            return rank, mesh, axes
    raise ValueError(f"load_distributed_checkpoint: {path} has no parts of weights of a divided network")


def _newest_undamaged(directory: Path) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, str]]:
    """Read the newest undamaged checkpoint among those that have the prefix of the newest file."""
    found = complete(directory)
    if not found:
        raise FileNotFoundError(f"load_checkpoint: there is no checkpoint in {directory}")
    newest, faults = newest_prefix(found), []
    series = sorted((one for one in found if one.prefix == newest), key=lambda one: (one.epoch, one.step))
    for one in reversed(series):
        try:
            return tensorfile.read(one.path)
        except (OSError, ValueError) as error:
            log.warn(f"checkpoint left out: {error}")
            faults.append(str(error))
    raise ValueError(f"no complete checkpoint in {directory}: {'; '.join(faults)}")


def save_training(path: Path, weights: dict[str, Any], state: dict[str, Any], time: float, first: bool) -> None:
    """Write a file for load_training.

    state: a dict with at least the keys epoch, step, run and part. time, first: see Saved.
    """
    text, arrays = states.to_text(state)
    arrays |= {name: on_host(x, name, "ModelCheckpoint") for name, x in weights.items()}
    place = {EPOCH: str(state["epoch"]), STEP: str(state["step"]), SAVED: repr(time)}
    training = {RUN: state["run"], PART: state["part"], FIRST: str(int(first))}
    slices = {SLICES: json.dumps(state["slices"])} if state.get("slices") else {}
    tensorfile.write(path, arrays, {**place, **training, **slices, STATE: text})


def load_training(path: Path) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
    """Return the weights and the state in a file. Raise ValueError if the file has only weights."""
    arrays, metadata = tensorfile.read(path)
    if SLICES in metadata:
        raise ValueError(
            f"{path}: has only one rank's parts of the weights (integrated_save=False); load_distributed_checkpoint"
            " merges the files of all ranks"
        )
    if STATE not in metadata:
        raise ValueError(f"{path}: has weights, but no training state; use load_checkpoint for the weights")
    weights = {name: x for name, x in arrays.items() if not name.startswith(states.PREFIX)}
    return weights, states.from_text(metadata[STATE], arrays)


def saved(path: Path) -> Saved:
    """Return the description of a checkpoint file. Raise ValueError if the file is not a complete checkpoint."""
    metadata = tensorfile.read_metadata(path)
    name = _NAME.fullmatch(path.name)
    try:
        epoch, step, time = int(metadata[EPOCH]), int(metadata[STEP]), float(metadata[SAVED])
    except (KeyError, ValueError):
        raise ValueError(f"{path}: a safetensors file, but not one that ModelCheckpoint wrote") from None
    run, part, first = (metadata.get(key, "") for key in (RUN, PART, FIRST))
    return Saved(path, name["prefix"] if name else "", epoch, step, time, run, part, first == "1")


def named_like_one(directory: Path) -> list[tuple[Path, str, int, int]]:
    """Return (path, prefix, epoch, step) for each file that has the name of a checkpoint."""
    found = ((path, _NAME.fullmatch(path.name)) for path in sorted(directory.iterdir()))
    return [(path, name["prefix"], int(name["epoch"]), int(name["step"])) for path, name in found if name]


def complete(directory: Path) -> list[Saved]:
    """Return a directory's complete checkpoints. Warn about incomplete ones. Raise ValueError if all are incomplete.

    Damage in the arrays of a file is detected only when the arrays are read.
    """
    found, faults = [], []
    for path, *_ in named_like_one(directory) if directory.is_dir() else []:
        try:
            found.append(saved(path))
        except (OSError, ValueError) as error:
            faults.append(str(error))
    if faults and not found:
        raise ValueError(f"no complete checkpoint in {directory}: {'; '.join(faults)}")
    for fault in faults:
        log.warn(f"checkpoint left out: {fault}")
    return found


def newest_prefix(found: list[Saved]) -> str:
    """Return the prefix of the newest file, or "" if there are no files."""
    return max(found, key=lambda one: one.time).prefix if found else ""
