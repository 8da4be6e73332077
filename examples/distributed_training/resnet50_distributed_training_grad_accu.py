"""Trains ResNet-50 on CIFAR-10, data parallel, with gradient accumulation: bash run_grad_accu.sh DATA_PATH

Each step takes MINI_STEPS batches (default 4).
"""

import os

import torch
from model_accu import Model_ACCU
from parts import EPOCH_SIZE, create_dataset, data_path, share_cpus
from resnet import resnet50

from mscomm import init

init()
share_cpus()


def test_train_cifar(epoch_size=EPOCH_SIZE):
    torch.manual_seed(1)  # every rank begins with the same weights
    dataset = create_dataset(data_path())
    num_classes = 10
    net = resnet50(num_classes)
    loss = torch.nn.CrossEntropyLoss()
    opt = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
    model = Model_ACCU(net, loss_fn=loss, optimizer=opt, mini_steps=int(os.getenv("MINI_STEPS", "4")))
    model.train(epoch_size, dataset)
