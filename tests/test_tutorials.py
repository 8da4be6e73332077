"""examples/tutorials: MindSpore's scripts, in which only the imports and a few marked lines differ, train on CPUs.

The tutorials' texts are not in this repository. Instead, the test has a hash of each script's code in the tutorials.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sessions
import warm
from test_examples_training import (
    TIMEOUT_S,
    bash,
    digits,
    few,
    losses,
    mpirun,
    of_each_rank,
    places,
    steps,
    table,
    torch,
    variables,
)
from test_launchers import EXAMPLES

import mscomm

TUTORIALS = EXAMPLES / "tutorials"
pytestmark = pytest.mark.timeout(3 * TIMEOUT_S)
MAX_MARKED = 12  # lines of a script, other than imports

__all__ = ["digits", "few", "mpirun", "table"]  # the fixtures, so that ruff keeps them

# The beginning of the SHA-256 of the code blocks of the tutorials, without white space:
# https://gitee.com/mindspore/docs/blob/master/tutorials/experts/source_en/parallel/train_cpu.md, its section on the
# training script; train_gpu.md in the same folder; and tutorials/training/source_en/advanced_use/
# distributed_training_ascend.md of r1.0; and parallel_training_quickstart.md of r2.0, in the folder of train_gpu.md.
HASHES = {
    "distributed_training_quickstart/net.py": "6c379698dd9c22543cb94022e798ce79",
    "nccl_allgather.py": "4a25a59bd4c1206059b2d4017eb3dc4f",
    "distributed_training_cpu/resnet50_distributed_training.py": "5be01db189e55a8b16f223920f62a89f",
    "distributed_training/resnet50_distributed_training_gpu.py": "9acf84fa4bb44a9730fdf1f83b0cd230",
    "distributed_training/resnet50_distributed_training_gpu_recovery.py": "be55ec8903d0a0e48ac0117046877554",
    "distributed_training/resnet50_distributed_training.py": "e6b91daee4bbb1b5c70fe5f4757ad1d8",
    "distributed_training/data_parallel_net.py": "b0118d9f23854eaa571ad12c951aeac0",
    "distributed_training/semi_auto_parallel_net.py": "9b1654b5d826773818572451e31bdb1a",
}


def as_in_the_tutorial(text: str) -> tuple[str, int]:
    """Return a script's code as it is in the tutorial, without white space, and the number of its marked lines.

    Imports do not count.
    """
    head = ast.get_docstring(ast.parse(text), clean=False)
    lines, marked = [], 0
    for line in text.split(f'"""{head}"""', 1)[1].splitlines():
        is_import = line.startswith(("from ", "import "))
        if line.endswith("  # added"):
            marked += not is_import
        elif "  # tutorial: " in line:
            marked += not is_import
            lines.append(line.split("  # tutorial: ", 1)[1])
        else:
            lines.append(re.sub(r"^(\s*(?:from|import)) mscomm(?=[. ])", r"\1 mindspore", line))
    return re.sub(r"\s", "", "\n".join(lines)), marked


@pytest.mark.parametrize("name", HASHES)
def test_a_script_differs_from_the_tutorial_only_in_imports_and_in_few_marked_lines(name: str) -> None:
    code, marked = as_in_the_tutorial((TUTORIALS / name).read_text())
    assert marked <= MAX_MARKED
    assert hashlib.sha256(code.encode()).hexdigest()[:32] == HASHES[name]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Copy the tutorials' folder, because its scripts write logs and checkpoints there. Return the copy."""
    return shutil.copytree(TUTORIALS, tmp_path / "tutorials", ignore=shutil.ignore_patterns("device*", "__pycache__"))


