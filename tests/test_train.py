"""Model.train on real ranks, for each library that it supports: results, output, errors, and resuming."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from functions import bits
from ranks import Job, everybody_is_here, ranks

import mscomm
from mscomm import arrays, dataset
from mscomm.context import ParallelMode
from mscomm.train import (
    SGD,
    LossMonitor,
    Model,
    ModelCheckpoint,
    Momentum,
    ProgressBar,
    StepTrace,
    TimeMonitor,
)

ROWS, COLUMNS, BATCHES = 8, 3, 6  # a batch of all ranks together has ROWS rows


def data_parallel(**options: Any) -> None:
    mscomm.set_auto_parallel_context(parallel_mode=ParallelMode.DATA_PARALLEL, gradients_mean=True, **options)


# --- one problem, in every library ----------------------------------------------------------------------------------


class Batches:
    """Yields this rank's part of each batch as a tuple of NumPy arrays, like a dataset pipeline."""

    def __init__(self, rank: int = 0, size: int = 1, number: int = BATCHES) -> None:
        rng = np.random.default_rng(0)
        self.all = []
        for _ in range(number):
            x = rng.normal(size=(ROWS, COLUMNS)).astype(np.float32)
            y = (x @ np.float32([1, -2, 0.5]) + np.float32(0.25))[:, None]
            part = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
            self.all.append((x[part], y[part]))

    def get_dataset_size(self) -> int:
        return len(self.all)

    def __iter__(self) -> Any:
        return iter(self.all)


def start(bias: float = 0) -> dict[str, Any]:
    return {"weight": np.full((1, COLUMNS), 0.1, np.float32), "bias": np.full(1, bias, np.float32)}


class Line:
    """The network y = x @ weight.T + bias, with the gradients of the mean squared error."""

    def __init__(self, parameters: dict[str, Any] | None = None) -> None:
        self.parameters = parameters or start()

    def loss_and_gradients(self, x: Any, y: Any) -> Any:
        off = x @ self.parameters["weight"].T + self.parameters["bias"] - y
        scale = np.float32(2 / len(x))
        return (off**2).mean(), {"weight": scale * off.T @ x, "bias": scale * off.sum(0)}


def numpy_line(bias: float = 0) -> tuple[Model, Any]:
    net = Line(start(bias))
    return Model(net, optimizer=Momentum(net.parameters, 0.05, 0.9)), lambda: net.parameters


def torch_line(bias: float = 0) -> tuple[Model, Any]:
    import torch

    net = torch.nn.Linear(COLUMNS, 1)
    net.load_state_dict({name: torch.from_numpy(x) for name, x in start(bias).items()})
    model = Model(net, torch.nn.MSELoss(), torch.optim.SGD(net.parameters(), 0.05, momentum=0.9))
    return model, lambda: {name: p.detach().numpy() for name, p in net.named_parameters()}


def jax_line(bias: float = 0) -> tuple[Model, Any]:
    import jax.numpy as jnp

    optimizer = Momentum({name: jnp.asarray(x) for name, x in start(bias).items()}, 0.05, 0.9)
    model = Model(lambda p, x: x @ p["weight"].T + p["bias"], lambda out, y: ((out - y) ** 2).mean(), optimizer)
    return model, lambda: {name: np.asarray(x) for name, x in optimizer.parameters.items()}


def mindspore_line(bias: float = 0, mode: str = "PYNATIVE_MODE") -> tuple[Model, Any]:
    import mindspore
    from mindspore import nn

    mindspore.set_context(mode=getattr(mindspore, mode))
    net = nn.Dense(COLUMNS, 1)
    for p in net.get_parameters():
        p.set_data(mindspore.Tensor(start(bias)[p.name]))
    model = Model(net, nn.MSELoss(), nn.Momentum(net.trainable_params(), 0.05, 0.9))
    return model, lambda: {p.name: p.asnumpy() for p in net.get_parameters()}


def mindspore_graph_line(bias: float = 0) -> tuple[Model, Any]:
    return mindspore_line(bias, "GRAPH_MODE")


LINES = {
    "numpy": numpy_line,
    "torch": torch_line,
    "jax": jax_line,
    "mindspore": mindspore_line,
    "mindspore, graph mode": mindspore_graph_line,
}


@contextlib.contextmanager
def printed() -> Any:
    into = io.StringIO()
    with contextlib.redirect_stdout(into):
        yield into


class Losses(mscomm.Callback):
    """Keeps the losses of each step."""

    def __init__(self) -> None:
        self.mean: list[Any] = []
        self.local: list[Any] = []

    def step_end(self, run_context: Any) -> None:
        now = run_context.original_args()
        self.mean.append(now.net_outputs)
        self.local.append(now.local_loss)
        assert 0 <= now.communication_s < 60


