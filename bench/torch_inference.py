"""Compares all_reduce of bfloat16 tensors, as tensor-parallel inference on CPUs makes it, with gloo and DeepSpeed.

    pip download --no-deps --no-binary deepspeed --no-build-isolation deepspeed && tar xf deepspeed-*.tar.gz
    python bench/torch_inference.py -n 2 -n 4 --deepspeed deepspeed-0.19.8

The contenders take turns in rounds, on the same ranks and with the same ordinary tensors. "torch" is the all_reduce of
torch.distributed over the backend mscomm, "mscomm" is mscomm.all_reduce_, and "gloo" is the all_reduce of
torch.distributed over gloo. "deepspeed" is DeepSpeed's operator for shared memory, inference_all_reduce_. PyTorch
compiles it from the unpacked source package, and it needs a CPU with AVX-512; without --deepspeed, it is not measured.
Before the first round, the result of each contender is checked.

A time is the mean over the calls of a round, in microseconds, on the slowest rank. The tables show medians over the
rounds, and the times of gloo and DeepSpeed divided by those of mscomm, with intervals (see ratio.py).
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
import torch
import torch.distributed as dist
from ratio import interval, ratio

import mscomm

OURS, THEIRS = ("torch", "mscomm"), ("gloo", "deepspeed")
SIZES = [4 << 10 << shift for shift in range(9)]  # 4 KiB to 1 MiB
ROUND_S = 0.01  # how long the calls of one contender take in a round, about
SOURCES = ("shm.cpp", "shm_interface.cpp")

AllReduce = Callable[[torch.Tensor], object]


def build(package: Path) -> Path:
    """Compile DeepSpeed's operator with the flags of its own build, and return the library."""
    from torch.utils import cpp_extension

    made = cpp_extension.load(
        "deepspeed_shm_comm",
        [str(package / "csrc/cpu/comm" / name) for name in SOURCES],
        extra_cflags=["-O2", "-fopenmp", "-march=native"],
        extra_ldflags=["-fopenmp"],
    )
    return Path(made.__file__)


def load(library: Path, rank: int, size: int, address: str) -> AllReduce:
    """Load DeepSpeed's operator and map its shared memory, whose files have the address in their names."""
    import importlib.util

    os.environ.update(LOCAL_SIZE=str(size), MASTER_ADDR="local", MASTER_PORT=address)
    spec = importlib.util.spec_from_file_location(library.stem, library)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.initialize(size, rank)
    mscomm.barrier()
    Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_local_{address}_{rank}").unlink()
    return torch.ops.deepspeed.inference_all_reduce_  # type: ignore[no-any-return]


def check(name: str, all_reduce: AllReduce, count: int) -> None:
    """Raise an error if the sum over the ranks is wrong. The numbers and their sums are exact in bfloat16."""
    rank, size = mscomm.get_rank(), mscomm.get_group_size()
    parts = [(torch.arange(count) * (one + 3) % 31).to(torch.bfloat16) for one in range(size)]
    all_reduce(parts[rank])
    expected = sum((torch.arange(count) * (one + 3) % 31 for one in range(size)), torch.zeros(count)).to(torch.bfloat16)
    if not torch.equal(parts[rank], expected):
        raise RuntimeError(f"rank {rank}: {name} returned a wrong sum of {count} elements over {size} ranks")


def seconds(all_reduce: AllReduce, x: torch.Tensor, calls: int) -> float:
    """Return the mean time of a call on the slowest rank."""
    mscomm.barrier()
    began = time.perf_counter()
    for _ in range(calls):
        all_reduce(x)
    mine = (time.perf_counter() - began) / calls
    return float(mscomm.all_reduce(np.array(mine), op="max"))


def measure(folder: str, rounds: int, library: Path | None) -> dict[int, dict[str, list[float]]]:
    """Run on each rank. Return the times in microseconds of all rounds, for each size and each contender."""
    mscomm.init()
    rank, size = mscomm.get_rank(), mscomm.get_group_size()
    dist.init_process_group("mscomm", init_method=f"file://{folder}/store-{size}", rank=rank, world_size=size)
    gloo = dist.new_group(backend="gloo")
    contenders: dict[str, AllReduce] = {
        "torch": dist.all_reduce,
        "mscomm": mscomm.all_reduce_,
        "gloo": lambda x: dist.all_reduce(x, group=gloo),
    }
    if library:
        contenders["deepspeed"] = load(library, rank, size, f"{os.getppid()}-{size}")
    times: dict[int, dict[str, list[float]]] = {}
    with torch.inference_mode():
        for bytes_ in SIZES:
            x = torch.zeros(bytes_ // 2, dtype=torch.bfloat16)  # zeros, because in-place sums of others would overflow
            calls = {}
            for name, all_reduce in contenders.items():
                check(name, all_reduce, len(x))
                calls[name] = int(np.clip(ROUND_S / seconds(all_reduce, x, 5), 5, 2000))
            times[bytes_] = {name: [] for name in contenders}
            for turn in range(rounds):
                names = list(contenders)
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    times[bytes_][name].append(seconds(contenders[name], x, calls[name]) * 1e6)
    dist.destroy_process_group()
    return times


def table(times: dict[int, dict[str, list[float]]]) -> list[str]:
    theirs = [name for name in THEIRS if name in times[SIZES[0]]]
    ratios = [(one, other) for one in theirs for other in OURS]
    heads = ["KiB", *OURS, *theirs, *(f"{one}/{other}" for one, other in ratios)]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for bytes_, cells in times.items():
        medians = [f"{np.median(cells[name]):.1f}" for name in (*OURS, *theirs)]
        found = [ratio(cells[one], cells[other]) for one, other in ratios]
        bold = [f"**{one}**" if one.value < 1 else str(one) for one in found]
        lines.append(f"| {' | '.join([str(bytes_ >> 10), *medians, *bold])} |")
    return lines


@click.command(help=__doc__)
@click.option("-n", "ranks", type=click.IntRange(2), multiple=True, default=(2, 4), show_default=True, help="Ranks.")
@click.option("--rounds", type=click.IntRange(1), default=21, show_default=True, help="How many rounds.")
@click.option("--deepspeed", type=click.Path(exists=True, file_okay=False, path_type=Path), help="The source package.")
def main(ranks: tuple[int, ...], rounds: int, deepspeed: Path | None) -> None:
    if deepspeed and (missing := [name for name in SOURCES if not (deepspeed / "csrc/cpu/comm" / name).exists()]):
        raise click.BadParameter(f"{deepspeed} has no csrc/cpu/comm/{missing[0]}; unpack the source package")
    library = build(deepspeed) if deepspeed else None
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for size in ranks:
        with tempfile.TemporaryDirectory(prefix="mscomm-inference-") as folder:
            times = mscomm.launch(measure, size, folder, rounds, library)[0]
        print(f"\n{size} ranks, in brackets: {interval(rounds)}\n", *table(times), sep="\n", flush=True)
    if not deepspeed:
        print("\nDeepSpeed was not measured: give its unpacked source package with --deepspeed", file=sys.stderr)


if __name__ == "__main__":
    main()
