"""What the ranks of some soak.py jobs do: they train with uneven data, or resume from damaged checkpoints.

All ranks of the job call these functions, which raise WrongResult if the ranks end with different or wrong weights.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import mscomm
from mscomm.train import CheckpointConfig, GradientReducer, Model, ModelCheckpoint, Momentum

MOST_STEPS = 12
BATCHES, EPOCHS = 5, 4  # checkpoints are damaged after half of the epochs
DAMAGES = ("nothing", "a bit", "the end", "the file", "a bit of each", "all files")


class WrongResult(Exception):
    """A collective gave a different result from NumPy's, or a training run gave wrong weights."""


def same_everywhere(what: str, arrays: dict[str, Any]) -> None:
    sums = mscomm.all_gather_object({name: zlib.crc32(np.ascontiguousarray(x)) for name, x in arrays.items()})
    for rank, theirs in enumerate(sums):
        if theirs != sums[0]:
            raise WrongResult(f"{what}: ranks 0 and {rank} differ: {sums[0]}, {theirs}")


# -- uneven data


def train_unevenly(job: dict[str, Any], misbehave: Callable[[], None]) -> None:
    """Train for this rank's number of steps inside join(). The victim misbehaves in one of its steps."""
    rank, steps = mscomm.get_rank(), job["steps"]
    weights, expected = Weights(), Weights()
    reducer = GradientReducer(weights.parameters)
    with reducer.join(sync=[weights.optimizer]):
        for step in range(steps[rank]):
            if rank == job["victim"] and step == job["at"] % steps[rank]:
                misbehave()
            weights.optimizer.step(reducer.reduce(gradients(rank, step)))
    for step in range(max(steps)):
        active = [gradients(one, step) for one in range(len(steps)) if step < steps[one]]
        expected.optimizer.step({name: sum(one[name] for one in active) / len(active) for name in active[0]})
    same_everywhere(f"steps {steps}", {**weights.parameters, "momentum": momentum(weights.optimizer)})
    for name, x in expected.parameters.items():
        if not np.allclose(weights.parameters[name], x, rtol=1e-12):
            raise WrongResult(f"steps {steps}: {name} is {weights.parameters[name][:3]}, and not {x[:3]}")


class Weights:
    def __init__(self) -> None:
        self.parameters = {"long": np.zeros(1000), "short": np.zeros(3)}
        self.optimizer = Momentum(self.parameters, 0.5, 0.5)


def gradients(rank: int, step: int) -> dict[str, Any]:
    return {"long": np.arange(1000.0) % (rank + 2) + step, "short": np.full(3, (rank + 1.0) * (step + 1))}


def momentum(optimizer: Momentum) -> Any:
    return np.concatenate(optimizer.state_dict()["velocities"])


# -- damaged checkpoints


def go_on_from_damaged(job: dict[str, Any]) -> None:
    """Train for half of the epochs, damage checkpoints of the victim, and resume. The final weights must be
    bit-identical to those of an uninterrupted training run. If the victim has no intact checkpoint, resume() may fail,
    but then on all ranks.
    """
    rank = mscomm.get_rank()
    draw = random.Random(f"{job['seed']}:damage")
    config = CheckpointConfig(draw.randint(1, 3), keep_checkpoint_max=draw.randint(2, 4))
    damage, folder = draw.choice(DAMAGES), Path(job["folder"], f"checkpoints {rank}")
    mscomm.set_auto_parallel_context(parallel_mode=mscomm.ParallelMode.DATA_PARALLEL, gradients_mean=True)

    undisturbed = Line()
    undisturbed.model.train(EPOCHS, Data(rank))
    Line().model.train(EPOCHS // 2, Data(rank), ModelCheckpoint("line", str(folder), config))
    if rank == job["victim"]:
        damage_files(damage, sorted(folder.glob("*.safetensors"), key=place), draw)
    mscomm.barrier()
    resumed = Line()
    try:
        said: Any = resumed.model.resume(folder)
    except ValueError as error:
        said = str(error)
    everybodys = mscomm.all_gather_object(said)
    if any(isinstance(one, str) for one in everybodys):
        lost = damage in ("a bit of each", "all files")
        if not (lost and all(isinstance(one, str) for one in everybodys)):
            raise WrongResult(f"resume after damage to {damage}: {everybodys}")
        return
    if len(set(everybodys)) > 1:
        raise WrongResult(f"resume after damage to {damage}: ranks go on from {everybodys}")
    resumed.model.train(EPOCHS, Data(rank), ModelCheckpoint("line", str(folder), config))
    same_everywhere(f"after damage to {damage}", resumed.parameters)
    for name, x in undisturbed.parameters.items():
        if not np.array_equal(resumed.parameters[name], x):
            raise WrongResult(
                f"after damage to {damage}, from {said}: {name} is not that of a training without a break"
            )


def place(path: Path) -> tuple[int, ...]:
    return tuple(map(int, path.stem.rpartition("-")[2].split("_")))


def damage_files(damage: str, files: list[Path], draw: random.Random) -> None:
    newest = files[-1]
    if damage == "a bit":
        flip_a_bit(newest, draw)
    elif damage == "the end":
        newest.write_bytes(newest.read_bytes()[: -draw.randint(1, 50)])
    elif damage == "the file":
        newest.unlink()
    elif damage == "a bit of each":
        for path in files:
            flip_a_bit(path, draw)
    elif damage == "all files":
        for path in files:
            path.unlink()


def flip_a_bit(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    bit = draw.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


class Line:
    """A linear network, and the Model that trains it."""

    def __init__(self) -> None:
        self.parameters = {"weight": np.zeros((1, 3), np.float32), "bias": np.zeros(1, np.float32)}
        self.model = Model(self, optimizer=Momentum(self.parameters, 0.05, 0.9))

    def loss_and_gradients(self, x: Any, y: Any) -> Any:
        off = x @ self.parameters["weight"].T + self.parameters["bias"] - y
        scale = np.float32(2 / len(x))
        return (off**2).mean(), {"weight": scale * off.T @ x, "bias": scale * off.sum(0)}


class Data:
    """Yields the same batches in each epoch. Each rank has different batches."""

    def __init__(self, rank: int) -> None:
        rng = np.random.default_rng(rank)
        self._x = rng.normal(size=(BATCHES, 4, 3)).astype(np.float32)

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Any]:
        for x in self._x:
            yield x, x.sum(1, keepdims=True) + 1