@contextlib.contextmanager
def shared_folder(rank: int) -> Any:
    """Yield a new folder that all ranks use."""
    folder = mscomm.broadcast_object(tempfile.mkdtemp() if rank == 0 else None)
    yield folder
    mscomm.barrier()
    if rank == 0:
        shutil.rmtree(folder)


@contextlib.contextmanager
def stderr() -> Any:
    """Capture what is written to file descriptor 2 inside the with block."""
    sys.stderr.flush()
    kept, told = os.dup(2), []
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield told
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            told += file.read().decode().splitlines()


# --- results --------------------------------------------------------------------------------------------------------


def test_every_library_is_tried():
    tried = {name.partition(",")[0] for name in LINES}
    assert set(arrays.LIBRARIES.values()) == tried | {"cupy"}  # CuPy needs a GPU: see gpu/test_train_gpu.py


def if_here(library: str) -> Any:
    missing = not importlib.util.find_spec(library.partition(",")[0])
    return pytest.param(library, marks=pytest.mark.skipif(missing, reason=f"{library} is not installed"))


@pytest.mark.parametrize("library", [if_here(library) for library in LINES])
@ranks(2, timeout_s=120)
def test_two_ranks_train_the_model_that_one_trains_with_the_whole_batch(rank, group, library):
    data_parallel(parameter_broadcast=True)
    model, weights = LINES[library](bias=rank)
    losses = Losses()
    with printed() as out, tempfile.TemporaryDirectory() as folder:
        files = ModelCheckpoint("line", folder, mscomm.CheckpointConfig(4))
        model.train(2, Batches(rank, 2), [losses, LossMonitor(4), LossMonitor(11, local=True), files])
        again, weights_again = LINES[library](bias=7)
        (Path(folder) / "line-2_6.safetensors").unlink()
        assert again.resume(folder) == (2, 2)
        again.train(2, Batches(rank, 2))
    for name, x in weights().items():
        assert (bits(np.array(x)) == bits(np.array(weights_again()[name]))).all(), name
        assert (mscomm.all_gather(np.array(x)[None]) == x).all()  # all ranks have equal weights

    lines = [f"epoch: {e} step: {s}, loss is {losses.mean[i]!s}" for e, s, i in ((1, 4, 3), (2, 2, 7), (2, 6, 11))]
    lines.insert(2, f"epoch: 2 step: 5, loss is {losses.local[10]!s}")
    assert out.getvalue().splitlines() == lines and all(type(one) is np.float32 for one in losses.mean)
    assert losses.local[0] != losses.mean[0] == mscomm.all_reduce(np.array(losses.local[0]), "avg")

    mscomm.reset_auto_parallel_context()
    net, alone = Line(), Losses()
    Model(net, optimizer=Momentum(net.parameters, 0.05, 0.9)).train(2, Batches(), alone)
    np.testing.assert_allclose(losses.mean, alone.mean, rtol=1e-4, atol=1e-6)
    for name, x in weights().items():
        np.testing.assert_allclose(x, net.parameters[name], rtol=1e-5, atol=1e-6)


@ranks(2)
def test_modes(rank, group):
    def trained(rate: float) -> Any:
        net = Line()
        Model(net, optimizer=SGD(net.parameters, rate)).train(1, Batches(rank, 2))
        return net.parameters["weight"]

    with stderr() as told:
        by_itself = trained(0.1)
        trained(0.1)
    assert [line.partition("WARN ")[2] for line in told] == [
        "Model: each of the 2 ranks trains a model of its own. For one model: mscomm.set_auto_parallel_context("
        "parallel_mode=mscomm.ParallelMode.DATA_PARALLEL, gradients_mean=True)"
    ] * (rank == 0)
    assert (mscomm.all_gather(by_itself).std(0) > 0).all()
    with stderr() as told:
        mscomm.set_auto_parallel_context(parallel_mode=ParallelMode.STAND_ALONE)
        trained(0.1)
    assert told == []
    with stderr() as told:
        mscomm.set_auto_parallel_context(parallel_mode=ParallelMode.DATA_PARALLEL, device_num=2, global_rank=rank)
        summed = trained(0.05)
        trained(0.05)
    assert len(told) == (rank == 0) and all(
        "the gradients of 2 ranks are summed, as gradients_mean" in one for one in told
    )
    with stderr() as told:
        data_parallel(comm_fusion={"allreduce": {"mode": "size", "config": 1}})
        mean = trained(0.1)
    assert told == []
    np.testing.assert_allclose(mean, summed, rtol=1e-5)
    assert (mscomm.all_gather(mean) == mean).all()


# --- errors ---------------------------------------------------------------------------------------------------------


class Short(Batches):
    def __iter__(self) -> Any:
        return iter(self.all[:2])


@ranks(2)
def test_ranks_that_do_not_fit_together_are_told_before_the_first_step(rank, group):
    data_parallel()
    with shared_folder(rank) as folder:
        check_that_they_are_told(rank, folder)


