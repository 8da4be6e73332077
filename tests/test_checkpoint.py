"""Checkpoints: the files themselves, what ModelCheckpoint keeps, and the messages about damaged files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from functions import bits

import mscomm
from mscomm.arrays.numpy import DTYPES, dtype_of
from mscomm.train import (
    SGD,
    CheckpointConfig,
    Model,
    ModelCheckpoint,
    Momentum,
    load_checkpoint,
    load_param_into_net,
    save_checkpoint,
    serialization,
    states,
    tensorfile,
)

# --- files ----------------------------------------------------------------------------------------------------------


def some_arrays() -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.integers(0, 2, (3, 5)).astype(dtype_of(DTYPES.index(name)))
        for name in DTYPES
        if name in tensorfile.HELD
    }
    return {**arrays, "scalar": np.array(2.5), "empty": np.zeros((0, 4), np.int16), "fortran": np.ones((2, 3)).T * 1.5}


def test_a_dtype_that_the_format_has_not_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"x has dtype complex128; safetensors files hold bool, int8"):
        tensorfile.write(tmp_path / "file", {"x": np.zeros(2, complex)}, {})
    with pytest.raises(TypeError, match=r"x has dtype float8_e5m2; safetensors files hold bool, int8"):
        tensorfile.write(tmp_path / "file", {"x": np.zeros(2, ml_dtypes.float8_e5m2)}, {})
    assert list(tmp_path.iterdir()) == []


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "file.safetensors"
    tensorfile.write(path, some_arrays(), {"who": "me"})
    arrays, metadata = tensorfile.read(path)
    assert metadata == {"who": "me"} and set(arrays) == set(some_arrays())
    for name, x in some_arrays().items():
        assert arrays[name].dtype == x.dtype and arrays[name].shape == x.shape and (bits(arrays[name]) == bits(x)).all()
    arrays["scalar"][...] = 3  # arrays that were read from a file must be writeable
    tensorfile.write(path, {}, {})
    assert tensorfile.read(path) == ({}, {})
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace

    def synced(fd: int) -> None:
        calls.append(f"sync {os.readlink(f'/proc/self/fd/{fd}')} of {os.fstat(fd).st_size}")
        fsync(fd)

    def named(partial: Any, path: Any) -> None:
        calls.append(f"{partial} becomes {path}")
        replace(partial, path)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", named)
    tensorfile.write(tmp_path / "file", {"x": np.zeros(100_000)}, {})
    size, folder = (tmp_path / "file").stat().st_size, tmp_path.stat().st_size
    partial = calls[0].split()[1]
    assert partial.startswith(f"{tmp_path}/.file.")
    assert calls == [
        *(f"sync {partial} of {size}", f"{partial} becomes {tmp_path / 'file'}", f"sync {tmp_path} of {folder}"),
    ]


@pytest.mark.parametrize("dtype", ["F4", "F8_E8M0"])
def test_a_dtype_that_numpy_lacks_is_told(tmp_path, dtype):
    path = tmp_path / "file"
    header = json.dumps({"x": {"dtype": dtype, "shape": [0], "data_offsets": [0, 0]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match=f"file: 'x' has dtype {dtype}, which NumPy lacks"):
        tensorfile.read(path)


@pytest.mark.parametrize("installed", [True, False])
def test_a_process_that_has_not_imported_ml_dtypes_reads_bfloat16(tmp_path, installed):
    path = tmp_path / "file"
    tensorfile.write(path, {"x": np.ones(2, ml_dtypes.bfloat16)}, {})
    program = "import sys, mscomm\nassert 'ml_dtypes' not in sys.modules\n"
    program += "" if installed else "sys.modules['ml_dtypes'] = None\n"
    program += f"print(mscomm.load_checkpoint({str(path)!r})['x'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    if installed:
        assert done.stdout == "[1 1]\n", done.stderr
    else:
        assert "ValueError" in done.stderr and "has dtype BF16, which NumPy lacks; install ml-dtypes" in done.stderr


def test_a_file_that_ends_early_anywhere_is_told(tmp_path):
    path = tmp_path / "file"
    tensorfile.write(path, {"x": np.arange(5.0)}, {"who": "me"})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=rf"file: not a complete safetensors file \({length} bytes\)"):
            tensorfile.read(path)
    path.write_bytes(whole + b"1")
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        tensorfile.read_metadata(path)


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file. A negative number counts bits from the end of the file."""
    content = bytearray(path.read_bytes())
    bit %= 8 * len(content)
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_no_flipped_bit_changes_what_is_read(tmp_path):
    path = tmp_path / "file"
    tensorfile.write(path, {"x": np.arange(3.0), "y": np.array(1, np.int16)}, {"who": "me", "when": "now"})
    size, found = path.stat().st_size, 0
    for bit in range(8 * size):
        flip(path, bit)
        try:
            arrays, metadata = tensorfile.read(path)
        except ValueError:
            found += 1
        else:  # the flip may go unnoticed only in the checksum's key and in the spaces after the header
            assert set(arrays) == {"x", "y"} and (arrays["x"] == np.arange(3.0)).all() and arrays["y"] == 1
            assert metadata["who"] == "me" and metadata["when"] == "now"
            assert arrays["x"].dtype == np.float64 and arrays["y"].dtype == np.int16
        flip(path, bit)
    assert found > 0.6 * 8 * size
    flip(path, -1)
    with pytest.raises(ValueError, match="file: damaged: its content does not match its checksum"):
        load_checkpoint(path)


