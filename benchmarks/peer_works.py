"""The works that gradus and its peers are compared on: what is trained, in which segments, and what the aim is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from gpu_fp8 import LLAMA_3B

from gradus.data.sources import cifar10
from gradus.data.sources.image import ImageFormat, MemoryImages
from gradus.data.split import whole

MANY_STEPS = 10**7  # more than any segment comes to: the benchmark says where a run pauses
RAW_ONLY = ("raw",)
ALL_PEERS = ("raw", "fabric", "accelerate")
ADAMW = {"use": "adamw", "lr": 3e-4, "warmup": 100, "weight_decay": 0.1, "betas": [0.9, 0.95], "clip": 1.0}
SGD = {"use": "sgd", "lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}
LLAMA_1B = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
    "vocab_size": 128_256,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Work:
    """One row of the table: a recipe, from which every contestant has its model, samples and optimizer."""

    key: str
    title: str
    recipe: dict[str, Any]
    steps: int  # of a segment
    unit: str
    goal: str
    per_sample: int = 1  # units in a sample
    peers: tuple[str, ...] = ALL_PEERS
    measures: Literal["rate", "steps", "first step"] = "rate"
    channels_last: bool = False  # for peers; gradus decides by itself
    plain: bool = False  # fp32 and eager, for peers as well
    own_loop: bool = False  # whether gradus is also measured in a loop of its user's own

    @property
    def log_every(self) -> int:
        return max(1, self.steps // 10)

    @property
    def less_is_better(self) -> bool:
        return self.measures == "first step"

    def document(self) -> dict[str, Any]:
        """The recipe as gradus reads it. What a segment must not meet is a checkpoint."""
        plan = {**self.recipe.get("plan", {}), "checkpoint_every": 10**9}
        common = {"name": self.key, "steps": MANY_STEPS, "log_every": self.log_every, "seed": 1}
        return {**common, **self.recipe, "plan": plan}

    def figure(self, seconds: float, steps: int) -> float:
        """What the table shows of a segment."""
        if self.measures == "rate":
            return steps * self.recipe["batch"] * self.per_sample / seconds
        return steps / seconds if self.measures == "steps" else seconds


class RandomImages(MemoryImages):
    """uint8 images in memory, as a user with a small dataset has them."""

    def __init__(self, samples: int, size: int, classes: int) -> None:
        generator = np.random.default_rng(0)
        images = generator.integers(0, 256, (samples, 3, size, size), dtype=np.uint8)
        labels = generator.integers(0, classes, samples, dtype=np.int64)
        form = ImageFormat((3, size, size), classes, mean=(0.5,) * 3, deviation=(0.25,) * 3)
        super().__init__(images, labels, whole(samples), form)


def random_images(samples: int, size: int, classes: int, split: str) -> RandomImages | None:
    return RandomImages(samples, size, classes) if split == "train" else None


def works(small: bool, folder: Path) -> list[Work]:
    """All of them; `small` ones keep their kind and lose their size. Their data is to be made in `folder`."""
    found = [*_gpts(small, folder), *_huggingface(small, folder), *_images(small, folder), *_overheads(small, folder)]
    return [replace(work, title=f"(small) {work.title}", goal="") for work in found] if small else found


def _gpts(small: bool, folder: Path) -> list[Work]:
    gpt2, gpt, llama = {"use": "gpt2-124m"}, {"use": "gpt-1.3b"}, LLAMA_3B
    fp8 = {} if small else {"precision": "fp8"}  # which no CPU has

    def work(key: str, title: str, model: dict[str, Any], size: tuple[int, int, int], goal: str, **more: Any) -> Work:
        """`size`: context, batch and steps of a segment."""
        context, batch, steps = (32, 2, 4) if small else size
        shrunk = {"layers": 2, "width": 32, "heads": 2, "inner": 64, "vocabulary": 512} if small else {}
        shrunk |= {"kv_heads": 1} if small and "kv_heads" in model else {}
        recipe = _language({**model, **shrunk, "context": context}, folder, context, batch, more.pop("plan", {}))
        return Work(key, title, recipe, steps, "tokens/s", goal, per_sample=context, **more)

    whole_vocabulary = {**gpt2, "vocabulary": 50_257}
    return [
        work(
            "gpt2", "GPT-2 124M, context 1024, batch 32", gpt2, (1024, 32, 50), "≥ 1.15×, memory ≤ 0.7×", own_loop=True
        ),
        work(
            "gpt2-50257",
            "GPT-2 124M with its own 50,257 tokens",
            whole_vocabulary,
            (1024, 32, 50),
            "≥ 1.15×, memory ≤ 0.7×",
        ),
        work("gpt-1.3b", "GPT 1.3B, context 2048, batch 8", gpt, (2048, 8, 20), "≥ 1.10×, memory ≤ 0.75×"),
        work(
            "gpt-1.3b-fp8",
            "GPT 1.3B, gradus in fp8",
            gpt,
            (2048, 8, 20),
            "≥ 1.25×, loss within 0.5 % at 500 steps",
            plan=fp8,
        ),
        work(
            "llama-3b-fp8",
            "Llama-style 3B, context 2048, batch 6, gradus in fp8",
            llama,
            (2048, 6, 10),
            "≥ 1.25×, loss within 0.5 % at 500 steps",
            plan=fp8,
        ),
        work(
            "llama-3b-8k",
            "Llama-style 3B, context 8192, batch 2",
            llama,
            (8192, 2, 10),
            "≥ 50 % MFU",
            peers=RAW_ONLY,
        ),
    ]


def _huggingface(small: bool, folder: Path) -> list[Work]:
    peers = ("raw", "accelerate")
    tiny = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    of_llama = {**tiny, "num_key_value_heads": 1, "vocab_size": 512, "max_position_embeddings": 32} if small else {}
    llama = {"use": "huggingface", "task": "causal-lm", "config": LLAMA_1B | of_llama}
    size, classes = (32, 10) if small else (224, 1000)
    settings = {"model_type": "vit", "image_size": size, "num_labels": classes, **(tiny if small else {})}
    vit = {"use": "huggingface", "task": "image-classification", "config": settings}
    return [
        Work(
            "hf-llama-1b",
            "transformers' Llama 1B, context 2048, batch 8",
            _language(llama, folder, 32 if small else 2048, 2 if small else 8),
            4 if small else 20,
            "tokens/s",
            "≥ 1.05×",
            per_sample=32 if small else 2048,
            peers=peers,
            own_loop=True,
        ),
        Work(
            "hf-vit-b",
            "transformers' ViT-B/16, 224², batch 128",
            _pictures(vit, 8 if small else 1024, size, classes, 2 if small else 128, ADAMW),
            4 if small else 50,
            "images/s",
            "≥ 1.05×",
            peers=peers,
        ),
    ]


def _images(small: bool, folder: Path) -> list[Work]:
    resnet = {"use": "resnet18", "small_input": True} if small else {"use": "resnet50"}
    images, cnn = (64 if small else 50_000), {"use": "simple-cnn"}
    stored = {"use": "cifar10", "path": str(folder / "cifar10"), "augment": "standard"}
    batch, steps = (8, 4) if small else (4096, 200)
    tuned = {"channels_last": True, "unit": "images/s", "steps": steps}
    eager = {"plan": {"precision": "fp32", "compile": False}}
    return [
        Work(
            "resnet-50",
            "ResNet-50 224², batch 256, SGD",
            _pictures(resnet, 16 if small else 2048, 32 if small else 224, 1000, 4 if small else 256, SGD),
            4 if small else 50,
            "images/s",
            "≥ 1.05×",
            channels_last=True,
            own_loop=True,
        ),
        Work(
            "simple-cnn-augmented",
            "simple-cnn, 50,000 images of 32², shuffled, flipped and cropped, batch 4096, SGD",
            recipe={"model": cnn, "data": stored, "batch": batch, "optimizer": SGD},
            goal="≥ 500,000",
            peers=RAW_ONLY,
            **tuned,
        ),
        Work(
            "simple-cnn",
            "simple-cnn, 50,000 images of 32², shuffled, batch 4096, SGD",
            recipe=_pictures(cnn, images, 32, 10, batch, SGD),
            goal="",
            peers=RAW_ONLY,
            **tuned,
        ),
        Work(
            "simple-cnn-eager",
            "simple-cnn, batch 128, fp32, eager, SGD",
            _pictures(cnn, images, 32, 10, 8 if small else 128, SGD) | eager,
            4 if small else 300,
            "images/s",
            "",
            peers=RAW_ONLY,
            plain=True,
        ),
    ]


def _overheads(small: bool, folder: Path) -> list[Work]:
    text = {"use": "stdlib-text", "context": 64, "validation": 0.0}  # in memory: no loader is in the way
    tiny = {"use": "gpt", "layers": 4, "width": 64, "heads": 2, "context": 64, "vocabulary": 256}
    gpt2 = {"use": "gpt2-124m"} | ({"layers": 1, "width": 32, "heads": 2, "context": 32} if small else {})
    return [
        Work(
            "tiny",
            "a GPT of 4 layers of width 64, context 64, batch 4",
            _language(tiny, folder, 64, 4) | {"data": text},
            4 if small else 300,
            "steps/s",
            "≥ 1.5×",
            peers=RAW_ONLY,
            measures="steps",
        ),
        Work(
            "first-step",
            "until the first step of GPT-2 124M is done, new process, empty compile caches",
            _language(gpt2, folder, 32 if small else 1024, 2 if small else 32),
            1,
            "s",
            "≤ 0.6×",
            peers=RAW_ONLY,
            measures="first step",
        ),
    ]


def _language(
    model: dict[str, Any], folder: Path, context: int, batch: int, plan: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Random tokens: speed does not depend on which they are, and small vocabularies need small ones."""
    vocabulary = model.get("vocabulary") or model.get("config", {}).get("vocab_size") or 50_257
    tokens = folder / f"tokens-below-{min(vocabulary, 50_257)}.bin"
    data = {"use": "tokens", "path": str(tokens), "context": context, "validation": 0.0}
    return {"model": model, "data": data, "batch": batch, "optimizer": ADAMW, "plan": plan or {}}


