"""Networks that mscomm.parallel divides, on a real GPU, compared with the whole network on the same GPU.

Several ranks share one GPU, as in test_gpu.py. Without a GPU, the tests are skipped with a reason.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from gpu.test_gpu import on_gpu, take

import mscomm

torch = pytest.importorskip("torch")

from test_parallel import RIGHT, Calls, numbers  # noqa: E402
from torch.nn import functional  # noqa: E402

from mscomm import parallel  # noqa: E402
from mscomm.parallel.planning import Plan  # noqa: E402

pytestmark = pytest.mark.gpu


def equal_on_all_ranks(x: Any) -> bool:
    return len({one.tobytes() for one in mscomm.all_gather(take(x.detach().contiguous())[None])}) == 1


@on_gpu(2)
def test_functions_equal_the_whole_network_for_two_steps(rank: int, group: None) -> None:
    """With the strategies that were found, and with random ones. A function with a constant on the CPU is left out."""
    x = numbers(16, 8).cuda()
    for (name, function), seed in [(one, seed) for one in RIGHT.items() if one[0] != "constants" for seed in range(2)]:
        mscomm.set_seed(seed)
        whole, parts = Calls(function).cuda(), Calls(function).cuda()
        parts.load_state_dict(whole.state_dict())
        found = parallel.plan(parts, [x], 2)
        choices = list(map(random.Random(seed).choice, found._problem.choices))
        net = parallel.divide(parts, Plan(found.graph, found._problem, choices) if seed else found)
        for step in range(2):
            whole.zero_grad()
            parts.zero_grad()
            expected, result = whole(x), net(x.chunk(2)[rank])
            told = f"{name}, seed {seed}, step {step}\n{net.plan}"
            torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3, msg=lambda m, t=told: m + t)
            (expected * x).sum().backward()
            (result * x).sum().backward()
            net.reduce_gradients()
            for (key, one), mine in zip(whole.named_parameters(), parts.parameters(), strict=True):
                if mine.grad is not None:
                    wanted = net.part(key, one.grad)
                    torch.testing.assert_close(mine.grad, wanted, rtol=1e-3, atol=1e-2, msg=lambda m, t=told: m + t)
        net.join()
        for one, mine in zip(whole.parameters(), parts.parameters(), strict=True):
            assert mine.is_cuda and torch.equal(one, mine)


@on_gpu(2)
def test_dropout_is_the_same_for_ranks_with_the_same_part(rank: int, group: None) -> None:
    x = torch.ones(16, 8, device="cuda")
    for number in range(4):
        mscomm.set_seed(1)
        module = Calls(lambda m, x: functional.dropout(torch.relu(x @ (m.w * 0 + 1)), 0.5)).cuda()
        torch.manual_seed(10 * number + rank)
        found = parallel.plan(module, [x], 2)
        choices = list(map(random.Random(number).choice, found._problem.choices))
        net = parallel.divide(module, Plan(found.graph, found._problem, choices) if number else found)
        state = torch.cuda.get_rng_state()
        first, second = (net(x.chunk(2)[rank]) for _ in range(2))
        assert torch.equal(torch.cuda.get_rng_state(), state)
        for result in (first, second):
            assert set(result.unique().tolist()) == {0.0, 16.0} and 30 < (result == 0).sum() < 98
            assert equal_on_all_ranks(result)
        assert not torch.equal(first, second)


@pytest.mark.parametrize("mode", ["semi_auto_parallel", "auto_parallel"])
@on_gpu(2)
def test_model_trains_a_divided_network_as_one_process_does(rank: int, group: None, mode: str) -> None:
    def network() -> Any:
        mscomm.set_seed(3)
        layers = [torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.MaxPool2d(2)]
        return torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(8 * 4 * 4, 10)).cuda()

    images = numbers(4, 16, 3, 8, 8)
    labels = torch.arange(16) * 7 % 10
    trained = []
    for own in (slice(8 * rank, 8 * rank + 8), slice(None)):
        mscomm.set_auto_parallel_context(parallel_mode=mode if own.stop is not None else "stand_alone")
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
        model = mscomm.Model(net, torch.nn.CrossEntropyLoss(), optimizer)
        model.train(2, [(batch[own], labels[own]) for batch in images])
        trained.append({name: x.clone() for name, x in net.state_dict().items()})
    for name, x in trained[0].items():
        assert x.is_cuda and equal_on_all_ranks(x), name
        torch.testing.assert_close(x, trained[1][name], rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
