"""Fixtures for the mscomm.dataset tests."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from images import write
from pipelines import none_is_left

from mscomm.dataset import cifar10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write files with 84 rows for training and 12 for testing. Return their folder."""
    return write(tmp_path_factory.mktemp("data") / "cifar-10-batches-bin")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write files as large as CIFAR-10's. They contain only zeros, and take no disk space because they are sparse."""
    folder = tmp_path_factory.mktemp("full") / "cifar-10-batches-bin"
    folder.mkdir()
    for name in (*cifar10.TRAIN, cifar10.TEST):
        with open(folder / name, "wb") as file:
            file.truncate(10_000 * cifar10.RECORD_BYTES)
    return folder


@pytest.fixture
def no_thread_before():
    gc.collect()
    assert none_is_left()
