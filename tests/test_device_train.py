"""Training and checkpoints with device arrays, for the nccl and hccl backends, with the stand-ins of tests/fakes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from devices import devices, each_backend, on_device, violations
from fakes.device_array import compute
from fakes.device_numbers import DeviceNumbers
from functions import bits
from test_checkpoint import some_arrays
from test_train import BATCHES, COLUMNS, Batches, Line, Losses, data_parallel, start

import mscomm
from mscomm import arrays
from mscomm.arrays.device import OnDevice
from mscomm.train import (
    SGD,
    CheckpointConfig,
    Model,
    ModelCheckpoint,
    Momentum,
    load_checkpoint,
    load_param_into_net,
    save_checkpoint,
    states,
)

torch = pytest.importorskip("torch")

from fakes import managed_torch  # noqa: E402
from fakes.managed_torch import is_managed  # noqa: E402

# --- copies from the device to the host and back ---------------------------------------------------------------------


class Holds:
    """A network that consists of the given arrays and cannot be trained."""

    def __init__(self, parameters: dict[str, Any]) -> None:
        self.parameters = parameters

    def loss_and_gradients(self, *batch: Any) -> Any:
        raise NotImplementedError


def in_all_libraries(numbers: dict[str, np.ndarray[Any, Any]]) -> list[dict[str, Any]]:
    """Copy the numbers to this rank's device, as arrays of each library."""
    return [
        {name: on_device(x) for name, x in numbers.items()},
        {name: managed_torch.tensor(arrays.torch.over(x)) for name, x in numbers.items()},
    ]


@each_backend
@devices(1)
def test_weights_on_the_device_go_into_a_file_and_back(rank: int, group: None, backend: str) -> None:
    numbers = some_arrays()
    for mine in in_all_libraries(numbers):
        net = Holds({name: x.T if name == "float32" else x for name, x in mine.items()})  # x.T is strided
        expected = {name: x.T if name == "float32" else x for name, x in numbers.items()}
        with tempfile.TemporaryDirectory() as folder:
            save_checkpoint(net, Path(folder) / "all", append_dict={"step": 3})
            found = load_checkpoint(Path(folder) / "all")
        assert found.pop("step") == 3 and found.keys() == expected.keys()
        for name, x in expected.items():
            assert found[name].dtype == x.dtype and found[name].shape == x.shape, name
            assert (bits(found[name]) == bits(x)).all(), name

        others = {name: np.asarray(1 - x.real.astype(np.float32)).astype(x.dtype) for name, x in expected.items()}
        assert load_param_into_net(net, others, strict_load=True) == ([], [])
        for name, x in net.parameters.items():
            now = arrays.on_host(x, name, "test")
            assert now.dtype == others[name].dtype and (bits(now) == bits(others[name])).all(), name
        with pytest.raises(ValueError, match=r"float64 is \[5, 3\] in the file, the network's is \[3, 5\]"):
            load_param_into_net(net, {"float32": others["float32"] + 1, "float64": others["float64"].T})
        with pytest.raises(ValueError, match="int8 is float64 in the file, the network's is int8"):
            load_param_into_net(net, {"int8": others["float64"]})
        assert (arrays.on_host(net.parameters["float32"], "x", "test") == others["float32"]).all()
        load_param_into_net(net, {"bfloat16": others["float32"].T / 3, "float32": net.parameters["float32"]})
        now = arrays.on_host(net.parameters["bfloat16"], "x", "test")
        assert (bits(now) == bits((others["float32"].T / 3).astype(ml_dtypes.bfloat16))).all()
    assert violations() == []


@each_backend
@devices(1)
def test_what_is_enqueued_is_in_the_file(rank: int, group: None, backend: str) -> None:
    x = on_device(np.zeros(1000, np.float32))
    compute.fill(x, 1.0, delay=0.2)
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint({"x": x}, Path(folder) / "x")
        assert (load_checkpoint(Path(folder) / "x")["x"] == 1).all()
        net = Holds({"x": x})
        compute.fill(x, 2.0, delay=0.2)
        load_checkpoint(Path(folder) / "x", net)
    assert (x.to_numpy() == 1).all() and violations() == []


