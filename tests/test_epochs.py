"""Each epoch of Model.train has its own order of rows. Training that begins or resumes at an epoch uses its order."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
from functions import bits

import mscomm
from mscomm import dataset
from mscomm.train import Model, ModelCheckpoint, Momentum

EPOCHS, ROWS, BATCH = 3, 12, 2


class Order(mscomm.Callback):
    """Keeps the rows of each epoch, in the order in which they arrived."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def epoch_begin(self, run_context: Any) -> None:
        self.seen.append([])

    def step_end(self, run_context: Any) -> None:
        x = run_context.original_args().train_dataset_element[0]
        self.seen[-1] += [int(one) for one in x.reshape(-1)]


class Line:
    def __init__(self) -> None:
        self.parameters = {"a": np.zeros(1, np.float32)}

    def loss_and_gradients(self, x: Any, y: Any) -> Any:
        x, off = np.asarray(x), np.asarray(x) * self.parameters["a"] - np.asarray(y) - 1
        return (off**2).mean(), {"a": 2 * (off * x).mean(0)}


def model() -> tuple[Model, Line]:
    net = Line()
    return Model(net, optimizer=Momentum(net.parameters, 1e-3, 0.9)), net


def loader() -> Any:
    """Return PyTorch's DataLoader with the DistributedSampler of rank 0 of 2."""
    data = pytest.importorskip("torch.utils.data")
    import torch

    x = torch.arange(float(ROWS)).reshape(-1, 1)
    sampler = data.DistributedSampler(range(ROWS), 2, 0, shuffle=True)
    return data.DataLoader(data.TensorDataset(x, x), batch_size=BATCH, sampler=sampler)


def pipeline() -> Any:
    rows = [(np.float32([i]), np.float32([i])) for i in range(ROWS)]
    return dataset.GeneratorDataset(rows, ["x", "y"], num_shards=2, shard_id=0).batch(BATCH)


class Sampled:
    """A user's dataset that has set_epoch(), but offers no way to read the number of its epoch."""

    def __init__(self) -> None:
        self._number = 0
        self.told: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self._number = epoch
        self.told.append(epoch)

    def __len__(self) -> int:
        return ROWS // 2 // BATCH

    def __iter__(self) -> Any:
        order = np.random.default_rng(self._number).permutation(ROWS)[: ROWS // 2]
        return iter([(np.float32(part)[:, None],) * 2 for part in np.split(order, len(self))])


DATA = {"torch": loader, "pipeline": pipeline, "own": Sampled}
each_data = pytest.mark.parametrize("make", DATA.values(), ids=DATA)


def undisturbed(make: Any) -> list[list[int]]:
    order = Order()
    model()[0].train(EPOCHS, make(), order)
    assert len({tuple(one) for one in order.seen}) == EPOCHS
    return order.seen


@each_data
def test_each_epoch_has_its_order_wherever_training_begins(make: Any) -> None:
    expected, order = undisturbed(make), Order()
    model()[0].train(EPOCHS, make(), order, initial_epoch=1)
    assert order.seen == expected[1:]
    data, order = make(), Order()
    for _ in range(EPOCHS):  # a new training run for each epoch
        model()[0].train(1, data, order)
    assert order.seen == expected


def test_a_number_is_told_once_an_epoch() -> None:
    data = Sampled()
    model()[0].train(EPOCHS, data)
    assert data.told == [0, 1, 2]


def test_a_script_that_sets_the_epoch_itself_gets_the_same() -> None:
    expected, order, data = undisturbed(loader), Order(), loader()
    for epoch in range(EPOCHS):
        data.sampler.set_epoch(epoch)
        model()[0].train(1, data, order)
    assert order.seen == expected

    class Sets(mscomm.Callback):
        def __init__(self, sampler: Any, first: int) -> None:
            self.sampler, self.first = sampler, first

        def epoch_begin(self, run_context: Any) -> None:
            self.sampler.set_epoch(self.first + run_context.original_args().cur_epoch_num - 1)

    for first in (0, 1):
        order, data = Order(), loader()
        model()[0].train(EPOCHS - 1, data, [Sets(data.sampler, first), order])
        assert order.seen == expected[first : first + EPOCHS - 1]


@each_data
@pytest.mark.parametrize("step", [2, 3, 4])  # an epoch has 3 steps: stop in epoch 1, at its end, and in epoch 2
@pytest.mark.parametrize("before", [0, 1])  # the number of earlier training runs with the same data
def test_resume_gives_the_order_of_the_resumed_epoch(make: Any, step: int, before: int, tmp_path: Any) -> None:
    class Stop(mscomm.Callback):
        def step_end(self, run_context: Any) -> None:
            if run_context.original_args().cur_step_num == step:
                run_context.request_stop()

    def data_after() -> Any:
        data = make()
        for _ in range(before):
            model()[0].train(1, data)
        return data

    order, (whole, expected) = Order(), model()
    whole.train(EPOCHS, data_after(), order)
    first, again = Order(), Order()
    model()[0].train(EPOCHS, data_after(), [first, Stop(), ModelCheckpoint("m", tmp_path)])
    going_on, net = model()
    going_on.resume(tmp_path)
    going_on.train(EPOCHS, make(), again)
    assert list(chain(*first.seen, *again.seen)) == list(chain(*order.seen))
    assert (bits(net.parameters["a"]) == bits(expected.parameters["a"])).all()


def test_set_epoch_of_a_pipeline() -> None:
    data = pipeline()
    passes = [[x.tolist() for x, _ in data] for _ in range(3)]
    data.set_epoch(1)
    assert data.state_dict()["epoch"] == 1
    assert [[x.tolist() for x, _ in data] for _ in range(2)] == passes[1:]
    with pytest.raises(ValueError, match="set_epoch: epoch=-1; expected 0 or more"):
        data.set_epoch(-1)
    with pytest.raises(TypeError, match="set_epoch: epoch is a float"):
        data.set_epoch(1.0)
