"""Named configurations: every way to split a model, each to be compared with one process."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

TEXT = {"use": "stdlib-text", "max_bytes": 200_000}
GPT = {"use": "gpt", "layers": 4, "width": 32, "heads": 4, "kv_heads": 2, "context": 32}
EXPERTS = {"experts": 8, "experts_per_token": 2, "expert_inner": 16}
LATENT = {
    **{key: value for key, value in GPT.items() if key != "kv_heads"},
    "positions": "rotary",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
    "attention": "latent",
    "query_rank": 16,
    "kv_rank": 8,
    "rotary_width": 4,
    "value_width": 6,
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"model": GPT, "data": TEXT},
    "gpt llama": {
        "model": {**GPT, "positions": "rotary", "norm": "rmsnorm", "activation": "swiglu", "tied": False},
        "data": TEXT,
    },
    "gpt experts": {
        "model": {**GPT, **EXPERTS, "shared_experts": 1, "dense_layers": 1, "balance": "loss"},
        "data": TEXT,
    },
    "gpt latent": {"model": {**LATENT, **EXPERTS, "balance": "bias", "router": "sigmoid"}, "data": TEXT},
    "bert": {"model": {"use": "bert", "layers": 2, "width": 32, "heads": 4, "context": 32}, "data": TEXT},
    "vit": {
        "model": {"use": "vit", "layers": 2, "width": 32, "heads": 4, "image": 16, "patch": 4},
        "data": {"use": "synthetic-images", "size": 16, "samples": 200},
    },
    "resnet18": {
        "model": {"use": "resnet18", "classes": 10, "small_input": True},
        "data": {"use": "synthetic-images", "size": 16, "samples": 200},
        "optimizer": {"use": "sgd", "lr": 0.02, "momentum": 0.9},
    },
}
MODELS["gpt odd"] = {"model": {**GPT, "vocabulary": 259}, "data": TEXT}  # classes that no number of ranks divides
MODELS["user"] = {
    "model": {"use": f"{Path(__file__).with_name('tensor_cases.py')}:UserModel", "vocabulary": 256},
    "data": {**TEXT, "context": 16},
    "tensor_plan": {
        "layers.*.[qkv]": "colwise",
        "layers.*.o": "rowwise",
        "layers.*.up": "colwise",
        "layers.*.down": "rowwise",
        "embed": "rowwise",
        "out": "colwise_gather",
    },
}
BATCH, STEPS = 8, 10


@dataclass(frozen=True)
class Configuration:
    """A plan, and the model that it is tried on. The name is what the documentation calls it."""

    name: str
    plan: dict[str, Any]
    model: str = "gpt"
    changes: dict[str, Any] = field(default_factory=dict)  # of the recipe
    slow: bool = False

    @property
    def ranks(self) -> int:
        mesh = {"replicate": 1, "pipeline": 1, "shard": 1, "context": 1, "tensor": 1, **self.plan.get("mesh", {})}
        return (
            int(mesh["replicate"])
            * int(mesh["pipeline"])
            * int(mesh["shard"])
            * int(mesh["context"])
            * int(mesh["tensor"])
        )

    def recipe(self) -> dict[str, Any]:
        return document(self.model, self.changes, {"precision": "fp64", **self.plan})

    def reference(self) -> dict[str, Any]:
        """The same recipe for one process, without anything that splits or saves."""
        return document(self.model, self.changes, {"precision": "fp64"})


def document(model: str, changes: dict[str, Any], plan: dict[str, Any]) -> dict[str, Any]:
    optimizer = {"use": "adamw", "lr": 3e-3, "warmup": 3, "decay": "cosine", "weight_decay": 0.1, "clip": 1.0}
    base = {"name": "split", "batch": BATCH, "steps": STEPS, "seed": 7, "optimizer": optimizer}
    return {**base, **MODELS[model], **changes, "plan": {"checkpoint_every": 1000, **plan}}


def _mesh(**ways: int) -> dict[str, Any]:
    return {"mesh": ways}


WHOLE_SEQUENCES = {"sequence_parallel": False}
_DEEP = {"model": {**GPT, "layers": 8}}
_INTERLEAVED = {"pipeline_schedule": "interleaved", "stages_per_rank": 2}
PIPELINES: list[Configuration] = [
    *(
        Configuration(f"pipeline 2, {schedule}", _mesh(pipeline=2) | {"accumulate": 4, "pipeline_schedule": schedule})
        for schedule in ("gpipe", "1f1b", "zero-bubble")
    ),
    Configuration("pipeline 2, interleaved", _mesh(pipeline=2) | {"accumulate": 4} | _INTERLEAVED),
    *(
        Configuration(f"pipeline 4, {schedule}", _mesh(pipeline=4) | {"accumulate": 4, "pipeline_schedule": schedule})
        for schedule in ("gpipe", "1f1b", "zero-bubble")
    ),
    Configuration("pipeline 4, interleaved", _mesh(pipeline=4) | {"accumulate": 8} | _INTERLEAVED, changes=_DEEP),
    Configuration(
        "pipeline 2, bert, recompute", _mesh(pipeline=2) | {"accumulate": 2, "recompute": "full"}, model="bert"
    ),
    Configuration("pipeline 2, vit", _mesh(pipeline=2) | {"accumulate": 4}, model="vit"),
    Configuration(
        "pipeline 2, interleaved, recompute, evaluating",
        _mesh(pipeline=2) | {"accumulate": 4, "recompute": "selective"} | _INTERLEAVED,
        changes={"evaluate": {"every": 3, "batches": 1}},
    ),
    Configuration("pipeline 2 × shard 2", _mesh(pipeline=2, shard=2) | {"zero": 3, "accumulate": 2}),
    Configuration(
        "pipeline 2 × shard 2, interleaved, recompute",
        _mesh(pipeline=2, shard=2) | {"zero": 2, "accumulate": 2, "recompute": "full"} | _INTERLEAVED,
    ),
    Configuration(
        "pipeline 2 × shard 2, zero-bubble",
        _mesh(pipeline=2, shard=2) | {"zero": 1, "accumulate": 4, "pipeline_schedule": "zero-bubble"},
    ),
    Configuration("pipeline 2 × replicate 2", _mesh(pipeline=2, replicate=2) | {"accumulate": 2}),
    Configuration("pipeline 2 × tensor 2", _mesh(pipeline=2, tensor=2) | {"accumulate": 2}),
    Configuration(
        "pipeline 2 × tensor 2, bert, recompute",
        _mesh(pipeline=2, tensor=2) | {"accumulate": 4, "recompute": "full"},
        model="bert",
    ),
    Configuration("pipeline 2 × context 2", _mesh(pipeline=2, context=2) | {"accumulate": 2}, model="gpt llama"),
    Configuration("tensor 2 × pipeline 2 × replicate 2", _mesh(replicate=2, pipeline=2, tensor=2) | {"accumulate": 2}),
]


_ALL: list[Configuration] = [
    *PIPELINES,
    Configuration("tensor 2", _mesh(tensor=2)),
    Configuration("tensor 4", _mesh(tensor=4), changes={"model": {**GPT, "heads": 8, "kv_heads": 4}}),
    Configuration("tensor 2, whole sequences", _mesh(tensor=2) | WHOLE_SEQUENCES, model="gpt llama"),
    Configuration("tensor 4, bert", _mesh(tensor=4), model="bert"),
    Configuration("tensor 4, bert, whole sequences", _mesh(tensor=4) | WHOLE_SEQUENCES, model="bert", slow=True),
    Configuration("tensor 4, vit", _mesh(tensor=4), model="vit"),
    Configuration("tensor 2 × shard 2", _mesh(tensor=2, shard=2) | {"zero": 3}),
    Configuration(
        "tensor 2 × shard 2, odd vocabulary, recompute, accumulate 2",
        _mesh(tensor=2, shard=2) | {"zero": 2, "accumulate": 2, "recompute": "full"},
        model="gpt odd",
    ),
    Configuration("tensor 2, recompute selective", _mesh(tensor=2) | {"recompute": "selective"}, model="gpt llama"),
    Configuration("tensor 2 × shard 2, bert", _mesh(tensor=2, shard=2) | {"zero": 1}, model="bert", slow=True),
    Configuration("tensor 2 × replicate 2, vit", _mesh(tensor=2, replicate=2), model="vit"),
    Configuration("tensor 2 × context 2", _mesh(tensor=2, context=2), model="gpt llama"),
    Configuration("tensor 4, a model of one's own", _mesh(tensor=4), model="user"),
    Configuration(
        "tensor 2 × shard 2, a model of one's own", _mesh(tensor=2, shard=2) | {"zero": 3}, model="user", slow=True
    ),
    Configuration("expert 2", _mesh(shard=2, expert=2) | {"zero": 3}, model="gpt experts"),
    Configuration("expert 4", _mesh(shard=4, expert=4) | {"zero": 3}, model="gpt experts"),
    Configuration("expert 2 × shard 2", _mesh(shard=4, expert=2) | {"zero": 3}, model="gpt experts"),
    Configuration(
        "expert 4, balanced by bias, accumulate 2",
        _mesh(shard=4, expert=4) | {"zero": 2, "accumulate": 2},
        model="gpt latent",
    ),
    Configuration(
        "expert 2 × shard 2, balanced by bias, accumulate 2",
        _mesh(shard=4, expert=2) | {"zero": 1, "accumulate": 2},
        model="gpt latent",
    ),
    Configuration(
        "context 2 × shard 2 × expert 4",
        _mesh(shard=2, context=2, expert=4) | {"zero": 3},
        model="gpt latent",
    ),
    Configuration(
        "expert 2, recompute full",
        _mesh(shard=2, expert=2) | {"zero": 3, "recompute": "full"},
        model="gpt experts",
    ),
    Configuration(
        "pipeline 2 × expert 2",
        _mesh(pipeline=2, shard=2, expert=2) | {"zero": 2, "accumulate": 4},
        model="gpt latent",
    ),
    Configuration(
        "pipeline 2 × expert 2, zero-bubble, recompute full",
        _mesh(pipeline=2, shard=2, expert=2)
        | {"zero": 1, "accumulate": 4, "recompute": "full", "pipeline_schedule": "zero-bubble"},
        model="gpt latent",
    ),
    Configuration("replicate 2 × expert 2", _mesh(replicate=2, shard=2, expert=2) | {"zero": 3}, model="gpt experts"),
    Configuration("replicate 2, gpt experts", _mesh(replicate=2), model="gpt experts"),
    Configuration(
        "zero 3 over 2, gpt experts, recompute selective",
        _mesh(shard=2) | {"zero": 3, "recompute": "selective"},
        model="gpt experts",
    ),
    Configuration("context 2", _mesh(context=2), model="gpt llama"),
    Configuration("context 4", _mesh(context=4), model="gpt llama"),
    Configuration("context 4, learned positions, accumulate 2", _mesh(context=4) | {"accumulate": 2}),
    Configuration("context 4, bert", _mesh(context=4), model="bert"),
    Configuration("context 4 in a ring", _mesh(context=4) | {"context_attention": "ring"}, model="gpt llama"),
    Configuration("context 2 × shard 2", _mesh(context=2, shard=2) | {"zero": 3}, model="gpt llama"),
    Configuration(
        "context 2 × shard 2, bert, accumulate 2",
        _mesh(context=2, shard=2) | {"zero": 1, "accumulate": 2},
        model="bert",
    ),
    Configuration("context 2, recompute full", _mesh(context=2) | {"recompute": "full"}, model="gpt llama"),
    Configuration(
        "context 2 × shard 2, recompute selective",
        _mesh(context=2, shard=2) | {"zero": 3, "recompute": "selective"},
        model="gpt llama",
    ),
    Configuration("replicate 2 × context 2", _mesh(replicate=2, context=2)),
    Configuration("replicate 2", _mesh(replicate=2)),
    Configuration("replicate 4, accumulate 2", _mesh(replicate=4) | {"accumulate": 2}),
    *(Configuration(f"zero {z} over 2", _mesh(shard=2) | {"zero": z}) for z in (1, 2, 3)),
    *(
        Configuration(f"zero {z} over 4, accumulate 2", _mesh(shard=4) | {"zero": z, "accumulate": 2})
        for z in (1, 2, 3)
    ),
    Configuration("replicate 2 × shard 2", _mesh(replicate=2, shard=2) | {"zero": 3}),
    Configuration("replicate 2 × shard 2, accumulate 2", _mesh(replicate=2, shard=2) | {"zero": 2, "accumulate": 2}),
    Configuration(
        "zero 2 over 2, evaluating",
        _mesh(shard=2) | {"zero": 2},
        changes={"evaluate": {"every": 3, "batches": 1}},
    ),
    Configuration(
        "zero 3 over 2, lamb", _mesh(shard=2) | {"zero": 3}, changes={"optimizer": {"use": "lamb", "lr": 0.01}}
    ),
    Configuration(
        "zero 2 over 2, lars", _mesh(shard=2) | {"zero": 2}, changes={"optimizer": {"use": "lars", "lr": 1.0}}
    ),
    Configuration("zero 3 over 2, adapters", _mesh(shard=2) | {"zero": 3}, changes={"lora": {"rank": 2}}),
    Configuration(
        "zero 1 over 4, adapters beside a model of one's own, accumulate 2",
        _mesh(shard=4) | {"zero": 1, "accumulate": 2},
        model="user",
        changes={"lora": {"rank": 2}},
    ),
    Configuration(
        "zero 2 over 2, parts of a model of one's own frozen",
        _mesh(shard=2) | {"zero": 2},
        model="user",
        changes={"freeze": ["embed.*", "layers.0.*"]},
    ),
    Configuration(
        "replicate 2, recompute selective, accumulate 2",
        _mesh(replicate=2) | {"recompute": "selective", "accumulate": 2},
    ),
    Configuration(
        "zero 3 over 2, recompute of one block",
        _mesh(shard=2) | {"zero": 3, "recompute": "full", "recompute_blocks": 1},
    ),
    Configuration("zero 3 over 2, recompute full", _mesh(shard=2) | {"zero": 3, "recompute": "full"}),
    Configuration(
        "replicate 2, resnet18, recompute full",
        _mesh(replicate=2) | {"recompute": "full"},
        model="resnet18",
        slow=True,
    ),
    Configuration("zero 3 over 2, resnet18", _mesh(shard=2) | {"zero": 3}, model="resnet18", slow=True),
]

# Combinations beyond what each way on two ranks, and two ways together on four, need to be shown: `make test-slow`.
_FURTHER = {
    "pipeline 4, zero-bubble",
    "pipeline 4, interleaved",
    "pipeline 2 × tensor 2",
    "tensor 2 × pipeline 2 × replicate 2",
    "tensor 4",
    "expert 4",
    "expert 2 × shard 2",
    "context 4",
    "context 4, bert",
    "context 2 × shard 2",
    "replicate 4, accumulate 2",
    "zero 1 over 4, accumulate 2",
    "zero 2 over 4, accumulate 2",
    "pipeline 4, gpipe",
    "pipeline 4, 1f1b",
    "pipeline 2, vit",
    "pipeline 2 × shard 2, interleaved, recompute",
    "pipeline 2 × shard 2, zero-bubble",
    "pipeline 2 × replicate 2",
    "pipeline 2 × tensor 2, bert, recompute",
    "pipeline 2 × context 2",
    "tensor 4, vit",
    "tensor 4, bert",
    "tensor 4, a model of one's own",
    "tensor 2, recompute selective",
    "tensor 2 × shard 2, odd vocabulary, recompute, accumulate 2",
    "tensor 2 × replicate 2, vit",
    "tensor 2 × context 2",
    "expert 4, balanced by bias, accumulate 2",
    "expert 2 × shard 2, balanced by bias, accumulate 2",
    "context 2 × shard 2 × expert 4",
    "pipeline 2 × expert 2",
    "pipeline 2 × expert 2, zero-bubble, recompute full",
    "replicate 2 × expert 2",
    "context 4, learned positions, accumulate 2",
    "context 2 × shard 2, bert, accumulate 2",
    "context 2 × shard 2, recompute selective",
    "replicate 2 × context 2",
    "zero 3 over 4, accumulate 2",
    "replicate 2 × shard 2, accumulate 2",
    "zero 2 over 2, lars",
    "zero 3 over 2, lamb",
    "zero 1 over 4, adapters beside a model of one's own, accumulate 2",
}
assert {configuration.name for configuration in _ALL} >= _FURTHER
CONFIGURATIONS = [replace(c, slow=c.slow or c.name in _FURTHER) for c in _ALL]