def as_earlier_versions_wrote(path: Path) -> None:
    """Rewrite the file as earlier versions wrote it: without a checksum and without metadata about the training run."""
    import safetensors.numpy

    arrays, metadata = tensorfile.read(path)
    new = {"mscomm.run", "mscomm.part", "mscomm.first"}
    safetensors.numpy.save_file(arrays, path, {name: x for name, x in metadata.items() if name not in new})


def test_foreign_files_are_no_safetensors_files(tmp_path):
    path = tmp_path / "net.ckpt"
    for content in (b"", b"\x08\x96\x01" * 40, b"{" * 100, b"PK\x03\x04" + bytes(200)):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"net\.ckpt: not a complete safetensors file"):
            load_checkpoint(path)


def test_a_write_that_fails_leaves_the_file_before_it(tmp_path):
    path = tmp_path / "file"
    tensorfile.write(path, {"x": np.ones(3)}, {})
    code = (
        "import resource, signal, sys; from pathlib import Path; import numpy as np\n"
        "from mscomm.train import tensorfile\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "tensorfile.write(Path(sys.argv[1]), {'x': np.zeros(1_000_000)}, {})"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=60)
    assert "file cannot be written: " in done.stderr and "OSError" in done.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
    assert (tensorfile.read(path)[0]["x"] == 1).all()


def test_a_state_comes_back_with_its_types():
    state = {
        "lr": 0.1,
        "betas": (0.9, float("inf")),
        "flags": [True, None, "text", -(2**70)],
        3: {"x": np.arange(3, dtype=ml_dtypes.bfloat16), "y": np.float32(2)},
    }
    text, arrays = states.to_text(state)
    back = states.from_text(text, arrays)
    assert {key: back[key] for key in ("lr", "betas", "flags")} == {key: state[key] for key in ("lr", "betas", "flags")}
    assert (back[3]["x"] == state[3]["x"]).all() and back[3]["y"] == 2 and back[3]["y"].dtype == np.float32
    with pytest.raises(TypeError, match=r"state\['a'\]\[1\] is a set; a checkpoint holds numbers, text and arrays"):
        states.to_text({"a": [1, {2}]})
    with pytest.raises(ValueError, match="this is not a training state"):
        states.from_text('{"object": "os.system"}', {})


# --- save_checkpoint, load_checkpoint, load_param_into_net ----------------------------------------------------------


def test_a_file_of_mindspore_says_how_to_convert_it(tmp_path):
    path = tmp_path / "resnet.ckpt"
    path.write_bytes(b"\n\x17\n\x06weight\x12\r\x08\x03\x12\x07Float32")  # MindSpore's protobuf message `Checkpoint`
    line = re.escape(f'mscomm.save_checkpoint(mindspore.load_checkpoint("{path}"), "{tmp_path}/resnet.safetensors")')
    with pytest.raises(ValueError, match=f"MindSpore's .ckpt. Convert it once, where MindSpore is installed: {line}$"):
        load_checkpoint(path)


class Line:
    """The network y = a x + b, with the gradients of the mean squared error."""

    def __init__(self) -> None:
        self.parameters = {"a": np.zeros(3), "b": np.zeros((), np.float32)}

    def loss_and_gradients(self, x: Any, y: Any) -> Any:
        off = x @ self.parameters["a"] + self.parameters["b"] - y
        gradients = {"a": 2 * off @ x / len(x), "b": np.asarray(2 * off.mean(), np.float32)}
        return (off**2).mean(), gradients


class Batches:
    """A dataset in which y is a known linear function of x. Every pass has the same batches."""

    def __init__(self, number: int = 5) -> None:
        rng = np.random.default_rng(0)
        self.all = []
        for _ in range(number):
            x = rng.normal(size=(8, 3))
            self.all.append((x, x @ [1.0, -2.0, 0.5] + 0.25))

    def get_dataset_size(self) -> int:
        return len(self.all)

    def __iter__(self) -> Any:
        return iter(self.all)


def test_weights_go_into_a_file_and_back(tmp_path):
    net, other = Line(), Line()
    net.parameters["a"][:] = [1, 2, 3]
    save_checkpoint(net, tmp_path / "net", append_dict={"accuracy": 0.5})
    weights = load_checkpoint(tmp_path / "net")
    assert list(tmp_path.iterdir()) == [tmp_path / "net.safetensors"]
    assert weights["accuracy"] == 0.5 and (weights["a"] == [1, 2, 3]).all()
    assert load_param_into_net(other, weights) == ([], ["accuracy"]) and (other.parameters["a"] == [1, 2, 3]).all()
    assert load_param_into_net(other, load_checkpoint(tmp_path / "net", filter_prefix="a"))[0] == ["a"]
    save_checkpoint({"a": np.ones(3, np.float32)}, tmp_path / "net.ckpt")  # any name is allowed
    load_checkpoint(tmp_path / "net.ckpt", net=other)
    assert (other.parameters["a"] == 1).all() and other.parameters["a"].dtype == np.float64
    load_param_into_net(other, {"a": np.full(3, 2, ml_dtypes.bfloat16)})
    assert (other.parameters["a"] == 2).all()
    for wrong, says in [
        ({"a": np.ones(4)}, r"a is \[4\] in the file, the network's is \[3\]"),
        ({"b": np.ones((), bool)}, "b is bool in the file, the network's is float32"),
    ]:
        with pytest.raises(ValueError, match=says):
            load_param_into_net(other, wrong)
    with pytest.raises(ValueError, match="a is float32, the network's is float64"):
        load_param_into_net(other, {"a": np.ones(3, np.float32)}, strict_load=True)
    with pytest.raises(FileNotFoundError):
        load_checkpoint(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="there is no checkpoint in"):
        load_checkpoint(tmp_path)
    with pytest.raises(TypeError, match=r"append_dict\['net'\] is a Line; expected a number"):
        save_checkpoint(net, tmp_path / "net", append_dict={"net": net})


# --- ModelCheckpoint in a training run on one rank ------------------------------------------------------------------


class Drawn(Batches):
    """Batches that are in a new order in each pass. The order is drawn from NumPy's global generator."""

    def __iter__(self) -> Any:
        return iter([self.all[i] for i in np.random.permutation(len(self.all))])


def model() -> Model:
    net = Line()
    return Model(net, optimizer=Momentum(net.parameters, 0.05, 0.9))


def names(directory: Path) -> list[str]:
    return sorted(one.name for one in directory.iterdir())


def test_the_newest_checkpoint_is_that_of_the_highest_epoch_and_not_of_the_last_name(tmp_path):
    model().train(10, Batches(1), [ModelCheckpoint("m", tmp_path, CheckpointConfig(1, keep_checkpoint_max=2))])
    assert names(tmp_path) == ["m-10_1.safetensors", "m-9_1.safetensors"]
    assert (load_checkpoint(tmp_path)["a"] == load_checkpoint(tmp_path / "m-10_1.safetensors")["a"]).all()
    assert (load_checkpoint(tmp_path)["a"] != load_checkpoint(tmp_path / "m-9_1.safetensors")["a"]).any()


def test_names_and_number_of_the_files(tmp_path):
    callback = ModelCheckpoint("line", tmp_path / "new/one", CheckpointConfig(2, keep_checkpoint_max=2))
    model().train(2, Batches(), [callback])
    assert names(tmp_path / "new/one") == ["line-2_3.safetensors", "line-2_5.safetensors"]
    assert callback.latest_ckpt_file_name == str(tmp_path / "new/one/line-2_5.safetensors")
    model().train(1, Batches(), [ModelCheckpoint("line", tmp_path / "new/one", CheckpointConfig(5))])
    model().train(1, Batches(), [ModelCheckpoint("line", tmp_path / "new/one", CheckpointConfig(4))])
    assert set(names(tmp_path / "new/one")) == {
        *("line-2_3.safetensors", "line-2_5.safetensors", "line_1-1_5.safetensors"),
        *("line_2-1_4.safetensors", "line_2-1_5.safetensors"),
    }
    newest = load_checkpoint(tmp_path / "new/one")
    assert (newest["a"] == load_checkpoint(tmp_path / "new/one/line_2-1_5.safetensors")["a"]).all()


def test_the_last_complete_file_is_there_until_the_next_one_is(tmp_path, monkeypatch):
    seen = []
    real = os.replace

    def replace(partial: Any, path: Any) -> None:
        seen.append((names(tmp_path), Path(path).name))
        real(partial, path)

    monkeypatch.setattr(os, "replace", replace)
    model().train(1, Batches(), [ModelCheckpoint("m", tmp_path, CheckpointConfig(keep_checkpoint_max=1))])
    for step, (there, name) in enumerate(seen[1:], 2):
        assert f"m-1_{step - 1}.safetensors" in there and name == f"m-1_{step}.safetensors"
    assert names(tmp_path) == ["m-1_5.safetensors"]


def test_seconds_and_minutes(tmp_path, monkeypatch):
    import time

    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "time", lambda: 1e9 + clock[0])

    class Wait(mscomm.Callback):
        def step_begin(self, run_context: Any) -> None:
            clock[0] += 20

    every = CheckpointConfig(save_checkpoint_steps=0, save_checkpoint_seconds=40)
    model().train(1, Batches(7), [Wait(), ModelCheckpoint("s", tmp_path / "seconds", every)])
    assert names(tmp_path / "seconds") == [f"s-1_{step}.safetensors" for step in (2, 4, 6, 7)]
    kept = CheckpointConfig(keep_checkpoint_max=0, keep_checkpoint_per_n_minutes=1)
    model().train(1, Batches(7), [Wait(), ModelCheckpoint("m", tmp_path / "minutes", kept)])
    assert names(tmp_path / "minutes") == [f"m-1_{step}.safetensors" for step in (3, 6, 7)]


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"save_checkpoint_steps": -1}, ValueError, "save_checkpoint_steps is -1"),
        ({"save_checkpoint_steps": 1.5}, TypeError, "save_checkpoint_steps is a float"),
        ({"save_checkpoint_steps": 0, "keep_checkpoint_max": None}, ValueError, "one of save_checkpoint_steps, "),
        ({"exception_save": True}, NotImplementedError, "exception_save is not in this release"),
        ({"steps": 3}, TypeError, "unknown option 'steps'"),
    ],
)
def test_configurations_that_are_refused(options, error, says):
    with pytest.raises(error, match=says):
        CheckpointConfig(**options)