@each_backend
@devices(1)
def test_a_state_with_arrays_of_the_device(rank: int, group: None, backend: str) -> None:
    numbers = {name: x for name, x in some_arrays().items() if x.dtype.kind == "f"}
    for mine in in_all_libraries(numbers):
        text, found = states.to_text({"state": {0: [mine, 0.5]}})
        back = states.from_text(text, found)["state"][0][0]
        assert all(type(x) is np.ndarray and (bits(x) == bits(numbers[name])).all() for name, x in back.items())


class ByProtocolAlone:
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "shape": (2,), "typestr": "<f4", "data": (1 << 12, False)}


def test_arrays_that_are_known_by_their_protocol_alone_are_refused(tmp_path: Path) -> None:
    x = ByProtocolAlone()
    says = "x: mscomm knows ByProtocolAlone only by its protocol, so it cannot create such arrays: copy"
    with pytest.raises(TypeError, match=f"save_checkpoint: {says} it to the host"):
        save_checkpoint({"x": x}, tmp_path / "x")
    with pytest.raises(TypeError, match=f"load: {says} the numbers to the device"):
        load_param_into_net(Holds({"x": x}), {"x": np.ones(2, np.float32)})
    assert list(tmp_path.iterdir()) == []


# --- Model ----------------------------------------------------------------------------------------------------------


class LineOnDevice(Line):
    """A Line whose arrays and computations are on the device."""

    def __init__(self, bias: float = 0) -> None:
        super().__init__({name: self.there(x) for name, x in start(bias).items()})

    @staticmethod
    def there(x: Any) -> DeviceNumbers:
        return DeviceNumbers.from_numpy(x, device=int(os.environ["MSCOMM_RANK"]))

    def loss_and_gradients(self, x: Any, y: Any) -> Any:
        loss, gradients = super().loss_and_gradients(self.there(x), self.there(y))
        return loss, gradients


OPTIMIZERS = {
    "Momentum": lambda parameters: Momentum(parameters, 0.05, 0.9, 0.01, use_nesterov=True),
    "SGD": lambda parameters: SGD(parameters, 0.05, 0.9, dampening=0.1),
    "SGD without momentum": lambda parameters: SGD(parameters, 0.05),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@each_backend
@devices(1)
def test_arrays_of_the_device_are_trained_where_they_are(rank: int, group: None, backend: str, optimizer: str) -> None:
    make = OPTIMIZERS[optimizer]
    plain, expected = Line(), Losses()
    Model(plain, optimizer=make(plain.parameters)).train(2, Batches(), expected)

    net, losses = LineOnDevice(), Losses()
    given = dict(net.parameters)
    with tempfile.TemporaryDirectory() as folder:
        files = ModelCheckpoint("line", folder, CheckpointConfig(4))
        Model(net, optimizer=make(net.parameters)).train(2, Batches(), [losses, files])
        assert all(net.parameters[name] is x for name, x in given.items())
        again = LineOnDevice()
        model = Model(again, optimizer=make(again.parameters))
        (Path(folder) / "line-2_6.safetensors").unlink()
        assert model.resume(folder) == (2, 2)
        model.train(2, Batches())
    assert losses.mean == expected.mean and all(type(one) is np.float32 for one in losses.mean)
    for one in (net, again):
        for name, x in plain.parameters.items():
            assert type(one.parameters[name]) is DeviceNumbers
            assert (bits(one.parameters[name].to_numpy()) == bits(x)).all(), name
    assert violations() == []


def torch_net() -> Any:
    """Return a network that has running means (BatchNorm1d) and draws random numbers (Dropout)."""
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.25), torch.nn.Linear(4, 1)
    )


def torch_model(net: Any) -> Model:
    return Model(net, torch.nn.MSELoss(), torch.optim.Adam(net.parameters(), 0.05))


