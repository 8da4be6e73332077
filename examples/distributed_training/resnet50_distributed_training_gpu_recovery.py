"""Trains ResNet-50 on CIFAR-10, data parallel. A process that was lost can be started again, and training goes on.

`bash run_gpu_cluster_recovery.sh DATA_PATH` starts this script in a scheduler and the workers. Each rank saves a
checkpoint every CHECKPOINT_STEPS steps (default 100). After a loss, all ranks go on from the newest checkpoint that
every rank has. As in resnet50_distributed_training_gpu.py, the ranks use GPUs if every rank has one.
"""

import os

import torch
from parts import EPOCH_SIZE, create_dataset, data_path, share_cpus
from resnet import resnet50

from mscomm import (
    CheckpointConfig,
    LossMonitor,
    Model,
    ModelCheckpoint,
    ParallelMode,
    get_backend,
    get_rank,
    init,
    set_auto_parallel_context,
)

init()
share_cpus()


def test_train_cifar(epoch_size=EPOCH_SIZE):
    set_auto_parallel_context(parallel_mode=ParallelMode.DATA_PARALLEL, gradients_mean=True)
    torch.manual_seed(1)  # every rank begins with the same weights
    loss_cb = LossMonitor()
    dataset = create_dataset(data_path())
    num_classes = 10
    net = resnet50(num_classes)
    if get_backend() == "nccl":
        net.cuda()  # init() made the rank's GPU the current device; Model copies the images to this GPU
    loss = torch.nn.CrossEntropyLoss()
    opt = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
    model = Model(net, loss_fn=loss, optimizer=opt)

    # Each rank has its own directory, so the names of the files need not differ.
    ckptconfig = CheckpointConfig(
        save_checkpoint_steps=int(os.getenv("CHECKPOINT_STEPS", "100")), keep_checkpoint_max=5
    )
    ckpoint_cb = ModelCheckpoint(prefix="train", directory="./ckpt_of_rank_/" + str(get_rank()), config=ckptconfig)
    model.train(epoch_size, dataset, callbacks=[loss_cb, ckpoint_cb], dataset_sink_mode=True)
