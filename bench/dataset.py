"""Measures how many images per second the tutorials' pipeline yields, compared with PyTorch's DataLoader.

    python bench/dataset.py [--rounds 7] [--seconds 0.6]

The pipeline reads images of 32 x 32 pixels from files in CIFAR-10's format. It applies RandomCrop(32, padding 4),
RandomHorizontalFlip, Resize, Rescale, Normalize, HWC2CHW and TypeCast, and makes batches of 32. For PyTorch, this
script applies the same operations to Pillow images, as torchvision does, and keeps all images in memory from the
start. Both sides take turns in one run, and the results are medians over the rounds. CPU seconds include the time of
worker processes. The script prints the table of docs/performance.md.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader

import mscomm
import mscomm.dataset as ds
from mscomm.dataset import cifar10, transforms, vision

BATCH_SIZE, IMAGES = 32, 50_000
MEAN, STD = (0.4465, 0.4822, 0.4914), (0.2010, 0.1994, 0.2023)
RATES = {32: 20_000, 224: 1_500}  # image size -> approximate images per second; main() computes `images` from it


def by_mscomm(folder: Path, size: int, images: int, workers: int) -> Iterable[Any]:
    """Return the pipeline that create_dataset() builds in the tutorials."""
    data: ds.Dataset = ds.Cifar10Dataset(folder, "train", num_samples=images)
    data = data.map(operations=transforms.TypeCast(mscomm.int32), input_columns="label")
    image = [vision.RandomCrop((32, 32), (4, 4, 4, 4)), vision.RandomHorizontalFlip(), vision.Resize((size, size))]
    image += [vision.Rescale(1.0 / 255.0, 0.0), vision.Normalize(MEAN, STD), vision.HWC2CHW()]
    data = data.map(operations=image, input_columns="image", num_parallel_workers=workers)
    return data.shuffle(buffer_size=10).batch(BATCH_SIZE, drop_remainder=True).repeat(1)


class Pictures(torch.utils.data.Dataset[Any]):
    """A PyTorch dataset of CIFAR-10 images in memory. Each access to an image crops, flips and resizes it again."""

    def __init__(self, folder: Path, size: int, images: int) -> None:
        records = np.concatenate([np.fromfile(folder / name, np.uint8) for name in cifar10.TRAIN])
        records = records.reshape(-1, cifar10.RECORD_BYTES)[:images]
        self.images = np.ascontiguousarray(records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        self.labels = records[:, 0].tolist()
        self.size = size
        self.mean, self.std = (torch.tensor(numbers).view(3, 1, 1) for numbers in (MEAN, STD))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = ImageOps.expand(Image.fromarray(self.images[index]), border=4, fill=0)
        top, left = random.randrange(9), random.randrange(9)
        image = image.crop((left, top, left + 32, top + 32))
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if self.size != 32:
            image = image.resize((self.size, self.size), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
        return pixels.to(torch.float32).div_(255).sub_(self.mean).div_(self.std), self.labels[index]


def by_torch(folder: Path, size: int, images: int, workers: int) -> Iterable[Any]:
    return DataLoader(
        Pictures(folder, size, images),
        BATCH_SIZE,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )


def cpu_seconds() -> float:
    """Return the CPU seconds that this process and its children have used."""
    return time.process_time() + sum(sum(child.cpu_times()[:2]) for child in psutil.Process().children(recursive=True))


def measured(batches: Iterable[Any], images: int) -> tuple[float, float]:
    """Make one pass over `batches`. Return the images per CPU second, and the images per second."""
    cpu, began = cpu_seconds(), time.perf_counter()
    count = sum(len(image) for image, _ in batches)
    took, busy = time.perf_counter() - began, cpu_seconds() - cpu
    if count != images // BATCH_SIZE * BATCH_SIZE:
        raise RuntimeError(f"a pass gave {count} of {images} images")
    return count / busy, count / took


def write(folder: Path) -> None:
    """Write files in CIFAR-10's format with random pixels. They are as large as CIFAR-10's own files."""
    random_pixels = np.random.default_rng(1)
    for name in cifar10.TRAIN:
        records = random_pixels.integers(0, 256, (10_000, cifar10.RECORD_BYTES), np.uint8)
        records[:, 0] %= cifar10.CLASSES
        records.tofile(folder / name)


Make = Callable[[Path, int, int, int], Iterable[Any]]
# For each side: the function that makes its pipeline, and how many workers to start. The keys 1 and 2 are the numbers
# of workers in the printed table. For 1, PyTorch's DataLoader starts 0 workers, because its main process does the work.
SIDES: dict[str, tuple[Make, dict[int, int]]] = {
    "mscomm": (by_mscomm, {1: 1, 2: 2}),
    "torch": (by_torch, {1: 0, 2: 2}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.6, help="of one measurement, about (default: 0.6)")
    parser.add_argument("--sizes", type=lambda text: [int(size) for size in text.split(",")], default=list(RATES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| pixels | workers | images per CPU second: mscomm | PyTorch | ratio | per second: mscomm | PyTorch | ratio |"
    )
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write(folder)
        for size in args.sizes:
            for workers in (1, 2):
                if workers > (os.cpu_count() or 1):
                    continue
                images = min(IMAGES, int(RATES.get(size, 1_000) * args.seconds * workers))
                made = {name: make(folder, size, images, own[workers]) for name, (make, own) in SIDES.items()}
                rates: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
                for turn in range(args.rounds + 1):
                    for name, batches in made.items():
                        rate = measured(batches, images)
                        if turn:  # the first turn does not count, because it also reads files and starts workers
                            rates[name].append(rate)
                cells = []
                for kind in range(2):
                    ours, theirs = (statistics.median(rate[kind] for rate in rates[name]) for name in SIDES)
                    cells += [f"{ours:,.0f}", f"{theirs:,.0f}", f"{ours / theirs:.2f}"]
                print(f"| {size} | {workers} | {' | '.join(cells)} |", flush=True)
                del made  # ends PyTorch's workers


if __name__ == "__main__":
    main()
