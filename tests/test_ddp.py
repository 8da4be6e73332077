"""DistributedDataParallel: what scripts written for PyTorch's wrapper rely on."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import os
import pickle
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from ranks import everybody_is_here, ranks

import mscomm

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")

SCRIPT = Path(__file__).parent / "ddp_script.py"
CHANGES = {
    'torch.distributed.init_process_group("gloo")': "import mscomm; mscomm.init()",
    "from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402": (
        "from mscomm import DistributedDataParallel as DDP"
    ),
}


def train(script: Path, n: int, folder: Path) -> None:
    """Run the script as n processes that find each other through the variables of PyTorch's launcher."""
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {**os.environ, "WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = []
    for rank in range(n):
        with open(folder / f"{rank}.log", "wb") as log:
            env = {**job, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(n)}
            command = [sys.executable, str(script), str(folder)]
            processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(180) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * n, "\n".join((folder / f"{rank}.log").read_text() for rank in range(n))


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_script_with_two_lines_changed_ends_with_the_weights_of_pytorchs_wrapper(tmp_path: Path, n: int) -> None:
    import torch

    lines = SCRIPT.read_text().splitlines()
    assert all(lines.count(line) == 1 for line in CHANGES)
    changed = tmp_path / "changed.py"
    changed.write_text("\n".join(CHANGES.get(line, line) for line in lines) + "\n")
    train(SCRIPT, n, tmp_path / "theirs")
    train(changed, n, tmp_path / "ours")
    theirs = torch.load(tmp_path / "theirs" / "rank_0.pt")
    begin = torch.load(tmp_path / "theirs" / "checkpoint.pt")["model"]
    # The weights have changed since the checkpoint, so the epoch inside join() has trained the model.
    assert any((theirs[name] - begin[f"module.{name}"]).abs().max() > 1e-3 for name in theirs)
    for rank in range(n):
        ours = torch.load(tmp_path / "ours" / f"rank_{rank}.pt")
        assert list(ours) == list(theirs)
        for name, x in ours.items():  # weights, and BatchNorm's running means and batch counts
            torch.testing.assert_close(x, theirs[name], rtol=0, atol=1e-6)


def network() -> Any:
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()


def rows(seed: int) -> Any:
    import torch

    return torch.randn(5, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


class Odd:
    """A type that neither PyTorch nor mscomm knows. A module returns it in the passes with an opaque output."""

    def __init__(self, x: Any) -> None:
        self.x = x


def passes(torch: Any) -> dict[str, Any]:
    """Return named functions that compute gradients. Each takes a model, wrapped or not, and this rank's data."""
    from torch.utils.checkpoint import checkpoint

    def squares(model: Any, x: Any) -> None:
        model(x).square().sum().backward()

    def of_two_batches(model: Any, x: Any) -> None:
        with model.no_sync():
            squares(model, x)
        with torch.no_grad():
            model(x)
        squares(model, 2 * x)

    def forward_outside_no_sync(model: Any, x: Any) -> None:
        loss = model(x).square().sum()
        with model.no_sync():
            loss.backward()

    def two_losses(model: Any, x: Any) -> None:
        y = model(x)
        y.square().sum().backward(retain_graph=True)
        y.abs().sum().backward()

    def two_forward_passes(model: Any, x: Any) -> None:
        (model(x).square().sum() + model(x + 1).abs().sum()).backward()

    def gradient_penalty(model: Any, x: Any) -> None:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (slope.square().sum() + model(x).square().sum()).backward()

    def with_graph(model: Any, x: Any) -> None:
        model(x).square().sum().backward(create_graph=True)

    def checkpointed(reentrant: bool) -> Any:
        def one(model: Any, x: Any) -> None:
            inner = model.module if hasattr(model, "module") else model
            before, layers = inner.forward, list(inner)
            inner.forward = lambda x: functools.reduce(
                lambda y, f: checkpoint(f, y, use_reentrant=reentrant), layers, x
            )
            try:
                squares(model, x.clone().requires_grad_())
            finally:
                inner.forward = before

        return one

    def whole_checkpointed(reentrant: bool) -> Any:
        def one(model: Any, x: Any) -> None:
            checkpoint(model, x.clone().requires_grad_(), use_reentrant=reentrant).square().sum().backward()

        return one

    def opaque_then_accumulated(model: Any, x: Any) -> None:
        opaque(model, x)
        with model.no_sync():
            squares(model, x)
        squares(model, x)

    def opaque(model: Any, x: Any) -> None:
        inner = model.module if hasattr(model, "module") else model
        hook = inner.register_forward_hook(lambda _module, _given, y: Odd(y))
        y = model(x).x
        hook.remove()
        y.square().sum().backward(retain_graph=True)
        y.abs().sum().backward()

    return {
        "one batch": squares,
        "two batches": of_two_batches,
        "forward outside no_sync": forward_outside_no_sync,
        "two losses": two_losses,
        "two forward passes": two_forward_passes,
        "gradient penalty": gradient_penalty,
        "with the graph": with_graph,
        "checkpoint": checkpointed(False),
        "reentrant checkpoint": checkpointed(True),
        "all in a checkpoint": whole_checkpointed(False),
        "all in a reentrant checkpoint": whole_checkpointed(True),
        "opaque output": opaque,
        "opaque output, then others": opaque_then_accumulated,
    }


@ranks(2, timeout_s=120)
def test_after_backward_gradients_are_the_mean_of_the_ranks(rank: int) -> None:
    import torch

    warnings.simplefilter("ignore")  # create_graph=True warns
    alone = network()
    alone.no_sync = contextlib.nullcontext
    for as_view in (False, True):
        model = mscomm.DistributedDataParallel(network(), bucket_cap_mb=1e-4, gradient_as_bucket_view=as_view)
        finishes: list[int] = []
        finish = model._step.finish
        model._step.finish = lambda finish=finish, finishes=finishes: finishes.append(1) or finish()
        kept = None
        for turn, (name, one) in enumerate(passes(torch).items()):
            for again in range(2):  # the second pass adds to the gradients of the first, which are equal on all ranks
                if not again:
                    model.zero_grad()
                    alone.zero_grad()
                finishes.clear()
                one(model, rows(10 * turn + rank))
                counts = {"two losses": 2, "opaque output": 2, "opaque output, then others": 3}
                assert len(finishes) == counts.get(name, 1), name
                one(alone, rows(10 * turn + rank))
                for mine, plain in zip(model.parameters(), alone.parameters(), strict=True):
                    mean = mscomm.all_reduce(plain.grad.detach().contiguous(), "avg")
                    assert (mine.grad - mean).abs().max() < 1e-12 * (1 + mean.abs().max()), (name, again)
            if kept is not None and not as_view:
                # The two passes of this turn did not overwrite the gradients that were kept in the previous turn.
                assert all(torch.equal(one, copy) for one, copy in kept)
            kept = [(p.grad.detach(), p.grad.detach().clone()) for p in model.parameters()]


@ranks(2)
def test_what_a_rank_computes_beside_its_wrapper_stays_there(rank: int) -> None:
    model = mscomm.DistributedDataParallel(network())
    model(rows(rank)).sum().backward()
    model.zero_grad()
    told: list[str] = []
    mscomm.log.warn = told.append  # type: ignore[attr-defined]
    with model.no_sync():
        model(rows(rank)).sum().backward()
    assert not told
    model.zero_grad()
    model(rows(rank)).sum().backward()
    model.zero_grad()
    if rank == 0:  # rank 1 makes no calls in the meantime
        for _ in range(2):
            model.module(rows(3)).sum().backward()
        (text,) = told
        assert "stays on this rank" in text and "call the wrapper, not its .module" in text


@ranks(2)
def test_parameters_that_not_all_ranks_use(rank: int) -> None:
    import torch
    from test_reducer import Branches

    model = mscomm.DistributedDataParallel(Branches(), find_unused_parameters=True)
    for step in range(3):
        model.zero_grad()
        model(torch.ones(2, 4, dtype=torch.double), (step + rank) % 2 == 0 and step < 2).sum().backward()
        inner = model.module
        assert inner.never.weight.grad is None
        assert (inner.sometimes.weight.grad is None) == (step == 2)
        if step < 2:
            assert (inner.sometimes.bias.grad == 1).all()  # the mean of 2 on one rank and 0 on the other


@ranks(3)
def test_all_ranks_begin_with_the_model_of_rank_0(rank: int) -> None:
    import torch

    torch.manual_seed(rank)
    inner = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    inner[0].bias.requires_grad_(False)
    inner[1].running_mean += rank
    with pytest.raises(
        ValueError, match=r"ranks 0 and 1 of the group begin with different weights, of 0\.weight; use one"
    ):
        mscomm.DistributedDataParallel(inner, init_sync=False)
    inner._ddp_params_and_buffers_to_ignore = ["1.running_var"]
    inner[1].running_var += rank
    model = mscomm.DistributedDataParallel(inner)
    for name, x in inner.state_dict().items():
        own = name == "1.running_var"
        assert (mscomm.all_gather(x[None]) == x).all() != own, name
    # At the start of a step's first forward pass, all ranks copy rank 0's running means. After the pass, the means
    # differ by rank.
    x = torch.full((4, 3), float(rank))
    model(x).sum().backward()
    means = mscomm.all_gather(inner[1].running_mean[None])
    assert not (means == means[0]).all()
    model.eval()
    with torch.no_grad():
        model(x)
    assert (inner[1].running_mean == means[0]).all()


@ranks(2)
def test_names_with_and_without_the_prefix(rank: int) -> None:
    import torch

    # The names of these weights begin with "module." even before the wrapper adds its prefix "module.".
    inner = torch.nn.ModuleDict({"module": torch.nn.Linear(2, 2)})
    model = mscomm.DistributedDataParallel(inner)
    assert list(model.state_dict()) == ["module.module.weight", "module.module.bias"]
    ones = {name: torch.ones_like(x) for name, x in inner.state_dict().items()}
    model.load_state_dict(ones)
    assert (inner["module"].weight == 1).all()
    model.load_state_dict({f"module.{name}": 2 * x for name, x in ones.items()})
    assert (inner["module"].weight == 2).all()
    with pytest.raises(RuntimeError, match=r"Missing key.*module\.bias"):
        model.load_state_dict({"module.weight": torch.ones(2, 2)})
    with pytest.raises(ValueError, match="assign=True replaces the parameters"):
        model.load_state_dict(ones, assign=True)


@ranks(3)
def test_uneven_data(rank: int) -> None:
    import torch

    def trained(batches: int, **options: Any) -> Any:
        torch.manual_seed(0)
        weight = torch.nn.Linear(1, 1, bias=False)
        weight.weight.data.zero_()
        model = mscomm.DistributedDataParallel(torch.nn.Sequential(weight, torch.nn.BatchNorm1d(1, affine=False)))
        model.eval()  # with running means 0 and variances 1, normalization changes almost nothing
        optimizer = torch.optim.SGD(model.parameters(), 1.0, momentum=0.5)
        told: list[str] = []
        mscomm.log.warn = told.append  # type: ignore[attr-defined]
        with model.join(sync=[optimizer] if options.pop("sync", False) else None, **options):
            for _ in range(batches):
                optimizer.zero_grad()
                model(torch.full((1, 1), 6.0)).sum().backward()
                optimizer.step()
        momentum = [state["momentum_buffer"].item() for state in optimizer.state.values()]
        return weight.weight.item(), momentum, told

    unit = (1 + 1e-5) ** -0.5
    by_all, momentum, told = trained(rank)  # rank r has r batches
    assert by_all == pytest.approx(-(4 + (2 + 2)) * unit)
    assert momentum == pytest.approx([[], [4 * unit], [4 * unit]][rank])
    assert len(told) == (rank == 2) and all("join(sync=[optimizer])" in text for text in told)
    weight, momentum, told = trained(2 - rank, divide_by_initial_world_size=False, sync=True)  # rank r has 2-r batches
    assert weight == pytest.approx(-(6 + (3 + 6)) * unit) and momentum == pytest.approx([9 * unit]) and not told
    with pytest.raises(RuntimeError, match=r"has no batches left, others have|but rank 0 has none"):
        trained(1 + rank, throw_on_early_termination=True)
    assert trained(2, throw_on_early_termination=True, sync=True)[0] == trained(2, enable=False)[0]
    model = mscomm.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1)))
    with model.join():
        for _ in range(rank):  # rank 0 has no batches
            model(torch.ones(2, 1)).sum().backward()
            with torch.no_grad():  # the last forward pass of the other ranks produces no gradients
                model(torch.ones(2, 1))
    model(torch.ones(2, 1)).sum().backward()
    with (
        pytest.raises(ValueError, match="throw_on_early_termination differs by rank: True on rank 0"),
        model.join(throw_on_early_termination=rank == 0),
    ):
        pass
    with (
        pytest.raises(RuntimeError, match=r"join: a join\(\) on group world is open already; put the modules"),
        mscomm.DistributedDataParallel(network()).join(),
        model.join(),
    ):
        pass