def check_that_they_are_told(rank: int, folder: str) -> None:
    if rank == 0:
        Path(folder, "link").symlink_to(folder)
    mscomm.barrier()

    def train(value: float = 0.0, data: Any = None, callbacks: Any = None, epochs: int = 1) -> None:
        net = Line({"weight": np.full((1, COLUMNS), 1.0, np.float32), "bias": np.full(1, value, np.float32)})
        model = Model(net, optimizer=SGD(net.parameters))
        model.train(epochs, data or Batches(rank, 2), callbacks)

    with pytest.raises(ValueError, match="differ in batches in an epoch: 6 on rank 0, 7 on rank 1 of the group; give"):
        train(data=Batches(rank, 2, BATCHES + rank))
    with pytest.raises(ValueError, match="differ in epochs: 1 on rank 0, 2 on rank 1"):
        train(epochs=1 + rank)
    with pytest.raises(ValueError, match=r"0 and 1 of the group begin with different weights, of bias; use the same"):
        train(value=rank)
    with pytest.raises(ValueError, match="ranks 0 and 1 of the group write checkpoints into one directory, " + folder):
        train(callbacks=[ModelCheckpoint("line", Path(folder, "link") if rank else folder)])
    data_parallel(parameter_broadcast=True)
    train(value=rank, callbacks=ModelCheckpoint("line", folder) if rank == 0 else None)
    assert rank == 1 or len(list(Path(folder).glob("line-*"))) == 5
    mscomm.set_auto_parallel_context(device_num=8)
    with pytest.raises(ValueError, match="device_num=8 was set, but the number of ranks is 2"):
        train()
    data_parallel(device_num=2, global_rank=1 - rank)
    with pytest.raises(ValueError, match=rf"global_rank={1 - rank} was set, but this rank is {rank}"):
        train()
    mscomm.reset_auto_parallel_context()
    data_parallel()
    with pytest.raises(RuntimeError, match="epoch 1 ended after 2 batches, but the dataset had announced 6"):
        train(data=Short(rank, 2))
    with pytest.raises(ValueError, match=rf"epoch: 1 step: 1\. Invalid loss nan \(\S+ on rank {rank}\): training"):
        x = np.full((4, COLUMNS), np.nan if rank else 1.0, np.float32)
        train(data=[(x, x[:, :1])], callbacks=LossMonitor(0))
    assert (mscomm.all_reduce(np.ones(1)) == 2).all()


@ranks(2)
def test_checkpoints_that_the_ranks_do_not_share(rank, group):
    data_parallel()
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder)
        files = ModelCheckpoint("line", own, mscomm.CheckpointConfig(keep_checkpoint_max=3))
        numpy_line()[0].train(1, Batches(rank, 2), files)
        assert sorted(one.name for one in own.iterdir()) == [f"line-1_{step}.safetensors" for step in (4, 5, 6)]
        if rank == 1:
            (own / "line-1_6.safetensors").unlink()
        model, _ = numpy_line()
        assert model.resume(own) == (1, 5)
        model.train(1, Batches(rank, 2), ModelCheckpoint("line", own))
        if rank == 1:
            (own / "line-1_4.safetensors").unlink()
            (own / "line-1_5.safetensors").unlink()
        else:
            (own / "line-1_6.safetensors").unlink()
        with pytest.raises(ValueError, match="no checkpoint that every rank has; the newest are 1_5 on rank 0, 1_6 on"):
            model.resume(own)
        if rank == 1:
            (own / "line-1_6.safetensors").write_bytes(b"")
        with pytest.raises(
            ValueError, match=r"rank 1 of the group: no complete checkpoint .*: not a complete safetensors"
        ):
            model.resume(own)
        if rank == 1:
            (own / "line-1_6.safetensors").unlink()
        with pytest.raises(ValueError, match=rf"rank 1 of the group has no checkpoint in {folder if rank else ''}"):
            model.resume(own)
        assert model.resume(own / "nothing") is None
        with pytest.raises(ValueError, match=r"rank 0 of the group: No such file .*none\.safetensors"):
            model.resume(own / "none.safetensors")
        file = mscomm.broadcast_object(str(own / "line-1_5.safetensors"))
        with stderr() as told:
            assert model.resume(file) == (1, 5)
        assert len(told) == rank and all("rank 1 continues from the checkpoint of rank 0" in line for line in told)
        by_the_clock = mscomm.CheckpointConfig(save_checkpoint_steps=0, save_checkpoint_seconds=[1e-9, 1e9][rank])
        # Rank 0's clock decides for all ranks when to save.
        numpy_line()[0].train(1, Batches(rank, 2), ModelCheckpoint("clock", own, by_the_clock))
        assert len(list(own.glob("clock-*"))) == 5
        mscomm.set_auto_parallel_context(parallel_mode=ParallelMode.STAND_ALONE)
        with pytest.raises(ValueError, match="was written by one of 2 ranks, now there are 1; to load only its"):
            model.resume(file)
        mscomm.barrier()


