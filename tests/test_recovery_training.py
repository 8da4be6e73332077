"""Model.train and Model.steps go on when ranks are killed and started again, and end with the bits of a run that nobody
disturbed. Ranks are killed with SIGKILL at given moments or at random ones.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import warm
from control import eventually
from rotated import rotated

# A training with 4 epochs of 8 steps. Environment variables:
# NET: line (NumPy), torch, dropout, batchnorm. DATA: list, pipeline (mscomm.dataset), loader (PyTorch).
# LOOP: model or own. FILES: a folder for checkpoints, every 3 steps. TIMEOUT: of collective calls. COMPRESSION: bf16.
# METRIC: a callback makes a call in each step, after the weights were updated.
# KILLS="rank:step:moment ...": the rank dies in its first life, in this step, at this moment:
# begin, inside (within 10 ms), end, epoch, file (before the checkpoint of this step gets its name), stop (SIGSTOP),
# or rejoin, aligned, send (in the recovery from a loss, at any step), or ms: so many milliseconds after its start.
TRAINING = """
import hashlib, os, random, signal, sys, threading, time
import numpy as np
import mscomm
from mscomm.train import Momentum, recovery

net_name, data_name = os.environ["NET"], os.environ["DATA"]
life = int(os.environ.get("MSCOMM_RESTART_COUNT", 0))
steps, epochs = 8, int(os.environ.get("EPOCHS", 4))
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def die_in(seconds):
    timer = threading.Timer(seconds, die)
    timer.daemon = True
    timer.start()

kills = [one.split(":") for one in os.environ.get("KILLS", "").split() if not life]
kills = {(int(step), moment) for who, step, moment in kills if who == os.environ["MSCOMM_RANK"]}
for milliseconds in (number for number, moment in kills if moment == "ms"):
    die_in(milliseconds / 1000)
timeout = float(os.environ["TIMEOUT"]) if "TIMEOUT" in os.environ else None
mscomm.init(timeout=timeout)
rank, size = mscomm.get_rank(), mscomm.get_group_size()
mscomm.set_auto_parallel_context(parallel_mode=mscomm.ParallelMode.DATA_PARALLEL, gradients_mean=True)
moments = {moment for _, moment in kills}
if "stop" in {moment for *_, moment in (one.split(":") for one in os.environ.get("KILLS", "").split())}:
    rejoin = mscomm.job.rejoin
    mscomm.job.rejoin = lambda *given, **named: (print("rejoins", flush=True), rejoin(*given, **named))[1]
if "away" in moments:
    barrier = mscomm.collectives.barrier
    mscomm.collectives.barrier = lambda **group: (barrier(**group), die())
if "rejoin" in moments:
    mscomm.job.rejoin = die
if "aligned" in moments:
    recovery._obstacle = die
if "send" in moments:
    recovery._send = die

class Line:
    def __init__(self):
        self.parameters = {"a": np.zeros(300, np.float32), "b": np.zeros((3, 5), np.float32)}

    def loss_and_gradients(self, x, y):
        off = x @ self.parameters["a"] - y
        return (off**2).mean(), {"a": 2 * off @ x / len(x), "b": np.full((3, 5), off.mean(), np.float32)}

x = np.random.default_rng(1).normal(size=(4 * steps * size, 300)).astype(np.float32) / 20
y = x[:, :1].copy()
if net_name == "line":
    net, loss_fn, y = Line(), None, y[:, 0]
    optimizer = Momentum(net.parameters, 0.05, 0.9)
else:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(3)
    layers = {"dropout": [torch.nn.Dropout(0.3)], "batchnorm": [torch.nn.BatchNorm1d(20)], "torch": []}[net_name]
    net = torch.nn.Sequential(torch.nn.Linear(300, 20), *layers, torch.nn.Linear(20, 1))
    loss_fn = torch.nn.MSELoss()
    optimizer = torch.optim.Adam(net.parameters(), 0.01)

mine = slice(rank * 4 * steps, (rank + 1) * 4 * steps)
if data_name == "list":
    data = [(x[mine][i : i + 4], y[mine][i : i + 4]) for i in range(0, 4 * steps, 4)]
elif data_name == "pipeline":
    rows = list(zip(x, y))
    data = mscomm.dataset.GeneratorDataset(rows, ["x", "y"], num_shards=size, shard_id=rank).shuffle(10).batch(4)