@ranks(2)
def test_what_cannot_be_trained_is_told(rank: int) -> None:
    import torch

    def wrap(layer: Any, **options: Any) -> Any:
        return mscomm.DistributedDataParallel(layer, **options)

    for options in ({"device_ids": [0]}, {"output_device": "cpu"}):
        with pytest.raises(ValueError, match=r"DistributedDataParallel: \w+ has \w+, but the module is on cpu"):
            wrap(network(), **options)
    with pytest.raises(ValueError, match=r"1 is a SyncBatchNorm, which needs torch\.distributed"):
        wrap(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SyncBatchNorm(2)))
    with pytest.raises(ValueError, match="weight has no shape yet"):
        wrap(torch.nn.LazyLinear(2))
    with pytest.raises(ValueError, match="there are no parameters"):
        wrap(torch.nn.ReLU())
    parts = network()
    model, later = wrap(parts), wrap(parts[:1])
    with pytest.raises(RuntimeError, match=r"made later reduces 0\.weight, and this one no longer reduces anything"):
        model(rows(0))
    later(rows(0)).sum().backward()
    model = wrap(network())
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"copy or save its \.module"):
            copied(model)
    model.module[0].bias.requires_grad_(False)
    model = wrap(model.module)
    model(rows(0)).sum().backward()
    model.module[0].bias.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"0\.bias needs a gradient, but needed none when the module was wrapped"):
        model(rows(0))
    model = wrap(model.module)
    model.module[2] = torch.nn.Linear(8, 3).double()
    with pytest.raises(RuntimeError, match=r"2\.weight was added or replaced after the module was wrapped"):
        model(rows(0))
    model = wrap(model.module)
    model.module.float()
    with pytest.raises(RuntimeError, match=r"is of torch\.float32, but was of torch\.float64 at the beginning"):
        model(rows(0).float()).sum().backward()
    with pytest.raises(RuntimeError, match=r"SGD\.step: the gradients are not reduced yet"):
        model = wrap(network())
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        model.module[2].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        model(rows(0)).sum().backward()


@ranks(2, expect={0: 0, 1: 3})
def test_an_exception_in_the_backward_pass_is_not_forgotten(rank: int) -> None:
    """Because of the exception, rank 1 does not send some of its buckets, and rank 0 waits for them. So rank 1's next
    forward pass must raise an error.
    """
    import torch

    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(_: Any, gradient: Any) -> Any:
            if broken:
                raise ValueError("a batch is broken")
            return gradient

    broken = False
    inner = network()
    model = mscomm.DistributedDataParallel(inner, bucket_cap_mb=1e-5)
    inner[1].register_forward_hook(lambda _module, _given, y: Breaks.apply(y))
    for step in range(2):
        y = model(rows(rank))
        broken = (rank, step) == (1, 1)
        if rank == 0 and step == 1:
            with pytest.raises(mscomm.Aborted, match="raised an exception in the middle of a step"):
                y.sum().backward()
            return
        if not broken:
            y.sum().backward()
            everybody_is_here()  # otherwise rank 0 could still be in this step when rank 1 aborts in the next one
            continue
        with pytest.raises(ValueError, match="a batch is broken"):
            y.sum().backward()
        try:
            model(rows(rank))
        except RuntimeError as error:
            mscomm.abort(str(error))
            os._exit(3)