def test_checkpoints_that_are_refused(tmp_path):
    with pytest.raises(ValueError, match="prefix 'a/b' must be part of a file's name"):
        ModelCheckpoint("a/b", tmp_path)
    with pytest.raises(TypeError, match="config is a dict; expected a CheckpointConfig"):
        ModelCheckpoint("a", tmp_path, {})
    save_checkpoint(Line(), tmp_path / "a-1_1.safetensors")
    with pytest.raises(ValueError, match="has weights, but no training state"):
        serialization.load_training(tmp_path / "a-1_1.safetensors")


def test_broken_files_are_told_and_the_older_one_is_used(tmp_path, capfd):
    model().train(1, Batches(), [ModelCheckpoint("m", tmp_path)])
    newest, older = tmp_path / "m-1_5.safetensors", tmp_path / "m-1_4.safetensors"
    expected = load_checkpoint(older)["a"]
    newest.write_bytes(newest.read_bytes()[:-100])
    (tmp_path / "m-1_6.safetensors").write_bytes(b"\x08\x96\x01" * 40)
    save_checkpoint(Line(), tmp_path / "m-1_7.safetensors")
    (tmp_path / ".m-1_8.safetensors.0123abcd.partial").write_bytes(b"half")
    assert (load_checkpoint(tmp_path)["a"] == expected).all()
    told = capfd.readouterr().err
    assert "m-1_5.safetensors: not a complete safetensors file" in told and "m-1_6.safetensors: not a complete" in told
    assert "m-1_7.safetensors: a safetensors file, but not one that ModelCheckpoint wrote" in told
    going_on = model()
    assert going_on.resume(tmp_path) == (1, 4)
    going_on.train(1, Batches(), [ModelCheckpoint("m", tmp_path)])
    assert names(tmp_path) == [f"m-1_{step}.safetensors" for step in range(1, 6)]
    for path in tmp_path.iterdir():
        path.write_bytes(b"")
    for function in (load_checkpoint, model().resume):
        with pytest.raises(
            ValueError, match=r"no complete checkpoint in .*m-1_1\.safetensors: not a complete safetensors file"
        ):
            function(tmp_path)


