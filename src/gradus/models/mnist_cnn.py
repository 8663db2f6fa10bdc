"""The network of PyTorch's MNIST example: 28x28 images in one channel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradus.models.flops import counted_training_flops
from gradus.models.initialise import BareLayers, reset_layers
from gradus.models.output import LossOutput, classification_loss
from gradus.models.settings import MnistCNNSettings


class MnistCNN(nn.Module):
    def __init__(self, settings: MnistCNNSettings) -> None:
        super().__init__()
        self.settings = settings
        with BareLayers():
            self.features = nn.Sequential(
                nn.Conv2d(1, 32, kernel_size=3),
                nn.ReLU(),
                nn.Conv2d(32, 64, kernel_size=3),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Dropout(settings.feature_dropout),
            )
            self.classifier = nn.Sequential(
                nn.Flatten(),
                nn.Linear(64 * 12 * 12, 128),
                nn.ReLU(),
                nn.Dropout(settings.dropout),
                nn.Linear(128, settings.classes),
            )
        self.init_weights()

    def init_weights(self, drawn_on: torch.device | None = None) -> None:
        reset_layers(self, drawn_on)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor | LossOutput:
        logits: Tensor = self.classifier(self.features(images))
        return logits if labels is None else classification_loss(logits, labels, self.training)

    def flops_per_sample(self) -> float:
        with torch.device("meta"):
            return counted_training_flops(MnistCNN(self.settings), (1, 28, 28))
