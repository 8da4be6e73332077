"""GradientReducer on a real GPU: with CuPy's and PyTorch's arrays, with and without kernels, on several streams.

Several ranks share one GPU, as in test_gpu.py. Without a GPU, the tests are skipped with a reason.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu.test_gpu import each_library, give, has, on_gpu, take

import mscomm
from mscomm import _core
from mscomm.job import resolve
from mscomm.train import GradientReducer, broadcast_parameters

pytestmark = pytest.mark.gpu
needs_torch = pytest.mark.skipif(not has("torch"), reason="torch is not installed")
SIZES = [(300, 7), (5000,), (), (0, 3), (64, 64), (11,)]


def drawn(rank: int, step: int) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(100 * step + rank)
    return [np.asarray(rng.normal(size=shape), np.float32) for shape in SIZES]


@needs_torch
@pytest.mark.parametrize("bucket_mb", [None, 0.001])
@on_gpu(2)
def test_pytorch_gets_the_mean_of_all_ranks(rank: int, group: None, bucket_mb: float | None) -> None:
    import torch

    parameters = [torch.nn.Parameter(torch.zeros(shape, device="cuda")) for shape in SIZES]
    reducer = GradientReducer(parameters, bucket_mb=bucket_mb)
    for step in range(4):
        if step % 2:
            reducer.zero_grad()
        else:
            for p in parameters:
                p.grad = None
        mine = [give("torch", x) for x in drawn(rank, step)]
        sum((p * x).sum() for p, x in zip(parameters, mine, strict=True)).backward()
        reducer.carry(rank)
        reducer.wait()
        assert reducer.carried == 0.5
        for p, a, b in zip(parameters, drawn(0, step), drawn(1, step), strict=True):
            # A sum of two halves equals half of the sum, except for numbers that are close to zero.
            assert np.allclose(take(p.grad), (a + b) / 2, rtol=1e-6, atol=1e-30)


@each_library
@on_gpu(2)
def test_fused_equals_plain_to_the_bit(rank: int, group: None, library: str) -> None:
    if library == "torch":  # PyTorch's gradients come from autograd
        import torch

        parameters = [torch.nn.Parameter(torch.zeros(shape, device="cuda")) for shape in SIZES]
        reducer = GradientReducer(parameters)
        sum((p * give("torch", x)).sum() for p, x in zip(parameters, drawn(rank, 0), strict=True)).backward()
        reducer.wait()
        got = [take(p.grad) for p in parameters]
    else:
        given = [give(library, x) for x in drawn(rank, 0)]
        got = [take(x) for x in GradientReducer(given).reduce(given)]
    for x, fused in zip(drawn(rank, 0), got, strict=True):
        alone = take(mscomm.all_reduce(give(library, x), "avg"))
        assert (alone.view(np.uint32) == fused.view(np.uint32)).all()


@pytest.mark.parametrize(
    ("library", "compression"),
    [  # no bf16 with CuPy, which has no bfloat16 of its own
        pytest.param(one, how, marks=pytest.mark.skipif(not has(one), reason=f"{one} is not installed"))
        for one, how in (("torch", "bf16"), ("torch", "fp16"), ("cupy", "fp16"))
    ],
)
@on_gpu(2)
def test_kernels_and_the_library_compress_to_the_same_bits(
    rank: int, group: None, library: str, compression: str
) -> None:
    codes = [_core.dtypes().index(name) for name in ("float32", "bfloat16")]
    assert resolve(None).core.packs(*codes), "this build has no kernels"

    def steps(reducer: GradientReducer, parameters: list[Any]) -> list[np.ndarray[Any, Any]]:
        seen = []
        for step in range(4):
            mine = [give(library, x) for x in drawn(rank, step)]
            if library == "torch":
                for p, x in zip(parameters, mine, strict=True):
                    p.grad = None
                    (p * x).sum().backward()
                reducer.wait()
                seen += [take(p.grad) for p in parameters]
            else:
                seen += [take(x) for x in reducer.reduce(mine)]
        return [*seen, *reducer.state_dict()["residual"].values()]

    found = []
    for kernels in (True, False):
        if library == "torch":
            import torch

            parameters: list[Any] = [torch.nn.Parameter(torch.zeros(shape, device="cuda")) for shape in SIZES]
        else:
            parameters = [give(library, np.zeros(shape, np.float32)) for shape in SIZES]
        with pytest.MonkeyPatch.context() as patch:
            if not kernels:
                patch.setattr("mscomm.train.device_buckets.has_kernel", lambda *_: False)
            found.append(steps(GradientReducer(parameters, compression=compression), parameters))
    for with_kernels, without in zip(*found, strict=True):
        assert (with_kernels.view(np.uint32) == without.view(np.uint32)).all()


@needs_torch
@on_gpu(2)
def test_gradients_of_several_streams(rank: int, group: None) -> None:
    """PyTorch computes the gradients of one bucket on two streams, one of which is late. Both results must be right."""
    import torch

    first, second = (torch.nn.Parameter(torch.ones(1 << 20, device="cuda")) for _ in range(2))
    side = torch.cuda.Stream()
    reducer = GradientReducer([first, second], bucket_mb=64)
    for step in range(6):
        if step % 2:
            reducer.zero_grad()
        else:
            first.grad = second.grad = None
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            a = (first * (rank + 1 + step)).sum()
        b = (second * 10 * (rank + 1 + step)).sum()
        torch.cuda.current_stream().wait_stream(side)
        (a + b).backward()
        reducer.wait()
        assert (first.grad == 1.5 + step).all().item() and (second.grad == 10 * (1.5 + step)).all().item()


@needs_torch
@on_gpu(2)
def test_wait_may_be_called_on_another_stream(rank: int, group: None) -> None:
    import torch

    weight = torch.nn.Parameter(torch.ones(1 << 20, device="cuda"))
    reducer, side = GradientReducer([weight]), torch.cuda.Stream()
    for step in range(4):
        weight.grad = None
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            loss = (weight * (rank + 1 + step)).sum()
            torch.cuda._sleep(20_000_000)
            loss.backward()
        reducer.wait()
        assert (weight.grad == 1.5 + step).all().item()


@needs_torch
@on_gpu(2)
def test_a_conjugated_gradient(rank: int, group: None) -> None:
    import torch

    weight = torch.nn.Parameter(torch.ones(3, device="cuda", dtype=torch.complex64))
    reducer = GradientReducer([weight])
    factors = torch.tensor([1 + 2j, 3, -1j], device="cuda") * (rank + 1)
    (weight.conj() * factors).sum().abs().backward()
    mine = take(weight.grad.resolve_conj().clone())
    reducer.wait()
    assert np.allclose(take(weight.grad.resolve_conj()), mscomm.all_reduce(mine, "avg"))


@needs_torch
@on_gpu(3)
def test_means_of_bfloat16_are_not_off_by_a_third_of_that_dtype(rank: int, group: None) -> None:
    import torch

    weight = torch.nn.Parameter(torch.ones(100, device="cuda", dtype=torch.bfloat16))
    reducer = GradientReducer([weight])
    (weight * 1.5).sum().backward()
    reducer.wait()
    assert (weight.grad == 1.5).all().item()


@needs_torch
@on_gpu(2)
def test_a_training_has_the_weights_of_one_process(rank: int, group: None) -> None:
    import torch

    def network(seed: int) -> Any:
        torch.manual_seed(seed)
        layers = [torch.nn.Linear(20, 300), torch.nn.GroupNorm(4, 300), torch.nn.ReLU(), torch.nn.Linear(300, 10)]
        return torch.nn.Sequential(*layers).double().cuda()

    def batch(step: int) -> Any:
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(32, 20, generator=generator, dtype=torch.double)
        return images.cuda(), torch.randint(0, 10, (32,), generator=generator).cuda()

    def trained(model: Any, shard: Any, reducer: Any) -> list[Any]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for step in range(20):
            (reducer or optimizer).zero_grad()
            images, labels = (shard(part) for part in batch(step))
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            if reducer is not None:
                reducer.wait()
            optimizer.step()
        return [take(p.detach()) for p in model.parameters()]

    model = network(seed=rank)
    broadcast_parameters(model.state_dict())
    mine = trained(model, lambda part: part.chunk(2)[rank], GradientReducer(model.named_parameters(), bucket_mb=0.01))
    for one, alone in zip(mine, trained(network(0), lambda part: part, None), strict=True):
        assert np.linalg.norm(one - alone) <= 1e-9 * np.linalg.norm(alone)
