"""Programs that use torch.distributed: `torchrun --nproc_per_node 2 torch_cases.py BACKEND FILE [CASE...]`.

Each case returns tensors, which must not depend on the backend. Rank r writes them to FILE.r as a dict of lists.
"""

from __future__ import annotations

import copy
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
import torch.distributed.nn.functional as autograd
from torch import nn
from torch.distributed import fsdp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

Tensors = list[torch.Tensor]
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def batches(count: int = 4) -> Tensors:
    torch.manual_seed(10 + RANK)
    return [torch.randn(6, 8) for _ in range(count)]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Tensors) -> None:
    for x in data:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def trained(**options: object) -> Tensors:
    model = DistributedDataParallel(network(), **options)
    train(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), batches())
    return [parameter.detach() for parameter in model.parameters()]


def hooked(state: object, hook: Callable[..., object]) -> Tensors:
    model = DistributedDataParallel(network())
    model.register_comm_hook(state, hook)
    train(model, torch.optim.SGD(model.parameters(), 0.1), batches())
    return [parameter.detach() for parameter in model.parameters()]


def calls() -> Tensors:
    x = torch.arange(6.0) + RANK
    got = [x.clone() for _ in range(4)]
    dist.all_reduce(got[0])
    dist.broadcast(got[1], SIZE - 1)
    dist.reduce(got[2], 0, op=dist.ReduceOp.MAX)
    got[2] = got[2] if RANK == 0 else x
    dist.all_reduce(got[3].view(2, 3).t(), op=dist.ReduceOp.MIN)  # not contiguous
    parts = [torch.empty(6) for _ in range(SIZE)]
    dist.all_gather(parts, x)
    whole, share = torch.empty(6 * SIZE), torch.empty(6)
    dist.all_gather_into_tensor(whole, x)
    dist.reduce_scatter_tensor(share, whole.clone())
    mine = torch.empty(6)
    dist.scatter(mine, [x + i for i in range(SIZE)] if RANK == 1 else None, src=1)
    all_parts = [torch.empty(6) for _ in range(SIZE)] if RANK == 0 else None
    dist.gather(x, all_parts, dst=0)
    summed = torch.empty(6)
    dist.reduce_scatter(summed, [x * (i + 1) for i in range(SIZE)])
    rows = torch.arange(float(RANK + SIZE))
    counts = [1] * (SIZE - 1) + [RANK + 1]
    received = torch.empty(SIZE if RANK < SIZE - 1 else sum(range(1, SIZE + 1)))
    dist.all_to_all_single(received, rows, None if RANK < SIZE - 1 else list(range(1, SIZE + 1)), counts)
    lists = [torch.empty(2) for _ in range(SIZE)]  # gloo needs parts of equal size
    dist.all_to_all(lists, [torch.full((2,), float(RANK + i)) for i in range(SIZE)])
    dtypes = [torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.complex64, torch.bool]
    more = [torch.ones(3).to(dtype) for dtype in dtypes]
    for tensor in more[:5]:
        dist.all_reduce(tensor)
    dist.broadcast(more[5], 0)
    return [*got, *parts, whole, share, mine, *(all_parts or []), summed, received, *lists, *more]


def sparse() -> Tensors:
    x = torch.sparse_coo_tensor([[0, RANK + 1]], [1.0, 2.0], (SIZE + 2,))
    dist.all_reduce(x)
    return [x.to_dense()]


def coalesced() -> Tensors:
    xs = [torch.full((3,), float(RANK + i)) for i in range(3)]
    with dist._coalescing_manager(async_ops=True) as works:
        for x in xs:
            dist.all_reduce(x)
    works.wait()
    outs = [torch.empty(3 * SIZE) for _ in xs]
    with dist._coalescing_manager():
        for out, x in zip(outs, xs, strict=True):
            dist.all_gather_into_tensor(out, x)
    return [*xs, *outs]