@ranks(2)
def test_one_flipped_bit_in_one_ranks_momentum(rank, group):
    data_parallel()
    with tempfile.TemporaryDirectory() as folder:
        newest, own = Path(folder, "line-1_6.safetensors"), Path(folder)
        whole, weights = numpy_line()
        whole.train(1, Batches(rank, 2), ModelCheckpoint("line", own))
        if rank == 1:
            flip_in_momentum(newest)
        going_on, weights_again = numpy_line()
        with stderr() as told:
            assert going_on.resume(own) == (1, 5)
        assert len(told) == rank and all("line-1_6.safetensors: damaged: its content" in line for line in told)
        assert newest.exists()
        going_on.train(1, Batches(rank, 2))
        for name, x in weights().items():
            assert (bits(x) == bits(weights_again()[name])).all()

        as_earlier_versions_wrote(newest)  # without a checksum, only the comparison between ranks finds the damage
        damaged, _ = numpy_line()
        assert damaged.resume(own) == (1, 6)
        with pytest.raises(ValueError, match=r"ranks 0 and 1 .* different optimizer states, of \['velocities'\]\[0\]"):
            damaged.train(2, Batches(rank, 2))
        mscomm.barrier()
    net = Line()
    with pytest.raises(ValueError, match=r"ranks 0 and 1 .* different optimizer states, of \['learning_rate'\]; make"):
        Model(net, optimizer=SGD(net.parameters, 0.1 + rank)).train(1, Batches(rank, 2))


def flip_in_momentum(path: Path) -> None:
    """Flip one bit of the first array of the optimizer's state in the file."""
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[:8], "little")
    begin, _ = json.loads(content[8 : 8 + length])["mscomm.state.0"]["data_offsets"]
    content[8 + length + begin] ^= 1
    path.write_bytes(content)


def as_earlier_versions_wrote(path: Path) -> None:
    """Rewrite the file, even if it is damaged, without its checksum and without the metadata on its training run."""
    import safetensors.numpy

    with safetensors.safe_open(path, "np") as file:
        arrays, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    new = {"mscomm.checksum", "mscomm.run", "mscomm.part", "mscomm.first"}
    safetensors.numpy.save_file(arrays, path, {name: x for name, x in metadata.items() if name not in new})


class RankOneDies(mscomm.Callback):
    def step_end(self, run_context: Any) -> None:
        if run_context.original_args().cur_step_num != 4:
            return
        everybody_is_here()  # wait until no rank is in the calls of this step
        if mscomm.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


@ranks(2, expect={1: -signal.SIGKILL})
def test_what_a_lost_rank_had_is_kept_by_the_others(rank, group):
    data_parallel()
    with tempfile.TemporaryDirectory() as folder:
        files = ModelCheckpoint("line", folder, mscomm.CheckpointConfig(keep_checkpoint_max=1))
        with pytest.raises(mscomm.PeerLost, match="rank 1"):
            numpy_line()[0].train(1, Batches(rank, 2), [RankOneDies(), files])
        assert "line-1_3.safetensors" in os.listdir(folder)  # the newest step that both ranks had saved
        assert len(os.listdir(folder)) == 2


def test_wrong_arguments():
    net = Line()
    model = Model(net, optimizer=SGD(net.parameters))
    for arguments, error, says in [
        ({"epoch": 0}, ValueError, "epoch=0; expected 1 or more"),
        ({"epoch": 1.0}, TypeError, "epoch is a float; expected an int"),
        ({"sink_size": 0}, ValueError, "sink_size=0; expected -1 or 0 or more"),
        ({"initial_epoch": 2}, ValueError, "initial_epoch=2 must be less than epoch=2"),
        ({"train_dataset": iter([])}, TypeError, "which has neither get_dataset_size"),
        ({"train_dataset": []}, ValueError, "has no batches on this rank"),
        (
            {"callbacks": [print]},
            TypeError,
            "callbacks has a builtin_function_or_method; expected an mscomm.train.Callback",
        ),
    ]:
        with pytest.raises(error, match=re.escape(says)):
            model.train(**{"epoch": 2, "train_dataset": Batches(), **arguments})
    with pytest.raises(ValueError, match="there is no optimizer"):
        Model(net).train(1, Batches())
    with pytest.raises(TypeError, match=r"network is a dict; expected a torch\.nn\.Module, a MindSpore cell"):
        Model({})
    with pytest.raises(TypeError, match="loss_fn is a int"):
        Model(net, 3)
    with pytest.raises(ValueError, match=r"the optimizer's parameters are not the arrays in network\.parameters"):
        Model(net, optimizer=SGD(start())).train(1, Batches())
    with pytest.raises(TypeError, match="leave loss_fn out"):
        Model(net, print)
    with pytest.raises(ValueError, match=r"the loss has the shape \[2\]; it must be one number"):
        net.loss_and_gradients = lambda x, y: (np.zeros(2), net.parameters)
        model.train(1, Batches())
    for arguments, error in [((-0.1, 0.9), ValueError), ((0.1, "0.9"), TypeError), ((True, 0.9), TypeError)]:
        with pytest.raises(error):
            Momentum([np.zeros(1)], *arguments)
    with pytest.raises(ValueError, match=r"gradients of \['a'\], parameters \['b'\]"):
        SGD({"b": np.zeros(1)}).step({"a": np.zeros(1)})


