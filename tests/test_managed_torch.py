"""PyTorch tensors in the memory of the stand-ins' devices (fakes/managed_torch.py): what other tests rely on."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np
import pytest
from devices import devices, each_backend, handles, violations

torch = pytest.importorskip("torch")

from fakes import device_array, managed_torch  # noqa: E402
from fakes.managed_torch import is_managed, settle, tensor  # noqa: E402

import mscomm  # noqa: E402
from mscomm import arrays  # noqa: E402
from mscomm.arrays.device import OnDevice  # noqa: E402


def on_device(x: Any) -> bool:
    return isinstance(arrays.memory_anywhere(x, "x", "test"), OnDevice)


@each_backend
@devices(2)
def test_collectives_go_by_the_device_and_all_else_by_the_host(rank: int, group: None, backend: str) -> None:
    x = tensor(np.arange(5, dtype=np.float32) + rank)
    assert on_device(x) and on_device(x[1:]) and not on_device(torch.ones(5))
    made = mscomm.all_reduce(x)
    assert is_managed(made) and made.is_contiguous()
    assert mscomm.all_reduce(x, out=x) is x
    settle()
    expected = torch.tensor([1.0, 3.0, 5.0, 7.0, 9.0])
    assert made.equal(expected) and x.equal(expected)

    columns = tensor(np.arange(6, dtype=np.float32).reshape(2, 3)).T
    assert not columns.is_contiguous()
    doubled, gathered = mscomm.all_reduce(columns), mscomm.all_gather(columns[1:], async_op=True).wait()
    assert mscomm.all_reduce(columns, out=columns) is columns
    settle()
    assert doubled.equal(2 * torch.arange(6.0).reshape(2, 3).T) and columns.equal(doubled)
    assert gathered.equal(torch.tensor([[1.0, 4.0], [2.0, 5.0]] * 2))
    if backend == "nccl":
        halves = mscomm.all_reduce(tensor(torch.ones(3, dtype=torch.bfloat16)))
        settle()
        assert halves.dtype is torch.bfloat16 and (halves == 2).all()
    assert (mscomm.all_reduce(torch.ones(3)) == 2).all()  # a call on the CPU, because this tensor is not on the device
    assert violations() == []


@each_backend
@devices(1)
def test_the_device_is_late(rank: int, group: None, backend: str) -> None:
    x, out = tensor(np.ones(3, np.float32)), tensor(np.zeros(3, np.float32))
    with device_array.compute.hold(rank):
        assert mscomm.all_reduce(x, out=out) is out
        assert (out == 0).all()
    settle()
    assert (out == 1).all() and violations() == []


@each_backend
@devices(2)
def test_modules_learn_on_the_device(rank: int, group: None, backend: str) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    managed_torch.module(net)
    # The batch is also on the device.
    x = tensor(np.random.default_rng(rank).normal(size=(8, 3)).astype(np.float32))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        for parameter in net.parameters():
            assert on_device(parameter) and on_device(parameter.grad)
            mscomm.all_reduce(parameter.grad, out=parameter.grad)
        settle()
        optimizer.step()
    assert all(on_device(one) for name, one in net.state_dict().items() if "batches" not in name)
    for parameter in net.parameters():
        both = mscomm.all_gather(parameter.detach()[None])
        settle()
        assert both[0].equal(both[1])
    assert violations() == []


@each_backend
@devices(1)
def test_memory_lives_as_long_as_a_tensor_that_lies_in_it(rank: int, group: None, backend: str) -> None:
    settle()
    before = handles()["allocations"]
    part = tensor(np.arange(6, dtype=np.float32))[2:4]
    assert part.tolist() == [2.0, 3.0] and handles()["allocations"] == before + 1
    del part
    settle()
    assert handles()["allocations"] == before


@each_backend
@devices(1, init=None)
def test_plain_memory_of_the_host_is_none_of_the_device_s(rank: int, group: None, backend: str) -> None:
    runtime, plain = device_array.runtime(), torch.ones(4)

    def add_one(x: torch.Tensor) -> None:
        address, stream = (ctypes.c_uint64(one) for one in (x.data_ptr(), device_array.current_stream()))
        with runtime.on(rank):
            runtime.call("fake_compute", address, ctypes.c_size_t(4), ctypes.c_float(1), ctypes.c_int(0), stream)

    x = tensor(plain)
    add_one(x)
    settle()
    assert (x == 2).all() and violations() == []
    add_one(plain)
    with pytest.raises(device_array.DeviceError):
        settle()
    assert (plain == 1).all() and [text.partition(":")[0] for text in violations()] == ["wild_address"]


def test_other_processes_know_nothing_of_it() -> None:
    assert "MSCOMM_RANK" not in os.environ
    assert type(arrays.memory_anywhere(torch.ones(2), "x", "test")) is np.ndarray
