"""The configurations that the planner's accuracy is measured on: recipes with everything in their plan fixed.

A third of them is held out: no constant in gradus is fitted on them. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gradus.planner.resolve import resolved
from gradus.schema.recipe import Recipe

Document = dict[str, Any]

MODELS = Path(__file__).resolve().with_name("case_models.py")
ADAMW: Document = {"use": "adamw", "lr": 1e-4, "weight_decay": 0.1, "clip": 1.0}
SGD: Document = {"use": "sgd", "lr": 1e-2, "momentum": 0.9}
BF16: Document = {"precision": "bf16"}
IMAGENET: Document = {"use": "synthetic-images", "size": 224, "classes": 1000}
STEPS = 10**6  # nobody waits for the end


@dataclass(frozen=True)
class Case:
    """One configuration. Its plan is what is given here, and the defaults of `Plan` for the rest."""

    name: str
    model: Document
    batch: int
    plan: Document = field(default_factory=dict)  # without micro_batch: all samples at once
    data: Document | None = None  # None: made-up tokens, as long as the model's context
    optimizer: Document = field(default_factory=lambda: ADAMW)
    more: Document = field(default_factory=dict)  # further keys of the recipe
    held_out: bool = False

    def document(self) -> Document:
        data = self.data or {"use": "synthetic-tokens"}
        plan = {"micro_batch": self.batch, "checkpoint_every": 10**9, **self.plan}
        return {
            "name": "case",
            "model": self.model,
            "data": {**data, "validation": 0},
            "batch": self.batch,
            "steps": STEPS,
            "optimizer": self.optimizer,
            "plan": plan,
            **self.more,
        }

    def recipe(self) -> Recipe:
        """The recipe; its `plan` is the whole plan."""
        return resolved(Recipe.from_document(self.document(), file=f"case {self.name}"))

    def compiled(self) -> Case:
        return replace(self, name=f"{self.name} compiled", plan={**self.plan, "compile": True})


@dataclass(frozen=True)
class CapCase:
    """A case on a GPU with a little less or a little more memory than the case was measured to need."""

    case: str
    of_peak: float  # the limit, as a fraction of `needed_bytes`

    @property
    def name(self) -> str:
        return f"{self.case} at {self.of_peak:.2f}"


def huggingface(task: str, **config: Any) -> Document:
    return {"use": "huggingface", "task": task, "config": config}


def own(model: str, **options: Any) -> Document:
    return {"use": f"{MODELS}:{model}", **options}


def tokens(context: int, vocabulary: int) -> Document:
    return {"use": "synthetic-tokens", "context": context, "vocabulary": vocabulary}


BERT_BASE: Document = {"use": "bert", "layers": 12, "width": 768, "heads": 12, "vocabulary": 30_522, "dropout": 0.1}
GPT_350M: Document = {"use": "gpt", "layers": 24, "width": 1024, "heads": 16, "context": 1024, "vocabulary": 50_304}
LLAMA_STYLE: Document = {"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu", "bias": False}
GPT_1B_GROUPED: Document = {
    "use": "gpt",
    "layers": 16,
    "width": 2048,
    "heads": 32,
    "kv_heads": 8,
    "inner": 8192,
    "context": 2048,
    "vocabulary": 32_000,
    "tied": False,
    **LLAMA_STYLE,
}
GPT_EXPERTS: Document = {
    "use": "gpt",
    "layers": 12,
    "width": 768,
    "heads": 12,
    "context": 1024,
    "vocabulary": 50_304,
    **LLAMA_STYLE,
    "experts": 8,
    "experts_per_token": 2,
    "expert_inner": 1536,
    "balance": "loss",
}
GPT_LATENT: Document = {
    "use": "gpt",
    "layers": 12,
    "width": 1024,
    "heads": 16,
    "context": 2048,
    "vocabulary": 32_000,
    **LLAMA_STYLE,
    "attention": "latent",
    "query_rank": 512,
    "kv_rank": 256,
}
HF_LLAMA = huggingface(
    "causal-lm",
    model_type="llama",
    vocab_size=128_256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
)
HF_BERT = huggingface("masked-lm", model_type="bert")  # the defaults of transformers are BERT-base
HF_GPT2 = huggingface("causal-lm", model_type="gpt2", vocab_size=50_257, n_positions=1024)
HF_VIT = huggingface("image-classification", model_type="vit", image_size=224, num_labels=1000)
HF_CONVNEXT = huggingface("image-classification", model_type="convnext", image_size=224, num_labels=1000)
HF_CONVNEXT_BASE = huggingface(
    "image-classification",
    model_type="convnext",
    image_size=224,
    num_labels=1000,
    hidden_sizes=[128, 256, 512, 1024],
    depths=[3, 3, 27, 3],
)
HF_T5 = huggingface(
    "seq2seq-lm",
    model_type="t5",
    vocab_size=32_128,
    d_model=768,
    d_ff=3072,
    num_layers=12,
    num_heads=12,
    decoder_start_token_id=0,
)

CASES: tuple[Case, ...] = (
    # convolutions
    Case("simple-cnn b128 fp32", {"use": "simple-cnn"}, 128, {}, {"use": "synthetic-images"}, SGD),
    Case("simple-cnn b4096 bf16", {"use": "simple-cnn"}, 4096, BF16, {"use": "synthetic-images"}, SGD),
    Case("resnet50 b64 fp32", {"use": "resnet50"}, 64, {}, IMAGENET, SGD),
    Case("resnet50 b256 bf16 nhwc", {"use": "resnet50"}, 256, {**BF16, "channels_last": True}, IMAGENET, SGD),
    Case("resnet18 b512 tf32", {"use": "resnet18"}, 512, {"precision": "tf32"}, IMAGENET, SGD),
    Case(
        "resnet101 b128 bf16 nhwc",
        {"use": "resnet101"},
        128,
        {**BF16, "channels_last": True},
        IMAGENET,
        SGD,
        held_out=True,
    ),
    # vision transformers
    Case("vit-b16 b256 bf16", {"use": "vit-b16"}, 256, BF16, IMAGENET),
    Case("vit-b16 b64 fp32", {"use": "vit-b16"}, 64, {}, IMAGENET, held_out=True),
    # encoders
    Case("bert b64 c512 bf16", {**BERT_BASE, "context": 512}, 64, BF16),
    Case("bert b256 c128 fp16", {**BERT_BASE, "context": 128}, 256, {"precision": "fp16"}, held_out=True),
    # decoders of three sizes
    Case("gpt2 b8 bf16 sgd", {"use": "gpt2-124m"}, 8, BF16, optimizer=SGD),
    Case("gpt2 b32 bf16", {"use": "gpt2-124m"}, 32, BF16),
    Case("gpt2 b32 bf16 full", {"use": "gpt2-124m"}, 32, {**BF16, "recompute": "full"}),
    Case("gpt2 b32 bf16 selective", {"use": "gpt2-124m"}, 32, {**BF16, "recompute": "selective"}, held_out=True),
    Case("gpt2 b8 fp32", {"use": "gpt2-124m"}, 8),
    Case("gpt2 b16 tf32", {"use": "gpt2-124m"}, 16, {"precision": "tf32"}, held_out=True),
    Case("gpt2 b16 fp16", {"use": "gpt2-124m"}, 16, {"precision": "fp16"}),
    Case("gpt2 b16 bf16 dropout", {"use": "gpt2-124m", "dropout": 0.1}, 16, BF16),
    Case("gpt2 b64 micro 16 bf16", {"use": "gpt2-124m"}, 64, {**BF16, "micro_batch": 16, "accumulate": 4}),
    Case("gpt2 b4 c8192 bf16", {"use": "gpt2-124m", "context": 8192, "positions": "rotary"}, 4, BF16),
    Case("gpt-350m b16 bf16", GPT_350M, 16, BF16),
    Case("gpt-350m b8 c2048 dropout", {**GPT_350M, "context": 2048, "dropout": 0.1}, 8, BF16, held_out=True),
    Case("gpt-1.3b b8 bf16", {"use": "gpt-1.3b"}, 8, BF16),
    Case("gpt-1.3b b8 bf16 full", {"use": "gpt-1.3b"}, 8, {**BF16, "recompute": "full"}, held_out=True),
    Case("gpt-1.3b b8 bf16 selective", {"use": "gpt-1.3b"}, 8, {**BF16, "recompute": "selective"}),
    Case(
        "gpt-1.3b b4 lora",
        {"use": "gpt-1.3b"},
        4,
        BF16,
        more={"lora": {"rank": 16, "targets": ["blocks.*"]}},
        held_out=True,
    ),
    Case("gpt-1b grouped b4 bf16", GPT_1B_GROUPED, 4, BF16),
    Case("gpt experts b8 bf16", GPT_EXPERTS, 8, BF16),
    Case("gpt latent b4 bf16", GPT_LATENT, 4, BF16, held_out=True),
    # Hugging Face
    Case("hf llama-1b b4 bf16", HF_LLAMA, 4, BF16),
    Case("hf bert b32 c512 bf16", HF_BERT, 32, BF16, tokens(512, 30_522)),
    Case("hf vit b128 bf16", HF_VIT, 128, BF16, IMAGENET),
    Case("hf convnext-tiny b256 bf16", HF_CONVNEXT, 256, BF16, IMAGENET),
    Case("hf convnext-base b64 tf32", HF_CONVNEXT_BASE, 64, {"precision": "tf32"}, IMAGENET, held_out=True),
    Case("hf t5-base b16 c512 bf16", HF_T5, 16, BF16, tokens(512, 32_128)),
    Case("hf gpt2 b8 bf16", HF_GPT2, 8, BF16, held_out=True),
    # models of users
    Case("unet b128 bf16", own("UNet"), 128, BF16, {"use": "synthetic-images", "size": 64}),
    Case("unet b32 fp32 nhwc", own("UNet"), 32, {"channels_last": True}, {"use": "synthetic-images", "size": 64}),
    Case("lstm b128 bf16", own("LSTMLanguageModel"), 128, BF16, tokens(256, 10_000)),
    Case("lstm b64 fp32", own("LSTMLanguageModel"), 64, {}, tokens(256, 10_000), held_out=True),
    Case("encoder b128 bf16", own("EncoderClassifier"), 128, BF16, tokens(256, 20_000)),
    Case("mixer b256 bf16", own("Mixer"), 256, BF16, IMAGENET, more={"loss": "cross-entropy"}, held_out=True),
    Case(
        "perceptron b8192 tf32",
        own("Perceptron"),
        8192,
        {"precision": "tf32"},
        {"use": "synthetic-images"},
        more={"loss": "cross-entropy"},
    ),
)

# What takes longest to compile comes last: whoever measures may run out of time.
COMPILED: tuple[Case, ...] = tuple(
    case.compiled()
    for name in (
        "gpt2 b32 bf16",
        "gpt-1.3b b8 bf16",
        "vit-b16 b256 bf16",
        "bert b64 c512 bf16",
        "hf llama-1b b4 bf16",
        "simple-cnn b4096 bf16",
        "gpt-1b grouped b4 bf16",
        "mixer b256 bf16",
        "gpt2 b32 bf16 full",
        "resnet50 b256 bf16 nhwc",
        "unet b128 bf16",
    )
    for case in CASES
    if case.name == name
)

# Two ranks that share the one GPU and talk through gloo. Half of the batch is each one's.
SHARDED: tuple[Case, ...] = tuple(
    Case(
        name,
        {"use": "gpt2-124m"},
        16,
        {**BF16, "micro_batch": 8, "ranks_per_gpu": 2, **plan},
        held_out=held_out,
    )
    for name, plan, held_out in (
        ("gpt2 replicate 2", {"mesh": {"replicate": 2}}, False),
        ("gpt2 zero 1 shard 2", {"mesh": {"shard": 2}, "zero": 1}, True),
        ("gpt2 zero 2 shard 2", {"mesh": {"shard": 2}, "zero": 2}, False),
        ("gpt2 zero 3 shard 2", {"mesh": {"shard": 2}, "zero": 3}, False),
    )
)

CAPS: tuple[CapCase, ...] = tuple(
    CapCase(case, of_peak)
    for case, fractions in (
        ("gpt2 b32 bf16", (0.93, 1.04, 1.15)),
        ("resnet50 b256 bf16 nhwc", (0.87, 1.08)),
        ("resnet50 b64 fp32", (0.93, 1.15)),
        ("vit-b16 b256 bf16", (0.97, 1.08)),
        ("bert b64 c512 bf16", (0.93, 1.04)),
        ("gpt-1.3b b8 bf16", (0.97, 1.04)),
        ("hf llama-1b b4 bf16", (0.87, 1.08)),
        ("hf convnext-tiny b256 bf16", (0.93, 1.15)),
        ("unet b128 bf16", (0.97, 1.15)),
    )
    for of_peak in fractions
)


def named(name: str) -> Case:
    return next(case for case in (*CASES, *COMPILED, *SHARDED) if case.name == name)


def needed_bytes(row: dict[str, Any]) -> float | None:
    """Of what was measured of a case: the most that torch had allocated from the second step on; of ranks, the fullest.

    Without the first step, in which cuDNN tries its algorithms. That it does with less where less is free is what the
    limits for `resnet50 b64 fp32` are there to show.
    """
    if "ranks" in row:
        return max(
            (max(rank["peaks_bytes"][1:]) for rank in row["ranks"] if rank["peak_bytes"] is not None), default=None
        )
    if row.get("steady_peak_bytes") is None:
        return None
    return float(max(row["second_step_peak_bytes"], row["steady_peak_bytes"]) - row["before_bytes"])


def capped(case: Case, limit_bytes: float) -> Case:
    """The case on a GPU with so much memory."""
    return replace(case, plan={**case.plan, "memory_limit_gib": limit_bytes / 2**30})


def small(case: Case) -> Case:
    """The same in miniature: any machine runs it in a moment. What kind of thing is done stays the same."""
    plan = dict(case.plan)
    plan["precision"] = {"tf32": "fp32"}.get(plan.get("precision", "fp32"), plan.get("precision", "fp32"))
    batch = 2 * plan.get("accumulate", 1) * plan.get("mesh", {}).get("replicate", plan.get("mesh", {}).get("shard", 1))
    if "micro_batch" in plan:
        plan["micro_batch"] = 2
    model, use = dict(case.model), str(case.model["use"]).rpartition(":")[2]
    kind = f"hf {model['config']['model_type']}" if use == "huggingface" else use
    changes = _SMALL.get(kind, _SMALL_GPT)
    if use == "huggingface":
        model["config"] = {**model["config"], **changes}
    else:
        model |= {key: value for key, value in changes.items() if key != "kv_heads" or "kv_heads" in model}
        model |= {key: value for key, value in _SMALL_EXTRAS.items() if key in model}
    data = dict(case.data or {})
    if data.get("use") == "synthetic-images":
        data |= {"size": 32, "classes": 10}
    elif data:
        data |= {"context": 16, "vocabulary": 96}
    return replace(case, batch=batch, plan=plan, model=model, data=data or None)


_SMALL_GPT: Document = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "context": 16, "vocabulary": 96}
_SMALL_EXTRAS: Document = {"inner": 64, "expert_inner": 32, "query_rank": 16, "kv_rank": 8}
_SMALL: dict[str, Document] = {
    "simple-cnn": {},
    "resnet18": {"small_input": True, "classes": 10},
    "resnet50": {"small_input": True, "classes": 10},
    "resnet101": {"small_input": True, "classes": 10},
    "vit-b16": {"image": 32, "patch": 8, "layers": 2, "width": 32, "heads": 4, "classes": 10},
    "bert": {"layers": 2, "width": 32, "heads": 4, "context": 16, "vocabulary": 96},
    "gpt": _SMALL_GPT,
    "hf llama": {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
    },
    "hf gpt2": {"vocab_size": 96, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "hf bert": {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 16,
    },
    "hf t5": {"vocab_size": 96, "d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8},
    "hf vit": {
        "image_size": 32,
        "patch_size": 8,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "num_labels": 10,
    },
    "hf convnext": {"image_size": 32, "hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1], "num_labels": 10},
    "UNet": {"width": 32, "levels": 3, "blocks": 1, "heads": 2},
    "LSTMLanguageModel": {"vocabulary": 96, "width": 32},
    "EncoderClassifier": {"vocabulary": 96, "width": 32, "layers": 2, "heads": 4, "context": 16, "classes": 10},
    "Mixer": {"image": 32, "patch": 8, "width": 32, "layers": 2, "classes": 10},
    "Perceptron": {"width": 64, "layers": 2},
}