# --- callbacks ------------------------------------------------------------------------------------------------------


class Order(mscomm.Callback):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def note(self, hook: str, run_context: Any) -> None:
        now = run_context.original_args()
        self.seen.append(f"{hook} {now.cur_epoch_num}/{now.epoch_num} {now.cur_step_num} {now.batch_num}")

    def begin(self, run_context: Any) -> None:
        self.note("begin", run_context)

    def on_train_epoch_begin(self, run_context: Any) -> None:
        self.note("epoch_begin", run_context)

    def step_begin(self, run_context: Any) -> None:
        self.note("step_begin", run_context)

    def on_train_step_end(self, run_context: Any) -> None:
        self.note("step_end", run_context)

    def epoch_end(self, run_context: Any) -> None:
        self.note("epoch_end", run_context)

    def end(self, run_context: Any) -> None:
        self.note("end", run_context)

    def __exit__(self, *error: object) -> None:
        self.seen.append("left")


def test_callbacks_are_called_in_order():
    order = Order()
    numpy_line()[0].train(3, Batches(number=2), [order], dataset_sink_mode=True, sink_size=2, initial_epoch=1)
    steps = [(epoch, step) for epoch in (2, 3) for step in (2 * epoch - 1, 2 * epoch)]
    expected = ["begin 2/3 2 2"]
    for epoch in (2, 3):
        expected.append(f"epoch_begin {epoch}/3 {2 * epoch - 2} 2")
        expected += [f"step_{w} {epoch}/3 {s} 2" for e, s in steps if e == epoch for w in ("begin", "end")]
        expected.append(f"epoch_end {epoch}/3 {2 * epoch} 2")
    assert order.seen == [*expected, "end 3/3 6 2", "left"]

    class Fails(mscomm.Callback):
        def step_end(self, run_context: Any) -> None:
            raise KeyError("mine")

    order = Order()
    with pytest.raises(KeyError, match="mine"):
        numpy_line()[0].train(1, Batches(), [order, Fails()])
    assert order.seen[-2:] == ["step_end 1/1 1 6", "left"]


@pytest.mark.parametrize(("dtype", "text"), [("f4", "2.3025854"), ("f8", "2.302585092994046"), ("f2", "2.303")])
def test_a_loss_is_printed_with_the_digits_of_its_dtype(capsys, dtype, text):
    net = Line()
    net.loss_and_gradients = lambda x, y: (np.dtype(dtype).type(text), net.parameters)
    Model(net, optimizer=SGD(net.parameters)).train(1, Batches(number=1), LossMonitor())
    assert capsys.readouterr().out == f"epoch: 1 step: 1, loss is {text}\n"


@ranks(2)
def test_a_mean_is_printed_so_too(rank, group):
    data_parallel()
    net = Line()
    net.loss_and_gradients = lambda x, y: (np.float32([2.25, 2.3551708][rank]), net.parameters)
    with printed() as out:
        Model(net, optimizer=SGD(net.parameters)).train(1, Batches(rank, 2, 1), LossMonitor())
    assert out.getvalue() == "epoch: 1 step: 1, loss is 2.3025854\n"


