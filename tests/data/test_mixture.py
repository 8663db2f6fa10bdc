"""`mixture`: sources that are opened, checked and read as one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradus.data.loader import Indexed, Loader, Slices
from gradus.data.orders import order_for
from gradus.data.source import open_source, source_options
from gradus.data.sources.mixture import MixedSource
from gradus.planner.resolve import resolved
from gradus.schema.errors import InputError
from gradus.schema.recipe import Recipe
from gradus.training.building import open_data

TOKENS = {"use": "synthetic-tokens", "samples": 50, "weight": 3}
STDLIB = {"use": "stdlib-text", "max_bytes": 4000, "weight": 7}
CPU = torch.device("cpu")


def mixture(split: Any = "train", **options: Any) -> MixedSource:
    given = {"sources": {"made": TOKENS, "real": STDLIB}, "context": 8, **options}
    source = open_source("mixture", given, split, 1)
    assert isinstance(source, MixedSource)
    return source


def recipe(data: dict[str, Any], **changes: Any) -> Recipe:
    document = {
        "name": "mixed",
        "model": {"use": "gpt", "layers": 1, "width": 16, "heads": 2, "context": 8},
        "data": {"use": "mixture", **data},
        "batch": 10,
        "steps": 4,
        "optimizer": {"use": "adamw", "lr": 0.01},
        **changes,
    }
    return Recipe.from_document(document)


def of_sources(source: MixedSource, numbers: np.ndarray) -> list[dict[str, torch.Tensor]]:
    """Each sample from its own source, finished alone."""
    found = []
    for number in numbers.tolist():
        owner = int(np.searchsorted(source.starts, number, side="right")) - 1
        own = Indexed(source.sources[owner])
        found.append(own.finish(own.fetch(np.array([number - source.starts[owner]])), torch.float32))
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_has_the_samples_of_the_sources_in_their_places(workers: int) -> None:
    source = mixture()
    data = Indexed(source)
    order = source.order(1, 10, "full")
    assert order is not None
    loader = Loader(data, Slices(10, 5, 2, 0, 40), CPU, torch.float32, seed=1, order=order, workers=workers)
    for micro in loader.micro_batches(0, 4):
        numbers = order.at(np.arange(micro.position, micro.position + 5))
        expected = of_sources(source, numbers)
        for name in ("tokens", "targets"):
            found = micro.inputs[name]  # type: ignore[call-overload]
            assert torch.equal(found, torch.cat([sample[name] for sample in expected]))


def test_images_are_normalised_by_their_own_source() -> None:
    few = {"use": "synthetic-images", "samples": 20, "classes": 10, "weight": 1}
    source = mixture(sources={"digits": {"use": "digits", "weight": 1}, "made": few}, size=8, channels=1, context=None)
    data = Indexed(source)
    numbers = np.array([0, source.length - 1, 3, source.length - 2])
    images, labels = data.finish(data.fetch(numbers), torch.float32)  # type: ignore[misc]
    alone = of_sources(source, numbers)
    assert torch.equal(images, torch.cat([sample[0] for sample in alone]))  # type: ignore[index]
    assert torch.equal(labels, torch.cat([sample[1] for sample in alone]))  # type: ignore[index]


def test_text_and_conversations_may_be_mixed_if_the_model_sees_the_same_of_both(tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_text("\n".join(json.dumps({"prompt": "a", "answer": "b"}) for _ in range(20)))
    chat = {"use": "chat", "path": str(tmp_path / "chat.jsonl"), "weight": 1}
    source = mixture(sources={"chat": chat, "real": {**STDLIB, "weight": 1}}, context=32)
    data = Indexed(source)
    batch = data.finish(data.fetch(np.array([0, source.length - 1])), torch.float32)
    assert batch["tokens"].shape == batch["targets"].shape == (2, 32)  # type: ignore[call-overload]


def test_a_recipe_trains_with_the_models_context_and_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text("some words in a file " * 40)
    (tmp_path / "recipe.yaml").write_text(
        """
        name: mixed
        model: {use: gpt, layers: 1, width: 16, heads: 2, context: 8}
        data:
          use: mixture
          sources:
            code: {use: text, path: texts, weight: 0.3}
            made: {use: synthetic-tokens, samples: 50, weight: 0.7}
          schedule: [{at: 2, weights: {code: 1, made: 0}}]
        batch: 10
        steps: 4
        optimizer: {use: adamw, lr: 0.01}
        """
    )
    found = resolved(Recipe.load(tmp_path / "recipe.yaml"))
    assert found.data.options["sources"]["code"]["path"] == str(tmp_path / "texts")
    assert found.model.options["vocabulary"] == 256
    train = open_data(found, "train")
    assert train is not None
    assert isinstance(train.source, MixedSource)
    assert (train.source.tokens_per_sample, train.source.vocabulary) == (8, 256)
    order = order_for(train, found.data, 1, 10)
    owners = np.searchsorted(train.source.starts, order.at(np.arange(40)), side="right") - 1
    assert np.bincount(owners[:20]).tolist() == [6, 14]
    assert np.bincount(owners[20:], minlength=2).tolist() == [20, 0]
    validation = open_data(found, "validation")
    assert validation is not None
    assert (
        validation.length
        == 5 + open_source("text", {"path": str(tmp_path / "texts"), "context": 8}, "validation", 1).length
    )


def test_limit_and_validation_are_those_of_every_source_unless_it_says_otherwise() -> None:
    sources = {"a": TOKENS, "b": {**TOKENS, "validation": 0, "limit": 7}}
    source = mixture(sources=sources, limit=5, validation=0.5)
    assert [part.length for part in source.sources] == [5, 7]
    assert mixture("validation", sources=sources, validation=0.5).length == 25
    with pytest.raises(InputError, match="nothing is held out of any source"):
        mixture("validation", validation=0)
    assert open_data(resolved(recipe({"sources": sources, "validation": 0})), "validation") is None


def test_validation_counts_every_sample_the_same() -> None:
    source = mixture("validation")
    assert source.order(1, 10, "full") is None
    assert source.length == 5 + open_source("stdlib-text", {"max_bytes": 4000, "context": 8}, "validation", 1).length


def test_the_notes_of_sources_are_told_with_their_names(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("some words in a file " * 40)
    source = mixture(sources={"made": TOKENS, "file": {"use": "text", "path": str(tmp_path), "weight": 1}})
    assert str(source.note).startswith("file: 1 documents are too few")


def test_the_content_of_a_mixture_is_identified_by_that_of_all_its_sources() -> None:
    source = mixture()
    assert source.fingerprint is None
    for part, name in zip(source.sources, ("x", "y"), strict=True):
        part.fingerprint = name
    parts = dict(zip(source.names, source.sources, strict=True))
    both, turned = MixedSource(parts, []), MixedSource(dict(reversed(parts.items())), [])
    assert both.fingerprint is not None
    assert both.fingerprint != turned.fingerprint


@pytest.mark.parametrize(
    ("change", "said", "field"),
    [
        ({"sources": {}}, "data.sources: found {}", "data.sources"),
        (
            {"sources": {"a": {**TOKENS, "weight": None}}},
            "data.sources.a.weight: missing, allowed: 0 or more; every source has a weight",
            "data.sources.a.weight",
        ),
        ({"sources": {"a": {**TOKENS, "weight": -1}}}, "data.sources.a.weight: found -1", "data.sources.a.weight"),
        ({"sources": {"a": {**TOKENS, "weight": 0}}}, "data.sources: all weights are 0", "data.sources"),
        ({"sources": {"a": {"weight": 1}}}, "data.sources.a.use: missing", "data.sources.a.use"),
        (
            {"sources": {"a": {"use": "syntetic-tokens", "weight": 1}}},
            "data.sources.a.use: unknown data source 'syntetic-tokens'; did you mean 'synthetic-tokens'?",
            "data.sources.a.use",
        ),
        (
            {"sources": {"a": {"use": "mixture", "weight": 1}}},
            "data.sources.a.use: a mixture of mixtures",
            "data.sources.a.use",
        ),
        (
            {"sources": {"a": {"use": "mine.py:data", "weight": 1}}},
            "data.sources.a.use: found 'mine.py:data', but only built-in sources can be mixed",
            "data.sources.a.use",
        ),
        (
            {"sources": {"a": {"use": "text", "path": "/nowhere", "weight": 1}}},
            "data.sources.a.path: /nowhere does not exist",
            "data.sources.a.path",
        ),
        (
            {"sources": {"a": {**TOKENS, "sampels": 3}}},
            "data.sources.a.sampels: unknown option of source 'synthetic-tokens': 'sampels'; did you mean 'samples'?",
            "data.sources.a.sampels",
        ),
        (
            {"sources": {"a": TOKENS, "b": {"use": "digits", "weight": 1}}},
            "data.sources: some have text and some have images: a: text; b: images",
            "data.sources",
        ),
        (
            {"sources": {"a": TOKENS, "b": {**TOKENS, "context": 4}}},
            "data.sources: they have different samples, and cannot be in one batch: a: tokens int64 [8], targets int64 "
            "[8]; b: tokens int64 [4], targets int64 [4]",
            "data.sources",
        ),
        (
            {"sources": {"a": {**TOKENS, "weight": 1e-7}, "b": TOKENS}},
            "data.sources: 'a' has a share of 3.3e-08, one sample in 30,000,001",
            "data.sources",
        ),
        (
            {"schedule": [{"at": 4, "weights": {"made": 1}}]},
            "data.schedule.0.weights.real: missing, allowed: 0 or more; every source has a weight",
            "data.schedule.0.weights.real",
        ),
        (
            {"schedule": [{"at": 4, "weights": {"made": 1, "reel": 1}}]},
            "data.schedule.0.weights.reel: unknown source 'reel'; did you mean 'real'?",
            "data.schedule.0.weights.reel",
        ),
        (
            {"schedule": [{"step": 4, "weights": {}}]},
            "data.schedule.0.step: unknown key 'step'. Allowed: at, weights",
            "data.schedule.0.step",
        ),
        (
            {"schedule": [{"at": 4, "weights": {"made": 1, "real": 1}}, {"at": 4, "weights": {"made": 1, "real": 1}}]},
            "data.schedule.1.at: found 4, allowed: a step after 4",
            "data.schedule",
        ),
        ({"schedule": [{"at": 4}]}, "data.schedule.0.weights: found None", "data.schedule"),
    ],
)
def test_what_cannot_be_mixed_is_refused_by_name(change: dict[str, Any], said: str, field: str) -> None:
    with pytest.raises(InputError) as caught:
        mixture(**change)
    assert caught.value.message.startswith(said), caught.value.message
    assert caught.value.details["field"] == field


def test_sources_with_different_tokenizers_cannot_be_mixed(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("some words in a file " * 400)
    file = {"use": "text", "path": str(tmp_path), "weight": 1}
    with pytest.raises(InputError, match="they have different tokenizers"):
        mixture(sources={"a": file, "b": {**file, "tokenizer": {"train": "bpe", "vocabulary": 300}}})


def test_nothing_is_loaded_to_check_a_mixture(tmp_path: Path) -> None:
    """The launcher does: it has no torch, and text is tokenised later."""
    (tmp_path / "one.txt").write_text("some words in a file " * 40)
    options = source_options(
        "mixture", {"sources": {"a": {"use": "text", "path": str(tmp_path), "weight": 1}}, "context": 8}
    )
    assert (options.content, options.token_count(), options.image_shape()) == ("text", 256, None)