def _pictures(
    model: dict[str, Any], samples: int, size: int, classes: int, batch: int, optimizer: dict[str, Any]
) -> dict[str, Any]:
    data = {"use": f"{__file__}:random_images", "samples": samples, "size": size, "classes": classes}
    return {"model": model, "data": data, "batch": batch, "optimizer": optimizer}


def make_data(work: Work, small: bool) -> None:
    """The files that the work's recipe names, unless they are there."""
    data = work.recipe["data"]
    if data["use"] == "tokens" and not Path(data["path"]).exists():
        below = int(Path(data["path"]).stem.rpartition("-")[2])
        count = 50_000 if small else 20_000_000
        np.random.default_rng(0).integers(0, below, count, dtype=np.uint16).tofile(data["path"])
    if data["use"] == "cifar10" and not Path(data["path"]).exists():
        _make_cifar10(Path(data["path"]))


def _make_cifar10(folder: Path) -> None:
    """Noise in the files of CIFAR-10: as many images as it has, of its size."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    for name in (name for names in cifar10.FILES.values() for name in names):
        records = generator.integers(0, 256, (cifar10.RECORDS_PER_FILE, cifar10.RECORD_BYTES), dtype=np.uint8)
        records[:, 0] %= cifar10.FORM.classes
        records.tofile(folder / name)
