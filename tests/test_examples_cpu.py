"""examples/distributed_training_cpu: its ResNet-50 learns to tell small images of two digits apart, under `mscomm run`
and run.sh.
"""

from __future__ import annotations

import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import warm
from sessions import clean_environment, invoke, run
from test_launchers import EXAMPLES

from mscomm.cli import data
from mscomm.dataset.cifar10 import RECORD_BYTES, TEST, TRAIN

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")
pytest.importorskip("PIL")

pytestmark = pytest.mark.timeout(2400)
FOLDER = EXAMPLES / "distributed_training_cpu"
SCRIPT = FOLDER / "resnet50_distributed_training.py"
SMALL = ["--image-size", "32", "--batch-size", "16", "--epochs", "1"]
STEPS = 10  # 6 x 54 images make 10 batches of 16 on each of 2 ranks


@pytest.fixture(scope="module")
def two_digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder like CIFAR-10's with images of only two digits. Learning ten digits would take a hundred steps."""
    out = tmp_path_factory.mktemp("digits") / "cifar-10-batches-bin"
    done = invoke(data.command, "make", "--from", "digits", "--out", out)
    assert done.exit_code == 0, done.output
    for name in (*TRAIN, TEST):
        rows = np.fromfile(out / name, np.uint8).reshape(-1, RECORD_BYTES)
        kept = rows[rows[:, 0] < 2][:54]
        assert len(kept) == 54
        kept.tofile(out / name)
    return out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Copy the example's folder, because its run.sh writes logs there. Return the copy."""
    return shutil.copytree(FOLDER, tmp_path / "example", ignore=shutil.ignore_patterns("*.txt", "__pycache__"))


def loss_lines(log: Path) -> list[str]:
    return re.findall(r"^epoch: \d+ step: \d+, loss is [0-9.e-]+$", log.read_text(), re.M)


def mean_loss(lines: list[str]) -> float:
    return sum(float(line.split()[-1]) for line in lines) / len(lines)


def assert_learned(logs: list[Path], steps: int) -> list[str]:
    """Check that every rank has printed the same lines and that the loss has fallen. Return the lines."""
    lines = loss_lines(logs[0])
    assert len(lines) == steps, logs[0].read_text()
    assert all(loss_lines(log) == lines for log in logs)
    assert mean_loss(lines[-3:]) < mean_loss(lines[:3]), lines
    return lines


# -- the network and the loss


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the names that the script defines, with their values."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return runpy.run_path(str(SCRIPT))


def test_it_is_resnet_50(example: dict[str, Any]) -> None:
    with torch.device("meta"):
        net = example["resnet50"](1000)
        shapes = [tuple(net(torch.empty(2, 3, side, side)).shape) for side in (32, 33, 224)]
    convolutions = [module for module in net.modules() if isinstance(module, torch.nn.Conv2d)]
    # The final linear layer counts as a layer; the four convolutions on shortcuts do not.
    assert len(convolutions) + 1 - 4 == 50
    assert sum(p.numel() for p in net.parameters()) == 25_557_032  # the published number for ImageNet's 1000 classes
    assert shapes == [(2, 1000)] * 3


def test_the_weights_follow_from_the_seed(example: dict[str, Any]) -> None:
    def weights() -> dict[str, Any]:
        torch.manual_seed(1)
        return example["resnet50"]().state_dict()

    first, again = weights(), weights()
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_the_loss_is_the_cross_entropy(example: dict[str, Any]) -> None:
    expand = example["SoftmaxCrossEntropyExpand"]
    logit = torch.randn(32, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logit[0] = torch.tensor([0.0] * 9 + [1e4])  # softmax is 0 for nine of the ten classes
    label = torch.arange(32) % 10
    both = []
    for loss in (expand(sparse=True), torch.nn.CrossEntropyLoss()):
        x = logit.clone().requires_grad_()
        value = loss(x, label)
        value.backward()
        both.append((value.detach(), x.grad))
    torch.testing.assert_close(*both)
    dense = expand()(logit, torch.nn.functional.one_hot(label, 10).double())
    torch.testing.assert_close(dense, both[0][0])


# -- real training runs


@pytest.fixture(scope="module")
def by_mscomm_run(two_digits: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Run the script on two ranks. Return the lines that each rank prints."""
    logs = tmp_path_factory.mktemp("logs")
    words = ["-n", 2, "--log_dir", logs, SCRIPT, two_digits, *SMALL]
    done = warm.mscomm_run(*words, env={"OMP_NUM_THREADS": "1"}, file=warm.WITH_TORCH)
    assert done.returncode == 0, done.stderr
    return assert_learned([logs / f"worker_{rank}.log" for rank in range(2)], STEPS)


def test_two_ranks_of_mscomm_run_learn_digits(by_mscomm_run: list[str]) -> None:
    assert by_mscomm_run[-1].startswith(f"epoch: 1 step: {STEPS}, loss is ")


def test_a_scheduler_and_two_workers_print_the_same(
    by_mscomm_run: list[str], two_digits: Path, folder: Path, port: int
) -> None:
    env = {"MS_WORKER_NUM": "2", "MS_SCHED_PORT": str(port), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = run(["bash", folder / "run.sh", two_digits, *SMALL], 1200, clean_environment(**env))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "scheduler start success!" in done.stdout
    assert assert_learned([folder / f"worker_{i}.txt" for i in range(2)], STEPS) == by_mscomm_run


# -- what goes wrong


def test_run_sh_fails_when_the_training_does(folder: Path, tmp_path: Path, port: int) -> None:
    (tmp_path / "empty").mkdir()
    env = {"MS_WORKER_NUM": "2", "MS_SCHED_PORT": str(port), "PYTHON": sys.executable}
    done = run(["bash", folder / "run.sh", tmp_path / "empty"], 1200, clean_environment(**env))
    assert (done.returncode, done.stderr) == (1, "training failed: see scheduler.txt and worker_*.txt\n")
    assert "data_batch_1.bin" in (folder / "worker_0.txt").read_text()


@pytest.mark.parametrize("command", [[sys.executable, SCRIPT], ["bash", FOLDER / "run.sh"]], ids=["script", "run.sh"])
def test_without_data_it_says_where_to_get_some(command: list[Any]) -> None:
    done = run(command, 600, clean_environment())
    assert done.returncode == 2
    assert "mscomm data make --from digits --out digits" in done.stderr
