"""What the pool's ranks do with a model whose layers are divided among them, beside the same model undivided."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gradus.models import catalogue
from gradus.models.output import IGNORED
from gradus.parallel.tensor import apply_tensor, part_of_sequence
from gradus.parallel.world import World
from gradus.schema.plan import Mesh, Plan
from gradus.training.gradients import settle_gradients

BATCH, CONTEXT, VOCABULARY = 2, 8, 13  # which no number of ranks divides
GPT = {"layers": 2, "width": 16, "heads": 4, "context": CONTEXT, "vocabulary": VOCABULARY}
LLAMA = {**GPT, "positions": "rotary", "norm": "rmsnorm", "activation": "swiglu", "inner": 24, "bias": False}
REFERENCES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("gpt", GPT),
    "gpt with grouped queries, untied, rotary": ("gpt", {**LLAMA, "heads": 8, "kv_heads": 4, "tied": False}),
    "bert": ("bert", {**GPT, "type_vocabulary": 2, "position_offset": 2}),
    "gpt of few words": ("gpt", {**GPT, "vocabulary": 3}),
    "vit": ("vit", {"layers": 2, "width": 16, "heads": 4, "image": 8, "patch": 4, "classes": 5}),
}


class Heads(nn.Module):
    """A user's attention, which counts its heads from what it gets."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.head_width = width // heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y: Tensor = self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return y


class Block(Heads):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + super().forward(self.norm(x))
        y: Tensor = x + self.down(F.relu(self.up(x)))
        return y