def test_the_first_program_of_the_page_prints_what_it_shows(tmp_path):
    page = (Path(__file__).parent.parent / "docs/training.md").read_text()
    code, shown = (re.search(rf"^```{kind}\n(.*?)^```", page, re.M | re.S)[1] for kind in ("python", "console"))
    (tmp_path / "line.py").write_text(code)
    command = [sys.executable, "-m", "mscomm", *shown.splitlines()[0].split()[2:]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    printed_lines, shown_lines = sorted(done.stdout.splitlines()), sorted(shown.splitlines()[1:])
    assert len(printed_lines) == len(shown_lines) == 4
    for mine, theirs in zip(printed_lines, shown_lines, strict=True):
        (words, loss), (expected_words, expected) = (line.rsplit(" ", 1) for line in (mine, theirs))
        assert words == expected_words and float(loss) == pytest.approx(float(expected), rel=1e-4)


def test_the_times_of_an_epoch(capsys):
    numpy_line()[0].train(2, Batches(), [TimeMonitor()])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    for line in lines:
        found = re.fullmatch(r"Train epoch time: (\d+\.\d{3}) ms, per step time: (\d+\.\d{3}) ms", line)
        assert found and abs(float(found[1]) / BATCHES - float(found[2])) < 0.01
    with pytest.raises(ValueError, match="per_print_times is -1"):
        LossMonitor(-1)
    with pytest.raises(TypeError, match="per_print_times is a float"):
        LossMonitor(1.0)


@ranks(2)
def test_the_bar_is_rank_0s(rank, group):
    from rich.console import Console

    data_parallel()
    console = Console(file=io.StringIO(), width=120)
    numpy_line()[0].train(2, Batches(rank, 2), [ProgressBar(console)])
    shown = console.file.getvalue()
    line = r"epoch {} {}/6 loss \d+\.\d{{4}}  \d+ images/s  \d+ % communication\n"
    assert re.fullmatch(line.format("2/2", 6), shown) if rank == 0 else shown == ""

    # A long training run prints a line every _EVERY_S seconds. With _EVERY_S = 0, it prints a line for each step. The
    # lines contain no control characters.
    with mock.patch("mscomm.train.monitors._EVERY_S", 0.0):
        numpy_line()[0].train(2, Batches(rank, 2), [ProgressBar(console)])
    lines = "".join(line.format(f"{1 + i // 6}/2", 1 + i % 6) for i in range(12))
    later = console.file.getvalue()[len(shown) :]
    assert re.fullmatch(lines, later) if rank == 0 else later == ""


@ranks(1)
def test_on_a_terminal_there_is_a_bar(rank, group):
    from rich.console import Console

    data_parallel()
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    numpy_line()[0].train(1, Batches(rank, 1), [ProgressBar(console)])
    assert "━" in console.file.getvalue()


@ranks(2)
def test_a_trace_of_the_steps(rank, group):
    from click.testing import CliRunner

    from mscomm.cli import trace

    data_parallel()
    with shared_folder(rank) as folder:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            numpy_line()[0].train(2, Batches(rank, 2), [StepTrace(folder, 3, 8)])
            numpy_line()[0].train(1, Batches(rank, 2), [StepTrace(Path(folder, "late"), 7)])
        told = (
            f"StepTrace: steps 3 to 8 are in {folder}, of 12 (first_step=3, last_step=8)\n"
            f"StepTrace: no step is in {folder}/late, of 6 (first_step=7, last_step=20)\n"
        )
        assert said.getvalue() == (told if rank == 0 else "")
        mscomm.barrier()
        merged = Path(folder, f"merged_by_{rank}")
        told = CliRunner().invoke(trace.command, ["merge", folder, "-o", str(merged)])
        assert told.exit_code == 0, told.output
        events = [event for event in json.loads(merged.read_text())["traceEvents"] if event["ph"] == "X"]
    for pid in range(2):
        of_rank = {
            name: [one for one in events if (one["pid"], one["name"]) == (pid, name)]
            for name in ("data", "step", "all_reduce")
        }
        steps, calls = of_rank["step"], of_rank["all_reduce"]
        assert [one["args"]["call"].split()[1] for one in steps] == [f"#{step}" for step in range(3, 9)]
        assert len(of_rank["data"]) == len(calls) == 6  # one call per step, because there is one bucket
        for step, call in zip(steps, calls, strict=True):
            assert step["ts"] - 1000 <= call["ts"] <= call["ts"] + call["dur"] <= step["ts"] + step["dur"] + 1000
    with pytest.raises(ValueError, match="steps 3 to 2"):
        StepTrace(folder, 3, 2)


@pytest.mark.parametrize("library", [if_here("mindspore")])
@ranks(2, timeout_s=120)
def test_mindspores_layerwise_parameters_are_each_ranks_own(rank, group, library):
    import mindspore
    from mindspore import nn

    data_parallel(parameter_broadcast=True)
    net = nn.Dense(COLUMNS, 1)
    net.weight.set_data(mindspore.Tensor(np.full((1, COLUMNS), rank + 1, np.float32)))
    net.bias.layerwise_parallel = True
    net.bias.set_data(mindspore.Tensor(np.full(1, rank, np.float32)))
    Model(net, nn.MSELoss(), nn.Momentum(net.trainable_params(), 0.05, 0.9)).train(1, Batches(rank, 2))
    weight, bias = net.weight.asnumpy(), net.bias.asnumpy()
    assert (mscomm.all_gather(weight) == weight).all() and mscomm.all_gather(bias).std() > 0


# --- PyTorch --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", [if_here("torch")])
@ranks(2, timeout_s=120)
def test_what_pytorch_wants(rank, group, library):
    import torch

    data_parallel()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 3))
    torch.nn.init.constant_(net[0].weight, rank).requires_grad_(False)
    with pytest.raises(ValueError, match=r"ranks 0 and 1 of the group begin with different weights, of 0\.weight"):
        Model(net, torch.nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), 0.1)).train(1, [(0, 0)])
    torch.manual_seed(rank)
    data_parallel(parameter_broadcast=True)
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3)).eval()
    frozen = net[0].weight.requires_grad_(False)
    model = Model(net, torch.nn.CrossEntropyLoss(), torch.optim.Adam([p for p in net.parameters() if p.requires_grad]))
    x = np.random.default_rng(rank).normal(size=(8, 4)).astype(np.float32)
    fixed, labels = x[::-1].copy(), np.arange(8, dtype=np.uint32) % 3
    fixed.flags.writeable = False
    batches = [(x[::-1], labels), {"data": fixed, "label": labels.astype(np.int32)}, [torch.ones(8, 4), list(labels)]]
    model.train(2, batches)
    assert (mscomm.all_gather(frozen[None]) == frozen).all() and net.training
    flat = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    assert (mscomm.all_gather(flat[None]) == flat).all()
    net(torch.ones(2, 4)).sum().backward()  # would raise an error if training had left hooks on the parameters
    net(torch.ones(2, 4)).sum().backward()
    model.train(1, batches)

    class Squares(torch.nn.Linear):
        def forward(self, x: Any) -> Any:
            return (super().forward(x) ** 2).mean()

    squares = Squares(4, 1)
    losses = Losses()
    Model(squares, optimizer=torch.optim.SGD(squares.parameters(), 0.01)).train(3, [[x]], losses)
    assert losses.mean[0] > losses.mean[1] > losses.mean[2]
    with pytest.raises(ValueError, match=r"with a loss_fn a batch is \(data, label\); this one has 1 arrays"):
        model.train(1, [x])
    assert mscomm.load_param_into_net(net, {"1.running_mean": np.ones(6), "x": np.ones(1)})[1] == ["x"]
    assert (net[1].running_mean == 1).all()


