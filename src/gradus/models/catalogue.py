"""The reference models and the presets of well-known sizes, by name. Importing it does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from gradus.models.huggingface_settings import HuggingFaceSettings
from gradus.models.settings import (
    BERTSettings,
    GPTSettings,
    MnistCNNSettings,
    ResNetSettings,
    Settings,
    SimpleCNNSettings,
    ViTSettings,
)
from gradus.schema.errors import unknown_name

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Reference:
    """A model that gradus brings along: where its class is, and what it is built from."""

    name: str
    module: str
    model: str  # the class in that module, or a function: called with the settings
    sample: Literal["tokens", "image"]
    settings: type[Settings]


@dataclass(frozen=True)
class Entry:
    """One line of the catalogue: a reference model with its default settings, or a preset."""

    name: str
    kind: Literal["reference", "preset"]
    reference: Reference
    settings: Settings

    def describe(self) -> dict[str, object]:
        """The entry as a document. Parameters are counted in the model itself, built without allocating it."""
        import torch

        with torch.device("meta"):
            model = construct(self.reference, self.settings)
        return {
            "name": self.name,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "kind": self.kind,
            "reference": self.reference.name,
            **asdict(self.settings),
        }


REFERENCES = {
    reference.name: reference
    for reference in (
        Reference("simple-cnn", "gradus.models.simple_cnn", "SimpleCNN", "image", SimpleCNNSettings),
        Reference("mnist-cnn", "gradus.models.mnist_cnn", "MnistCNN", "image", MnistCNNSettings),
        Reference("resnet", "gradus.models.resnet", "ResNet", "image", ResNetSettings),
        Reference("vit", "gradus.models.vit", "ViT", "image", ViTSettings),
        Reference("gpt", "gradus.models.gpt", "GPT", "tokens", GPTSettings),
        Reference("bert", "gradus.models.bert", "BERT", "tokens", BERTSettings),
    )
}

# No line of the catalogue: without a folder or a configuration there is nothing to build or to count.
HUGGINGFACE = Reference("huggingface", "gradus.models.huggingface", "build", "tokens", HuggingFaceSettings)

PRESETS: dict[str, tuple[str, Settings]] = {
    "resnet18": ("resnet", ResNetSettings(depth=18)),
    "resnet34": ("resnet", ResNetSettings(depth=34)),
    "resnet50": ("resnet", ResNetSettings(depth=50)),
    "resnet101": ("resnet", ResNetSettings(depth=101)),
    "vit-b16": ("vit", ViTSettings(image=224, patch=16, layers=12, width=768, heads=12, classes=1000)),
    # 50,257 tokens padded to 50,304, a multiple of 128, for which matrix multiplication is faster.
    "gpt2-124m": ("gpt", GPTSettings(layers=12, width=768, heads=12, context=1024, vocabulary=50_304)),
    "gpt-1.3b": ("gpt", GPTSettings(layers=24, width=2048, heads=16, context=2048, vocabulary=50_304)),
    "gpt3-175b": ("gpt", GPTSettings(layers=96, width=12_288, heads=96, context=2048, vocabulary=50_257)),
    "llama-8b": (
        "gpt",
        GPTSettings(
            layers=32,
            width=4096,
            heads=32,
            kv_heads=8,
            context=8192,
            vocabulary=128_256,
            positions="rotary",
            rotary_base=500_000.0,
            norm="rmsnorm",
            activation="swiglu",
            inner=14_336,
            bias=False,
            tied=False,
        ),
    ),
    # Small enough for any machine: 8 experts, of which a token uses 2, and one for all.
    "gpt-moe": (
        "gpt",
        GPTSettings(
            positions="rotary",
            norm="rmsnorm",
            activation="swiglu",
            bias=False,
            experts=8,
            experts_per_token=2,
            shared_experts=1,
            expert_inner=128,
            dense_layers=1,
            balance="loss",
        ),
    ),
    # Its 4,096 tokens of pre-training. Without the module that predicts a second token, and without the rule that a
    # token's experts lie on at most 4 of 8 groups of nodes.
    "deepseek-v3": (
        "gpt",
        GPTSettings(
            layers=61,
            width=7168,
            heads=128,
            context=4096,
            vocabulary=129_280,
            positions="rotary",
            norm="rmsnorm",
            norm_eps=1e-6,
            activation="swiglu",
            inner=18_432,
            bias=False,
            tied=False,
            attention="latent",
            query_rank=1536,
            kv_rank=512,
            plain_width=128,
            rotary_width=64,
            value_width=128,
            experts=256,
            experts_per_token=8,
            shared_experts=1,
            expert_inner=2048,
            expert_scale=2.5,
            dense_layers=3,
            router="sigmoid",
            balance="bias",
        ),
    ),
    # RoBERTa's tables: 514 rows for 512 positions, one token type, and a pooling layer that is in its parameter count.
    "bert-2.5b": (
        "bert",
        BERTSettings(
            layers=192,
            width=1024,
            heads=16,
            inner=4096,
            context=512,
            position_offset=2,
            vocabulary=50_265,
            pooler=True,
        ),
    ),
}


def entries() -> list[Entry]:
    """All that `gradus models` lists: reference models first, then presets."""
    references = [Entry(name, "reference", reference, reference.settings()) for name, reference in REFERENCES.items()]
    presets = [Entry(name, "preset", REFERENCES[of], settings) for name, (of, settings) in PRESETS.items()]
    return references + presets


def resolve(use: str, options: Mapping[str, object]) -> tuple[Reference, Settings]:
    """The reference model that `use` names and its settings, where `options` go before those of a preset."""
    known = {entry.name: entry for entry in entries()}
    if use == HUGGINGFACE.name:
        _check_keys(options, HuggingFaceSettings)
        pretrained = HuggingFaceSettings(**options)  # type: ignore[arg-type]
        of_images = pretrained.task == "image-classification"
        return replace(HUGGINGFACE, sample="image" if of_images else "tokens"), pretrained
    if use not in known:
        hint = "name one of these models, or your own: file.py:build or package.module:build"
        raise unknown_name("model", use, [*known, HUGGINGFACE.name], field="model.use", hint=hint)
    reference, settings = known[use].reference, known[use].settings
    _check_keys(options, type(settings))
    return reference, replace(settings, **options)


def _check_keys(options: Mapping[str, object], settings: type[Settings]) -> None:
    allowed = [setting.name for setting in fields(settings)]
    for key in options:
        if key not in allowed:
            raise unknown_name("key", str(key), allowed, field=f"model.{key}")


def build(use: str, options: Mapping[str, object]) -> nn.Module:
    """The model itself, on the ambient device (`with torch.device("meta")`) and in the default dtype."""
    return construct(*resolve(use, options))


def construct(reference: Reference, settings: Settings) -> nn.Module:
    model: nn.Module = getattr(import_module(reference.module), reference.model)(settings)
    return model
