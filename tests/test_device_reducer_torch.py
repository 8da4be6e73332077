"""GradientReducer in PyTorch's backward pass on a device. PyTorch's own autograd works on the stand-ins' memory.

See fakes/managed_torch.py: PyTorch computes on the host immediately, so the tests call settle() where a stream would
wait.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from devices import BACKENDS, kernel_variables, launches, load_kernels, variables, violations
from ranks import ranks
from test_reducer import Branches, batch, loss_of, network, trained_alone

import mscomm
from mscomm.train import GradientReducer, broadcast_parameters

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_way = pytest.mark.parametrize(("backend", "how"), [("nccl", "library"), ("nccl", "refused"), ("hccl", "refused")])


def devices(n: int | str) -> Any:
    """Decorate a test in which each rank calls join(...), which returns the module fakes.managed_torch."""

    def env(rank: int, backend: str = "nccl", how: str = "refused", **_: Any) -> dict[str, str]:
        return {**variables(backend), **kernel_variables(rank, how)}

    return ranks(n, init=None, env=env, timeout_s=120)


def join(backend: str = "nccl", how: str = "refused") -> Any:
    from fakes import managed_torch

    if backend == "nccl":
        load_kernels(how)
    mscomm.init(backend)
    return managed_torch


@pytest.mark.parametrize(("n", "micro"), [(1, 1), (2, 3), (4, 1)])
@each_way
@devices("n")
def test_the_weights_are_those_of_one_process_with_the_whole_batch(
    rank: int, n: int, micro: int, backend: str, how: str
) -> None:
    import torch

    device = join(backend, how)
    steps, rows = 10, 16 * micro
    model = device.module(network(seed=rank).float())
    broadcast_parameters(model.state_dict())
    device.settle()
    reducer = GradientReducer(model.named_parameters(), bucket_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(steps):
        reducer.zero_grad() if step % 2 else optimizer.zero_grad()
        device.settle()
        images, labels = batch(step, rows)
        images, labels = (part.chunk(n)[rank].chunk(micro) for part in (images.float(), labels))
        for i in range(micro - 1):
            with reducer.no_sync():
                (loss_of(model, images[i], labels[i]) / micro).backward()
        loss = loss_of(model, images[-1], labels[-1]) / micro
        reducer.carry(rank)
        loss.backward()
        reducer.wait()
        assert reducer.carried == (n - 1) / 2
        device.settle()
        optimizer.step()
    for mine, theirs in zip(model.parameters(), trained_alone(steps, rows).parameters(), strict=True):
        assert ((mine - theirs).norm() <= 1e-4 * theirs.norm()).all()
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    assert (mscomm.all_gather(flat[None]) == flat).all()  # all ranks have the same weights, to the bit
    assert violations() == []


@pytest.mark.parametrize("how", ["library"])
@devices(2)
def test_new_gradients_come_into_a_bucket_in_one_launch_and_others_lie_there(rank: int, how: str) -> None:
    import torch

    device = join("nccl", how)
    torch.manual_seed(0)
    model = device.module(torch.nn.Sequential(*(torch.nn.Linear(10, 10) for _ in range(20))))
    x = torch.ones(2, 10)
    for compression in (None, "bf16"):
        reducer = GradientReducer(model.parameters(), compression=compression)
        for step in range(4):
            new = step % 2 == 0
            if new:
                model.zero_grad()
            else:
                reducer.zero_grad()
            device.settle()
            before = launches()
            model(x * (rank + 1)).sum().backward()
            assert launches() == before  # there is one bucket, which is sent in wait()
            here = [p.grad.data_ptr() for p in model.parameters()]
            reducer.wait()
            device.settle()
            moved = [at != p.grad.data_ptr() for at, p in zip(here, model.parameters(), strict=True)]
            assert (all(moved) if new else not any(moved)) and len(moved) == 40
            expected = 2 if compression else int(new)
            # In the first step, wait() gives the buckets a new layout. It copies each gradient and each residual to its
            # new place, with one launch for each copy.
            assert launches() - before == expected + (step == 0) * 40 * (2 if compression else 1)
    assert violations() == []


@each_backend
@devices(2)
def test_parameters_without_a_gradient(rank: int, backend: str) -> None:
    import torch

    device = join(backend)
    model = device.module(Branches().float())
    reducer = GradientReducer(model.named_parameters(), bucket_mb=1e-4)
    mine: dict[str, Any] = {}
    for name, p in model.named_parameters():
        p.register_hook(lambda gradient, name=name: mine.update({name: gradient.clone()}))
    for step in range(4):
        model.zero_grad()
        mine.clear()
        also = (step + rank) % 2 == 0 if step < 3 else False
        model(torch.ones(2, 4), also).sum().backward()
        reducer.wait()
        device.settle()
        assert model.never.weight.grad is None
        assert (model.sometimes.weight.grad is None) == (step == 3)
        for name, p in model.named_parameters():
            if p.grad is not None:
                assert (p.grad == mscomm.all_reduce(mine.get(name, torch.zeros_like(p.detach())), "avg")).all()
            else:
                assert name not in mine
    model.zero_grad()
    with reducer.no_sync():  # wait() must reduce the gradients of this pass, even if the next pass produces none
        model(torch.ones(2, 4), True).sum().backward()
    model(torch.ones(2, 4), False).sum().backward()
    reducer.wait()
    device.settle()
    assert (model.sometimes.bias.grad == 2).all()
    assert violations() == []


@each_way
@devices(2)
def test_what_is_owed_to_a_gradient_that_nobody_has_waits(rank: int, backend: str, how: str) -> None:
    import torch

    device = join(backend, how)
    a, b = (torch.nn.Parameter(device.tensor(torch.zeros(8))) for _ in range(2))
    for p in (a, b):
        p.register_hook(device.tensor)
    reducer = GradientReducer({"a": a, "b": b}, compression="bf16")
    odd = 1 + 2.0**-9
    for used in (True, False, False, True):
        a.grad = b.grad = None
        ((odd * a).sum() + ((odd * b).sum() if used else 0)).backward()
        reducer.wait()
        device.settle()
        assert (b.grad is not None and bool((b.grad == 1).all())) == used
    owed = reducer.state_dict()["residual"]
    # Each step adds a residual of 2^-9, and four of them make one unit of bfloat16, 2^-7. In the third step, the sum of
    # the residuals is more than half a unit, so the gradient is rounded up. The fourth step's residual pays this back.
    assert (a.grad == 1).all() and (owed["a"] == 0).all()
    assert (owed["b"] == 2 * 2.0**-9).all()  # two residuals, one for each step in which b had a gradient
    assert violations() == []


@each_backend
@devices(2)
def test_gradients_that_the_program_changes_or_replaces(rank: int, backend: str) -> None:
    import torch

    device = join(backend)
    weight = torch.nn.Parameter(device.tensor(torch.zeros(2, 3, 4, 5)).to(memory_format=torch.channels_last))
    weight.data = device.tensor(weight.data)
    weight.register_hook(device.tensor)
    factors = torch.arange(120.0).reshape(2, 3, 4, 5) * (rank + 1)
    reducer = GradientReducer([weight])

    def step() -> None:
        device.settle()
        (weight * factors).sum().backward()
        reducer.wait()
        device.settle()
        assert (weight.grad == 1.5 * torch.arange(120.0).reshape(2, 3, 4, 5)).all()

    step()
    weight.grad = device.tensor(weight.grad)
    reducer.zero_grad()
    step()
    weight.grad = None
    reducer.zero_grad()
    step()
    weight.grad = None
    (weight * factors).sum().backward()
    weight.grad = None  # the program removes the gradient after the backward pass; wait() must not bring it back
    reducer.wait()
    assert weight.grad is None
    assert violations() == []


@devices(2)
def test_a_gradient_that_is_conjugated_by_name_only(rank: int) -> None:
    import torch

    device = join()
    numbers = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64)
    weight = torch.nn.Parameter(device.tensor(torch.zeros(2, dtype=torch.complex64)))
    reducer = GradientReducer([weight])
    weight.grad = device.tensor(numbers * (rank + 1)).conj()
    assert weight.grad.is_conj() and weight.grad.is_contiguous()
    reducer.wait()
    device.settle()
    assert (weight.grad.resolve_conj() == 1.5 * numbers.conj()).all()
    assert violations() == []


@devices(2)
def test_gradients_are_in_their_buckets_as_soon_as_these_are_started(rank: int) -> None:
    """When a bucket is started, its gradients become views of the bucket. So autograd's arrays can be freed before
    wait().
    """
    import torch

    device = join()
    torch.manual_seed(0)
    model = device.module(torch.nn.Sequential(*(torch.nn.Linear(30, 30) for _ in range(4))))
    reducer = GradientReducer(model.parameters(), bucket_mb=0.004)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(2, 30)).sum().backward()
        there = [
            p.grad.data_ptr() == view.data_ptr() for p, view in zip(model.parameters(), reducer.buffers, strict=True)
        ]
        # Only the gradients of the last bucket, fewer than 4 of the 8, are still autograd's arrays.
        assert 0 < there.count(False) < 4
        reducer.wait()
        device.settle()
    assert violations() == []


@each_backend
@devices(3)
def test_uneven_data_under_pytorch(rank: int, backend: str) -> None:
    import torch

    device = join(backend)
    weight = torch.nn.Parameter(device.tensor(torch.zeros(4)))
    weight.register_hook(device.tensor)
    reducer = GradientReducer([weight])
    seen = []
    with reducer.join():
        for _ in range(rank + 1):
            reducer.zero_grad()
            device.settle()
            (weight * (rank + 1)).sum().backward()
            reducer.wait()
            device.settle()
            seen.append(weight.grad[0].item())
    assert seen == [2.0, 2.5, 3.0][: rank + 1]
    assert violations() == []


@each_backend
@devices(2)
def test_the_wrapper_has_reduced_gradients_when_backward_returns(rank: int, backend: str) -> None:
    import torch

    device = join(backend)
    inner = device.module(network(seed=rank).float())
    mine: dict[str, Any] = {}
    for name, p in inner.named_parameters():
        p.register_hook(lambda gradient, name=name: mine.update({name: gradient.clone()}))
    for as_view in (False, True):
        model = mscomm.DistributedDataParallel(inner, bucket_cap_mb=0.01, gradient_as_bucket_view=as_view)
        device.settle()
        for step in range(3):
            model.zero_grad()
            images, labels = batch(10 * step + rank, 8)
            loss_of(model, images.float(), labels).backward()
            device.settle()
            for (name, p), view in zip(inner.named_parameters(), model._reducer.buffers, strict=True):
                assert (p.grad == mscomm.all_reduce(mine[name], "avg")).all()
                assert (p.grad.data_ptr() == view.data_ptr()) == as_view
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert violations() == []
