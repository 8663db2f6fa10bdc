"""ResNet 18, 34, 50 and 101 (v1.5: a bottleneck strides in its 3x3 convolution)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradus.models.flops import counted_training_flops
from gradus.models.initialise import BareLayers, reset_layers
from gradus.models.output import LossOutput, classification_loss
from gradus.models.settings import ResNetSettings

STAGE_WIDTHS = (64, 128, 256, 512)
BLOCKS_PER_STAGE = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
BOTTLENECK_DEPTHS = (50, 101)
BOTTLENECK_EXPANSION = 4


def conv_norm(channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """A convolution that keeps the image size at stride 1. It has no bias, since the BatchNorm has one."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(channels_out),
    )


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions, or the bottleneck 1x1, 3x3, 1x1, added to a shortcut."""

    def __init__(self, channels_in: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        channels_out = width * BOTTLENECK_EXPANSION if bottleneck else width
        if bottleneck:
            self.branch = nn.Sequential(
                conv_norm(channels_in, width, 1),
                nn.ReLU(inplace=True),
                conv_norm(width, width, 3, stride),
                nn.ReLU(inplace=True),
                conv_norm(width, channels_out, 1),
            )
        else:
            self.branch = nn.Sequential(
                conv_norm(channels_in, width, 3, stride),
                nn.ReLU(inplace=True),
                conv_norm(width, width, 3),
            )
        same_shape = stride == 1 and channels_in == channels_out
        self.shortcut = nn.Identity() if same_shape else conv_norm(channels_in, channels_out, 1, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.relu(self.branch(x) + self.shortcut(x))
        return y


class ResNet(nn.Module):
    def __init__(self, settings: ResNetSettings) -> None:
        super().__init__()
        self.settings = settings
        with BareLayers():
            if settings.small_input:
                self.stem = nn.Sequential(conv_norm(settings.channels, 64, 3), nn.ReLU(inplace=True))
            else:
                self.stem = nn.Sequential(
                    conv_norm(settings.channels, 64, 7, stride=2),
                    nn.ReLU(inplace=True),
                    nn.MaxPool2d(3, stride=2, padding=1),
                )
            bottleneck = settings.depth in BOTTLENECK_DEPTHS
            channels = 64
            self.stages = nn.Sequential()
            for index, (width, count) in enumerate(zip(STAGE_WIDTHS, BLOCKS_PER_STAGE[settings.depth], strict=True)):
                stage = nn.Sequential()
                for block in range(count):
                    stride = 2 if block == 0 and index > 0 else 1
                    stage.append(ResidualBlock(channels, width, stride, bottleneck))
                    channels = width * BOTTLENECK_EXPANSION if bottleneck else width
                self.stages.append(stage)
            self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, settings.classes))
        self.init_weights()

    def init_weights(self, drawn_on: torch.device | None = None) -> None:
        reset_layers(self, drawn_on, rectified_convolutions=True)
        for layer in self.modules():
            if isinstance(layer, ResidualBlock) and self.settings.zero_init_residual:
                *_, last_norm = layer.branch.modules()
                assert isinstance(last_norm, nn.BatchNorm2d)
                nn.init.zeros_(last_norm.weight)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor | LossOutput:
        logits: Tensor = self.head(self.stages(self.stem(images)))
        return logits if labels is None else classification_loss(logits, labels, self.training)

    def flops_per_sample(self) -> float:
        side = self.settings.image_side
        with torch.device("meta"):
            return counted_training_flops(ResNet(self.settings), (self.settings.channels, side, side))
