"""Model.train and Model.steps go on when ranks are killed and started again, and end with the bits of a run that nobody
disturbed. Ranks are killed with SIGKILL at given moments or at random ones.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import tempfile
from pathlib import Path

import pytest
from sessions import mscomm_run

# A training with 4 epochs of 8 steps. Environment variables:
# NET: line (NumPy), torch, dropout, batchnorm. DATA: list, pipeline (mscomm.dataset), loader (PyTorch).
# LOOP: model or own. FILES: a folder for checkpoints, every 3 steps. TIMEOUT: of collective calls.
# KILLS="rank:step:moment ...": the rank dies in its first life, in this step, at this moment:
# begin, inside (within 10 ms), end, epoch, file (before the checkpoint of this step gets its name), or
# rejoin, aligned, send (in the recovery from a loss, at any step), or away (out of the last barrier).
TRAINING = """
import hashlib, os, random, signal, sys, threading, time
import numpy as np
import mscomm
from mscomm.train import Momentum, recovery

net_name, data_name = os.environ["NET"], os.environ["DATA"]
life = int(os.environ.get("MSCOMM_RESTART_COUNT", 0))
steps, epochs = 8, int(os.environ.get("EPOCHS", 4))
timeout = float(os.environ["TIMEOUT"]) if "TIMEOUT" in os.environ else None
mscomm.init(timeout=timeout)
rank, size = mscomm.get_rank(), mscomm.get_group_size()
mscomm.set_auto_parallel_context(parallel_mode=mscomm.ParallelMode.DATA_PARALLEL, gradients_mean=True)
kills = [one.split(":") for one in os.environ.get("KILLS", "").split() if not life]
kills = {(int(step), moment) for who, step, moment in kills if int(who) == rank}

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

moments = {moment for _, moment in kills}
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
            threading.Timer(random.random() * 0.01, die).start()
        if (step, "file") in kills:
            os.replace = die
        if (step, "stop") in kills:
            print("stops", os.getpid(), flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(float(os.environ.get("SLEEP", 0.002)))

    def step_end(self, run_context):
        self.at(run_context, "end")
        self.seen += float(run_context.original_args().net_outputs)

    def epoch_end(self, run_context):
        self.at(run_context, "epoch")

killer = Killer()
callbacks = [killer]
if "FILES" in os.environ:
    config = mscomm.CheckpointConfig(3, keep_checkpoint_max=int(os.environ.get("KEEP", 2)))
    callbacks.append(mscomm.ModelCheckpoint("t", os.path.join(os.environ["FILES"], str(rank)), config))
model = mscomm.Model(net, loss_fn, optimizer)
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


def train(folder: Path, kills: str = "", *, ranks: int = 4, restarts: int = 6, timeout_s: float = 120, **env: object):
    script = folder / "training.py"
    script.write_text(TRAINING)
    variables = {"NET": "line", "DATA": "list", "LOOP": "model", "KILLS": kills}
    variables |= {name: str(value) for name, value in env.items()}
    options = ["--max-restarts", restarts] if restarts else []
    return mscomm_run("-n", ranks, *options, script, timeout_s=timeout_s, env=variables)


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


NETS = [
    ("line", "list", "model"),
    ("line", "pipeline", "own"),
    *(pytest.param(*names, marks=TORCH) for names in [("torch", "pipeline", "model"), ("dropout", "loader", "own")]),
]


@pytest.mark.parametrize(("net", "data", "loop"), NETS)
@pytest.mark.parametrize("kills", ["2:13:begin", "0:13:inside 3:13:inside", "1:16:epoch"])
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


@pytest.mark.parametrize("net", ["line", pytest.param("batchnorm", marks=TORCH)])
@pytest.mark.parametrize("kills", ["1:15:file", "0:20:begin 1:20:begin 2:20:begin 3:20:begin"])
def test_checkpoints(tmp_path, net, kills):
    """If nobody has survived, or if training changes running means, training goes on from a checkpoint."""
    done = train(tmp_path, kills, NET=net, FILES=tmp_path)
    assert_same_bits(done, kills, net)
    files = net == "batchnorm" or kills.count(":") > 4
    assert ("Training goes on from checkpoint" in done.stderr) == files, done.stderr
    if net == "batchnorm" and not kills.count(":") > 4:
        assert "because training changes 1.running_mean, which is not among the trained weights" in done.stderr


@pytest.mark.parametrize("net", ["line", pytest.param("batchnorm", marks=TORCH)])
def test_without_checkpoints_training_begins_again(tmp_path, net):
    kills = "1:13:begin" if net == "batchnorm" else "0:20:begin 1:20:begin 2:20:begin 3:20:begin"
    done = train(tmp_path, kills, NET=net)
    assert_same_bits(done, kills, net)
    if net == "batchnorm":
        assert "Training goes on at step 1, because there is no checkpoint that all ranks have" in done.stderr
