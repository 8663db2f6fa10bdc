"""Models such as users bring: they know nothing of gradus. The planner is measured on them as on its own."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class UNet(nn.Module):
    """The noise predictor of a diffusion model: skip connections, group norms, attention where images are small.

    It is called with images and their classes, adds the noise itself and returns the loss.
    """

    def __init__(self, width: int = 128, levels: int = 4, blocks: int = 2, heads: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, 4 * width))
        self.label = nn.Embedding(classes, 4 * width)
        self.first = nn.Conv2d(3, width, 3, padding=1)
        widths = [width * min(2**level, 4) for level in range(levels)]
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        here, skips = width, [width]
        for level, wide in enumerate(widths):
            attends = level >= levels - 2
            for _ in range(blocks):
                self.down.append(ResidualBlock(here, wide, 4 * width, heads if attends else 0))
                here = wide
                skips.append(here)
            if level < levels - 1:
                self.down.append(nn.Conv2d(here, here, 3, stride=2, padding=1))
                skips.append(here)
        self.middle = ResidualBlock(here, here, 4 * width, heads)
        for level, wide in reversed(list(enumerate(widths))):
            attends = level >= levels - 2
            for _ in range(blocks + 1):
                self.up.append(ResidualBlock(here + skips.pop(), wide, 4 * width, heads if attends else 0))
                here = wide
            if level > 0:
                self.up.append(Larger(here))
        self.last = nn.Sequential(nn.GroupNorm(32, here), nn.SiLU(), nn.Conv2d(here, 3, 3, padding=1))
        self.width = width

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        noise = torch.randn_like(images)
        time = torch.rand(len(images), device=images.device)
        signal = torch.cos(time * math.pi / 2)[:, None, None, None]
        noisy = signal * images + (1 - signal**2).sqrt() * noise
        frequencies = torch.exp(
            -math.log(10_000) * torch.arange(self.width // 2, device=images.device) * 2 / self.width
        )
        angles = 1000 * time[:, None] * frequencies
        condition = self.time(torch.cat([angles.sin(), angles.cos()], dim=1)) + self.label(labels)
        x = self.first(noisy)
        skips = [x]
        for layer in self.down:
            x = layer(x, condition) if isinstance(layer, ResidualBlock) else layer(x)
            skips.append(x)
        x = self.middle(x, condition)
        for layer in self.up:
            x = layer(torch.cat([x, skips.pop()], dim=1), condition) if isinstance(layer, ResidualBlock) else layer(x)
        return F.mse_loss(self.last(x).float(), noise)


class ResidualBlock(nn.Module):
    """Two convolutions, with time and class added in between, and attention over all positions if it has heads."""

    def __init__(self, inputs: int, outputs: int, condition: int, heads: int) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.GroupNorm(32, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1))
        self.condition = nn.Linear(condition, outputs)
        self.after = nn.Sequential(nn.GroupNorm(32, outputs), nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1))
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        self.heads = heads
        if heads:
            self.norm = nn.GroupNorm(32, outputs)
            self.queries_keys_values = nn.Conv2d(outputs, 3 * outputs, 1)
            self.out = nn.Conv2d(outputs, outputs, 1)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        y = self.before(x) + self.condition(F.silu(condition))[:, :, None, None]
        x = self.shortcut(x) + self.after(y)
        if not self.heads:
            return x
        batch, channels, height, width = x.shape
        packed = self.queries_keys_values(self.norm(x))
        q, k, v = packed.reshape(batch, 3, self.heads, channels // self.heads, height * width).transpose(3, 4).unbind(1)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(2, 3).reshape(batch, channels, height, width)
        return x + self.out(mixed)


class Larger(nn.Module):
    """Twice the height and the width."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(F.interpolate(x, scale_factor=2.0, mode="nearest"))  # type: ignore[no-any-return]


class LSTMLanguageModel(nn.Module):
    """Next-token prediction with a recurrent net; it returns the loss."""

    def __init__(self, vocabulary: int = 10_000, width: int = 1024, layers: int = 2, dropout: float = 0.2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=dropout)
        self.output = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        return F.cross_entropy(self.output(hidden).flatten(0, 1), targets.flatten())


class EncoderClassifier(nn.Module):
    """torch's own TransformerEncoder over tokens, averaged, with one of a few classes as its answer."""

    def __init__(
        self,
        vocabulary: int = 20_000,
        width: int = 768,
        layers: int = 8,
        heads: int = 12,
        context: int = 256,
        classes: int = 100,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(context, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.output = nn.Linear(width, classes)
        self.classes = classes

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.encoder(self.embedding(tokens) + self.positions)
        return F.cross_entropy(self.output(hidden.mean(dim=1)), targets[:, -1] % self.classes)


class Mixer(nn.Module):
    """MLP-Mixer: perceptrons over patches and over channels by turns."""

    def __init__(
        self, image: int = 224, patch: int = 16, width: int = 768, layers: int = 12, classes: int = 1000
    ) -> None:
        super().__init__()
        patches = (image // patch) ** 2
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.blocks = nn.ModuleList(MixerBlock(patches, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x).mean(dim=1))  # type: ignore[no-any-return]


class MixerBlock(nn.Module):
    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.token_norm, self.channel_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(patches, width // 2), nn.GELU(), nn.Linear(width // 2, patches))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.token_norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.channel_norm(x))  # type: ignore[no-any-return]


class Perceptron(nn.Module):
    """Wide Linear layers and nothing else."""

    def __init__(self, inputs: int = 3072, width: int = 8192, layers: int = 6, classes: int = 10) -> None:
        super().__init__()
        widths = [inputs] + [width] * layers
        hidden = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(widths)]
        self.layers = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, classes))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)  # type: ignore[no-any-return]
