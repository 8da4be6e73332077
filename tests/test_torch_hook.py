"""What users of PyTorch call beside the backend: ddp_hook, mscomm's own calls on tensors, and the profiler."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ranks import ranks  # noqa: E402
from test_torch_backend import run  # noqa: E402

import mscomm  # noqa: E402

HOOKED = """
import mscomm, mscomm.torch
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
mscomm.init()
def wrapped(**options):
    torch.manual_seed(1)
    layers = torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)
    return DDP(torch.nn.Sequential(*layers), bucket_cap_mb=0.01, **options)  # two buckets, both moved by the hook
def train(model):
    torch.manual_seed(10 + rank)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(6, 64)).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]
def refused(call, *words):
    try:
        call()
    except (TypeError, ValueError, RuntimeError) as error:
        for word in words:
            assert word in str(error), error
    else:
        raise AssertionError(words)
"""


def test_the_hook_averages_as_gloo_does(tmp_path: Path) -> None:
    body = """
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
expected = train(wrapped())
for options in ({}, {"gradient_as_bucket_view": True, "static_graph": True}):
    model = wrapped(**options)
    model.register_comm_hook(*mscomm.torch.ddp_hook(model))
    assert all(torch.equal(a, b) for a, b in zip(expected, train(model), strict=True))

# With join(), the ranks may have different numbers of batches.
expected_then, model = wrapped(), wrapped()
model.register_comm_hook(*mscomm.torch.ddp_hook(model))
for one in (expected_then, model):
    with one.join():
        for step in range(2 + 2 * rank):
            one(torch.full((3, 64), 1.0 + rank + step)).square().mean().backward()
for a, b in zip(expected_then.parameters(), model.parameters(), strict=True):
    torch.testing.assert_close(a.grad, b.grad)

model = wrapped()
state, hook = mscomm.torch.ddp_hook(model, "world")
model.register_comm_hook(state, fp16_compress_wrapper(hook))
for a, b in zip(expected, train(model), strict=True):
    torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
dist.barrier()
sys.stdout.write("done\\n")
"""
    done = run(2, tmp_path, HOOKED + body)
    assert done.returncode == 0 and done.stdout.count("done") == 2, done.stderr


SHARED = """
import collections, mscomm.torch
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("mscomm")
can_move = hasattr(torch.UntypedStorage, "_swap_data_ptr_")

# After the first step, DDP makes new buckets. From then on, each of them stays where the hook has put it.
for as_view in (False, True):
    layers = torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8)
    model = DDP(torch.nn.Sequential(*layers), bucket_cap_mb=0.01, gradient_as_bucket_view=as_view)
    group, hook = mscomm.torch.ddp_hook(model)
    assert group is mscomm.torch.group()
    places, sizes = collections.defaultdict(set), {}
    def watched(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future, buffer = hook(state, bucket), bucket.buffer()
        assert not (can_move and buffer.untyped_storage().resizable())
        if step > 0:
            places[bucket.index()].add(buffer.data_ptr())
            sizes[bucket.index()] = buffer.nbytes
        return future
    model.register_comm_hook(group, watched)
    for step in range(5):
        expected = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for i in range(2):  # what each of the two ranks computes
            loss = model.module(torch.full((3, 64), 1.0 + i + step)).square().mean()
            for total, one in zip(expected, torch.autograd.grad(loss, list(model.parameters())), strict=True):
                total += one / 2
        model.zero_grad()
        model(torch.full((3, 64), 1.0 + rank + step)).square().mean().backward()
        for parameter, mean in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, mean)
    assert len(places) == 2 and all(len(one) == 1 for one in places.values()), places
    assert group.epoch.heap.in_use() >= sum(sizes.values()) or not can_move, sizes