def test_what_is_no_file_is_told_and_the_older_one_is_used(tmp_path, capfd):
    """To open a FIFO that nobody writes to would wait for ever."""
    model().train(1, Batches(), [ModelCheckpoint("m", tmp_path)])
    os.mkfifo(tmp_path / "m-1_6.safetensors")
    (tmp_path / "m-1_7.safetensors").symlink_to(tmp_path / "nowhere")
    (tmp_path / "m-1_8.safetensors").symlink_to("/dev/zero")
    (tmp_path / "m-1_9.safetensors").mkdir()
    (tmp_path / "m-2_1.safetensors").symlink_to("m-2_1.safetensors")  # a loop
    assert model().resume(tmp_path) == (1, 5)
    told = capfd.readouterr().err
    for step in (6, 8, 9):
        assert f"m-1_{step}.safetensors: not a safetensors file: it is a folder, a FIFO or a device" in told
    assert "m-1_7.safetensors" in told and "m-2_1.safetensors" in told
    with pytest.raises(ValueError, match="it is a folder, a FIFO or a device"):
        load_checkpoint(tmp_path / "m-1_6.safetensors")


@pytest.mark.parametrize("text", ["[1]", "7", "{", '{"a": [1]}', "[" * 100_000])
def test_an_append_dict_of_another_kind_is_refused(tmp_path, text):
    path = tmp_path / "a.safetensors"
    tensorfile.write(path, {"a": np.ones(2)}, {serialization.APPENDED: text})
    with pytest.raises(ValueError, match=r"a\.safetensors: mscomm\.appended is not a dict of numbers and strings"):
        load_checkpoint(path)


