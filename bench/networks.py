"""The networks that the training benchmarks train, each with a batch of inputs and their labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

Batch = tuple[Any, Any]  # inputs, labels


def mlp() -> tuple[nn.Module, Batch]:  # much data to exchange, little to compute
    layers = (nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    return nn.Sequential(*layers), (torch.randn(64, 512), torch.randint(0, 10, (64,)))


def deep() -> tuple[nn.Module, Batch]:  # many small gradients
    layers = [layer for _ in range(40) for layer in (nn.Linear(128, 128), nn.LayerNorm(128), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(128, 10)), (torch.randn(64, 128), torch.randint(0, 10, (64,)))


def cnn() -> tuple[nn.Module, Batch]:
    blocks: list[Any] = []
    for before, after in ((3, 32), (32, 64), (64, 128), (128, 256)):
        blocks += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(256 * 4, 10)), images(16)


def images(count: int, size: int = 32) -> Batch:
    return torch.randn(count, 3, size, size), torch.randint(0, 10, (count,))


class Bottleneck(nn.Module):
    """A block of ResNet-50."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after)),
        )
        self.shortcut = nn.Sequential()
        if before != after or stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Any) -> Any:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet50() -> tuple[nn.Module, Batch]:
    def blocks() -> Iterator[nn.Module]:
        before = 64
        for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for i in range(count):
                yield Bottleneck(before, width, stride if i == 0 else 1)
                before = 4 * width

    stem = (nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))
    return nn.Sequential(*stem, *blocks(), *head), images(4, 64)


def transformer() -> tuple[nn.Module, Batch]:
    width, length, words = 256, 64, 1000
    layers = [nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True) for _ in range(4)]
    network = nn.Sequential(nn.Embedding(words, width), *layers, nn.Flatten(0, 1), nn.Linear(width, words))
    return network, (torch.randint(0, words, (4, length)), torch.randint(0, words, (4 * length,)))


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "mlp": mlp,
    "deep": deep,
    "cnn": cnn,
    "resnet50": resnet50,
    "transformer": transformer,
}


def network(name: str) -> tuple[Any, Batch]:
    """Return the network and its batch. In all processes, both are the same."""
    torch.manual_seed(0)
    return NETWORKS[name]()
