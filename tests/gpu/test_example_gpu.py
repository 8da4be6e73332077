"""The tutorial's training script for GPUs, on a real GPU. Without a GPU, the test is skipped with a reason."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from gpu.test_gpu import has, needs_gpu
from images import write
from sessions import clean_environment
from test_launchers import EXAMPLES

pytestmark = pytest.mark.gpu
SMALL = {"IMAGE_SIZE": "32", "BATCH_SIZE": "8", "EPOCH_SIZE": "2"}


@needs_gpu
@pytest.mark.skipif(not (has("torch") and has("PIL")), reason="torch or PIL is not installed")
def test_the_network_learns_on_the_gpu(tmp_path: Path) -> None:
    folder, data = EXAMPLES / "distributed_training", write(tmp_path / "data")
    env = clean_environment(**SMALL, DATA_PATH=str(data), MSCOMM_DEBUG="INFO", PATH=os.environ["PATH"])
    run = [sys.executable, "-m", "mscomm", "run", "-n", "1", "--"]
    words = [*run, sys.executable, "-m", "pytest", "-s", "resnet50_distributed_training_gpu.py"]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"epoch: (\d+) step: (\d+), loss is (\d\S*)", done.stdout)
    assert [(int(epoch), int(step)) for epoch, step, _ in found] == [(e, s) for e in (1, 2) for s in range(1, 13)]
    assert all(float(loss) < 20 for *_, loss in found)
    assert "backend nccl" in done.stdout + done.stderr, done.stderr