def test_a_damaged_newest_file_is_told_and_the_older_one_is_used(tmp_path, capfd):
    model().train(1, Batches(), [ModelCheckpoint("m", tmp_path)])
    newest, older = tmp_path / "m-1_5.safetensors", tmp_path / "m-1_4.safetensors"
    flip(newest, -1)
    there = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert (load_checkpoint(tmp_path)["a"] == load_checkpoint(older)["a"]).all()
    assert "checkpoint left out: " in (told := capfd.readouterr().err) and "m-1_5.safetensors: damaged" in told
    with pytest.raises(ValueError, match=r"Model\.resume: .*m-1_5\.safetensors: damaged"):
        model().resume(newest)
    going_on = model()
    assert going_on.resume(tmp_path) == (1, 4) and "m-1_5.safetensors: damaged" in capfd.readouterr().err

    class NothingIsDeleted(mscomm.Callback):
        def step_begin(self, run_context: Any) -> None:
            assert {path: path.read_bytes() for path in tmp_path.iterdir()} == there

    going_on.train(1, Batches(), [NothingIsDeleted(), ModelCheckpoint("m", tmp_path, CheckpointConfig(1, 0, 1))])
    assert "m-1_5.safetensors" in names(tmp_path) and load_checkpoint(newest)
    for path in tmp_path.iterdir():
        flip(path, -1)
    for function in (load_checkpoint, model().resume):
        with pytest.raises(ValueError, match=r"no complete checkpoint in .*m-1_\d\.safetensors: damaged"):
            function(tmp_path)