class UserModel(nn.Module):
    """With an output that may be tied to the embedding, and a frozen scale that nobody divides."""

    def __init__(self, width: int = 16, heads: int = 4, vocabulary: int = VOCABULARY, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(width), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(width))
        self.out = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.out(x * self.scale + self.bias)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class SlicedModel(nn.Module):
    """Between its layers nothing looks at other tokens, nor has parameters that no layer holds."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width, padding_idx=1)
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width)
        self.attention = Heads(width, heads)
        self.head = nn.Sequential(nn.Linear(width, VOCABULARY))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.mix(self.norm(self.embed(tokens)))
        logits = self.head(x + self.attention(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


USER_PLAN = {
    "layers.*.[qkv]": "colwise",
    "layers.*.o": "rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "layers.*.norm": "replicate",
    "embed": "rowwise",
    "out": "colwise_gather",
}
OTHER_PLAN = {"embed": "colwise_gather", "layers.*.down": "rowwise_split", "out": "colwise_gather"}
SLICED_PLAN = {
    "embed": "rowwise_scatter",
    "norm": "sequence",
    "mix": "sequence",
    "attention": "gather",
    "attention.[qkv]": "colwise",
    "attention.o": "rowwise_scatter",
    "head": "gather",
    "head.0": "colwise_gather",
}


def hugging_face(kind: str = "llama", **changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    settings = {**sizes, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4, "use_cache": False}
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**{**settings, **changes}))
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes}))


def batch_for(case: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    if case == "vit":
        images = torch.randn(BATCH, 3, 8, 8, generator=generator, dtype=torch.float64)
        return {"images": images, "labels": torch.tensor([4, 0])}
    tokens = torch.randint(0, VOCABULARY, (BATCH, CONTEXT), generator=generator)
    targets = torch.randint(0, VOCABULARY, (BATCH, CONTEXT), generator=generator)
    if case == "gpt of few words":
        tokens, targets = tokens % 3, targets % 3
    targets[0, 2:5] = IGNORED
    if case in ("llama", "llama tied", "qwen3"):
        return {"input_ids": tokens, "labels": targets}
    if case == "bert":
        return {"tokens": tokens, "targets": targets, "token_types": (tokens > 6).long()}
    return {"tokens": tokens, "targets": targets}


def built(case: str) -> nn.Module:
    torch.manual_seed(5)
    if case in REFERENCES:
        use, options = REFERENCES[case]
        model = catalogue.build(use, options)
    elif case in ("user", "user untied"):
        model = UserModel(tied=case == "user")
    elif case == "user in slices":
        model = SlicedModel()
    else:
        model = hugging_face(case.split()[0], tie_word_embeddings=case.endswith("tied"))
    model = model.double()
    for parameter in model.parameters():  # none at its starting value, biases included
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return model


def loss_of(output: Any) -> Tensor:
    """Of a reference model the sum, of others the mean."""
    for name in ("loss_sum", "loss"):
        if hasattr(output, name):
            output = getattr(output, name)
            break
    assert isinstance(output, Tensor)
    return output


def compared(
    world: World, case: str, tensor: int, in_slices: bool, tensor_plan: Mapping[str, str] | None = None
) -> dict[str, float]:
    """By how much loss, gradients and right answers differ from those of the same model undivided."""
    plan = Plan(mesh=Mesh(tensor=tensor, replicate=world.size // tensor), sequence_parallel=in_slices)
    world = world.arranged(plan.mesh)
    whole = built(case)
    divided = copy.deepcopy(whole)
    if world.place.tensor:  # which is then overwritten by what the first rank of the group has
        with torch.no_grad():
            next(divided.parameters()).add_(1.0)
    apply_tensor(divided, world, plan, tensor_plan or {})
    assert any(isinstance(parameter, DTensor) for parameter in divided.parameters())
    assert [n for n, _ in divided.named_parameters()] == [n for n, _ in whole.named_parameters()]
    batch = batch_for(case)
    differences = {}
    for _ in range(2):  # gradients of two micro-batches add up
        losses = [loss_of(model(**batch)) for model in (whole, divided)]
        for loss in losses:
            loss.backward()
        differences["loss"] = difference(losses[1], losses[0])
    settle_gradients(divided.parameters())
    for (name, expected), found in zip(whole.named_parameters(), divided.parameters(), strict=True):
        assert expected.requires_grad == found.requires_grad, name
        if expected.grad is None:
            assert found.grad is None, name
            continue
        assert found.grad is not None, name
        if isinstance(found, DTensor):
            assert isinstance(found.grad, DTensor), name
            assert found.grad.placements == found.placements, name
        differences[name] = difference(full(found.grad), expected.grad)
    if case in REFERENCES:
        with torch.no_grad():
            evaluated = [model.eval()(**batch) for model in (whole, divided)]
            assert evaluated[0].count == evaluated[1].count
            assert evaluated[0].correct == evaluated[1].correct
            given = {key: value for key, value in batch.items() if key not in ("targets", "labels")}
            differences["logits"] = difference(divided(**given), whole(**given))
    return differences


def difference(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach(), expected.detach()
    scale = expected.abs().max().clamp(min=0.1)  # the gradient of a key's bias is zero but for rounding
    return float((found - expected).abs().max() / scale)


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def inputs_of_blocks(world: World, in_slices: bool) -> list[tuple[int, ...]]:
    """The shapes of what the blocks of a gpt are given."""
    model, _ = divided_gpt(world, in_slices)
    shapes: list[tuple[int, ...]] = []
    for block in model.get_submodule("blocks").children():
        block.register_forward_pre_hook(lambda block, inputs: shapes.append(tuple(inputs[0].shape)))
    model(**batch_for("gpt"))
    return shapes


def parts_of_sequence(world: World, in_slices: bool) -> tuple[int, int]:
    return part_of_sequence(*divided_gpt(world, in_slices))


def too_short(world: World) -> str:
    model, _ = divided_gpt(world, in_slices=True)
    try:
        model(torch.zeros(1, 6, dtype=torch.long))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def divided_gpt(world: World, in_slices: bool) -> tuple[nn.Module, World]:
    plan = Plan(mesh=Mesh(tensor=world.size), sequence_parallel=in_slices)
    world = world.arranged(plan.mesh)
    model = built("gpt")
    apply_tensor(model, world, plan, {})
    return model, world


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    return MixtralForCausalLM(MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=2))


def on_meta(world: World, case: str) -> dict[str, Any]:
    """A model that is divided before it has memory: nothing but shapes, and a tied weight that is one."""
    plan = Plan(mesh=Mesh(tensor=world.size))
    world = world.arranged(plan.mesh)
    use, options = REFERENCES[case]
    with torch.device("meta"):
        model = catalogue.build(use, options)
    apply_tensor(model, world, plan, {})
    return {
        name: tuple(parameter.to_local().shape) if isinstance(parameter, DTensor) else tuple(parameter.shape)
        for name, parameter in model.named_parameters()
        if parameter.is_meta
    }


def refused(world: World, make: Callable[[], nn.Module], tensor_plan: Mapping[str, str]) -> str:
    plan = Plan(mesh=Mesh(tensor=world.size))
    try:
        apply_tensor(make(), world.arranged(plan.mesh), plan, tensor_plan)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
