"""Trains ResNet-50 on CIFAR-10, data parallel: mpirun -n 8 pytest -s -v ./resnet50_distributed_training_gpu.py

The tutorial calls init("nccl"), which needs a GPU for each rank. In this script, init() uses the GPUs if every rank
has a GPU. Otherwise all ranks use the CPU.
"""

import torch
from parts import EPOCH_SIZE, create_dataset, data_path, share_cpus
from resnet import resnet50

from mscomm import LossMonitor, Model, ParallelMode, get_backend, init, set_auto_parallel_context

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
    model.train(epoch_size, dataset, callbacks=[loss_cb], dataset_sink_mode=True)