def test_files_of_earlier_versions_are_read(tmp_path):
    first = model()
    first.train(1, Batches(), [ModelCheckpoint("m", tmp_path)])
    for path in tmp_path.iterdir():
        as_earlier_versions_wrote(path)
    (tmp_path / "m-1_5.safetensors").unlink()
    assert set(load_checkpoint(tmp_path)) == {"a", "b"}
    going_on, again = model(), model()
    assert going_on.resume(tmp_path) == (1, 4)
    going_on.train(2, Batches(), [ModelCheckpoint("m", tmp_path)])
    assert again.resume(tmp_path) == (2, 5)


@pytest.mark.parametrize("at", [5, 6, 7])
def test_going_on_gives_the_bits_of_a_run_without_a_break(tmp_path, at):
    class Dice(mscomm.Callback):
        """Draws in each step, as dropout does. The order of the next epoch depends on it."""

        def step_end(self, run_context: Any) -> None:
            np.random.random()

    class Stop(mscomm.Callback):
        def step_end(self, run_context: Any) -> None:
            if run_context.original_args().cur_step_num == at:
                run_context.request_stop()

    whole, begun, going_on = model(), model(), model()
    np.random.seed(1)
    whole.train(3, Drawn(), [Dice(), ModelCheckpoint("whole", tmp_path, CheckpointConfig(100))])
    np.random.seed(1)
    begun.train(3, Drawn(), [Dice(), Stop(), ModelCheckpoint("part", tmp_path / "parts", CheckpointConfig(3))])
    np.random.seed(2)
    # A training run that is stopped also saves its last step.
    assert going_on.resume(tmp_path / "parts") == {5: (1, 5), 6: (2, 1), 7: (2, 2)}[at]
    going_on.train(3, Drawn(), [Dice(), ModelCheckpoint("part", tmp_path / "parts", CheckpointConfig(3))])
    expected, got = load_checkpoint(tmp_path / "whole-3_5.safetensors"), load_checkpoint(tmp_path / "parts")
    assert all((bits(got[name]) == bits(expected[name])).all() for name in expected)
    places = sorted({"1_3", "2_1", "2_4", "3_2", "3_5"} | {5: {"1_5"}, 6: set(), 7: {"2_2"}}[at])
    assert names(tmp_path / "parts") == [f"part-{place}.safetensors" for place in places[-5:]]


