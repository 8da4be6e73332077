"""ResNet-50 (He et al., Deep Residual Learning for Image Recognition, 2015) as cells of mscomm.nn.

Each stage after the first one begins with a block whose 3x3 convolution has a stride of 2. The input is (batch, 3,
height, width) with at least 32 x 32 pixels. The network reduces height and width by a factor of 32, and then takes the
mean over the remaining pixels.
"""

import mscomm.nn as nn
import mscomm.ops as ops


def conv_norm(in_channels, out_channels, kernel_size, stride=1):
    """Return a convolution and its normalization."""
    return nn.SequentialCell(nn.Conv2d(in_channels, out_channels, kernel_size, stride), nn.BatchNorm2d(out_channels))


class Bottleneck(nn.Cell):
    """Three convolutions, whose result is added to the input."""

    expansion = 4

    def __init__(self, in_channels, channels, stride):
        super().__init__()
        out_channels = channels * self.expansion
        self.first = conv_norm(in_channels, channels, 1)
        self.second = conv_norm(channels, channels, 3, stride)
        self.third = conv_norm(channels, out_channels, 1)
        self.shortcut = None
        if stride != 1 or in_channels != out_channels:
            self.shortcut = conv_norm(in_channels, out_channels, 1, stride)
        self.relu = nn.ReLU()
        self.add = ops.Add()

    def construct(self, x):
        out = self.relu(self.first(x))
        out = self.relu(self.second(out))
        out = self.third(out)
        return self.relu(self.add(out, x if self.shortcut is None else self.shortcut(x)))


class ResNet(nn.Cell):
    """blocks: the number of bottlenecks in each stage."""

    def __init__(self, blocks, num_classes):
        super().__init__()
        self.stem = nn.SequentialCell(conv_norm(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, "same"))
        in_channels, stages = 64, []
        for stage, number in enumerate(blocks):
            channels = 64 * 2**stage
            for block in range(number):
                stages.append(Bottleneck(in_channels, channels, 2 if stage > 0 and block == 0 else 1))
                in_channels = channels * Bottleneck.expansion
        self.stages = nn.SequentialCell(stages)
        self.mean = ops.ReduceMean(keep_dims=False)
        self.dense = nn.Dense(in_channels, num_classes)

    def construct(self, x):
        out = self.stages(self.stem(x))
        return self.dense(self.mean(out, (2, 3)))


def resnet50(batch_size, num_classes):
    """Return ResNet-50. batch_size is not used: the network accepts batches of every size."""
    return ResNet((3, 4, 6, 3), num_classes)
