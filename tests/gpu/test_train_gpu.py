"""Model and checkpoints on a real GPU: PyTorch's modules and CuPy's arrays.

Several ranks share one GPU, as in test_gpu.py. Without a GPU, the tests are skipped with a reason.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from functions import bits
from gpu.test_gpu import each_library, give, has, on_gpu, take
from test_train import COLUMNS, Batches, Line, Losses, data_parallel, start

import mscomm
from mscomm.train import (
    CheckpointConfig,
    Model,
    ModelCheckpoint,
    Momentum,
    load_checkpoint,
    load_param_into_net,
    save_checkpoint,
)

pytestmark = pytest.mark.gpu


class CupyLine(Line):
    def __init__(self, bias: float) -> None:
        super().__init__({name: give("cupy", x) for name, x in start(bias).items()})

    def loss_and_gradients(self, x: Any, y: Any) -> Any:
        return super().loss_and_gradients(give("cupy", x), give("cupy", y))


def cupy_line(bias: float, **options: Any) -> tuple[Model, Any]:
    net = CupyLine(bias)
    return Model(net, optimizer=Momentum(net.parameters, 0.05, 0.9), **options), lambda: net.parameters


def torch_line(bias: float, **options: Any) -> tuple[Model, Any]:
    import torch

    net = torch.nn.Linear(COLUMNS, 1)
    net.load_state_dict({name: torch.from_numpy(x) for name, x in start(bias).items()})
    net.cuda()
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    return Model(net, torch.nn.MSELoss(), optimizer, **options), net.state_dict


LINES = {"torch": torch_line, "cupy": cupy_line}


@pytest.mark.parametrize("compression", [None, "fp16"])
@each_library
@on_gpu(2)
def test_two_ranks_train_the_model_that_one_trains_with_the_whole_batch(
    rank: int, group: None, library: str, compression: str | None
) -> None:
    data_parallel(parameter_broadcast=True)
    model, weights = LINES[library](rank, compression=compression)
    losses = Losses()
    with tempfile.TemporaryDirectory() as folder:
        model.train(2, Batches(rank, 2), [losses, ModelCheckpoint("line", folder, CheckpointConfig(4))])
        again, weights_again = LINES[library](7, compression=compression)
        (Path(folder) / "line-2_6.safetensors").unlink()
        assert again.resume(folder) == (2, 2)
        again.train(2, Batches(rank, 2))
    for name, x in weights().items():
        assert (bits(take(x)) == bits(take(weights_again()[name]))).all(), name
        assert (mscomm.all_gather(take(x)[None]) == take(x)).all()  # all ranks have equal weights

    mscomm.reset_auto_parallel_context()
    net, alone = Line(), Losses()
    Model(net, optimizer=Momentum(net.parameters, 0.05, 0.9)).train(2, Batches(), alone)
    close = {"rtol": 1e-3, "atol": 1e-4} if compression is None else {"rtol": 0.02, "atol": 0.005}
    np.testing.assert_allclose(losses.mean, alone.mean, **close)
    for name, x in weights().items():
        np.testing.assert_allclose(take(x), net.parameters[name], **close)


@pytest.mark.skipif(not has("torch"), reason="torch is not installed")
@on_gpu(1)
def test_dropout_goes_on_with_the_bits_of_a_run_without_a_break(rank: int, group: None) -> None:
    import torch

    def made() -> tuple[Any, Model]:
        torch.manual_seed(1)
        layers = [torch.nn.Linear(COLUMNS, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)]
        net = torch.nn.Sequential(*layers).cuda()
        return net, Model(net, torch.nn.MSELoss(), torch.optim.Adam(net.parameters(), 0.05))

    net, model = made()
    with tempfile.TemporaryDirectory() as folder:
        model.train(2, Batches(), ModelCheckpoint("net", folder, CheckpointConfig(4)))
        again, model = made()
        torch.cuda.manual_seed(9)
        (Path(folder) / "net-2_6.safetensors").unlink()
        assert model.resume(folder) == (2, 2)
        model.train(2, Batches())
    for name, x in net.state_dict().items():
        assert again.state_dict()[name].is_cuda and (bits(take(again.state_dict()[name])) == bits(take(x))).all(), name


@each_library
@on_gpu(1)
def test_weights_go_into_a_file_and_back(rank: int, group: None, library: str) -> None:
    class Holds:
        def __init__(self, parameters: dict[str, Any]) -> None:
            self.parameters, self.loss_and_gradients = parameters, None

    kinds: list[Any] = [np.float16, np.float32, np.float64, np.int8, np.int64, np.bool_]
    kinds += [ml_dtypes.bfloat16] if library == "torch" else []
    numbers = {np.dtype(kind).name: np.arange(6).reshape(2, 3).astype(kind) for kind in kinds}
    net = Holds({name: give(library, x).T for name, x in numbers.items()})
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(net, Path(folder) / "all")
        found = load_checkpoint(Path(folder) / "all")
    for name, x in numbers.items():
        assert found[name].dtype == x.dtype and (bits(found[name]) == bits(np.ascontiguousarray(x.T))).all(), name
    there = dict(net.parameters)
    assert load_param_into_net(net, {name: x.T[::-1] for name, x in numbers.items()}) == ([], [])
    load_param_into_net(net, {"float32": numbers["float64"].T[::-1] / 4})
    for name, x in numbers.items():
        expected = (x.T[::-1] / 4).astype(x.dtype) if name == "float32" else x.T[::-1]
        assert there[name] is net.parameters[name] and (take(there[name]) == expected).all(), name