def messages() -> Tensors:
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    out, back = torch.empty(1000), torch.empty(2, 3)
    ops = [dist.P2POp(dist.isend, torch.full((1000,), float(RANK)), right), dist.P2POp(dist.irecv, out, left)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    works = [dist.isend(torch.full((2, 3), float(RANK)), left, tag=3), dist.irecv(back, right, tag=3)]
    for work in works:
        work.wait()
    anyone = torch.zeros(1)
    if RANK == 0:
        senders = {dist.recv(anyone) for _ in range(SIZE - 1)}
        assert senders == set(range(1, SIZE))
    else:
        dist.send(torch.ones(1), 0)
    return [out, back]


def objects() -> Tensors:
    everything = [None] * SIZE
    dist.all_gather_object(everything, {"rank": RANK})
    said = [{"from": 1}] if RANK == 1 else [None]
    dist.broadcast_object_list(said, src=1)
    got = [None]
    dist.scatter_object_list(got, [[i] for i in range(SIZE)] if RANK == 0 else None, src=0)
    assert (everything[-1], said, got) == ({"rank": SIZE - 1}, [{"from": 1}], [[RANK]])
    return []


def groups() -> Tensors:
    pairs = [dist.new_group([i, i + 1]) for i in range(0, SIZE, 2)]
    x = torch.full((2,), float(RANK))
    dist.all_reduce(x, group=pairs[RANK // 2])
    mesh = init_device_mesh("cpu", (SIZE // 2, 2), mesh_dim_names=("a", "b"))
    y = torch.full((2,), float(RANK))
    dist.all_reduce(y, group=mesh.get_group("b"))
    dist.destroy_process_group(pairs[RANK // 2])
    return [x, y]


def functional_calls() -> Tensors:
    x = torch.arange(4.0, requires_grad=True)
    group = dist.group.WORLD
    y = functional.all_reduce(x * (RANK + 1), "sum", group)
    z = functional.all_gather_tensor(y, 0, group)
    w = functional.reduce_scatter_tensor(z, "sum", 0, group)
    v = functional.all_to_all_single(z, [4] * SIZE, [4] * SIZE, group)
    return [functional.wait_tensor(one).detach() for one in (y, z, w, v)]


def differentiated(call: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    """Return the value of a call, and the gradient with respect to its argument."""
    x = torch.arange(2.0 * SIZE).add(RANK).requires_grad_()
    value = call(x * 3)
    weights = torch.arange(float(value.numel())).add(RANK + 1).view(value.shape)
    (value * weights).sum().backward()
    return [value.detach(), x.grad]


def differentiable() -> Tensors:
    def parts() -> Tensors:
        return [torch.empty(2) for _ in range(SIZE)]

    root = SIZE - 1
    results = [
        differentiated(lambda x: autograd.all_reduce(x)),
        differentiated(lambda x: autograd.broadcast(x, root)),
        differentiated(lambda x: torch.cat(autograd.all_gather(x))),
        differentiated(lambda x: autograd.reduce_scatter(torch.empty(2), list(x.chunk(SIZE)))),
        differentiated(lambda x: torch.cat(autograd.all_to_all(parts(), list(x.chunk(SIZE))))),
        differentiated(lambda x: autograd.all_to_all_single(torch.empty(2 * SIZE), x)),
        differentiated(lambda x: torch.cat(autograd.gather(x, root))),
        differentiated(lambda x: autograd.scatter(list(x.chunk(SIZE)), root)),
        differentiated(lambda x: autograd.reduce(x, root) if root == RANK else autograd.reduce(x, root) * 0),
    ]
    group = dist.group.WORLD
    results += [
        differentiated(lambda x: functional.all_reduce(x, "sum", group)),
        differentiated(lambda x: functional.all_gather_single_autograd(x, 0, group)),
        differentiated(lambda x: functional.reduce_scatter_single_autograd(x, "sum", 0, group)),
        differentiated(lambda x: functional.all_to_all_single_autograd(x, [2] * SIZE, [2] * SIZE, group)),
        differentiated(lambda x: torch.cat(functional.all_reduce_coalesced([x, x * 2], "sum", group))),
        differentiated(lambda x: torch.cat(functional.all_gather_single_coalesced([x, x * 2], group))),
    ]
    return [tensor for result in results for tensor in result]


def compiled(backend: str) -> Tensors:
    group = dist.group.WORLD

    def step(x: torch.Tensor) -> torch.Tensor:
        y = functional.all_reduce(x * 2, "sum", group) + 1
        z = functional.all_gather_single_autograd(y, 0, group)
        w = functional.reduce_scatter_single_autograd(z * z, "sum", 0, group)
        return functional.all_to_all_single_autograd(w, [2] * SIZE, [2] * SIZE, group) * x

    def inplace(x: torch.Tensor) -> torch.Tensor:
        y, out = x * 2, x.new_empty(SIZE * x.numel())
        dist.all_reduce(y)
        dist.all_gather_single(out, y)
        return out + 1

    x = torch.arange(2.0 * SIZE) + RANK
    return [
        *differentiated(torch.compile(step, backend=backend, fullgraph=True)),
        torch.compile(inplace, backend=backend, fullgraph=True)(x),
    ]


def ddp_compiled(backend: str) -> Tensors:
    model = DistributedDataParallel(network())
    train(torch.compile(model, backend=backend), torch.optim.SGD(model.parameters(), 0.1), batches())
    return [parameter.detach() for parameter in model.parameters()]


def ddp_join() -> Tensors:
    model = DistributedDataParallel(network())
    with Join([model]):
        train(model, torch.optim.SGD(model.parameters(), 0.1), batches(3 + RANK % 2))
    return [parameter.detach() for parameter in model.parameters()]


class Branches(nn.Module):
    """A network that uses one of its two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layers[self.calls % 2](x)


def ddp_join_unused() -> Tensors:
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    with Join([model]):
        train(model, torch.optim.SGD(model.parameters(), 0.1), batches(3 + RANK % 2))
    return [parameter.detach() for parameter in model.parameters()]


def zero() -> Tensors:
    model = DistributedDataParallel(network())
    train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01), batches())
    return [parameter.detach() for parameter in model.parameters()]


def fsdp1() -> Tensors:
    model = fsdp.FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
    train(model, torch.optim.Adam(model.parameters(), 0.01), batches())
    with fsdp.FullyShardedDataParallel.summon_full_params(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


def sharded(mesh_shape: tuple[int, ...], from_group: bool = False) -> Tensors:
    model = network()
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicas", "shards")[-len(mesh_shape) :])
    for layer in model:
        if isinstance(layer, nn.Linear):
            fsdp.fully_shard(layer, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    for layer in model.modules():
        if isinstance(layer, fsdp.FSDPModule):
            layer.set_allocate_memory_from_process_group_for_comm(from_group)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for x in batches():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


def dtensors() -> Tensors:
    mesh = init_device_mesh("cpu", (SIZE,))
    torch.manual_seed(3)
    x = distribute_tensor(torch.randn(2 * SIZE + 1, 3), mesh, [Shard(0)])  # uneven
    y = distribute_tensor(torch.randn(3, 4), mesh, [Replicate()])
    partial = DTensor.from_local(torch.full((4,), float(RANK)), mesh, [Partial()])
    return [
        (x @ y).full_tensor(),
        x.redistribute(mesh, [Replicate()]).to_local(),
        x.redistribute(mesh, [Shard(1)]).full_tensor(),
        partial.full_tensor(),
    ]


def tensor_parallel() -> Tensors:
    mesh = init_device_mesh("cpu", (SIZE,))
    model = parallelize_module(network(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(5)
    train(model, optimizer, [torch.randn(6, 8) for _ in range(3)])
    return [p.full_tensor().detach() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def pipeline() -> Tensors:
    layers = list(network())
    cuts = [len(layers) * i // SIZE for i in range(SIZE + 1)]
    part = nn.Sequential(*layers[cuts[RANK] : cuts[RANK + 1]])
    stage = PipelineStage(part, RANK, SIZE, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, target: (out - target).square().mean())
    torch.manual_seed(6)
    x, target = torch.randn(4, 8), torch.randn(4, 4)
    losses: Tensors = []
    if RANK == 0:
        schedule.step(x)
    elif RANK == SIZE - 1:
        schedule.step(target=target, losses=losses)
    else:
        schedule.step()
    return [*losses, *(parameter.grad for parameter in part.parameters())]


def checkpoints() -> Tensors:
    folder = [tempfile.mkdtemp()] if RANK == 0 else [None]
    dist.broadcast_object_list(folder)
    model = network()
    mesh = init_device_mesh("cpu", (SIZE,))
    fsdp.fully_shard(model, mesh=mesh)
    state = model.state_dict()
    dcp.save(state, checkpoint_id=folder[0])
    kept = copy.deepcopy(state)
    for value in state.values():
        value.to_local().zero_()
    dcp.load(state, checkpoint_id=folder[0])
    assert all(torch.equal(state[name].to_local(), kept[name].to_local()) for name in state)
    return [value.full_tensor().detach() for value in state.values()]


def full_states() -> Tensors:
    """Rank 0 gets the whole state of a sharded model, and sends the other ranks their parts of another one."""
    trained, loaded = (fsdp.fully_shard(network(), mesh=init_device_mesh("cpu", (SIZE,))) for _ in range(2))
    train(trained, torch.optim.SGD(trained.parameters(), 0.1), batches())
    state = get_model_state_dict(trained, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert RANK == 0 or not state
    set_model_state_dict(loaded, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    whole = [[parameter.full_tensor().detach() for parameter in model.parameters()] for model in (trained, loaded)]
    assert all(map(torch.equal, *whole))
    return whole[1]


CASES: dict[str, Callable[[], Tensors]] = {
    "calls": calls,
    "sparse": sparse,
    "coalesced": coalesced,
    "messages": messages,
    "objects": objects,
    "groups": groups,
    "functional": functional_calls,
    "autograd": differentiable,
    "compiled eager": lambda: compiled("eager"),
    "compiled aot_eager": lambda: compiled("aot_eager"),
    "compiled inductor": lambda: compiled("inductor"),
    "ddp": trained,
    "ddp views": lambda: trained(gradient_as_bucket_view=True, static_graph=True),
    "ddp unused": lambda: trained(find_unused_parameters=True, bucket_cap_mb=0.001),
    "ddp fp16 hook": lambda: hooked(None, default_hooks.fp16_compress_hook),
    "ddp allreduce hook": lambda: hooked(dist.group.WORLD, default_hooks.allreduce_hook),
    "ddp PowerSGD": lambda: hooked(
        powerSGD_hook.PowerSGDState(dist.group.WORLD, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook
    ),
    "ddp compiled aot_eager": lambda: ddp_compiled("aot_eager"),
    "ddp compiled inductor": lambda: ddp_compiled("inductor"),
    "ddp join": ddp_join,
    "ddp join, unused parameters": ddp_join_unused,
    "zero": zero,
    "fsdp1": fsdp1,
    "fsdp2": lambda: sharded((SIZE,)),
    "fsdp2, memory of the group": lambda: sharded((SIZE,), from_group=True),
    "hsdp": lambda: sharded((SIZE // 2, 2)),
    "dtensor": dtensors,
    "tensor parallel": tensor_parallel,
    "pipeline": pipeline,
    "checkpoints": checkpoints,
    "full states": full_states,
}


def main() -> None:
    backend, path, *names = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    got = {}
    for name in names or CASES:
        got[name] = [tensor.clone() for tensor in CASES[name]()]
        print(name, flush=True)
    torch.save(got, Path(f"{path}.{RANK}"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