else:
    rows = torch.utils.data.TensorDataset(torch.tensor(x[mine]), torch.tensor(y[mine]))
    data = torch.utils.data.DataLoader(rows, 4, shuffle=True)

class Killer(mscomm.Callback):
    def __init__(self):
        self.seen = 0.0

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]

    def at(self, run_context, moment):
        if (run_context.original_args().cur_step_num, moment) in kills:
            die()

    def step_begin(self, run_context):
        self.at(run_context, "begin")
        step = run_context.original_args().cur_step_num
        if (step, "inside") in kills:
            die_in(random.random() * 0.01)
        if (step, "file") in kills:
            os.replace = die
        if (step, "stop") in kills:
            kills.remove((step, "stop"))
            print("stops", os.getpid(), flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(float(os.environ.get("SLEEP", 0.002)))

    def step_end(self, run_context):
        self.at(run_context, "end")
        if "METRIC" in os.environ:
            assert mscomm.all_reduce(np.ones(1)) == size
        self.seen += float(run_context.original_args().net_outputs)

    def epoch_end(self, run_context):
        self.at(run_context, "epoch")

killer = Killer()
callbacks = [killer]
if "FILES" in os.environ:
    config = mscomm.CheckpointConfig(3, keep_checkpoint_max=int(os.environ.get("KEEP", 2)))
    callbacks.append(mscomm.ModelCheckpoint("t", os.path.join(os.environ["FILES"], str(rank)), config))
model = mscomm.Model(net, loss_fn, optimizer, compression=os.environ.get("COMPRESSION"))
recovery = eval(os.environ.get("RECOVERY", "None"))
print("begins", os.getpid(), flush=True)
if os.environ["LOOP"] == "model":
    model.train(epochs, data, callbacks, recovery=recovery)
else:
    for step in model.steps(epochs, data, callbacks, recovery=recovery):
        with step as (batch, label):
            if net_name == "line":
                loss, gradients = net.loss_and_gradients(batch, label)
                step.report(loss)
                optimizer.step(step.reducer.reduce(gradients))
                continue
            batch, label = torch.as_tensor(batch), torch.as_tensor(label)
            step.reducer.zero_grad()
            loss = loss_fn(net(batch), label)
            step.report(loss)
            loss.backward()
            step.reducer.wait()
            optimizer.step()
weights = net.parameters if net_name == "line" else net.state_dict()
bits = b"".join(np.asarray(weights[name]).tobytes() for name in sorted(weights))
print("ends", os.getpid(), life, hashlib.sha256(bits).hexdigest()[:16], killer.seen, flush=True)
"""

TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


def train(folder: Path, kills: str = "", *, ranks: int = 4, restarts: int = 6, timeout_s: float = 300, **env: object):
    script = folder / "training.py"
    script.write_text(TRAINING)
    variables = {"NET": "line", "DATA": "list", "LOOP": "model", "KILLS": kills}
    variables |= {name: str(value) for name, value in env.items()}
    options = ["--max-restarts", restarts] if restarts else []
    file = warm.__file__ if variables["NET"] == "line" else warm.WITH_TORCH
    return warm.mscomm_run("-n", ranks, *options, script, timeout_s=timeout_s, env=variables, file=file)


def results(done) -> dict[int, list[str]]:
    """Return what each rank has printed at the end: pid, life, bits, sum of losses."""
    assert done.returncode == 0, done.stderr + done.stdout
    found = re.findall(r"\[(\d+)\] ends (.*)", done.stdout)
    return {int(rank): words.split() for rank, words in found}


@functools.cache
def undisturbed(net: str, data: str, loop: str, ranks: int = 4) -> dict[int, list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        return results(train(Path(folder), ranks=ranks, restarts=0, NET=net, DATA=data, LOOP=loop))


def assert_same_bits(done, kills: str, net: str = "line", data: str = "list", loop: str = "model", ranks: int = 4):
    """Check that all ranks end with the bits and the losses of an undisturbed run, and that survivors keep their
    processes."""
    whole, ends = undisturbed(net, data, loop, ranks), results(done)
    victims = {int(one.split(":")[0]) for one in kills.split()}
    assert len(ends) == ranks, done.stdout
    for rank, (pid, life, *result) in ends.items():
        assert result == whole[rank][2:], f"rank {rank}\n{done.stderr}{done.stdout}"
        if rank not in victims:
            assert life == "0" and done.stdout.count(f"[{rank}] begins") == 1
            assert f"[{rank}] begins {pid}" in done.stdout


ONE, TWO = "2:13:begin", "0:13:inside 3:13:inside"


@pytest.mark.parametrize(
    ("net", "data", "loop", "kills"),
    rotated(
        [
            ("line", *way, kills)
            for way in [("list", "model"), ("pipeline", "own")]
            for kills in (ONE, TWO, "1:16:epoch")
        ],
        few=4,
    ),
)
def test_lost_ranks_take_the_state_of_a_survivor(tmp_path, net, data, loop, kills):
    done = train(tmp_path, kills, NET=net, DATA=data, LOOP=loop)
    assert_same_bits(done, kills, net, data, loop)
    assert re.search(r"PeerLost: rank \d .* Training goes on after epoch 2 step \d, from the memory of", done.stderr)
    assert "checkpoint" not in done.stderr


@pytest.mark.parametrize("moment", ["1:begin", "1:end", "32:end", "32:epoch"])
def test_the_first_and_the_last_step(tmp_path, moment):
    done = train(tmp_path, f"0:{moment}")
    assert_same_bits(done, f"0:{moment}")


@pytest.mark.parametrize("second", ["rejoin", "aligned", "send"])
def test_a_survivor_that_dies_in_the_recovery_is_recovered_too(tmp_path, second):
    kills = f"2:13:begin 0:0:{second}"
    done = train(tmp_path, kills)
    assert_same_bits(done, kills)


EVERYBODY = "0:20:begin 1:20:begin 2:20:begin 3:20:begin"


def test_if_nobody_has_survived_training_goes_on_from_a_checkpoint(tmp_path):
    done = train(tmp_path, EVERYBODY, FILES=tmp_path)
    assert_same_bits(done, EVERYBODY)
    assert re.search(r"Training goes on from checkpoint [23]_\d", done.stderr), done.stderr


def test_a_rank_that_dies_while_it_writes_a_checkpoint(tmp_path):
    done = train(tmp_path, "1:15:file", FILES=tmp_path)
    assert_same_bits(done, "1:15:file")
    assert "Training goes on after epoch 2 step 7, from the memory of ranks 0, 2, 3" in done.stderr


@pytest.mark.parametrize(("files", "where"), [(True, "from checkpoint 2_4"), (False, "at step 1, because")])
def test_survivors_that_were_interrupted_in_a_callback_have_no_whole_state(tmp_path, files, where):
    """They have updated their weights, but their callbacks have not seen the step."""
    done = train(tmp_path, "1:13:end", METRIC=1, **({"FILES": tmp_path} if files else {}))
    assert_same_bits(done, "1:13:end")
    assert f"Training goes on {where}" in done.stderr


def test_the_compression_residual_comes_from_a_checkpoint(tmp_path):
    whole = results(train(tmp_path, COMPRESSION="bf16"))
    done = train(tmp_path, "1:13:inside", COMPRESSION="bf16", FILES=tmp_path)
    assert {rank: words[2:] for rank, words in results(done).items()} == {rank: whole[rank][2:] for rank in range(4)}
    assert "from checkpoint 2_4 (each rank has its own residual of compression)" in done.stderr


def test_checkpoints_after_a_recovery_belong_to_the_same_training(tmp_path):
    """The second loss ends the job. The next job goes on from a checkpoint that was written after the first loss."""
    lost = train(tmp_path, "1:13:begin 0:23:begin", restarts=1, FILES=tmp_path)
    assert lost.returncode != 0 and lost.stderr.count("Training goes on after epoch 2 step 4") == 1
    done = train(tmp_path, FILES=tmp_path)
    assert_same_bits(done, "0:23:never 1:13:never 2:0:never 3:0:never")
    assert "an earlier run did not end. Training goes on from checkpoint 3_5" in done.stderr
    names = {path.name.split("-")[0] for rank in range(4) for path in (tmp_path / str(rank)).iterdir()}
    assert names == {"t"}  # all files have one prefix


def test_without_checkpoints_training_begins_again(tmp_path):
    done = train(tmp_path, EVERYBODY)
    assert_same_bits(done, EVERYBODY)


def test_a_worker_that_was_stopped_goes_on_with_the_others(tmp_path):
    """The others go on waiting in rejoin() after their call has timed out. Then the stopped rank continues."""
    (tmp_path / "training.py").write_text(TRAINING)
    env = {"NET": "line", "DATA": "list", "LOOP": "model", "KILLS": "1:13:stop", "TIMEOUT": "2"}
    job = warm.Started("-n", 4, "--max-restarts", 1, tmp_path / "training.py", env=env)
    try:
        eventually(lambda: job.stdout.read_text().count(" rejoins\n") == 3, 120)
        (stopped,) = re.findall(r" stops (\d+)\n", job.stdout.read_text())
        os.kill(int(stopped), signal.SIGCONT)
        done = job.ended()
    finally:
        job.kill()
    assert_same_bits(done, "")
    assert "WARN Model.train: CollectiveTimeout: " in done.stderr
    # The other ranks have left their parts of step 5 in shared memory. If the stopped rank takes them before it hears
    # that the others have given up, it is one step ahead, and the others take its state.
    where = r"Training goes on after epoch 2 step (4, from the memory of ranks |5, from the memory of rank 1\n)"
    assert re.search(where, done.stderr), done.stderr


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("harm", [damage, Path.unlink])
def test_a_new_job_goes_on_where_an_earlier_one_was_killed(tmp_path, harm):
    """The newest checkpoint of one rank is damaged or missing, so all ranks take the one before it."""
    kills = " ".join(f"{rank}:20:begin" for rank in range(4))
    killed = train(tmp_path, kills, restarts=0, FILES=tmp_path, RECOVERY=True)
    assert killed.returncode != 0
    assert {path.name for path in (tmp_path / "2").iterdir()} >= {"t-2_7.safetensors", "t-3_2.safetensors"}
    harm(tmp_path / "2/t-3_2.safetensors")
    done = train(tmp_path, restarts=0, FILES=tmp_path, RECOVERY=True)
    assert_same_bits(done, kills.replace("begin", "never"))
    assert "an earlier run did not end. Training goes on from checkpoint 2_7" in done.stderr
    assert "checkpoint 3_2 is left out, because not every rank has it" in done.stderr or harm is damage
    assert "2/t-3_2.safetensors: damaged" in done.stderr or harm is not damage
    again = train(tmp_path, restarts=0, FILES=tmp_path, RECOVERY=True)  # the training is complete: begin another one
    assert_same_bits(again, "")
    assert again.stderr == "" and (tmp_path / "0/t_1-1_3.safetensors").exists() is False
    assert (tmp_path / "0/t_1-4_8.safetensors").exists()


def test_without_recovery_a_lost_rank_raises_peerlost(tmp_path):
    done = train(tmp_path, "1:13:begin", RECOVERY=False, restarts=0)
    assert done.returncode != 0 and "PeerLost: rank 1" in done.stderr and "Training goes on" not in done.stderr


def test_what_recovery_needs(tmp_path):
    done = train(tmp_path, FILES=tmp_path, KEEP=1, ranks=2, restarts=1)
    assert done.returncode == 1 and "ends" not in done.stdout
    assert "ValueError: Model.train: rank 0 of the group: keep_checkpoint_max is 1; recovery needs 2" in done.stderr
    done = train(tmp_path, RECOVERY=True, ranks=1, restarts=0)
    assert done.returncode == 0 and "recovery=True has no effect: it needs data-parallel mode with all" in done.stderr
    done = train(tmp_path, RECOVERY="1", ranks=1, restarts=0)
    assert "TypeError: Model.train: recovery is a int; expected a bool or None" in done.stderr
    done = train(tmp_path, RECOVERY="mscomm.get_rank() == 0", ranks=2, restarts=0)
    assert "recovery is on for some ranks only; pass the same on every rank" in done.stderr


OTHER_SCRIPTS = """
import os, signal
import numpy as np, mscomm
rank, life = int(os.environ["MSCOMM_RANK"]), int(os.environ["MSCOMM_RESTART_COUNT"])
mscomm.init()
mscomm.set_auto_parallel_context(parallel_mode=mscomm.ParallelMode.DATA_PARALLEL, gradients_mean=True)

class Line:
    def __init__(self):
        self.parameters = {"a": np.zeros(3, np.float32)}
    def loss_and_gradients(self, x):
        return self.parameters["a"].sum(), {"a": x}

class Kill(mscomm.Callback):
    def __init__(self, step):
        self.step = step
    def step_end(self, run_context):
        if (rank, life, run_context.original_args().cur_step_num) == (1, 0, self.step):
            os.kill(os.getpid(), signal.SIGKILL)

net = Line()
model = mscomm.Model(net, optimizer=mscomm.train.SGD(net.parameters, 0.5))
data = [np.full(3, i, np.float32) for i in range(5)]
"""


def other(folder: Path, body: str, ranks: int = 3):
    script = folder / "script.py"
    script.write_text(OTHER_SCRIPTS + body)
    return warm.mscomm_run("-n", ranks, "--max-restarts", 3, script)


def test_a_script_that_calls_resume_or_train_several_times(tmp_path):
    done = other(
        tmp_path,
        f"""
files = mscomm.ModelCheckpoint("t", os.path.join({str(tmp_path)!r}, str(rank)), mscomm.CheckpointConfig(2))
model.resume(os.path.join({str(tmp_path)!r}, str(rank)))
model.train(1, data, Kill(9))
model.train(2, data, [Kill(7), files])
print("ends", net.parameters["a"])
""",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ends [-15. -15. -15.]") == 3, done.stdout


@pytest.mark.parametrize(("victims", "step"), [([1], 1), ([0, 1, 2], 1), ([0, 1, 2], 5)])
def test_each_call_of_train_is_a_training_of_its_own(tmp_path, victims, step):
    """Two calls write to one directory. Ranks are lost in the second call, before or after its first checkpoint."""
    done = other(
        tmp_path,
        f"""
for fold in range(2):
    net, steps = Line(), 0
    class Count(mscomm.Callback):
        def step_end(self, run_context):
            global steps
            steps += 1
            if fold == 1 and life == 0 and rank in {victims} and steps == {step}:
                os.kill(os.getpid(), signal.SIGKILL)
    files = mscomm.ModelCheckpoint("t", os.path.join({str(tmp_path)!r}, str(rank)), mscomm.CheckpointConfig(2))
    model = mscomm.Model(net, optimizer=mscomm.train.SGD(net.parameters, 0.5))
    model.train(2, data, [Count(), files])
    print("fold", fold, life, steps, net.parameters["a"])
""",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fold 0 0 10 [-10. -10. -10.]") == 3, done.stdout + done.stderr
    ends = re.findall(r"fold 1 (\d) (\d+) (.*)", done.stdout)
    assert len(ends) == 3 and all(int(steps) > 5 or life == "1" for life, steps, _ in ends), done.stdout + done.stderr
    assert all(weights == "[-10. -10. -10.]" for *_, weights in ends), done.stdout + done.stderr


def test_the_body_of_a_loop_of_ones_own(tmp_path):
    done = other(
        tmp_path,
        """
def train(use):
    for step in model.steps(1, data):
        use(step)
def leave_out(step):
    pass
def fail(step):
    with step as (x,):
        assert (step.number, step.epoch) == (1, 1) and x.sum() == 0
        raise KeyError("no such column")
for use, error in (leave_out, RuntimeError), (fail, KeyError):
    try:
        train(use)
    except error as caught:
        print(repr(caught))
""",
        ranks=2,
    )
    assert done.stdout.count("compute each step inside `with step as batch`") == 2, done.stdout + done.stderr
    assert done.stdout.count("KeyError('no such column')") == 2


def test_an_exception_leaves_the_block_of_a_step(tmp_path):
    """If a lost rank has ended the block, and the program then leaves the loop, a warning says so."""
    done = other(
        tmp_path,
        """
for error in KeyboardInterrupt, KeyError:
    try:
        for step in model.steps(1, data):
            with step:
                raise error("mine")
            break
    except error:
        print(f"left with {error.__name__}")
for step in model.steps(1, data, Kill(2)):
    with step as (x,):
        step.reducer.reduce({"a": x})
    if step.number == 3 and life == 0:
        break
os._exit(0)
""",
    )
    for name in "KeyboardInterrupt", "KeyError":
        assert len(re.findall(rf"\[[02]\] left with {name}", done.stdout)) == 2, done.stdout + done.stderr
    assert done.stderr.count("the program left the loop after step 3 had failed: PeerLost") == 2, done.stderr


def test_a_worker_comes_back_to_its_scheduler(tmp_path, port):
    (tmp_path / "training.py").write_text(TRAINING)
    job = {"MS_WORKER_NUM": "4", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": str(port), "MS_ENABLE_RECOVERY": "1"}
    job |= {"NET": "line", "DATA": "pipeline", "LOOP": "model", "KILLS": "2:13:inside", "OMP_NUM_THREADS": "1"}
    env = {**os.environ, **job}

    def start(rank, life=0):
        own = {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(rank), "MSCOMM_RANK": str(rank)}
        own["MSCOMM_RESTART_COUNT"] = str(life)
        command = [sys.executable, tmp_path / "training.py"]
        return subprocess.Popen(command, env={**env, **own}, stdout=subprocess.PIPE, text=True)

    scheduler = subprocess.Popen([sys.executable, "-m", "mscomm", "sched"], env=env, stdout=subprocess.DEVNULL)
    workers = [start(rank) for rank in range(4)]
    try:
        assert workers[2].wait(240) == -signal.SIGKILL
        workers[2].stdout.close()
        workers[2] = start(2, life=1)
        outs = [worker.communicate(timeout=240)[0] for worker in workers]
    finally:
        for process in (scheduler, *workers):
            process.kill()
            process.wait()
    for rank, words in undisturbed("line", "pipeline", "model").items():
        assert " ".join(words[2:]) in outs[rank], outs


@pytest.mark.long
def test_random_moments(tmp_path):
    for seed in range(20):
        draw = random.Random(seed)
        victims = draw.sample(range(4), draw.choice([1, 1, 2]))
        kills = " ".join(f"{rank}:{draw.randrange(100, 900)}:ms" for rank in victims)
        folder = tmp_path / str(seed)
        folder.mkdir()
        done = train(folder, kills, SLEEP=0.04, **({"FILES": folder} if seed % 2 else {}))
        assert_same_bits(done, kills)


# -- with PyTorch; these tests come last, because their ranks need another interpreter


@TORCH
@pytest.mark.parametrize(
    ("net", "data", "loop", "kills"), [("torch", "pipeline", "model", TWO), ("dropout", "loader", "own", ONE)]
)
def test_lost_ranks_of_pytorch_take_the_state_of_a_survivor(tmp_path, net, data, loop, kills):
    test_lost_ranks_take_the_state_of_a_survivor(tmp_path, net, data, loop, kills)


@TORCH
@pytest.mark.parametrize("files", [True, False])
def test_if_training_changes_running_means_it_goes_on_from_a_checkpoint(tmp_path, files):
    kills = "1:15:file" if files else "1:13:begin"
    done = train(tmp_path, kills, NET="batchnorm", **({"FILES": tmp_path} if files else {}))
    assert_same_bits(done, kills, "batchnorm")
    if files:
        assert re.search(r"Training goes on from checkpoint [23]_\d", done.stderr), done.stderr
        assert "(training changes 1.running_mean, which is not among the trained weights)" in done.stderr
    else:
        assert "Training goes on at step 1, because there is no checkpoint that all ranks have" in done.stderr


GRADIENTS = """
import os, signal, time
import torch
import mscomm

torch.set_num_threads(1)
rank, life = int(os.environ["MSCOMM_RANK"]), int(os.environ["MSCOMM_RESTART_COUNT"])
mscomm.init()
mscomm.set_auto_parallel_context(parallel_mode=mscomm.ParallelMode.DATA_PARALLEL, gradients_mean=True)
torch.manual_seed(3)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
drawn = torch.Generator().manual_seed(1)
data = [(torch.randn(4, 4, generator=drawn), torch.randn(4, 1, generator=drawn)) for _ in range(8)]
for step in mscomm.Model(net, optimizer=optimizer).steps(2, data):
    with step as (x, y):
        ((net(x) - y) ** 2).mean().backward()
        if "DIES" in os.environ and life == 0 and rank == 1 and step.number == 6:
            time.sleep(1)  # until rank 0 has its own gradients, and waits for those of this rank
            os.kill(os.getpid(), signal.SIGKILL)
        step.reducer.wait()
        optimizer.step()
        step.reducer.zero_grad()
print("weights", [p.double().sum().item() for p in net.parameters()])
"""


@TORCH
def test_the_gradients_of_an_interrupted_step_are_dropped(tmp_path):
    (tmp_path / "script.py").write_text(GRADIENTS)
    command = ["-n", "2", "--max-restarts", "1", tmp_path / "script.py"]
    expected, done = (warm.mscomm_run(*command, env=env, file=warm.WITH_TORCH) for env in ({}, {"DIES": "1"}))
    assert expected.returncode == done.returncode == 0, expected.stderr + done.stderr
    assert "from the memory of rank 0" in done.stderr
    weights = [set(re.findall("weights .*", one.stdout)) for one in (expected, done)]
    assert weights[0] == weights[1] and len(weights[0]) == 1, weights
