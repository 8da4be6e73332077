"""ResNet-50 (He et al., Deep Residual Learning for Image Recognition, 2015) in plain torch.nn.

Each stage after the first one begins with a block whose 3x3 convolution has a stride of 2, as in most frameworks today
("v1.5"). In the paper, the 1x1 convolution before the 3x3 convolution has this stride. The input is (batch, 3, height,
width) with at least 32 x 32 pixels. The network reduces height and width by a factor of 32, and then takes the mean
over the remaining pixels.
"""

from collections.abc import Callable

from torch import Tensor, nn

Norm = Callable[[int], nn.Module]  # makes a normalization layer for the given number of channels


class Bottleneck(nn.Module):
    """Applies three convolutions: 1x1 and 3x3 with `channels` output channels, and 1x1 with 4 times as many.

    The block adds its input to the output of the last convolution.
    """

    expansion = 4

    def __init__(self, in_channels: int, channels: int, stride: int, norm: Norm) -> None:
        super().__init__()
        out_channels = channels * self.expansion
        self.residual = nn.Sequential(
            nn.Conv2d(in_channels, channels, 1, bias=False),
            norm(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False),
            norm(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, out_channels, 1, bias=False),
            norm(out_channels),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), norm(out_channels)
            )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.residual(x) + self.shortcut(x))


class ResNet(nn.Module):
    """Applies a convolution, stages of bottlenecks and a linear layer. blocks: the number of bottlenecks in each stage.

    From one stage to the next, the number of channels doubles, and the height and width of the image are halved.
    """

    def __init__(self, blocks: tuple[int, ...], num_classes: int, norm: Norm) -> None:
        super().__init__()
        channels = 64
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False),
            norm(channels),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        stages = []
        in_channels = channels
        for stage, number in enumerate(blocks):
            stage_channels = channels << stage
            for block in range(number):
                stride = 2 if stage > 0 and block == 0 else 1
                stages.append(Bottleneck(in_channels, stage_channels, stride, norm))
                in_channels = stage_channels * Bottleneck.expansion
        self.stages = nn.Sequential(*stages)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(in_channels, num_classes))

        # With torch's default weights, the signal becomes smaller in every layer. With these weights (He et al., 2015),
        # the signal keeps its size.
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        # At the beginning, let the convolutions of each block add 0 to the block's input (Goyal et al., 2017).
        # Otherwise, the loss doubles in the first steps on small images.
        for block in self.stages:
            if hasattr(block.residual[-1], "weight"):
                nn.init.zeros_(block.residual[-1].weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)))


def resnet50(num_classes: int = 10, norm: Norm = nn.BatchNorm2d) -> ResNet:
    """Return a new ResNet-50. The weights depend on torch.manual_seed, so set the same seed on every rank."""
    return ResNet((3, 4, 6, 3), num_classes, norm)
