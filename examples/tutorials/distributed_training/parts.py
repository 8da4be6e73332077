"""What the tutorial's sections about checkpoints use without showing it: a dataset and a loss."""

import mscomm.dataset as ds
import mscomm.nn as nn
import mscomm.ops as ops
import numpy as np
from mscomm import get_rank


def CreateData():
    """Return 8 batches of 4 rows: vectors of 32 numbers, and the vectors of 32 numbers that a network should compute."""
    random = np.random.default_rng(get_rank())
    inputs = random.random((32, 32), np.float32)
    labels = np.eye(32, dtype=np.float32)[random.integers(0, 32, 32)]
    return ds.GeneratorDataset(list(zip(inputs, labels)), ["inputs", "label"], shuffle=False).batch(4)


class SoftmaxCrossEntropyExpand(nn.Cell):
    """The loss of resnet50_distributed_training.py, for labels that are vectors."""

    def __init__(self):
        super().__init__()
        self.loss = ops.SoftmaxCrossEntropyWithLogits()
        self.mean = ops.ReduceMean()

    def construct(self, logit, label):
        return self.mean(self.loss(logit, label)[0])