@each_backend
@devices(1)
def test_modules_on_the_device_are_trained_and_resumed(rank: int, group: None, backend: str) -> None:
    plain, expected = torch_net(), Losses()
    torch_model(plain).train(2, Batches(), expected)

    net, losses = managed_torch.module(torch_net()), Losses()
    addresses = [x.data_ptr() for x in net.state_dict().values()]
    with tempfile.TemporaryDirectory() as folder:
        torch_model(net).train(2, Batches(), [losses, ModelCheckpoint("net", folder, CheckpointConfig(4))])
        again = managed_torch.module(torch_net())
        (Path(folder) / "net-2_6.safetensors").unlink()
        model = torch_model(again)
        assert model.resume(folder) == (2, 2)
        model.train(2, Batches())
        # load_param_into_net writes into net's arrays, so their addresses must still be `addresses`.
        assert load_param_into_net(net, load_checkpoint(folder)) == ([], [])
    assert losses.mean == expected.mean and len(losses.mean) == 2 * BATCHES
    assert [x.data_ptr() for x in net.state_dict().values()] == addresses
    for name, x in plain.state_dict().items():
        there = again.state_dict()[name]
        assert is_managed(there) and (bits(arrays.on_host(there, name, "test")) == bits(x.numpy())).all(), name
    assert violations() == []


# --- one model on two ranks -----------------------------------------------------------------------------------------


def numbers_line(bias: float = 0, **options: Any) -> tuple[Model, Any]:
    net = LineOnDevice(bias)
    return Model(net, optimizer=Momentum(net.parameters, 0.05, 0.9), **options), lambda: net.parameters


