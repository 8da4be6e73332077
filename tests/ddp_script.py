"""A training script for PyTorch's DistributedDataParallel. test_ddp.py runs the script twice: unchanged, and with two
lines changed so that it uses mscomm.
"""

import os
import sys

import torch

torch.distributed.init_process_group("gloo")
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402

rank, size, folder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[1]
torch.set_num_threads(1)
torch.manual_seed(rank)  # different weights on each rank; DDP replaces them with rank 0's weights
layers = [torch.nn.Conv2d(3, 8, 3, 2), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten()]
model = DDP(torch.nn.Sequential(*layers, torch.nn.Linear(392, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def train(epoch, batches):
    for step in range(batches):
        data = torch.Generator().manual_seed(1000 * epoch + 10 * step + rank)
        images, labels = torch.randn(16, 3, 16, 16, generator=data), torch.randint(0, 10, (16,), generator=data)
        optimizer.zero_grad()
        for part in range(2):  # each optimizer step adds up the gradients of two half batches
            with model.no_sync() if part == 0 else torch.enable_grad():
                with torch.autocast("cpu", torch.bfloat16):
                    loss = torch.nn.functional.cross_entropy(model(images[part::2]), labels[part::2])
                (loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    scheduler.step()


for epoch in range(4):
    train(epoch, batches=3)
    # Rank 0 begins epoch 3 only after it has written the file, and the other ranks wait for rank 0 in epoch 3. So the
    # file is complete when they load it after epoch 3.
    if rank == 0 and epoch == 2:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/checkpoint.pt")
saved = torch.load(f"{folder}/checkpoint.pt")
model.load_state_dict(saved["model"])
optimizer.load_state_dict(saved["optimizer"])
with model.join():
    train(epoch=4, batches=3 + size - rank)  # rank 0 has the most batches
torch.save(model.module.state_dict(), f"{folder}/rank_{rank}.pt")
