"""ResNet-50 in data-parallel mode, with gradient accumulation: bash run_grad_accu.sh DATA_PATH

The tutorials name this script, cell_wrapper.py and model_accu.py, but do not show them. Each step takes MINI_STEPS
batches (default 4). The dataset and the loss are those of resnet50_distributed_training_gpu.py.
"""

import os

import mscomm as ms
from mscomm.nn import Momentum
from model_accu import Model_ACCU
from resnet import resnet50
from resnet50_distributed_training_gpu import SoftmaxCrossEntropyExpand, create_dataset


def test_train_cifar(epoch_size=int(os.getenv("EPOCH_SIZE", "10"))):
    ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True)
    dataset = create_dataset(os.environ["DATA_PATH"])
    net = resnet50(32, 10)
    loss = SoftmaxCrossEntropyExpand(sparse=True)
    opt = Momentum(filter(lambda x: x.requires_grad, net.get_parameters()), 0.01, 0.9)
    model = Model_ACCU(net, loss, opt)
    model.train(int(os.getenv("MINI_STEPS", "4")), epoch_size, dataset)