# --- after all ranks were killed ------------------------------------------------------------------------------------

STEPS_AN_EPOCH, EPOCHS = 7, 4


def pipeline(rank: int) -> Any:
    """Return a shuffled dataset, which can report and resume its position."""
    rows = [(x[i], y[i]) for x, y in Batches(number=STEPS_AN_EPOCH).all for i in range(ROWS)]
    return dataset.GeneratorDataset(rows, ["x", "y"], num_shards=2, shard_id=rank).shuffle(10).batch(ROWS // 2)


class Noisy(Line):
    """A Line with noise from NumPy's and Python's global random generators."""

    def loss_and_gradients(self, x: Any, y: Any) -> Any:
        return super().loss_and_gradients(
            x + np.random.normal(scale=0.1, size=x.shape).astype("f4") * random.random(), y
        )


class Schedule(mscomm.Callback):
    """A callback that steps a scheduler of torch.optim.lr_scheduler at the end of each epoch."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def state_dict(self) -> dict[str, Any]:
        return self.scheduler.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state)

    def epoch_end(self, run_context: Any) -> None:
        self.scheduler.step()


def numpy_training(rank: int) -> tuple[Model, Any, Any, list[Any]]:
    np.random.seed(rank)
    random.seed(rank)
    net = Noisy()
    return Model(net, optimizer=Momentum(net.parameters, 0.05, 0.9)), pipeline(rank), lambda: net.parameters, []


def torch_training(rank: int) -> tuple[Model, Any, Any, list[Any]]:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(rank)
    layers = [torch.nn.Linear(COLUMNS, 20), torch.nn.BatchNorm1d(20), torch.nn.Dropout(0.3), torch.nn.Linear(20, 1)]
    net = torch.nn.Sequential(*layers)
    x = torch.randn(4 * STEPS_AN_EPOCH, COLUMNS)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :1]), batch_size=4, shuffle=True)
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    model = Model(net, torch.nn.MSELoss(), optimizer, compression="bf16")
    schedule = Schedule(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    return model, loader, lambda: {name: x.numpy() for name, x in net.state_dict().items()}, [schedule]


TRAININGS = {"numpy": numpy_training, "torch": torch_training}


class Slow(mscomm.Callback):
    """Slows training down, so that the test can kill the ranks before the last step."""

    def step_end(self, run_context: Any) -> None:
        time.sleep(0.05 if run_context.original_args().cur_step_num < 20 else 120)


def train_in(folder: Path, library: str, *callbacks: Any) -> None:
    """Train like a script that resumes from a checkpoint if there is one. Print the resulting weights."""
    model, data, weights, schedules = TRAININGS[library](mscomm.get_rank())
    began = model.resume(folder)
    print(f"begins after {began}", flush=True)
    config = mscomm.CheckpointConfig(save_checkpoint_steps=3, keep_checkpoint_max=1)
    model.train(EPOCHS, data, [LossMonitor(), ModelCheckpoint("t", folder, config), *schedules, *callbacks])
    for name, x in weights().items():
        print("result", name, bits(np.array(x)).tobytes().hex(), flush=True)


def run_training(library: str, folder: str, again: bool) -> None:
    mscomm.init()
    data_parallel(parameter_broadcast=True)
    own = Path(folder, str(mscomm.get_rank()))
    if not again:
        train_in(own / "whole", library)
        train_in(own / "parts", library, Slow())
    else:
        train_in(own / "parts", library)


@pytest.mark.parametrize("library", [if_here(library) for library in TRAININGS])
def test_a_training_whose_ranks_were_all_killed_ends_with_the_bits_of_one_that_was_not(library, tmp_path):
    def job(name: str) -> Job:
        (tmp_path / name).mkdir()
        return Job(2, [sys.executable, "-u", __file__, library, str(tmp_path), name], tmp_path / name)

    def told(job: Job, rank: int) -> list[str]:
        return [line for line in job.output(rank).splitlines() if line.startswith(("begins", "epoch", "result"))]

    broken = job("first")
    until, seen = time.monotonic() + 120, re.compile(r"result.*begins.*epoch: 2 step: 4", re.S)
    while not seen.search(broken.output(0)) and time.monotonic() < until:
        time.sleep(0.005)
    broken.kill()  # kill() sends SIGKILL
    assert seen.search(broken.output(0)), broken.logs()
    second = job("again")
    assert second.wait(120) == [0, 0], second.logs()
    for rank in range(2):
        before, went_on = told(broken, rank), told(second, rank)
        first = before.index("begins after None")
        assert first == 0 and before.count("begins after None") == 2 and went_on[0] != "begins after None"
        whole = before[1 : before.index("begins after None", 1)]
        assert before[len(whole) + 2 :] == whole[: len(before) - len(whole) - 2]
        assert len(whole) > len(went_on) > 5 and went_on[1:] == whole[-len(went_on) + 1 :]
        assert sum(line.startswith("result") for line in went_on) >= 2


# --- a full disk ----------------------------------------------------------------------------------------------------


@ranks(2, init=None)
def train_in_a_full_folder(folder, limited):
    mscomm.init()
    rank = mscomm.get_rank()
    if limited and rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    data_parallel()
    model, _ = numpy_line()
    own = os.path.join(folder, str(rank))
    print("goes on after", model.resume(own), flush=True)
    model.train(1, Batches(rank, 2), ModelCheckpoint("line", own, mscomm.CheckpointConfig(4)))


@contextlib.contextmanager
def small_disk(folder: Path) -> Any:
    """Mount a file system of one page. Yield a function that enlarges it, or None if mounting is not allowed."""
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "full", folder], capture_output=True).returncode:
        yield None
        return
    try:
        yield lambda: subprocess.run(["mount", "-o", "remount,size=1m", folder], check=True)
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_first_checkpoint_that_one_rank_could_not_write(tmp_path):
    def run(name: str, limited: bool = False) -> tuple[list[Any], Job]:
        parameters = {"folder": str(tmp_path), "limited": limited}
        order = {"file": __file__, "name": "train_in_a_full_folder", "parameters": parameters, "init": None}
        (tmp_path / name).mkdir()
        job = Job(2, [], tmp_path / name, test=order)  # forks the ranks
        return job.wait(120), job

    def files(rank: int) -> list[str]:
        return sorted(path.name for path in (tmp_path / str(rank)).iterdir())

    with small_disk(tmp_path / "1") as enlarge:
        codes, job = run("full", limited=enlarge is None)
        assert codes[1] == 1 and "line-1_4.safetensors cannot be written" in job.output(1), job.logs()
        assert files(0) == ["line-1_4.safetensors"] and files(1) == []
        before = (tmp_path / "0/line-1_4.safetensors").read_bytes()
        if enlarge:
            enlarge()
        codes, job = run("restarted")
        assert codes == [0, 0], job.logs()
        told = [line for line in job.output(0).splitlines() + job.output(1).splitlines() if "WARN" in line]
        assert len(told) == 1 and "training begins at step 0: not every rank has written the first" in told[0]
        assert "(1_4 on rank 0; rank 1 has none). The files stay where they are" in told[0]
        assert files(0) == ["line-1_4.safetensors", "line_1-1_4.safetensors", "line_1-1_6.safetensors"]
        assert files(1) == ["line-1_4.safetensors", "line-1_6.safetensors"]
        assert (tmp_path / "0/line-1_4.safetensors").read_bytes() == before
        # line_1-* on rank 0 and line-* on rank 1 belong to one training run. Without rank 0's newest file, both ranks
        # resume from 1_4.
        (tmp_path / "0/line_1-1_6.safetensors").unlink()
        codes, job = run("again")
        assert codes == [0, 0] and all("goes on after (1, 4)" in job.output(rank) for rank in range(2)), job.logs()
        # Now rank 0 has only a file of an older training run, with the same name as one of rank 1's files of the last
        # training run.
        (tmp_path / "0/line_1-1_4.safetensors").unlink()
        (tmp_path / "0/line_1-1_6.safetensors").unlink()
        codes, job = run("mixed")
        assert codes != [0, 0] and "has no checkpoint of the last training in" in job.output(1), job.logs()


if __name__ == "__main__":
    run_training(sys.argv[1], sys.argv[2], sys.argv[3] == "again")