def by_mscomm_run(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    return warm.mscomm_run("-n", 8, script, env={"OMP_NUM_THREADS": "1"}, cwd=folder, file=warm.WITH_TORCH)


def test_four_ranks_gather_and_print_the_tutorials_lines(folder: Path, mpirun: str) -> None:
    flags = ["--allow-run-as-root"] * (os.getuid() == 0) + ["--oversubscribe", "--output", f"dir={folder}/log"]
    done = sessions.run(
        [mpirun, *flags, "-n", "4", sys.executable, "nccl_allgather.py"], TIMEOUT_S, variables(), folder
    )
    assert done.returncode == 0, done.stderr
    logs = sorted((folder / "log").glob("*/rank.*/stdout"))
    assert [log.read_text() for log in logs] == ["[[0.],\n [1.],\n [2.],\n [3.]]\n"] * 4


# The strategies that the quick-start tutorial shows for its three operators.
TUTORIALS_STRATEGIES = ("((2, 4), (4, 1))", "((2, 4))", "((2, 4), (4, 1))")


def test_the_quick_start_tutorial_on_eight_ranks_equals_one_process(folder: Path, mpirun: str) -> None:
    """The losses of 20 steps fall, are equal on all ranks, and equal those of one process, with three strategies."""
    example = folder / "distributed_training_quickstart"
    text = (example / "net.py").read_text()
    env = variables()
    done = sessions.run(["bash", example / "run_with_mpi.sh"], TIMEOUT_S, env)
    assert done.returncode == 0, done.stdout + done.stderr + (example / "device/train.log").read_text()
    found = {"((2, 4), (4, 1))": of_each_rank((example / "device/train.log").read_text(), 8)}

    plan = (example / "saved_graph/rank_0/step_parallel_begin_0001.ir").read_text().splitlines()
    for line, name, strategy in zip(plan, ("matmul", "relu", "matmul2"), TUTORIALS_STRATEGIES, strict=False):
        assert f"{{instance name: {name}}}" in line and f"}} {{in_strategy: {strategy}}} : " in line
        assert line.endswith("# scope: (Default/network-WithLossCell/_backbone-Net)")
    executed = (example / "saved_graph/rank_5/18_execute_0001.ir").read_text()
    assert (
        "rank_list: (4, 5, 6, 7), group_ranks: 4-5-6-7} : (<Tensor[Float32], (8, 16)>) -> (<Tensor[Float32], (8, 4)>)"
        in (re.search(r"^%1\.0\(out\) = ReduceScatter\(%0\) .*$", executed, re.M) or [""])[0]
    )
    assert ": (<Tensor[Float32], (8, 8)>, <Tensor[Float32], (8, 16)>) -> (<Tensor[Float32], (8, 16)>)" in executed

    for strategy in ("((4, 2), (2, 1))", "((1, 2), (2, 4))"):
        (example / "net.py").write_text(text.replace("((2, 4), (4, 1))", strategy))
        done = by_mscomm_run(example, "net.py")
        assert done.returncode == 0, done.stderr
        found[strategy] = of_each_rank(done.stdout, 8)
    (example / "net.py").write_text(text.replace(".shard(((2, 4), (4, 1)))", ""))
    alone = sessions.run([sys.executable, "net.py"], TIMEOUT_S, env, example)
    assert alone.returncode == 0, alone.stderr
    expected = losses(alone.stdout)
    assert places(expected) == steps(5, 4)
    for strategy, lines in found.items():
        assert places(lines) == places(expected), strategy
        values = [loss for *_, loss in lines]
        assert values == sorted(values, reverse=True), strategy
        assert values == pytest.approx([loss for *_, loss in expected], rel=1e-5), strategy
    newest = [mscomm.load_checkpoint(example / f"device/{rank}/CKP-5_4.safetensors") for rank in range(8)]
    assert newest[0]["weight"].shape == (32, 16)
    assert len({one["weight"].tobytes() for one in newest}) == 1


def test_a_scheduler_and_two_workers_of_the_cpu_tutorial(folder: Path, few: Path, port: int) -> None:
    """56 images make 3 steps of 8 images on 2 ranks."""
    example = folder / "distributed_training_cpu"
    env = variables(MS_SCHED_PORT=str(port), MS_WORKER_NUM="2")
    done = sessions.run(["bash", example / "run.sh", few], TIMEOUT_S, env)
    logs = [(example / f"worker_{i}.txt").read_text() for i in range(2)]
    assert done.returncode == 0, done.stdout + done.stderr + logs[0]
    assert places(losses(logs[0])) == steps(1, 3)
    assert all(losses(log) == losses(logs[0]) for log in logs)
    assert re.search(r"^epoch: 1 step: 1, loss is \d\.\d+$", logs[0], re.M)


def test_the_gpu_tutorial_in_auto_parallel_and_in_data_parallel_mode(
    folder: Path, few: Path, mpirun: str, port: int
) -> None:
    example = folder / "distributed_training"
    done = bash(example, "run_gpu.sh", few, DEVICE_NUM="2")
    log = (example / "device/train.log").read_text()
    assert done.returncode == 0 and "training success" in done.stdout, done.stderr + log
    by_mpirun = of_each_rank(log, 2)
    assert places(by_mpirun) == steps(1, 3)

    script = example / "resnet50_distributed_training_gpu.py"
    script.write_text(script.read_text().replace("AUTO_PARALLEL, gradients_mean", "DATA_PARALLEL, gradients_mean"))
    done = bash(example, "run_gpu_cluster.sh", few, MS_WORKER_NUM="2", MS_SCHED_PORT=str(port))
    logs = [(example / f"device/worker_{i}.log").read_text() for i in range(2)]
    assert done.returncode == 0, done.stderr + "".join(logs)
    in_data_parallel = losses(logs[0])
    assert all(losses(log) == in_data_parallel for log in logs) and places(in_data_parallel) == steps(1, 3)
    # Both modes begin with the same weights and images. BatchNorm differs: by rank, or of the whole batch.
    assert in_data_parallel[0][2] == pytest.approx(by_mpirun[0][2], rel=0.5)


def test_the_ascend_tutorial_by_a_rank_table(folder: Path, few: Path, table: str) -> None:
    example = folder / "distributed_training"
    done = bash(example, "run.sh", few, "2", RANK_TABLE_FILE=table)
    logs = [(example / f"device{i}/train.log{i}").read_text() for i in range(2)]
    assert done.returncode == 0, done.stderr + "".join(logs)
    assert losses(logs[0]) == losses(logs[1]) and places(losses(logs[0])) == steps(1, 3)


def test_gradient_accumulation_takes_a_step_for_several_batches(folder: Path, few: Path, mpirun: str) -> None:
    example = folder / "distributed_training"
    done = bash(example, "run_grad_accu.sh", few, DEVICE_NUM="2", MINI_STEPS="2")
    log = (example / "device/train.log").read_text()
    assert done.returncode == 0, done.stderr + log
    assert places(of_each_rank(log, 2)) == steps(1, 2)  # an epoch has 3 batches: step 1 takes two, step 2 takes one


def test_the_section_on_data_parallel_mode_writes_and_loads_checkpoints(folder: Path) -> None:
    """Each rank's checkpoint has its own weight, because the tutorial's parameter is layerwise parallel."""
    example = folder / "distributed_training"
    done = by_mscomm_run(example, "data_parallel_net.py")
    assert done.returncode == 0, done.stderr
    assert "each rank trains a model of its own, because all parameters have layerwise_parallel=True" in done.stderr
    assert "shard() has no effect in the parallel mode data_parallel" in done.stderr
    weights = []
    for rank in range(8):
        (file,) = (example / f"rank_{rank}_ckpt").glob("*.safetensors")
        assert file.name == "data_parallel-2_8.safetensors"
        weights.append(mscomm.load_checkpoint(file)["weight"].tobytes())
    assert len(set(weights)) == 8


@pytest.mark.parametrize("whole", [True, False])
def test_the_section_on_semi_auto_parallel_mode_writes_and_loads_checkpoints(folder: Path, whole: bool) -> None:
    """Each rank trains a part of the weights. Its checkpoint has the whole weights, or its part of them."""
    example = folder / "distributed_training"
    script = example / "semi_auto_parallel_net.py"
    if not whole:  # the tutorial's own change
        text = script.read_text()
        assert "keep_checkpoint_max=1)" in text
        script.write_text(text.replace("keep_checkpoint_max=1)", "keep_checkpoint_max=1, integrated_save=False)"))
    done = by_mscomm_run(example, script.name)
    assert done.returncode == 0, done.stderr
    assert places(of_each_rank(done.stdout, 8)) == steps(2, 8)
    assert len({(example / f"rank_{rank}_ckpt/strategy.txt").read_text() for rank in range(8)}) == 1
    files = [example / f"rank_{rank}_ckpt/semi_auto_parallel-2_8.safetensors" for rank in range(8)]
    parts = [mscomm.load_checkpoint(file)["mul_weight"] for file in files]
    assert {part.shape for part in parts} == {(1, 32) if whole else (1, 4)}
    weights = parts[0] if whole else np.concatenate(parts, 1)
    names = ("mul_weight", "equal_weight")
    net = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.zeros(1, 32)) for name in names})
    if whole:
        mscomm.load_param_into_net(net, mscomm.load_checkpoint(files[5]))
    else:
        mscomm.load_distributed_checkpoint(net, files)
    assert np.array_equal(net["mul_weight"].detach().numpy(), weights)
    assert weights.std() > 0  # it was 0.5 everywhere before the training