def test_an_optimizer_goes_on_with_the_learning_rate_that_it_had():
    begun, going_on = (Momentum([np.zeros(2)], 0.5, 0.5) for _ in range(2))
    begun.step([np.ones(2)])
    begun.learning_rate = 0.25
    going_on.load_state_dict(begun.state_dict())
    assert going_on.learning_rate == 0.25
    going_on.step([np.ones(2)])
    assert (going_on.parameters[0] == -0.25 * 1.5).all()


def test_where_to_go_on(tmp_path):
    going_on = model()
    (tmp_path / "empty").mkdir()
    assert going_on.resume(tmp_path / "empty") is None and going_on.resume(tmp_path / "nothing") is None
    going_on.train(3, Batches(), ModelCheckpoint("part", tmp_path / "parts", CheckpointConfig(3)))
    before = names(tmp_path / "parts")
    going_on.resume(tmp_path / "parts/part-2_4.safetensors")
    with pytest.raises(ValueError, match=r"an epoch has 4 batches; it had 5 when part-2_4\.safetensors was written"):
        going_on.train(3, Batches(4))
    other = Line()
    other.parameters["c"] = np.zeros(1)
    with pytest.raises(ValueError, match="belongs to another network: only one of the two has c"):
        Model(other, optimizer=SGD(other.parameters)).resume(tmp_path / "parts")
    with pytest.raises(ValueError, match=r"initial_epoch=1 after resume\(\), which says where to begin"):
        going_on.train(3, Batches(), initial_epoch=1)
    going_on.train(3, Batches(), ModelCheckpoint("part", tmp_path / "parts", CheckpointConfig(100)))
    # The files of the new training run have their own prefix.
    assert names(tmp_path / "parts") == sorted([*before, "part_1-3_5.safetensors"])
    going_on.resume(tmp_path / "parts")
    going_on.train(3, Batches(), ModelCheckpoint("part", tmp_path / "parts", CheckpointConfig(1)))  # no step is left
    assert names(tmp_path / "parts") == sorted([*before, "part_1-3_5.safetensors"])


class Halving(mscomm.Callback):
    """Keeps a list of rates. It appends half of the last rate after each step, and again after each epoch."""

    def __init__(self) -> None:
        self.rates = [1.0]

    def state_dict(self) -> dict[str, Any]:
        return {"rates": list(self.rates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rates = state["rates"]

    def step_end(self, run_context: Any) -> None:
        self.rates.append(self.rates[-1] / 2)

    epoch_end = step_end


@pytest.mark.parametrize(("steps", "kept"), [(1, 6), (3, 3)])  # resume at the end or in the middle of an epoch
def test_callbacks_go_on_too(tmp_path, steps, kept):
    config = CheckpointConfig(steps)
    first, second = Halving(), Halving()
    # In each step, ModelCheckpoint writes its file after the other callbacks have run, although it comes before them in
    # the list.
    model().train(1, Batches(), [ModelCheckpoint("m", tmp_path, config), first])
    if steps == 3:
        (tmp_path / "m-1_5.safetensors").unlink()
    going_on = model()
    assert going_on.resume(tmp_path) == ((1, 5) if steps == 1 else (1, 3))
    going_on.train(2, Batches(), [second])
    assert second.rates[: kept + 1] == first.rates[: kept + 1] and len(second.rates) == 13


def test_a_state_without_its_callback_is_told(tmp_path, capfd):
    model().train(1, Batches(), [Halving(), ModelCheckpoint("m", tmp_path)])
    going_on = model()
    going_on.resume(tmp_path)
    going_on.train(2, Batches(), [ModelCheckpoint("m", tmp_path)])
    assert "the state of a callback Halving, which was not passed; this state is ignored" in capfd.readouterr().err
