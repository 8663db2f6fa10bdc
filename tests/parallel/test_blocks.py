"""Repeated blocks are found by structure, in reference models, in those of transformers and torch, and in anybody's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from gradus.models import catalogue
from gradus.parallel.blocks import repeated_blocks

TRANSFORMER = {"layers": 3, "width": 16, "heads": 2}


def kinds(model: nn.Module) -> dict[str, int]:
    return dict(Counter(type(block).__name__ for block in repeated_blocks(model)))


@pytest.fixture(autouse=True)
def _without_memory() -> Any:
    with torch.device("meta"):
        yield


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gpt", {**TRANSFORMER, "context": 8}),
        ("gpt", {**TRANSFORMER, "context": 8, "positions": "rotary", "norm": "rmsnorm", "activation": "swiglu"}),
        ("bert", {**TRANSFORMER, "context": 8}),
        ("vit", {**TRANSFORMER, "image": 8}),
    ],
)
def test_the_blocks_of_a_reference_transformer(name: str, settings: dict[str, Any]) -> None:
    model = catalogue.build(name, settings)
    assert repeated_blocks(model) == list(model.blocks)  # type: ignore[arg-type]


@pytest.mark.parametrize(("depth", "blocks"), [(18, 8), (34, 16), (50, 16), (101, 33)])
def test_the_residual_blocks_of_a_resnet_in_all_its_stages(depth: int, blocks: int) -> None:
    assert kinds(catalogue.build(f"resnet{depth}", {})) == {"ResidualBlock": blocks}


def test_the_stages_of_a_plain_convolutional_net() -> None:
    model = catalogue.build("simple-cnn", {})
    assert repeated_blocks(model) == list(model.features)  # type: ignore[arg-type]


def test_a_model_without_repetition_has_no_blocks() -> None:
    assert repeated_blocks(catalogue.build("mnist-cnn", {})) == []


TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 64}
SWIN_STAGES = {"embed_dim": 8, "depths": [2, 2, 6], "num_heads": [1, 2, 4], "image_size": 32, "window_size": 2}
RESNET_STAGES = {"embedding_size": 8, "hidden_sizes": [8, 16, 32, 64], "depths": [2, 2, 2, 2], "layer_type": "basic"}


@pytest.mark.parametrize(
    ("config", "blocks"),
    [
        (transformers.LlamaConfig(**TINY), {"LlamaDecoderLayer": 3}),
        (transformers.LlamaConfig(**TINY | {"num_hidden_layers": 2}), {"LlamaDecoderLayer": 2}),
        (transformers.BertConfig(**TINY), {"BertLayer": 3}),
        (transformers.ViTConfig(**TINY, image_size=8, patch_size=4), {"ViTLayer": 3}),
        (transformers.T5Config(d_model=16, d_ff=32, d_kv=8, num_layers=3, num_heads=2, vocab_size=64), {"T5Block": 6}),
        (transformers.T5Config(d_model=64, d_ff=32, d_kv=8, num_layers=2, num_heads=2, vocab_size=8), {"T5Block": 4}),
        (transformers.SwinConfig(**SWIN_STAGES), {"SwinLayer": 10, "SwinPatchMerging": 2}),
        (transformers.ResNetConfig(**RESNET_STAGES), {"ResNetBasicLayer": 8}),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, dict) else "",
)
def test_the_layers_of_a_transformers_model(config: Any, blocks: dict[str, int]) -> None:
    """T5 keeps them in two stacks, Swin and ResNet in stages of different widths."""
    assert kinds(transformers.AutoModel.from_config(config)) == blocks


def test_the_layers_of_torchs_own_transformers() -> None:
    both = nn.Transformer(16, 2, num_encoder_layers=2, num_decoder_layers=3, dim_feedforward=32)
    assert kinds(both) == {"TransformerEncoderLayer": 2, "TransformerDecoderLayer": 3}
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 2, enable_nested_tensor=False)
    assert kinds(nn.Sequential(nn.Embedding(8, 16), encoder, nn.Linear(16, 8))) == {"TransformerEncoderLayer": 2}


def test_a_layer_without_a_twin_is_no_block_and_neither_are_its_parts() -> None:
    model = nn.Transformer(16, 2, num_encoder_layers=1, num_decoder_layers=3, dim_feedforward=32)
    assert kinds(model) == {"TransformerDecoderLayer": 3}
    assert repeated_blocks(catalogue.build("gpt", {**TRANSFORMER, "layers": 1, "context": 8})) == []


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Named(nn.Module):
    """Blocks that are attributes of the model, in no list."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(4, 8)
        self.block1, self.block2, self.block3 = Residual(8), Residual(8), Residual(8)


class Stage(nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        for number in range(count):
            setattr(self, f"block{number}", Residual(width))


def test_blocks_may_be_plain_attributes() -> None:
    model = Named()
    assert repeated_blocks(model) == [model.block1, model.block2, model.block3]


def test_stages_give_their_blocks_whether_in_lists_or_attributes() -> None:
    assert kinds(nn.ModuleList([Stage(8, 2), Stage(16, 3)])) == {"Residual": 5}


def test_blocks_may_be_in_a_dictionary() -> None:
    assert kinds(nn.ModuleDict({"a": Residual(4), "b": Residual(4), "end": nn.Linear(4, 4)})) == {"Residual": 2}


def test_blocks_without_a_class_are_the_members_of_a_list_that_look_alike() -> None:
    def block(width: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8))

    model = nn.Sequential(nn.Linear(4, 8), block(16), block(32), nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    assert repeated_blocks(model) == [model[1], model[2]]


def test_a_block_that_is_used_twice_is_one_block() -> None:
    shared = Residual(4)
    assert repeated_blocks(nn.Sequential(shared, nn.ReLU(), shared)) == []


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(4, 4),
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(4, 4), nn.ReLU()))),
    ],
)
def test_layers_alone_are_no_blocks(model: nn.Module) -> None:
    assert repeated_blocks(model) == []


def test_no_block_is_inside_another() -> None:
    class Tree(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.weight = nn.Linear(2, 2)
            self.left = Tree(depth - 1) if depth else nn.Identity()
            self.right = Tree(depth - 1) if depth else nn.Identity()

    blocks = repeated_blocks(nn.Sequential(Tree(2), Tree(3)))
    modules = [module for block in blocks for module in block.modules()]
    assert len(modules) == len(set(modules))