# A bucket whose memory a NumPy array uses stays where it is.
model = DDP(torch.nn.Linear(64, 512), gradient_as_bucket_view=True)
def viewed(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    views.append(bucket.buffer().numpy())
    return hook(state, bucket)
views = []
model.register_comm_hook(group, viewed)
model(torch.full((3, 64), 1.0 + rank)).sum().backward()
grads = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
assert sorted(views[0].tolist()) == sorted(grads.tolist()) and set(views[0].tolist()) == {3.0, 4.5}, views

# If the host has no memory to share, the bucket stays in private memory.
from mscomm.torch import gradients
def refused(*_):
    raise MemoryError
gradients.shared_memory = refused
model = DDP(torch.nn.Linear(64, 512, bias=False))
model.register_comm_hook(group, hook)
model(torch.full((3, 64), 1.0 + rank)).sum().backward()
assert model.module.weight.grad.eq(4.5).all()

# The hook refuses a sparse gradient, and the error says what to do.
model = DDP(torch.nn.Embedding(8, 4, sparse=True))
model.register_comm_hook(group, hook)
try:
    model(torch.tensor([rank])).sum().backward()
except Exception as error:
    assert "to_dense" in str(error), error
else:
    raise AssertionError
sys.stdout.write("done\\n")
dist.destroy_process_group()
"""


def test_the_hook_moves_the_buckets_into_shared_memory_once(tmp_path: Path) -> None:
    done = run(2, tmp_path, SHARED)
    assert done.returncode == 0 and done.stdout.count("done") == 2, done.stderr


def test_backward_passes_may_reach_two_models_in_different_orders(tmp_path: Path) -> None:
    """On each rank, the only bucket of one model comes before the gradients of the other model, which differs."""
    body = """
import mscomm.torch, threading
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("mscomm")
models = []
for group in (dist.new_group(), dist.new_group()):
    model = DDP(torch.nn.Linear(4, 2, bias=False), process_group=group)
    model.register_comm_hook(*mscomm.torch.ddp_hook(model))
    model.module.weight.register_hook(lambda _, i=len(models): order.append(i))
    models.append(model)
for step in range(10):
    outputs, order = [model(torch.full((1, 4), 1.0 + rank)) for model in models], []
    if rank:  # Autograd first goes through what was computed last. It counts in each thread for itself.
        early = threading.Thread(target=lambda: outputs.append(outputs.pop() * 1))
        early.start()
        early.join()
    (outputs[0] + outputs[1]).sum().backward()
    assert step == 0 or order == ([0, 1] if rank else [1, 0])
    for model in models:
        assert model.module.weight.grad.eq(1.5).all()
        model.zero_grad()
dist.barrier()
sys.stdout.write("done\\n")
dist.destroy_process_group()
"""
    done = run(2, tmp_path, body)
    assert done.returncode == 0 and done.stdout.count("done") == 2, done.stderr


def test_the_hook_refuses_a_group_that_is_not_the_models(tmp_path: Path) -> None:
    body = """
pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
model, pair = wrapped(), wrapped(process_group=pairs[rank // 2])
crossed = mscomm.create_group(f"crossed {rank % 3 == 0}", [0, 3] if rank % 3 == 0 else [2, 1])
refused(lambda: mscomm.torch.ddp_hook(pair), "torch's ranks [2, 3]" if rank > 1 else "torch's ranks [0, 1]")
refused(lambda: mscomm.torch.ddp_hook(pair, crossed), "consists of torch's ranks")  # right size and numbers
refused(lambda: mscomm.torch.ddp_hook(model, crossed), "torch's ranks [0, 1, 2, 3]")
refused(lambda: mscomm.torch.ddp_hook(model, dist.group.WORLD), "backend gloo")
refused(lambda: mscomm.torch.ddp_hook(model.module), "is a Sequential")
moved = wrapped()
moved.module.to("meta")
refused(lambda: mscomm.torch.ddp_hook(moved), "0.weight is on meta")
right = mscomm.create_group(f"pair {rank // 2}", [rank // 2 * 2, rank // 2 * 2 + 1])
expected = train(wrapped(process_group=pairs[rank // 2]))
pair.register_comm_hook(*mscomm.torch.ddp_hook(pair, right))
assert all(torch.equal(a, b) for a, b in zip(expected, train(pair), strict=True))
sys.stdout.write("done\\n")
mscomm.release()
refused(lambda: mscomm.torch.ddp_hook(model), "call mscomm.init() first")
dist.barrier()
"""
    done = run(4, tmp_path, HOOKED + body)
    assert done.returncode == 0 and done.stdout.count("done") == 4, done.stderr


def test_backward_names_a_rank_that_the_hook_lost(tmp_path: Path) -> None:
    body = """
model = wrapped()
model.register_comm_hook(*mscomm.torch.ddp_hook(model))
for step in range(1000):
    if rank == 1 and step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        model(torch.ones(4, 64)).sum().backward()
    except RuntimeError as error:
        # PeerLost itself if the call of the hook raises it; else torch wraps its text.
        open(f"{sys.argv[0]}.{rank}", "w").write(f"{type(error).__name__}: {error}")
        break
"""
    run(3, tmp_path, HOOKED + body)
    for rank in (0, 2):
        assert re.search(r"PeerLost: rank 1 \(pid", (tmp_path / f"script.py.{rank}").read_text())


def test_group_returns_the_group_of_a_process_group(tmp_path: Path) -> None:
    body = """
import mscomm, mscomm.torch
def refused(kind, words, call):
    try:
        call()
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(words)
assert "mscomm.torch.process_group" not in sys.modules and "mscomm.torch.gradients" not in sys.modules
refused(ValueError, "not initialized", mscomm.torch.group)
dist.init_process_group("mscomm")
last = dist.new_group([1, 2])
group = mscomm.torch.group()
assert (group.rank, group.ranks, group) == (rank, [0, 1, 2], mscomm.torch.group(dist.group.WORLD))
assert mscomm.all_reduce(torch.ones(2), group=group).tolist() == [3, 3]
if rank:
    x = torch.full((2,), float(rank))
    dist.broadcast(x, src=1, group=last)                         # torch: a rank in the world
    assert x.tolist() == [1, 1]
    mscomm.broadcast_(x.fill_(rank), root=1, group=mscomm.torch.group(last))  # mscomm: a rank in the group
    assert x.tolist() == [2, 2]
else:
    refused(ValueError, "not in the process group", lambda: mscomm.torch.group(last))
refused(TypeError, "is a str", lambda: mscomm.torch.group("last"))
refused(ValueError, "backend gloo", lambda: mscomm.torch.group(dist.new_group(backend="gloo")))
dist.barrier()  # gloo raises an error if a rank leaves while another one still connects
sys.stdout.write("done\\n")
dist.destroy_process_group()
"""
    done = run(3, tmp_path, body)
    assert done.returncode == 0 and done.stdout.count("done") == 3, done.stderr


def test_the_profiler_shows_the_calls(tmp_path: Path) -> None:
    body = """
from torch.profiler import profile
dist.init_process_group("mscomm")
def calls():
    x, rows = torch.ones(4), torch.empty(8)
    dist.all_reduce(x)
    late = dist.all_reduce(x, async_op=True)
    if rank == 0: time.sleep(0.2)
    late.wait()
    dist.broadcast(x, 0)
    dist.all_gather([torch.empty(4), torch.empty(4)], x)
    dist.reduce(x, 0)
    dist.gather(x, [torch.empty(4), torch.empty(4)] if rank == 0 else None)
    dist.scatter(x, [x + 1, x + 2] if rank == 0 else None)
    dist.all_gather_single(rows, x)
    dist.reduce_scatter_single(x, rows)
    dist.all_to_all_single(torch.empty(4), x)
    dist.barrier()
    if rank: dist.send(x, 0)
    else: dist.recv(x, 1)
with profile() as recorded:
    calls()
    if rank == 0: dist.isend(torch.ones(1 << 20), 1)  # ends only after rank 1 has received
    else:
        time.sleep(0.3)
        dist.recv(torch.empty(1 << 20), 0)
    dist.barrier()
    time.sleep(0.1)
calls()
names = [event.name for event in recorded.events() if event.name.startswith("mscomm:")]
expected = ["all_reduce", "all_reduce", "broadcast", "all_gather", "reduce", "gather", "scatter", "all_gather",
            "reduce_scatter", "all_to_all", "barrier"]
expected += ["send", "recv", "barrier"] if rank else ["recv", "send", "barrier"]
assert names == [f"mscomm:{name}" for name in expected], names
if rank == 0:
    isend = [event for event in recorded.events() if event.name == "mscomm:send"][-1]
    assert isend.time_range.elapsed_us() > 100_000, isend
sys.stdout.write("done\\n")
dist.destroy_process_group()
"""
    done = run(2, tmp_path, body)
    assert done.returncode == 0 and done.stdout.count("done") == 2, done.stderr


OVERWRITES = {
    "all_reduce_": lambda x: mscomm.all_reduce_(x),
    "async_op": lambda x: mscomm.all_reduce_(x, async_op=True).wait(),
    "out": lambda x: mscomm.all_gather(np.ones(2, np.float32), out=x),
    "all_reduce_many": lambda x: mscomm.all_reduce_many([x], out=[x]),
    "sendrecv": lambda x: mscomm.sendrecv(torch.ones(2), 0, x, 0),
}


@ranks(1)
def test_a_backward_pass_through_an_overwritten_tensor_warns(rank: int, group: None) -> None:
    for case, overwrite in OVERWRITES.items():
        x = torch.ones(2, requires_grad=True)
        y = x * 3
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            overwrite(y)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            y.sum().backward()
        assert any("gradient of a tensor that a call of mscomm" in str(one.message) for one in seen), case


@ranks(2)
def test_a_result_needs_no_gradient_and_a_parameter_may_be_overwritten(rank: int, group: None) -> None:
    parameter = torch.nn.Parameter(torch.full((2,), float(rank)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mscomm.broadcast_(parameter, root=1)
        (parameter * parameter).sum().backward()  # the right gradient
        assert parameter.grad.tolist() == [2, 2]
        with torch.no_grad():
            mscomm.all_reduce_(parameter * 2)
        loss = (parameter * 3).sum()
        total = mscomm.all_reduce(loss)
        assert total.item() == 12 and not total.requires_grad
        with pytest.raises(RuntimeError, match="does not require grad"):
            total.backward()
        loss.backward()
    assert parameter.grad.tolist() == [5, 5]
