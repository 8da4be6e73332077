"""ResNet-50 (He et al., Deep Residual Learning for Image Recognition, 2015) in plain torch.nn.

The stride of a stage lies in its first block's 3x3 convolution, where most frameworks have it today ("v1.5"); the paper
has it in the 1x1 before. The input is (batch, 3, height, width) of 32 x 32 pixels or more: the network makes both
sides 32 times smaller, and its mean over what is left takes any size.
"""

from collections.abc import Callable

from torch import Tensor, nn

Norm = Callable[[int], nn.Module]  # the number of channels -> a layer


class Bottleneck(nn.Module):
    """1x1 to fewer channels, 3x3, 1x1 to 4 times as many; the input is added to what comes out."""

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
    """blocks: how many bottlenecks each stage has; the channels double and the image halves from stage to stage."""

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

        # torch's own start for convolutions lets the signal fade with depth; this one (He et al., 2015) keeps its size.
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        # Each residual begins as 0 (Goyal et al., 2017); else the loss doubles in the first steps on small images.
        for block in self.stages:
            if hasattr(block.residual[-1], "weight"):
                nn.init.zeros_(block.residual[-1].weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)))


def resnet50(num_classes: int = 10, norm: Norm = nn.BatchNorm2d) -> ResNet:
    """The weights follow from torch's seed (torch.manual_seed): the same on every rank that sets the same one."""
    return ResNet((3, 4, 6, 3), num_classes, norm)
