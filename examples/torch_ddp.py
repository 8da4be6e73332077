"""Data-parallel training with PyTorch's DistributedDataParallel, on CPUs. Start it with torchrun or with mscomm run:

    mscomm run -n 4 examples/torch_ddp.py
    torchrun --nproc_per_node 4 examples/torch_ddp.py gloo

The argument is the backend of torch.distributed. Nothing else in the script depends on the backend or on the launcher.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def data() -> TensorDataset:
    """Return 512 points of a plane, and whether each of them is in a circle."""
    points = 2 * torch.rand(512, 2, generator=torch.Generator().manual_seed(0)) - 1
    return TensorDataset(points, (points.square().sum(1) < 0.5).long())


def main(backend: str = "mscomm") -> None:
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * size, momentum=0.9)
    loss_fn = nn.CrossEntropyLoss()
    sampler = DistributedSampler(dataset := data())
    loader = DataLoader(dataset, batch_size=64 // size, sampler=sampler)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for points, inside in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(points), inside)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {total.item() / len(loader) / size:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
