"""Random numbers in divided networks: ranks that compute the same part of a tensor draw the same numbers."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import ranks

import mscomm

torch = pytest.importorskip("torch")

from test_parallel import Calls, numbers  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from mscomm import parallel  # noqa: E402
from mscomm.parallel import tracing  # noqa: E402
from mscomm.parallel.planning import Plan  # noqa: E402


@ranks(4)
def test_dropout_is_the_same_for_ranks_with_the_same_part(rank, group):
    """The results tell which elements were dropped, and gradients must be those of the same elements."""
    x = torch.ones(16, 8)
    for number in range(8):
        mscomm.set_seed(1)
        module = Calls(lambda m, x: functional.dropout(torch.relu(x @ (m.w * 0 + 1)), 0.5))
        torch.manual_seed(10 * number + rank)
        found = parallel.plan(module, [x], 4)
        draw = random.Random(number)
        choices = list(map(draw.choice, found._problem.choices))
        plan = found if number == 0 else Plan(found.graph, found._problem, choices)
        net = parallel.divide(module, plan)
        state = torch.get_rng_state()
        draws_after_two_seeds = (torch.randint(2**62, (2,)), torch.rand(4))[1]
        torch.set_rng_state(state)
        first, second = net(x[4 * rank : 4 * rank + 4]), net(x[4 * rank : 4 * rank + 4])
        assert torch.equal(torch.rand(4), draws_after_two_seeds)
        for result in (first, second):
            assert set(result.unique().tolist()) == {0.0, 16.0} and 30 < (result == 0).sum() < 98
            assert len({one.tobytes() for one in mscomm.all_gather(result.detach().numpy()[None])}) == 1
        assert not torch.equal(first, second)
        assert len({row.tobytes() for row in first.detach().numpy()}) > 12  # parts differ, too

    mscomm.set_seed(1)
    module = Calls(lambda m, x: functional.dropout(x * m.s, 0.5))
    torch.manual_seed(rank)
    for axes in ((0, 1), (0,), ()):
        plan = parallel.plan(module, [x], 4)
        divided = {"a": axes} if axes else {}  # the rows
        choices = [next(one for one in some if one.axes == divided) for some in plan._problem.choices]
        net = parallel.divide(module, Plan(plan.graph, plan._problem, choices))
        result = net(x[4 * rank : 4 * rank + 4])
        result.sum().backward()
        net.reduce_gradients()
        assert module.s.grad == result.sum() / 0.5
        net.join()
        # Checkpointing computes the call again in the backward pass.
        net = parallel.divide(module, Plan(plan.graph, plan._problem, choices))
        result = checkpoint(net, x[4 * rank : 4 * rank + 4], use_reentrant=False)
        result.sum().backward()
        net.reduce_gradients()
        assert module.s.grad == result.sum() / 0.5
        net.join()


def drawn_buffer(m: Any, x: Any) -> Any:
    m.mean.bernoulli_(0.5)
    return x @ m.w + m.mean


@pytest.mark.parametrize("strided", [False, True])
@ranks(4)
def test_random_numbers_are_the_same_for_ranks_with_the_same_part(rank, group, strided):
    functions = {
        "attention": lambda m, x: functional.scaled_dot_product_attention(*[x.view(4, 4, 8)] * 3, dropout_p=0.5),
        "no rule": lambda m, x: x + torch.rand_like(x) * m.s,
        "a new tensor": lambda m, x: x * x.new_empty(16, 8).bernoulli_(0.5) + m.s,
        "a buffer": drawn_buffer,
        "dropout of channels": lambda m, x: functional.dropout1d(x.t() * m.s, 0.5, True),
        "on the input": lambda m, x: functional.dropout(x, 0.5) * m.s,
    }
    x = numbers(16, 8)
    own = x.t().contiguous().t() if strided and rank == 2 else x
    for name, function in functions.items():
        mscomm.set_seed(1)
        module = Calls(function)
        torch.manual_seed(rank)
        found = parallel.plan(module, [x], 4, dataset_strategy="full_batch")
        draw = random.Random(5)
        for _ in range(3):
            choices = list(map(draw.choice, found._problem.choices))
            net = parallel.divide(module, Plan(found.graph, found._problem, choices))
            results = [net(own).detach().numpy() for _ in range(2)]
            for result in results:
                assert len({one.tobytes() for one in mscomm.all_gather(result[None])}) == 1, name
            assert not np.array_equal(*results), name
            net.join()
            assert len({one.tobytes() for one in mscomm.all_gather(module.mean.numpy()[None])}) == 1, name


@ranks(2)
def test_a_transformer_with_dropout_trains_to_the_same_weights_on_all_ranks(rank, group):
    mscomm.set_seed(3)
    module = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
    x = numbers(4, 6, 8)
    expected = module.eval()(x)
    plan = parallel.plan(module.train(), [x], 2)
    assert sum(node.draws for node in plan.graph.nodes) == 4
    net = parallel.divide(module, plan)
    torch.manual_seed(rank)
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    for _ in range(3):
        optimizer.zero_grad()
        result = net(x[2 * rank : 2 * rank + 2])
        result.square().mean().backward()
        net.reduce_gradients()
        optimizer.step()
    assert not torch.allclose(result, expected)
    net.join()
    for weight in (result, *module.parameters()):
        assert len({one.tobytes() for one in mscomm.all_gather(weight.detach().numpy()[None])}) == 1


@pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")
def test_dropout_in_a_gru_on_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN seeds it only once. Planning needs no GPU, only the name of the device."""
    gru = torch.nn.GRU(8, 8, num_layers=2, dropout=0.5)
    inputs = [torch.zeros(4, 2, 8), torch.zeros(2, 2, 8)]
    parallel.plan(gru, inputs, 2)
    there = property(lambda self: torch.device("cuda"), lambda self, device: None)
    monkeypatch.setattr(tracing._Recorder, "device", there, raising=False)
    with pytest.raises(NotImplementedError, match=r"gru with dropout is in mscomm\.parallel only on"):
        parallel.plan(gru, inputs, 2)


@ranks(2)
def test_a_training_with_dropout_continues_with_the_same_bits(rank, group):
    """The data are shuffled by the same generator as the dropout draws from."""
    here = Path(os.environ["RANKS_TOLD"]) / str(rank)
    data = torch.utils.data.TensorDataset(numbers(16, 8), numbers(16, 8, seed=2))

    def trained(last: int, path: Path | None) -> bytes:
        mscomm.set_auto_parallel_context(parallel_mode="auto_parallel")
        mscomm.set_seed(4)
        net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5))
        model = mscomm.Model(net, torch.nn.MSELoss(), torch.optim.Adam(net.parameters(), 0.01))
        if path is not None:
            model.resume(path)
        torch.manual_seed(rank)
        saved = mscomm.ModelCheckpoint(directory=str(here / str(last)), config=mscomm.CheckpointConfig())
        batches = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
        model.train(last, batches, callbacks=[saved])
        return b"".join(x.detach().numpy().tobytes() for x in net.state_dict().values())

    whole = trained(4, None)
    trained(2, None)
    assert trained(4, here / "2") == whole