def torch_line(bias: float = 0, **options: Any) -> tuple[Model, Any]:
    net = torch.nn.Linear(COLUMNS, 1)
    net.load_state_dict({name: torch.from_numpy(x) for name, x in start(bias).items()})
    managed_torch.module(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    return Model(net, torch.nn.MSELoss(), optimizer, **options), net.state_dict


LINES = {"torch": torch_line, "numbers": numbers_line}


@pytest.mark.parametrize("compression", [None, "bf16"])
@pytest.mark.parametrize("library", LINES)
@each_backend
@devices(2, timeout_s=120)
def test_two_ranks_train_the_model_that_one_trains_with_the_whole_batch(
    rank: int, group: None, backend: str, library: str, compression: str | None
) -> None:
    managed_torch.settle_in_steps()
    data_parallel(parameter_broadcast=True)

    def made(bias: float) -> tuple[Model, Any]:
        return LINES[library](bias, compression=compression)

    model, weights = made(rank)
    losses = Losses()
    with tempfile.TemporaryDirectory() as folder:
        model.train(2, Batches(rank, 2), [losses, ModelCheckpoint("line", folder, CheckpointConfig(4))])
        again, weights_again = made(7)
        (Path(folder) / "line-2_6.safetensors").unlink()
        assert again.resume(folder) == (2, 2)
        again.train(2, Batches(rank, 2))
        by_name = load_checkpoint(folder)
    for name, x in weights().items():
        mine = arrays.on_host(x, name, "test")
        assert isinstance(arrays.memory_anywhere(x, name, "test"), OnDevice)
        assert (bits(mine) == bits(arrays.on_host(weights_again()[name], name, "test"))).all(), name
        assert (mscomm.all_gather(mine[None]) == mine).all()  # all ranks have equal weights
        assert by_name[name].shape == mine.shape
    assert losses.local[0] != losses.mean[0] == mscomm.all_reduce(np.array(losses.local[0]), "avg")
    assert violations() == []

    mscomm.reset_auto_parallel_context()
    net, alone = Line(), Losses()
    Model(net, optimizer=Momentum(net.parameters, 0.05, 0.9)).train(2, Batches(), alone)
    # With compression, gradients are sent as bfloat16, so the results are less exact.
    close = {"rtol": 1e-4, "atol": 1e-6} if compression is None else {"rtol": 0.1, "atol": 0.02}
    np.testing.assert_allclose(losses.mean, alone.mean, **close)
    for name, x in weights().items():
        np.testing.assert_allclose(arrays.on_host(x, name, "test"), net.parameters[name], **close)


@pytest.mark.parametrize("library", LINES)
@each_backend
@devices(2)
def test_ranks_that_begin_with_different_weights_are_told(rank: int, group: None, backend: str, library: str) -> None:
    data_parallel()
    with pytest.raises(ValueError, match="ranks 0 and 1 of the group begin with different weights, of bias; use the"):
        LINES[library](rank)[0].train(1, Batches(rank, 2))


@each_backend
@devices(2, timeout_s=120)
def test_running_means_and_dropout_on_two_ranks(rank: int, group: None, backend: str) -> None:
    managed_torch.settle_in_steps()
    data_parallel(parameter_broadcast=True)
    net = managed_torch.module(torch_net())
    torch.manual_seed(rank)  # different seeds, so that dropout zeroes different elements on each rank
    with torch.no_grad():
        net[1].running_mean.fill_(rank)
    with tempfile.TemporaryDirectory() as folder:
        torch_model(net).train(2, Batches(rank, 2), ModelCheckpoint("net", folder, CheckpointConfig(5)))
        means = mscomm.all_gather_object([float(one) for one in net[1].running_mean])
        assert means[0] != means[1]  # the running means are not shared: each rank computes its own
        again = managed_torch.module(torch_net())
        model = torch_model(again)
        (Path(folder) / "net-2_6.safetensors").unlink()
        assert model.resume(folder) == (2, 4)
        model.train(2, Batches(rank, 2))
    for name, x in net.state_dict().items():
        there = again.state_dict()[name]
        assert is_managed(there) and (bits(there.numpy()) == bits(x.numpy())).all(), name
    assert violations() == []


# --- functions for tensors on PyTorch's devices, tested without such a device ----------------------------------------


def test_numbers_of_pytorch_s_tensors() -> None:
    real = arrays.torch
    for name, x in some_arrays().items():
        backwards = x[::-1] if x.ndim else x
        backwards.flags.writeable = False
        made = real.from_host(torch.empty(0), backwards)
        there = real.on_host(made)
        assert there.dtype == x.dtype and (bits(there) == bits(np.array(backwards, order="C"))).all(), name
        assert made.shape == x.shape and not np.shares_memory(there, x)
    assert real.on_host(torch.ones(3, requires_grad=True)).tolist() == [1, 1, 1]
    assert np.isnan(arrays.on_host(torch.tensor(float("nan")), "the loss", "test")[()])


def test_batches_go_to_the_device_of_the_module() -> None:
    from mscomm.train.networks.torch import Network

    net = torch.nn.Linear(3, 1)
    network = Network(net, None, torch.optim.SGD(net.parameters()))
    elsewhere = torch.ones(2, device="meta")
    for device in ("cpu", "meta"):
        net.to(device)
        network.begin()
        given = [network._there(x) for x in (np.ones(2, np.float32)[::-1], torch.ones(2), 1.0)]
        assert [x.device.type for x in given] == [device] * 3
        assert network._there(elsewhere) is elsewhere


def test_an_optimizer_s_tensors_stay_on_their_device() -> None:
    from mscomm.train.networks.torch import Network

    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(net.parameters(), torch.tensor(0.5), foreach=False)
    net(torch.ones(3)).backward()
    optimizer.step()
    text, found = states.to_text(Network(net, None, optimizer).optimizer_state())

    other = torch.nn.Linear(3, 1, device="meta")
    its = torch.optim.Adam(other.parameters(), torch.tensor(0.1), foreach=False)
    its.param_groups[0]["lr"] = torch.empty((), device="meta")
    Network(other, None, its).load_optimizer_state(states.from_text(text, found))
    assert its.param_groups[0]["lr"].device.type == "meta"
    assert {x["exp_avg"].device.type for x in its.state.values()} == {"meta"}


class Generators:
    """Stands in for the random number generators of torch.cuda, which has one for each GPU."""

    def __init__(self, states: list[int], current: int) -> None:
        self.states, self.current = [torch.tensor([one], dtype=torch.uint8) for one in states], current

    def put_into(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {
            "is_initialized": lambda: bool(self.states),
            "device_count": lambda: len(self.states),
            "current_device": lambda: self.current,
            "get_rng_state_all": lambda: [one.clone() for one in self.states],
            "set_rng_state": lambda state, device: self.states.__setitem__(device, state),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


@pytest.mark.parametrize(
    ("there", "current", "after"), [([7, 8], 1, [1, 2]), ([7], 0, [2]), ([7, 8, 9], 2, [1, 2, 2]), ([], 0, [])]
)
def test_random_states_of_the_gpus(
    monkeypatch: pytest.MonkeyPatch, there: list[int], current: int, after: list[int]
) -> None:
    from mscomm.train import randomness

    Generators([1, 2], current=1).put_into(monkeypatch)
    text, found = states.to_text(randomness.states())
    now = Generators(there, current)
    now.put_into(monkeypatch)
    randomness.restore(states.from_text(text, found))
    assert [int(one) for one in now.states] == after
