"""A small convolutional network for 32x32 images, such as CIFAR-10."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradus.models.flops import counted_training_flops
from gradus.models.initialise import BareLayers, reset_layers
from gradus.models.output import LossOutput, classification_loss
from gradus.models.settings import SimpleCNNSettings


def stage(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


class SimpleCNN(nn.Module):
    def __init__(self, settings: SimpleCNNSettings) -> None:
        super().__init__()
        self.settings = settings
        with BareLayers():
            self.features = nn.Sequential(stage(settings.channels, 64), stage(64, 128), stage(128, 256))
            self.classifier = nn.Sequential(
                nn.Flatten(),
                nn.Linear(256 * 4 * 4, 512),
                nn.ReLU(),
                nn.Dropout(settings.dropout),
                nn.Linear(512, settings.classes),
            )
        self.init_weights()

    def init_weights(self, drawn_on: torch.device | None = None) -> None:
        reset_layers(self, drawn_on)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor | LossOutput:
        logits: Tensor = self.classifier(self.features(images))
        return logits if labels is None else classification_loss(logits, labels, self.training)

    def flops_per_sample(self) -> float:
        with torch.device("meta"):
            return counted_training_flops(SimpleCNN(self.settings), (self.settings.channels, 32, 32))
